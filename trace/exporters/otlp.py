"""Trajectories to any OTLP receiver, as the standard ``OTEL_EXPORTER_OTLP_*`` variables name it.

A receiver is an OpenTelemetry Collector, or whatever else takes OTLP over HTTP or gRPC: Jaeger, Tempo,
Langfuse, Phoenix, an MLflow server. With the header ``x-mlflow-experiment-id`` it is taken for the last of
these, and gets what MLflow's page draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.sdk.trace import ReadableSpan

from ..log import logger
from ..model import Trajectory
from .arriving import Trace, WholeTraceExporter
from .otlp_mlflow import MLFLOW_HEADER, mlflow_spans
from .otlp_spans import genai_spans
from .otlp_spans import resource_of_environment as environment
from .otlp_transport import Answer, Transport, connect, headers
from .sizes import bytes_in
from .span_size import shorter, size_of

if TYPE_CHECKING:
    from ..config import TraceConfig

_log = logger(__name__)

REQUEST_BYTES: Final = 3 * 2**20
"""Most bytes of spans in a request; a gRPC server takes 4 MiB unless it was told otherwise."""
SHORTENED: Final = (100_000, 10_000, 1_000)
"""Characters that the attributes of a span are cut to, one after the other, until the receiver takes it."""


class OtlpExporter(WholeTraceExporter):
    """Sends trajectories to the OTLP receiver that the standard variables name.

    They are read when the first trajectory is sent, in the process that exports, which inherits them.

    Args:
        config: gives ``experiment``, for a trajectory that does not say its own.

    Attributes:
        sent_bytes: names, attributes and events of the spans that the receiver has taken, in bytes.
    """

    destination = "the OTLP receiver"

    def __init__(self, config: TraceConfig) -> None:
        super().__init__()
        self._config = config
        self._transport: Transport | None = None
        self._not_before = 0.0
        self._taken = False
        self._alone = False
        self.sent_bytes = 0

    def export_trajectories(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        """Send trajectories.

        Returns:
            trace id -> reason, of those of which the receiver will never take some or all spans.

        Raises:
            ConnectionError: the receiver cannot be reached, or asks to wait. Send all of them again later.
            RuntimeError: a person has to act first, for instance set a header. Likewise.
        """
        wait = self._not_before - time.monotonic()
        if wait > 0:
            raise ConnectionError(f"the OTLP receiver asked to be left alone, for {wait:.0f} s more")
        refused: dict[str, str] = {}
        traces: list[Trace] = []
        resource = environment()
        for trajectory in trajectories:
            try:
                traces.append(_shape()(trajectory, self._config.experiment, resource))
            except Exception as error:
                refused[trajectory.trace_id] = f"{type(error).__name__}: {error}"
        if traces:
            sending = _Sending(self)
            for request in _requests(traces, alone=self._alone):
                sending.send(request)
            refused |= sending.result(len(traces))
        return refused

    def size_of(self, trajectory: Trajectory) -> int:
        """Give the bytes of the spans that the receiver would get, as ``sent_bytes`` counts them."""
        return bytes_in(_shape()(trajectory, self._config.experiment, environment()))

    def send(self, spans: Sequence[ReadableSpan]) -> Answer:
        """Send spans in one request; raise where the answer is not about them."""
        self._transport = transport = self._transport or connect()
        answer = transport.send(spans)
        if answer.outcome == "taken":
            self._taken = True
            self.sent_bytes += bytes_in(spans)
            # A receiver does not say which spans it has rejected. From now on each trajectory goes alone.
            self._alone = self._alone or answer.rejected > 0
            return answer
        if answer.outcome == "away":
            self._not_before = time.monotonic() + answer.wait
            self._disconnect()  # a gRPC channel that has failed would wait by itself, up to two minutes
            raise ConnectionError(f"the OTLP receiver at {transport.place} is away: {answer.words}")
        if answer.outcome == "denied":
            self._disconnect()
            raise RuntimeError(
                f"the OTLP receiver at {transport.place} takes nothing as things are ({answer.words}); "
                "look at OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS (credentials) and "
                "OTEL_EXPORTER_OTLP_PROTOCOL"
            )
        return answer

    @property
    def trusted(self) -> bool:
        """Whether the receiver has ever taken something, so that a refusal is about what was sent."""
        return self._taken

    @property
    def place(self) -> str:
        """Address of the receiver."""
        return "" if self._transport is None else self._transport.place

    def shutdown(self) -> None:
        """Send the traces of ``export`` whose root never came, and close the connection."""
        super().shutdown()
        self._disconnect()

    def _disconnect(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


def _shape() -> Callable[[Trajectory, str, Mapping[str, Any]], Trace]:
    return mlflow_spans if MLFLOW_HEADER in headers() else genai_spans


class _Sending:
    """The trajectories of one call on their way, and which of them were refused."""

    def __init__(self, exporter: OtlpExporter) -> None:
        self._exporter = exporter
        self._took = False
        self._failed = False
        self._refused: dict[str, str] = {}

    def send(self, spans: Trace) -> None:
        """Send spans; where the receiver refuses them, find those that it means by halving."""
        answer = self._exporter.send(spans)
        if answer.outcome == "taken":
            self._took = True
            if answer.rejected:
                self._refuse(spans, f"{answer.rejected} of {len(spans)} spans were rejected: {answer.words}")
            return
        whole = [index for index in range(1, len(spans)) if _trace(spans[index]) != _trace(spans[index - 1])]
        if whole:
            middle = min(whole, key=lambda index: abs(index - len(spans) // 2))
        elif answer.outcome == "too large" and len(spans) > 1:
            middle = len(spans) // 2
        elif answer.outcome == "too large" and self._send_shorter(spans[0]):
            return
        else:
            self._failed = self._failed or answer.outcome == "failed"
            self._refuse(spans, answer.words)
            return
        self.send(spans[:middle])
        self.send(spans[middle:])

    def _send_shorter(self, span: ReadableSpan) -> bool:
        size = size_of(span)
        for limit in SHORTENED:
            short = shorter(span, limit)
            if size_of(short) < size:
                size = size_of(short)
                if self._exporter.send([short]).outcome == "taken":
                    self._took = True
                    return True
        return False

    def _refuse(self, spans: Trace, reason: str) -> None:
        for span in spans:
            self._refused.setdefault(_trace(span), reason)

    def result(self, count: int) -> dict[str, str]:
        """Give the trace ids that were refused, with the reason.

        Args:
            count: trajectories that were sent.

        Raises:
            ConnectionError, RuntimeError: all were, so that the receiver and not they must be the reason.
        """
        if self._refused and not self._took:
            reason = next(iter(self._refused.values()))
            if self._failed:
                raise ConnectionError(f"the OTLP receiver at {self._exporter.place} fails: {reason}")
            # Rollouts mostly come one by one: where this one is to blame, others will be taken, and it not.
            if not self._exporter.trusted and len(self._refused) == count:
                raise RuntimeError(
                    f"the OTLP receiver at {self._exporter.place} refuses everything ({reason}); "
                    "look whether OTEL_EXPORTER_OTLP_ENDPOINT names one that takes traces"
                )
        return self._refused


def _trace(span: ReadableSpan) -> str:
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context is not None else ""


def _requests(traces: Sequence[Trace], *, alone: bool) -> Iterator[list[ReadableSpan]]:
    """Give the spans of whole trajectories, as many as fit into a request; a long one fills several."""
    request: list[ReadableSpan] = []
    size = 0
    for trace in traces:
        weights = [size_of(span) for span in trace]
        if request and (alone or size + sum(weights) > REQUEST_BYTES):
            yield request
            request, size = [], 0
        for span, weight in zip(trace, weights, strict=True):
            if request and size + weight > REQUEST_BYTES:
                yield request
                request, size = [], 0
            request.append(span)
            size += weight
    if request:
        yield request
