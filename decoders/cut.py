"""Cutting what is long, so that the reader sees its head and its tail and how much is hidden between them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .hf import HFDecoder
from .ids import as_list

_REPLACEMENT = "\ufffd"
_MOST_TOKENS_OF_A_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class Cut:
    """The text of a token sequence, perhaps cut.

    Attributes:
        tokens: length of the whole sequence.
        hidden: how many of them are not in the text.
        unknown: how many of the shown ones have no text, -100 left aside; they stand as ``⟨id⟩``.
        incomplete: the text breaks off within a character next to the cut.
    """

    text: str
    tokens: int
    hidden: int
    unknown: int = 0
    incomplete: bool = False


@dataclass(frozen=True, slots=True)
class TextCut:
    """A text, perhaps cut.

    Attributes:
        characters: length of the whole text in code points.
        hidden: how many of them are not in ``text``.
    """

    text: str
    characters: int
    hidden: int


def decode_cut(decoder: HFDecoder, ids: Any, max_length: int | None) -> Cut:
    """Decode at most ``max_length`` tokens: two thirds from the head, the rest, at least one, from the tail.

    Only these are decoded, so a million ids cost what ``max_length`` costs. Between head and tail stands
    ``⟨… 1,024 tokens hidden …⟩``. Tokens next to the cut that hold only a part of a character are hidden too.

    Args:
        ids: as for ``HFDecoder.decode``; what can be sliced is not copied.
        max_length: in tokens; None shows everything, 0 only the marker.

    Raises:
        ValueError: ``max_length`` is negative or not an integer.
    """
    _check(max_length, "tokens")
    ids = _sliceable(ids)
    total = len(ids)
    if max_length is None or total <= max_length:
        text = decoder.decode(ids)
        return Cut(text, total, 0, _unknown(decoder, ids, text))
    head, tail = ids[: max_length * 2 // 3], ids[total - max_length + max_length * 2 // 3 :]
    head, before = _shorten(
        decoder.decode, head, lambda n: head[: len(head) - n], lambda text: text.endswith(_REPLACEMENT)
    )
    ...
