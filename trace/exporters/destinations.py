"""One place that trajectories are sent to: its exporter, and when to try it again."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, runtime_checkable

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from ..config import TraceConfig
from ..model import Span, Trajectory
from ..store.payloads import whole_attributes
from . import build

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_CLOSE = 5.0
"""Seconds that an exporter may take to shut down."""


@runtime_checkable
class TrajectoryExporter(Protocol):
    """An exporter that takes whole trajectories, which spares it putting them together again."""

    def export_trajectories(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        """Deliver; give the trace ids refused for good, with the reason. Raise on passing trouble."""


Sizes = Sequence[tuple[str, int]]
"""Trace ids, each with its number of spans."""


class Destination:
    """A destination of one follower.

    Its exporter lives on a thread of its own. A call over the network may never return, and then it keeps
    neither the other destinations nor the end of the process.

    Args:
        name: name of its cursor.
        backend: name of its exporter.
        config: settings for the exporter.
        exporter: to be used in place of the one that ``backend`` names.

    Attributes:
        delivered: what it has: trace id -> number of spans; None until that was read.
        sent: what was handed over and not answered yet.
    """

    def __init__(
        self, name: str, backend: str, config: TraceConfig, exporter: SpanExporter | None = None
    ) -> None:
        self.name = name
        self.delivered: dict[str, int] | None = None
        self.sent: Sizes = ()
        self._backend = backend
        self._config = config
        self._exporter = exporter
        self._answer: Future[dict[str, str]] | None = None
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pause = 0.0
        self._not_before = 0.0

    @property
    def hangs(self) -> bool:
        """Whether it has not answered yet."""
        return self._answer is not None and not self._answer.done()

    @property
    def failing(self) -> bool:
        """Whether it has taken nothing since it failed."""
        return self._pause > 0

    @property
    def rests(self) -> bool:
        """Whether it failed a moment ago and is left alone for a while."""
        return time.monotonic() < self._not_before

    @property
    def trips(self) -> bool:
        """Whether its exporter may fail because of one trajectory, without a word about which one it is."""
        return self._exporter is not None and not isinstance(self._exporter, TrajectoryExporter)

    def hand(self, sizes: Sizes, trajectories: Sequence[Trajectory]) -> None:
        """Begin to send some trajectories; ``answered`` and ``answer`` tell how that went."""
        self.sent = sizes
        self._answer = self._do(lambda: self._send(trajectories))

    def _send(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        self._exporter = self._exporter or build(self._backend, self._config)
        return send(self._exporter, trajectories)

    def answered(self, timeout: float) -> bool:
        """Wait for the answer to what was handed over, at most this many seconds."""
        return self._answer is None or bool(wait([self._answer], timeout).done)

    def answer(self) -> dict[str, str]:
        """Give the trace ids that are refused for good, with the reason; none when nothing was sent.

        Raises:
            Exception: nothing was delivered, and it should be tried again.
        """
        answer, self._answer = self._answer, None
        return {} if answer is None else answer.result()

    def rest(self) -> float:
        """Leave it alone for a while, longer each time; give the seconds."""
        self._pause = min(max(_FIRST_PAUSE, 2 * self._pause), _LONGEST_PAUSE)
        self._not_before = time.monotonic() + self._pause
        return self._pause

    def recover(self) -> None:
        """Note that it has taken something."""
        self._pause = self._not_before = 0.0

    def close(self, timeout: float) -> None:
        """Shut the exporter down, as far as it lets itself be in so many seconds."""
        exporter = self._exporter
        if exporter is not None and not self.hangs:
            wait([self._do(exporter.shutdown)], min(_CLOSE, timeout))
        self._work.put(None)

    def _do(self, action: Callable[[], Any]) -> Future[Any]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"trackway-{self._backend}", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._work.put((future, action))
        return future

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, action = item
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # an exporter does not end this process
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def send(exporter: SpanExporter, trajectories: Sequence[Trajectory]) -> dict[str, str]:
    """Hand trajectories to an exporter.

    Returns:
        Trace ids that it refuses for good, with the reason.

    Raises:
        Exception: nothing was delivered, and it should be tried again.
    """
    if isinstance(exporter, TrajectoryExporter):
        return exporter.export_trajectories(trajectories)
    spans = [readable(span) for trajectory in trajectories for span in trajectory.spans]
    if exporter.export(spans) is not SpanExportResult.SUCCESS:
        raise ConnectionError(f"{type(exporter).__name__} did not take {len(spans)} spans")
    return {}


def readable(span: Span) -> ReadableSpan:
    """Give a recorded span as OpenTelemetry's SDK does."""
    trace_id = int(span.trace_id, 16)
    flags = TraceFlags(TraceFlags.SAMPLED)
    parent = None
    if span.parent_id is not None:
        parent = SpanContext(trace_id, int(span.parent_id, 16), is_remote=False, trace_flags=flags)
    code = StatusCode.OK if span.status == "ok" else StatusCode.ERROR
    return ReadableSpan(
        name=span.name,
        context=SpanContext(trace_id, int(span.span_id, 16), is_remote=False, trace_flags=flags),
        parent=parent,
        resource=Resource(span.resource),
        attributes=whole_attributes(span),
        events=[SdkEvent(event.name, dict(event.attributes), event.time_ns) for event in span.events],
        kind=SpanKind.INTERNAL,
        status=Status(code, None if code is StatusCode.OK else span.error or span.status),
        start_time=span.start_ns,
        end_time=span.end_ns if span.end_ns is not None else span.start_ns,
    )
