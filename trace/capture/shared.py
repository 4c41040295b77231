"""What a payload has in common with earlier ones of its rollout, so that a conversation is stored once.

An agent loop hands the messages so far to every generation, and a growing prompt as text likewise. Stored
whole, the bytes grow with the square of the turns. Here a list or a text that begins as one before it did is
stored as what it adds, with a reference to the span that holds the beginning. Only hashes are remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import orjson

Path = tuple[str, ...]
"""Names of fields from a payload down to a value inside; empty for the payload itself."""
Place = tuple[str, str, Path]
"""Span id, ``input`` or ``output``, path."""
Base = tuple[Path, str, str, Path, int]
"""Path of a value that is stored without its beginning; the place of that beginning, and its length."""

_DEPTH = 4
_LEAST = 256
"""Fewer bytes in common are not worth a reference."""
_MAX_KNOWN = 10_000
"""Beginnings that are remembered of one rollout."""


class SharedParts:
    """The beginnings of lists and texts that one rollout has stored so far."""

    __slots__ = ("_lists", "_new_lists", "_new_texts", "_texts")

    def __init__(self) -> None:
        # Digest of a list up to one of its items -> where it stands, number of items, bytes.
        self._lists: dict[bytes, tuple[Place, int, int]] = {}
        # Where the text stood last, without its span -> that span, number of characters, digest.
        self._texts: dict[tuple[str, Path], tuple[str, int, bytes]] = {}
        self._new_lists: dict[bytes, tuple[Place, int, int]] = {}
        self._new_texts: dict[tuple[str, Path], tuple[str, int, bytes]] = {}

    def cut_lists(
        self, value: dict[str, Any], span_id: str, which: str, changes: Callable[[str, Any], bool]
    ) -> list[Base]:
        """Take the beginnings of lists that are known already out of a payload.

        Args:
            value: the payload as plain values, in a dict under the name ``""``; lists are replaced in place.
            span_id: the span whose payload it is.
            which: ``input`` or ``output``.
            changes: says of a field whether it is stored under another name, or something in its place.

        Returns:
            What was taken out, and where it stands.
        """
        bases: list[Base] = []
        for holder, name, path in list(_parts(value, list, changes)):
            items = holder[name]
            known: tuple[Place, int, int] | None = None
            digest, size = b"", 0
            for number, item in enumerate(items, 1):
                text = orjson.dumps(item)
                size += len(text)
                digest = _digest(text, digest)  # of all items so far
                if digest in self._lists:
                    known = self._lists[digest]
                else:
                    self._new_lists[digest] = (span_id, which, path), number, size
            if known is not None and known[2] >= _LEAST:
                holder[name] = items[known[1] :]
                bases.append((path, *known[0], known[1]))
        return bases

    def cut_texts(self, value: dict[str, Any], span_id: str, which: str) -> list[Base]:
        """Do the same for texts, which must be as they are stored: secrets masked, too long ones cut."""
        bases: list[Base] = []
        for holder, name, path in list(_parts(value, str, lambda name, part: False)):
            text = holder[name]
            if len(text) < _LEAST:
                continue
            last, count, digest = self._texts.get((which, path), ("", 0, b""))
            if 0 < count <= len(text) and _digest(text[:count].encode()) == digest:
                holder[name] = text[count:]
                bases.append((path, last, which, path, count))
            self._new_texts[which, path] = span_id, len(text), _digest(text.encode())
        return bases

    def keep(self) -> None:
        """Remember what the payloads of a span brought, now that it is encoded."""
        if len(self._lists) < _MAX_KNOWN:
            self._lists.update(self._new_lists)
        if len(self._texts) < _MAX_KNOWN:
            self._texts.update(self._new_texts)
        self.forget_new()

    def forget_new(self) -> None:
        """Forget what the payloads of a span brought that could not be encoded."""
        self._new_lists.clear()
        self._new_texts.clear()


def _digest(data: bytes, before: bytes = b"") -> bytes:
    return blake2b(data, digest_size=16, key=before).digest()


def _parts(
    holder: dict[str, Any], kind: type, changes: Callable[[str, Any], bool], path: Path = ()
) -> Iterator[tuple[dict[str, Any], str, Path]]:
    """Give the texts, or the lists of messages, in nested dicts: each with its dict, its name, its path."""
    for name, part in holder.items():
        here = (*path, name)
        if changes(name, part):
            continue
        if isinstance(part, dict):
            if len(here) < _DEPTH:
                yield from _parts(part, kind, changes, here)
        elif isinstance(part, kind) and (isinstance(part, str) or _is_conversation(part)):
            yield holder, name, here[1:]


def _is_conversation(items: Any) -> bool:
    return len(items) > 0 and isinstance(items[0], (dict, str))
