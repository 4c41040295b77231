"""A stand-in on the loopback device for the servers of Weave and of OpenTelemetry, for their real clients.

The package ``weave`` carries no server, and a collector is no Python package. This one answers the
requests that Weave's client makes while it records calls, and takes traces as a collector does (OTLP over
HTTP). It keeps nothing of them but their number. It runs as a process of its own, prints the port that it
listens on, and ends when its standard input does.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

PROJECT = {"id": "UHJvamVjdA==", "internalId": "UHJvamVjdEludGVybmFsSWQ6MQ==", "name": "benchmark"}


class Handler(BaseHTTPRequestHandler):
    """Answers one connection of the client."""

    protocol_version = "HTTP/1.1"
    counts: ClassVar[dict[str, int]] = {"calls": 0, "spans": 0}
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path.startswith("/server_info"):
            self._answer({"min_required_weave_python_version": "0.0.0", "trace_server_version": "0.0.0"})
        elif self.path == "/benchmark/counts":
            self._answer(self.counts)
        else:
            self._answer({}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path.startswith("/graphql"):
            user = {"id": "VXNlcjox", "username": "benchmark", "entity": "benchmark", "flags": "{}"}
            viewer = {**user, "defaultEntity": {"name": "benchmark"}, "teams": {"edges": []}}
            data = {
                "project": PROJECT,
                "viewer": viewer,
                "upsertModel": {"model": PROJECT, "inserted": False},
            }
            self._answer({"data": data})
        elif self.path.endswith(("/obj/create", "/table/create", "/file/create")):
            self._answer({"digest": hashlib.sha256(body).hexdigest()[:43]})
        elif self.path.endswith("/calls/complete"):
            batch = json.loads(body).get("batch", [])
            self._count("calls", len(batch))
            self._answer({"res": [], "results": []})
        elif self.path == "/v1/traces":
            self._count("spans", spans_in(body))
            self._answer({})
        else:
            self._answer({}, 404)

    def _count(self, what: str, number: int) -> None:
        with self.lock:
            self.counts[what] += number

    def _answer(self, data: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of every request."""


def spans_in(request: bytes) -> int:
    """Count the spans of an OTLP request."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    parsed = ExportTraceServiceRequest.FromString(request)
    return sum(len(scope.spans) for resource in parsed.resource_spans for scope in resource.scope_spans)


def main() -> None:
    """Serve until the process that started this one is gone."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
