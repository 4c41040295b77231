"""Columns side by side in the width there is: what tells least goes first, and no line ends in padding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from trackway.trace.printable import visible

from .text import fold
from .words import DIM, encodable, error_text

GAP = 2
_ENOUGH = 30
"""Cells of a column that may be narrower which are worth giving up others for."""
_LEAST = 8
_SPACE = re.compile(r"[ \t\n]+")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        right: align to the right.
        cut: may be narrower than what it holds, which is then cut.
        folded: may be narrower than what it holds, which then takes several lines; only the first column can.
        spare: where not everything fits, columns with higher numbers are left out first; 0 always stays.
    """

    name: str
    cells: list[Text]
    right: bool = False
    cut: bool = False
    folded: bool = False
    spare: int = 0

    @property
    def width(self) -> int:
        return max(len(self.name), max((cell.cell_len for cell in self.cells), default=0))


@dataclass(frozen=True)
class Columns:
    """Columns under their names, a line for each row, and dim lines below."""

    columns: list[Column]
    footer: tuple[str, ...] = ()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        wide = sum(column.width + GAP for column in self.columns) - GAP
        return Measurement(min(40, options.max_width), min(wide, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = not options.encoding.startswith("utf")
        columns = [_encodable(column, options.encoding) if narrow else column for column in self.columns]
        columns = _fitting(columns, options.max_width)
        widths = [column.width for column in columns]
        shrinking = [place for place, column in enumerate(columns) if column.cut or column.folded] or [0]
        while sum(widths) + GAP * (len(widths) - 1) > options.max_width:
            widest = max(shrinking, key=widths.__getitem__)
            if widths[widest] <= _LEAST:
                break
            widths[widest] -= 1
        heads = [Text(column.name, "bold") for column in columns]
        yield from _row(heads, columns, widths, "")
        rule = "-" if narrow else "─"
        yield _line([Text(rule * (sum(widths) + GAP * (len(widths) - 1)), DIM)])
        for cells in zip(*(column.cells for column in columns), strict=True):
            yield from _row(cells, columns, widths, "..." if narrow else "…")
        for text in self.footer:
            for line in fold(encodable(text, options.encoding), options.max_width):
                yield _line([Text(line, DIM)])


def one_line(text: str, limit: int) -> str:
    """A text of a trace as a single line of at most ``limit`` characters that steers nothing."""
    line = visible(_SPACE.sub(" ", error_text(text)), newlines=False)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _encodable(column: Column, encoding: str) -> Column:
    cells = [Text(encodable(cell.plain, encoding), cell.style) for cell in column.cells]
    return replace(column, cells=cells)


def _fitting(columns: list[Column], width: int) -> list[Column]:
    """The columns that fit side by side, the most telling ones first."""
    kept = [column for column in columns if not column.spare]
    room = width + GAP - sum(_room(column) for column in kept)
    for column in sorted(columns, key=lambda column: column.spare):
        if column.spare and _room(column) <= room:
            kept.append(column)
            room -= _room(column)
    return [column for column in columns if column in kept]


def _room(column: Column) -> int:
    return GAP + (min(column.width, _ENOUGH) if column.cut or column.folded else column.width)


def _row(
    cells: Sequence[Text], columns: Sequence[Column], widths: Sequence[int], mark: str
) -> Iterator[Text]:
    """A row as lines; only a first cell that is to be folded makes several."""
    first, *rest = cells
    if columns[0].folded:
        *over, first = (Text(part, first.style) for part in fold(first.plain, widths[0]))
        yield from (_line([part]) for part in over)
    parts: list[Text] = []
    for cell, column, width in zip([first, *rest], columns, widths, strict=True):
        if parts:
            parts[-1].append(" " * (widths[len(parts) - 1] - parts[-1].cell_len + GAP))
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
