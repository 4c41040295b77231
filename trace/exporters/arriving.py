"""Spans of any tracer provider, put together to traces as they arrive."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan

WAITING_TRACES = 4096
"""Most traces that wait for their root; the oldest is then given without."""
GIVEN_TRACES = 256
"""Traces that are remembered, so that spans which come after the root join it."""

Trace = Sequence[ReadableSpan]


class Arrivals:
    """Traces of which some spans have come: children end before their root."""

    def __init__(self) -> None:
        self._waiting: dict[int, Trace] = {}
        self._given: dict[int, Trace] = {}

    def add(self, spans: Sequence[ReadableSpan]) -> list[Trace]:
        """Take spans; give the traces whose root has come, whole, again when more came of them."""
        arrived: dict[int, list[ReadableSpan]] = {}
        for span in spans:
            if span.context is not None:
                arrived.setdefault(span.context.trace_id, []).append(span)
        ready = []
        for trace_id, some in arrived.items():
            trace = [*self._waiting.pop(trace_id, ()), *self._given.pop(trace_id, ()), *some]
            if any(span.parent is None for span in trace):
                self._given[trace_id] = trace
                ready.append(trace)
            else:
                self._waiting[trace_id] = trace
        while len(self._waiting) > WAITING_TRACES:
            ready.append(list(self._waiting.pop(next(iter(self._waiting)))))
        while len(self._given) > GIVEN_TRACES:
            del self._given[next(iter(self._given))]
        return list(ready)

    def rest(self) -> list[Trace]:
        """Give the traces whose root never came."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting
