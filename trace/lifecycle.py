"""Switches recording on and off in this process, and waits for what was recorded to be safe."""

from __future__ import annotations

import atexit
import functools
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from . import exporters
from .capture import foreign, runtime
from .capture.recorder import Recorder
from .config import ConfigError, TraceConfig, load_config
from .exporters import selection, sync
from .exporters.election import Supervisor, spawn
from .log import logger
from .store import Store, StoreError, StoreStatus, open_store
from .store.cursors import Cursors, cursor_name

log = logger()

SHUTDOWN = 10.0
"""Seconds that the end of the process may wait for the writer."""
_POLL = 0.05
_LOOK = 0.5
"""Seconds that the last look at the counts may take, beyond the time that a caller waits."""

T = TypeVar("T")


class _Active:
    """Recording with one set of settings: the recorder, and who exports what it records."""

    def __init__(self, config: TraceConfig) -> None:
        self.config = config
        self._leave = sync.Leave()
        self._export: threading.Thread | None = None
        self._closed = False
        supervise = self._supervisor()
        self.recorder = Recorder(config, supervise)
        try:
            sync.save_settings(config)
        except OSError:
            self.recorder.writer.close(SHUTDOWN)
            raise
        if config.backend and config.sync == "inline":
            for backend in config.backend:
                exporters.preload(backend)
            self._export = threading.Thread(target=self._export_here, name="trackway-sync", daemon=True)
            self._export.start()
        supervise()

    def _supervisor(self) -> Callable[[], None]:
        # The writer's thread looks after the follower: when it dies, another one is started.
        if self.config.backend and self.config.sync == "process":
            return Supervisor(self.config).look
        return lambda: None

    def _export_here(self) -> None:
        said = ""
        while True:
            try:
                sync.follow_store(self.config.store, self.config, self._leave)
            except Exception as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("the export to %s failed: %s", ", ".join(self.config.backend), error)
            if self._leave.asked:
                return
            self._leave.wait(sync.INTERVAL)

    def close(self, deadline: float, *, exiting: bool = False) -> None:
        """Write what is queued, and see to it that somebody delivers the rest.

        Args:
            deadline: a time of ``time.monotonic``.
            exiting: whether the interpreter ends.
        """
        if self._closed:
            return
        self._closed = True
        writer = self.recorder.writer
        written = writer.close(max(0.0, deadline - time.monotonic()))
        self._say_what_is_lost(in_time=written)
        # A disk that does not take the journal in time is not asked for anything else.
        if not written or not self.config.backend or self.config.sync == "off":
            return
        if self._export is not None:
            self._leave.ask(deadline, drain=not exiting)
            self._export.join(max(0.0, deadline - time.monotonic()) + 1.0)
        try:
            if self._export is None or exiting:
                # Also instead of the thread: a package that is imported first when the interpreter ends may
                # fail. Another process does not.
                spawn(self.config.store)
            self._say_what_is_away()
        except (OSError, StoreError, sqlite3.Error) as error:
            log.warning("the store %s cannot be read: %s", self.config.store, error)

    def _say_what_is_lost(self, *, in_time: bool) -> None:
        writer = self.recorder.writer
        lost = dict(writer.dropped)
        # What daemon threads still record while the program ends is cut off, as they are themselves.
        late = lost.pop("after shutdown", 0)
        rest = writer.recorded - writer.written - late - sum(lost.values())
        if rest > 0 and not in_time:
            lost["in the hands of the writer when time was up"] = rest
        if lost:
            log.warning(
                "%d of %d spans of this process are not in the store %s (%s)",
                sum(lost.values()),
                writer.recorded,
                self.config.store,
                ", ".join(f"{reason}: {count}" for reason, count in lost.items()),
            )

    def _say_what_is_away(self) -> None:
        cursors = Cursors(self.config.store, read_only=True)
        errors = cursors.errors()
        cursors.close()
        if not errors:
            return
        store = open_store(self.config.store)
        try:
            destinations = store.status(time.monotonic()).destinations
        finally:
            store.close()
        for name, destination in destinations.items():
            if destination.last_error:
                log.warning(
                    "%s lacks %d of %d spans (%s); the store keeps them, and `trackway sync --store %s` "
                    "sends them when it is back",
                    name,
                    destination.pending,
                    destination.exported + destination.pending,
                    destination.last_error,
                    self.config.store,
                )


_active: _Active | None = None
_retired: list[_Active] = []
"""Former recorders whose rollouts still run: these end where they began."""
_announced: set[Path] = set()
_lock = threading.RLock()


def configure(config: Any = None, **settings: Any) -> TraceConfig:
    """Start to record in this process; a second call with other settings replaces the first.

    Rollouts that run meanwhile end where they began.

    Args:
        config: a dict, an OmegaConf or Hydra config (verl's tree is understood), a list of ``key=value``
            strings such as ``sys.argv[1:]``, or the path of a YAML file.
        **settings: see ``TraceConfig``; they win over ``config``, which wins over ``TRACKWAY_*`` variables.

    Returns:
        The settings in force.

    Raises:
        ConfigError: a setting is unknown or wrong, a backend's package is missing, or the store cannot be
            written. What was recorded before goes on being recorded.
    """
    loaded = load_config(config, **settings)
    for backend in loaded.backend:
        exporters.check(backend)
    return _begin(loaded)


def configure_from_environment() -> TraceConfig:
    """Start to record in a process that only has ``TRACKWAY_*`` variables.

    What they leave open is as in the store, if a process has been configured to record there.

    Raises:
        ConfigError: as ``configure``.
    """
    given, defaults = load_config(), TraceConfig()
    with suppress(StoreError):
        left = sync.load_settings(given.store)
        unset = [
            field.name
            for field in fields(given)
            if getattr(given, field.name) == getattr(defaults, field.name)
        ]
        given = replace(given, **{name: getattr(left, name) for name in unset if name != "store"})
    return _begin(given)


def _begin(config: TraceConfig) -> TraceConfig:
    global _active
    with _lock:
        if _active is not None and _active.config == config:
            return config
        try:
            config.store.mkdir(parents=True, exist_ok=True)
            before, _active = _active, _Active(config)
        except OSError as error:
            raise ConfigError(
                f"store={str(config.store)!r} cannot be written: {error.strerror or error}. "
                "Name a directory that this process may write to"
            ) from error
        runtime.put(_active.recorder)
        if config.capture_otel:
            _active.recorder.guard(foreign.look, False)
        _announce(config)
        if before is not None:
            _retired.append(before)
        _retire(time.monotonic() + SHUTDOWN)
        return config


def _announce(config: TraceConfig) -> None:
    """Say, once in a process, where what it records is to be found."""
    for backend in config.backend:
        exporters.announce(backend, config)
    if config.store in _announced:
        return
    _announced.add(config.store)
    log.info("recording into %s", config.store)
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1" and os.environ.get("RANK", "0") == "0" and config.store == TraceConfig().store:
        log.warning(
            "this run has %s processes and its store has no name, so each records into %s of the directory "
            "and the machine that it runs on, here %s; name one for all of them with TRACKWAY_STORE",
            processes,
            config.store.name,
            config.store,
        )


def _retire(deadline: float) -> None:
    """Close former recorders as soon as nothing of theirs runs any more."""
    for former in [former for former in _retired if not former.recorder.open_scopes()]:
        _retired.remove(former)
        former.close(deadline)


def flush(timeout: float = 10.0) -> StoreStatus:
    """Wait until what was recorded is in the journal and has arrived at the destinations.

    Args:
        timeout: seconds to wait at most. Rollouts that still run are not waited for.

    Returns:
        The counts of the store at that moment; of this process alone where what it recorded could not be
        written in time, or the store not be read.

    Raises:
        ConfigError: nothing is recorded in this process.
    """
    active = _active
    if active is None:
        raise ConfigError("nothing is recorded in this process: call trackway.configure(...) first")
    deadline = time.monotonic() + timeout
    writer = active.recorder.writer
    status = None
    written = writer.flush(timeout)
    if _lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        try:
            _retire(deadline)
        finally:
            _lock.release()
    try:
        if written:
            status = _by(deadline + _LOOK, lambda: _wait_for_arrival(active.config, deadline))
        else:
            log.warning(
                "after %g s not all is in the store %s that this process recorded; it is written as soon as "
                "that can be",
                timeout,
                active.config.store,
            )
    except (OSError, StoreError, sqlite3.Error) as error:
        log.warning("the store %s cannot be read: %s", active.config.store, error)
    if status is None:
        dropped = sum(writer.dropped.values())
        status = StoreStatus(writer.recorded, 0, writer.recorded - dropped, dropped)
    for name, destination in status.destinations.items():
        if destination.last_error:
            log.warning("%s is not reached, the store keeps everything: %s", name, destination.last_error)
    return status


def _by(deadline: float, work: Callable[[], T]) -> T | None:
    """Do something that may hang, as any look at a disk may; give None when it is not done in time."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    try:
        threading.Thread(target=run, name="trackway-flush", daemon=True).start()
    except RuntimeError:  # the interpreter ends
        return work()
    wait([done], max(0.0, deadline - time.monotonic()))
    return done.result() if done.done() else None


def _wait_for_arrival(config: TraceConfig, deadline: float) -> StoreStatus:
    store = open_store(config.store)
    try:
        if config.sync != "off":
            with suppress(StoreError):
                selection.ask(config.store, sync.load_settings(config.store))
            while not _arrived(store, config, deadline) and time.monotonic() < deadline:
                time.sleep(min(_POLL, max(0.0, deadline - time.monotonic())))
        return store.status(deadline)
    finally:
        store.close()


def _arrived(store: Store, config: TraceConfig, deadline: float) -> bool:
    place = config.tracking_uri
    with suppress(StoreError):  # a store that was deleted gets its settings back in a moment
        place = sync.load_settings(config.store).tracking_uri  # as the follower has it
    cursors = Cursors(config.store, read_only=True)
    try:
        names = [cursor_name(backend, place) for backend in config.backend]
        return all(not store.due(cursors.delivered(name), deadline) for name in names)
    finally:
        cursors.close()


def shutdown(timeout: float = SHUTDOWN) -> None:
    """Stop recording: write what is queued and let the follower finish by itself.

    Args:
        timeout: seconds to wait at most, in this process. Rollouts that still run are kept as unfinished.
    """
    _end(timeout)


def _end(timeout: float, *, exiting: bool = False) -> None:
    global _active
    deadline = time.monotonic() + timeout
    if not _lock.acquire(timeout=timeout):
        log.warning("another thread is busy with the settings; the recording is not closed")
        return
    try:
        active = _active
        if active is not None and active.recorder.idle:
            log.warning(
                "recording was on in process %d, but no decorated function ran there and no trajectory(...) "
                "was opened: nothing was recorded",
                os.getpid(),
            )
        # When the interpreter ends, the recorder stays: what comes later is at least counted.
        if not exiting:
            _active = None
            runtime.put(None)
        ending = [*_retired, *([active] if active is not None else [])]
        _retired.clear()
        for each in ending:
            each.close(deadline, exiting=exiting)
    finally:
        _lock.release()


def _after_fork() -> None:
    # The parent's threads do not exist here. The child gets a recorder of its own at its first span.
    global _active, _lock
    _lock = threading.RLock()
    active, _active = _active, None
    for each in [*_retired, *([active] if active is not None else [])]:
        each.recorder.writer.abandon()
    _retired.clear()
    if active is not None:
        runtime.put(None, functools.partial(_begin, active.config))


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_end, SHUTDOWN, exiting=True)
