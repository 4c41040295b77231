"""How much of what is recorded goes to each destination, and that the counts say so."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import trackway
from trackway import ConfigError, attach, llm_trace, open_store, reward, trajectory
from trackway.trace.config import from_dict, load_config, to_dict
from trackway.trace.exporters import destinations, selection, sync
from trackway.trace.model import Trajectory
from trackway.trace.store import Store, StoreStatus
from trackway.trace.store.cursors import Cursors
from trackway.trace.store.members import Members
from trackway.trace.testing import recording

from .programs import (
    Cli,
    followers,
    install_exporter,
    line,
    order,
    run,
    start,
    wait_until,
)


class Place(SpanExporter):
    """A third-party exporter that remembers what it was sent."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.away:
            raise ConnectionError("nobody there")
        self.spans += spans
        return SpanExportResult.SUCCESS

    @property
    def keys(self) -> list[str]:
        """What it was sent, in order; what came twice stands twice."""
        roots = (span.attributes or {} for span in self.spans if span.parent is None)
        return [
            f"{facts['trackway.step']}/{facts['trackway.sample_index']}/{facts['trackway.rollout_n']}"
            for facts in roots
        ]


@llm_trace
def say(text: str, finish_reason: str = "stop") -> dict[str, str]:
    return {"content": text, "finish_reason": finish_reason}


def record(
    step: int, sample: int = 0, n: int = 0, *, score: float | None = None, text: str = "", end: str = "stop"
) -> None:
    with trajectory(step=step, sample_index=sample, rollout_n=n):
        say(text, end)
        if score is not None:
            reward("reward", score)


def fail(step: int, sample: int = 0, n: int = 0) -> None:
    with pytest.raises(ValueError, match="no"), trajectory(step=step, sample_index=sample, rollout_n=n):
        raise ValueError("no")


@contextmanager
def following(path: Path, place: SpanExporter, **settings: Any) -> Iterator[sync.Follower]:
    """Follow a store in this process, with one destination."""
    config = load_config(store=path, sync="off", **settings)
    object.__setattr__(config, "backend", ("place",))
    sync.save_settings(config)
    work = sync.Follower(path, config)
    work._destinations["place"] = destinations.Destination("place", "place", config, place)
    try:
        yield work
    finally:
        work.close()


def counts(store: Path) -> tuple[int, int, int, int]:
    """Give exported, pending, left out and trajectories left out; they must add up to what was recorded."""
    opened = open_store(store)
    status = opened.status()
    opened.close()
    assert_adds_up(status)
    (place,) = status.destinations.values()
    return place.exported, place.pending, place.left_out, place.trajectories_left_out


def assert_adds_up(status: StoreStatus) -> None:
    assert status.recorded == status.exported + status.pending + status.left_out + status.dropped
    for place in status.destinations.values():
        assert (
            status.recorded
            == place.exported + place.pending + place.refused + place.left_out + status.dropped
        )


# --- when a step is decided ---------------------------------------------------------------------------------


def test_a_step_is_decided_when_the_next_one_begins_and_rewards_attached_until_then_are_seen() -> None:
    place = Place()
    with recording() as recorded, following(recorded.path, place, export_only=["best"]) as work:
        for n in range(3):
            record(1, n=n)
        trackway.flush()
        for _ in range(3):
            assert not work.step()
        assert place.keys == []
        assert counts(recorded.path) == (0, 6, 0, 0)
        for n, score in enumerate((0.0, 1.0, 0.5)):
            attach(f"1/0/{n}", rewards={"judge": score})
        record(2)
        trackway.flush()
        assert not work.step()  # the second one waits now
        assert place.keys == ["1/0/1"]
        assert counts(recorded.path) == (3, 2, 6, 2)


def test_while_a_rollout_runs_its_step_waits() -> None:
    place = Place()
    with recording() as recorded, following(recorded.path, place, export_only=["errors"]) as work:
        with trajectory(step=1, sample_index=0):
            say("hello")
            fail(1, 1)
            fail(2)
            trackway.flush()
            work.step()
            assert place.keys == []
        trackway.flush()
        work.step()
        assert place.keys == ["1/1/0"]
        assert counts(recorded.path) == (1, 1, 2, 1)


def test_validation_is_decided_apart_and_other_experiments_hurry_nobody() -> None:
    place = Place()
    with recording() as recorded, following(recorded.path, place, export_only=["best"]) as work:
        record(1, n=0, score=0.0)
        record(1, n=1, score=1.0)
        with trajectory(step=1, sample_index=0, rollout_n=2, validate=True):
            reward("reward", 5.0)
        with trajectory(step=1, sample_index=0, rollout_n=3, validate=True):
            reward("reward", 0.0)
        with trajectory(step=7, sample_index=0, experiment="another"):
            pass
        trackway.flush()
        work.step()
        assert place.keys == []
        record(2)
        trackway.flush()
        work.step()
        assert sorted(place.keys) == ["1/0/1", "1/0/2"]


def test_a_step_of_which_nothing_more_comes_is_decided_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    place, now = Place(), [1_000.0]
    monkeypatch.setattr(selection.time, "monotonic", lambda: now[0])
    with recording() as recorded, following(recorded.path, place, export_only=["errors"]) as work:
        fail(1)
        trackway.flush()
        work.step()
        now[0] += selection.WAIT - 1
        fail(1, 1)
        trackway.flush()
        work.step()  # begins to wait anew
        now[0] += selection.WAIT - 1
        work.step()
        assert place.keys == []
        now[0] += 1
        work.step()
        assert place.keys == ["1/0/0", "1/1/0"]
        with trajectory(step=1, sample_index=2):
            say("an hour of thought")
            fail(1, 3)
            trackway.flush()
            work.step()
            now[0] += 2 * selection.WAIT
            work.step()
            assert len(place.keys) == 2
            now[0] += 10 * selection.WAIT
            work.step()
            assert place.keys[2:] == ["1/3/0"]


def test_after_a_return_to_a_checkpoint_steps_wait_for_those_that_come_then() -> None:
    place = Place()
    with recording() as recorded, following(recorded.path, place, export_only=["best"]) as work:
        for step in (1, 2, 3):
            record(step, n=0, score=0.0)
            record(step, n=1, score=1.0)
        trackway.flush()
        work.step()
        assert place.keys == ["1/0/1", "2/0/1"]
        record(2, n=2, score=9.0)
        trackway.flush()
        work.step()
        assert place.keys == ["1/0/1", "2/0/1"]
        record(3, n=2, score=9.0)
        trackway.flush()
        work.step()
        assert place.keys == ["1/0/1", "2/0/1", "2/0/2"]


def test_what_has_no_step_is_decided_a_while_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place()
    with recording() as recorded, following(recorded.path, place, export_only=["errors"]) as work:
        say("outside of any rollout")
        with pytest.raises(ValueError, match="no"), trajectory(sample_index=7):
            raise ValueError("no")
        trackway.flush()
        now = selection.time.time_ns()
        monkeypatch.setattr(selection.time, "time_ns", lambda: now + round(1e9 * (selection.WAIT - 10)))
        work.step()
        assert counts(recorded.path) == (0, 2, 0, 0)
        monkeypatch.setattr(selection.time, "time_ns", lambda: now + round(1e9 * (selection.WAIT + 10)))
        say("and again")  # which keeps nothing waiting
        trackway.flush()
        work.step()
        assert [span.name for span in place.spans] == ["trajectory"]


def test_when_the_writers_are_gone_nothing_is_waited_for() -> None:
    place = Place()
    with recording() as recorded, following(recorded.path, place, export_only=["errors"]) as work:
        fail(1)
        record(1, 1)
        trackway.shutdown()
        assert work.step()
        assert place.keys == ["1/0/0"]
        assert counts(recorded.path) == (1, 0, 2, 1)


def test_what_is_flushed_is_decided_also_while_its_step_goes_on() -> None:
    place = Place()
    with recording() as recorded, following(recorded.path, place, export_only=["errors"]) as work:
        fail(1)
        record(1, 1)
        trackway.flush()
        assert work._config is not None
        selection.ask(recorded.path, work._config)
        with trajectory(step=1, sample_index=2):
            fail(1, 3)
            trackway.flush()
            assert not work.step()
            assert place.keys == ["1/0/0"]
            assert counts(recorded.path) == (1, 1, 2, 1)


def test_without_rules_nobody_is_asked_to_decide(tmp_path: Path) -> None:
    selection.ask(tmp_path, load_config(backend="mlflow", environ={}))
    selection.ask(tmp_path, load_config(backend="mlflow", max_bytes_per_step={"weave": 10_000}, environ={}))
    assert list(tmp_path.iterdir()) == []


# --- what was decided stays so ------------------------------------------------------------------------------


def test_a_decision_outlives_its_follower_and_later_facts() -> None:
    first, second = Place(), Place()
    with recording() as recorded:
        for n, score in enumerate((0.0, 1.0, 0.5)):
            record(1, n=n, score=score)
        record(2)
        trackway.flush()
        with following(recorded.path, first, export_only=["best"]) as work:
            first.away = True
            work.step()
            assert counts(recorded.path) == (0, 4, 4, 2)
        for n, score in enumerate((9.0, 5.0, 0.0)):
            attach(f"1/0/{n}", rewards={"reward": score})
        trackway.flush()
        with following(recorded.path, second, export_only=["worst"]) as work:
            work.step()
            assert second.keys == ["1/0/1"]
            assert counts(recorded.path) == (3, 2, 6, 2)
        # Also where no choice is made any more.
        attach("1/0/0", trained_step=2)
        attach("1/0/1", trained_step=2)
        trackway.flush()
        with following(recorded.path, second) as work:
            assert work.step()
            assert second.keys == ["1/0/1", "1/0/1", "2/0/0"]
            assert counts(recorded.path) == (6, 0, 7, 2)


def test_what_was_sent_before_there_were_rules_stays_and_is_brought_up_to_date() -> None:
    place = Place()
    with recording() as recorded:
        record(1)
        trackway.flush()
        with following(recorded.path, place) as work:
            assert work.step()
        attach("1/0/0", rewards={"judge": 1.0})
        record(2)
        trackway.flush()
        with following(recorded.path, place, export_only=["errors"]) as work:
            assert work.step(patient=False)
        assert place.keys == ["1/0/0", "1/0/0"]
        assert counts(recorded.path) == (3, 0, 2, 1)


def test_what_ends_after_its_step_was_decided_gets_what_is_left_of_the_budget() -> None:
    place, text = Place(), "x" * 3_000
    with recording() as recorded, following(recorded.path, place, max_bytes_per_step=25_000) as work:
        for sample in range(2):
            record(1, sample, text=text)
        record(2)
        trackway.flush()
        work.step()
        assert sorted(place.keys) == ["1/0/0", "1/1/0"]
        for sample in range(2, 6):
            record(1, sample, text=text)
        record(3)
        trackway.flush()
        work.step()
        late = [key for key in place.keys if key[0] == "1"][2:]
        assert len(late) == 1
        assert counts(recorded.path)[3] == 3
        record(2, 1, text=text)  # a budget of its own
        record(3, 1)
        trackway.flush()
        work.step()
        assert "2/1/0" in place.keys


def test_groups_are_judged_with_those_of_them_that_were_sent_before() -> None:
    place = Place()
    with recording() as recorded, following(recorded.path, place, export_only=["best"]) as work:
        record(1, n=0, score=0.0)
        record(1, n=1, score=1.0)
        record(2)
        trackway.flush()
        work.step()
        record(1, n=2, score=0.5)
        record(1, n=3, score=2.0)
        record(2, 1)
        trackway.flush()
        work.step()
        assert place.keys == ["1/0/1", "1/0/3"]
        assert counts(recorded.path) == (4, 4, 4, 2)


# --- bytes --------------------------------------------------------------------------------------------------


def sent_bytes(store: Path) -> dict[str, int]:
    opened = open_store(store)
    found = {name: place.sent_bytes for name, place in opened.status().destinations.items()}
    opened.close()
    return found


def size(spans: Sequence[ReadableSpan]) -> int:
    return sum(
        len(name.encode()) + (len(value.encode()) if isinstance(value, str) else 8)
        for span in spans
        for name, value in [*(span.attributes or {}).items(), ("", span.name)]
    )


def test_bytes_are_counted_as_they_are_sent_and_again_when_sent_again() -> None:
    place = Place()
    with recording() as recorded, following(recorded.path, place) as work:
        record(1, text="größer " * 1_000)
        trackway.flush()
        work.step()
        once = sent_bytes(recorded.path)["place"]
        assert 2 * 9_000 < size(place.spans) - 8 * len(place.spans) <= once < 1.1 * size(place.spans)
        attach("1/0/0", trained_step=2)
        trackway.flush()
        place.away = True
        work.step(patient=False)
        assert sent_bytes(recorded.path)["place"] == once
        place.away = False
        work.step(patient=False)
        assert 2 * once < sent_bytes(recorded.path)["place"] < 2.1 * once
    with recording() as recorded, following(recorded.path, place) as work:
        assert work.step()
        assert sent_bytes(recorded.path) == {"place": 0}


class Counting(Place):
    """Knows what it sends, which is more than was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = 0
        self.measured = 0

    def export_trajectories(self, trajectories: Sequence[Any]) -> dict[str, str]:
        for each in trajectories:
            self.sent_bytes += 5_000
            self.spans += map(destinations.readable, each.spans)
        return {}

    def size_of(self, trajectory: Any) -> int:
        self.measured += 1
        if trajectory.key.sample_index == 0:
            raise RuntimeError("cannot tell")
        return 5_000


def test_an_exporter_may_say_itself_what_it_sends_and_only_what_may_fit_is_measured() -> None:
    place = Counting()
    with recording() as recorded, following(recorded.path, place, max_bytes_per_step=100_000) as work:
        for sample in range(200):
            record(1, sample)
        trackway.flush()
        assert work.step(patient=False)
        assert 20 <= len(place.keys) <= 21  # the one whose size it cannot tell is smaller
        assert sent_bytes(recorded.path)["place"] == 5_000 * len(place.keys)
        assert place.measured == 50
        trackway.attach(place.keys[0], trained_step=2)
        trackway.flush()
        assert work.step()
        assert place.measured == 50


def conversation(step: int, sample: int, n: int, turns: int, score: float) -> None:
    """Each turn is shown all that was said before, so that a trace is far larger than its journal."""

    @llm_trace
    def generate(messages: list[dict[str, str]]) -> dict[str, str]:
        return {"role": "assistant", "content": f"{step} {sample} {n} " + "answer " * 100}

    with trajectory(step=step, sample_index=sample, rollout_n=n):
        messages = [{"role": "user", "content": "question " * 20}]
        for _ in range(turns):
            messages = [*messages, generate(messages), {"role": "user", "content": "and then? " * 20}]
        reward("reward", score)


def in_mlflow(database: Path, project: str) -> dict[str, tuple[int, int]]:
    """Give the traces in a database of MLflow by step, and the bytes of their spans as it keeps them."""
    query = """
        SELECT tags.value, count(DISTINCT spans.trace_id), sum(length(CAST(content AS BLOB)))
        FROM spans JOIN trace_tags AS tags ON tags.request_id = spans.trace_id AND tags.key = 'step'
        JOIN experiments AS e ON e.experiment_id = spans.experiment_id AND e.name = ?
        GROUP BY tags.value
    """
    db = sqlite3.connect(database)
    found = {step: (traces, size) for step, traces, size in db.execute(query, (project,))}
    db.close()
    return found


@pytest.mark.slow
def test_what_mlflow_gets_of_a_step_stays_within_the_budget_though_it_is_more_than_was_recorded() -> None:
    pytest.importorskip("mlflow")
    from trackway.trace.exporters.mlflow import MlflowExporter

    budget = 300_000
    with recording(project="p") as recorded:
        exporter = MlflowExporter(load_config(store=recorded.path, project="p", environ={}))
        with following(recorded.path, exporter, max_bytes_per_step=budget, project="p") as work:
            sent = []
            for step in (1, 2, 3):
                for sample in range(8):
                    for n in range(4):
                        conversation(step, sample, n, 1 + 2 * n, float(n % 2))
                trackway.flush()
                work.step()
                sent.append(exporter.sent_bytes - sum(sent))
            trackway.shutdown()
            assert work.step()
            sent.append(exporter.sent_bytes - sum(sent))
        exporter.shutdown()
        opened = open_store(recorded.path)
        status = opened.status()
        opened.close()
        assert_adds_up(status)
        assert status.destinations["place"].sent_bytes == exporter.sent_bytes
        assert status.pending == 0
        assert sent[0] == 0
        assert all(0.7 * budget < each <= budget for each in sent[1:])
        kept = in_mlflow(recorded.path / "mlflow.db", "p")
        assert kept.keys() == {"1", "2", "3"}
        recorded_for_each = status.bytes / status.trajectories
        for traces, stored in kept.values():
            assert 4 <= traces < 32
            assert stored < 1.3 * budget  # MLflow adds ids and quotes
            assert stored / traces > 1.5 * recorded_for_each


def conversations() -> list[Trajectory]:
    with recording(project="p") as recorded:
        for n in range(6):
            conversation(1, 0, n, 1 + n, 1.0)
        return recorded.trajectories()


def assert_told_rightly(exporter: Any, trajectories: Sequence[Trajectory], came: int) -> None:
    """Compare what an exporter says before and after with the bytes that came at the other end."""
    expected = sum(map(exporter.size_of, trajectories))
    assert 0.9 * expected < exporter.sent_bytes <= expected
    assert exporter.sent_bytes <= came < 1.3 * exporter.sent_bytes


@pytest.mark.slow
def test_what_weave_is_sent_is_as_much_as_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("weave")
    from trackway.trace.exporters.weave import WeaveExporter

    from .weave_server import serving

    trajectories = conversations()
    with serving(tmp_path / "server") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        weave = WeaveExporter(load_config(store=tmp_path, project="maths", environ={}))
        assert weave.export_trajectories(trajectories) == {}
        weave.shutdown()
        sizes = [size for _, path, size in server.requests if path.endswith("calls/complete")]
    assert_told_rightly(weave, trajectories, sum(sizes))


@pytest.mark.slow
def test_what_an_otlp_receiver_is_sent_is_as_much_as_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from trackway.trace.exporters.otlp import OtlpExporter

    from .otlp_receiver import http_receiver

    trajectories = conversations()
    with http_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.address)
        otlp = OtlpExporter(load_config(environ={}))
        assert otlp.export_trajectories(trajectories) == {}
        otlp.shutdown()
        came = sum(request.size for request in receiver.requests)
    assert_told_rightly(otlp, trajectories, came)


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "only", "ratio", "most"),
    [
        ({"export_only": ["errors", "best"]}, ("errors", "best"), None, None),
        ({"export_only": "errors, best"}, ("errors", "best"), None, None),
        ({"export_only": {"MLflow": "errors", "weave": None}}, {"mlflow": ("errors",)}, None, None),
        ({"export_only": {"weave": None}}, None, None, None),
        (["export_only=[errors,best]", "export_ratio=0.5"], ("errors", "best"), 0.5, None),
        (["+export_only.mlflow=[errors]"], {"mlflow": ("errors",)}, None, None),
        (["max_bytes_per_step={mlflow: 50000000}"], None, None, {"mlflow": 50_000_000}),
        (
            ["actor_rollout_ref.rollout.trace.max_bytes_per_step.weave=50000"],
            None,
            None,
            {"weave": 50_000},
        ),
        ({"trainer": {}, "export_ratio": {"mlflow": 0.25}}, None, {"mlflow": 0.25}, None),
        ({"trainer": {}, "store": {"of": "somebody else"}, "export_ratio": 0.5}, None, 0.5, None),
    ],
)
def test_settings_are_one_value_for_all_or_one_for_each_backend(
    given: Any, only: Any, ratio: Any, most: Any
) -> None:
    config = load_config(given, environ={})
    assert (config.export_only, config.export_ratio, config.max_bytes_per_step) == (only, ratio, most)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_settings_come_from_variables_and_files(tmp_path: Path) -> None:
    environ = {
        "TRACKWAY_EXPORT_ONLY": "errors,varied",
        "TRACKWAY_MAX_BYTES_PER_STEP": "{mlflow: 50_000, weave: 7000}",
        "TRACKWAY_EXPORT_RATIO": "none",
    }
    config = load_config(environ=environ)
    assert config.export_only == ("errors", "varied")
    assert config.max_bytes_per_step == {"mlflow": 50_000, "weave": 7_000}
    assert config.export_ratio is None
    (tmp_path / "it.yaml").write_text("export_only:\n  weave: [errors, truncated]\nexport_ratio: 0.1\n")
    config = load_config(tmp_path / "it.yaml", environ={})
    assert (config.export_only, config.export_ratio) == ({"weave": ("errors", "truncated")}, 0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"export_only": ["erors"]}, r"export_only=\['erors'\] .* did you mean 'errors'"),
        ({"export_only": []}, "errors, truncated, best, worst, varied"),
        ({"export_only": 5}, "export_only=5 is not allowed"),
        ({"export_only": {"mlfow": ["errors"]}}, "'mlfow' is none; did you mean 'mlflow'"),
        ({"export_only": {"mlflow": ["best", "x"]}}, r"for mlflow; there it is \['best', 'x'\]"),
        ({"max_bytes_per_step": "5MB"}, "a whole number of bytes, at least 4,096"),
        ({"max_bytes_per_step": {"mlflow": 0}}, "at least 4,096: a trajectory must fit in.* for mlflow"),
        ({"export_ratio": 1.5}, "a number from 0 to 1"),
        (["export_onli.mlflow=errors"], "did you mean 'export_only.mlflow'"),
        (["export_only.mlfow=errors"], "did you mean 'mlflow'"),
        ({"export_ony": "errors"}, "did you mean 'export_only'"),
    ],
)
def test_a_wrong_setting_says_what_would_be_right(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(given, environ={})


def test_while_others_record_what_they_want_sent_where_stays(tmp_path: Path) -> None:
    code = """
        trackway.configure(store="store", backend="mlflow", sync="off", export_only=["errors"])
        print("ready", flush=True)
        input()
    """
    with start(tmp_path, code) as first:
        line(first)
        done = run(
            tmp_path,
            'trackway.configure(store="store", backend=["mlflow", "otlp"], sync="off", export_ratio=0.5,\n'
            '                   export_only="best", max_bytes_per_step={"otlp": 9000})',
        )
        assert "export_only=('errors',) for mlflow: ('best',) is ignored" in done.stderr
        config = sync.load_settings(tmp_path / "store")
        assert config.export_only == {"mlflow": ("errors",), "otlp": ("best",)}
        assert config.export_ratio == {"otlp": 0.5}
        assert config.max_bytes_per_step == {"otlp": 9_000}
        run(tmp_path, 'trackway.configure(store="store", sync="off")')
        assert sync.load_settings(tmp_path / "store").export_only == config.export_only
        first.communicate("\n")


# --- what it costs ------------------------------------------------------------------------------------------


def test_where_nothing_is_set_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("nobody has to choose")

    for name in ("keys", "mark", "unfinished", "has_later", "of"):
        monkeypatch.setattr(Members, name, never)
    monkeypatch.setattr(Store, "begun", never)
    place, asked = Place(), Counter[str]()
    with recording() as recorded, following(recorded.path, place) as work:
        assert work._cursors._db is not None
        work._cursors._db.set_trace_callback(lambda sql: asked.update([sql.split("VALUES")[0][:60]]))
        for sample in range(120):
            record(1, sample)
        trackway.flush()
        assert work.step()
        assert len(place.keys) == 120
    per_trajectory = {sql for sql, times in asked.items() if times >= 100}
    assert per_trajectory == {"INSERT OR REPLACE INTO exported "}
    assert sum(asked.values()) - 120 < 40


def test_a_step_of_many_trajectories_is_decided_with_few_questions() -> None:
    place = Place()
    with recording() as recorded, following(recorded.path, place, export_only=["errors"]) as work:
        for sample in range(1_000):
            record(1, sample)
        trackway.flush()
        work.step()
        asked: list[str] = []
        work._store._index._db.set_trace_callback(asked.append)
        work.step()
        waiting, asked[:] = list(asked), []
        record(2)
        trackway.flush()
        work._store._index.refresh()
        asked.clear()
        work.step()
        work._store._index._db.set_trace_callback(None)
        assert place.keys == []
        assert counts(recorded.path) == (0, 2, 2_000, 1_000)
    assert max(len(waiting), len(asked)) < 40


# --- cursors ------------------------------------------------------------------------------------------------


def test_cursors_of_an_earlier_version_are_read_and_go_on() -> None:
    with recording() as recorded:
        record(1)
        trackway.flush()
        with following(recorded.path, Place()) as work:
            work.step()
        db = sqlite3.connect(recorded.path / "sync.sqlite")
        for table in ("chosen", "left_out", "sent"):
            db.execute(f"DROP TABLE {table}")
        db.commit()
        db.close()
        assert counts(recorded.path) == (2, 0, 0, 0)
        cursors = Cursors(recorded.path, read_only=True)
        assert len(cursors.delivered("place")) == 1
        cursors.close()
        record(2)
        trackway.flush()
        place = Place()
        with following(recorded.path, place, export_only=["errors"]) as work:
            assert not work.step()
        with following(recorded.path, place) as work:
            assert work.step()
        assert place.keys == ["2/0/0"]
        assert counts(recorded.path) == (4, 0, 0, 0)


# --- all of it, in processes of their own -------------------------------------------------------------------

ELSEWHERE = """
    import json, os, time
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Exporter(SpanExporter):
        def export(self, spans):
            if os.path.exists("hang"):
                open("hangs", "w").close()
                time.sleep(600)
            with open("elsewhere.jsonl", "a") as file:
                for span in spans:
                    facts = dict(span.attributes)
                    size = len(span.name) + sum(len(str(name) + str(value)) for name, value in facts.items())
                    line = f"{span.context.span_id:016x}", span.parent is None, size, facts["trackway.step"]
                    print(json.dumps(line), file=file)
            return SpanExportResult.SUCCESS
"""

TRAINING = """
    import random

    @trackway.llm_trace
    def generate(messages):
        return {"role": "assistant", "content": "word " * 300, "finish_reason": "stop"}

    @trackway.tool_trace
    def search(query):
        return "found " * 200

    def roll(step, sample, n):
        chance = random.Random(f"{step} {sample} {n}")
        with trajectory(step=step, sample_index=sample, rollout_n=n):
            messages = [{"role": "user", "content": "question " * 50}]
            for turn in range(chance.choice([2, 3, 4])):
                messages.append(generate(list(messages)))
                messages.append({"role": "tool", "content": search(str(turn))})
            if chance.random() < 0.02:
                raise ValueError("broken")
            # Most groups are all right or all wrong, as they are in a training.
            trackway.reward("reward", float(chance.random() < [0, 0, 0, 0.5, 1, 1, 1, 1][sample % 8]))

    def train(steps, samples):
        for step in steps:
            for sample in samples:
                for n in range(8):
                    try:
                        roll(step, sample, n)
                    except ValueError:
                        pass
"""


def elsewhere(folder: Path) -> tuple[Counter[str], Counter[int], Counter[int]]:
    """Give what the third-party exporter got: how often each span; by step its rollouts and its bytes."""
    spans, rollouts, sizes = Counter[str](), Counter[int](), Counter[int]()
    for text in (folder / "elsewhere.jsonl").read_text().splitlines():
        span_id, root, size, step = json.loads(text)
        spans[span_id] += 1
        rollouts[step] += root
        sizes[step] += size
    return spans, rollouts, sizes


@pytest.mark.slow
def test_two_destinations_get_what_each_is_to_get_also_when_their_follower_is_killed(tmp_path: Path) -> None:
    environment = install_exporter(tmp_path, ELSEWHERE)
    code = """
    trackway.configure(store="store", backend=["mlflow", "elsewhere"], project="p",
                       export_only={"mlflow": ["errors", "best", "worst"]},
                       max_bytes_per_step={"mlflow": 200_000, "elsewhere": 300_000})
    train((1, 2), range(int(os.environ["WORKER"]), 16, 2))
    print("recorded", flush=True)
    input()
    status = trackway.flush(150)
    print(status.pending, status.left_out > 0, flush=True)
    input()
    """
    store = tmp_path / "store"
    (tmp_path / "hang").touch()
    workers = [start(tmp_path, TRAINING + code, **environment, WORKER=str(number)) for number in (0, 1)]
    for worker in workers:
        assert line(worker) == "recorded"
    # Killed in the middle: one destination has its part of the first step, the other one has nothing yet.
    wait_until((tmp_path / "hangs").exists)
    opened = open_store(store)

    def left_out() -> dict[str, int]:
        return {name: place.left_out for name, place in opened.status().destinations.items()}

    wait_until(lambda: min(left_out().values()) > 0)  # each decides for itself
    status = opened.status()
    assert_adds_up(status)
    assert status.destinations["elsewhere"].exported == 0
    before = left_out()
    for pid in followers(store):
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "hang").unlink()
    assert order(workers[0], "") == "0 True"
    for worker in workers:
        worker.communicate("\n\n", timeout=200)
    wait_until(lambda: not sync.is_followed(store))
    status = opened.status()
    assert_adds_up(status)
    assert (status.pending, status.dropped, status.trajectories) == (0, 0, 256)
    assert all(place.left_out > before[name] for name, place in status.destinations.items())

    spans, rollouts, sizes = elsewhere(tmp_path)
    place = status.destinations["elsewhere"]
    assert set(spans.values()) == {1}
    assert len(spans) == place.exported
    assert rollouts.total() == 256 - place.trajectories_left_out
    for step in (1, 2):
        assert 0.5 * 300_000 < sizes[step] <= 300_000
    assert 0.9 * place.sent_bytes < sizes.total() <= 1.1 * place.sent_bytes

    place = status.destinations["mlflow"]
    kept = in_mlflow(store / "mlflow.db", "p")
    found = {(step, each.sample_index) for step in (1, 2) for each in opened.query(step=step, status="error")}
    opened.close()
    assert len(found) > 0
    assert sum(traces for traces, _ in kept.values()) == 256 - place.trajectories_left_out
    assert 0 < place.sent_bytes <= 2 * 200_000


@pytest.mark.slow
def test_sync_sends_what_is_chosen_and_leaves_nothing_pending(tmp_path: Path, cli: Cli) -> None:
    environment = install_exporter(tmp_path, ELSEWHERE)
    code = """
    only = ["errors", "best", "worst"]
    trackway.configure(store="store", backend="elsewhere", sync="off", export_only=only)
    train((1,), range(16))
    print("recorded", flush=True)
    input()
    """
    path = str(tmp_path / "store")
    with start(tmp_path, TRAINING + code, **environment) as worker:
        assert line(worker) == "recorded"  # and goes on: a step that is not over
        command = [sys.executable, "-m", "trackway", "sync", "--store", path]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "every destination has everything that was chosen for it\n"
        facts = json.loads(cli("status", "--json", "--store", path).out)
        shown = cli("status", "--store", path).out
        worker.communicate("\n")
    place = facts["destinations"]["elsewhere"]
    spans, rollouts, sizes = elsewhere(tmp_path)
    assert (facts["pending"], place["pending"], place["lag"]) == (0, 0, 0.0)
    assert facts["recorded"] == place["exported"] + place["left_out"] == facts["exported"] + facts["left_out"]
    assert len(spans) == place["exported"]
    assert place["trajectories_left_out"] == 128 - rollouts.total()
    assert 0.9 * place["sent_bytes"] < sizes.total() < 1.1 * place["sent_bytes"]
    assert f" + 0 pending + {facts['left_out']:,} left out + 0 dropped\n" in shown
    assert re.search(
        rf"\nelsewhere +{place['exported']:,} +0 +{place['left_out']:,} +0 +[0-9.]+ [kM]B +-\n", shown
    )


def test_flush_in_the_same_process_leaves_nothing_pending_of_a_step_that_goes_on(tmp_path: Path) -> None:
    environment = install_exporter(tmp_path, ELSEWHERE)
    code = """
    trackway.configure(store="store", backend="elsewhere", sync="inline", max_bytes_per_step=100_000)
    train((1,), range(2))
    status = trackway.flush(60)
    print(status.pending, status.exported > 0, status.left_out > 0)
    """
    done = run(tmp_path, TRAINING + code, **environment)
    assert done.stdout == "0 True True\n", done.stderr
    _, rollouts, sizes = elsewhere(tmp_path)
    assert 4 < rollouts[1] < 16
    assert sizes[1] <= 100_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"export_only": ["errors", "best", "worst"]}, 0.1),
        ({"export_only": ["errors", "varied"]}, 0.2),
        ({"export_only": ["errors", "best", "worst"], "export_ratio": 0.1}, 0.2),
        ({"max_bytes_per_step": 500_000}, 0.2),
        ({"export_ratio": 0.5}, 0.75),
    ],
)
def test_of_a_realistic_mix_a_fifth_is_sent_or_less(
    mixed: Path, settings: dict[str, Any], most: float
) -> None:
    all_of_it, some = Place(), Place()
    (mixed / "sync.sqlite").unlink(missing_ok=True)
    with following(mixed, all_of_it) as work:
        assert work.step()
    everything = sent_bytes(mixed)["place"]
    (mixed / "sync.sqlite").unlink()
    with following(mixed, some, **settings) as work:
        assert work.step()
    assert 0 < sent_bytes(mixed)["place"] < most * everything
    exported, pending, left_out, trajectories = counts(mixed)
    assert pending == 0
    assert len(some.keys) + trajectories == len(all_of_it.keys) == 256
    assert (len(some.spans), len(some.spans) + left_out) == (exported, len(all_of_it.spans))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two steps of sixteen groups, of which two vary, and with some failures."""
    folder = tmp_path_factory.mktemp("mixed")
    done = run(
        folder, TRAINING + '    trackway.configure(store="store", sync="off"); train((1, 2), range(16))'
    )
    assert done.returncode == 0, done.stderr
    return folder / "store"
