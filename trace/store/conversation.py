"""Generations, tool calls and messages -> one conversation, in which everything that was said stands once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import orjson

from .. import semconv
from ..model import Span, ToolCall, Turn
from .results import (
    as_text,
    asked_calls,
    finish_reason,
    message_of,
    message_turn,
    messages_of,
    prompt_text,
    response_text,
)


@dataclass(slots=True)
class _Agent:
    """What one agent has been told so far; agents that run at the same time are told apart.

    Attributes:
        known: how often each message was told.
        answers: texts of its answers, and ids of the calls in them.
        last: place of its last answer among all turns.
        answered: which of that one's calls have got their message.
        sequence: token ids so far.
    """

    known: dict[bytes, int] = field(default_factory=dict)
    answers: set[str] = field(default_factory=set)
    last: int | None = None
    answered: set[int] = field(default_factory=set)
    sequence: tuple[int, ...] = ()


def conversation_of(spans: Sequence[Span], generations: Sequence[Span], tools: Sequence[Span]) -> list[Turn]:
    """Tell a trajectory by its generations: what each was given that is new, and what it answered.

    Args:
        spans: all of the trajectory, to tell the agents in it apart.
        generations, tools: those that are turns, in order of their start.
    """
    agents = _Agents(spans)
    owners = _owners(agents, generations, tools)
    states: dict[str, _Agent] = {}
    turns: list[Turn] = []
    early = [tool_turn(tool, orphan=True) for tool in tools if tool.span_id not in owners]
    for number, span in enumerate(generations):
        agent = states.setdefault(agents.of(span), _Agent())
        said = _new_messages(turns, span, agent)
        replies = _with_replies(turns, agent, early if number == 0 else [], said)
        added = _added(span, agent.sequence)
        if added or (not agent.answers and not said and prompt_text(span)):
            _give_tokens(turns, agent, replies, added, span)
        turns += replies
        after = [tool for tool in tools if owners.get(tool.span_id) == number]
        answer = _assistant_turn(span, after)
        agent.last, agent.answered = len(turns), set()
        agent.answers |= _marks_of(answer)
        ids = {call.span_id: call.call_id for call in answer.tool_calls}
        turns.append(answer)
        turns += [replace(tool_turn(tool), call_id=ids.get(tool.span_id)) for tool in after]
        if span.prompt_ids is not None:
            agent.sequence = span.prompt_ids + (span.response_ids or ())
    return turns


class _Agents:
    """Names the agent that a span runs in: the nearest rollout function around it."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._by_id = {span.span_id: span for span in spans}

    def of(self, span: Span) -> str:
        passed = {span.span_id}
        while (parent := self._by_id.get(span.parent_id or "")) is not None and parent.span_id not in passed:
            passed.add(parent.span_id)
            if parent.kind in ("rollout", "trajectory"):
                return parent.span_id
            span = parent
        return ""


def _owners(agents: _Agents, generations: Sequence[Span], tools: Sequence[Span]) -> dict[str, int]:
    """Give the generation that each tool call follows: the last before it, of the same agent if it can be."""
    names = [agents.of(span) for span in generations]
    owners = {}
    for tool in tools:
        before = [n for n, span in enumerate(generations) if span.start_ns <= tool.start_ns]
        if before:
            own = agents.of(tool)
            owners[tool.span_id] = next((n for n in reversed(before) if names[n] == own), before[-1])
    return owners


def _new_messages(turns: Sequence[Turn], span: Span, agent: _Agent) -> list[Turn]:
    """Give the messages of a generation's input that no earlier turn has said.

    What follows the agent's last answer is new, whatever it says. Before it, a message counts as often as it
    was seen: a context that was trimmed or put in another order brings nothing back. An answer is known by
    its calls, or by its text, of which the reasoning in front may be gone by now.
    """
    messages = [message_turn(message) for message in messages_of(span.inputs)]
    last = set() if agent.last is None else _marks_of(turns[agent.last])
    places = [n for n, turn in enumerate(messages) if _repeats(turn, last)]
    fresh_from = places[-1] + 1 if places else len(messages)
    fresh = []
    seen: dict[bytes, int] = {}
    for place, turn in enumerate(messages):
        if _repeats(turn, agent.answers):
            continue
        mark = orjson.dumps([turn.role, turn.text, turn.call_id])
        seen[mark] = seen.get(mark, 0) + 1
        if place >= fresh_from or seen[mark] > agent.known.get(mark, 0):
            agent.known[mark] = max(seen[mark], agent.known.get(mark, 0))
            fresh.append(turn)
    return fresh


def _marks_of(answer: Turn) -> set[str]:
    """Give what an answer is known by when it comes back as a message: its calls, else its text.

    Many loops leave out the reasoning in front of it, up to the mark that ends it.
    """
    ids = {f"call {call.call_id}" for call in answer.tool_calls if call.call_id is not None}
    return {*ids, f"text {answer.text.strip()}", f"text {answer.text.rpartition('>')[2].strip()}"}


def _repeats(message: Turn, marks: set[str]) -> bool:
    """Say whether a message is one of the answers that have these marks."""
    if message.role != "assistant":
        return False
    ids = [f"call {call.call_id}" for call in message.tool_calls if call.call_id is not None]
    if f"text {message.text.strip()}" in marks:
        return True
    return not message.text.strip() and bool(ids) and marks.issuperset(ids)


def _with_replies(
    turns: list[Turn], agent: _Agent, early: Sequence[Turn], said: Sequence[Turn]
) -> list[Turn]:
    """Join what the messages say of tool calls with what the tools' own spans told.

    The text of a tool's turn is what the model saw of it. A reply that no span told (of an unknown tool, of
    arguments that could not be parsed) is a turn of its own, and the result of the call that it answers.

    Args:
        turns: those so far; the tools' turns since the agent's last generation are completed in place.
        early: turns of tools that ran before the first generation.
        said: the messages that are new.

    Returns:
        The turns to add.
    """
    replies = sum(turn.role == "tool" for turn in said)
    spare = list(early)
    fresh = spare[: max(0, len(spare) - replies)]
    del spare[: len(fresh)]
    for turn in said:
        call = _answered_call(turns, agent, turn) if turn.role == "tool" else None
        if call is not None:
            joined = _joined(turns, agent, call, turn)
            fresh += [] if joined is None else [joined]
        elif turn.role == "tool" and spare:
            fresh.append(replace(spare.pop(0), text=turn.text))
        else:
            fresh.append(turn)
    return fresh


def _answered_call(turns: Sequence[Turn], agent: _Agent, reply: Turn) -> int | None:
    """Find the call of the agent's last generation that a message answers: by id, else the next that ran."""
    if agent.last is None:
        return None
    open_calls = [(n, call) for n, call in enumerate(turns[agent.last].tool_calls) if n not in agent.answered]
    for n, call in open_calls:
        if reply.call_id is not None and call.call_id == reply.call_id:
            return n
    for n, call in open_calls:
        if call.span_id is not None and (reply.call_id is None or call.call_id is None):
            return n
    return None


def _joined(turns: list[Turn], agent: _Agent, number: int, reply: Turn) -> Turn | None:
    """Complete the turn of the tool that ran, or give the reply as a turn where none did."""
    assert agent.last is not None
    agent.answered.add(number)
    answer = turns[agent.last]
    call = answer.tool_calls[number]
    if call.span_id is not None:
        for place in range(agent.last + 1, len(turns)):
            if turns[place].span_id == call.span_id:
                turns[place] = replace(turns[place], text=reply.text)
                return None
    calls = list(answer.tool_calls)
    calls[number] = replace(call, result=reply.text)
    turns[agent.last] = replace(answer, tool_calls=tuple(calls))
    return replace(reply, name=reply.name or call.name)


def _assistant_turn(span: Span, tools: Sequence[Span]) -> Turn:
    ids = span.response_ids or ()
    mask = span.response_mask or ()
    return Turn(
        0,
        "assistant",
        response_text(span),
        token_ids=ids,
        mask=mask if len(mask) == len(ids) else (),
        logprobs=span.response_logprobs or (),
        prompt_ids=span.prompt_ids or (),
        tool_calls=_calls(asked_calls(message_of(span.outputs)), tools),
        error=_error(span),
        finish_reason=finish_reason(span),
        policy_version=span.attributes.get(semconv.POLICY_VERSION),
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        span_id=span.span_id,
    )


def _calls(asked: Sequence[ToolCall], tools: Sequence[Span]) -> tuple[ToolCall, ...]:
    """Give the calls that the model asked for, as they ran where they did, and those that ran unasked.

    A call and a run belong together by name and arguments; then by name and order, where arguments that
    could not be parsed come last.
    """
    waiting = list(tools)
    ran: dict[int, Span] = {}
    for rank in range(3):
        for n, call in enumerate(asked):
            fits = [tool for tool in waiting if n not in ran and rank >= _distance(call, tool)]
            if fits:
                ran[n] = fits[0]
                waiting.remove(fits[0])
    calls = [
        replace(_tool_call(ran[n]), call_id=call.call_id) if n in ran else call
        for n, call in enumerate(asked)
    ]
    return (*calls, *map(_tool_call, waiting))


def _distance(call: ToolCall, tool: Span) -> int:
    """Say how ill a call and a run fit together: 0 is the same, 3 another tool."""
    if call.name not in (tool.name, tool.name.rpartition(".")[2]):  # a method may carry its class's name
        return 3
    if call.arguments == tool.inputs:
        return 0
    return 1 if isinstance(call.arguments, dict) else 2


def _added(span: Span, sequence: tuple[int, ...]) -> tuple[int, ...]:
    """Give the ids of a prompt that follow the sequence so far, or the part of it that the prompt repeats."""
    prompt = span.prompt_ids or ()
    if prompt[: len(sequence)] == sequence:
        return prompt[len(sequence) :]
    shared = 0
    for old, new in zip(sequence, prompt, strict=False):
        if old != new:
            break
        shared += 1
    return prompt[shared:]


def _give_tokens(
    turns: list[Turn], agent: _Agent, replies: list[Turn], added: tuple[int, ...], span: Span
) -> None:
    """Hand the prompt's new tokens to the reply they belong to; they make one where there is none."""
    if replies:
        replies[-1] = replace(replies[-1], token_ids=added)
    elif (place := _last_tool(turns, agent)) is not None:
        turns[place] = replace(turns[place], token_ids=added)
    else:
        replies.append(
            Turn(0, "user", prompt_text(span), added, start_ns=None if agent.answers else span.start_ns)
        )


def _last_tool(turns: Sequence[Turn], agent: _Agent) -> int | None:
    """Find the last of the tools' turns that follow the agent's last generation."""
    place = len(turns) if agent.last is None else agent.last
    while place + 1 < len(turns) and turns[place + 1].role == "tool":
        place += 1
    return place if agent.last is not None and place > agent.last else None


def _error(span: Span) -> str | None:
    return None if span.status == "ok" else span.error or span.status


def _tool_call(span: Span) -> ToolCall:
    return ToolCall(
        name=span.name,
        arguments=span.inputs,
        result=None if span.outputs is None else as_text(span.outputs),
        error=_error(span),
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        span_id=span.span_id,
    )


def tool_turn(span: Span, *, orphan: bool = False) -> Turn:
    """Give the turn of a tool's span; an orphan, which follows no generation, holds its own call."""
    return Turn(
        0,
        "tool",
        "" if span.outputs is None else as_text(span.outputs),
        name=span.name,
        error=_error(span),
        tool_calls=(_tool_call(span),) if orphan else (),
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        span_id=span.span_id,
    )
