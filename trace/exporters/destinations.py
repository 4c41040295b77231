"""One place that trajectories are sent to: its exporter, and when to try it again."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol, runtime_checkable

from opentelemetry import context as otel_context
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from ..config import TraceConfig
from ..log import logger
from ..model import Span, Trajectory
from ..store.payloads import whole_attributes
from . import build
from .sizes import bytes_in

_log = logger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_CLOSE = 5.0
"""Seconds that an exporter may take to shut down."""


@runtime_checkable
class TrajectoryExporter(Protocol):
    """An exporter that takes whole trajectories, which spares it putting them together again.

    It may offer two more, so that what it sends is counted as it really is; both in bytes as they are before
    any compression. For an exporter without them, the names, attributes and events of the spans are counted.

    ``sent_bytes: int``: an attribute that grows by what the destination has accepted. A trajectory that is
    sent again counts again.

    ``size_of(trajectory) -> int``: how much a trajectory would be, or a little more; it asks nobody over the
    network. It is called only where ``max_bytes_per_step`` is set.
    """

    def export_trajectories(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        """Deliver; give the trace ids refused for good, with the reason. Raise on passing trouble."""


Sizes = Sequence[tuple[str, int]]
"""Trace ids, each with its number of spans."""
Work = Generator[None, None, bool]
"""Deliveries that stop where they would wait for an answer; it ends with whether all was delivered."""


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
        place: the tracking URI that its exporter was made for.
        work: deliveries that wait for an answer.
    """

    def __init__(
        self, name: str, backend: str, config: TraceConfig, exporter: SpanExporter | None = None
    ) -> None:
        self.name = name
        self.delivered: dict[str, int] | None = None
        self.sent: Sizes = ()
        self.place = config.tracking_uri
        self.work: Work | None = None
        self._backend = backend
        self._config = config
        self._exporter = exporter
        self._answer: Future[dict[str, str]] | None = None
        self._busy: Future[Any] | None = None
        self._counted = self._noted = 0
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pause = 0.0
        self._not_before = 0.0

    @property
    def hangs(self) -> bool:
        """Whether it has not answered yet."""
        return self._busy is not None and not self._busy.done()

    @property
    def answered(self) -> bool:
        """Whether it has done what it was asked for last."""
        return not self.hangs

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
        self._answer = self._busy = self._do(lambda: self._send(trajectories))

    def _send(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        refused, size = send(self._made(), trajectories)
        self._counted += size
        return refused

    def measure(self, trajectories: Sequence[Trajectory]) -> Future[list[int]]:
        """Begin to find out how many bytes some trajectories would be for its exporter."""
        measuring = self._do(lambda: [size_for(self._made(), trajectory) for trajectory in trajectories])
        self._busy = measuring
        return measuring

    def _made(self) -> SpanExporter:
        self._exporter = self._exporter or build(self._backend, self._config)
        return self._exporter

    def take_count(self) -> int:
        """Give the bytes that it accepted since this was asked last."""
        told = getattr(self._exporter, "sent_bytes", None)
        total = told if isinstance(told, int) else self._counted
        new, self._noted = max(0, total - self._noted), total
        return new

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
        # Whatever instruments HTTP clients in this process: what an exporter sends belongs to no rollout, and
        # is not to be traced and sent in turn.
        nowhere = otel_context.Context()
        otel_context.attach(otel_context.set_value(_SUPPRESS_INSTRUMENTATION_KEY, True, nowhere))
        while (item := self._work.get()) is not None:
            future, action = item
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # an exporter does not end this process
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def wait_for_any(destinations: Sequence[Destination], timeout: float) -> None:
    """Wait until one of them has done what it was asked for last, at most this many seconds."""
    busy = [each._busy for each in destinations if each._busy is not None]
    if busy and len(busy) == len(destinations):
        wait(busy, timeout, FIRST_COMPLETED)


def send(exporter: SpanExporter, trajectories: Sequence[Trajectory]) -> tuple[dict[str, str], int]:
    """Hand trajectories to an exporter.

    Returns:
        Trace ids that it refuses for good, with the reason; and the bytes of all others, 0 where the exporter
        counts them itself.

    Raises:
        Exception: nothing was delivered, and it should be tried again.
    """
    if isinstance(exporter, TrajectoryExporter):
        refused = exporter.export_trajectories(trajectories)
        if hasattr(exporter, "sent_bytes"):
            return refused, 0
        taken = [each for each in trajectories if each.trace_id not in refused]
        return refused, sum(bytes_in(map(readable, each.spans)) for each in taken)
    spans = [readable(span) for trajectory in trajectories for span in trajectory.spans]
    if exporter.export(spans) is not SpanExportResult.SUCCESS:
        raise ConnectionError(f"{type(exporter).__name__} did not take {len(spans)} spans")
    return {}, 0 if hasattr(exporter, "sent_bytes") else bytes_in(spans)


def size_for(exporter: SpanExporter, trajectory: Trajectory) -> int:
    """Give the bytes that a trajectory would be for an exporter; what it says itself where it says it."""
    say = getattr(exporter, "size_of", None)
    if say is not None:
        try:
            return int(say(trajectory))
        except Exception as error:  # it will refuse this one, and give the reason
            _log.debug("%s cannot tell the size of %s: %s", exporter, trajectory.trace_id, error)
    return bytes_in(map(readable, trajectory.spans))


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
        links=[
            Link(
                SpanContext(int(link.trace_id, 16), int(link.span_id, 16), False, flags),
                dict(link.attributes),
            )
            for link in span.links
        ],
        kind=SpanKind[span.side.upper()],
        status=Status(code, None if code is StatusCode.OK else span.error or span.status),
        start_time=span.start_ns,
        end_time=span.end_ns if span.end_ns is not None else span.start_ns,
    )
