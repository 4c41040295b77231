"""Token sequences -> attributes: what a turn adds to the sequence so far, as ids and as text.

Runs on the writer's thread.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable, Sequence
from itertools import groupby
from sys import byteorder
from typing import TYPE_CHECKING, Any

import orjson

from trackway.decoders import DecoderError, HFDecoder, decode_cut

from .. import semconv
from . import snapshot
from .scope import Scope
from .streams import Tokens

if TYPE_CHECKING:
    from ..config import TraceConfig

_UNKNOWN = {
    semconv.PROMPT_TEXT: semconv.PROMPT_UNKNOWN,
    semconv.RESPONSE_TEXT: semconv.RESPONSE_UNKNOWN,
}
_MIN_SHARED = 8
"""Shorter common beginnings of two sequences are not worth a reference."""
_MAX_DECODERS = 8


class SequenceFormat:
    """How the token sequences of one process are stored.

    Args:
        config: settings of this process.
        breathe: called now and then in the middle of long work.
    """

    def __init__(self, config: TraceConfig, breathe: Callable[[], object]) -> None:
        self._config = config
        self._breathe = breathe
        self._decoders: dict[int | str, tuple[Any, HFDecoder]] = {}

    def put(self, scope: Scope, tokens: Tokens, attributes: dict[str, Any]) -> None:
        """Put the sequences of a scope on its span, and note them as what its rollout builds on next.

        Args:
            scope: one that has ended.
            tokens: its sequences, those of arguments and result together.
            attributes: those of the span, notes among them.
        """
        prompt, response = tokens.get("prompt"), tokens.get("response")
        decoder = self._decoder(scope) if self._config.token2text else None
        rollout = scope.rollout
        kept = 0
        before = rollout.sequence
        if prompt is not None:
            kept = shared_beginning(before, prompt)
            if kept >= _MIN_SHARED:
                attributes[semconv.PROMPT_BASE] = f"{rollout.sequence_span}:{kept}"
            else:
                kept = 0
            added = _integers(prompt[kept:])
            prompt = (before if kept == len(before) else before[:kept]) + added if kept else added
            self._breathe()
            self._ids(
                added,
                decoder,
                semconv.PROMPT_IDS,
                semconv.PROMPT_TEXT,
                attributes,
                continued=kept > 0,
            )
            if scope.kind == "llm":
                attributes[semconv.INPUT_TOKENS] = len(prompt)
        if response is not None:
            response = _integers(response)
            start = 0
            if prompt is not None and kept == len(prompt):
                # The result of a whole rollout repeats what its generations and tools gave.
                start = shared_beginning(before[kept:], response)
                if start >= _MIN_SHARED:
                    attributes[semconv.RESPONSE_BASE] = f"{rollout.sequence_span}:{kept}:{start}"
                else:
                    start = 0
            text_decoder = None if start else decoder
            self._ids(
                response[start:],
                text_decoder,
                semconv.RESPONSE_IDS,
                semconv.RESPONSE_TEXT,
                attributes,
                continued=bool(prompt),
            )
            if scope.kind == "llm":
                attributes[semconv.OUTPUT_TOKENS] = len(response)
        if (mask := tokens.get("mask")) is not None:
            bits, odd = _bits(mask)
            if odd:
                attributes[semconv.NOTES].append(
                    f"{odd} of {len(mask)} in the mask are neither 0 nor 1; those above 0 are kept as 1"
                )
            runs = [(bit, len(list(run))) for bit, run in groupby(bits)]
            attributes[semconv.RESPONSE_MASK] = orjson.dumps(runs).decode()
            if response is not None and decoder is not None and len(runs) > 1 and not rollout.sequence:
                attributes[semconv.RESPONSE_TEXTS] = self._texts(response, runs, decoder)
        if (logprobs := tokens.get("logprobs")) is not None:
            attributes[semconv.RESPONSE_LOGPROBS] = pack_floats(logprobs)
        if prompt is not None and response is not None:
            rollout.sequence = prompt + response
            snapshot.untrack(rollout.sequence)
            rollout.sequence_span = f"{scope.span_id:016x}"

    def _texts(self, response: tuple[int, ...], runs: Sequence[tuple[int, int]], decoder: HFDecoder) -> str:
        """Decode each run of the mask by itself: a loop that was not traced inside has no other turns."""
        texts = []
        place = 0
        for _, count in runs:
            part = response[place : place + count]
            cut = decode_cut(decoder, part, self._config.max_length, continued=True)
            texts.append(snapshot.clean(cut.text))
            place += count
        return orjson.dumps(texts).decode()

    def _ids(
        self,
        ids: tuple[int, ...],
        decoder: HFDecoder | None,
        name: str,
        text_name: str,
        attributes: dict[str, Any],
        *,
        continued: bool,
    ) -> None:
        attributes[name] = _ids_json(ids)
        if decoder is not None:
            cut = decode_cut(decoder, ids, self._config.max_length, continued=continued)
            attributes[text_name] = snapshot.clean(cut.text)
            if cut.unknown:
                attributes[_UNKNOWN[text_name]] = cut.unknown

    def _decoder(self, scope: Scope) -> HFDecoder | None:
        tokenizer = self._config.tokenizer if scope.tokenizer is None else scope.tokenizer
        if tokenizer is None:
            scope.recorder.warn_once(
                "no tokenizer",
                "token2text is on, but no tokenizer is known: token ids are recorded without text. "
                "Pass one: trackway.configure(tokenizer=...), a tokenizer or its path",
            )
            return None
        name = os.fspath(tokenizer) if isinstance(tokenizer, (str, os.PathLike)) else id(tokenizer)
        known = self._decoders.get(name)
        if known is None:
            try:
                decoder = HFDecoder(tokenizer, skip_special_tokens=self._config.skip_special_tokens)
            except DecoderError as error:
                scope.recorder.warn_once("decoder", f"{error}; token ids are recorded without text")
                return None
            if len(self._decoders) >= _MAX_DECODERS:
                self._decoders.pop(next(iter(self._decoders)))
            # The tokenizer is kept beside its decoder, so that its id cannot be given to another one.
            known = self._decoders[name] = (tokenizer, decoder)
        return known[1]


def _integers(ids: tuple[Any, ...]) -> tuple[int, ...]:
    if set(map(type, ids)) <= {int}:
        return ids
    ids = snapshot.numbers(ids)
    # Ids that came as 15.0 are integers; anything else is kept as it is, and shown as such.
    return tuple(
        int(item) if isinstance(item, bool) or (isinstance(item, float) and item.is_integer()) else item
        for item in ids
    )


def _bits(mask: tuple[Any, ...]) -> tuple[tuple[int, ...], int]:
    """Give a mask as integers, and how many of its values were none."""
    if set(map(type, mask)) <= {int, bool}:
        return mask, 0
    bits: list[int] = []
    odd = 0
    for item in snapshot.numbers(mask):
        number = _float(item)
        if number.is_integer():
            bits.append(int(number))
        else:
            odd += 1
            bits.append(1 if number > 0 else 0)
    return tuple(bits), odd


def _float(item: Any) -> float:
    if not isinstance(item, (int, float)):
        return math.nan
    try:
        return float(item)
    except OverflowError:
        return math.nan


def _ids_json(ids: tuple[Any, ...]) -> str:
    try:
        return orjson.dumps(ids, default=snapshot.placeholder).decode()
    except TypeError:  # beyond 64 bits: no token id, but what was recorded
        plain = [str(item) if type(item) is int and not -(2**63) <= item < 2**63 else item for item in ids]
        return orjson.dumps(plain, default=snapshot.placeholder).decode()


def shared_beginning(old: tuple[Any, ...], new: tuple[Any, ...]) -> int:
    """Count the items that two sequences have in common from their start."""
    limit = min(len(old), len(new))
    if old[:limit] == new[:limit]:
        return limit
    low, high = 0, limit  # old[:low] agrees, old[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if old[low:middle] == new[low:middle]:
            low = middle
        else:
            high = middle
    return low


def pack_floats(values: tuple[Any, ...]) -> bytes:
    """Pack numbers as little-endian float32; what is not a number becomes NaN."""
    try:
        packed = array("f", values)
    except (TypeError, OverflowError, ValueError):
        plain = snapshot.numbers(values)
        packed = array("f", [_float(item) for item in plain])
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
