"""What is worth recording, and what is worth showing."""

from .generations import Joined, join_scores, pick_generations
from .hashing import unit_interval
from .head import HeadSampler

__all__ = ["HeadSampler", "Joined", "join_scores", "pick_generations", "unit_interval"]
