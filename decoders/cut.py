"""Cutting what is long, so that a reader sees head and tail, and how much is hidden between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .characters import may_cut
from .hf import HFDecoder
from .ids import as_list

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Cut:
    """The text of a token sequence, perhaps cut.

    Attributes:
        tokens: length of the whole sequence.
        hidden: how many of its tokens are not in ``text``.
        unknown: how many of the others have no text, -100 left aside; they stand as ``⟨id⟩``.
        incomplete: next to the cut stands a replacement character: there the bytes make no character, and
            hiding up to three more tokens did not change that.
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
        characters: length of the whole text, in code points.
        hidden: how many of them are not in ``text``.
    """

    text: str
    characters: int
    hidden: int


def decode_cut(decoder: HFDecoder, ids: Any, max_length: int | None, *, continued: bool = False) -> Cut:
    """Decode at most ``max_length`` tokens: two thirds from the head, the rest, at least one, from the tail.

    No others are decoded, so a million ids cost what ``max_length`` costs. Between head and tail stands
    ``⟨… 1,024 tokens hidden …⟩``. Tokens next to it that hold only a part of a character are hidden too.

    Args:
        ids: as for ``HFDecoder.decode``; what can be sliced is not copied.
        max_length: in tokens; None shows everything, 0 only the marker.
        continued: text came before, see ``HFDecoder.decode``.

    Raises:
        ValueError: ``max_length`` is negative or not an integer.
    """
    _check(max_length, "tokens")
    ids = _sliceable(ids)
    total = len(ids)
    if max_length is None or total <= max_length:
        text = decoder.decode(ids, continued=continued)
        return Cut(text, total, 0, _unknown(decoder, ids, text))
    size = max_length * 2 // 3
    head, head_text = _whole_characters(
        ids[:size],
        lambda part: decoder.decode(part, continued=continued),
        lambda part, n: part[: len(part) - n],
        lambda text: text.endswith(_REPLACEMENT),
    )
    tail, tail_text = _whole_characters(
        ids[total - (max_length - size) :],
        lambda part: decoder.decode(part, continued=True),
        lambda part, n: part[n:],
        lambda text: text.startswith(_REPLACEMENT),
    )
    hidden = total - len(head) - len(tail)
    return Cut(
        head_text + _hidden(hidden, "token") + tail_text,
        total,
        hidden,
        _unknown(decoder, head, head_text) + _unknown(decoder, tail, tail_text),
        incomplete=head_text.endswith(_REPLACEMENT) or tail_text.startswith(_REPLACEMENT),
    )


def cut_text(text: str, max_length: int | None) -> TextCut:
    """Cut a text to ``max_length`` characters, the marker ``⟨… 1,024 characters hidden …⟩`` among them.

    Head and tail are kept, two thirds and one third. What a reader sees as one character (letters with their
    accents, joined emoji, flags) is not cut apart; it is hidden as a whole. Where the marker does not fit,
    ``…`` stands for it.

    Args:
        max_length: in code points; None leaves the text as it is.

    Raises:
        ValueError: ``max_length`` is negative or not an integer.
    """
    _check(max_length, "characters")
    total = len(text)
    if max_length is None or total <= max_length:
        return TextCut(text, total, 0)
    room = max_length - len(_hidden(total, "character"))
    said = room >= 0
    if not said:
        room = max(0, max_length - 1)
    head = room * 2 // 3
    tail = total - (room - head)
    while head and not may_cut(text, head):
        head -= 1
    while tail < total and not may_cut(text, tail):
        tail += 1
    mark = _hidden(tail - head, "character") if said else "…"[:max_length]
    return TextCut(text[:head] + mark + text[tail:], total, tail - head)


def _check(max_length: int | None, unit: str) -> None:
    if max_length is not None and (type(max_length) is not int or max_length < 0):
        raise ValueError(
            f"max_length is {max_length!r}; it counts {unit}: an integer from 0 on, or None to cut nothing"
        )


def _hidden(count: int, unit: str) -> str:
    return f"⟨… {count:,} {unit}{'' if count == 1 else 's'} hidden …⟩"


def _whole_characters(
    part: Any,
    decode: Callable[[Any], str],
    shorter: Callable[[Any, int], Any],
    broken: Callable[[str], bool],
) -> tuple[Any, str]:
    """Leave out as few tokens as make the edge whole; a character of UTF-8 has at most four bytes."""
    text = decode(part)
    if broken(text):
        for n in range(1, min(3, len(part)) + 1):
            fewer = shorter(part, n)
            if not broken(candidate := decode(fewer)):
                return fewer, candidate
    return part, text


def _unknown(decoder: HFDecoder, ids: Any, text: str) -> int:
    return decoder.unknown(ids) if "⟨" in text else 0


def _sliceable(ids: Any) -> Any:
    """Give something with ``len`` and slices, without copying a long sequence."""
    if hasattr(ids, "tolist"):
        while getattr(ids, "ndim", 1) > 1 and len(ids) == 1:
            ids = ids[0]
        if getattr(ids, "ndim", 1) == 1:
            return ids
    elif isinstance(ids, (list, tuple, range)) and len(ids) != 1:
        return ids
    return as_list(ids)
