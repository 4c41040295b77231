"""The spans of a trajectory as MLflow reads them.

They are OpenTelemetry's, with attributes under MLflow's names and encoded as it expects: each value is JSON.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from .. import model, semconv
from ..capture.snapshot import clean
from .mlflow_chat import CHAT_LIMIT, Chat, Message, fit, recorded_messages, text_of
from .mlflow_text import TEXT_LIMIT, cut, dumps, short_name

ATTRIBUTE_LIMIT: Final = 4_000_000
"""Most characters of an attribute that is handed on as it was recorded, such as token ids."""
CONTEXTS_LIMIT: Final = 4_000_000
"""Most characters that the prompts of all generations of a trajectory may fill together."""
MIN_CONTEXT: Final = 20_000
"""Characters that each of these prompts may fill in any case."""

RESOURCE: Final = "trackway.resource"
"""JSON of a span's resource; on the root, and where it differs from the root's."""
ROOT_EXCEPTION: Final = "trackway.exception"
"""Name of the root's exception event: as ``exception`` it would hide the conversation on MLflow's page."""

_TYPES = {"trajectory": "AGENT", "rollout": "AGENT", "llm": "CHAT_MODEL", "tool": "TOOL", "other": "UNKNOWN"}
_NO_RESOURCE = Resource.get_empty()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def spans_of(trajectory: model.Trajectory, chat: Chat) -> Iterator[ReadableSpan]:
    """Make MLflow's spans of a trajectory whose first span is its root.

    Raises:
        ValueError: an id is not one of OpenTelemetry.
    """
    trace_id = int(trajectory.trace_id, 16)
    root = trajectory.spans[0]
    last = last_moment(trajectory.spans)
    generations = sum(span.kind == "llm" for span in trajectory.spans)
    context_limit = min(CHAT_LIMIT, max(MIN_CONTEXT, CONTEXTS_LIMIT // max(1, generations)))
    calls = {call.span_id: call for call in trajectory.tool_calls if call.span_id is not None}
    for span in trajectory.spans:
        call = calls.get(span.span_id)
        attributes = dict(_recorded_attributes(span))
        attributes["mlflow.traceRequestId"] = dumps(f"tr-{trajectory.trace_id}")
        attributes["mlflow.spanType"] = dumps(_TYPES[span.kind])
        name = span.name
        if span is root:
            inputs, outputs = _root_content(trajectory, chat)
        elif span.kind == "llm":
            inputs, outputs = _generation_content(span, chat, context_limit)
        elif span.kind == "tool":
            name = str(span.attributes.get(semconv.TOOL_NAME) or (call.name if call else span.name))
            inputs, outputs = _tool_content(span, call)
        else:
            inputs, outputs = span.inputs, span.outputs
        if span.kind == "llm":
            attributes["mlflow.chat.tokenUsage"] = dumps(_usage(span))
            if span.attributes.get(semconv.REQUEST_MODEL):
                attributes["mlflow.llm.model"] = dumps(str(span.attributes[semconv.REQUEST_MODEL]))
        if inputs is not None:
            attributes["mlflow.spanInputs"] = _content(inputs)
        if outputs is not None:
            attributes["mlflow.spanOutputs"] = _content(outputs)
        if span.resource and (span is root or span.resource != root.resource):
            attributes[RESOURCE] = dumps(dict(span.resource))
        # MLflow takes a trace for finished, and for good, when its root has no end.
        end_ns = span.end_ns if span.end_ns is not None else last
        status, error = (trajectory.status, trajectory.error) if span is root else (span.status, span.error)
        yield ReadableSpan(
            name=short_name(name),
            context=_context(trace_id, span.span_id),
            parent=None if span.parent_id is None else _context(trace_id, span.parent_id),
            resource=_NO_RESOURCE,
            attributes=attributes,
            events=tuple(_events(span, end_ns, span is root)),
            status=Status(StatusCode.OK)
            if status == "ok"
            else Status(StatusCode.ERROR, cut(error or status)),
            start_time=span.start_ns,
            end_time=end_ns,
        )


def _context(trace_id: int, span_id: str) -> SpanContext:
    context = SpanContext(trace_id, int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)
    if not context.is_valid:
        raise ValueError(f"{trace_id:x}/{span_id} are not a trace id of 32 and a span id of 16 hex digits")
    return context


def _root_content(trajectory: model.Trajectory, chat: Chat) -> tuple[Any, Any]:
    root = trajectory.spans[0]
    inputs = root.inputs
    outputs: dict[str, Any] = {}
    if chat.messages:
        # The page leaves out what inputs and outputs begin with alike, and so shows each message once.
        inputs = {"messages": fit(chat.messages[: chat.given])}
        outputs["messages"] = fit(chat.messages)
    elif root.outputs is not None:
        outputs["result"] = root.outputs
    reasons = [turn.finish_reason for turn in trajectory.turns if turn.finish_reason]
    extras = {
        "error": trajectory.error,
        "reward": _shown(trajectory.reward),
        "rewards": {name: _shown(value) for name, value in trajectory.rewards.items() if name != "reward"},
        "status": trajectory.status,
        "termination": reasons[-1] if reasons else None,
        "num_turns": len(trajectory.turns) or None,
        "trained_step": trajectory.trained_step,
        "discarded": trajectory.discarded,
        "attached": {name: _shown(mean) for name, mean in trajectory.attached.items()},
        "annotations": dict(trajectory.annotations),
        "notes": list(trajectory.notes),
    }
    return inputs, outputs | {name: value for name, value in extras.items() if value not in (None, {}, [])}


def _shown(value: float | str | None) -> float | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _generation_content(span: model.Span, chat: Chat, limit: int) -> tuple[Any, Any]:
    arguments = dict(span.inputs) if isinstance(span.inputs, Mapping) else {}
    arguments.pop("messages", None)
    index = chat.generations.get(span.span_id)
    prompt: Sequence[Message] | None = recorded_messages(span.inputs)
    answer: Message | None = None
    reason = None
    if index is not None:
        prompt = prompt or chat.messages[:index]
        answer = chat.messages[index]
        reason = chat.finish_reasons.get(index)
    elif span.response_text is not None:
        answer = {"role": "assistant", "content": cut(span.response_text)}
    if not prompt and span.prompt_text is not None:
        prompt = [{"role": "user", "content": cut(span.prompt_text)}]
    inputs = {"messages": fit(prompt, limit), **arguments} if prompt else span.inputs
    if answer is None or (span.status != "ok" and not text_of(answer)):
        return inputs, span.outputs
    choice = {"index": 0, "message": answer} | ({"finish_reason": reason} if reason else {})
    return inputs, {"choices": [choice]}


def _tool_content(span: model.Span, call: model.ToolCall | None) -> tuple[Any, Any]:
    arguments = call.arguments if call is not None and call.arguments is not None else span.inputs
    if arguments is not None and not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}
    return arguments, call.result if call is not None and call.result is not None else span.outputs


def _content(value: Any) -> str:
    """Encode inputs or outputs; structure that is too large for the page becomes its text, cut."""
    if isinstance(value, str):
        return dumps(cut(value))
    text = dumps(value)
    if len(text) <= TEXT_LIMIT:
        return text
    if isinstance(value, Mapping) and ("messages" in value or "choices" in value):
        parts = (
            f"{dumps(str(name))}:{dumps(item) if name in ('messages', 'choices') else _content(item)}"
            for name, item in value.items()
        )
        return f"{{{','.join(parts)}}}"
    return dumps({"text": cut(text)})


def _recorded_attributes(span: model.Span) -> Iterator[tuple[str, str]]:
    for name, value in span.attributes.items():
        if name.startswith(("mlflow.", "session.", "user.")) and name != semconv.RUN_ID:
            continue
        if isinstance(value, bytes):
            value = base64.b64encode(value).decode()
        if isinstance(value, str):
            if len(value) > ATTRIBUTE_LIMIT:
                value = cut(value, TEXT_LIMIT)
            text = dumps(clean(value))
            # MLflow's store parses a text that is JSON and keeps the value; once more, and it stays text.
            yield clean(name), dumps(text) if value.lstrip()[:1] in ("{", "[", '"') else text
        else:
            yield clean(name), dumps(value)


def _events(span: model.Span, end_ns: int, is_root: bool) -> Iterator[Event]:
    raised = False
    for event in span.events:
        name = event.name
        if name == semconv.EXCEPTION_EVENT:
            raised = True
            name = ROOT_EXCEPTION if is_root else name
        attributes = {clean(key): _event_value(value) for key, value in event.attributes.items()}
        yield Event(clean(name), attributes, event.time_ns)
    if span.status != "ok" and not raised and not is_root:
        # Without an event, the page shows nowhere why a span failed.
        reason = {
            semconv.EXCEPTION_TYPE: span.status,
            semconv.EXCEPTION_MESSAGE: cut(span.error or span.status),
        }
        yield Event(semconv.EXCEPTION_EVENT, reason, end_ns)


def _event_value(value: Any) -> Any:
    if isinstance(value, str):
        return cut(value)
    return value if isinstance(value, int) else orjson.loads(dumps(value))


def _usage(span: model.Span) -> dict[str, int]:
    given = span.attributes.get(semconv.INPUT_TOKENS)
    made = span.attributes.get(semconv.OUTPUT_TOKENS)
    input_tokens = given if isinstance(given, int) else len(span.prompt_ids or ())
    output_tokens = made if isinstance(made, int) else len(span.response_ids or ())
    return {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
    }


def total_usage(spans: Sequence[model.Span]) -> dict[str, int] | None:
    """Add up what the generations used, one inside another counted with the outer one; None without any."""
    by_id = {span.span_id: span for span in spans}
    total: dict[str, int] | None = None
    for span in spans:
        if span.kind != "llm":
            continue
        above = by_id.get(span.parent_id or "")
        passed: set[str] = set()  # parents in a circle would never end
        while above is not None and above.kind != "llm" and above.span_id not in passed:
            passed.add(above.span_id)
            above = by_id.get(above.parent_id or "")
        if above is None or above.kind != "llm":
            used = _usage(span)
            total = used if total is None else {name: total[name] + used[name] for name in used}
    return total


def last_moment(spans: Iterable[model.Span]) -> int:
    """Give the latest time that spans tell, in nanoseconds since 1970."""
    return max(span.end_ns if span.end_ns is not None else span.start_ns for span in spans)
