"""Switching recording on, over and off; what one process does must not cost another anything."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

import trackway
from trackway import ConfigError, open_store, reward, rollout_trace, tool_trace, trajectory
from trackway.trace.config import load_config
from trackway.trace.exporters import election, sync
from trackway.trace.store import journal
from trackway.trace.testing import recording

from .programs import stop_followers


@tool_trace
def tool(word: str) -> str:
    return word


@rollout_trace
def rollout() -> str:
    return tool("x")


def run(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("values", "total"),
    [((math.inf, -math.inf), math.nan), ((1e308, 1e308), math.inf), ((math.nan, 1), math.nan)],
)
def test_rewards_without_a_finite_sum_leave_the_store_usable(
    values: tuple[float, float], total: float
) -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            reward("low", values[0])
            reward("high", values[1])
        with trajectory(step=1, sample_index=2):
            reward("fine", 1)
        found = {summary.name: summary.reward for summary in open_flushed(recorded.path).query()}
        assert recorded.trajectories()[0].rewards == pytest.approx(
            {"low": values[0], "high": values[1]}, nan_ok=True
        )
    assert found["1/2/0"] == 1
    assert found["1/1/0"] == pytest.approx(total, nan_ok=True)


def open_flushed(path: Path) -> Any:
    trackway.flush()
    return open_store(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trackway.response.token_ids", {"stringValue": "[1, oops"}),
        ("trackway.response.token_ids", {"stringValue": "null"}),
        ("trackway.sample_index", {"arrayValue": {"values": []}}),
        ("trackway.response.mask", {"stringValue": "5"}),
    ],
)
def test_one_trace_that_cannot_be_understood_costs_no_other(name: str, value: Any) -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            rollout()
        with trajectory(step=1, sample_index=2):
            rollout()
        trackway.shutdown()
        for path in recorded.path.glob("index*"):
            path.unlink()
        (segment,) = journal.segments(recorded.path)
        lines = [orjson.loads(line) for line in segment.path.read_bytes().splitlines()]
        spans = lines[0]["resourceSpans"][0]["scopeSpans"][0]["spans"]
        for span in spans:
            span["attributes"] = [item for item in span["attributes"] if item["key"] != name]
            span["attributes"].append({"key": name, "value": value})
        segment.path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        store = open_store(recorded.path)
        names = [summary.name for summary in store.query()]
        assert "1/2/0" in names
        assert len(names) == 2
        assert store.load("1/2/0").status == "ok"
        odd = store.load(spans[0]["traceId"])
        assert odd.trace_id == spans[0]["traceId"]
        assert store.status().recorded == 6


def test_a_line_that_is_gone_is_missed() -> None:
    with recording() as recorded:
        for sample in (1, 2):
            with trajectory(step=1, sample_index=sample):
                rollout()
            trackway.flush()
        trackway.shutdown()
        for path in recorded.path.glob("index*"):
            path.unlink()
        (segment,) = journal.segments(recorded.path)
        segment.path.write_bytes(b"".join(segment.path.read_bytes().splitlines(keepends=True)[1:]))
        status = open_store(recorded.path).status()
    assert (status.recorded, status.exported, status.pending, status.dropped) == (6, 3, 0, 3)
    assert status.dropped_by_reason == {"missing from the journal": 3}


def test_a_full_disk_is_counted_span_by_span(tmp_path: Path) -> None:
    done = run(
        """
        import resource, signal, trackway
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        trackway.configure(store="store", sync="off")
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        @trackway.tool_trace
        def tool(n): return "x" * 100
        for sample in range(30):
            with trackway.trajectory(step=1, sample_index=sample):
                for n in range(5): tool(n)
        trackway.shutdown()
        """,
        tmp_path,
        TRACKWAY_STRICT="0",
    )
    assert done.returncode == 0, done.stderr
    store = open_store(tmp_path / "store")
    status = store.status()
    assert status.recorded == 180
    assert 0 < status.dropped == status.recorded - status.exported
    assert status.exported == sum(summary.spans for summary in store.query(all_attempts=True))


def test_a_configuration_that_fails_leaves_the_running_one_alone() -> None:
    with recording() as recorded:
        with pytest.raises(ConfigError, match="cannot be written"):
            trackway.configure(store="/proc/nowhere")
        with trajectory(step=1, sample_index=1):
            rollout()
        assert [found.name for found in recorded.trajectories()] == ["1/1/0"]


@pytest.mark.parametrize("same_store", [True, False])
def test_a_rollout_that_runs_while_settings_change_ends_where_it_began(
    tmp_path: Path, same_store: bool
) -> None:
    first, second = tmp_path / "one", tmp_path / ("one" if same_store else "two")
    trackway.configure(store=first, sync="off", experiment="before")
    with trajectory(step=1, sample_index=1):
        tool("a")
        trackway.configure(store=second, sync="off", experiment="after")
        tool("b")
        reward("reward", 2)
    with trajectory(step=2, sample_index=1):
        tool("c")
    trackway.flush()
    trackway.shutdown()
    old = open_store(first).load("1/1/0")
    assert (old.status, old.reward, old.experiment) == ("ok", 2, "before")
    assert [span.inputs for span in old.spans if span.kind == "tool"] == [{"word": "a"}, {"word": "b"}]
    new = open_store(second).load("2/1/0")
    assert (new.status, new.experiment) == ("ok", "after")
    assert open_store(first).status().dropped == open_store(second).status().dropped == 0


def test_rollouts_that_start_at_once_in_a_process_without_settings_are_all_recorded(tmp_path: Path) -> None:
    done = run(
        """
        import threading, trackway
        gate = threading.Barrier(8)
        @trackway.rollout_trace
        def rollout(n): return n
        def work(n):
            gate.wait()
            with trackway.trajectory(step=1, sample_index=1, rollout_n=n):
                rollout(n)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """,
        tmp_path,
        TRACKWAY_STORE=str(tmp_path / "store"),
    )
    assert done.returncode == 0, done.stderr
    found = list(open_store(tmp_path / "store").query())
    assert [(summary.rollout_n, summary.spans) for summary in found] == [(n, 2) for n in range(8)]


def test_a_worker_that_only_knows_the_store_records_as_the_store_is_configured(tmp_path: Path) -> None:
    store = tmp_path / "store"
    trackway.configure(store=store, backend="mlflow", sync="off", project="mine", experiment="e", ratio=1.0)
    code = "import trackway\nwith trackway.trajectory(step=1, sample_index=1): pass"
    for experiment in ("", "other"):
        done = run(code, tmp_path, TRACKWAY_STORE=str(store), TRACKWAY_EXPERIMENT=experiment)
        assert done.returncode == 0, done.stderr
    found = open_store(store)
    assert [(item.project, item.experiment) for item in found.query(all_attempts=True)] == [
        ("mine", "e"),
        ("mine", "other"),
    ]
    assert sync.load_settings(store).backend == ("mlflow",)


def test_a_process_without_destinations_does_not_take_them_from_one_that_still_records(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    trackway.configure(store=store, backend="mlflow", sync="off")
    done = run("import trackway; trackway.configure(store='store', sync='off')", tmp_path)
    assert done.returncode == 0, done.stderr
    assert sync.load_settings(store).backend == ("mlflow",)
    trackway.configure(store=store, sync="off")  # but it may change its own mind
    assert sync.load_settings(store).backend == ()


def test_the_follower_is_no_child_of_the_training_process(tmp_path: Path) -> None:
    done = run(
        """
        import os, sys, time, trackway
        from trackway.trace.exporters import sync
        trackway.configure(store="store", backend="mlflow", sync="process")
        while not sync.is_followed(trackway.trace.lifecycle._active.config.store): time.sleep(0.05)
        try:
            print("child", os.waitpid(-1, os.WNOHANG))
        except ChildProcessError:
            print("no child")
        with trackway.trajectory(step=1, sample_index=1): pass
        """,
        tmp_path,
        PYTHONWARNINGS="error",
    )
    assert done.stdout == "no child\n", done.stderr
    assert "ResourceWarning" not in done.stderr
    stop_followers(tmp_path / "store")


def test_a_follower_that_cannot_live_is_started_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    started: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(election, "is_followed", lambda store: False)
    monkeypatch.setattr(election, "spawn", lambda store: started.append(now[0]))
    config = load_config(store=tmp_path, sync="off")
    supervisor = election.Supervisor(config)
    for second in range(600):
        now[0] = float(second)
        supervisor.look()
    assert started[:7] == [0, 1, 3, 7, 15, 31, 63]
    assert len(started) < 20


def test_open_spans_are_encoded_once_however_long_they_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from trackway.trace.capture import encode, writer

    encoded: list[str] = []
    encode_open = encode.SpanEncoder.encode_open

    def counted(self: Any, scope: Any) -> bytes:
        encoded.append(scope.name)
        return encode_open(self, scope)

    monkeypatch.setattr(encode.SpanEncoder, "encode_open", counted)
    monkeypatch.setattr(writer, "HOUSEKEEPING", 0.01)
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            while not encoded:
                time.sleep(0.01)
            for _ in range(20):
                time.sleep(0.02)
            before = len(encoded)
            reward("reward", 1)
            while len(encoded) == before:
                time.sleep(0.01)
            assert open_store(recorded.path).load("1/1/0").rewards == {"reward": 1.0}
        assert before == 1


@pytest.mark.slow
def test_a_script_that_ends_delivers_from_its_own_process_too(tmp_path: Path) -> None:
    done = run(
        """
        import trackway
        trackway.configure(store="store", backend="mlflow", sync="inline")
        with trackway.trajectory(step=1, sample_index=1): pass
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for _ in range(600):
        status = open_store(tmp_path / "store").status()
        if not status.pending:
            break
        time.sleep(0.1)
    assert (status.recorded, status.exported) == (1, 1)


@pytest.mark.slow
def test_a_destination_that_moves_gets_everything_at_its_new_place(tmp_path: Path) -> None:
    import mlflow

    for number in (1, 2):
        uri = f"sqlite:///{tmp_path}/{number}.db"
        trackway.configure(
            store=tmp_path / "store", backend="mlflow", sync="inline", project="p", tracking_uri=uri
        )
        with trajectory(step=number, sample_index=1):
            pass
        assert trackway.flush(120).pending == 0
    trackway.shutdown()
    steps = []
    for number in (1, 2):
        client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/{number}.db")
        experiment = client.get_experiment_by_name("p")
        assert experiment is not None
        found = client.search_traces(locations=[experiment.experiment_id])
        steps.append(sorted(trace.info.tags["step"] for trace in found))
    assert steps == [["1"], ["1", "2"]]


def test_a_destination_stays_where_it_is_while_another_process_records(tmp_path: Path) -> None:
    store = tmp_path / "store"
    uri = f"sqlite:///{tmp_path}/x.db"
    trackway.configure(store=store, backend="mlflow", sync="off", tracking_uri=uri)
    done = run("import trackway; trackway.configure(store='store', backend='mlflow', sync='off')", tmp_path)
    assert done.returncode == 0, done.stderr
    assert sync.load_settings(store).tracking_uri == uri
    other = f"sqlite:///{tmp_path}/y.db"
    settings = f"store='store', backend='mlflow', sync='off', tracking_uri={other!r}"
    done = run(f"import trackway; trackway.configure({settings})", tmp_path)
    assert "another process records" in done.stderr
    assert sync.load_settings(store).tracking_uri == uri
