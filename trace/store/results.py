"""What the arguments and results of generations say: messages, texts, tool calls, reasons."""

from __future__ import annotations

from collections.abc import Mapping
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


def result_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    message = message_of(value)
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
            return result_text(first)
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


def message_of(value: Any) -> Mapping[str, Any] | None:
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


def asked_calls(message: Mapping[str, Any] | None) -> list[ToolCall]:
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


def finish_reason(span: Span) -> str | None:
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


def messages_of(value: Any) -> list[Mapping[str, Any]]:
    """Give the chat messages in a value: a list of them, or an object that holds one under a usual name."""
    if isinstance(value, dict):
        for name in ("messages", "raw_prompt", "conversation", "history"):
            found = messages_of(value.get(name))
            if found:
                return found
        return []
    if not isinstance(value, list):
        return []
    messages: list[Mapping[str, Any]] = [
        item for item in value if isinstance(item, dict) and isinstance(item.get("role"), str)
    ]
    return messages if messages and len(messages) == sum(item is not None for item in value) else []


def message_turn(message: Mapping[str, Any]) -> Turn:
    role = _ROLES.get(message["role"].lower(), "user")
    name, call_id = message.get("name"), message.get("tool_call_id")
    return Turn(
        0,
        role,
        as_text(message.get("content") or ""),
        name=name if isinstance(name, str) else None,
        call_id=call_id if isinstance(call_id, str) else None,
        tool_calls=tuple(asked_calls(message)) if role == "assistant" else (),
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


def prompt_text(span: Span) -> str:
    if span.prompt_text is not None:
        return span.prompt_text
    if isinstance(span.inputs, dict):
        for name in ("prompt", "text", "question", "query"):
            if isinstance(span.inputs.get(name), str):
                return cast(str, span.inputs[name])
    return ""


def response_text(span: Span) -> str:
    if span.response_text is not None:
        return span.response_text
    return result_text(span.outputs)
