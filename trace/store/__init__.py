"""The store: a directory with the journal, its index and the cursors of the exporters."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import orjson

from ..model import Span, Status, Summary, Trajectory, TrajectoryKey
from . import journal, otlp
from .assemble import DIED, assemble, decode_span, unreadable
from .cursors import Cursors, Progress, cursor_name
from .index import Index, summary_of

__all__ = [
    "Destination",
    "Store",
    "StoreError",
    "StoreStatus",
    "TrajectoryNotFound",
    "open_store",
    "store_path",
]

DEFAULT = "trackway-store"
CONFIG = "config.json"
"""Settings of the process that recorded last, for the one that exports."""
_TRACE_ID = re.compile(r"[0-9a-f]{6,32}")


class StoreError(Exception):
    """A store cannot be opened or read; the message says why and what to do."""


class TrajectoryNotFound(StoreError):  # noqa: N818 - says what it is, as FileNotFoundError does
    """No trajectory has that name; the message names near ones."""


@dataclass(frozen=True, slots=True)
class Destination:
    """How far one destination is, in spans."""

    exported: int
    pending: int
    refused: int
    last_error: str | None = None


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """Counts of a store, in spans unless said otherwise; recorded = exported + pending + dropped.

    Attributes:
        recorded: spans that ended in any process, dropped ones included.
        exported: spans that every destination has; without a destination, those in the journal.
        pending: spans that some destination still lacks, refused ones included.
        dropped: spans that never reached the journal.
        trajectories: number of trajectories.
        in_flight: trajectories that run now.
        bytes: size of the journal.
        torn_lines: lines that a crash left unreadable.
    """

    recorded: int
    exported: int
    pending: int
    dropped: int
    trajectories: int = 0
    in_flight: int = 0
    bytes: int = 0
    torn_lines: int = 0
    writers_alive: int = 0
    writers_dead: int = 0
    troubles: int = 0
    dropped_by_reason: Mapping[str, int] = field(default_factory=dict)
    destinations: Mapping[str, Destination] = field(default_factory=dict)


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
        step: int | None = None,
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
            step: the trainer's global step.
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
        self._index.refresh()
        where, values = ["1"], []
        same = ("step", step), ("rollout_n", rollout), ("validate", validate), ("experiment", experiment)
        for column, value in same:
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
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
            where.append("NOT ended")
        order = "ORDER BY " + (
            "start_ns DESC"
            if newest
            else "named DESC, step, validate, sample_index, rollout_n, effective, start_ns"
        )
        flight = _Flight(self.path)
        try:
            rows = self._index.rows("WHERE " + " AND ".join(where), values, order)
        except OverflowError:  # a number beyond 64 bits, which nothing recorded has
            rows = []
        summaries = [summary if ended else self._current(summary, flight) for summary, ended, _ in rows]
        known = self._index.trace_ids(flight.traces)
        for trace_id in flight.traces:
            if trace_id not in known:
                trajectory = flight.trajectory(trace_id)
                summary = summary_of(trajectory)
                if _matches(summary, step, sample, rollout, validate, experiment, min_reward, max_reward):
                    summaries.append(summary)
        if status is not None:
            summaries = [summary for summary in summaries if summary.status == status]
        return iter(summaries if limit is None else summaries[:limit])

    def _current(self, summary: Summary, flight: _Flight) -> Summary:
        if self._index.writers_of(summary.trace_id) & flight.alive:
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
        self._index.refresh()
        flight = _Flight(self.path)
        trace_id, attempt = self._find(name, flight)
        return self._load(trace_id, flight, attempt)

    def _load(self, trace_id: str, flight: _Flight, attempt: int | None = None) -> Trajectory:
        spans = self._index.spans(trace_id)
        alive = bool(self._index.writers_of(trace_id) & flight.alive) or trace_id in flight.living
        spans = [*flight.traces.get(trace_id, []), *spans]
        try:
            return assemble(spans, alive=alive, attempt=attempt)
        except Exception as error:
            if not spans:
                gone = f"the journal files that held {trace_id} are gone from {self.path}"
                raise TrajectoryNotFound(gone) from None
            return unreadable(spans, error)

    def load_all(self, trace_ids: list[str]) -> list[Trajectory]:
        """Read the trajectories of these trace ids, as the index knows them."""
        flight = _Flight(self.path)
        return [self._load(trace_id, flight, self._index.attempt(trace_id)) for trace_id in trace_ids]

    def _find(self, name: str | TrajectoryKey, flight: _Flight) -> tuple[str, int | None]:
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

    def _attempts(self, key: TrajectoryKey, flight: _Flight) -> list[Summary]:
        where = (
            "WHERE named AND step IS ? AND rollout_n = ? AND validate = ? AND CAST(sample_index AS TEXT) IS ?"
        )
        sample = None if key.sample_index is None else str(key.sample_index)
        try:
            values = (key.step, key.rollout_n, key.validate, sample)
            rows = self._index.rows(where, values, "ORDER BY effective, start_ns")
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

    def status(self, deadline: float | None = None) -> StoreStatus:
        """Count what was recorded, exported, is pending and was dropped.

        Args:
            deadline: a time of ``time.monotonic``; what was not taken in by then counts as pending.
        """
        # The writers first: by the time that the journal is read, it has at least what they say.
        writers = journal.writers(self.path)
        done = self._index.refresh(deadline)
        segments = journal.segments(self.path)
        trajectories, spans = self._index.totals()
        stored = self._index.written()
        dropped: dict[str, int] = {}
        waiting = 0
        for writer in writers:
            here = stored.get(writer.name, 0)
            if done:
                losses = self._losses(writer, here)
                waiting += writer.waiting(here) if writer.alive else 0
            else:
                losses = dict(writer.dropped)
                waiting += max(0, writer.recorded - sum(losses.values()) - here)
            for reason, count in losses.items():
                dropped[reason] = dropped.get(reason, 0) + count
        destinations = self._destinations(spans)
        exported = min((item.exported for item in destinations.values()), default=spans)
        return StoreStatus(
            recorded=spans + waiting + sum(dropped.values()),
            exported=exported,
            pending=spans - exported + waiting,
            dropped=sum(dropped.values()),
            trajectories=trajectories,
            in_flight=self._in_flight(),
            bytes=sum(segment.path.stat().st_size for segment in segments),
            torn_lines=self._index.torn({writer.name for writer in writers if not writer.alive}),
            writers_alive=sum(writer.alive for writer in writers),
            writers_dead=sum(not writer.alive for writer in writers),
            troubles=sum(int(writer.counters.get("troubles", 0)) for writer in writers),
            dropped_by_reason=dropped,
            destinations=destinations,
        )

    def _in_flight(self) -> int:
        flight = _Flight(self.path)
        open_ones = {summary.trace_id for summary, _, _ in self._index.rows("WHERE NOT ended")}
        running = {trace_id for trace_id in open_ones if self._index.writers_of(trace_id) & flight.alive}
        return len(running | (flight.living - self._index.trace_ids(flight.living)))

    def _losses(self, writer: journal.Writer, stored: int) -> dict[str, int]:
        """Compare what a writer says it did with what stands in the journal."""
        losses = dict(writer.dropped)
        if writer.written > stored:
            losses["missing from the journal"] = writer.written - stored
        if not writer.alive and (lost := writer.waiting(stored)):
            losses["not yet written when the process ended"] = lost
        return losses

    def _destinations(self, spans: int) -> dict[str, Destination]:
        try:
            settings = orjson.loads((self.path / CONFIG).read_bytes())
            backends, place = list(settings["backend"]), settings.get("tracking_uri")
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        cursors = Cursors(self.path, read_only=True)
        progress = cursors.progress()
        cursors.close()
        found = {}
        for name in backends:
            done = progress.get(cursor_name(name, place), Progress(0, 0, None))
            exported = min(done.exported, spans)
            found[name] = Destination(
                exported, spans - exported - done.refused, done.refused, done.last_error
            )
        return found

    def due(self, destination: Mapping[str, int], deadline: float | None = None) -> list[tuple[str, int]]:
        """List what a destination lacks: complete trajectories with their number of spans.

        Args:
            destination: what it has: trace id -> number of spans.
            deadline: a time of ``time.monotonic`` after which no more of the journal is taken in.
        """
        self._index.refresh(deadline)
        alive = {writer.name for writer in journal.writers(self.path) if writer.alive}
        due = []
        for trace_id, spans, ended in self._index.sizes():
            if destination.get(trace_id) != spans and (ended or not self._index.writers_of(trace_id) & alive):
                due.append((trace_id, spans))
        return due

    def unread(self) -> bool:
        """Say whether the journal holds lines that no reader has taken in yet."""
        return self._index.unread()


class _Flight:
    """Spans that are open now, or were when their process ended."""

    def __init__(self, store: Path) -> None:
        writers = journal.writers(store)
        self.alive = {writer.name for writer in writers if writer.alive}
        self.traces: dict[str, list[Span]] = {}
        self.living: set[str] = set()
        for writer in writers:
            for line in writer.open_spans.splitlines():
                try:
                    spans = [decode_span(raw, resource) for raw, resource in otlp.spans_of(line)]
                except ValueError:
                    continue
                for span in spans:
                    self.traces.setdefault(span.trace_id, []).append(span)
                    if writer.alive:
                        self.living.add(span.trace_id)

    def trajectory(self, trace_id: str) -> Trajectory:
        return assemble(self.traces[trace_id], alive=trace_id in self.living)


def _matches(
    summary: Summary,
    step: int | None,
    sample: Any,
    rollout: int | None,
    validate: bool | None,
    experiment: str | None,
    min_reward: float | None,
    max_reward: float | None,
) -> bool:
    reward = summary.reward
    return (
        (step is None or summary.step == step)
        and (sample is None or str(summary.sample_index) == str(sample))
        and (rollout is None or summary.rollout_n == rollout)
        and (validate is None or summary.validate == validate)
        and (experiment is None or summary.experiment == experiment)
        and (min_reward is None or (reward is not None and reward >= min_reward))
        and (max_reward is None or (reward is not None and reward <= max_reward))
    )
