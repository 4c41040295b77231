"""What the model generated in a validation, as rows that every tool can show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from trackway.samplers import join_scores, pick_generations

from ..model import TrajectoryKey
from .values import number

_PROMPT = ("prompt", "input", "question")
_COMPLETION = ("completion", "output", "response")
_NAMED = {"key", "step", "sample_index", "rollout_n", "uid", "validate", "attempt", *_PROMPT, *_COMPLETION}


def table(
    rows: Iterable[Mapping[str, Any]], scores: Any, samples: int, step: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Choose and straighten the rows of one validation.

    Args:
        rows, scores: see ``Tracker.log_generations``.
        samples: how many samples are shown, see ``trackway.samplers.pick_generations``.
        step: of the validation.

    Returns:
        The rows, each with ``sample``, ``rollout``, ``trajectory`` (the text of its key; None when the row
        names no sample), ``prompt``, ``completion`` and the scores. A column of scores holds numbers and
        None if there is a number in it, else texts and None. And what was no number in a column of such:
        ``row``, ``column``, ``value`` of each.

    Raises:
        ValueError: a row has neither prompt nor completion.
    """
    given = [dict(row) for row in rows]
    if scores is not None:
        given = join_scores([{"step": step, **row} for row in given], scores).rows
    chosen = pick_generations(given, samples, key=_sample)
    columns = list(dict.fromkeys(str(name) for row in chosen for name in row if name not in _NAMED))
    found: list[dict[str, Any]] = []
    for row in chosen:
        sample, rollout = row.get("sample_index", row.get("uid")), row.get("rollout_n")
        found.append(
            {
                "sample": None if sample is None else str(sample),
                "rollout": None if rollout is None else int(rollout),
                "trajectory": _trajectory(row, step),
                "prompt": _text(_first(row, _PROMPT)),
                "completion": _text(_first(row, _COMPLETION)),
            }
        )
    originals = []
    for column in columns:
        values = [row.get(column) for row in chosen]
        read = [_score(value) for value in values]
        numeric = any(value is not None for value in read)
        for position, value in enumerate(values):
            text = None if value is None else _text(value)
            found[position][column if column not in found[position] else f"{column}~score"] = (
                read[position] if numeric else text
            )
            if numeric and read[position] is None and text is not None:
                originals.append({"row": position, "column": column, "value": text})
    return found, originals


def _sample(row: Mapping[str, Any]) -> Any:
    for name in ("sample_index", "uid"):
        if row.get(name) is not None:
            return row[name]
    if row.get("key") is not None:
        return row["key"].sample_index
    return _text(_first(row, _PROMPT))


def _trajectory(row: Mapping[str, Any], step: int) -> str | None:
    if isinstance(row.get("key"), TrajectoryKey):
        return str(row["key"])
    sample = row.get("sample_index")
    if sample is None:
        return None
    return str(
        TrajectoryKey(step, sample, row.get("rollout_n") or 0, validate=bool(row.get("validate", True)))
    )


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in row:
            return row[name]
    if not any(name in row for name in (*_PROMPT, *_COMPLETION)):
        raise ValueError(
            f"a row has neither {' nor '.join(_PROMPT)}, only {', '.join(map(str, row)) or 'nothing'}"
        )
    return None


def _text(value: Any) -> str:
    """Give a text, or messages one below the other."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, Mapping) for each in value):
        return "\n".join(f"{each.get('role', '')}: {_text(each.get('content'))}" for each in value)
    return str(value)


def _score(value: Any) -> float | None:
    try:
        found = number(value)
    except Exception:
        return None
    return float(found) if found is not None and math.isfinite(found) else None
