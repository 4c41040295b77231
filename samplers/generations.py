"""Which validation samples a table shows, and which score belongs to which row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from trackway.trace.model import TrajectoryKey

from .hashing import unit_interval

_log = logging.getLogger(__name__)

T = TypeVar("T")

_KEY_COLUMNS = ("key", "step", "sample_index", "rollout_n", "validate", "attempt", "uid")


def sample_of(row: Any) -> Any:
    """Give the sample that a row, a ``TrajectoryKey``, a summary or a trajectory belongs to.

    An integer, a text, or a tuple of these names a sample itself. Of a mapping this is its
    ``sample_index``, else that of its ``key``, else its ``uid``.

    Raises:
        ValueError: nothing in it says so.
    """
    if isinstance(row, (str, tuple)) or hasattr(row, "__index__"):
        return row
    key = _get(row, "key")
    for sample in (_get(row, "sample_index"), getattr(key, "sample_index", None), _get(row, "uid")):
        if sample is not None:
            return sample
    raise ValueError(
        f"a {type(row).__name__} without sample_index, key or uid names no sample; "
        "pass key=, a function that gives the sample of a row"
    )


def _get(row: Any, name: str) -> Any:
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)


def pick_generations(
    rows: Iterable[T],
    n: int,
    *,
    seed: int = 0,
    key: Callable[[T], Any] = sample_of,
    shuffle: bool = True,
) -> list[T]:
    """Pick ``n`` samples (``log_val_generations``), with all their rows.

    Args:
        rows: one for each rollout, in any order.
        n: distinct samples; 0 picks none, -1 all.
        key: gives the sample of a row: an integer, a text, or a tuple of these.
        shuffle: choose by hash of the sample: whatever the step, the order of rows and the process,
            the same samples, and those of a smaller ``n`` are among those of a larger. False takes
            the first ``n`` to appear.

    Returns:
        The rows sample by sample, in the order of the choice.

    Raises:
        ValueError: ``n`` is below -1, or a row names no sample.
    """
    if n < -1:
        raise ValueError(f"n={n} is not allowed; expected a number of samples, 0 for none, or -1 for all")
    groups: dict[Any, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    samples = sorted(groups, key=lambda sample: unit_interval(seed, sample)) if shuffle else list(groups)
    return [row for sample in samples[: None if n == -1 else n] for row in groups[sample]]


@dataclass(frozen=True, slots=True)
class Joined:
    """Rows with their scores.

    Attributes:
        rows: in the order given, each with every column; what is not known is None.
        missing: the rows, by position, that got no score.
        unknown: keys of scores that no row has.
        duplicate: keys given twice, or that more than one row has; see ``join_scores``.
    """

    rows: list[dict[str, Any]]
    missing: tuple[int, ...]
    unknown: tuple[Any, ...]
    duplicate: tuple[Any, ...]


def join_scores(
    rows: Iterable[Mapping[str, Any]], scores: Mapping[Any, Any] | Iterable[Mapping[str, Any]]
) -> Joined:
    """Add scores, and whatever else came with them, to the rows they belong to; position never counts.

    A key is a ``TrajectoryKey``, ``(step, sample_index, rollout_n)``, or a ``uid`` of one rollout. Join
    again to add the columns of another source.

    Args:
        rows: each with ``key`` (a ``TrajectoryKey``), or ``step``, ``sample_index`` and ``rollout_n``, or
            ``uid``; ``validate`` and ``attempt`` tell apart what would have the same three.
        scores: key -> a number or a mapping of columns; or mappings of columns that hold their key as
            rows do. A number becomes the column ``score``.

    Returns:
        Of a key that is given twice the first counts; where several rows have it, none gets the
        score. Such keys and unknown ones are listed, and a warning is logged.
    """
    table = [dict(row) for row in rows]
    positions: dict[Any, list[int]] = {}
    for position, row in enumerate(table):
        for name in _row_names(row):
            positions.setdefault(name, []).append(position)

    unknown: list[Any] = []
    duplicate: list[Any] = []
    columns = {column: None for row in table for column in row}
    joined: dict[int, Any] = {}
    for name, values in _scores(scores, positions):
        columns |= dict.fromkeys(values)
        found = positions.get(name, [])
        if not found:
            unknown.append(name)
        elif len(found) > 1 or found[0] in joined:
            duplicate.append(name)
        else:
            joined[found[0]] = values
    if unknown or duplicate:
        _log.warning(
            "scores were not joined: %d whose key no row has (%s), %d whose key is there more than once (%s)",
            len(unknown),
            ", ".join(map(str, unknown[:3])),
            len(duplicate),
            ", ".join(map(str, duplicate[:3])),
        )
    return Joined(
        rows=[columns | row | joined.get(position, {}) for position, row in enumerate(table)],
        missing=tuple(position for position in range(len(table)) if position not in joined),
        unknown=tuple(dict.fromkeys(unknown)),
        duplicate=tuple(dict.fromkeys(duplicate)),
    )


def _scores(
    scores: Mapping[Any, Any] | Iterable[Mapping[str, Any]], known: Collection[Any]
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Give the key and the columns of each score."""
    if isinstance(scores, Mapping):
        pairs = (
            (name, value if isinstance(value, Mapping) else {"score": value})
            for name, value in scores.items()
        )
    else:
        pairs = ((_score_name(row, known), row) for row in scores)
    for name, columns in pairs:
        yield name, {column: value for column, value in columns.items() if column not in _KEY_COLUMNS}


def _row_names(row: Mapping[str, Any]) -> Iterator[Any]:
    """Give every key by which a score may mean this row."""
    key = row.get("key")
    if key is not None:
        yield key
        if isinstance(key, TrajectoryKey):
            yield (key.step, key.sample_index, key.rollout_n)
    elif (three := _three(row)) is not None:
        yield three
        # A row that does not say whether it is validation may be either.
        for validate in (bool(row["validate"]),) if "validate" in row else (False, True):
            yield TrajectoryKey(*three, validate=validate, attempt=row.get("attempt") or 0)
    if row.get("uid") is not None:
        yield row["uid"]


def _score_name(row: Mapping[str, Any], known: Collection[Any]) -> Any:
    """Give the key that a row of scores holds: the most exact one, or its uid where only that is known."""
    name, three = row.get("key"), _three(row)
    if name is None and three is not None:
        name = three
        if "validate" in row:
            name = TrajectoryKey(*three, validate=bool(row["validate"]), attempt=row.get("attempt") or 0)
    uid = row.get("uid")
    return uid if uid is not None and (name is None or (name not in known and uid in known)) else name


def _three(row: Mapping[str, Any]) -> tuple[Any, Any, Any] | None:
    step, sample = row.get("step"), row.get("sample_index")
    return None if step is None or sample is None else (step, sample, row.get("rollout_n") or 0)
