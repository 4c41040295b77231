"""Brings the log of a run to one logger, as far as that takes it; it begins again where it stopped."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from ..log import logger as program_log
from ..printable import without_password
from . import runlog
from .base import ExperimentLogger, Run, Status
from .runlog import LOG, Record

log = program_log()

TRIES = 3
_PAUSE = 0.1
"""Seconds before the first further try of one record; then twice as many."""
_AWAY = (1.0, 30.0)
"""Seconds to wait when nothing gets through: at first, and at most."""
_ENDING = 0.5
"""Seconds to wait at most while the program waits for the end."""
_SAVE = 0.5
"""Seconds of work that may be done twice after a crash."""
_AT_ONCE = 200
_OURS = ("start", "end")
"""Kinds of records that no logger is given."""


class Delivery:
    """One logger of one run, and how far it is.

    Args:
        name: of the logger.
        make: opens it, given the run.
        run: which one.
    """

    def __init__(self, name: str, make: Callable[[Run], ExperimentLogger], run: Run) -> None:
        self.name = name
        self._make = make
        self._log = run.directory / LOG
        self._cursor = run.directory / f"{name}.json"
        kept = load(self._cursor)
        self._offset: int = kept.get("offset", 0)
        self.delivered: int = kept.get("delivered", 0)
        self.refused: int = kept.get("refused", 0)
        self.error: str | None = None
        self.finished: str | None = None if run.resumed else kept.get("finished")
        self._run = replace(run, kept=kept.get("state", {}))
        self._logger: ExperimentLogger | None = None
        self._saved = 0.0
        self._unsaved = False
        self._idle = True
        self._status: Status = "finished"
        self._deadline = float("inf")
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Go on in a thread of its own until ``end``."""
        self._thread = threading.Thread(target=self._live, name=f"trackway-{self.name}", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Say that there is something new in the log."""
        self._wake.set()

    def end(self, status: Status, deadline: float) -> None:
        """Let the thread bring the rest, close the logger and stop.

        Args:
            status: how the program ended.
            deadline: a time of ``time.monotonic`` after which nothing is tried again.
        """
        self._deadline, self._status = deadline, status
        self._ending.set()
        self._wake.set()

    def wait(self, deadline: float) -> None:
        """Wait until the thread has stopped, or that time has come."""
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def behind(self) -> bool:
        """Say whether something in the log has not arrived yet, or is not safe over there."""
        try:
            return not self._idle or self._offset < self._log.stat().st_size
        except OSError:
            return False

    @property
    def pending(self) -> int:
        """How many records it lacks."""
        try:
            return sum(record.kind not in _OURS for record in runlog.read(self._log, self._offset))
        except OSError:
            return 0

    def _live(self) -> None:
        while True:
            self._wake.clear()
            # Asked for before the last look at the log, so that nothing stays behind.
            ending = self._ending.is_set()
            through = self.catch_up()
            if ending:
                if through:
                    self.close(self._status)
                break
            if self._unsaved and not self._wake.wait(_SAVE):
                self._save()
            self._wake.wait()
        self._save()

    def catch_up(self) -> bool:
        """Bring what is new; tries again for as long as there is time.

        Returns:
            Whether the logger has it all.
        """
        away = _AWAY[0]
        last_tries = 0
        while True:
            before = self._offset
            try:
                if self._logger is None:
                    self._logger = self._make(self._run)
                    self._save()  # others look there for what the run is called at the destination
                while self._some(self._logger):
                    self._idle = False
                if self._offset != before:
                    self._logger.flush()
                self.error = None
                self._idle = True
                return True
            except Exception as error:
                self._say(error)
                away = _AWAY[0] if self._offset != before else min(2 * away, _AWAY[1])
            self._save()
            # A program that ends does not wait for somebody who is away: there is `trackway sync`.
            last_tries += self._ending.is_set()
            if last_tries >= TRIES or not self._pause(away):
                return False

    def _some(self, logger: ExperimentLogger) -> bool:
        """Bring some records; say whether there may be more."""
        records = list(islice(runlog.read(self._log, self._offset), _AT_ONCE))
        position = 0
        while position < len(records):
            position += self._bring(logger, records[position:])
            if time.monotonic() - self._saved > _SAVE:
                self._save()
        return bool(records)

    def _bring(self, logger: ExperimentLogger, records: list[Record]) -> int:
        """Bring the first of some records, or several when it is refused; say how many are done.

        Raises:
            Exception: as far as can be seen, the destination is away.
        """
        record = records[0]
        for attempt in range(TRIES):
            try:
                hand_over(logger, record)
            except Exception as error:
                failure = error
                if attempt + 1 < TRIES and not self._pause(_PAUSE * 2**attempt):
                    raise
                continue
            self._done(record)
            return 1
        # If the destination takes another one that it has to send somewhere, the record is at fault itself.
        # Most have nothing to do for an alert or a rewinding, and so show nothing by taking one.
        proof = next((n for n, each in enumerate(records) if n and each.kind in ("metrics", record.kind)), 0)
        if not proof:
            raise failure
        for each in records[1 : proof + 1]:
            hand_over(logger, each)
        try:
            hand_over(logger, record)
        except Exception as error:
            if not self.refused:
                log.warning("%s does not take one %s: %s", self.name, record.kind, _text(error))
            self.refused += 1
            self.delivered -= 1
        for each in records[: proof + 1]:
            self._done(each)
        return proof + 1

    def _done(self, record: Record) -> None:
        self._offset = record.end
        self._unsaved = True
        self.delivered += record.kind not in _OURS

    def _pause(self, seconds: float) -> bool:
        """Wait before a further try; say whether there is time for one."""
        if not self._ending.wait(seconds):
            return True
        left = self._deadline - time.monotonic()
        time.sleep(max(0.0, min(seconds, _ENDING, left)))
        return left > 0

    def close(self, status: Status) -> None:
        """Close the logger, which has everything."""
        try:
            if self._logger is None:
                self._logger = self._make(self._run)
            self._logger.finish(status)
            self.finished = status
        except Exception as error:
            self._say(error)
        self._save()

    def _say(self, error: Exception) -> None:
        text = _text(error)
        if self.error is None:
            log.warning("%s is behind, the run's log keeps everything: %s", self.name, text)
        self.error = text

    def _save(self) -> None:
        self._saved, self._unsaved = time.monotonic(), False
        state = self._logger.state if self._logger is not None else self._run.kept
        data = {
            "offset": self._offset,
            "delivered": self.delivered,
            "refused": self.refused,
            "error": self.error,
            "finished": self.finished,
            "state": state,
        }
        try:
            save(self._cursor, data)
        except OSError as error:
            log.warning("how far %s is could not be saved: %s", self.name, error)


def hand_over(logger: ExperimentLogger, record: Record) -> None:
    """Give one record to a logger."""
    logger.time = record.time
    data = record.data
    if record.kind == "metrics":
        if metrics := runlog.metrics_of(data):
            logger.log_metrics(metrics, data["step"])
        if histograms := runlog.histograms_of(data):
            logger.log_histograms(histograms, data["step"])
    elif record.kind == "config":
        logger.log_config(data["config"])
    elif record.kind == "rewind":
        logger.rewind(data["step"])
    elif record.kind == "generations":
        logger.log_generations(data["rows"], data["step"])
    elif record.kind == "artifact":
        logger.log_artifact(logger.run.directory / data["path"], data["name"])
    elif record.kind == "alert":
        logger.alert(data["title"], data["text"], data["level"], data["step"])


def load(path: Path) -> dict[str, Any]:
    """Read a small JSON file; empty when it is not there or broken."""
    try:
        data = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def save(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a small JSON file at one stroke."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(runlog.to_json(data))
    temporary.replace(path)


def _text(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0]
    return without_password(f"{type(error).__name__}: {first}" if first else type(error).__name__)
