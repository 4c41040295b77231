"""What lists show of a trajectory, as metadata of its trace in MLflow: a list need not load any spans.

Tags tell the rest: the step, the rollout, the status. They are texts, and cannot say whether a sample is
called ``17`` or ``"17"``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ..capture.snapshot import clean
from ..model import Trajectory
from ..store.rows import summary_of
from .text import cut, dumps

SUMMARY: Final = "trackway.summary"
"""Name of the metadata; a trace that has it was written by Trackway."""
COUNTS: Final = ("turns", "generations", "tool_calls", "tokens", "errors", "spans", "attached")
"""What the list ``counts`` counts; ``attached`` are those of the spans that ``attach`` made."""
PIECE: Final = 250
"""Characters of a value that MLflow's servers keep; what is longer is cut into several values."""
LIMIT: Final = 4000
"""Characters of all pieces together."""
_TEXT: Final = 1000
_LEFT_OUT = ("rewards", "error", "key")
"""What is left out first where the text is too long; tags and feedback tell nearly the same."""


def summary_metadata(trajectory: Trajectory, size: int) -> dict[str, str]:
    """Write what lists show of a trajectory: JSON, cut into pieces that MLflow's servers keep.

    Args:
        size: bytes of the trace's spans, as an estimate.
    """
    line = summary_of(trajectory)
    counted = {"attached": sum(span.kind == "attach" for span in trajectory.spans)}
    facts: dict[str, Any] = {
        "key": None if line.key is None else str(line.key),
        "error": _short(line.error),
        "rewards": [clean(name) for name in line.rewards],
        "counts": [counted[name] if name in counted else getattr(line, name) for name in COUNTS],
        "start_ns": line.start_ns,
        "end_ns": line.end_ns,
        "policy_version": _short(line.policy_version),
        "size": size,
    }
    text = dumps(facts)
    for name in _LEFT_OUT:
        if len(text) > LIMIT:
            del facts[name]
            text = dumps(facts)
    return {_name(start // PIECE): text[start : start + PIECE] for start in range(0, len(text), PIECE)}


def summary_facts(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Read what ``summary_metadata`` wrote, each count under its name; nothing where it wrote nothing."""
    pieces: list[str] = []
    while (piece := metadata.get(_name(len(pieces)))) is not None:
        pieces.append(piece)
    try:
        # Pieces of an earlier delivery may stand behind the end.
        facts, _ = json.JSONDecoder().raw_decode("".join(pieces))
        return {**facts, **dict(zip(COUNTS, facts["counts"], strict=True))}
    except (ValueError, TypeError, KeyError):
        return {}


def _name(piece: int) -> str:
    return f"{SUMMARY}.{piece}" if piece else SUMMARY


def _short(value: int | str | None) -> int | str | None:
    return cut(value, _TEXT) if isinstance(value, str) else value
