"""How large a span is on its way, and a shorter one of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.trace import Event, ReadableSpan

from .text import ELSEWHERE, cut, dumps

_SPAN, _VALUE = 256, 16
"""Bytes of a span, and of an attribute, beside names and values; rather too many."""


def size_of(span: ReadableSpan) -> int:
    """Estimate the bytes that a span takes in a request."""
    size = (
        _SPAN + _weight(span.name) + _weight(dict(span.attributes or {})) + _weight(span.status.description)
    )
    for event in span.events:
        size += _SPAN + _weight(event.name) + _weight(dict(event.attributes or {}))
    for link in span.links:
        size += _SPAN + _weight(dict(link.attributes or {}))
    return size


def _weight(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_VALUE + len(key) + _weight(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sum(_VALUE + _weight(item) for item in value)
    return _VALUE


def fitted(attributes: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Give attributes with no value of more characters or bytes than the limit."""
    return {name: _fitted(value, limit) for name, value in attributes.items()}


def _fitted(value: Any, limit: int) -> Any:
    if isinstance(value, str):
        if len(value) <= limit:
            return value
        # Half a JSON document is none: nobody could read it.
        return dumps(_mark(len(value), "characters")) if value[0] in "[{" else cut(value, limit)
    if isinstance(value, bytes):
        return value if len(value) <= limit else _mark(len(value), "bytes")
    if _weight(value) > limit:
        return _mark(_weight(value), "bytes")
    return value


def _mark(size: int, unit: str) -> str:
    return f"⟨{size} {unit} {ELSEWHERE}⟩"


def shorter(span: ReadableSpan, limit: int) -> ReadableSpan:
    """Give a span with no attribute, of its own or of an event, of more characters than the limit."""
    return ReadableSpan(
        name=span.name,
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=fitted(span.attributes or {}, limit),
        events=[
            Event(event.name, fitted(event.attributes or {}, limit), event.timestamp) for event in span.events
        ],
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
