"""What MLflow's own server answers to the requests that its page makes, for rollouts we wrote."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trackway.trace.config import TraceConfig
from trackway.trace.exporters.mlflow import MlflowExporter, tracking_uri

pytest.importorskip("mlflow")
pytestmark = pytest.mark.slow

rollout = runpy.run_path(str(Path(__file__).with_name("test_mlflow.py")))["rollout"]


class Page:
    """Asks the server as the page does."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.address}/{path}", timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def experiment(self, project: str) -> str:
        found = self.get(f"ajax-api/2.0/mlflow/experiments/get-by-name?experiment_name={project}")
        return str(found["experiment"]["experiment_id"])

    def rows(self, project: str, where: str) -> list[dict[str, Any]]:
        place = {
            "type": "MLFLOW_EXPERIMENT",
            "mlflow_experiment": {"experiment_id": self.experiment(project)},
        }
        body = {"locations": [place], "filter": where, "max_results": 100, "order_by": ["timestamp DESC"]}
        return list(self.post("ajax-api/3.0/mlflow/traces/search", body).get("traces", []))

    def trace(self, trace_id: str) -> dict[str, Any]:
        path = f"ajax-api/3.0/mlflow/traces/get?trace_id=tr-{trace_id}&allow_partial=true"
        return dict(self.get(path)["trace"])


def values(span: dict[str, Any]) -> dict[str, Any]:
    return {item["key"]: plain(item["value"]) for item in span["attributes"]}


def plain(value: dict[str, Any]) -> Any:
    """Read a value in OpenTelemetry's JSON."""
    ((kind, content),) = value.items()
    if kind == "array_value":
        return [plain(item) for item in content.get("values", [])]
    if kind == "kvlist_value":
        return {item["key"]: plain(item["value"]) for item in content.get("values", [])}
    return int(content) if kind == "int_value" else content


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose embedded database holds two steps of two samples with two rollouts each."""
    folder = tmp_path_factory.mktemp("store")
    exporter = MlflowExporter(TraceConfig(store=folder))
    trajectories = [
        rollout(step, sample, n, project="written", tool_error="no" if n else None)
        for step in (1, 2)
        for sample in (0, "gsm8k/test #1")
        for n in (0, 1)
    ]
    trajectories.append(rollout(3, status="died", error="process ended", root=False, project="written"))
    assert exporter.export_trajectories(trajectories) == {}
    return folder


@pytest.fixture(scope="module")
def page(store: Path) -> Iterator[Page]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", tracking_uri(store)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (store / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=store,
            start_new_session=True,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server, store / "server.log")
        yield Page(f"http://127.0.0.1:{port}")
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            assert server.poll() is None, log.read_text()
            time.sleep(0.2)
    raise AssertionError(log.read_text())


def test_the_page_itself_is_served(page: Page) -> None:
    with urllib.request.urlopen(page.address, timeout=60) as answer:
        assert b"<html" in answer.read().lower()


def test_the_list_shows_readable_rows_of_one_step(page: Page) -> None:
    rows = page.rows("written", "tags.step = '1'")
    assert len(rows) == 4
    for row in rows:
        assert row["request_preview"] == "What is 17 * 3?"
        assert row["response_preview"] == "It is 51."
        assert row["state"] == "OK"
        assert row["tags"]["mlflow.traceName"] == "Agent.run"
        scores = {item["assessment_name"]: item["feedback"]["value"] for item in row["assessments"]}
        assert scores == {"correct": 1.0, "reward": 1.0}


def test_a_session_holds_the_rollouts_of_one_group(page: Page) -> None:
    for session in ("1:0", "1:gsm8k~2Ftest~20~231"):
        rows = page.rows("written", f"request_metadata.mlflow.trace.session = '{session}'")
        assert sorted(row["tags"]["rollout_n"] for row in rows) == ["0", "1"]


def test_every_message_keeps_the_rules_of_the_chat_view(page: Page) -> None:
    for row in page.rows("written", "tags.step != '0'"):
        for span in page.trace(row["trace_id"].removeprefix("tr-"))["spans"]:
            found = values(span)
            messages = []
            for name in ("mlflow.spanInputs", "mlflow.spanOutputs"):
                content = found.get(name)
                if isinstance(content, dict):
                    messages += content.get("messages", [])
                    messages += [choice["message"] for choice in content.get("choices", [])]
            assert messages or found["mlflow.spanType"] in ("TOOL", "AGENT")
            for message in messages:
                assert message["role"] in ("system", "user", "assistant", "tool")
                assert isinstance(message.get("content", ""), str)
                assert "content" in message or message["tool_calls"]
                for call in message.get("tool_calls", []):
                    assert isinstance(call["id"], str)
                    assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_a_rollout_that_died_shows_its_conversation_and_the_reason(page: Page) -> None:
    (row,) = page.rows("written", "tags.status = 'died'")
    assert row["state"] == "ERROR"
    assert row["response_preview"] == "⟨died: process ended⟩ It is 51."
    spans = page.trace(row["trace_id"].removeprefix("tr-"))["spans"]
    (root,) = [span for span in spans if not span.get("parent_span_id")]
    outputs = values(root)["mlflow.spanOutputs"]
    assert outputs["error"] == "process ended"
    assert [message["role"] for message in outputs["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_a_server_and_a_database_receive_the_same(store: Path, page: Page) -> None:
    pairs = []
    for project, uri in (("direct", None), ("served", page.address)):
        exporter = MlflowExporter(TraceConfig(store=store, tracking_uri=uri))
        scores = {"correct": 1.0, "kl": float("nan"), "grade": "B"}
        bad = rollout(1, 1, rewards=scores, run_id="f" * 32, project=project, experiment="a\ud800\0")
        trajectories = [rollout(project=project, tool_error="no"), bad]
        for _ in range(2):
            assert exporter.export_trajectories(trajectories) == {}
        pairs.append([_comparable(page.trace(item.trace_id)) for item in trajectories])
    assert pairs[0] == pairs[1]


def _comparable(trace: dict[str, Any]) -> dict[str, Any]:
    """Take out the ids, which are made of the project, and the order of what has none."""
    info = trace["trace_info"]
    tags = {name: value for name, value in info["tags"].items() if name != "mlflow.artifactLocation"}
    scores = {
        item["assessment_name"]: (item.get("feedback"), item.get("rationale")) for item in info["assessments"]
    }
    spans = [
        (
            span["name"],
            span["start_time_unix_nano"],
            span["end_time_unix_nano"],
            span["status"],
            {name: value for name, value in values(span).items() if name != "mlflow.traceRequestId"},
            [(event["name"], event["time_unix_nano"]) for event in span.get("events", [])],
        )
        for span in trace["spans"]
    ]
    return {
        "tags": tags,
        "metadata": info["trace_metadata"],
        "scores": scores,
        "spans": spans,
        "state": info["state"],
    }
