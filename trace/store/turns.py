"""The spans of a trajectory -> its turns, in the order in which they happened.

Generations are the assistant's turns, tool spans the tools'. What the next prompt holds beyond the sequence
so far is the reply that came in between: a tool's where tools ran, else the environment's or the user's.
Where a loop was not traced inside, the turns are read from what it returned: its token ids and mask, or its
messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

import orjson

from .. import semconv
from ..model import Role, Span, ToolCall, Turn

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
}
_TEXT_FIELDS = ("text", "content", "response", "completion", "output_text", "generated_text", "message")


def turns_of(spans: Sequence[Span]) -> tuple[Turn, ...]:
    """Build the turns of one trajectory from its spans, whose token sequences are whole."""
    outer = _outermost(spans)
    generations = [span for span in outer if span.kind == "llm"]
    tools = [span for span in outer if span.kind == "tool"]
    wholes = [span for span in spans if span.kind in ("rollout", "trajectory", "other")]
    if generations:
        turns = _conversation(generations, tools, _owners(spans, generations, tools))
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


def _owners(spans: Sequence[Span], generations: Sequence[Span], tools: Sequence[Span]) -> dict[str, int]:
    """Give the generation that each tool call follows: the last before it, of the same agent if it can be.

    Agents that run at the same time are told apart by the rollout function that they run in.
    """
    by_id = {span.span_id: span for span in spans}

    def agent(span: Span) -> str:
        passed = {span.span_id}
        while (parent := by_id.get(span.parent_id or "")) is not None and parent.span_id not in passed:
            passed.add(parent.span_id)
            if parent.kind in ("rollout", "trajectory"):
                return parent.span_id
            span = parent
        return ""

    agents = [agent(span) for span in generations]
    owners = {}
    for tool in tools:
        before = [n for n, span in enumerate(generations) if span.start_ns <= tool.start_ns]
        if before:
            own = agent(tool)
            owners[tool.span_id] = next((n for n in reversed(before) if agents[n] == own), before[-1])
    return owners


def _conversation(
    generations: Sequence[Span], tools: Sequence[Span], owners: Mapping[str, int]
) -> list[Turn]:
    turns: list[Turn] = []
    sequence: tuple[int, ...] = ()
    known: dict[bytes, int] = {}
    early = [_tool_turn(tool, orphan=True) for tool in tools if tool.span_id not in owners]
    for number, span in enumerate(generations):
        said = _new_messages(span, known)
        replies = _with_replies(turns, early if number == 0 else [], said)
        added = _added(span, sequence)
        if added or (number == 0 and not said and _prompt_text(span)):
            _give_tokens(turns, replies, added, span, first=number == 0)
        turns += replies
        after = [tool for tool in tools if owners.get(tool.span_id) == number]
        answer = _assistant_turn(span, after)
        ids = {call.span_id: call.call_id for call in answer.tool_calls}
        turns.append(answer)
        turns += [replace(_tool_turn(tool), call_id=ids.get(tool.span_id)) for tool in after]
        _know_answer(span, known)
        if span.prompt_ids is not None:
            sequence = span.prompt_ids + (span.response_ids or ())
    return turns


def _with_replies(turns: list[Turn], early: Sequence[Turn], said: Sequence[Turn]) -> list[Turn]:
    """Join what the messages say of tool calls with what the tools' own spans told.

    The text of a tool's turn is what the model saw of it. A reply that no span told (of an unknown tool, of
    arguments that could not be parsed) is a turn of its own, and the result of the call that it answers.

    Args:
        turns: those so far; the tools' turns since the last generation are completed in place.
        early: turns of tools that ran before the first generation.
        said: the messages that are new.

    Returns:
        The turns to add.
    """
    start = next((place for place in reversed(range(len(turns))) if turns[place].role == "assistant"), None)
    waiting = [] if start is None else [n for n in range(start + 1, len(turns)) if turns[n].role == "tool"]
    spare = list(early)
    fresh = []
    for turn in said:
        if turn.role != "tool":
            fresh.append(turn)
            continue
        answered = None if start is None else _asked_for(turns[start], turn.call_id)
        place = _place(turns, waiting, turn.call_id, unrun=answered is not None)
        if place is not None:
            waiting.remove(place)
            turns[place] = replace(turns[place], text=turn.text or turns[place].text)
        elif spare:
            fresh.append(replace(spare.pop(0), text=turn.text))
        else:
            if start is not None and answered is not None:
                calls = list(turns[start].tool_calls)
                calls[answered] = replace(calls[answered], result=turn.text)
                turns[start] = replace(turns[start], tool_calls=tuple(calls))
                turn = replace(turn, name=turn.name or calls[answered].name)
            fresh.append(turn)
    return [*spare, *fresh]


def _asked_for(turn: Turn, call_id: str | None) -> int | None:
    """Find the call of a generation that has this id and that no tool ran."""
    for place, call in enumerate(turn.tool_calls):
        if call_id is not None and call.call_id == call_id and call.span_id is None:
            return place
    return None


def _place(turns: Sequence[Turn], waiting: Sequence[int], call_id: str | None, *, unrun: bool) -> int | None:
    """Find the turn of a tool that a message is the reply of: by id, else the first without another id."""
    if unrun:
        return None
    for place in waiting:
        if call_id is not None and turns[place].call_id == call_id:
            return place
    return next((place for place in waiting if call_id is None or turns[place].call_id is None), None)


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
    turns: list[Turn], replies: list[Turn], added: tuple[int, ...], span: Span, *, first: bool
) -> None:
    """Hand the prompt's new tokens to the reply they belong to; they make one where there is none."""
    if replies:
        replies[-1] = replace(replies[-1], token_ids=added)
    elif turns and turns[-1].role == "tool":
        turns[-1] = replace(turns[-1], token_ids=added)
    else:
        replies.append(Turn(0, "user", _prompt_text(span), added, start_ns=span.start_ns if first else None))


def _prompt_text(span: Span) -> str:
    if span.prompt_text is not None:
        return span.prompt_text
    if isinstance(span.inputs, dict):
        for name in ("prompt", "text", "question", "query"):
            if isinstance(span.inputs.get(name), str):
                return cast(str, span.inputs[name])
    return ""


def _assistant_turn(span: Span, tools: Sequence[Span]) -> Turn:
    ids = span.response_ids or ()
    mask = span.response_mask or ()
    return Turn(
        0,
        "assistant",
        _response_text(span),
        token_ids=ids,
        mask=mask if len(mask) == len(ids) else (),
        logprobs=span.response_logprobs or (),
        prompt_ids=span.prompt_ids or (),
        tool_calls=_calls(_asked_calls(_message(span.outputs)), tools),
        error=_error(span),
        finish_reason=_finish_reason(span),
        policy_version=span.attributes.get(semconv.POLICY_VERSION),
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        span_id=span.span_id,
    )


def _calls(asked: Sequence[ToolCall], tools: Sequence[Span]) -> tuple[ToolCall, ...]:
    """Give the calls that the model asked for, as they ran where they did, and those that ran unasked."""
    waiting = list(tools)
    calls = []
    for call in asked:
        # A tool that is a method carries the name of its class in front.
        ran = next((tool for tool in waiting if call.name in (tool.name, tool.name.rpartition(".")[2])), None)
        if ran is None:
            calls.append(call)
        else:
            waiting.remove(ran)
            calls.append(replace(_tool_call(ran), call_id=call.call_id))
    return (*calls, *map(_tool_call, waiting))


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


def _tool_turn(span: Span, *, orphan: bool = False) -> Turn:
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


def _response_text(span: Span) -> str:
    if span.response_text is not None:
        return span.response_text
    return _result_text(span.outputs)


def _result_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    message = _message(value)
    if message is not None:
        return as_text(message.get("content") or "")
    if isinstance(value, list):
        pieces = [_chunk_text(item) for item in value]
        if all(piece is not None for piece in pieces):
            return "".join(cast("list[str]", pieces))
    if isinstance(value, dict):
        for name in _TEXT_FIELDS:
            if isinstance(value.get(name), str):
                return cast(str, value[name])
        first = _first_output(value)
        if first is not None:
            return _result_text(first)
        if set(value) <= {
            "finish_reason",
            "stop_reason",
            "extra_fields",
            "metrics",
            "num_preempted",
            "routed_experts",
        }:
            return ""
    return as_text(value)


def _first_output(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Give the first completion of an engine's result, which holds them in a list named ``outputs``."""
    outputs = value.get("outputs")
    return outputs[0] if isinstance(outputs, list) and outputs and isinstance(outputs[0], dict) else None


def _chunk_text(item: Any) -> str | None:
    """Give the text of one item of a stream."""
    if isinstance(item, str):
        return item
    try:
        return str(item["choices"][0]["delta"].get("content") or "")
    except (KeyError, TypeError, IndexError, AttributeError):
        return None


def _message(value: Any) -> Mapping[str, Any] | None:
    """Find the message in the result of a chat completion."""
    if not isinstance(value, dict):
        return None
    choices = value.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message = choices[0].get("message")
        if isinstance(message, dict):
            return message
        if isinstance(choices[0].get("text"), str):
            return {"content": choices[0]["text"]}
    if isinstance(value.get("message"), dict):
        return cast("Mapping[str, Any]", value["message"])
    return value if value.get("role") == "assistant" else None


def _asked_calls(message: Mapping[str, Any] | None) -> list[ToolCall]:
    calls = (message or {}).get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            function: Mapping[str, Any] = call["function"] if isinstance(call.get("function"), dict) else call
            arguments = function.get("arguments")
            found.append(
                ToolCall(
                    name=str(function.get("name", "")),
                    arguments=parsed(arguments),
                    call_id=None if call.get("id") is None else str(call["id"]),
                )
            )
    return found


def parsed(text: Any) -> Any:
    """Read a text as JSON; give it back as it is where it is none."""
    if not isinstance(text, str):
        return text
    try:
        return orjson.loads(text)
    except ValueError:
        return text


def _finish_reason(span: Span) -> str | None:
    reasons = span.attributes.get(semconv.FINISH_REASONS)
    if reasons:
        return str(reasons[0])
    value = span.outputs
    if isinstance(value, dict):
        choices = value.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            value = choices[0]
        else:
            value = _first_output(value) or value
        for name in ("finish_reason", "stop_reason"):
            if value.get(name) is not None:
                return str(value[name])
    return None


def _messages(value: Any) -> list[Mapping[str, Any]]:
    """Give the chat messages in a value: a list of them, or an object that holds one under a usual name."""
    if isinstance(value, dict):
        for name in ("messages", "raw_prompt", "conversation", "history"):
            found = _messages(value.get(name))
            if found:
                return found
        return []
    if not isinstance(value, list):
        return []
    messages: list[Mapping[str, Any]] = [
        item for item in value if isinstance(item, dict) and isinstance(item.get("role"), str)
    ]
    return messages if messages and len(messages) == sum(item is not None for item in value) else []


def _new_messages(span: Span, known: dict[bytes, int]) -> list[Turn]:
    """Give the messages of a generation's input that no earlier turn has said.

    Each message counts as often as it was seen, wherever it stands: a context that was trimmed or put in
    another order brings nothing back.
    """
    turns = []
    seen: dict[bytes, int] = {}
    for message in _messages(span.inputs):
        mark = _mark(message)
        seen[mark] = seen.get(mark, 0) + 1
        if seen[mark] > known.get(mark, 0):
            known[mark] = seen[mark]
            turns.append(_message_turn(message))
    return turns


def _mark(message: Mapping[str, Any]) -> bytes:
    # A reply that comes back as a message may have lost or gained keys on the way: role and content name it.
    return orjson.dumps([_ROLES.get(message["role"].lower(), "user"), as_text(message.get("content") or "")])


def _know_answer(span: Span, known: dict[bytes, int]) -> None:
    answer = orjson.dumps(["assistant", _response_text(span)])
    known[answer] = known.get(answer, 0) + 1


def _message_turn(message: Mapping[str, Any]) -> Turn:
    role = _ROLES.get(message["role"].lower(), "user")
    name, call_id = message.get("name"), message.get("tool_call_id")
    return Turn(
        0,
        role,
        as_text(message.get("content") or ""),
        name=name if isinstance(name, str) else None,
        call_id=call_id if isinstance(call_id, str) else None,
        tool_calls=tuple(_asked_calls(message)) if role == "assistant" else (),
    )


def as_text(value: Any) -> str:
    """Give message content or a result as text: parts are joined, other data becomes JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value):
        return "\n".join(_part_text(part) for part in value)
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()


def _part_text(part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if isinstance(text, str):
        return text
    content = part.get("content")
    return content if isinstance(content, str) else f"[{part['type']}]"


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
        given, made = _messages(span.inputs), _messages(span.outputs)
        if made:
            repeated = made[: len(given)] == given
            messages = made if repeated else [*given, *made]
            return [_message_turn(message) for message in messages]
    return [_tool_turn(tool, orphan=True) for tool in tools]


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
            turns.append(replace(_tool_turn(tool, orphan=True), token_ids=ids[part], mask=marks))
        else:
            turns.append(Turn(0, "user", text, ids[part], marks))
    turns += [_tool_turn(tool, orphan=True) for tool in waiting]
    return turns
