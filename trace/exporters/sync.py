"""Carries complete trajectories from the store to every destination, at least once each, oldest first.

One follower runs per store, elected by a file lock: as a process of its own (``trackway sync --follow``), so
that the training process never imports what a destination needs, or as a thread where that is not wanted.
An outage costs nothing but disk: the journal keeps everything, and a destination that is back catches up.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import orjson
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from ..config import TraceConfig, from_dict, to_dict
from ..model import Span, Trajectory
from ..store import CONFIG, Store, StoreError, journal, open_store
from ..store.cursors import Cursors, cursor_name
from . import build

log = logging.getLogger("trackway.sync")

BATCH = 50
"""Trajectories handed over at once."""
INTERVAL = 0.5
"""Seconds between two looks at the journal."""
PATIENCE = 120.0
"""Seconds that a follower goes on trying after the last writer has gone."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


@runtime_checkable
class TrajectoryExporter(Protocol):
    """An exporter that takes whole trajectories, which spares it putting them together again."""

    def export_trajectories(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        """Deliver; give the trace ids refused for good, with the reason. Raise on passing trouble."""


@dataclass(slots=True)
class _Destination:
    name: str
    backend: str
    config: TraceConfig
    exporter: SpanExporter | None = None
    delivered: dict[str, int] | None = None
    pause: float = 0.0
    not_before: float = 0.0


class Follower:
    """Does the work of ``sync`` for one store; only one at a time holds the store's lock.

    Args:
        store: folder of the store.
        config: settings; by default those that the recording process left in the store.
    """

    def __init__(self, store: Path, config: TraceConfig | None = None) -> None:
        self._path = store
        self._store = open_store(store)
        self._config = config
        self._cursors = Cursors(store)
        self._destinations: dict[str, _Destination] = {}

    def close(self) -> None:
        """Shut the exporters down and close the files."""
        for destination in self._destinations.values():
            if destination.exporter is not None:
                destination.exporter.shutdown()
        self._cursors.close()
        self._store.close()

    def step(self, *, patient: bool = True) -> bool:
        """Deliver what is due to every destination; one that fails does not keep the others.

        Args:
            patient: leave a destination alone that failed a moment ago.

        Returns:
            Whether every destination has everything that is complete.
        """
        # Read again each time: a later process may have been configured with other destinations.
        config = self._config or load_settings(self._path)
        done = True
        for backend in config.backend:
            name = cursor_name(backend, config.tracking_uri)
            destination = self._destinations.get(name)
            if destination is None:
                destination = self._destinations[name] = _Destination(name, backend, config)
            done = self._serve(destination, patient) and done
        return done

    def _serve(self, destination: _Destination, patient: bool) -> bool:
        if patient and time.monotonic() < destination.not_before:
            return False
        try:
            if destination.delivered is None:
                destination.delivered = self._cursors.delivered(destination.name)
                self._cursors.fail(destination.name, None)
            due = self._store.due(destination.delivered)
            for start in range(0, len(due), BATCH):
                self._deliver(destination, due[start : start + BATCH])
        except Exception as error:
            destination.pause = min(max(_FIRST_PAUSE, 2 * destination.pause), _LONGEST_PAUSE)
            destination.not_before = time.monotonic() + destination.pause
            message = f"{type(error).__name__}: {error}"
            log.warning("%s: %s; trying again in %.0f s", destination.name, message, destination.pause)
            self._cursors.fail(destination.name, message)
            return False
        destination.pause = destination.not_before = 0.0
        return True

    def _deliver(self, destination: _Destination, due: Sequence[tuple[str, int]]) -> None:
        if destination.exporter is None:
            destination.exporter = build(destination.backend, destination.config)
        trajectories = self._store.load_all([trace_id for trace_id, _ in due])
        refused = send(destination.exporter, trajectories)
        for trace_id, reason in refused.items():
            log.warning("%s refused %s: %s", destination.name, trace_id, reason)
        self._cursors.store(destination.name, due, refused)
        assert destination.delivered is not None
        destination.delivered.update(due)

    def errors(self) -> dict[str, str]:
        """Give what went wrong last at each destination, where something did."""
        return {
            name: progress.last_error
            for name, progress in self._cursors.progress().items()
            if progress.last_error
        }

    def owners(self) -> bool:
        """Say whether any process still writes into the store."""
        return any(writer.alive for writer in journal.writers(self._path))

    def unread(self) -> bool:
        """Say whether the journal has grown since the last step."""
        return self._store.unread()


def send(exporter: SpanExporter, trajectories: Sequence[Trajectory]) -> dict[str, str]:
    """Hand trajectories to an exporter.

    Returns:
        Trace ids that it refuses for good, with the reason.

    Raises:
        Exception: nothing was delivered, and it should be tried again.
    """
    if isinstance(exporter, TrajectoryExporter):
        return exporter.export_trajectories(trajectories)
    spans = [readable(span) for trajectory in trajectories for span in trajectory.spans]
    if exporter.export(spans) is not SpanExportResult.SUCCESS:
        raise ConnectionError(f"{type(exporter).__name__} did not take {len(spans)} spans")
    return {}


def readable(span: Span) -> ReadableSpan:
    """Give a recorded span as OpenTelemetry's SDK does."""
    trace_id = int(span.trace_id, 16)
    flags = TraceFlags(TraceFlags.SAMPLED)
    parent = None
    if span.parent_id is not None:
        parent = SpanContext(trace_id, int(span.parent_id, 16), is_remote=False, trace_flags=flags)
    code = StatusCode.OK if span.status == "ok" else StatusCode.ERROR
    return ReadableSpan(
        name=span.name,
        context=SpanContext(trace_id, int(span.span_id, 16), is_remote=False, trace_flags=flags),
        parent=parent,
        resource=Resource(span.resource),
        attributes=dict(span.attributes),
        events=[SdkEvent(event.name, dict(event.attributes), event.time_ns) for event in span.events],
        kind=SpanKind.INTERNAL,
        status=Status(code, None if code is StatusCode.OK else span.error or span.status),
        start_time=span.start_ns,
        end_time=span.end_ns if span.end_ns is not None else span.start_ns,
    )


def save_settings(config: TraceConfig) -> None:
    """Leave the settings in the store for the follower.

    While others record into the same store, their destinations stay.

    Raises:
        OSError: the store cannot be written.
    """
    with suppress(StoreError):
        left = load_settings(config.store)
        if left.backend and _others_record(config.store):
            if config.tracking_uri not in (None, left.tracking_uri):
                log.warning(
                    "another process records into %s and has it exported to %s: tracking_uri=%r is ignored",
                    config.store,
                    left.tracking_uri or "the database in the store",
                    config.tracking_uri,
                )
            backends = tuple(dict.fromkeys([*left.backend, *config.backend]))
            config = replace(config, backend=backends, tracking_uri=left.tracking_uri)
    path = config.store / CONFIG
    draft = path.with_name(f"{CONFIG}.{os.getpid()}.new")
    # A tracking URI may hold credentials, so nobody else may read it.
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(file, "wb") as output:
        output.write(orjson.dumps(to_dict(config), option=orjson.OPT_INDENT_2))
    draft.replace(path)


def _others_record(store: Path) -> bool:
    me = os.getpid(), socket.gethostname()
    return any(
        writer.alive and (writer.counters.get("pid"), writer.counters.get("host")) != me
        for writer in journal.writers(store)
    )


def load_settings(store: Path) -> TraceConfig:
    """Read the settings that were left in a store.

    Raises:
        StoreError: there are none, or they cannot be read.
    """
    try:
        settings: Mapping[str, Any] = orjson.loads((store / CONFIG).read_bytes())
        return from_dict({**settings, "store": str(store)})
    except FileNotFoundError:
        raise StoreError(f"{store} holds no settings: nothing was configured to record there yet") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"the settings in {store / CONFIG} cannot be read: {error}") from None


@contextmanager
def _lock(store: Path) -> Iterator[bool]:
    """Hold the follower's lock of a store; gives False when another process has it."""
    file = os.open(store / "sync.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(file)


def is_followed(store: Path) -> bool:
    """Say whether a follower is at work."""
    with _lock(store) as free:
        return not free


def spawn(store: Path) -> None:
    """Start a follower as a process of its own, unless one is at work; it ends when nobody writes."""
    if is_followed(store):
        return
    command = [sys.executable, "-m", "trackway", "sync", "--follow", "--store", str(store)]
    with (store / "sync.log").open("ab") as output:
        # Through a shell that ends at once, so that it is no child of the training process.
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "TRACKWAY_STORE": "", "TRACKWAY_BACKEND": ""},
            check=False,
        )


class Supervisor:
    """Keeps a follower at work; one that cannot live is started again less and less often.

    Args:
        store: folder of the store.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._pause = 0.0
        self._not_before = 0.0

    def look(self) -> None:
        """Start a follower where there is none; to be called every now and then."""
        now = time.monotonic()
        if now < self._not_before:
            return
        if is_followed(self._store):
            self._pause = 0.0
            return
        spawn(self._store)
        self._pause = min(max(_FIRST_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
        self._not_before = now + self._pause


def follow_store(store: Path, config: TraceConfig | None = None, stop: threading.Event | None = None) -> None:
    """Deliver until no process writes any more and every destination has everything, or ``stop`` is set.

    A destination that is away when the last writer has gone is tried for a while longer; what it still
    lacks then goes with the next follower, or with ``trackway sync``.
    """
    stop = stop or threading.Event()
    while True:
        with _lock(store) as mine:
            if not mine:
                return
            follower = Follower(store, config)
            try:
                last_owned = time.monotonic()
                while not stop.is_set():
                    owned = follower.owners()
                    if owned:
                        last_owned = time.monotonic()
                    done = follower.step() and not follower.unread()
                    if not owned and (done or time.monotonic() - last_owned > PATIENCE):
                        break
                    stop.wait(INTERVAL)
            finally:
                follower.close()
        # Somebody may have written, and seen the lock taken, between the last look and its release.
        if stop.is_set() or not _has_news(store):
            return


def _has_news(store: Path) -> bool:
    reader = Store(store)
    try:
        return reader.unread()
    finally:
        reader.close()


def run(store: Path, *, follow: bool = False, say: Callable[[str], None] = print) -> int:
    """Do what ``trackway sync`` does.

    Args:
        store: folder of the store.
        follow: go on until nobody writes any more.
        say: is given one line on what happened.

    Returns:
        Exit code: 0, or 1 when a destination still lacks something.

    Raises:
        StoreError, ConfigError: nothing can be delivered.
    """
    store = open_store(store).path
    config = load_settings(store)
    if not config.backend:
        say("no destination is configured: everything stays in the store")
        return 0
    if follow:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        follow_store(store)
        return 0
    with _lock(store) as mine:
        if not mine:
            say("a follower is at work on this store already; `trackway status` shows how far it is")
            return 0
        follower = Follower(store)
        try:
            done = follower.step(patient=False)
            for name, error in follower.errors().items():
                say(f"{name}: {error}")
        finally:
            follower.close()
    say("every destination has everything" if done else "some of it is still pending; the store keeps it")
    return 0 if done else 1
