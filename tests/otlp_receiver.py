"""A real OTLP receiver for tests, over HTTP and gRPC: it keeps what it is sent and answers as it is told."""

from __future__ import annotations

import gzip
import ssl
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Refusal:
    """A request that is not taken.

    Attributes:
        status: of HTTP, or the name of gRPC's code.
        words: of the receiver.
        retry_after: in seconds or as a date, as HTTP has it; in seconds for gRPC.
    """

    status: int | str
    words: str = ""
    retry_after: str | None = None


Answer = ExportTraceServiceResponse | Refusal | None
"""None takes everything."""


@dataclass(frozen=True)
class Request:
    """What one request brought.

    Attributes:
        headers: names in small letters; over gRPC the metadata.
        size: bytes as they came.
    """

    path: str
    headers: dict[str, str]
    size: int
    data: ExportTraceServiceRequest

    @property
    def spans(self) -> list[Any]:
        """All spans of it."""
        return [
            span
            for resource in self.data.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@dataclass
class Receiver:
    """What has come so far, and what is answered.

    Attributes:
        answer: is asked for each request.
        requests: all of them.
        taken: those that were answered well.
    """

    address: str = ""
    answer: Callable[[Request], Answer] = lambda request: None
    requests: list[Request] = field(default_factory=list)
    taken: list[Request] = field(default_factory=list)

    def ask(self, request: Request) -> ExportTraceServiceResponse | Refusal:
        self.requests.append(request)
        answer = self.answer(request)
        if isinstance(answer, Refusal):
            return answer
        self.taken.append(request)
        return answer or ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Any]:
        """The spans of all requests that were taken."""
        return [span for request in self.taken for span in request.spans]


def partial(rejected: int, words: str) -> ExportTraceServiceResponse:
    """Make the answer to a request of which some spans were rejected."""
    return ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(rejected_spans=rejected, error_message=words)
    )


@contextmanager
def http_receiver(certificate: tuple[str, str] | None = None) -> Iterator[Receiver]:
    """Run a receiver of OTLP over HTTP.

    Args:
        certificate: its files with certificate and key, for HTTPS.
    """
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            size, coding = len(body), self.headers.get("Content-Encoding")
            body = gzip.decompress(body) if coding == "gzip" else body
            body = zlib.decompress(body) if coding == "deflate" else body
            headers = {name.lower(): value for name, value in self.headers.items()}
            data = ExportTraceServiceRequest.FromString(body)
            answer = receiver.ask(Request(self.path, headers, size, data))
            refused = isinstance(answer, Refusal)
            content = answer.words.encode() if isinstance(answer, Refusal) else answer.SerializeToString()
            self.send_response(int(answer.status) if isinstance(answer, Refusal) else 200)
            self.send_header("Content-Type", "text/plain" if refused else "application/x-protobuf")
            self.send_header("Content-Length", str(len(content)))
            if isinstance(answer, Refusal) and answer.retry_after is not None:
                self.send_header("Retry-After", answer.retry_after)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scheme = "http"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    receiver.address = f"{scheme}://127.0.0.1:{server.server_port}"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def grpc_receiver(options: Sequence[tuple[str, Any]] = ()) -> Iterator[Receiver]:
    """Run a receiver of OTLP over gRPC, which takes messages of 4 MiB unless ``options`` say otherwise."""
    import grpc
    from google.protobuf.duration_pb2 import Duration
    from google.rpc.error_details_pb2 import RetryInfo
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

    receiver = Receiver()

    class Service(service.TraceServiceServicer):  # type: ignore[misc, unused-ignore]
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name is the service's
            metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
            answer = receiver.ask(Request("", metadata, request.ByteSize(), request))
            if isinstance(answer, Refusal):
                if answer.retry_after is not None:
                    info = RetryInfo(retry_delay=Duration(seconds=int(answer.retry_after)))
                    context.set_trailing_metadata((("google.rpc.retryinfo-bin", info.SerializeToString()),))
                context.abort(grpc.StatusCode[str(answer.status)], answer.words)
            return answer

    server = grpc.server(ThreadPoolExecutor(4), options=list(options))
    service.add_TraceServiceServicer_to_server(Service(), server)
    receiver.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
