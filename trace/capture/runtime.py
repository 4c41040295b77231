"""The one recorder of this process."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .recorder import Recorder

_STARTERS = ("TRACKWAY_STORE", "TRACKWAY_BACKEND")
"""Variables that make a process record which nobody configured in code: a spawned worker, a Ray actor."""


def _start_from_environment() -> None:
    if any(os.environ.get(name) for name in _STARTERS):
        # By name, since this package may not import what is built on top of it.
        lifecycle = importlib.import_module("trackway.trace.lifecycle")
        try:
            lifecycle.configure()
        except Exception as error:  # here it would reach the rollout that happened to be the first
            logging.getLogger("trackway").error("nothing is recorded in this process: %s", error)


_recorder: Recorder | None = None
_starter: Callable[[], None] | None = _start_from_environment
_lock = threading.RLock()


def get() -> Recorder | None:
    """Give the recorder, or None when nothing is to be recorded."""
    if _recorder is None and _starter is not None:
        _start()
    return _recorder


def put(recorder: Recorder | None, starter: Callable[[], None] | None = None) -> None:
    """Set the recorder that decorated calls use from now on.

    Args:
        recorder: None to record nothing.
        starter: makes and puts a recorder when the next call needs one.
    """
    global _recorder, _starter
    _recorder = recorder
    _starter = starter


def _start() -> None:
    global _starter
    with _lock:
        starter, _starter = _starter, None
        if starter is not None:
            starter()
