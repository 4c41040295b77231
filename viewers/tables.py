"""A list of trajectories and the state of a store, as tables in a terminal."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from trackway.trace.model import Summary

from .text import fold, visible
from .words import DIM, STATUS, aligned, count, duration, encodable, error_text, size, when

if TYPE_CHECKING:
    from trackway.trace.store import StoreStatus

_GAP = 2
_MAX_CELL = 200
_MAX_ERROR = 500
_ENOUGH = 30
"""Cells of an error that are worth giving up other columns for."""
_MAX_KINDS = 5
_SHORT_ID = 12
_SPACE = re.compile(r"[ \t\n]+")
# Columns that may be missing where not everything fits, the most telling first.
_SPARE = ("experiment", "errors", "time", "tools", "tokens", "turns", "started")


def table(summaries: Iterable[Summary], *, more: bool = False) -> RenderableType:
    """One row for each trajectory, and below how many there are, how they fared and what went wrong.

    Where the terminal is narrow, columns that tell less are left out. A key is never cut.

    Args:
        more: there are more trajectories than these, which the line below then says.
    """
    rows = list(summaries)
    return _Lines(_listing(rows), tuple(_footer(rows, more)))


@dataclass(frozen=True)
class _Column:
    """A column of a table; only one with ``cut`` may be narrower than what it holds."""

    name: str
    cells: list[Text]
    right: bool = False
    cut: bool = False

    @property
    def width(self) -> int:
        return max(len(self.name), max((cell.cell_len for cell in self.cells), default=0))


@dataclass(frozen=True)
class _Lines:
    """Lays columns out as lines without padding at their end, in the width there is."""

    columns: list[_Column]
    footer: tuple[str, ...] = ()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        wide = sum(column.width + _GAP for column in self.columns) - _GAP
        return Measurement(min(40, options.max_width), min(wide, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = not options.encoding.startswith("utf")
        columns = [self._encodable(column, options.encoding) if narrow else column for column in self.columns]
        columns = _fitting(columns, options.max_width)
        widths = [column.width for column in columns]
        spare = options.max_width - sum(widths) - _GAP * (len(widths) - 1)
        if spare < 0:
            place = next((place for place, column in enumerate(columns) if column.cut), 0)
            widths[place] = max(8, widths[place] + spare)
        heads = [Text(column.name, "bold") for column in columns]
        yield from _row(heads, columns, widths, "")
        rule = "-" if narrow else "─"
        yield _line([Text(rule * (sum(widths) + _GAP * (len(widths) - 1)), DIM)])
        for cells in zip(*(column.cells for column in columns), strict=True):
            yield from _row(cells, columns, widths, "..." if narrow else "…")
        for text in self.footer:
            yield Text(encodable(text, options.encoding), DIM)

    def _encodable(self, column: _Column, encoding: str) -> _Column:
        cells = [Text(encodable(cell.plain, encoding), cell.style) for cell in column.cells]
        return _Column(column.name, cells, column.right, column.cut)


def _fitting(columns: list[_Column], width: int) -> list[_Column]:
    """The columns that fit side by side, the most telling ones first."""
    kept = [column for column in columns if column.name not in _SPARE]
    room = width + _GAP - sum(_room(column) for column in kept)
    spare = [column for name in _SPARE for column in columns if column.name == name]
    for column in spare:
        if _room(column) <= room:
            kept.append(column)
            room -= _room(column)
    return [column for column in columns if column in kept]


def _room(column: _Column) -> int:
    return _GAP + (min(column.width, _ENOUGH) if column.cut else column.width)


def _row(
    cells: Sequence[Text], columns: Sequence[_Column], widths: Sequence[int], mark: str
) -> Iterator[Text]:
    """A row as lines; only a first cell that is wider than its column makes more than one."""
    first, *rest = cells
    *over, last = (Text(part, first.style) for part in fold(first.plain, widths[0]))
    yield from (_line([part]) for part in over)
    parts = [last]
    for cell, column, width in zip(rest, columns[1:], widths[1:], strict=True):
        parts[-1].append(" " * (widths[len(parts) - 1] - parts[-1].cell_len + _GAP))
        text = cell.plain
        if cell.cell_len > width:
            text = set_cell_size(text, width - len(mark)).rstrip() + mark
        pad = " " * (width - Text(text).cell_len) if column.right else ""
        parts.append(Text.assemble(pad, (text, cell.style)))
    yield _line(parts)


def _line(parts: Sequence[Text]) -> Text:
    line = Text.assemble(*parts, no_wrap=True, overflow="ignore")
    line.rstrip()
    return line


def _listing(rows: Sequence[Summary]) -> list[_Column]:
    columns = [
        _Column("key", [Text(_name(row)) for row in rows]),
        _Column("status", [Text(*STATUS[row.status]) for row in rows]),
    ]
    if len({row.experiment for row in rows}) > 1:
        names = [Text(visible(row.experiment or "-", newlines=False)) for row in rows]
        columns.append(_Column("experiment", names))
    rewards = [Text("-", DIM) if row.reward is None else Text(aligned(row.reward)) for row in rows]
    columns += [
        _Column("reward", rewards, right=True),
        _Column("turns", [Text(str(row.turns)) for row in rows], right=True),
        _Column("tools", [Text(str(row.tool_calls)) for row in rows], right=True),
        _Column("tokens", [Text(f"{row.tokens:,}") for row in rows], right=True),
        _Column("errors", [Text(str(row.errors), "red" if row.errors else DIM) for row in rows], right=True),
        _Column("time", [Text(duration(row.start_ns, row.end_ns)) for row in rows], right=True),
        _Column("started", [Text(when(row.start_ns, "%m-%d %H:%M"), DIM) for row in rows], right=True),
    ]
    if any(row.error for row in rows):
        errors = [Text(_one_line(row.error or "", _MAX_CELL), "red") for row in rows]
        columns.append(_Column("error", errors, cut=True))
    return columns


def _name(row: Summary) -> str:
    """The key; what nobody named is known by the beginning of its trace id, which ``show`` takes too."""
    return row.trace_id[:_SHORT_ID] if row.key is None else visible(row.name, newlines=False)


def _one_line(text: str, limit: int) -> str:
    line = visible(_SPACE.sub(" ", error_text(text)), newlines=False)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _footer(rows: Sequence[Summary], more: bool) -> Iterator[str]:
    failed = sum(row.status in ("error", "died") for row in rows)
    shown = count(len(rows), "trajectory", "trajectories")
    parts = [f"{shown} shown (there are more)" if more else shown]
    if failed:
        parts.append(f"{failed} failed")
    given = [row.reward for row in rows if row.reward is not None]
    rewards = [reward for reward in given if math.isfinite(reward)]
    if rewards:
        mean = f"mean reward {_short(math.fsum(rewards) / len(rewards))}"
        word = "one" if len(rewards) == len(given) else "a finite one"
        parts.append(mean if len(rewards) == len(rows) else f"{mean} of {len(rewards):,} with {word}")
    yield ", ".join(parts)
    kinds = Counter(_kind(row.error) for row in rows if row.error)
    if kinds:
        named = [f"{number:,} {kind}" for kind, number in kinds.most_common(_MAX_KINDS)]
        if len(kinds) > _MAX_KINDS:
            named.append(f"{sum(kinds.values()) - sum(n for _, n in kinds.most_common(_MAX_KINDS)):,} others")
        yield f"errors: {', '.join(named)}"


def _kind(error: str) -> str:
    return _one_line(error.partition(":")[0], 60)


def _short(value: float) -> str:
    text = aligned(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def status_view(status: StoreStatus, path: str = "") -> RenderableType:
    """What a store holds, and where each recorded span is: exported, pending or dropped.

    Args:
        path: where the store is, for the first line.
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=DIM, no_wrap=True)
    grid.add_column(overflow="fold")
    if path:
        grid.add_row(Text("store"), Text(visible(path, newlines=False)))
    held = count(status.trajectories, "trajectory", "trajectories")
    grid.add_row(Text("holds"), Text(f"{held}, {status.in_flight:,} running, {size(status.bytes)}"))
    writers = f"{status.writers_alive:,} recording now, {status.writers_dead:,} ended"
    grid.add_row(Text("processes"), Text(writers))
    grid.add_row(Text("spans"), *_balance(status))
    for reason, number in status.dropped_by_reason.items():
        grid.add_row(Text("dropped"), Text(f"{number:,} {visible(reason, newlines=False)}", "yellow"))
    if status.torn_lines:
        torn = f"{count(status.torn_lines, 'line')} that a crash left unreadable"
        grid.add_row(Text("torn"), Text(torn, "yellow"))
    if status.troubles:
        troubles = f"{count(status.troubles, 'failure')} while recording; the log of the training tells more"
        grid.add_row(Text("trouble"), Text(troubles, "yellow"))
    if not status.destinations:
        grid.add_row(Text("sent to"), Text("nowhere yet", DIM))
        return grid

    places = status.destinations
    refused = [Text(f"{each.refused:,}", "red" if each.refused else "") for each in places.values()]
    columns = [
        _Column("sent to", [Text(visible(name, newlines=False)) for name in places]),
        _Column("exported", [Text(f"{each.exported:,}") for each in places.values()], right=True),
        _Column("pending", [Text(f"{each.pending:,}") for each in places.values()], right=True),
        _Column("refused", refused, right=True),
    ]
    errors = [
        Text.assemble(
            (f"last error of {visible(name, newlines=False)}: ", DIM),
            (_one_line(place.last_error, _MAX_ERROR), "red"),
            overflow="fold",
        )
        for name, place in places.items()
        if place.last_error
    ]
    return Group(grid, Text(""), _Lines(columns), *([Text(""), *errors] if errors else ()))


def _balance(status: StoreStatus) -> Iterator[Text]:
    """recorded = exported + pending + dropped, in words."""
    where = f"{status.exported:,} {'exported' if status.destinations else 'in the journal'}"
    text = f"{status.recorded:,} recorded = {where} + {status.pending:,} pending + {status.dropped:,} dropped"
    missing = status.recorded - status.exported - status.pending - status.dropped
    if missing:
        yield Text(f"{text}\nERROR {missing:,} are not accounted for", "red")
    else:
        yield Text(text, "yellow" if status.dropped else "")
