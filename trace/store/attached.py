"""What a trainer said of a trajectory: the last word on each fact, put beside the tokens that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan, nan
from typing import Any

from .. import semconv
from ..model import Span, Turn
from .packed import lenient, unpack_floats, unpack_mask

_SEQUENCES = {
    "advantages": semconv.ATTACHED_ADVANTAGES,
    "returns": semconv.ATTACHED_RETURNS,
    "trainer_logprobs": semconv.ATTACHED_LOGPROBS,
}


def latest(facts: Sequence[Span], name: str, *kinds: type) -> Any:
    """Give the last value of some types that ``attach`` spans have under a name; None where there is none."""
    values = (span.attributes.get(name) for span in reversed(facts))
    return next((value for value in values if isinstance(value, kinds)), None)


def with_attached(turns: Sequence[Turn], facts: Sequence[Span]) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
    """Put what was attached beside the tokens of the turns.

    One number belongs to every trained token of the response. A sequence has one value for each token of the
    response, those of tools included, or one for each trained token; padding behind them is cut off. Of any
    other sequence nobody can say which tokens it is about.

    Args:
        facts: ``attach`` spans, in order of their start.

    Returns:
        The turns, and a remark on each sequence that fits no tokens.
    """
    notes: list[str] = []
    done = list(turns)
    first = next((place for place, turn in enumerate(turns) if turn.role == "assistant"), len(turns))
    size = sum(len(turn.token_ids) for turn in turns[first:])
    mask = lenient(unpack_mask, latest(facts, semconv.ATTACHED_MASK, str))
    if mask is not None:
        if len(mask) < size or any(mask[size:]) or not size:
            notes.append(f"the mask that was attached has {len(mask)} values, and the response {size} tokens")
        else:
            _give(done, first, "mask", mask)
    trained = tuple(bit for turn in done[first:] for bit in turn.trained)
    for name, attribute in _SEQUENCES.items():
        given = latest(facts, attribute, bytes, float)
        if not isinstance(given, bytes):
            if given is not None and size:
                _give(done, first, name, [given if bit else None for bit in trained])
            continue
        values = unpack_floats(given)
        fitting = _fitting(values, trained, mask)
        if fitting is None:
            notes.append(
                f"{name}: {len(values)} values were attached, and the response has {size} tokens, "
                f"{sum(map(bool, trained))} of them trained"
            )
        else:
            _give(done, first, name, fitting)
    return tuple(done), tuple(notes)


def _fitting(
    values: tuple[float, ...], trained: tuple[int, ...], mask: tuple[int, ...] | None
) -> Sequence[float | None] | None:
    """Give one value, or None, for each token of the response; nothing where it fits no tokens."""
    size = len(trained)
    if size and len(values) >= size:
        masked = mask is not None and len(mask) == len(values) and not any(mask[size:])
        if masked or all(value == 0 or isnan(value) for value in values[size:]):
            return values[:size]
    if size and len(values) == sum(map(bool, trained)):
        waiting = iter(values)
        return [next(waiting) if bit else None for bit in trained]
    return None


def _give(turns: list[Turn], first: int, name: str, values: Sequence[float | None]) -> None:
    """Hand each turn from the first one on its part of the values; a turn that has none stays as it is."""
    at = 0
    for place in range(first, len(turns)):
        turn = turns[place]
        part = values[at : at + len(turn.token_ids)]
        at += len(part)
        if any(value is not None for value in part):
            whole = tuple(nan if value is None else value for value in part)
            turns[place] = replace(turn, **{name: whole})  # type: ignore[arg-type]
