"""The spans of a trajectory as OpenTelemetry's conventions for generative AI name what is in them.

Messages are lists of parts, as JSON. Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/, whose
status is Development.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import orjson
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from .. import model, semconv
from ..capture.snapshot import clean
from ..store.payloads import whole_attributes
from .chat import Chat, Message, chat_of, fit
from .content import Content, contents_of, rooted
from .span_size import fitted, shorter, size_of
from .text import cut, dumps, short_name

MESSAGES_LIMIT: Final = 300_000
"""Most characters of the messages in one attribute."""
ATTRIBUTE_LIMIT: Final = 1_000_000
"""Most characters or bytes of any other attribute, such as token ids."""
SPAN_BYTES: Final = 2 * 2**20
"""Most bytes of a span; in a larger one, every attribute is cut to ``SHORT_LIMIT`` characters."""
SHORT_LIMIT: Final = 50_000

_SCOPE: Final = InstrumentationScope("trackway")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_REQUEST: Final = {
    "model": semconv.REQUEST_MODEL,
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
}
"""Argument of a generation -> the attribute that it is by the conventions."""
_REASONS: Final = {"tool_calls": "tool_call", "function_call": "tool_call"}


def resource_of_environment() -> Mapping[str, Any]:
    """Give what ``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SERVICE_NAME`` say of this program."""
    return dict(OTELResourceDetector().detect().attributes)


def genai_spans(
    trajectory: model.Trajectory, experiment: str, environment: Mapping[str, Any]
) -> list[ReadableSpan]:
    """Give the spans of a trajectory as they are sent, the root first.

    Args:
        experiment: name of the experiment of a trajectory that does not say its own.
        environment: attributes of the resource that win over the recorded ones.

    Raises:
        ValueError: the trajectory has no spans, or ids that are not those of OpenTelemetry.
    """
    if not trajectory.spans:
        raise ValueError("the trajectory has no spans")
    attached = [event for span in trajectory.spans if span.kind == "attach" for event in span.events]
    trajectory = rooted(trajectory)
    chat = chat_of(trajectory.turns)
    calls = {call.span_id: call.call_id for call in trajectory.tool_calls}
    tags = _tags(trajectory, experiment)
    spans = []
    for content in contents_of(trajectory, chat):
        span = content.span
        is_root = span is trajectory.spans[0]
        if is_root and attached:
            content = replace(content, span=replace(span, events=(*span.events, *attached)))
        attributes = tags | whole_attributes(span)
        if is_root:
            attributes |= _conversation(chat, trajectory)
        if span.kind == "llm":
            attributes |= _generation(content, attributes)
        elif span.kind == "tool":
            attributes |= _tool(content, calls.get(span.span_id))
        spans.append(_readable(content, attributes, environment))
    return spans


def _tags(trajectory: model.Trajectory, experiment: str) -> dict[str, Any]:
    """Give what stands on every span, so that each can be found by it."""
    tags: dict[str, Any] = {semconv.EXPERIMENT: trajectory.experiment or experiment}
    if trajectory.project:
        tags[semconv.PROJECT] = trajectory.project
    key = trajectory.key
    if key is not None:
        tags |= {
            semconv.VALIDATE: key.validate,
            semconv.ATTEMPT: key.attempt,
            semconv.ROLLOUT_N: key.rollout_n,
        }
        if key.step is not None:
            tags[semconv.STEP] = key.step
        if key.sample_index is not None:
            tags[semconv.SAMPLE_INDEX] = key.sample_index
    return tags


def _conversation(chat: Chat, trajectory: model.Trajectory) -> dict[str, Any]:
    """Give the messages of the whole rollout, for its root."""
    found: dict[str, Any] = {semconv.STATUS: trajectory.status}
    given, made = chat.messages[: chat.given], chat.messages[chat.given :]
    if given:
        found[semconv.INPUT_MESSAGES] = _json(given)
    if made:
        reasons = {n - chat.given: reason for n, reason in chat.finish_reasons.items()}
        found[semconv.OUTPUT_MESSAGES] = _json(made, reasons)
    return found


def _generation(content: Content, attributes: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {semconv.OPERATION: attributes.get(semconv.OPERATION, "chat")}
    if content.usage is not None and content.usage["total_tokens"]:
        found[semconv.INPUT_TOKENS] = content.usage["input_tokens"]
        found[semconv.OUTPUT_TOKENS] = content.usage["output_tokens"]
    if isinstance(content.inputs, Mapping) and isinstance(content.inputs.get("messages"), list):
        arguments = {name: value for name, value in content.inputs.items() if name != "messages"}
        found[semconv.INPUT_MESSAGES] = _json(content.inputs["messages"])
        attributes.pop(semconv.INPUT, None)  # the messages would stand there twice
        if arguments:
            found[semconv.INPUT] = dumps(arguments)
        for name, attribute in _REQUEST.items():
            value = arguments.get(name)
            if isinstance(value, (str, int, float)) and not isinstance(value, bool):
                found[attribute] = value
    if isinstance(content.outputs, Mapping) and isinstance(content.outputs.get("choices"), list):
        choices = [choice for choice in content.outputs["choices"] if isinstance(choice, Mapping)]
        messages = [choice["message"] for choice in choices if isinstance(choice.get("message"), Mapping)]
        reasons = {
            n: str(choice["finish_reason"]) for n, choice in enumerate(choices) if "finish_reason" in choice
        }
        found[semconv.OUTPUT_MESSAGES] = _json(messages, reasons)
        if reasons:
            found[semconv.FINISH_REASONS] = list(reasons.values())
    return found


def _tool(content: Content, call_id: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {semconv.OPERATION: "execute_tool", semconv.TOOL_NAME: content.name}
    if content.inputs is not None:
        found[semconv.TOOL_ARGUMENTS] = dumps(content.inputs)
    if content.outputs is not None:
        text = content.outputs if isinstance(content.outputs, str) else dumps(content.outputs)
        found[semconv.TOOL_RESULT] = text
    if call_id:
        found[semconv.TOOL_CALL_ID] = call_id
    return found


def _json(messages: Sequence[Message], reasons: Mapping[int, str] | None = None) -> str:
    kept = fit(messages, MESSAGES_LIMIT)
    if len(kept) != len(messages):
        reasons = {} if reasons is not None else None  # they have other places now
    shown = []
    for number, message in enumerate(kept):
        item: dict[str, Any] = {"role": message.get("role", "user"), "parts": list(_parts(message))}
        if message.get("name"):
            item["name"] = message["name"]
        if reasons is not None and item["role"] == "assistant":
            reason = reasons.get(number, "unknown")
            item["finish_reason"] = _REASONS.get(reason, reason)
        shown.append(item)
    return dumps(shown)


def _parts(message: Message) -> Iterator[dict[str, Any]]:
    for name in ("reasoning", "reasoning_content"):
        if isinstance(message.get(name), str) and message[name]:
            yield {"type": "reasoning", "content": message[name]}
    content = message.get("content")
    if message.get("role") == "tool":
        yield {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return
    for part in content if isinstance(content, list) else ():
        yield _part(part)
    if isinstance(content, str) and (content or not message.get("tool_calls")):
        yield {"type": "text", "content": content}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = _parsed(function["arguments"])
        yield {"type": "tool_call", "id": call["id"], "name": function["name"], "arguments": arguments}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == "text":
        return {"type": "text", "content": part.get("text", "")}
    url = str((part.get("image_url") or {}).get("url", ""))
    head, comma, data = url.partition(";base64,")
    if head.startswith("data:") and comma:
        return {"type": "blob", "modality": "image", "mime_type": head[5:], "content": data}
    return {"type": "uri", "modality": "image", "uri": url}


def _parsed(arguments: str) -> Any:
    try:
        return orjson.loads(arguments)
    except ValueError:
        return arguments


def _readable(
    content: Content, attributes: Mapping[str, Any], environment: Mapping[str, Any]
) -> ReadableSpan:
    span = content.span
    trace_id = int(span.trace_id, 16)
    side = "client" if span.kind == "llm" else span.side
    status = Status(StatusCode.OK)
    if content.status != "ok":
        status = Status(StatusCode.ERROR, cut(content.error or content.status))
    made = ReadableSpan(
        name=short_name(content.name),
        context=context_of(trace_id, span.span_id),
        parent=None if span.parent_id is None else context_of(trace_id, span.parent_id),
        resource=Resource(plain({"service.name": "trackway", **span.resource, **environment})),
        attributes=fitted(plain(attributes), ATTRIBUTE_LIMIT),
        events=[
            Event(clean(event.name), fitted(plain(event.attributes), ATTRIBUTE_LIMIT), event.time_ns)
            for event in span.events
        ],
        links=[
            Link(context_of(int(link.trace_id, 16), link.span_id), plain(link.attributes))
            for link in span.links
        ],
        kind=SpanKind[side.upper()],
        status=status,
        start_time=span.start_ns,
        end_time=content.end_ns,
        instrumentation_scope=_SCOPE,
    )
    return made if size_of(made) <= SPAN_BYTES else shorter(made, SHORT_LIMIT)


def context_of(trace_id: int, span_id: str) -> SpanContext:
    """Give the context of a span.

    Raises:
        ValueError: an id is not one of OpenTelemetry.
    """
    context = SpanContext(trace_id, int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)
    if not context.is_valid:
        raise ValueError(f"{trace_id:x}/{span_id} are not a trace id of 32 and a span id of 16 hex digits")
    return context


def plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Give attributes that every OTLP encoder takes: no null, no broken surrogate, no number over 64 bits."""
    return {clean(str(name)): _plain(value) for name, value in attributes.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, Mapping):
            return plain(value)
        if isinstance(value, (list, tuple)):
            return [_plain(item) for item in value if item is not None]
        return value if isinstance(value, (bool, float, bytes)) else clean(str(value))
    return value if -(2**63) <= value < 2**63 else str(value)
