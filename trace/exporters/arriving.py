"""Spans of any tracer provider, put together to traces as they arrive, and sent as trajectories."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from ..log import logger
from ..model import Trajectory

_log = logger(__name__)

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


class WholeTraceExporter(SpanExporter):
    """An exporter of trajectories, for spans of any tracer provider as well.

    A trace is sent when its root has come; spans that come after it are sent with it again. Traces whose
    root never comes are sent at ``shutdown``.
    """

    destination: ClassVar[str]
    """Who refuses or fails, in a message."""

    def __init__(self) -> None:
        self._arrivals = Arrivals()

    @abstractmethod
    def export_trajectories(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        """Send trajectories; give trace id -> reason, of those that are refused for good."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send the traces whose root has come."""
        return self._export_traces(self._arrivals.add(spans))

    def _export_traces(self, traces: Sequence[Trace]) -> SpanExportResult:
        from ..store.assemble import from_readable

        trajectories = from_readable([span for spans in traces for span in spans])
        try:
            refused = self.export_trajectories(trajectories)
        except Exception:
            _log.exception("%d traces could not be sent to %s", len(trajectories), self.destination)
            return SpanExportResult.FAILURE
        for trace_id, reason in refused.items():
            _log.error("%s refuses trace %s: %s", self.destination, trace_id, reason)
        return SpanExportResult.FAILURE if refused else SpanExportResult.SUCCESS

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Do nothing: every call sends what it is given."""
        return True

    def shutdown(self) -> None:
        """Send the traces of ``export`` whose root never came."""
        if waiting := self._arrivals.rest():
            self._export_traces(waiting)
