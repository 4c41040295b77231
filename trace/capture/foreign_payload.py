"""What went into a span of other instrumentation and what came out of it, read from its attributes.

OpenTelemetry's conventions for generative AI write messages as lists of parts; OpenInference has the whole
request and response as ``input.value`` and ``output.value``. Both become what a traced call would have left:
arguments and a result as JSON, with messages in the format of OpenAI, from which the turns are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from .. import semconv
from ..model import Kind

_INPUT, _OUTPUT = "input.value", "output.value"


def payload_of(kind: Kind, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Give the attributes that tell a span's arguments and result under our names, where it tells them.

    Args:
        kind: of the span.
        attributes: its own ones, as they are stored.
    """
    if kind == "tool":
        names = {_INPUT: semconv.TOOL_ARGUMENTS, _OUTPUT: semconv.TOOL_RESULT, "tool.name": semconv.TOOL_NAME}
    else:
        names = {_INPUT: semconv.INPUT, _OUTPUT: semconv.OUTPUT}
    found = {ours: attributes[theirs] for theirs, ours in names.items() if theirs in attributes}
    if kind == "llm":
        given = _messages(attributes.get(semconv.INPUT_MESSAGES))
        made = _messages(attributes.get(semconv.OUTPUT_MESSAGES))
        system = _parts(_read(attributes.get(semconv.SYSTEM_INSTRUCTIONS)))
        if system:
            given.insert(0, {"role": "system", **system})
        if given:
            found[semconv.INPUT] = orjson.dumps({"messages": given}).decode()
        if made:
            choices: list[dict[str, Any]] = [
                {"index": n, "message": message} for n, message in enumerate(made)
            ]
            for choice, said in zip(choices, _read(attributes[semconv.OUTPUT_MESSAGES]), strict=False):
                if said.get("finish_reason"):
                    choice["finish_reason"] = said["finish_reason"]
            found[semconv.OUTPUT] = orjson.dumps({"choices": choices}).decode()
    return found


def _read(value: Any) -> list[dict[str, Any]]:
    """Read a list of objects that stands there as JSON."""
    try:
        value = orjson.loads(value) if isinstance(value, str) else value
    except ValueError:  # cut by a limit, for instance
        return []
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _messages(value: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for message in _read(value):
        parts = _read(message.get("parts"))
        role = str(message.get("role", "user"))
        answers = [part for part in parts if part.get("type") == "tool_call_response"]
        for part in answers:
            result = part.get("response", part.get("result"))
            content = result if isinstance(result, str) else orjson.dumps(result).decode()
            messages.append({"role": "tool", "tool_call_id": str(part.get("id", "")), "content": content})
        others = _parts(parts)
        if others or not answers:
            messages.append({"role": role, **others})
    return messages


def _parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [str(part.get("content", "")) for part in parts if part.get("type") == "text"]
    thoughts = [str(part.get("content", "")) for part in parts if part.get("type") == "reasoning"]
    calls = [
        {
            "id": str(part.get("id", "")),
            "type": "function",
            "function": {"name": str(part.get("name", "")), "arguments": part.get("arguments")},
        }
        for part in parts
        if part.get("type") == "tool_call"
    ]
    found: dict[str, Any] = {}
    if texts:
        found["content"] = "\n".join(texts)
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found
