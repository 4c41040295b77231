"""Spans that other OpenTelemetry instrumentation makes inside of a rollout, taken into its trajectory.

A span processor on the program's own tracer provider sees them. It changes nothing about them, so whatever
else the provider does with its spans goes on as before.
"""

from __future__ import annotations

import os
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from opentelemetry import trace as otel_trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import ProxyTracerProvider

from .. import semconv
from ..log import logger
from ..model import Kind
from ..store.otlp import SIDES
from . import runtime
from .scope import NO_PARENT, Elsewhere, NotSampled, Rollout, Scope, current, is_hidden
from .span import fixed_items

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from .recorder import Recorder

log = logger()

MAX_KNOWN: Final = 65_536
"""Spans of other instrumentation that are remembered: those inside of one belong to its rollout."""
SCOPE_NAME: Final = "otel.scope.name"
"""Attribute with the name of the instrumentation that made a span; OpenTelemetry's name for it."""
SCOPE_VERSION: Final = "otel.scope.version"

_KINDS: dict[str, dict[str, Kind]] = {
    semconv.OPERATION: {
        "chat": "llm",
        "text_completion": "llm",
        "generate_content": "llm",
        "execute_tool": "tool",
        "invoke_agent": "rollout",
    },
    "openinference.span.kind": {"llm": "llm", "tool": "tool", "agent": "rollout"},
    "traceloop.span.kind": {"tool": "tool", "agent": "rollout"},
    "llm.request.type": {"chat": "llm", "completion": "llm"},
}
"""Attribute that tells what a span is -> its value, in small letters -> what that is here.

OpenTelemetry's conventions for generative AI, OpenInference, and OpenLLMetry with both of its own names.
"""

_Place = tuple["Recorder", Rollout, int]
"""Of a span: who records it, its rollout, and the id of its parent."""
_MOST_NESTED = 1_000


class ForeignSpan(Scope):
    """A span that somebody else has made and ended, as it was at its end.

    Attributes:
        code: OTLP's status code.
        description: of the status.
        side: OpenTelemetry's kind of it.
    """

    __slots__ = ("code", "description", "side")

    def __init__(self, place: _Place, span: ReadableSpan) -> None:
        recorder, rollout, parent_id = place
        facts = fixed_items(span.attributes)
        # Its parent is one of ours, or another one of these: anything but the beginning of a rollout.
        super().__init__(recorder, rollout, Elsewhere(rollout, NO_PARENT), span.name, _kind(facts))
        context = span.get_span_context()
        assert context is not None
        # Its own trace is another one where calls of ours stay out of OpenTelemetry's context.
        self.trace_id, self.span_id, self.parent_id = int(rollout.trace_id, 16), context.span_id, parent_id
        self.start_ns = span.start_time or self.start_ns
        self.end_ns = span.end_time or self.start_ns
        self.events = [(event.name, event.timestamp, fixed_items(event.attributes)) for event in span.events]
        self.links = [
            (link.context.trace_id, link.context.span_id, fixed_items(link.attributes)) for link in span.links
        ]
        self.code = span.status.status_code.value
        self.description = span.status.description
        self.status = "ok" if span.status.is_ok else "error"
        self.side = SIDES[span.kind.value]
        scope = span.instrumentation_scope
        if scope is not None:
            facts[SCOPE_NAME] = scope.name
            if scope.version:
                facts[SCOPE_VERSION] = scope.version
        self.attributes = {name: value for name, value in facts.items() if not name.startswith("trackway.")}
        if self.kind == "llm":
            rollout.generates = True


def _kind(attributes: dict[str, Any]) -> Kind:
    for name, kinds in _KINDS.items():
        kind = kinds.get(str(attributes.get(name, "")).lower())
        if kind is not None:
            return kind
    return "other"


class Capture(SpanProcessor):
    """Records the spans that belong to a rollout whose recorder wants them, and lets all others pass."""

    def __init__(self) -> None:
        self._known: dict[int, _Place] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        place = self._place(parent_context)
        context = span.get_span_context()
        if place is not None and context is not None:
            self._known[context.span_id] = place
            if len(self._known) > MAX_KNOWN:
                with suppress(RuntimeError, KeyError):  # another thread has changed it meanwhile
                    del self._known[next(iter(self._known))]

    def place(self, span_id: int) -> _Place | None:
        """Give what is known of a span of theirs; None when it is none, or in no rollout."""
        return self._known.get(span_id)

    def _place(self, parent_context: Context | None) -> _Place | None:
        here = current()
        if isinstance(here, NotSampled):
            return None
        parent = otel_trace.get_current_span(parent_context)
        parent_id = parent.get_span_context().span_id
        recorder: Recorder | None
        if isinstance(parent, Scope):
            recorder, rollout = parent.recorder, parent.rollout
        elif isinstance(here, Elsewhere) and parent_id == here.span_id:
            recorder, rollout = runtime.get(), here.rollout
        elif (known := self._known.get(parent_id)) is not None:
            recorder, rollout, _ = known
        elif is_hidden() and isinstance(here, (Scope, Elsewhere)):
            recorder = here.recorder if isinstance(here, Scope) else runtime.get()
            rollout, parent_id = here.rollout, here.span_id
        else:
            return None
        if recorder is not None and recorder.writer.closed:
            recorder = runtime.get()
        if recorder is None or not recorder.config.capture_otel:
            return None
        return recorder, rollout, parent_id

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        place = None if context is None else self._known.get(context.span_id)
        if context is not None and place is not None:
            place[0].guard(_record, place, span)
            # It stays known: what it has set off may begin after its end, and after that of its rollout.
            # But the token ids and the conversation of a rollout are large, and not to be kept for that.
            recorder, rollout, parent_id = place
            self._known[context.span_id] = recorder, _only_named(rollout), parent_id


def _only_named(rollout: Rollout) -> Rollout:
    named = copy(rollout)
    named.forget()
    return named


def _record(place: _Place, span: ReadableSpan) -> None:
    place[0].record(ForeignSpan(place, span))


class _SystemIds(IdGenerator):
    """Ids from the operating system: the SDK draws its own from ``random``, which trainers seed and use."""

    def generate_span_id(self) -> int:
        return int.from_bytes(os.urandom(8), "big") or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(os.urandom(16), "big") or 1


_capture = Capture()
_watched: WeakSet[Any] = WeakSet()
_seen: Any = None


def around(scope: Scope) -> int | None:
    """Give the id of the span of theirs that a call of ours was made inside of.

    None where there is no such span between the call and its parent, which is another call of ours.
    """
    before = getattr(scope, "_otel_before", None)  # not there where nothing ran inside of it
    span_id = above = otel_trace.get_current_span(before).get_span_context().span_id
    for _ in range(_MOST_NESTED):
        place = _capture.place(above)
        if place is None:
            break
        above = place[2]
    return span_id if above == scope.parent_id != span_id else None


def look(make: bool) -> None:
    """See to it that the spans of the program's tracer provider are seen.

    It is cheap where nothing has changed, so that a provider which comes late is found too.

    Args:
        make: whether to set a provider where the program has none. It exports nothing.
    """
    global _seen
    provider: Any = otel_trace.get_tracer_provider()
    if provider is _seen:
        return
    if isinstance(provider, ProxyTracerProvider):  # stands there until one is set
        if not make:
            return
        otel_trace.set_tracer_provider(
            TracerProvider(sampler=ALWAYS_ON, id_generator=_SystemIds(), shutdown_on_exit=False)
        )
        provider = otel_trace.get_tracer_provider()
        log.warning(
            "capture_otel: no OpenTelemetry tracer provider was set when the first rollout began, so that "
            "Trackway has set one. OpenTelemetry takes no other one after it: a program that has a provider "
            "of its own sets that before its first rollout"
        )
    _seen = provider
    if provider in _watched:
        return
    if not hasattr(provider, "add_span_processor"):
        log.warning(
            "capture_otel: the tracer provider of this program is a %s, which takes no span processors: "
            "its spans are not recorded. One of opentelemetry.sdk.trace is needed",
            type(provider).__qualname__,
        )
        return
    provider.add_span_processor(_capture)
    _watched.add(provider)
