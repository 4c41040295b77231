"""The counts of a store: what was recorded, and where each span of it is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import orjson

from . import journal
from .cursors import Cursors, Progress, cursor_name, spans_in
from .flight import Flight, pid_of, text_of
from .index import Index

CONFIG = "config.json"
"""Settings of the process that recorded last, for the one that exports."""
_PORTION = 500
"""Trajectories that are looked up at once."""


@dataclass(frozen=True, slots=True)
class Destination:
    """How far one destination is.

    Attributes:
        exported: spans that it has.
        pending: spans that it lacks, those of rollouts that still run included, and those of which it is not
            decided yet whether it gets them.
        refused: spans of trajectories that it will not take.
        last_error: why the last attempt failed; None when it did not.
        lag: seconds since the first of the complete trajectories that it lacks had ended; 0 when it has all.
        left_out: spans of trajectories that it does without, by ``export_only``, ``export_ratio`` or
            ``max_bytes_per_step``; they stay in the store, and nobody waits for them.
        trajectories_left_out: how many trajectories these are.
        sent_bytes: what it has accepted, in bytes before any compression; what was sent again counts again.
    """

    exported: int
    pending: int
    refused: int
    last_error: str | None = None
    lag: float = 0.0
    left_out: int = 0
    trajectories_left_out: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """One process that writes into a store, or did.

    Attributes:
        name: of its files in the journal.
        alive: whether it still holds them open: it records, or may at any moment.
        died: whether it is gone without having closed them, as after SIGKILL, SIGTERM, ``os._exit`` or a
            crash: the last moment of it may be lost. Not known, and hence False, of one that left no word of
            itself or wrote with an older version.
        pid, host, program: as it says; None when it left no word of itself.
        recorded: spans that ended in it or died with it, dropped ones included. Those by which it attached
            something to a rollout that is not in the store are counted apart, see ``StoreStatus.unmatched``.
        dropped: spans of it that never reached the journal.
        running: trajectories that run in it now.
        last_wrote_ns: when it last changed a file of the journal, nanoseconds since 1970; None without files.
    """

    name: str
    alive: bool
    pid: int | None = None
    host: str | None = None
    program: str | None = None
    recorded: int = 0
    dropped: int = 0
    running: int = 0
    last_wrote_ns: int | None = None
    died: bool = False


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """Counts of a store at one moment; recorded = exported + pending + left out + dropped.

    Attributes:
        recorded: spans that ended in any process or died with it, dropped ones included.
        exported: spans that every destination has; without a destination, those in the journal.
        pending: spans that some destination still lacks, refused ones included.
        left_out: spans that nobody waits for any more, though some destination does without them.
        dropped: spans that never reached the journal.
        trajectories: number of trajectories, those that run now included.
        in_flight: trajectories that run now.
        died: trajectories whose process ended before they did.
        bytes: size of the journal in bytes, without the index and what else lies in the store.
        torn_lines: lines of the journal that are cut short or damaged, as a crash or a full disk leaves them.
        writers_alive: processes that record now.
        writers_dead: processes that recorded and do so no more, ``writers_died`` included.
        writers_died: processes that were gone without having closed their files, see ``WriterStatus.died``.
        troubles: failures of Trackway's own while recording.
        unmatched: spans by which something was attached to a rollout that is not in the store; they are
            counted nowhere else until it is.
        dropped_by_reason: ``dropped``, in spans, by the reason in words.
        destinations: how far each destination is, by the name of its backend; empty when none was configured.
        writers: every process that writes or wrote, by name, which begins with the second of its start.
    """

    recorded: int
    exported: int
    pending: int
    dropped: int
    trajectories: int = 0
    in_flight: int = 0
    died: int = 0
    bytes: int = 0
    torn_lines: int = 0
    writers_alive: int = 0
    writers_dead: int = 0
    writers_died: int = 0
    troubles: int = 0
    unmatched: int = 0
    left_out: int = 0
    dropped_by_reason: Mapping[str, int] = field(default_factory=dict)
    destinations: Mapping[str, Destination] = field(default_factory=dict)
    writers: tuple[WriterStatus, ...] = field(default=(), repr=False)


def status_of(store: Path, index: Index, deadline: float | None = None) -> StoreStatus:
    """Count what was recorded, exported, is pending, was left out and was dropped.

    Args:
        store: folder of the store.
        index: its index.
        deadline: a time of ``time.monotonic``; what was not taken in by then counts as pending.

    Returns:
        The counts.
    """
    # The writers first: by the time that the journal is read, it has at least what they say.
    writers = journal.writers(store)
    flight = Flight(store, writers)
    done = index.refresh(deadline)
    with index.at_once():
        trajectories, spans, died = index.totals()
        stored, given_up, unmatched = index.written(), index.given_up(), index.unmatched_by_writer()
    unfinished = index.unfinished()
    running = _running(index, flight, unfinished)
    died += sum(not dead and trace_id not in running for trace_id, _, dead in unfinished)
    trajectories += len(running.keys() - {trace_id for trace_id, *_ in unfinished})
    busy = Counter(name for names in running.values() for name in names)
    last_wrote = _last_wrote(store)
    dropped: dict[str, int] = {}
    waiting = 0
    described = []
    for writer in writers:
        here = stored.get(writer.name, 0)
        if done:
            losses = _losses(writer, here)
            waits = writer.waiting(here) if writer.alive else 0
        else:
            losses = dict(writer.dropped)
            waits = max(0, writer.recorded - sum(losses.values()) - here)
        waiting += waits
        lost = sum(losses.values())
        apart = unmatched.get(writer.name, 0)
        for reason, count in losses.items():
            dropped[reason] = dropped.get(reason, 0) + count
        described.append(
            WriterStatus(
                name=writer.name,
                alive=writer.alive,
                pid=pid_of(writer),
                host=text_of(writer, "host"),
                program=text_of(writer, "program"),
                recorded=here + given_up.get(writer.name, 0) - apart + waits + lost,
                dropped=lost,
                running=busy[writer.name],
                last_wrote_ns=last_wrote.get(writer.name),
                died=writer.died,
            )
        )

    def stopped(trace_id: str) -> int | None:
        names = index.writers_of(trace_id)
        if names & flight.alive or trace_id in flight.traces:
            return None
        return max((last_wrote.get(name, 0) for name in names), default=0)

    destinations = _destinations(store, index, spans, unfinished, stopped)
    exported = min((item.exported for item in destinations.values()), default=spans)
    settled = min((item.exported + item.left_out for item in destinations.values()), default=spans)
    return StoreStatus(
        recorded=spans + waiting + sum(dropped.values()),
        exported=exported,
        pending=spans - settled + waiting,
        dropped=sum(dropped.values()),
        trajectories=trajectories,
        in_flight=len(running),
        died=died,
        bytes=sum(segment.path.stat().st_size for segment in journal.segments(store)),
        torn_lines=index.torn({writer.name for writer in writers if not writer.alive}),
        writers_alive=sum(writer.alive for writer in writers),
        writers_dead=sum(not writer.alive for writer in writers),
        writers_died=sum(writer.died for writer in writers),
        troubles=sum(writer.troubles for writer in writers),
        unmatched=sum(unmatched.values()),
        left_out=settled - exported,
        dropped_by_reason=dropped,
        destinations=destinations,
        writers=tuple(described),
    )


def _running(
    index: Index, flight: Flight, unfinished: Iterable[tuple[str, int, bool]]
) -> dict[str, set[str]]:
    """Give the traces that run, each with the writers that it runs in."""
    running = {}
    for trace_id, _, dead in unfinished:
        if not dead and (names := flight.runs_in(trace_id, index.writers_of(trace_id))):
            running[trace_id] = names
    fresh = flight.traces.keys() - running.keys()
    for trace_id in fresh - index.trace_ids(fresh):
        running[trace_id] = flight.runs_in(trace_id, set())
    return running


def _last_wrote(store: Path) -> dict[str, int]:
    """Give when each writer last changed one of its files, in nanoseconds since 1970."""
    found: dict[str, int] = {}
    for path in (store / journal.FOLDER).iterdir():
        with suppress(OSError):  # some are there for a moment only
            name = path.name.partition(".")[0]
            found[name] = max(found.get(name, 0), path.stat().st_mtime_ns)
    return found


def _losses(writer: journal.Writer, stored: int) -> dict[str, int]:
    """Compare what a writer says it did with what stands in the journal."""
    losses = dict(writer.dropped)
    if writer.written > stored:
        losses["missing from the journal"] = writer.written - stored
    if not writer.alive and (lost := writer.waiting(stored)):
        losses["not yet written when the process ended"] = lost
    return losses


def _destinations(
    store: Path,
    index: Index,
    spans: int,
    unfinished: Iterable[tuple[str, int, bool]],
    stopped: Callable[[str], int | None],
) -> dict[str, Destination]:
    try:
        settings = orjson.loads((store / CONFIG).read_bytes())
        backends, place = list(settings["backend"]), settings.get("tracking_uri")
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    cursors = Cursors(store, read_only=True)
    try:
        progress = cursors.progress()
        found = {}
        for backend in backends:
            name = cursor_name(backend, place)
            done = progress.get(name, Progress(0, 0, None))
            exported = min(done.exported, spans)
            left_out = min(done.left_out, spans - exported)
            pending = spans - exported - left_out - done.refused
            first = _first_lacking(index, cursors, name, pending, unfinished, stopped)
            lag = 0.0 if first is None else max(0.0, (time.time_ns() - first) / 1e9)
            found[backend] = Destination(
                exported,
                pending,
                done.refused,
                done.last_error,
                lag,
                left_out,
                done.trajectories_left_out,
                done.bytes,
            )
        return found
    finally:
        cursors.close()


def _first_lacking(
    index: Index,
    cursors: Cursors,
    destination: str,
    pending: int,
    unfinished: Iterable[tuple[str, int, bool]],
    stopped: Callable[[str], int | None],
) -> int | None:
    """Give when the first complete trajectory that a destination lacks had ended; None when it has all.

    What is lacking came last, as a rule. So the search goes back in time, and no further than it must to
    find as many spans as are pending.

    Args:
        pending: how many spans the destination lacks.
        unfinished: trajectories whose root has not ended: these may lie far back.
        stopped: gives when a trajectory without an end had stopped; None where it may go on.
    """
    moments = []
    endless = ((trace_id, state, None) for trace_id, state, _ in unfinished)
    for trace_id, spans, _ in _lacking(cursors, destination, endless):
        pending -= spans
        moments.append(stopped(trace_id))
    if pending > 0:
        for trace_id, spans, end_ns in _lacking(cursors, destination, index.latest_ends()):
            pending -= spans
            moments.append(stopped(trace_id) if end_ns is None else end_ns)
            if pending <= 0:
                break
    return min((moment for moment in moments if moment is not None), default=None)


def _lacking(
    cursors: Cursors, destination: str, candidates: Iterator[tuple[str, int, int | None]]
) -> Iterator[tuple[str, int, int | None]]:
    """Give those of some trajectories that a destination lacks, with spans in place of states."""
    while some := list(islice(candidates, _PORTION)):
        sent = cursors.states(destination, [trace_id for trace_id, *_ in some])
        for trace_id, state, end_ns in some:
            before = sent.get(trace_id, 0)
            if before != state:
                yield trace_id, spans_in(state) - spans_in(before), end_ns
