"""The one recorder of this process."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..log import logger

if TYPE_CHECKING:
    from .recorder import Recorder

_STARTERS = ("TRACKWAY_STORE", "TRACKWAY_BACKEND")
"""Variables that make a process record which nobody configured in code: a spawned worker, a Ray actor."""


def _start_from_environment() -> None:
    if any(os.environ.get(name) for name in _STARTERS):
        # By name, since this package may not import what is built on top of it.
        importlib.import_module("trackway.trace.lifecycle").configure_from_environment()


tracked: list[str] = []
"""Ids of the runs whose metrics this process logs through a ``Tracker``, the latest last."""

_recorder: Recorder | None = None
_starter: Callable[[], object] | None = _start_from_environment
_starting = False
_lock = threading.RLock()


def get() -> Recorder | None:
    """Give the recorder, or None when nothing is to be recorded."""
    if _recorder is None and _starter is not None:
        _start()
    return _recorder


def started() -> Recorder | None:
    """Give the recorder, or None when nothing is recorded so far."""
    return _recorder


def put(recorder: Recorder | None, starter: Callable[[], object] | None = None) -> None:
    """Set the recorder that decorated calls use from now on.

    Args:
        recorder: None to record nothing.
        starter: makes and puts a recorder when the next call needs one; its failure is logged, since it
            would reach the rollout that happened to be the first.
    """
    global _recorder, _starter
    _recorder = recorder
    _starter = starter


def _start() -> None:
    # Other threads wait here until the first one has started the recorder, so that none misses it.
    global _starter, _starting
    with _lock:
        if _starter is None or _starting:
            return
        _starting = True
        starter = _starter
        try:
            starter()
        except Exception as error:
            logger().error("nothing is recorded in this process: %s", error)
        finally:
            _starting = False
            if _starter is starter:
                _starter = None


def _after_fork() -> None:
    global _lock, _starting
    _lock, _starting = threading.RLock(), False


os.register_at_fork(after_in_child=_after_fork)
