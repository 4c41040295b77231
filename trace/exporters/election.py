"""Which process delivers what stands in a store: one at a time, whoever holds the lock of its followers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ..config import TraceConfig
from ..log import logger
from ..store import CONFIG, cursors, locks
from .settings import save_settings

log = logger("trackway.sync")

LOCK = "sync.lock"
NICE = 10
"""What a follower's priority is lowered by: where there are too few cores, the training has them first.

Beside two busy processes on two cores, a follower took 44 % of their time at their own priority, 12 % at 10,
and 3 % at 19, where it would fall far behind.
"""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


def is_followed(store: Path) -> bool:
    """Say whether a follower is at work, or about to be."""
    try:
        return locks.is_held(store / LOCK)
    except FileNotFoundError:
        return False


def stand(store: Path) -> int | None:
    """Try to become the follower of a store.

    Returns:
        The lock, to be given to ``locks.release``; None when another process has it.
    """
    lock = _handed(store)
    for _ in range(5):
        if lock is not None:
            return lock
        # Somebody may hold it for a moment, only to see whether it is free.
        lock = locks.take(store / LOCK, os.O_RDWR | os.O_CREAT)
        if lock is None:
            time.sleep(0.01)
    return lock


def still_elected(store: Path, lock: int) -> bool:
    """Say whether a lock is that of the store which is there now: a store can be moved or deleted."""
    try:
        return os.path.samestat(os.fstat(lock), (store / LOCK).stat())
    except OSError:
        return False


def _handed(store: Path) -> int | None:
    """Take the lock that whoever started this process left to it as its standard input."""
    try:
        if not still_elected(store, 0):
            return None
        lock = locks.adopt(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        return lock
    except OSError:
        return None


_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""MLflow's own seven retries keep a request for minutes; the follower tries again later, and says why."""


def spawn(store: Path) -> None:
    """Start a follower as a process of its own, unless one is at work; it ends when nobody writes.

    The lock is taken here and handed on, so that of many processes which try at once, one starts one.

    Raises:
        OSError: the store is not there, or no process can be started.
    """
    lock = stand(store)
    if lock is None:
        return
    command = [sys.executable, "-m", "trackway", "sync", "--follow", "--store", str(store)]
    environment = {**_PATIENCE, **os.environ, "TRACKWAY_STORE": "", "TRACKWAY_BACKEND": ""}
    # Where to deliver stands in the store, the same for all, whoever starts the follower; and what the
    # training makes of warnings is not meant for the packages of a destination.
    for name in ("MLFLOW_TRACKING_URI", "PYTHONWARNINGS"):
        environment.pop(name, None)
    try:
        with (store / "sync.log").open("ab") as output:
            # Through a shell that ends at once, so that it is no child of the training process. A command
            # in the background would be given an empty input.
            subprocess.run(
                ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *command],
                stdin=lock,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
                check=False,
            )
    finally:
        locks.release(lock)


def stand_back() -> None:
    """Lower the priority of this process, to work beside a training and not in its place."""
    try:
        os.nice(NICE)
        # That alone changes nothing where Linux compares first sessions, and processes only within each.
        Path("/proc/self/autogroup").write_text(str(NICE))
    except OSError as error:
        log.debug("the priority stays as it is: %s", error)


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


class Supervisor:
    """Keeps a follower at work; one that cannot live is started again less and less often.

    Args:
        config: the settings of this process.
    """

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._pause = 0.0
        self._started = self._not_before = float("-inf")
        self._seen = self._said = False

    def look(self) -> None:
        """Start a follower where there is none; to be called every now and then."""
        try:
            self._look()
        except OSError as error:
            if not self._said:
                self._said = True
                log.warning(
                    "no follower can be started for %s, everything stays there: %s", self._config.store, error
                )

    def _look(self) -> None:
        store, now = self._config.store, time.monotonic()
        if is_followed(store):
            self._seen = True
            if now - self._started > _LONGEST_PAUSE:
                self._pause = 0.0
            return
        if now < self._not_before or not store.is_dir():
            return
        # One that comes to work is seen, or at least has made the cursors.
        never_came = self._pause and not (self._said or self._seen or (store / cursors.FILE).exists())
        if never_came and (words := _last_line(store / "sync.log")):
            self._said = True
            log.warning(
                "the process that exports from %s ended at once, and is started again now and then; "
                "everything stays in the store. Its last words in %s: %s",
                store,
                store / "sync.log",
                words,
            )
        if not (store / CONFIG).exists():  # the store was deleted, and made again by the writer
            save_settings(self._config)
        self._pause = min(max(_FIRST_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
        self._started, self._not_before = now, now + self._pause
        spawn(store)
