"""Token sequences that come bit by bit, in the items of a generator."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

Tokens = dict[str, tuple[Any, ...]]


class Found:
    """Token sequences that were found inside of a value.

    Attributes:
        tokens: by what they are.
        several: what there was more than one of, side by side: no one of them can stand for all, so they
            stay in the value.
    """

    __slots__ = ("several", "tokens")

    def __init__(self, tokens: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        self.tokens: Tokens = dict(tokens or {})
        self.several: set[str] = set()


class StreamTokens:
    """Puts the token sequences of a generator's items together."""

    __slots__ = ("_prompt", "_sequences")

    def __init__(self) -> None:
        self._prompt: tuple[Any, ...] | None = None
        self._sequences: dict[str, _Growing] = {}

    def add(self, tokens: Mapping[str, tuple[Any, ...]]) -> None:
        """Take the sequences that one item holds, by what they are."""
        for what, part in tokens.items():
            if what == "prompt":
                self._prompt = part if self._prompt is None else self._prompt
            else:
                self._sequences.setdefault(what, _Growing()).add(part)

    def whole(self) -> Tokens:
        """Give the whole sequences."""
        tokens = {what: sequence.whole() for what, sequence in self._sequences.items()}
        return tokens if self._prompt is None else {"prompt": self._prompt, **tokens}


class _Growing:
    """One sequence, of which an engine's items hold either what is new or all of it so far.

    They hold all of it so far when each begins with the one before and the last is longer than the first.
    """

    __slots__ = ("_last", "_lengths", "_parts")

    def __init__(self) -> None:
        self._last: tuple[Any, ...] = ()
        self._lengths: list[int] = []
        self._parts: list[tuple[Any, ...]] | None = None

    def add(self, part: tuple[Any, ...]) -> None:
        if not part:
            return  # a last item that brings only the reason why it ended
        if self._parts is None:
            if part[: len(self._last)] == self._last:
                self._last = part
                self._lengths.append(len(part))
                return
            self._parts = [self._last[:length] for length in self._lengths]
        self._parts.append(part)

    def whole(self) -> tuple[Any, ...]:
        if self._parts is not None:
            return tuple(chain.from_iterable(self._parts))
        grew = bool(self._lengths) and self._lengths[-1] > self._lengths[0]
        return self._last if grew else self._last * len(self._lengths)
