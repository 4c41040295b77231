"""What loggers have in common that tell people of alerts and write nothing else."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..printable import visible
from .base import ExperimentLogger, Histogram, Level, Run

TIMEOUT = 10.0
"""Seconds to wait for a connection and for each answer."""
_LATE = 3600.0
"""Seconds after which an alert says that it is not of now."""
_TITLE, _NAME = 200, 100
"""Characters of a title, and of a name of a run or project."""


class Notifier(ExperimentLogger):
    """Sends the alerts of a run.

    A record that follows on one that was not taken shows whether the destination is there at all. Of those
    that this logger has no use for, none could show that. So the next one fails as the alert did, and an
    alert is given up only where the destination refuses that very one.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._trouble: Exception | None = None

    @abstractmethod
    def send(self, title: str, text: str, level: str, step: int | None) -> None:
        """Send one alert, once.

        Args:
            title: one line, safe to print.
            text: safe to print.
            level: ``info``, ``warning`` or ``error``.
            step: the step that it is about, if any.

        Raises:
            ValueError: it will never be taken.
            Exception: it could not be sent now.
        """

    def alert(self, title: str, text: str, level: Level = "warning", step: int | None = None) -> None:
        """Send it."""
        self._trouble = None
        if time.time() - self.time > _LATE:
            at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(self.time))
            text = f"This is of {at} UTC and could not be sent before.\n{text}"
        try:
            self.send(cut(visible(title, newlines=False), _TITLE), visible(text), level, step)
        except ValueError:
            raise
        except Exception as error:
            self._trouble = error
            raise

    def headline(self, title: str, level: str, step: int | None) -> str:
        """Give one line that says what this is and where it comes from."""
        at = "" if step is None else f", step {step}"
        return f"[{level}] {title} ({self.name(self.run.experiment)}{at})"

    def name(self, name: str) -> str:
        """Make a name fit for one line."""
        return cut(visible(name, newlines=False), _NAME)

    def _pass(self) -> None:
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Nothing is written."""
        self._pass()

    def log_histograms(self, histograms: Mapping[str, Histogram], step: int) -> None:
        """Nothing is written."""
        self._pass()

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Nothing is written."""
        self._pass()

    def log_artifact(self, artifact: Path, name: str) -> None:
        """Nothing is written."""
        self._pass()

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Nothing is written."""
        self._pass()

    def rewind(self, step: int) -> None:
        """What was sent stays sent."""
        self._pass()


def cut(text: str, most: int) -> str:
    """Shorten a text to so many characters, and say so."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
