"""A trajectory as a chat, in the shape that the pages of MLflow and Weave draw as one.

MLflow's takes only the roles system, user, assistant and tool, wants ``tool_calls[].id`` and
``function.arguments`` as strings, and falls back to a dump of the whole list when one message breaks a
rule (seen in MLflow 3.17). A message that only calls tools leaves ``content`` out: with null, previews
become raw JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..capture.snapshot import clean
from ..model import ToolCall, Turn
from . import chat_template
from .text import cut, dumps, elsewhere

CHAT_LIMIT: Final = 1_000_000
"""Most characters of all the messages in one attribute."""
MESSAGES_LIMIT: Final = 300
"""Most messages in one attribute: a page draws them all before it shows anything."""

Message = dict[str, Any]

_ROLES = {"developer": "system", "function": "tool", "ipython": "tool", "model": "assistant"}


@dataclass(frozen=True, slots=True)
class Chat:
    """The messages of a trajectory.

    Attributes:
        messages: in order, the ones that the agent was given first.
        given: how many messages come before the first generation.
        generations: id of a generation's span -> index of its message.
        finish_reasons: index of a message -> why the generation ended, where it is known.
    """

    messages: tuple[Message, ...]
    given: int
    generations: Mapping[str, int]
    finish_reasons: Mapping[int, str]


def chat_of(turns: Sequence[Turn]) -> Chat:
    """Lay the turns of a trajectory out as messages."""
    messages: list[Message] = []
    generations: dict[str, int] = {}
    reasons: dict[int, str] = {}
    waiting: list[tuple[str, ToolCall]] = []
    # Assistant turns without a span may be examples in the prompt; without any span they are the answers.
    answers = [turn for turn in turns if turn.role == "assistant" and turn.span_id is not None]
    answers = answers or [turn for turn in turns if turn.role == "assistant"]
    given = None
    for position, turn in enumerate(turns):
        if answers and turn is answers[0]:
            given = len(messages)
        if turn.role == "assistant":
            if turn.span_id is not None:
                generations[turn.span_id] = len(messages)
            if turn.finish_reason:
                reasons[len(messages)] = turn.finish_reason
            waiting = [(_call_id(call, turn, n), call) for n, call in enumerate(turn.tool_calls)]
            messages.append(_assistant(turn, waiting))
            messages += _unanswered(waiting, turns[position + 1 :])
        elif turn.role == "tool":
            messages.append(_reply(turn, waiting))
        else:
            messages += _given(turn)
    return Chat(tuple(messages), len(messages) if given is None else given, generations, reasons)


def _given(turn: Turn) -> list[Message]:
    parts = chat_template.split(turn.text) if turn.token_ids else None
    if parts is None:
        parts = [(turn.role, _text(turn))]
    return [{"role": _role(role), "content": cut(text)} for role, text in parts]


def _role(name: str) -> str:
    role = _ROLES.get(name, name)
    return role if role in ("system", "user", "assistant", "tool") else "user"


def _text(turn: Turn) -> str:
    """Give the text of a turn, without the frame of its template where it was decoded from tokens."""
    if not turn.text:
        return turn.error or (f"⟨{len(turn.token_ids)} tokens, not decoded⟩" if turn.token_ids else "")
    if not turn.token_ids:
        return turn.text
    if turn.role == "assistant":
        return chat_template.without_end(turn.text)
    parts = chat_template.split(turn.text) or ()
    return parts[0][1] if len(parts) == 1 else turn.text


def _call_id(call: ToolCall, turn: Turn, n: int) -> str:
    return clean(call.call_id) if call.call_id else f"call_{turn.index}_{n}"


def _assistant(turn: Turn, calls: Sequence[tuple[str, ToolCall]]) -> Message:
    message: Message = {"role": "assistant"}
    if turn.text or not calls:
        message["content"] = cut(_text(turn))
    if calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": clean(call.name), "arguments": _arguments(call.arguments)},
            }
            for call_id, call in calls
        ]
    return message


def _arguments(arguments: Any) -> str:
    if arguments is None:
        return "{}"
    return cut(arguments if isinstance(arguments, str) else dumps(arguments))


def _unanswered(calls: Sequence[tuple[str, ToolCall]], after: Sequence[Turn]) -> list[Message]:
    """Give the results of calls that no later turn shows, as happens when the prompt was never recorded."""
    replies: list[Turn] = []
    for turn in after:
        if turn.role == "assistant":
            break
        replies.append(turn)
    if any(turn.role == "tool" for turn in replies):
        return []
    return [
        _tool_message(_result(call), call_id, call.name)
        for call_id, call in calls
        if not any(call.result and call.result in turn.text for turn in replies)
        and (call.result is not None or call.error)
    ]


def _reply(turn: Turn, waiting: list[tuple[str, ToolCall]]) -> Message:
    """Make the message of a tool's turn, and take the call that it answers from those that wait."""
    mine = [item for item in waiting if item[1].span_id is not None and item[1].span_id == turn.span_id]
    mine = mine or [item for item in waiting if turn.name is None or item[1].name == turn.name]
    if not mine:
        return _tool_message(_text(turn), None, turn.name)
    waiting.remove(mine[0])
    call_id, call = mine[0]
    text = _text(turn) if turn.text else _result(call) or _text(turn)
    return _tool_message(text, call_id, turn.name or call.name)


def _result(call: ToolCall) -> str:
    return call.result if call.result is not None else call.error or ""


def _tool_message(text: str, call_id: str | None, name: str | None) -> Message:
    message: Message = {"role": "tool", "content": cut(text)}
    if call_id:
        message["tool_call_id"] = call_id
    if name:
        message["name"] = clean(name)
    return message


def recorded_messages(inputs: Any) -> list[Message] | None:
    """Read the messages that a generation was really called with; None when its arguments hold none."""
    given = inputs.get("messages") if isinstance(inputs, Mapping) else None
    if not isinstance(given, list) or not given:
        return None
    if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in given):
        return None
    return [_recorded(message, n) for n, message in enumerate(given)]


def _recorded(given: Mapping[str, Any], n: int) -> Message:
    message: Message = {"role": _role(given["role"])}
    content = given.get("content")
    if isinstance(content, list) and all(_is_part(part) for part in content):
        message["content"] = [_short_part(part) for part in content]
    elif content is not None:
        message["content"] = cut(content if isinstance(content, str) else dumps(content))
    calls = given.get("tool_calls")
    if isinstance(calls, list) and calls and all(isinstance(call, Mapping) for call in calls):
        message["tool_calls"] = [_recorded_call(call, f"call_{n}_{k}") for k, call in enumerate(calls)]
    for name in ("tool_call_id", "name"):
        if given.get(name):
            message[name] = clean(str(given[name]))
    if "content" not in message and "tool_calls" not in message:
        message["content"] = ""
    return message


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    if part.get("type") == "text":
        return isinstance(part.get("text"), str)
    return part.get("type") == "image_url" and isinstance(part.get("image_url"), Mapping)


def _short_part(part: Mapping[str, Any]) -> Message:
    return {"type": "text", "text": cut(part["text"])} if part["type"] == "text" else dict(part)


def _recorded_call(call: Mapping[str, Any], call_id: str) -> Message:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    return {
        "id": clean(str(call.get("id") or call_id)),
        "type": "function",
        "function": {
            "name": clean(str(function.get("name", ""))),
            "arguments": _arguments(function.get("arguments")),
        },
    }


def text_of(message: Message) -> str:
    """Give the text of a message; of one that only calls tools, the calls."""
    content = message.get("content", "")
    if content or "tool_calls" not in message:
        return str(content)
    calls = (call["function"] for call in message["tool_calls"])
    return ", ".join(f"{call['name']}({call['arguments']})" for call in calls)


def fit(messages: Sequence[Message], limit: int = CHAT_LIMIT, most: int = MESSAGES_LIMIT) -> list[Message]:
    """Give the messages that there is room for: the first and the last ones, and a note between.

    Args:
        limit: characters of all of them.
        most: how many, the note not counted.
    """
    sizes = [_size(message) for message in messages]
    if sum(sizes) <= limit and len(sizes) <= most:
        return list(messages)
    head = min(_count(sizes, limit // 4), most // 4)
    last = sizes[head:][::-1][: most - head]
    tail = max(1, _count(last, limit - limit // 4))
    hidden = len(messages) - head - tail
    kept = [*messages[:head], *messages[len(messages) - tail :]]
    if hidden > 0:
        note = f"⟨{hidden} messages of {sum(sizes[head : head + hidden])} characters {elsewhere()}⟩"
        kept.insert(head, {"role": "system", "content": note})
    return [_shorter(message, limit) for message in kept]


def _count(sizes: Sequence[int], limit: int) -> int:
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > limit:
            return count
    return len(sizes)


def _size(message: Message) -> int:
    content = message.get("content", "")
    size = len(content) if isinstance(content, str) else len(dumps(content))
    return size + sum(len(call["function"]["arguments"]) for call in message.get("tool_calls", ()))


def _shorter(message: Message, limit: int) -> Message:
    if isinstance(message.get("content"), str):
        return {**message, "content": cut(message["content"], limit)}
    return message
