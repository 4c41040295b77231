"""Switches recording on and off in this process, and waits for what was recorded to be safe."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from . import exporters
from .capture import runtime
from .capture.recorder import Recorder
from .config import ConfigError, TraceConfig, load_config
from .exporters import sync
from .store import Store, StoreStatus, open_store
from .store.cursors import Cursors

log = logging.getLogger("trackway")

SHUTDOWN = 10.0
"""Seconds that the end of the process may wait for the writer."""
_POLL = 0.05


@dataclass(slots=True)
class _Active:
    config: TraceConfig
    recorder: Recorder
    stop: threading.Event
    exporting: threading.Thread | None = None


_active: _Active | None = None
_lock = threading.RLock()


def configure(config: Any = None, **settings: Any) -> TraceConfig:
    """Start to record in this process; a second call with other settings replaces the first.

    Args:
        config: a dict, an OmegaConf or Hydra config (verl's tree is understood), a list of ``key=value``
            strings such as ``sys.argv[1:]``, or the path of a YAML file.
        **settings: see ``TraceConfig``; they win over ``config``, which wins over ``TRACKWAY_*`` variables.

    Returns:
        The settings in force.

    Raises:
        ConfigError: a setting is unknown or wrong, a backend's package is missing, or the store cannot be
            written.
    """
    global _active
    loaded = load_config(config, **settings)
    with _lock:
        if _active is not None and _active.config == loaded:
            return loaded
        for backend in loaded.backend:
            exporters.check(backend)
        _stop()
        _active = _start(loaded)
        return loaded


def _start(config: TraceConfig) -> _Active:
    stop = threading.Event()
    try:
        config.store.mkdir(parents=True, exist_ok=True)
        sync.save_settings(config)
        supervise = _supervisor(config)
        recorder = Recorder(config, supervise)
    except OSError as error:
        raise ConfigError(
            f"store={str(config.store)!r} cannot be written: {error.strerror or error}. "
            "Name a directory that this process may write to"
        ) from error
    active = _Active(config, recorder, stop)
    if config.backend and config.sync == "inline":
        active.exporting = threading.Thread(
            target=_export_here, args=(config, stop), name="trackway-sync", daemon=True
        )
        active.exporting.start()
    runtime.put(recorder)
    supervise()
    return active


def _supervisor(config: TraceConfig) -> Any:
    # The writer's thread looks after the follower: when it dies, another one is started.
    if config.backend and config.sync == "process":
        return functools.partial(sync.spawn, config.store)
    return lambda: None


def _export_here(config: TraceConfig, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            sync.follow_store(config.store, config, stop)
        except Exception as error:
            log.warning("the export to %s failed: %s", ", ".join(config.backend), error)
        stop.wait(sync.INTERVAL)


def flush(timeout: float = 10.0) -> StoreStatus:
    """Wait until what was recorded is in the journal and has arrived at the destinations.

    Args:
        timeout: seconds to wait at most. Rollouts that still run are not waited for.

    Returns:
        The counts of the store at that moment.

    Raises:
        ConfigError: nothing is recorded in this process.
    """
    active = _active
    if active is None:
        raise ConfigError("nothing is recorded in this process: call trackway.configure(...) first")
    deadline = time.monotonic() + timeout
    active.recorder.writer.flush(timeout)
    store = open_store(active.config.store)
    try:
        if active.config.backend and active.config.sync != "off":
            while not _arrived(store, active.config) and time.monotonic() < deadline:
                time.sleep(min(_POLL, max(0.0, deadline - time.monotonic())))
        status = store.status()
        for name, destination in status.destinations.items():
            if destination.last_error:
                log.warning("%s is not reached, the store keeps everything: %s", name, destination.last_error)
        return status
    finally:
        store.close()


def _arrived(store: Store, config: TraceConfig) -> bool:
    cursors = Cursors(config.store, read_only=True)
    try:
        return all(not store.due(cursors.delivered(name)) for name in config.backend)
    finally:
        cursors.close()


def shutdown(timeout: float = SHUTDOWN) -> None:
    """Stop recording: write what is queued and let the follower finish by itself.

    Args:
        timeout: seconds to wait at most, in this process. Rollouts that still run are kept as unfinished.
    """
    with _lock:
        if _active is not None and _active.recorder.idle:
            log.warning(
                "recording was on in process %d, but no decorated function ran there and no trajectory(...) "
                "was opened: nothing was recorded",
                os.getpid(),
            )
        _stop(timeout)


def _stop(timeout: float = SHUTDOWN) -> None:
    global _active
    active, _active = _active, None
    if active is None:
        return
    runtime.put(None)
    deadline = time.monotonic() + timeout
    if not active.recorder.writer.close(timeout):
        log.warning("not everything could be written to %s within %.0f s", active.config.store, timeout)
    if active.exporting is not None:
        active.stop.set()
        active.exporting.join(max(0.0, deadline - time.monotonic()))
        if not active.exporting.is_alive():
            _deliver_rest(active.config)
    elif active.config.backend and active.config.sync == "process":
        sync.spawn(active.config.store)


def _deliver_rest(config: TraceConfig) -> None:
    try:
        sync.run(config.store, say=log.info)
    except Exception as error:
        log.warning("the export to %s failed: %s", ", ".join(config.backend), error)


def _after_fork() -> None:
    # The parent's writer thread does not exist here. The child gets a writer of its own at its first span.
    global _active, _lock
    _lock = threading.RLock()
    active, _active = _active, None
    if active is not None:
        active.recorder.writer.abandon()
        runtime.put(None, functools.partial(_restart, active.config))


def _restart(config: TraceConfig) -> None:
    global _active
    try:
        _active = _start(config)
    except ConfigError as error:
        log.warning("nothing is recorded in process %d: %s", os.getpid(), error)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(shutdown)
