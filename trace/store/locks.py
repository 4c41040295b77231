"""Locks on files: a forked child lets go of those it inherits, so that they end with their owner."""

from __future__ import annotations

import fcntl
import math
import os
import time
from pathlib import Path

_POLL = 0.01

_held: set[int] = set()
"""Files whose lock this process holds or asks for."""


def take(path: Path, flags: int, *, shared: bool = False) -> int | None:
    """Open a file and lock it without waiting.

    Args:
        path: the file.
        flags: how to open it, as for ``os.open``.
        shared: let others hold it as well, who also only look.

    Returns:
        The open file, None when somebody else holds the lock.

    Raises:
        OSError: the file cannot be opened, or not be locked where it lies.
    """
    file = os.open(path, flags, 0o644)
    _held.add(file)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        release(file)
        return None
    except BaseException:
        release(file)
        raise
    return file


def is_held(path: Path) -> bool:
    """Say whether somebody holds the lock of a file.

    Raises:
        OSError: as ``take``.
    """
    file = take(path, os.O_RDONLY, shared=True)
    if file is None:
        return True
    release(file)
    return False


def wait(path: Path, timeout: float = math.inf) -> int | None:
    """Lock a file, made where there is none, as soon as nobody else holds it; None when time is up.

    Raises:
        OSError: the file cannot be opened, or not be locked where it lies.
    """
    end = time.monotonic() + timeout
    while (file := take(path, os.O_RDWR | os.O_CREAT)) is None and time.monotonic() < end:
        time.sleep(_POLL)
    return file


def adopt(file: int) -> int:
    """Take over an open file with a lock on it that another process left to this one."""
    own = os.dup(file)
    _held.add(own)
    return own


def release(file: int) -> None:
    """Close a file, and with it its lock; one that is not held, as in a forked child, is left alone."""
    if file in _held:
        _held.discard(file)
        os.close(file)


def _after_fork() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_after_fork)
