"""The spans of a trajectory as MLflow reads them.

They are OpenTelemetry's, with attributes under MLflow's names and encoded as it expects: each value is JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from .. import model, semconv
from ..capture.snapshot import clean
from .chat import Chat
from .content import Content, contents_of
from .text import TEXT_LIMIT, cut, dumps, short_name

ATTRIBUTE_LIMIT: Final = 4_000_000
"""Most characters of an attribute that is handed on as it was recorded, such as token ids."""

RESOURCE: Final = "trackway.resource"
"""JSON of a span's resource; on the root, and where it differs from the root's."""
RECORDED: Final = "trackway.recorded"
"""JSON of what MLflow does not show as it was: ``name``, ``side``; ``ended``, false where it never did."""
ROOT_EXCEPTION: Final = "trackway.exception"
"""Name of the root's exception event: named ``exception`` it would hide the conversation on the page."""

_TYPES = {"trajectory": "AGENT", "rollout": "AGENT", "llm": "CHAT_MODEL", "tool": "TOOL", "other": "UNKNOWN"}
_NO_RESOURCE = Resource.get_empty()
_NOTHING: Mapping[str, str] = {}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def spans_of(
    trajectory: model.Trajectory, chat: Chat, left_out: Mapping[str, str] = _NOTHING
) -> Iterator[ReadableSpan]:
    """Make MLflow's spans of a trajectory whose first span is its root.

    Args:
        trajectory: as ``rooted`` gives it.
        chat: of its turns.
        left_out: id of a span -> what it says of the calls inside it that are not among the spans.

    Raises:
        ValueError: an id is not one of OpenTelemetry.
    """
    trace_id = int(trajectory.trace_id, 16)
    root = trajectory.spans[0]
    for content in contents_of(trajectory, chat):
        span = content.span
        attributes = dict(_recorded_attributes(span))
        attributes["mlflow.traceRequestId"] = dumps(f"tr-{trajectory.trace_id}")
        attributes["mlflow.spanType"] = dumps(_TYPES[span.kind])
        if content.usage is not None:
            attributes["mlflow.chat.tokenUsage"] = dumps(content.usage)
            if span.attributes.get(semconv.REQUEST_MODEL):
                attributes["mlflow.llm.model"] = dumps(str(span.attributes[semconv.REQUEST_MODEL]))
        inputs, outputs = _with_note(content, left_out.get(span.span_id))
        if inputs is not None:
            attributes["mlflow.spanInputs"] = _content(inputs)
        if outputs is not None:
            attributes["mlflow.spanOutputs"] = _content(outputs)
        if span.resource and (span is root or span.resource != root.resource):
            attributes[RESOURCE] = dumps(dict(span.resource))
        if recorded := _recorded_otherwise(span, content.name):
            attributes[RECORDED] = dumps(recorded)
        status, error = content.status, content.error
        yield ReadableSpan(
            name=short_name(content.name),
            context=_context(trace_id, span.span_id),
            parent=None if span.parent_id is None else _context(trace_id, span.parent_id),
            resource=_NO_RESOURCE,
            attributes=attributes,
            events=tuple(_events(span, content.end_ns, span is root)),
            links=tuple(_links(span)),
            status=Status(StatusCode.OK)
            if status == "ok"
            else Status(StatusCode.ERROR, cut(error or status)),
            start_time=span.start_ns,
            end_time=content.end_ns,
        )


def _with_note(content: Content, note: str | None) -> tuple[Any, Any]:
    """Give the inputs and outputs of a span, with what it says of the calls inside it."""
    inputs, outputs = content.inputs, content.outputs
    if note is None:
        return inputs, outputs
    shown = outputs if isinstance(outputs, Mapping) else {} if outputs is None else {"result": outputs}
    if content.span.parent_id is None and isinstance(inputs, Mapping):
        inputs = {**inputs, "left_out": note}  # where one sees it before a long conversation
    return inputs, {"left_out": note, **shown}


def _context(trace_id: int, span_id: str) -> SpanContext:
    context = SpanContext(trace_id, int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)
    if not context.is_valid:
        raise ValueError(f"{trace_id:x}/{span_id} are not a trace id of 32 and a span id of 16 hex digits")
    return context


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


def usual_side(kind: model.Kind) -> model.Side:
    """Give the side of a call that a span of some kind is on, where nobody says otherwise."""
    return "client" if kind == "llm" else "internal"


def _recorded_otherwise(span: model.Span, name: str) -> dict[str, Any]:
    recorded: dict[str, Any] = {} if span.name == name else {"name": clean(span.name)}
    if span.side != usual_side(span.kind):
        recorded["side"] = span.side
    if span.end_ns is None:
        recorded["ended"] = False
    return recorded


def _links(span: model.Span) -> Iterator[Link]:
    for link in span.links:
        attributes = {clean(key): _event_value(value) for key, value in link.attributes.items()}
        yield Link(SpanContext(int(link.trace_id, 16), int(link.span_id, 16), is_remote=True), attributes)


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
