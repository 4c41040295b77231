"""How large trajectories are for a destination that does not say so itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

_NUMBER = 8


def bytes_in(spans: Iterable[ReadableSpan]) -> int:
    """Count the names, attributes and events of spans, in bytes before any compression.

    OTLP's binary encoding takes a tenth more, for ids and times; it takes less for small numbers.
    """
    return sum(
        bytes_of(span.name)
        + _in(span.attributes or {})
        + sum(bytes_of(event.name) + _in(event.attributes or {}) for event in span.events)
        for span in spans
    )


def bytes_of(value: Any) -> int:
    """Give the bytes of a value of an attribute; a number counts as eight."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, (bytes, bytearray)):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_of, value))
    return _in(value) if isinstance(value, Mapping) else _NUMBER


def _in(attributes: Mapping[str, Any]) -> int:
    return sum(bytes_of(name) + bytes_of(value) for name, value in attributes.items())
