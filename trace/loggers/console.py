"""The console: a line for each step, and a table of what matters most where somebody looks on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import IO, Any, ClassVar

from ..config_values import ConfigError, show
from ..printable import visible
from .base import ExperimentLogger, Level, Run, Status
from .frequency import KEY_METRICS, Frequency

_HEADER_EVERY = 20
"""Rows of the table below which its head is printed again."""
_STEP, _REST = 8, 6
"""Characters of the first column of the table, and of the last one: how many metrics it does not show."""
_NARROW, _WIDE = 9, 16
"""Characters that any other column has at least and at most; a number has up to ten."""
_TEXT = 2000
"""Characters of a prompt or completion that are shown."""


class ConsoleLogger(ExperimentLogger):
    """Prints.

    On a terminal, the key metrics of each step are a row of a table that grows; elsewhere, as in the log of
    a job, each step is one line with all its metrics: ``step:3 - loss:0.123 - reward/mean:0.5``.

    Args:
        run: which run.
        style: ``table``, ``line``, or ``auto``: as said.
        key_metrics: patterns of the metrics that the table shows; the Tracker hands over its own.
        stream: where to print. Default: standard output, as it is at each call.
    """

    settings: ClassVar[frozenset[str]] = frozenset({"style", "key_metrics"})

    def __init__(
        self,
        run: Run,
        *,
        style: str = "auto",
        key_metrics: Sequence[str] = KEY_METRICS,
        stream: IO[str] | None = None,
    ) -> None:
        super().__init__(run)
        self._style = style
        self._stream = stream
        self._is_key = Frequency[float](1, key_metrics).is_key
        self._columns: dict[str, int] = {}
        self._rows = 0

    @classmethod
    def check(cls, settings: Mapping[str, Any], *, offline: bool) -> dict[str, Any]:
        style = settings.get("style", "auto")
        if style not in ("auto", "table", "line"):
            raise ConfigError(f"console: style={show(style)} is not allowed; expected auto, table or line")
        return dict(settings)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if self._style == "table" or (self._style == "auto" and self._out().isatty()):
            self._row(metrics, step)
        else:
            shown = " - ".join(
                f"{visible(name, newlines=False)}:{_short(metrics[name])}" for name in sorted(metrics)
            )
            self._print(f"step:{step} - {shown}")

    def _row(self, metrics: Mapping[str, float], step: int) -> None:
        keys = [name for name in sorted(metrics) if self._is_key(name)] or sorted(metrics)
        if self._add_columns(keys) or self._rows % _HEADER_EVERY == 0:
            self._rows = 0
            heads = [f"{_head(name):>{width}}" for name, width in self._columns.items()]
            self._print("  ".join([f"{'step':>{_STEP}}", *heads]))
        self._rows += 1
        cells = [
            f"{_short(metrics[name]) if name in metrics else '':>{width}}"
            for name, width in self._columns.items()
        ]
        rest = len(metrics) - sum(name in metrics for name in self._columns)
        more = [f"+{rest}"] if rest else []
        self._print("  ".join([f"{step:>{_STEP},}", *cells, *more]))

    def _add_columns(self, names: Sequence[str]) -> bool:
        """Give those a column that have none, where the terminal is wide enough; say whether one got it."""
        room = get_terminal_size().columns - _STEP - _REST - sum(2 + w for w in self._columns.values())
        before = len(self._columns)
        for name in names:
            width = max(_NARROW, len(_head(name)))
            if name not in self._columns and 2 + width <= room:
                self._columns[name] = width
                room -= 2 + width
        return len(self._columns) > before

    def log_config(self, config: Mapping[str, Any]) -> None:
        pass  # nobody wants a thousand lines before the first step; the log has it

    def log_artifact(self, artifact: Path, name: str) -> None:
        self._print(visible(f"artifact {name} kept in {artifact}", newlines=False))

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        columns = list(dict.fromkeys(name for row in rows for name in row))
        scores = [
            name
            for name in columns
            if name not in ("sample", "rollout", "trajectory", "prompt", "completion")
        ]
        table = Table(title=f"validation generations, step {step}", show_lines=True)
        table.add_column("sample")
        table.add_column("prompt", ratio=2, overflow="fold")
        table.add_column("completion", ratio=3, overflow="fold")
        for name in scores:
            table.add_column(Text(visible(name, newlines=False)), justify="right")
        for row in rows:
            name = row["trajectory"] or row["sample"] or ""
            cells = [_cut(name), _cut(row["prompt"]), _cut(row["completion"])]
            cells += [_short(row.get(name)) for name in scores]
            table.add_row(*map(Text, cells))
        out = self._out()
        console = Console(
            file=out, width=None if out.isatty() else 120, highlight=False, markup=False, emoji=False
        )
        console.print(table)

    def alert(self, title: str, text: str, level: Level = "warning", step: int | None = None) -> None:
        at = "" if step is None else f" (step {step})"
        body = f": {visible(text, newlines=False)}" if text else ""
        self._print(f"{level.upper()}{at} {visible(title, newlines=False)}{body}")

    def flush(self) -> None:
        self._out().flush()

    def finish(self, status: Status) -> None:
        self._print(f"run {self.run.id} {status}")
        self.flush()

    def _out(self) -> IO[str]:
        return self._stream or sys.stdout

    def _print(self, line: str) -> None:
        out = self._out()
        encoding = getattr(out, "encoding", None) or "utf-8"
        out.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _head(name: str) -> str:
    """Shorten the name of a metric to its end, which tells most."""
    text = visible(name, newlines=False)
    return text if len(text) <= _WIDE else f"…{text[1 - _WIDE :]}"


def _cut(text: str) -> str:
    text = visible(text)
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}… {len(text) - _TEXT:,} more characters"


def _short(value: Any) -> str:
    """Give a number as one reads it: ``0.123``, ``3``, ``1.2e-05``, ``nan``."""
    if value is None:
        return ""
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.6g}"
    return visible(str(value), newlines=False)
