"""Text from a trace, made safe to print and cut to what a person can take in."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from rich.cells import cell_len

_TAB = 4
_WORD = 20  # how far a cut moves to fall between words


def cut(text: str, max_chars: int, *, columns: int = 40) -> tuple[str, int, str]:
    """Keep the beginning and the end of a long text.

    A text of very many short lines is cut as well: there is room for one line break for each ``columns``
    characters of ``max_chars``.

    Returns:
        The beginning, how many characters are left out, and the end. When nothing is left out, the
        beginning is the whole text.
    """
    if len(text) <= max_chars and text.count("\n") <= max(1, max_chars // columns):
        return text, 0, ""
    head = _boundary(text, _reach(text, max_chars * 2 // 3, columns))
    tail = _boundary(text, len(text) - _reach(text[: -max_chars - 1 : -1], max_chars // 3, columns))
    head = text.rfind(" ", max(0, head - _WORD), head) + 1 or head
    tail = text.find(" ", tail, tail + _WORD) + 1 or tail
    if head >= tail:
        return text, 0, ""
    return text[:head], tail - head, text[tail:]


def _reach(text: str, chars: int, columns: int) -> int:
    """How many characters from the start have at most ``chars`` characters and their share of line breaks."""
    end = -1
    for _ in range(max(1, chars // columns)):
        end = text.find("\n", end + 1, chars)
        if end < 0:
            return min(chars, len(text))
    return end


def fold(text: str, width: int) -> Iterator[str]:
    """Break text into lines of at most ``width`` cells, at spaces where there are any.

    No character is dropped but the line breaks, so the joined lines are the text. It costs a fraction of
    what rich takes for a long text without spaces.
    """
    width = max(1, width)
    for raw in text.split("\n"):
        line = raw.expandtabs(_TAB)
        start = 0
        while (end := _fit(line, start, width)) < len(line):
            space = line.rfind(" ", start, end) + 1
            if line[start:space].strip():
                end = space
            yield line[start:end]
            start = end
        yield line[start:]


def _fit(line: str, start: int, width: int) -> int:
    """Where the longest piece from ``start`` ends that fits ``width`` cells; at least one character."""
    end = min(len(line), start + width)
    while end > start + 1 and (over := cell_len(line[start:end]) - width) > 0:
        end = max(start + 1, end - max(1, over // 2))
    while end < len(line) and cell_len(line[end]) == 0:
        end += 1
    return max(start + 1, _boundary(line, end)) if end < len(line) else end


def _boundary(text: str, position: int) -> int:
    """The nearest place at or before ``position`` that parts no mark and no joined emoji from its base."""
    for place in range(position, max(0, position - 16), -1):
        if place >= len(text) or not (_joins(text[place]) or text[place - 1] == "\u200d"):
            return place
    return position


def _joins(character: str) -> bool:
    return (
        character == "\u200d"
        or "\ufe00" <= character <= "\ufe0f"
        or "\U0001f3fb" <= character <= "\U0001f3ff"  # skin tones
        or unicodedata.combining(character) != 0
    )
