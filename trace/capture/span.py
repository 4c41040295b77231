"""The OpenTelemetry span of a traced call, as little of one as the caller has to wait for.

It implements OpenTelemetry's API, so other instrumentation nests under it and may add to it, and leaves out
what the SDK does for every span while its caller waits: sampling, limits, locks, processors, and a readable
copy at the end. That was two thirds of what a traced call cost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.trace import Span, SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from .. import semconv
from . import snapshot

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_PLAIN = (str, bool, int, float, bytes)

SpanEvent = tuple[str, int, "Mapping[str, Any]"]
"""Name, time in nanoseconds, attributes."""
SpanLink = tuple[int, int, "Mapping[str, Any]"]
"""Trace id, span id, attributes."""


class RecordedSpan(Span):
    """A span, and what others put on it, who may give anything: what is no name, value or time is left out.

    Its ids come from the operating system: a trainer seeds ``random``, and ids drawn from it would repeat.

    Args:
        name: name of the span.
        trace_id: the trace it belongs to, 128 bits; None begins a trace.
        parent_id: id of the parent span, 64 bits; None for the root of a trace.

    Attributes:
        start_ns, end_ns: nanoseconds since 1970; ``end_ns`` is None while it is open.
        attributes: what other instrumentation has set, None when nothing was; likewise ``events``, ``links``.
    """

    __slots__ = (
        "attributes",
        "end_ns",
        "events",
        "links",
        "name",
        "parent_id",
        "span_id",
        "start_ns",
        "trace_id",
    )

    def __init__(self, name: str, trace_id: int | None, parent_id: int | None) -> None:
        self.name = name
        self.trace_id = trace_id or _random() << 64 | _random() or 1
        self.span_id = _random() or 1
        self.parent_id = parent_id
        self.attributes: dict[str, Any] | None = None
        self.events: list[SpanEvent] | None = None
        self.links: list[SpanLink] | None = None
        self.end_ns: int | None = None
        self.start_ns = time.time_ns()

    def get_span_context(self) -> SpanContext:
        return SpanContext(self.trace_id, self.span_id, is_remote=False, trace_flags=_SAMPLED)

    def is_recording(self) -> bool:
        return self.end_ns is None

    def set_attribute(self, key: str, value: Any) -> None:
        if self.end_ns is None and isinstance(key, str):
            if self.attributes is None:
                self.attributes = {}
            self.attributes[key] = _fixed(value)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        for key, value in _items(attributes):
            self.set_attribute(key, value)

    def add_event(
        self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None
    ) -> None:
        if self.end_ns is None:
            if self.events is None:
                self.events = []
            self.events.append((snapshot.text(name), _moment(timestamp), fixed_items(attributes)))

    def add_link(self, context: SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        if self.end_ns is None and isinstance(context, SpanContext) and context.is_valid:
            if self.links is None:
                self.links = []
            self.links.append((context.trace_id, context.span_id, fixed_items(attributes)))

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        facts = {
            semconv.EXCEPTION_TYPE: type(exception).__qualname__,
            semconv.EXCEPTION_MESSAGE: snapshot.message(exception),
            **dict(_items(attributes)),
        }
        self.add_event(semconv.EXCEPTION_EVENT, facts, timestamp)

    def update_name(self, name: str) -> None:
        if self.end_ns is None and isinstance(name, str):
            self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Do nothing: how a traced call ended is seen by the decorator around it."""

    def end(self, end_time: int | None = None) -> None:
        if self.end_ns is None:
            self.end_ns = _moment(end_time)


def _fixed(value: Any) -> Any:
    """Give a value that nobody changes any more."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(item if isinstance(item, _PLAIN) else snapshot.text(item) for item in value)
    return snapshot.text(value)


def fixed_items(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Give attributes that nobody changes any more; what has no name is left out."""
    return {key: _fixed(value) for key, value in _items(attributes) if isinstance(key, str)}


def _items(attributes: Mapping[str, Any] | None) -> Iterable[tuple[str, Any]]:
    return attributes.items() if isinstance(attributes, Mapping) else ()


def _moment(given: int | None) -> int:
    # What others give may be no time at all; a line with one could not be read.
    return given if type(given) is int and 0 < given < 2**63 else time.time_ns()


_numbers: list[int] = []
os.register_at_fork(after_in_child=_numbers.clear)


def _random() -> int:
    """Give 64 bits of the system's randomness.

    Many are fetched at once. To ask lets go of the interpreter's lock, which the writer's thread then keeps
    for a while, and the event loop stands still.
    """
    while True:
        try:
            return _numbers.pop()
        except IndexError:
            _numbers.extend(memoryview(os.urandom(4096)).cast("Q"))
