"""A small stand-in for the servers that Weave's client speaks to: on the loopback device, with SQLite.

It answers what the real client (``weave`` 0.54) was seen to ask for: GraphQL for the entity and the project,
then the routes of the trace server. What it takes is checked as the real server does, and kept as it does:

- a call is one row of (project, start, id), the later of two replaces the earlier: the table
  ``calls_complete`` is a ``ReplacingMergeTree(created_at)`` ordered by ``(project_id, started_at, id)``
  (migration 022 of wandb/weave). The same id with another start is therefore a second row;
- times count microseconds (``DateTime64(6)``);
- ids are UUIDs, or 16 hex digits for a call and 32 for a trace, lower case (``validation.py``);
- a row of feedback is replaced by one of the same (project, ref, id) (migration 003).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

ENTITY = "team"
KEY = "local-" + "0123456789abcdef" * 2 + "01234567"
REQUEST_LIMIT = 32 * 2**20
"""Bytes of one request (``http_utils.py`` of the client)."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
    project TEXT, started INTEGER, id TEXT, trace TEXT, writes INTEGER, call TEXT,
    PRIMARY KEY (project, started, id)
);
CREATE TABLE IF NOT EXISTS feedback (
    project TEXT, ref TEXT, id TEXT, row TEXT, PRIMARY KEY (project, ref, id)
);
CREATE TABLE IF NOT EXISTS objects (project TEXT, object_id TEXT, digest TEXT, val TEXT);
"""


def _call_id(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{16}", text) and str(uuid.UUID(text)) != text:
        raise ValueError(f"{text!r} is no id of a call")
    return text


class Call(BaseModel):
    """One complete call, as the route takes it."""

    model_config = ConfigDict(extra="forbid", strict=False)

    project_id: str
    id: str
    trace_id: str
    op_name: str
    started_at: datetime
    ended_at: datetime
    attributes: dict[str, Any]
    inputs: dict[str, Any]
    summary: dict[str, Any]
    output: Any = None
    exception: str | None = None
    display_name: str | None = Field(None, max_length=1024)
    parent_id: str | None = None
    thread_id: str | None = None
    turn_id: str | None = None
    otel_dump: dict[str, Any] | None = None
    wb_user_id: str | None = None
    wb_run_id: str | None = None
    wb_run_step: int | None = None
    wb_run_step_end: int | None = None

    _ids = field_validator("id", "parent_id", "turn_id")(lambda value: value and _call_id(value))

    @field_validator("trace_id")
    @classmethod
    def _trace(cls, value: str) -> str:
        return value if re.fullmatch("[0-9a-f]{32}", value) else _call_id(value)

    @field_validator("op_name")
    @classmethod
    def _op(cls, value: str) -> str:
        if not value.startswith("weave:///") and len(value) > 128:
            raise ValueError(f"{value!r} has more than 128 characters")
        return value

    @field_validator("started_at", "ended_at")
    @classmethod
    def _moment(cls, value: datetime) -> datetime:
        return value if value.tzinfo else value.replace(tzinfo=timezone.utc)


class Started(Call):
    """The first half of a call whose end comes by itself."""

    ended_at: datetime | None = None  # type: ignore[assignment]
    summary: dict[str, Any] = {}


class Feedback(BaseModel):
    """One row of feedback."""

    model_config = ConfigDict(extra="forbid")

    project_id: str
    weave_ref: str = Field(pattern="^weave:///")
    feedback_type: str = Field(min_length=1)
    payload: dict[str, Any]
    id: str | None = None
    creator: str | None = None
    annotation_ref: str | None = None
    runnable_ref: str | None = None
    call_ref: str | None = None
    trigger_ref: str | None = None
    queue_id: str | None = None
    wb_user_id: str | None = None
    scorer_tags: list[str] = []
    scorer_tag_reasons: dict[str, str] = {}
    scorer_tag_confidences: dict[str, float] = {}
    scorer_ratings: dict[str, float] = {}
    scorer_rating_reasons: dict[str, str] = {}
    scorer_rating_confidences: dict[str, float] = {}
    scorer_trace_id: str = ""
    span_agent_name: str = ""
    span_agent_version: str = ""
    span_conversation_id: str = ""
    span_status_code: str = ""
    span_trace_id: str = ""

    @field_validator("id")
    @classmethod
    def _id(cls, value: str | None) -> str | None:
        return value and str(uuid.UUID(value))

    @field_validator("feedback_type")
    @classmethod
    def _type(cls, value: str) -> str:
        if value.startswith("wandb.") and not re.match(
            r"wandb\.(reaction|note|runnable|annotation)\b", value
        ):
            raise ValueError(f"{value!r} is reserved")
        return value


@dataclass
class Failure:
    """What the server does instead of what it is asked for.

    Attributes:
        status: of the answer; 0 closes the connection without one.
        path: pattern of the paths that this is about.
        times: how often, then never again.
        over: only requests with more bytes than this.
        holding: only requests that hold this text.
    """

    status: int
    path: str = "/calls/complete$"
    times: float = float("inf")
    over: int = 0
    holding: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None


class WeaveServer:
    """Trace server and GraphQL server in one; requests are answered by threads of this process.

    Args:
        folder: where its database is, and stays.
        key: the API key that it accepts.

    Attributes:
        requests: method, path and bytes of each request so far, in order.
        failures: what to do instead, the first that fits.
    """

    def __init__(self, folder: Path, key: str = KEY) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.key = key
        self.requests: list[tuple[str, str, int]] = []
        self.failures: list[Failure] = []
        self.port = 0
        self._db = sqlite3.connect(folder / "weave.sqlite", check_same_thread=False)
        self._db.executescript(_SCHEMA)
        self._lock = threading.RLock()
        self._server: ThreadingHTTPServer | None = None
        self._connections: set[socket.socket] = set()

    def start(self) -> None:
        """Listen, at the same port as before."""
        handler = type("BoundHandler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Go away as a killed server does, with all connections; what it has stays."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop, and close the database."""
        self.stop()
        with self._lock:
            self._db.close()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that lead the real client here, and nowhere else."""
        return {
            "WF_TRACE_SERVER_URL": self.url,
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": self.key,
            "WANDB_ERROR_REPORTING": "false",
        }

    def fail(self, status: int, **more: Any) -> Failure:
        """Fail from now on, see ``Failure``; give what can be taken out of ``failures``."""
        self.failures.append(Failure(status, **more))
        return self.failures[-1]

    def calls(self, project: str | None = None) -> list[dict[str, Any]]:
        """Give all calls in order of their start; ``project`` is ``entity/project``."""
        with self._lock:
            rows = self._db.execute("SELECT project, call FROM calls ORDER BY started, id").fetchall()
        return [json.loads(call) for of, call in rows if project in (None, of)]

    def writes(self) -> dict[str, int]:
        """Give how often each call was written."""
        with self._lock:
            return dict(self._db.execute("SELECT id, sum(writes) FROM calls GROUP BY id").fetchall())

    def feedback(self) -> list[dict[str, Any]]:
        """Give all feedback, in order of ref and type."""
        with self._lock:
            rows = self._db.execute("SELECT row FROM feedback").fetchall()
        return sorted(
            (json.loads(row[0]) for row in rows), key=lambda r: (r["weave_ref"], r["feedback_type"])
        )

    def _put(self, call: Call) -> None:
        row = call.model_dump(mode="json")
        for name in ("started_at", "ended_at"):
            moment = getattr(call, name)
            row[name] = moment and moment.astimezone(timezone.utc).isoformat(timespec="microseconds")
        started = round(call.started_at.timestamp() * 1e6)
        with self._lock, self._db:
            self._db.execute(
                "INSERT INTO calls VALUES (?, ?, ?, ?, 1, ?) ON CONFLICT DO UPDATE "
                "SET trace = excluded.trace, call = excluded.call, writes = writes + 1",
                (call.project_id, started, call.id, call.trace_id, json.dumps(row)),
            )

    def _end(self, end: Mapping[str, Any]) -> None:
        with self._lock:
            rows = self._db.execute("SELECT call FROM calls WHERE id = ?", (end["id"],)).fetchall()
        if not rows:
            raise KeyError(f"no call {end['id']}")
        names = ("ended_at", "output", "exception", "summary", "wb_run_step_end")
        self._put(Call(**json.loads(rows[0][0]) | {name: end[name] for name in names if name in end}))

    def _feed(self, items: list[Any]) -> list[dict[str, Any]]:
        answers = []
        now = datetime.now(timezone.utc).isoformat()
        with self._lock, self._db:
            for item in [Feedback(**item) for item in items]:
                row = item.model_dump() | {"id": item.id or str(uuid.uuid4()), "created_at": now}
                self._db.execute(
                    "INSERT OR REPLACE INTO feedback VALUES (?, ?, ?, ?)",
                    (item.project_id, item.weave_ref, row["id"], json.dumps(row)),
                )
                answers.append(
                    {"id": row["id"], "created_at": now, "wb_user_id": "VXNlcjox", "payload": item.payload}
                )
        return answers

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Do what a request asks for."""
        if path == "/server_info":
            return 200, {"min_required_weave_python_version": "0.0.0", "trace_server_version": "0.1.0"}
        if path in ("/file/create", "/agents/otel/v1/traces"):
            return 200, {"digest": _digest(body)}
        asked = json.loads(body or b"{}")
        if path == "/graphql":
            return 200, {"data": self._graphql(asked)}
        route = re.fullmatch("/v2/([^/]+)/([^/]+)/(calls/complete|call/start|call/end)", path)
        if route:
            project = f"{unquote(route[1])}/{unquote(route[2])}"
            return self._v2(project, route[3], asked)
        action = getattr(self, "_post" + re.sub("[^a-z]", "_", path), None)
        return (404, {"detail": "Not Found"}) if action is None else (200, action(asked))

    def _graphql(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        query, variables = asked["query"], asked.get("variables") or {}
        if "viewer" in query:
            return {"viewer": {"username": "somebody", "defaultEntity": {"name": ENTITY}}}
        model = {"name": variables.get("name"), "description": None}
        return {"upsertModel": {"model": model}} if "upsertModel" in query else {"project": model}

    def _v2(self, project: str, action: str, asked: Mapping[str, Any]) -> tuple[int, Any]:
        if action == "calls/complete":
            calls = [Call(**item) for item in asked["batch"]]  # all are checked before one is written
            if any(call.project_id != project for call in calls):
                return 400, {"detail": f"a call is of another project than {project}"}
            for call in calls:
                self._put(call)
        elif action == "call/start":
            self._put(Started(**asked["start"]))
        else:
            self._end(asked["end"])
        return 200, {}

    def _post_call_upsert_batch(self, asked: Mapping[str, Any]) -> Any:
        for item in asked["batch"]:
            if item["mode"] == "start":
                self._put(Started(**item["req"]["start"]))
            else:
                self._end(item["req"]["end"])
        return {"res": []}

    def _post_obj_create(self, asked: Mapping[str, Any]) -> Any:
        thing = asked["obj"]
        value = json.dumps(thing["val"])
        digest = thing.get("expected_digest") or _digest(value.encode())
        with self._lock, self._db:
            row = (thing["project_id"], thing["object_id"], digest, value)
            self._db.execute("INSERT INTO objects VALUES (?, ?, ?, ?)", row)
        return {"digest": digest, "object_id": thing["object_id"]}

    def _post_table_create(self, asked: Mapping[str, Any]) -> Any:
        rows = [_digest(json.dumps(row).encode()) for row in asked["table"]["rows"]]
        return {"digest": _digest("".join(rows).encode()), "row_digests": rows}

    def _post_calls_stream_query(self, asked: Mapping[str, Any]) -> Any:
        keep = asked.get("filter") or {}
        found = [
            call
            for call in self.calls(asked["project_id"])
            if call["id"] in (keep.get("call_ids") or [call["id"]])
            and call["trace_id"] in (keep.get("trace_ids") or [call["trace_id"]])
            and call["thread_id"] in (keep.get("thread_ids") or [call["thread_id"]])
            and not (keep.get("trace_roots_only") and call["parent_id"])
        ]
        start = asked.get("offset") or 0
        return iter(found[start : start + (asked.get("limit") or len(found))])

    def _post_calls_query_stats(self, asked: Mapping[str, Any]) -> Any:
        return {"count": len(list(self._post_calls_stream_query(asked)))}

    def _post_feedback_create(self, asked: Mapping[str, Any]) -> Any:
        return self._feed([asked])[0]

    def _post_feedback_batch_create(self, asked: Mapping[str, Any]) -> Any:
        return {"res": self._feed(asked["batch"])}

    def _post_feedback_query(self, asked: Mapping[str, Any]) -> Any:
        rows = [row for row in self.feedback() if row["project_id"] == asked["project_id"]]
        return {"result": [row for row in rows if _holds(asked.get("query"), row)]}

    def _post_feedback_purge(self, asked: Mapping[str, Any]) -> Any:
        expression = asked["query"]["$expr"]
        if set(expression) not in ({"$in"}, {"$eq"}) or next(iter(expression.values()))[0] != {
            "$getField": "id"
        }:
            raise ValueError("Can only purge by specifying one or more ids")
        with self._lock, self._db:
            for row in self._post_feedback_query(asked)["result"]:
                self._db.execute("DELETE FROM feedback WHERE id = ?", (row["id"],))
        return {}


def _holds(query: Any, row: Mapping[str, Any]) -> bool:
    def value(operand: Any) -> Any:
        return row.get(operand["$getField"]) if "$getField" in operand else operand["$literal"]

    def holds(expression: Any) -> bool:
        ((operator, operands),) = expression.items()
        if operator in ("$and", "$or"):
            return (all if operator == "$and" else any)(holds(operand) for operand in operands)
        if operator == "$in":
            return value(operands[0]) in [value(operand) for operand in operands[1]]
        assert operator == "$eq", operator
        return bool(value(operands[0]) == value(operands[1]))

    return query is None or holds(query["$expr"])


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=").replace("-", "X")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: ClassVar[WeaveServer]

    def setup(self) -> None:
        super().setup()
        self.owner._connections.add(self.connection)

    def finish(self) -> None:
        self.owner._connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with suppress(OSError):  # the client, or ``stop``, has closed the connection
            super().handle()

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: Literal["GET", "POST"]) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        owner = self.owner
        with owner._lock:
            owner.requests.append((method, path, len(body)))
            failure = self._failure(path, body)
        if failure is not None:
            if failure.status:
                self._answer(failure.status, failure.body or {"reason": "told to fail"}, failure.headers)
            else:
                self.close_connection = True
            return
        status, answer = self._checked(path, body)
        self._answer(status, answer, {})

    def _failure(self, path: str, body: bytes) -> Failure | None:
        for failure in self.owner.failures:
            fits = re.search(failure.path, path) and len(body) > failure.over and failure.holding in body
            if fits and failure.times > 0:
                failure.times -= 1
                return failure
        return None

    def _checked(self, path: str, body: bytes) -> tuple[int, Any]:
        given = self.headers.get("Authorization", "")
        expected = "Basic " + base64.b64encode(f"api:{self.owner.key}".encode()).decode()
        if given != expected and path != "/server_info":
            return 401, {"reason": "Unauthorized" if given else "No authentication provided"}
        if len(body) > REQUEST_LIMIT:
            return 413, {"reason": "Request Entity Too Large"}
        try:
            return self.owner.answer(path, body)
        except ValidationError as error:
            return 422, {"detail": json.loads(error.json(include_context=False, include_url=False))}
        except KeyError as error:
            return 404, {"reason": str(error)}
        except ValueError as error:
            return 400, {"reason": str(error)}

    def _answer(self, status: int, data: Any, headers: Mapping[str, str]) -> None:
        kind = "application/json"
        if isinstance(data, Iterator):
            kind, body = "application/jsonl", b"".join(json.dumps(item).encode() + b"\n" for item in data)
        else:
            body = json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of every request."""


@contextmanager
def serving(folder: Path) -> Iterator[WeaveServer]:
    """Run a server that keeps what it is sent in a folder."""
    server = WeaveServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.close()
