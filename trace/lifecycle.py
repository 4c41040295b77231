"""Switches recording on and off in this process, and waits for what was recorded to be safe."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from . import exporters
from .capture import runtime
from .capture.recorder import Recorder
from .config import ConfigError, TraceConfig, load_config
from .exporters import sync
from .store import Store, StoreError, StoreStatus, open_store
from .store.cursors import Cursors, cursor_name

log = logging.getLogger("trackway")

SHUTDOWN = 10.0
"""Seconds that the end of the process may wait for the writer."""
_POLL = 0.05


class _Active:
    """Recording with one set of settings: the recorder, and who exports what it records."""

    def __init__(self, config: TraceConfig) -> None:
        self.config = config
        self._stop_export = threading.Event()
        self._export: threading.Thread | None = None
        supervise = self._supervisor()
        self.recorder = Recorder(config, supervise)
        if config.backend and config.sync == "inline":
            self._export = threading.Thread(target=self._export_here, name="trackway-sync", daemon=True)
            self._export.start()
        supervise()

    def _supervisor(self) -> Callable[[], None]:
        # The writer's thread looks after the follower: when it dies, another one is started.
        if self.config.backend and self.config.sync == "process":
            return sync.Supervisor(self.config.store).look
        return lambda: None

    def _export_here(self) -> None:
        while not self._stop_export.is_set():
            try:
                sync.follow_store(self.config.store, self.config, self._stop_export)
            except Exception as error:
                log.warning("the export to %s failed: %s", ", ".join(self.config.backend), error)
            self._stop_export.wait(sync.INTERVAL)

    def close(self, timeout: float, *, exiting: bool = False) -> None:
        """Write what is queued, and see to it that somebody delivers the rest."""
        deadline = time.monotonic() + timeout
        if not self.recorder.writer.close(timeout):
            log.warning("not everything could be written to %s within %.0f s", self.config.store, timeout)
        if not self.config.backend or self.config.sync == "off":
            return
        if self._export is not None:
            self._stop_export.set()
            self._export.join(max(0.0, deadline - time.monotonic()))
            if not exiting and not self._export.is_alive():
                self._deliver_rest()
                return
        # A package that is imported first when the interpreter ends may fail; another process does not.
        sync.spawn(self.config.store)

    def _deliver_rest(self) -> None:
        try:
            sync.run(self.config.store, say=log.info)
        except Exception as error:
            log.warning("the export to %s failed: %s", ", ".join(self.config.backend), error)


_active: _Active | None = None
_retired: list[_Active] = []
"""Former recorders whose rollouts still run: these end where they began."""
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
            sync.save_settings(config)
            before, _active = _active, _Active(config)
        except OSError as error:
            raise ConfigError(
                f"store={str(config.store)!r} cannot be written: {error.strerror or error}. "
                "Name a directory that this process may write to"
            ) from error
        runtime.put(_active.recorder)
        _retire(before)
        return config


def _retire(active: _Active | None = None) -> None:
    """Close former recorders as soon as nothing of theirs runs any more."""
    if active is not None:
        _retired.append(active)
    for former in [former for former in _retired if not former.recorder.open_scopes()]:
        _retired.remove(former)
        former.close(SHUTDOWN)


def flush(timeout: float = 10.0) -> StoreStatus:
    """Wait until what was recorded is in the journal and has arrived at the destinations.

    Args:
        timeout: seconds to wait at most. Rollouts that still run are not waited for.

    Returns:
        The counts of the store at that moment; of this process alone where the store cannot be read.

    Raises:
        ConfigError: nothing is recorded in this process.
    """
    active = _active
    if active is None:
        raise ConfigError("nothing is recorded in this process: call trackway.configure(...) first")
    deadline = time.monotonic() + timeout
    writer = active.recorder.writer
    writer.flush(timeout)
    with _lock:
        _retire()
    try:
        return _wait_for_arrival(active.config, deadline)
    except (OSError, StoreError, sqlite3.Error) as error:
        log.warning("the store %s cannot be read: %s", active.config.store, error)
        dropped = sum(writer.dropped.values())
        return StoreStatus(writer.recorded, 0, writer.recorded - dropped, dropped)


def _wait_for_arrival(config: TraceConfig, deadline: float) -> StoreStatus:
    store = open_store(config.store)
    try:
        if config.sync != "off":
            while not _arrived(store, config, deadline) and time.monotonic() < deadline:
                time.sleep(min(_POLL, max(0.0, deadline - time.monotonic())))
        status = store.status(deadline)
    finally:
        store.close()
    for name, destination in status.destinations.items():
        if destination.last_error:
            log.warning("%s is not reached, the store keeps everything: %s", name, destination.last_error)
    return status


def _arrived(store: Store, config: TraceConfig, deadline: float) -> bool:
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
    with _lock:
        active, _active = _active, None
        if active is not None and active.recorder.idle:
            log.warning(
                "recording was on in process %d, but no decorated function ran there and no trajectory(...) "
                "was opened: nothing was recorded",
                os.getpid(),
            )
        runtime.put(None)
        ending = [*_retired, *([active] if active is not None else [])]
        _retired.clear()
        for each in ending:
            each.close(timeout, exiting=exiting)


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
