"""Decoding by the tokenizer's own ``decode``, for tokenizers whose text no table gives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from .adapter import Adapter
from .ids import Item

_LONGEST_SPLIT = 8
"""Tokens that one character may be made of before a replacement character is taken for what it is."""


class WholeText:
    """Decodes whole stretches of ids; markers stand between them."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._known: set[int] = set()

    def quick(self, ids: Any, continued: bool) -> None:
        """There is no quick way here: ids that have no text must be found first."""

    def knows(self, id_: int) -> bool:
        """Say whether the vocabulary has the id."""
        if id_ not in self._known:
            if self.adapter.token(id_) is None:
                return False
            self._known.add(id_)
        return True

    def text(self, items: list[Item], continued: bool) -> str:
        """Give the text of the items."""
        return "".join(part if isinstance(part, str) else self.adapter.decode(part) for part in _parts(items))

    def pieces(self, items: list[Item], continued: bool) -> list[str]:
        """Give the part of the text that each item adds."""
        pieces: list[str] = []
        for part in _parts(items):
            pieces += [part] if isinstance(part, str) else self._pieces_of_ids(part)
        return pieces

    def settled(self, items: list[Item]) -> int:
        """Nothing is certain before the end: any token may change how the ones before it are written."""
        return 0

    def begins(self, items: list[Item]) -> bool:
        """Say whether the items bring a text to its beginning."""
        return bool(items)

    def _pieces_of_ids(self, ids: list[int]) -> list[str]:
        """Compare the text of a few tokens with and without the next one.

        Where these differences do not add up to the whole text, the first piece is all of it.
        """
        decode = self.adapter.decode
        whole = decode(ids)
        pieces = []
        start = done = 0
        for end in range(1, len(ids) + 1):
            before, now = decode(ids[start:done]), decode(ids[start:end])
            waiting = now.endswith("\ufffd") and end < len(ids) and end - done < _LONGEST_SPLIT
            if waiting or not now.startswith(before):
                pieces.append("")
            else:
                pieces.append(now[len(before) :])
                start, done = done, end
        return pieces if "".join(pieces) == whole else [whole, *[""] * (len(ids) - 1)]


def _parts(items: list[Item]) -> Iterator[str | list[int]]:
    for is_marker, group in groupby(items, lambda item: isinstance(item, str)):
        if is_marker:
            yield from (item for item in group if isinstance(item, str))
        else:
            yield [item for item in group if not isinstance(item, str)]
