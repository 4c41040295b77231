"""The spans of a trajectory -> its turns, in the order in which they happened.

Generations are the assistant's turns, tool spans the tools'. What the next prompt holds beyond the sequence
so far is the reply that came in between: a tool's where tools ran, else the environment's or the user's.
Where a loop was not traced inside, the turns are read from what it returned: its token ids and mask, or its
messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import orjson

from .. import semconv
from ..model import Span, Turn
from .conversation import conversation_of, tool_turn
from .results import message_turn, messages_of


def turns_of(spans: Sequence[Span]) -> tuple[Turn, ...]:
    """Build the turns of one trajectory from its spans, whose token sequences are whole."""
    outer = _outermost(spans)
    generations = [span for span in outer if span.kind == "llm"]
    tools = [span for span in outer if span.kind == "tool"]
    wholes = [span for span in spans if span.kind in ("rollout", "trajectory", "other")]
    if generations:
        turns = conversation_of(spans, generations, tools)
        turns = _with_whole(turns, wholes)
    else:
        turns = _from_result(wholes, tools)
    return tuple(replace(turn, index=index) for index, turn in enumerate(turns))


def _outermost(spans: Sequence[Span]) -> list[Span]:
    """Leave out what runs inside a generation or a tool: it is a part of that."""
    by_id = {span.span_id: span for span in spans}
    inside: dict[str, bool] = {}

    def is_inside(span: Span) -> bool:
        path = []
        parent = by_id.get(span.parent_id or "")
        answer = False
        while parent is not None and parent.span_id not in path:
            if parent.span_id in inside:
                answer = inside[parent.span_id] or parent.kind in ("llm", "tool")
                break
            if parent.kind in ("llm", "tool"):
                answer = True
                break
            path.append(parent.span_id)
            parent = by_id.get(parent.parent_id or "")
        inside.update(dict.fromkeys(path, answer))
        return answer

    chosen = [span for span in spans if span.kind in ("llm", "tool") and not is_inside(span)]
    return sorted(chosen, key=lambda span: span.start_ns)


def _with_whole(turns: list[Turn], wholes: Iterable[Span]) -> list[Turn]:
    """Add what only the whole rollout's result tells: the mask of each turn, tokens after the last one."""
    for span in wholes:
        if span.response_ids is None or span.prompt_ids is None:
            continue
        whole = span.prompt_ids + span.response_ids
        told = tuple(item for turn in turns for item in turn.token_ids)
        if whole[: len(told)] != told:
            continue
        if len(whole) > len(told):
            rest = whole[len(told) :]
            if turns and turns[-1].role == "tool" and not turns[-1].token_ids:
                turns[-1] = replace(turns[-1], token_ids=rest)
            else:
                turns.append(Turn(0, "user", token_ids=rest))
        return _with_marks(turns, span)
    return turns


def _with_marks(turns: Sequence[Turn], span: Span) -> list[Turn]:
    before = len(span.prompt_ids or ())
    size = len(span.response_ids or ())
    mask = span.response_mask if span.response_mask is not None and len(span.response_mask) == size else None
    logprobs = span.response_logprobs
    if logprobs is not None and len(logprobs) != size:
        logprobs = None
    place = 0
    marked = []
    for turn in turns:
        start, place = place, place + len(turn.token_ids)
        if mask is not None and not turn.mask and turn.token_ids:
            whole = (0,) * max(0, min(place, before) - start) + mask[
                max(0, start - before) : max(0, place - before)
            ]
            turn = replace(turn, mask=whole)
        if logprobs is not None and turn.role == "assistant" and not turn.logprobs and start >= before:
            turn = replace(turn, logprobs=logprobs[start - before : place - before])
        marked.append(turn)
    return marked


def _from_result(wholes: Sequence[Span], tools: Sequence[Span]) -> list[Turn]:
    """Read the turns from what the loop was given and what it returned."""
    for span in reversed(wholes):
        if span.response_ids is not None:
            return _by_mask(span, tools)
    for span in wholes:
        given, made = messages_of(span.inputs), messages_of(span.outputs)
        if made:
            repeated = made[: len(given)] == given
            messages = made if repeated else [*given, *made]
            return [message_turn(message) for message in messages]
    return [tool_turn(tool, orphan=True) for tool in tools]


def _by_mask(span: Span, tools: Sequence[Span]) -> list[Turn]:
    turns = []
    if span.prompt_ids:
        turns.append(Turn(0, "user", span.prompt_text or "", span.prompt_ids, (0,) * len(span.prompt_ids)))
    ids = span.response_ids or ()
    mask = (
        span.response_mask if span.response_mask and len(span.response_mask) == len(ids) else (1,) * len(ids)
    )
    logprobs = span.response_logprobs or ()
    recorded = span.response_mask is not None
    texts: Sequence[str] = orjson.loads(span.attributes.get(semconv.RESPONSE_TEXTS, "[]"))
    waiting = list(tools)
    place = 0
    runs = [(bit, len(list(run))) for bit, run in groupby(mask)]
    if len(runs) == 1 and not texts:
        texts = [span.response_text or ""]
    for number, (bit, count) in enumerate(runs):
        part = slice(place, place + count)
        place += count
        text = texts[number] if number < len(texts) else ""
        marks = mask[part] if recorded else ()
        if bit:
            turns.append(
                Turn(
                    0,
                    "assistant",
                    text,
                    ids[part],
                    marks,
                    logprobs[part] if len(logprobs) == len(ids) else (),
                    prompt_ids=(span.prompt_ids or ()) + ids[: part.start],
                    policy_version=span.attributes.get(semconv.POLICY_VERSION),
                )
            )
        elif waiting:
            tool = waiting.pop(0)
            turns.append(replace(tool_turn(tool, orphan=True), token_ids=ids[part], mask=marks))
        else:
            turns.append(Turn(0, "user", text, ids[part], marks))
    turns += [tool_turn(tool, orphan=True) for tool in waiting]
    return turns
