"""A report as one HTML file that needs nothing else: no script, no font, no picture, no connection."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from html import escape

from trackway.trace.printable import visible

from .plot import svg
from .report_blocks import Block, Code, Facts, Heading, Plots, Report, Table, Text

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --dim: #5b6570; --page: #fff; --line: #d5dae0;
  --band: #f4f6f8; --curve: #0b62c4; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --dim: #9aa4af; --page: #14171b;
  --line: #343a42; --band: #1d2127; --curve: #6cb2ff; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
nav a { margin-right: 1rem; } a { color: var(--curve); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
dt { color: var(--dim); } dd { margin: 0; white-space: pre-wrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: .25rem .7rem .25rem 0;
  border-bottom: 1px solid var(--line); white-space: pre-wrap; overflow-wrap: break-word; max-width: 34rem; }
th { color: var(--dim); font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(21rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-size: 14px; }
.plot { width: 100%; height: auto; background: var(--band); border-radius: 4px; }
.grid { stroke: var(--line); } .curve { fill: none; stroke: var(--curve); stroke-width: 1.6; }
.point { fill: var(--curve); } .tick { fill: var(--dim); font-size: 11px; text-anchor: middle; }
.tick.y { text-anchor: end; }
pre { background: var(--band); padding: .7rem; border-radius: 4px; white-space: pre-wrap; font-size: 13px; }
summary { cursor: pointer; color: var(--dim); }
"""
_ADDRESS = re.compile(r"https?://[\w.:\[\]-]+(/[\w~:/?#\[\]@!$&'()*+,;=.%-]*)?", re.ASCII)


def html(report: Report) -> str:
    """Write a report as HTML.

    Args:
        report: what it says; nothing in it is taken for markup.
    """
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    heads = [block.text for block in report.blocks if isinstance(block, Heading)]
    links = "".join(f'<a href="#{_anchor(text)}">{_text(text)}</a>' for text in heads)
    body = "\n".join("".join(_block(block)) for block in report.blocks)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_text(report.title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body><h1>{_text(report.title)}</h1>\n<nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def _text(text: str) -> str:
    return escape(visible(text))


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower())


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        yield f'<h2 id="{_anchor(block.text)}">{_text(block.text)}</h2>'
    elif isinstance(block, Text):
        yield f"<p>{_text(block.text)}</p>"
    elif isinstance(block, Facts):
        show = _linked if block.links else _text
        rows = (f"<dt>{_text(name)}</dt><dd>{show(value)}</dd>" for name, value in block.rows)
        yield f"<dl>{''.join(rows)}</dl>"
    elif isinstance(block, Code):
        yield f"<details><summary>{_text(block.title)}</summary><pre>{_text(block.text)}</pre></details>"
    elif isinstance(block, Plots):
        figures = (
            f"<figure><figcaption>{_text(name)}</figcaption>{svg(values, name)}</figure>"
            for name, values in block.curves.items()
        )
        yield f'<div class="plots">{"".join(figures)}</div>'
    else:
        yield from _table(block)


def _table(table: Table) -> Iterator[str]:
    if table.folded is not None:
        yield f"<details><summary>{_text(table.folded)}</summary>"
    classes = [' class="number"' if place in table.right else "" for place in range(len(table.heads))]
    heads = (f"<th{kind}>{_text(head)}</th>" for kind, head in zip(classes, table.heads, strict=True))
    yield f'<div class="wide"><table><thead><tr>{"".join(heads)}</tr></thead><tbody>'
    for row in table.rows:
        cells = (f"<td{kind}>{_text(cell)}</td>" for kind, cell in zip(classes, row, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if table.folded is not None:
        yield "</details>"


def _linked(text: str) -> str:
    if _ADDRESS.fullmatch(text):
        return f'<a href="{escape(text)}" rel="noreferrer noopener">{_text(text)}</a>'
    return _text(text)
