"""Decoding by a table from id to bytes, where that gives the tokenizer's own text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .adapter import Adapter, Scheme
from .gather import Gather
from .ids import Item

LONG_RUN = 4
"""From this many in a row, tokens that sequences are padded with are shown as one marker."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[int, str]:
    """Map GPT-2's characters for bytes to the characters of the same number.

    Printable characters of Latin-1 stand for themselves, the other bytes in order for those from 256 on.
    All other characters below 256 are mapped to one that Latin-1 has not, so that encoding fails on them.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = dict.fromkeys(others, "\uffff")
    alphabet.update((0x100 + n, chr(byte)) for n, byte in enumerate(others))
    return alphabet


_ALPHABET = _byte_alphabet()


class ByteTable:
    """The bytes of every token."""

    def __init__(self, adapter: Adapter, scheme: Scheme) -> None:
        self.adapter = adapter
        self._scheme = scheme
        tokens = adapter.tokens()
        chunks: list[bytes | None] = [None] * (max(tokens, default=-1) + 1)
        for id_, token in tokens.items():
            chunks[id_] = self._bytes(id_, token)
        self._chunks = chunks
        self._raw = frozenset(
            id_
            for id_, token in tokens.items()
            if scheme.byte_fallback and isinstance(token, str) and _BYTE_TOKEN.fullmatch(token)
        )
        self._gather = _gather(chunks)
        self._runs = [chunk * LONG_RUN for id_ in adapter.fillers if (chunk := self._chunk(id_))]

    def quick(self, ids: Sequence[Any], continued: bool) -> str | None:
        """Decode a list of ids that all have text; None when there is anything else in it, or a run."""
        joined = self._gather.join(ids) if self._gather else None
        if joined is None:
            return None
        if any(run in joined for run in self._runs):
            return None
        if self._scheme.byte_level:
            return joined.decode("utf-8", "replace")
        try:
            text = joined.decode()
        except UnicodeDecodeError:
            return None
        if continued or not text or self._scheme.lead == "none":
            return text
        if self._scheme.lead == "one":
            return text.removeprefix(" ")
        first = (self._chunks[ids[0]] or b"").decode()
        return first.replace(" ", "") + text[len(first) :] if first else None

    def knows(self, id_: int) -> bool:
        """Say whether the vocabulary has the id."""
        return self._chunk(id_) is not None

    def text(self, items: list[Item], continued: bool) -> str:
        """Give the text of the items; ``continued`` when text came before them."""
        if self._scheme.byte_level:
            return b"".join(map(self._item, items)).decode("utf-8", "replace")
        return "".join(self.pieces(items, continued))

    def pieces(self, items: list[Item], continued: bool) -> list[str]:
        """Give the part of the text that each item adds; a character is with the item that completes it."""
        pieces: list[str] = []
        run: list[bytes] = []
        for item in items:
            chunk = self._item(item)
            if self._joins(item, chunk):
                run.append(chunk)
            else:
                pieces += self._run_pieces(run)
                pieces.append(chunk.decode())
                run = []
        pieces += self._run_pieces(run)
        if not continued and self._scheme.lead != "none":
            first = next((n for n, item in enumerate(items) if self._item(item)), None)
            if first is not None and not isinstance(items[first], str):
                self._strip(pieces, first)
        return pieces

    def settled(self, items: list[Item]) -> int:
        """Count the leading items whose text stays as it is, whatever follows."""
        end = len(items)
        if self._scheme.byte_level:
            while end and self._breaks_off(items, end):
                end -= 1
        else:
            while end and self._joins(items[end - 1], self._item(items[end - 1])):
                end -= 1
        return end

    def begins(self, items: list[Item]) -> bool:
        """Say whether the items bring a text to its beginning, so that what follows is continued."""
        return any(map(self._item, items))

    def agrees(self) -> bool:
        """Compare with the tokenizer itself on a fixed sample of its vocabulary."""
        return all(self.adapter.decode(ids) == self.text([*ids], False) for ids in self._sample())

    def _sample(self) -> Iterator[list[int]]:
        """Give short lists that show every way in which tokens are joined, the same ones each time."""
        known = [id_ for id_, chunk in enumerate(self._chunks) if chunk is not None]
        added = sorted(self.adapter.added)
        parts = [id_ for id_ in known if not _is_text(self._chunks[id_] or b"")]
        for group, lists, length in ((known, 60, 40), (known, 60, 3), (added, 20, 8), (parts, 60, 5)):
            for n in range(lists if group else 0):
                yield [group[(n * 7919 + k * 104_729 + k * k) % len(group)] for k in range(length)]
        # One after the other: whole characters where the bytes of a vocabulary stand in order.
        yield from ([*parts[n : n + 4], *known[n : n + 2]] for n in range(0, min(len(parts), 256), 3))
        yield from ([id_] for id_ in added)

    def _item(self, item: Item) -> bytes:
        return item.encode() if isinstance(item, str) else self._chunk(item) or b""

    def _chunk(self, id_: int) -> bytes | None:
        if 0 <= id_ < len(self._chunks) and (chunk := self._chunks[id_]) is not None:
            return chunk
        token = self.adapter.token(id_)  # perhaps added to the tokenizer since the table was made
        return None if token is None else self._bytes(id_, token)

    def _bytes(self, id_: int, token: str | bytes) -> bytes:
        if self.adapter.skip_special_tokens and id_ in self.adapter.special:
            return b""
        if isinstance(token, bytes):
            return token
        if self._scheme.byte_level:
            try:
                return token.translate(_ALPHABET).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()
        byte = _BYTE_TOKEN.fullmatch(token) if self._scheme.byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(self._scheme.space, " ").encode()

    def _breaks_off(self, items: list[Item], end: int) -> bool:
        """Say whether the bytes of the items before ``end`` stop within a character."""
        tail = b""
        while end and len(tail) < 4:
            end -= 1
            tail = self._item(items[end]) + tail
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        return decoder.getstate()[0] != b""

    def _joins(self, item: Item, chunk: bytes) -> bool:
        """Say whether the item's bytes may be a part of a character."""
        if self._scheme.byte_level:
            return True
        return not isinstance(item, str) and (item in self._raw or not chunk)

    def _run_pieces(self, run: list[bytes]) -> Iterator[str]:
        if not self._scheme.byte_level:
            try:
                b"".join(run).decode()
            except UnicodeDecodeError:
                # The tokenizers library gives up on the whole run of bytes, with one mark for each.
                return iter(["\ufffd" if chunk else "" for chunk in run])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last = len(run) - 1
        return (decoder.decode(chunk, n == last) for n, chunk in enumerate(run))

    def _strip(self, pieces: list[str], first: int) -> None:
        if self._scheme.lead == "one":
            pieces[first] = pieces[first].removeprefix(" ")
        else:
            pieces[first] = pieces[first].replace(" ", "")


def _gather(chunks: list[bytes | None]) -> Gather | None:
    try:
        return Gather(chunks)
    except ImportError:  # NumPy comes with transformers, not with tokenizers alone
        return None


def _is_text(chunk: bytes) -> bool:
    try:
        chunk.decode()
    except UnicodeDecodeError:
        return False
    return True


def build(adapter: Adapter) -> ByteTable | None:
    """Make a table for the tokenizer, or None when no table gives the tokenizer's own text."""
    scheme = adapter.scheme()
    table = ByteTable(adapter, scheme) if scheme else None
    return table if table and table.agrees() else None
