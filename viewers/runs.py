"""Runs in the terminal: the list of them, and what differs between two."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from trackway.trace.loggers.comparing import Difference
from trackway.trace.loggers.reading import LoggerState, RunRecord
from trackway.trace.printable import visible

from .columns import Column, Columns, one_line
from .words import DIM, age, count, when

STATUS = {
    "running": ("running", "cyan"),
    "finished": ("finished", "green"),
    "failed": ("FAILED", "bold red"),
    "killed": ("killed", "yellow"),
    "died": ("DIED", "bold red"),
}
_METRICS = 4
"""Columns of key metrics."""
_HEAD = 20
_CELL = 200
_LINES = 40
"""Lines of code that differ which are shown."""


def runs_table(records: Sequence[RunRecord], now: float) -> RenderableType:
    """One row for each run: how it fares, the last values of its key metrics, how far its loggers are.

    Args:
        now: seconds since 1970, for what still runs.
    """
    runs = [record.run for record in records]
    columns = [
        Column("run", [Text(visible(run.id, newlines=False)) for run in runs], folded=True),
        Column("experiment", [Text(one_line(run.experiment, 40)) for run in runs], cut=True),
        Column("status", [Text(*STATUS.get(run.status, (one_line(run.status, 20), ""))) for run in runs]),
        Column("step", [Text(_last_step(record)) for record in records], right=True, spare=1),
    ]
    for place, name in enumerate(_common(records)):
        cells = [Text(value(record.results.get(name))) for record in records]
        columns.append(Column(head(name), cells, right=True, spare=2 + place))
    columns += [
        Column("loggers", [Text(_loggers(record)) for record in records], cut=True, spare=7),
        Column("started", [Text(started(run.started), DIM) for run in runs], right=True, spare=8),
        Column("lasted", [Text(age(lasted(record, now))) for record in records], right=True, spare=9),
    ]
    if any(run.group for run in runs):
        columns.append(Column("group", [Text(one_line(run.group or "-", 40)) for run in runs], spare=10))
    if len({run.project for run in runs}) > 1:
        columns.append(Column("project", [Text(one_line(run.project, 40)) for run in runs], spare=11))
    return Columns(columns, tuple(_footer(records)))


def diff_view(
    a: RunRecord, b: RunRecord, found: Mapping[str, Sequence[Difference]], code: Sequence[str]
) -> RenderableType:
    """What differs between two runs, part by part.

    Args:
        a, b: the runs.
        found: see ``comparing.differences``.
        code: see ``comparing.changes``.
    """
    names = [visible(each.run.id, newlines=False) for each in (a, b)]
    if not found:
        return Text(f"{names[0]} and {names[1]} are equal: configuration, environment and results")
    views: list[RenderableType] = []
    for part, rows in found.items():
        columns = [
            Column(f"{part}", [Text(one_line(row.name, 80)) for row in rows], cut=True),
            Column(names[0], [_side(row, "a") for row in rows], cut=True),
            Column(names[1], [_side(row, "b") for row in rows], cut=True),
        ]
        if part == "results":
            columns.append(Column("change", [Text(_change(row)) for row in rows], right=True))
        views += [Columns(columns), Text()]
        if part == "git" and code:
            views += [*_code(code), Text()]
    return Group(*views[:-1])


def head(name: str) -> str:
    """Shorten the name of a metric to its end, which tells most."""
    text = visible(name, newlines=False)
    return text if len(text) <= _HEAD else f"…{text[1 - _HEAD :]}"


def value(found: float | None) -> str:
    """A number as one reads it."""
    if found is None:
        return "-"
    return f"{found:,}" if isinstance(found, int) else f"{found:.4g}"


def started(at: float) -> str:
    """When a run began."""
    return when(int(at * 1e9), "%Y-%m-%d %H:%M")


def lasted(record: RunRecord, now: float) -> float:
    """Seconds from the beginning of a run to its end, or to the last sign of it."""
    ended = now if record.run.status == "running" else record.run.ended or record.last
    return ended - record.run.started


def logger_word(logger: LoggerState, running: bool) -> str:
    """What is wrong with a logger; nothing where all is well."""
    words = []
    if logger.pending and not running:
        words.append(f"lacks {logger.pending:,}")
    elif logger.pending:
        words.append(f"{logger.pending:,} behind")
    elif logger.finished is None and not running:
        words.append("not closed")
    if logger.refused:
        words.append(f"refused {logger.refused:,}")
    return ", ".join(words)


def _last_step(record: RunRecord) -> str:
    return f"{record.steps[-1]:,}" if record.steps else "-"


def _common(records: Sequence[RunRecord]) -> list[str]:
    """Give the key metrics that most of the runs have, in the order of the runs' own lists."""
    counts = Counter(name for record in records for name in record.keys)
    chosen = [name for name, _ in counts.most_common(_METRICS)]
    order = dict.fromkeys(name for record in records for name in record.keys)
    return [name for name in order if name in chosen]


def _loggers(record: RunRecord) -> str:
    words = []
    for each in record.loggers:
        state = logger_word(each, record.run.status == "running")
        words.append(f"{each.name} ({state})" if state else each.name)
    return one_line(", ".join(words), _CELL)


def _footer(records: Sequence[RunRecord]) -> Iterator[str]:
    counts = Counter(record.run.status for record in records)
    parts = [count(len(records), "run")]
    parts += [f"{counts[name]:,} {name}" for name in ("running", "failed", "killed", "died") if counts[name]]
    yield ", ".join(parts)
    if any(each.pending for record in records if record.run.status != "running" for each in record.loggers):
        yield "`trackway sync` brings what loggers lack"


def _side(row: Difference, side: str) -> Text:
    if row.only not in (None, side):
        return Text("-", DIM)
    own, other = (row.a, row.b) if side == "a" else (row.b, row.a)
    return Text(one_line(_words(own, other), _CELL))


def _words(own: Any, other: Any) -> str:
    """A value in words; of a list only the items that the other one has not, if there are such."""
    if isinstance(own, list) and isinstance(other, list):
        differ = [item for item in own if item not in other]
        if differ or any(item not in own for item in other):
            return f"… {' '.join(_words(item, None) for item in differ)}".rstrip()
    if isinstance(own, str):
        return own
    if isinstance(own, float):
        return f"{own:.6g}"
    return json.dumps(own, ensure_ascii=False)


def _change(row: Difference) -> str:
    if row.only is not None:
        return "-"
    return f"{row.b - row.a:+.4g}"


def _code(lines: Sequence[str]) -> Iterator[Text]:
    styles = {"+": "green", "-": "red"}
    for line in lines[:_LINES]:
        yield Text(f"  {one_line(line, _CELL)}", styles.get(line[:1], DIM))
    if len(lines) > _LINES:
        yield Text(f"  {len(lines) - _LINES:,} more lines; --json has them all", DIM)
