"""What is recorded arrives at its destinations, once, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import trackway
from trackway import ConfigError, StoreError, open_store, reward, rollout_trace, tool_trace, trajectory
from trackway.trace import semconv
from trackway.trace.config import load_config
from trackway.trace.exporters import build, destinations, sync
from trackway.trace.store.assemble import from_readable
from trackway.trace.testing import recording

from .programs import followers, wait_until


@tool_trace
def half(number: int) -> float:
    return number / 2


@rollout_trace
def rollout(number: int) -> float:
    return half(number)


def record(step: int, sample: int = 0, n: int = 0) -> None:
    with trajectory(step=step, sample_index=sample, rollout_n=n, policy_version=step):
        reward("reward", rollout(sample))


class Destination(SpanExporter):
    """A third-party exporter that can be away."""

    def __init__(self) -> None:
        self.away = 0
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.away:
            self.away -= 1
            raise ConnectionError("nobody there")
        self.spans += spans
        return SpanExportResult.SUCCESS


def follower(path: Path, **exporters: SpanExporter) -> sync.Follower:
    """Give a follower whose destinations are these exporters."""
    made = sync.Follower(path, load_config(store=path, sync="off"))
    object.__setattr__(made._config, "backend", tuple(exporters))
    sync.save_settings(made._config)  # type: ignore[arg-type]
    for name, exporter in exporters.items():
        made._destinations[name] = destinations.Destination(name, name, made._config, exporter)  # type: ignore[arg-type]
    return made


def test_a_third_party_exporter_gets_every_span_once_with_its_ids_times_and_tags() -> None:
    with recording() as recorded:
        for step in (1, 2):
            record(step, 3)
        trackway.flush()
        memory = InMemorySpanExporter()
        work = follower(recorded.path, memory=memory)
        assert work.step()
        assert work.step()
        assert not memory._stopped
        spans = memory.get_finished_spans()
        known = {span.span_id: span for span in recorded.spans()}
    assert len(spans) == len(known) == 6
    for span in spans:
        context = span.get_span_context()
        assert context is not None
        twin = known[f"{context.span_id:016x}"]
        assert f"{context.trace_id:032x}" == twin.trace_id
        assert (span.start_time, span.end_time, span.name) == (twin.start_ns, twin.end_ns, twin.name)
        assert span.attributes is not None
        assert span.attributes["trackway.step"] in (1, 2)
        assert span.attributes["trackway.sample_index"] == 3
        assert (f"{span.parent.span_id:016x}" if span.parent else None) == twin.parent_id
    # And the way back: the same trajectories come out of OpenTelemetry's spans.
    assert [str(item.key) for item in from_readable(spans)] == ["1/3/0", "2/3/0"]
    assert [item.reward for item in from_readable(spans)] == [1.5, 1.5]


def test_a_third_party_exporter_gets_conversations_whole() -> None:
    @tool_trace
    def search(messages: list[dict[str, str]]) -> str:
        return "nothing"

    with recording() as recorded:
        given = [[{"role": "user", "content": "word " * 100}] * turns for turns in (1, 2, 3)]
        with trajectory(step=1, sample_index=1):
            for messages in given:
                search(messages)
        recorded.status()
        memory = InMemorySpanExporter()
        assert follower(recorded.path, memory=memory).step()
    calls = [span.attributes or {} for span in memory.get_finished_spans() if span.name == "search"]
    assert [orjson.loads(str(facts[semconv.TOOL_ARGUMENTS]))["messages"] for facts in calls] == given
    assert not any(semconv.INPUT_BASE in facts for facts in calls)


def test_a_destination_that_is_away_keeps_no_other_and_catches_up() -> None:
    with recording() as recorded:
        away, there = Destination(), Destination()
        away.away = 4  # one try of one trajectory, then one of both together and of each
        work = follower(recorded.path, away=away, there=there)
        record(1)
        trackway.flush()
        assert not work.step(patient=False)
        assert (len(away.spans), len(there.spans)) == (0, 3)
        assert work.errors() == {"away": "ConnectionError: nobody there"}
        status = open_store(recorded.path).status()
        assert (status.recorded, status.exported, status.pending) == (3, 0, 3)
        assert status.destinations["there"].pending == 0
        record(2)
        trackway.flush()
        assert not work.step(patient=False)
        assert work.step(patient=False)
        assert (len(away.spans), len(there.spans)) == (6, 6)
        assert work.errors() == {}
        status = open_store(recorded.path).status()
        assert (status.recorded, status.exported, status.pending) == (6, 6, 0)


def test_a_destination_that_failed_is_left_alone_for_a_while() -> None:
    with recording() as recorded:
        away = Destination()
        away.away = 5
        work = follower(recorded.path, away=away)
        record(1)
        trackway.flush()
        for _ in range(50):
            assert not work.step()
        assert away.away == 4


def test_a_new_follower_goes_on_where_the_last_one_stopped() -> None:
    with recording() as recorded:
        record(1)
        trackway.flush()
        first, second = Destination(), Destination()
        work = follower(recorded.path, place=first)
        work.step()
        work.close()
        record(2)
        trackway.flush()
        work = follower(recorded.path, place=second)
        work.step()
    assert [span.attributes["trackway.step"] for span in first.spans] == [1, 1, 1]  # type: ignore[index]
    assert [span.attributes["trackway.step"] for span in second.spans] == [2, 2, 2]  # type: ignore[index]


def test_what_comes_while_a_follower_leaves_is_delivered_though_another_reader_saw_it_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with recording() as recorded:
        place = Destination()
        config = load_config(store=recorded.path, sync="off")
        object.__setattr__(config, "backend", ("place",))
        monkeypatch.setattr(destinations, "build", lambda backend, config: place)
        monkeypatch.setattr(sync.Follower, "owners", lambda self: False)
        step = sync.Follower.step
        steps = []

        def and_then_somebody_records(self: Any, *, patient: bool = True) -> bool:
            done = step(self, patient=patient)
            steps.append(done)
            if len(steps) == 1:
                record(2)
                trackway.flush()  # reads the store as well
            return done

        monkeypatch.setattr(sync.Follower, "step", and_then_somebody_records)
        record(1)
        sync.follow_store(recorded.path, config)
    assert [span.attributes["trackway.step"] for span in place.spans] == [1, 1, 1, 2, 2, 2]  # type: ignore[index]
    assert steps == [True, True]


def test_what_still_runs_is_not_sent_and_what_was_abandoned_is_sent_as_dead(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import os, trackway
        trackway.configure(store="store", sync="off")
        @trackway.tool_trace
        def quick(): pass
        with trackway.trajectory(step=1, sample_index=1):
            quick()
            trackway.flush()
            print("ready", flush=True)
            input()
            os._exit(1)
    """)
    worker = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    place = Destination()
    work = follower(tmp_path / "store", place=place)
    assert work.step()
    assert place.spans == []
    worker.communicate("\n")
    assert work.step()
    assert [span.name for span in place.spans if span.status.is_ok] == ["quick"]
    (found,) = from_readable(place.spans)
    assert found.status == "died"


def test_a_rollout_of_which_nothing_had_ended_is_sent_when_its_process_is_gone(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import time, trackway
        trackway.configure(store="store", sync="off")
        with trackway.trajectory(step=1, sample_index=1):
            while True: time.sleep(1)
    """)
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    wait_until(lambda: list((tmp_path / "store" / "journal").glob("*.open.jsonl")))
    place = Destination()
    work = follower(tmp_path / "store", place=place)
    assert work.step()
    assert place.spans == []
    worker.kill()
    worker.wait()
    for _ in range(2):
        assert work.step()
        (found,) = from_readable(place.spans)
        assert (found.status, str(found.key)) == ("died", "1/1/0")


def test_more_than_one_batch_arrives_whole_and_numbers_stay_numbers() -> None:
    with recording() as recorded:
        for number in range(1_200):
            record(1 + number % 12, number // 12)
        trackway.flush()
        place = Destination()
        work = follower(recorded.path, place=place)
        assert work.step()
        found = from_readable(place.spans)
        assert len(place.spans) == 3 * len(found) == 3_600
        store = open_store(recorded.path)
        assert len(list(store.query())) == 1_200
        late = [item for step in range(9, 13) for item in store.query(step=step)]
        assert sorted({item.step for item in late if item.step is not None}) == [9, 10, 11, 12]
        assert len(late) == 400
        ten = list(store.query(sample=10))
        assert [(item.step, item.sample_index) for item in ten] == [(step, 10) for step in range(1, 13)]


def test_an_unknown_or_missing_backend_is_said_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        "trackway.trace.exporters.find_spec", lambda name: None if name == "mlflow" else find(name)
    )
    with pytest.raises(ConfigError, match=r"pip install 'trackway\[mlflow\]'"), recording(backend="mlflow"):
        pass
    with pytest.raises(ConfigError, match="no exporter is registered as 'nowhere'"):
        build("nowhere", load_config())


def test_sync_without_settings_or_destinations_says_so(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    with pytest.raises(StoreError, match="holds no settings"):
        sync.run(tmp_path)
    said: list[str] = []
    with recording() as recorded:
        assert sync.run(recorded.path, say=said.append) == 0
    assert said == ["no destination is configured: everything stays in the store"]


WORKER = textwrap.dedent("""
    import sys, trackway
    from trackway import llm_trace, trajectory, reward
    @llm_trace
    def rollout(x): return str(x)
    trackway.configure(store="store", backend="mlflow", sync="process", project="p", experiment="e")
    for sample in range(int(sys.argv[2])):
        with trajectory(step=int(sys.argv[1]), sample_index=sample):
            rollout(sample); reward("reward", sample)
""")


def traces(store: Path, filter_string: str | None = None) -> list[Any]:
    import mlflow

    # A client, since mlflow.set_tracking_uri would set a variable that processes of other tests inherit.
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{store}/mlflow.db")
    experiment = client.get_experiment_by_name("p")
    if experiment is None:
        return []
    places = [experiment.experiment_id]
    return client.search_traces(locations=places, filter_string=filter_string, max_results=500)


def wait_until_followed_to_the_end(store: Path) -> None:
    for _ in range(1200):
        if (store / "sync.sqlite").exists() and not sync.is_followed(store):
            opened = open_store(store)
            pending = opened.status().pending
            opened.close()
            if not pending:
                return
        time.sleep(0.1)
    raise AssertionError((store / "sync.log").read_text())


@pytest.mark.slow
def test_processes_that_end_at_once_leave_a_follower_that_finishes_alone(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(step), "10"], cwd=tmp_path)
        for step in (1, 2, 3, 4)
    ]
    assert [worker.wait() for worker in workers] == [0] * 4
    store = tmp_path / "store"
    wait_until_followed_to_the_end(store)
    assert len(traces(store)) == 40
    assert {trace.info.tags["sample_index"] for trace in traces(store, "tags.step = '3'")} == {
        str(sample) for sample in range(10)
    }
    status = open_store(store).status()
    assert (status.recorded, status.exported, status.pending, status.dropped) == (80, 80, 0, 0)


@pytest.mark.slow
def test_a_follower_that_is_killed_is_replaced_by_another(tmp_path: Path) -> None:
    code = WORKER + textwrap.dedent("""
        print(trackway.flush(60).pending, flush=True)
        input()
        with trajectory(step=99, sample_index=1): pass
        print(trackway.flush(60).pending, flush=True)
    """)
    worker = subprocess.Popen(
        [sys.executable, "-c", code, "1", "5"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRACKWAY_STRICT": "0"},
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "0\n"
    store = tmp_path / "store"
    for pid in followers(store):
        os.kill(pid, signal.SIGKILL)
    output, _ = worker.communicate("\n", timeout=120)
    assert output == "0\n"
    assert worker.returncode == 0
    wait_until_followed_to_the_end(store)
    assert len(traces(store)) == 6


@pytest.mark.slow
def test_a_thread_of_the_same_process_delivers_where_no_process_is_wanted(tmp_path: Path) -> None:
    code = WORKER.replace('"process"', '"inline"') + "print(trackway.flush(60).pending)"
    done = subprocess.run(
        [sys.executable, "-c", code, "1", "5"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n"
    assert len(traces(tmp_path / "store", "tags.step = '1'")) == 5


@pytest.mark.slow
def test_a_server_that_is_away_costs_the_training_nothing(tmp_path: Path) -> None:
    code = WORKER + "print(trackway.flush(8)); trackway.shutdown()"
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, "1", "5"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    at_flush, at_end = done.stderr.splitlines()
    assert at_flush.startswith("mlflow is not reached, the store keeps everything")
    assert at_end.startswith("mlflow lacks 10 of 10 spans (ConnectionError: the MLflow server")
    assert "recorded=10, exported=0, pending=10, dropped=0" in done.stdout
    store = tmp_path / "store"
    for pid in followers(store):
        os.kill(pid, signal.SIGTERM)
    while sync.is_followed(store):
        time.sleep(0.05)
    # It is back, as a database here: everything arrives.
    settings = sync.load_settings(store)
    object.__setattr__(settings, "tracking_uri", f"sqlite:///{store}/mlflow.db")
    sync.save_settings(settings)
    assert sync.run(store) == 0
    assert len(traces(store)) == 5
