"""What is worth recording, and what is worth showing."""

from .generations import Joined, join_scores, pick_generations
from .hashing import unit_interval
from .head import HeadSampler
from .tail import Outcome, rank, take

__all__ = [
    "HeadSampler",
    "Joined",
    "Outcome",
    "join_scores",
    "pick_generations",
    "rank",
    "take",
    "unit_interval",
]
