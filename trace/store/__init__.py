"""The store: a directory with the journal, its index and the cursors of the exporters."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ..model import Status, Summary, Trajectory, TrajectoryKey
from . import journal
from .assemble import DIED, assemble, unreadable
from .flight import Flight, InFlight
from .index import Index
from .members import Members, StepKey
from .rows import summary_of
from .status import CONFIG as CONFIG
from .status import Destination, StoreStatus, WriterStatus, status_of
from .steps import Steps

__all__ = [
    "Destination",
    "InFlight",
    "Steps",
    "Store",
    "StoreError",
    "StoreStatus",
    "TrajectoryNotFound",
    "WriterStatus",
    "matches",
    "open_store",
    "store_path",
]

DEFAULT = "trackway-store"
_TRACE_ID = re.compile(r"[0-9a-f]{6,32}")


class StoreError(Exception):
    """A store cannot be opened or read; the message says why and what to do."""


class TrajectoryNotFound(StoreError):  # noqa: N818 - says what it is, as FileNotFoundError does
    """No trajectory has that name; the message names near ones."""


def store_path(path: str | os.PathLike[str] | None = None) -> Path:
    """Give the directory that a path means: by default ``$TRACKWAY_STORE``, else ``./trackway-store``."""
    return Path(path or os.environ.get("TRACKWAY_STORE") or DEFAULT).expanduser().absolute()


def open_store(path: str | os.PathLike[str] | None = None) -> Store:
    """Open a store for reading.

    Args:
        path: its directory; by default ``$TRACKWAY_STORE``, else ``./trackway-store``.

    Raises:
        StoreError: there is no store.
    """
    folder = store_path(path)
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file; a store is a directory")
    if not folder.is_dir():
        raise StoreError(
            f"there is no store at {folder}: nothing was recorded there yet. "
            "Name another one with --store PATH, open_store(PATH) or TRACKWAY_STORE"
        )
    if not (folder / journal.FOLDER).is_dir():
        raise StoreError(f"{folder} is not a store: it has no folder named {journal.FOLDER!r}")
    return Store(folder)


class Store:
    """What was recorded, for reading. Every answer takes in what was written until then.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index = Index(path)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def query(
        self,
        *,
        step: int | Steps | None = None,
        sample: int | str | None = None,
        rollout: int | None = None,
        validate: bool | None = None,
        status: Status | None = None,
        experiment: str | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        limit: int | None = None,
        all_attempts: bool = False,
        newest: bool = False,
    ) -> Iterator[Summary]:
        """Find trajectories.

        Args:
            step: the trainer's global step, or several.
            sample: id of the sample; a text matches an integer of the same digits too.
            rollout: number of the rollout in its group.
            validate: only validation rollouts, or only training rollouts.
            status: ``ok``, ``error``, ``cancelled``, ``running`` or ``died``.
            experiment: only those filed under this experiment.
            min_reward, max_reward: bounds, included.
            limit: how many at most.
            all_attempts: also those that a later attempt of the same key has replaced.
            newest: the latest first; by default in order of step, sample and rollout, with the calls
                that ran outside of any trajectory at the end.

        Returns:
            Summaries, one for each trajectory.

        Raises:
            ValueError: there is no such status.
        """
        if status is not None and status not in get_args(Status):
            raise ValueError(f"status={status!r} is none of {', '.join(get_args(Status))}")
        # What runs is asked first: what ends meanwhile is then in the index.
        flight = Flight(self.path)
        self._index.refresh()
        where, values, among = ["1"], [], ""
        same = ("rollout_n", rollout), ("validate", validate), ("experiment", experiment)
        for column, value in same:
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        steps = Steps(((step, step),)) if isinstance(step, int) else step
        if steps is not None:
            among = steps.sql()
            where.append(f"({among})")
        if sample is not None:
            where.append("(sample_index = ? OR CAST(sample_index AS TEXT) = ?)")
            values += [sample, str(sample)]
        if min_reward is not None:
            where.append("reward >= ?")
            values.append(min_reward)  # type: ignore[arg-type]
        if max_reward is not None:
            where.append("reward <= ?")
            values.append(max_reward)  # type: ignore[arg-type]
        if not all_attempts:
            where.append("latest")
        if status in ("ok", "error", "cancelled"):
            where.append("status = ?")
            values.append(status)
        elif status is not None:
            among = "NOT ended" if status == "running" else "(NOT ended OR status = 'died')"
            where.append(among)
        order = "ORDER BY " + (
            "start_ns DESC"
            if newest
            else "named DESC, step, validate, sample_index, rollout_n, effective, start_ns"
        )
        try:
            rows = self._index.rows("WHERE " + " AND ".join(where), values, order, among=among)
        except OverflowError:  # a number beyond 64 bits, which nothing recorded has
            rows = []
        summaries = [summary if ended else self._current(summary, flight) for summary, ended, _ in rows]
        known = self._index.trace_ids(flight.traces)
        for trace_id in flight.traces:
            if trace_id not in known:
                trajectory = flight.trajectory(trace_id)
                summary = summary_of(trajectory)
                if matches(summary, steps, sample, rollout, validate, experiment, min_reward, max_reward):
                    summaries.append(summary)
        if status is not None:
            summaries = [summary for summary in summaries if summary.status == status]
        return iter(summaries if limit is None else summaries[:limit])

    def _current(self, summary: Summary, flight: Flight) -> Summary:
        writers = self._index.writers_of(summary.trace_id)
        if summary.status == "died" or flight.runs_in(summary.trace_id, writers):
            return summary
        return replace(summary, status="died", error=DIED, errors=max(1, summary.errors))

    def load(self, name: str | TrajectoryKey) -> Trajectory:
        """Read one trajectory.

        Args:
            name: its key, as a value or as text (the latest attempt, unless one is named: ``1/17/0@0``; of
                several experiments the one that ran last); or its trace id, or a beginning of that of at
                least six digits.

        Raises:
            TrajectoryNotFound: there is none, or the beginning of a trace id fits several.
        """
        flight = Flight(self.path)
        self._index.refresh()
        trace_id, attempt = self._find(name, flight)
        return self._load(trace_id, flight, attempt)

    def _load(self, trace_id: str, flight: Flight, attempt: int | None = None) -> Trajectory:
        spans = self._index.spans(trace_id)
        alive = bool(self._index.writers_of(trace_id) & flight.alive) or trace_id in flight.traces
        spans = [*flight.traces.get(trace_id, []), *spans]
        try:
            return assemble(spans, alive=alive, attempt=attempt)
        except Exception as error:
            if all(span.kind == "attach" for span in spans):
                gone = f"the journal files that held {trace_id} are gone from {self.path}"
                raise TrajectoryNotFound(gone) from None
            return unreadable(spans, error)

    def load_all(self, trace_ids: list[str]) -> list[Trajectory]:
        """Read the trajectories of these trace ids, as the index knows them."""
        flight = Flight(self.path)
        return [self._load(trace_id, flight, self._index.attempt(trace_id)) for trace_id in trace_ids]

    def _find(self, name: str | TrajectoryKey, flight: Flight) -> tuple[str, int | None]:
        text = str(name).strip()
        if isinstance(name, str) and _TRACE_ID.fullmatch(text):
            found = self._index.trace_ids_like(text) | {
                item for item in flight.traces if item.startswith(text)
            }
            if len(found) == 1:
                (trace_id,) = found
                return trace_id, self._index.attempt(trace_id)
            if found:
                raise TrajectoryNotFound(
                    f"{text} is the beginning of {len(found)} trace ids; give more digits"
                )
            raise TrajectoryNotFound(f"no trajectory in {self.path} has a trace id that begins with {text}")
        try:
            key = name if isinstance(name, TrajectoryKey) else TrajectoryKey.parse(text)
        except ValueError as error:
            raise TrajectoryNotFound(f"{error}; a trace id works as well") from None
        numbered = "@" in text
        candidates = [
            summary
            for summary in self._attempts(key, flight)
            if not numbered or summary.attempt == key.attempt
        ]
        exact = [summary for summary in candidates if summary.sample_index == key.sample_index]
        chosen = exact or candidates
        if not chosen:
            raise TrajectoryNotFound(f"no trajectory {text} in {self.path}{self._near(key)}")
        newest = max(chosen, key=lambda summary: summary.start_ns)
        same = [
            item for item in chosen if (item.project, item.experiment) == (newest.project, newest.experiment)
        ]
        last = max(same, key=lambda summary: summary.attempt)
        return last.trace_id, last.attempt

    def _attempts(self, key: TrajectoryKey, flight: Flight) -> list[Summary]:
        where = (
            "WHERE named AND step IS ? AND rollout_n = ? AND validate = ? AND CAST(sample_index AS TEXT) IS ?"
        )
        sample = None if key.sample_index is None else str(key.sample_index)
        try:
            values = (key.step, key.rollout_n, key.validate, sample)
            among = f"step = {key.step:d}" if isinstance(key.step, int) else ""
            rows = self._index.rows(where, values, "ORDER BY effective, start_ns", among=among)
        except OverflowError:  # a number beyond 64 bits, which nothing recorded has
            rows = []
        found = [summary for summary, _, _ in rows]
        known = {summary.trace_id for summary in found}
        for trace_id in flight.traces:
            if trace_id not in known:
                summary = summary_of(flight.trajectory(trace_id))
                if summary.key is not None and replace(summary.key, attempt=0) == replace(key, attempt=0):
                    found.append(summary)
        return found

    def _near(self, key: TrajectoryKey) -> str:
        names = {str(summary.key) for summary, _, _ in self._index.rows("WHERE named")}
        near = difflib.get_close_matches(str(key), names, n=3, cutoff=0.4)
        return f"; did you mean {', '.join(near)}?" if near else "; `trackway ls` lists them"

    def in_flight(self, **filters: Any) -> list[InFlight]:
        """List the rollouts that run now, the one that was silent longest first.

        Args:
            **filters: ``step``, ``sample``, ``rollout``, ``validate`` and ``experiment``, as in ``query``.

        Returns:
            What each of them does, for all attempts; a rollout is here about a second after it began.
        """
        found = self.query(**filters, status="running", all_attempts=True)
        flight = Flight(self.path)
        rows = [row for summary in found if (row := flight.look(summary, self._index)) is not None]
        return sorted(rows, key=lambda row: row.last_sign_ns)

    def status(self, deadline: float | None = None) -> StoreStatus:
        """Count what was recorded, exported, is pending and was dropped.

        Args:
            deadline: a time of ``time.monotonic``; what was not taken in by then counts as pending.

        Returns:
            The counts of this moment, in spans for the most part: of the store, of each destination and of
            each process that recorded.
        """
        return status_of(self.path, self._index, deadline)

    def due(self, destination: Mapping[str, int], deadline: float | None = None) -> list[tuple[str, int]]:
        """List what a destination lacks: complete trajectories, each with its state.

        The state is a number that changes with what a trajectory consists of; its lower 32 bits are its
        number of spans.

        Args:
            destination: what it has: trace id -> state.
            deadline: a time of ``time.monotonic`` after which no more of the journal is taken in.
        """
        # A writer that dies after this look may leave something that is not taken in yet.
        alive = {writer.name for writer in journal.writers(self.path) if writer.alive}
        self._index.refresh(deadline)
        due, abandoned = [], []
        for trace_id, state, complete in self._index.sizes():
            if destination.get(trace_id) != state:
                if complete:
                    due.append((trace_id, state))
                elif not self._index.writers_of(trace_id) & alive:
                    abandoned.append((trace_id, state))
        if abandoned:
            # Another process may be inside of its first call of such a rollout.
            running = Flight(self.path).traces
            due += [(trace_id, state) for trace_id, state in abandoned if trace_id not in running]
        return due

    @property
    def members(self) -> Members:
        """What belongs to one step, as far as it was taken in."""
        return self._index.members

    def begun(self) -> set[StepKey]:
        """Give the steps of the rollouts that run and of which the index knows nothing yet."""
        flight = Flight(self.path)
        fresh = flight.traces.keys() - self._index.trace_ids(flight.traces)
        return {StepKey.of(flight.trajectory(trace_id)) for trace_id in fresh}

    def unmatched(self) -> int:
        """Count what was attached to rollouts that are not in the store; it waits for them."""
        self._index.refresh()
        return self._index.unmatched()

    def unread(self) -> bool:
        """Say whether the journal holds lines that no reader has taken in yet."""
        return self._index.unread()


def matches(
    summary: Summary,
    steps: Steps | None,
    sample: Any,
    rollout: int | None,
    validate: bool | None,
    experiment: str | None,
    min_reward: float | None,
    max_reward: float | None,
) -> bool:
    """Say whether a summary is one that ``Store.query`` is asked for; None is no condition."""
    reward = summary.reward
    return (
        (steps is None or summary.step in steps)
        and (sample is None or str(summary.sample_index) == str(sample))
        and (rollout is None or summary.rollout_n == rollout)
        and (validate is None or summary.validate == validate)
        and (experiment is None or summary.experiment == experiment)
        and (min_reward is None or (reward is not None and reward >= min_reward))
        and (max_reward is None or (reward is not None and reward <= max_reward))
    )
