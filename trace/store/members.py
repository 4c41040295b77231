"""What belongs to one step of an experiment, as the index knows it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import orjson

from trackway.samplers.tail import Outcome

from ..model import Trajectory

_PORTION = 500
_FAILED = ("error", "died", "running")
"""States of trajectories that failed; of one that is complete, ``running`` says that its process died."""


class StepKey(NamedTuple):
    """A step of an experiment, training or validation; of trajectories without a step, all of them."""

    project: str | None
    experiment: str | None
    validate: bool
    step: int | None

    @classmethod
    def of(cls, trajectory: Trajectory) -> StepKey:
        """Give the step that a trajectory belongs to."""
        key = trajectory.key
        validate = bool(key and key.validate)
        return cls(trajectory.project, trajectory.experiment, validate, key.step if key else None)

    def __str__(self) -> str:
        return orjson.dumps(list(self)).decode()


class Member(NamedTuple):
    """A trajectory of a step.

    Attributes:
        last_ns: when it ended, or began where no end is known, nanoseconds since 1970.
    """

    outcome: Outcome
    last_ns: int


_STEP = "step IS ? AND project IS ? AND experiment IS ? AND validate = ?"


_MEMBER = "trace_id, sample_index, rollout_n, attempt, status, truncated, reward, coalesce(end_ns, start_ns)"


def _values(key: StepKey) -> tuple[int | str | None, ...]:
    return key.step, key.project, key.experiment, key.validate


class Members:
    """The trajectories of one index, by their steps.

    Args:
        db: the index's database.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def keys(self, trace_ids: Iterable[str]) -> dict[str, StepKey]:
        """Give the step that each of some trajectories belongs to."""
        rows = self._among("trace_id, project, experiment, validate, step", trace_ids)
        return {
            trace_id: StepKey(project, experiment, bool(validate), step)
            for trace_id, project, experiment, validate, step in rows
        }

    def _among(self, columns: str, trace_ids: Iterable[str]) -> Iterator[tuple[Any, ...]]:
        rest = iter(trace_ids)
        while some := list(islice(rest, _PORTION)):
            places = ", ".join("?" for _ in some)
            yield from self._db.execute(
                f"SELECT {columns} FROM trajectories WHERE trace_id IN ({places})", some
            )

    def mark(self, key: StepKey) -> tuple[int, int]:
        """Give what changes whenever something of a step is recorded."""
        # A row that changes is written anew, behind all others.
        query = f"SELECT count(*), max(rowid) FROM trajectories WHERE {_STEP}"
        mark: tuple[int, int] = self._db.execute(query, _values(key)).fetchone()
        return mark

    def unfinished(self, key: StepKey) -> set[str]:
        """Give the trace ids of a step whose root has not ended."""
        query = f"SELECT trace_id FROM trajectories WHERE {_STEP} AND NOT ended"
        return {trace_id for (trace_id,) in self._db.execute(query, _values(key))}

    def has_later(self, key: StepKey) -> bool:
        """Say whether a later step of the same experiment, training or validation, goes on from this one.

        It has to have begun after all that is known of this one: where a training goes back to a checkpoint,
        there are later steps from before.
        """
        if key.step is None:
            return False
        (begun,) = self._db.execute(
            f"SELECT max(start_ns) FROM trajectories WHERE {_STEP}", _values(key)
        ).fetchone()
        row = self._db.execute(
            "SELECT 1 FROM trajectories "
            "WHERE step > ? AND project IS ? AND experiment IS ? AND start_ns > ? LIMIT 1",
            (key.step, key.project, key.experiment, begun),
        ).fetchone()
        return row is not None

    def of(self, key: StepKey) -> list[Member]:
        """Give everything that belongs to a step, what has not ended included."""
        rows = self._db.execute(f"SELECT {_MEMBER} FROM trajectories WHERE {_STEP}", _values(key))
        return list(map(_member, rows))

    def some(self, trace_ids: Iterable[str]) -> list[Member]:
        """Give some trajectories."""
        return list(map(_member, self._among(_MEMBER, trace_ids)))


def _member(row: tuple[Any, ...]) -> Member:
    trace_id, sample, rollout_n, attempt, status, truncated, reward, last_ns = row
    outcome = Outcome(trace_id, sample, rollout_n, attempt, status in _FAILED, bool(truncated), reward)
    return Member(outcome, last_ns)
