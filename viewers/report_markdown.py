"""A report as Markdown: what people and models wrote is code there, and no renderer takes it for more."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trackway.trace.printable import visible

from .plot import sparkline
from .report_blocks import Block, Code, Facts, Heading, Plots, Report, Table, Text


def markdown(report: Report) -> str:
    """Write a report as Markdown with the tables of GitHub's.

    Args:
        report: what it says; nothing in it is taken for markup.
    """
    lines = [f"# {_words(report.title)}", ""]
    for block in report.blocks:
        lines += [*_block(block), ""]
    return "\n".join(lines)


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        yield f"## {_words(block.text)}"
    elif isinstance(block, Text):
        yield visible(block.text, newlines=False)
    elif isinstance(block, Facts):
        yield from (f"- {name}: {_code(value)}" for name, value in block.rows)
    elif isinstance(block, Plots):
        rows = [[name, sparkline(values)] for name, values in block.curves.items()]
        yield from _table(Table(("metric", "curve"), rows))
    elif isinstance(block, Table):
        if block.folded is not None:
            yield from (f"{block.folded}:", "")
        yield from _table(block)
    else:
        yield from _fenced(block)


def _table(table: Table) -> Iterator[str]:
    yield _row([_cell(head) for head in table.heads])
    yield _row(["--:" if place in table.right else "---" for place in range(len(table.heads))])
    for row in table.rows:
        yield _row([_cell(cell) for cell in row])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _fenced(block: Code) -> Iterator[str]:
    text = visible(block.text)
    fence = "`" * max(3, _longest(text) + 1)
    yield from (f"{_code(block.title)}:", "", f"{fence}text", text.rstrip("\n"), fence)


def _cell(text: str) -> str:
    return _code(text).replace("|", "\\|")


def _words(text: str) -> str:
    """Give a short text of ours; the id in it stands as it is."""
    return text if re.fullmatch(r"[\w -]+", text) else _code(text)


def _code(text: str) -> str:
    """Give a text on one line; as code unless it is a word or a number."""
    line = visible(text, newlines=False)
    if re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9 .,%/+-]*)?", line) and "www." not in line.lower():
        return line
    ticks = "`" * (_longest(line) + 1)
    space = " " if line.startswith(("`", " ")) or line.endswith(("`", " ")) else ""
    return f"{ticks}{space}{line}{space}{ticks}"


def _longest(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
