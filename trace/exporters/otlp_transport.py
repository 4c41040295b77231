"""The way to an OTLP receiver: OpenTelemetry's own exporters, and what the receiver answered to them.

They read the standard variables, encode, compress, and know about certificates. What they do not do is
tell: an export gives true or false, the words of the receiver go to a log, spans that it rejected are not
counted, and a receiver that is away is tried again inside of the call. Here each request is sent once and its
answer is kept, by listening where it arrives: in the transport adapter of an HTTP session, which is a
parameter of the one exporter, and at the gRPC client of the other. The exporter itself hears that all is
well, and so neither waits nor logs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol
from urllib.parse import urlsplit

from ..config import ConfigError
from .text import cut

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

PROTOCOLS: Final = ("http/protobuf", "grpc")

Outcome = Literal["taken", "bad", "too large", "failed", "away", "denied"]
_HTTP: dict[int, Outcome] = {400: "bad", 413: "too large", 422: "bad"}
_HTTP_AWAY = (408, 429, 502, 503, 504)
_GRPC: dict[str, Outcome] = {
    "INVALID_ARGUMENT": "bad",
    "INTERNAL": "failed",
    "UNKNOWN": "failed",
    **dict.fromkeys(("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE"), "away"),
    **dict.fromkeys(("UNAVAILABLE", "DATA_LOSS"), "away"),
}
"""Retryable codes are those of https://opentelemetry.io/docs/specs/otlp/#failures, over HTTP as well."""
_WORDS = 500


@dataclass(frozen=True, slots=True)
class Answer:
    """What a receiver said to one request.

    Attributes:
        outcome: ``taken``, also where some spans of it were rejected; ``bad``: it does not take this data;
            ``too large``; ``failed``: an error of its own, of which the data may be the cause; ``away``: to
            be tried again; ``denied``: it takes nothing before a person has acted.
        words: what it said.
        rejected: spans that it did not take, of a request that it took.
        wait: seconds that it asked to be left alone.
    """

    outcome: Outcome
    words: str = ""
    rejected: int = 0
    wait: float = 0.0


class Transport(Protocol):
    """Sends spans to one receiver.

    Attributes:
        place: its address, once something was sent.
    """

    place: str

    def send(self, spans: Sequence[ReadableSpan]) -> Answer:
        """Send spans in one request, once."""

    def close(self) -> None:
        """Close the connection."""


def protocol() -> str:
    """Give the protocol that the standard variables ask for; without any it is ``http/protobuf``.

    Raises:
        ConfigError: it is one that is not supported.
    """
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        value = os.environ.get(name, "").strip().lower()
        if value in PROTOCOLS:
            return value
        if value:
            raise ConfigError(
                f"{name}={value!r} is not supported by backend='otlp': use {' or '.join(PROTOCOLS)}, which "
                "every OpenTelemetry Collector takes"
            )
    return PROTOCOLS[0]


def headers() -> dict[str, str]:
    """Give the headers that the standard variables name, their names in small letters."""
    from opentelemetry.util.re import parse_env_headers

    given = (os.environ.get(f"OTEL_EXPORTER_OTLP_{part}HEADERS") for part in ("TRACES_", ""))
    return dict(parse_env_headers(next(filter(None, given), ""), liberal=True))


def connect() -> Transport:
    """Make the way to the receiver that the standard variables name.

    Raises:
        ConfigError: a variable has a value that nobody understands, or a package is missing.
    """
    wanted = protocol()
    try:
        return _Grpc() if wanted == "grpc" else _Http()
    except ImportError as error:
        raise ConfigError(
            f"backend='otlp' with the protocol {wanted} lacks a package ({error}): "
            "pip install 'trackway[otlp]'"
        ) from error


class _Http:
    def __init__(self) -> None:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from requests.adapters import HTTPAdapter

        self.place = ""
        heard: list[Any] = []
        transport = self

        class Listening(HTTPAdapter):
            def send(self, request: Any, *args: Any, **kwargs: Any) -> Any:
                parts = urlsplit(str(request.url))
                transport.place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
                if session.verify is not True:  # else REQUESTS_CA_BUNDLE would win over OpenTelemetry's
                    kwargs["verify"] = session.verify
                try:
                    response = super().send(request, *args, **kwargs)
                    response.content  # noqa: B018 - reads it, which may fail as well
                    heard.append(response)
                except requests.RequestException as error:
                    heard.append(error)
                well = requests.Response()
                well.status_code, well.request, well.url = 200, request, str(request.url)
                well._content = b""
                return well

        session = requests.Session()
        session.mount("http://", Listening())
        session.mount("https://", Listening())
        self._heard = heard
        self._exporter = OTLPSpanExporter(session=session)

    def send(self, spans: Sequence[ReadableSpan]) -> Answer:
        self._heard.clear()
        self._exporter.export(spans)
        if not self._heard:
            return Answer("bad", "the spans cannot be encoded")
        heard = self._heard[-1]
        if isinstance(heard, Exception):
            return Answer("away", _words(heard))
        status = int(heard.status_code)
        if 200 <= status < 300:
            if "html" in heard.headers.get("Content-Type", ""):
                return Answer("denied", f"HTTP {status} and a web page, as no receiver of traces answers")
            return _taken(heard.content)
        words = f"HTTP {status}: {_message(heard)}"
        if status in _HTTP_AWAY:
            return Answer("away", words, wait=_seconds(heard.headers.get("Retry-After")))
        return Answer(_HTTP.get(status, "failed" if status >= 500 else "denied"), words)

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call, unused-ignore]


def _message(response: Any) -> str:
    """Give the words of a refusal: the message of a ``google.rpc.Status``, else the text of the page."""
    if "protobuf" in response.headers.get("Content-Type", ""):
        with suppress(Exception):
            from google.rpc.status_pb2 import Status  # type: ignore[import-untyped, unused-ignore]

            return cut(Status.FromString(response.content).message, _WORDS)
    return cut(" ".join(response.content[: 4 * _WORDS].decode(errors="replace").split()), _WORDS)


def _seconds(value: str | None) -> float:
    """Read a ``Retry-After``: seconds, or a date."""
    try:
        seconds = float(value or 0)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(str(value)).timestamp() - time.time()
        except ValueError:
            return 0.0
    return seconds if 0 < seconds < 86_400 else 0.0


def _taken(content: bytes) -> Answer:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        partial = ExportTraceServiceResponse.FromString(content).partial_success
    except Exception:  # JSON, or a word: nothing that says that a span was rejected
        return Answer("taken")
    return Answer("taken", cut(partial.error_message, _WORDS), rejected=partial.rejected_spans)


class _Grpc:
    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        self._exporter = OTLPSpanExporter()
        self._client = _GrpcClient(self._exporter._client)
        self._exporter._client = self._client  # type: ignore[assignment]
        self.place = str(self._exporter._endpoint)

    def send(self, spans: Sequence[ReadableSpan]) -> Answer:
        self._client.heard = None
        self._exporter.export(spans)
        heard = self._client.heard
        if heard is None:
            return Answer("bad", "the spans cannot be encoded")
        if not isinstance(heard, Exception):
            return _taken(heard.SerializeToString())
        code, details, wait = _grpc_failure(heard)
        words = f"{code}: {cut(details, _WORDS)}"
        if code == "RESOURCE_EXHAUSTED":
            # Either this message is too large, or there were too many. Only the words tell.
            about_size = any(
                mark in details.lower() for mark in ("larger than", "exceeds maximum", "too large")
            )
            return Answer("too large" if about_size else "away", words, wait=wait or 0.0)
        return Answer(_GRPC.get(code, "denied"), words, wait=wait or 0.0)

    def close(self) -> None:
        self._exporter.shutdown()


class _GrpcClient:
    """Stands in place of the exporter's gRPC client, and keeps what it hears to itself."""

    def __init__(self, client: Any) -> None:
        self._inner = client
        self.heard: Any = None

    def Export(self, request: Any, **options: Any) -> Any:  # noqa: N802 - the name is that of the service
        import grpc  # type: ignore[import-untyped, unused-ignore]
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        try:
            self.heard = self._inner.Export(request, **options)
        except grpc.RpcError as error:
            self.heard = error
        return ExportTraceServiceResponse()


def _grpc_failure(error: Any) -> tuple[str, str, float | None]:
    """Give code, details, and the seconds to wait where the receiver named them."""
    from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped, unused-ignore]

    wait = None
    for key, value in error.trailing_metadata() or ():
        if key == "google.rpc.retryinfo-bin":
            with suppress(Exception):
                delay = RetryInfo.FromString(value).retry_delay
                wait = delay.seconds + delay.nanos / 1e9
        elif key == "grpc-status-details-bin":
            with suppress(Exception):
                from google.rpc.status_pb2 import Status  # type: ignore[import-untyped, unused-ignore]

                for detail in Status.FromString(value).details:
                    info = RetryInfo()
                    if detail.Unpack(info):
                        wait = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return str(error.code().name), str(error.details() or ""), wait


def _words(error: Exception) -> str:
    return cut(f"{type(error).__name__}: {error}", _WORDS)
