"""MLflow read back: the trajectories that the store has, their lists, filters, and what others wrote."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trackway
from trackway.trace.config import TraceConfig
from trackway.trace.exporters import sync
from trackway.trace.exporters.mlflow import MlflowExporter
from trackway.trace.formats.mlflow import PAGE, MlflowTraces
from trackway.trace.model import Link, Span, Trajectory
from trackway.trace.store import Steps, Store, StoreError, TrajectoryNotFound

from .programs import Cli, run
from .servers import free_port, mlflow_server, postgres

pytest.importorskip("mlflow")
pytestmark = pytest.mark.slow  # every test here asks a database of MLflow

PROJECT = "reading"
BOUNDED = {"min_reward": 0.5, "max_reward": 9.0}
HOSTILE = "[red]x[/INST]\x1b[2J\u202e'\"%_\\"


def embedded(store: Path) -> str:
    return f"sqlite:///{store / 'mlflow.db'}"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, blank_mlflow: Path) -> Path:
    """A store with one of everything, and all of it in its MLflow."""
    path = tmp_path_factory.mktemp("from") / "store"
    path.mkdir()
    shutil.copy(blank_mlflow, path)
    settings: dict[str, Any] = {"store": path, "project": PROJECT, "backend": "mlflow", "sync": "inline"}
    trackway.configure(**settings, experiment="grpo")

    @trackway.llm_trace
    def generate(prompt_ids: list[int], messages: list[dict[str, str]]) -> dict[str, Any]:
        made = [len(prompt_ids), 8, 9]
        return {"response_ids": made, "response_logprobs": [-0.5, -0.25, -1.0], "text": f"{made} {HOSTILE}"}

    @trackway.tool_trace
    def divide(left: int, right: int) -> str:
        return f"{left / right} {HOSTILE}"

    @trackway.rollout_trace
    def agent(right: int) -> str:
        ids, messages = [1, 2], [{"role": "user", "content": "divide " + "long " * 200}]
        for _ in range(2):
            answer = generate(ids, messages)
            ids = [*ids, *answer["response_ids"], 50, 51]
            messages = [*messages, {"role": "assistant", "content": answer["text"]}]
            result = divide(1, right)
            messages = [*messages, {"role": "tool", "content": result}]
        return "done"

    def roll(step: int, sample: int | str, n: int = 0, right: int = 2, **more: Any) -> None:
        rewards = more.pop("rewards", {"correct": 1.0})
        with trackway.trajectory(step=step, sample_index=sample, rollout_n=n, policy_version=step, **more):
            for name, value in rewards.items():
                trackway.reward(name, value, explanation="as the rule says")
            trackway.annotate(note=HOSTILE, numbers=[1, 2], digits="12", word="true")
            agent(right)

    roll(1, 17)
    roll(1, "17", 1)
    roll(1, HOSTILE, 0, rewards={"style": "good", "correct": 0.5, "format": 0.25})
    roll(2, 17, rewards={"reward": float("nan")})
    roll(2, 17, 1, validate=True, rewards={"correct": -1.0, "infinite": float("inf")})
    roll(2, "x" * 1000, rewards={})
    with pytest.raises(ZeroDivisionError):
        roll(10, 1, right=0)
    with contextlib.suppress(asyncio.CancelledError), trackway.trajectory(step=10, sample_index=2):
        raise asyncio.CancelledError("enough")
    with pytest.raises(ZeroDivisionError):
        roll(11, 5, right=0)
    roll(11, 5)
    with trackway.trajectory(step=12, sample_index=1):
        agent(3)
    trackway.attach(
        trackway.TrajectoryKey(12, 1),
        rewards={"judge": 0.75, "verdict": "fine"},
        advantages=[0.5, -0.5, 0.25, 0.0, 0.0, 1.0, 1.0, 1.0],
        returns=2.0,
        trained_step=13,
    )
    with trackway.trajectory(step=12, sample_index=2):
        agent(4)
    trackway.attach(trackway.TrajectoryKey(12, 2), discarded="stale")
    divide(1, 4)
    trackway.configure(**settings, experiment="another")
    roll(100, 1)
    trackway.flush()
    trackway.shutdown()
    return path


@pytest.fixture
def store(recorded: Path) -> Iterator[Store]:
    opened = Store(recorded)
    yield opened
    opened.close()


@pytest.fixture
def traces(recorded: Path) -> MlflowTraces:
    return MlflowTraces(embedded(recorded), PROJECT)


def own(trajectory: Trajectory) -> Trajectory:
    """Leave out the spans of ``attach``: MLflow has what they said, and not when and where it was said."""
    spans = tuple(span for span in trajectory.spans if span.kind != "attach")
    return replace(trajectory, spans=spans)


def same_text(value: Any) -> str:
    """Write a value so that NaN is itself."""
    return repr(value)


# What comes back


def test_every_trajectory_comes_back_as_the_store_has_it(store: Store, traces: MlflowTraces) -> None:
    ids = [summary.trace_id for summary in store.query(all_attempts=True)]
    assert len(ids) == 14
    for trace_id in ids:
        expected, found = own(store.load(trace_id)), own(traces.load(trace_id))
        for name in Trajectory.__dataclass_fields__:
            if name != "spans":
                assert same_text(getattr(found, name)) == same_text(getattr(expected, name)), name
        for span, theirs in zip(expected.spans, found.spans, strict=True):
            for name in Span.__dataclass_fields__:
                ours, other = getattr(span, name), getattr(theirs, name)
                if isinstance(ours, dict):
                    ours, other = sorted(ours.items()), sorted(other.items())
                assert same_text(other) == same_text(ours), (span.name, name)


def test_types_and_numbers_are_kept(traces: MlflowTraces) -> None:
    number, text = traces.load("1/17/0"), traces.load("1/%317/1")
    assert (number.key.sample_index, text.key.sample_index) == (17, "17")  # type: ignore[union-attr]
    assert number.turns[1].token_ids == (2, 8, 9)
    assert number.turns[1].logprobs == (-0.5, -0.25, -1.0)
    assert number.annotations == {"note": HOSTILE, "numbers": [1, 2], "digits": "12", "word": "true"}
    attached = traces.load("12/1/0")
    assert attached.rewards == {"judge": 0.75, "verdict": "fine"}
    assert attached.trained_step == 13
    assert attached.turns[1].advantages == (0.5, -0.5, 0.25)
    assert traces.load("12/2/0").discarded == "stale"
    assert traces.load("2/17/0").notes == ()


def test_lists_say_what_the_store_says(store: Store, traces: MlflowTraces) -> None:
    expected, found = list(store.query(all_attempts=True)), list(traces.query(all_attempts=True))
    assert [same_text(line) for line in found] == [same_text(line) for line in expected]


@pytest.mark.parametrize(
    "asked",
    [
        {"step": 1},
        {"step": Steps.parse(">=10")},
        {"step": Steps.parse("2,12..99")},
        {"step": Steps.parse("10..11"), "all_attempts": True},
        {"sample": 1},
        {"sample": "17"},
        {"sample": HOSTILE},
        pytest.param({"sample": "x" * 1000}, id="a long sample"),
        {"rollout": 1},
        {"rollout": 0},
        {"validate": True},
        {"validate": False},
        {"status": "ok"},
        {"status": "error"},
        {"status": "error", "all_attempts": True},
        {"status": "cancelled"},
        {"status": "running"},
        {"experiment": "another"},
        {"min_reward": 0.5},
        {"max_reward": 0.75},
        {"min_reward": -1.0, "max_reward": 0.8},
        {"newest": True},
        {"newest": True, "limit": 2},
        {"limit": 3},
        {"step": 99},
    ],
    ids=str,
)
def test_filters_find_what_they_find_in_the_store(
    store: Store, traces: MlflowTraces, asked: dict[str, Any]
) -> None:
    bounded = "min_reward" in asked or "max_reward" in asked
    expected = [line.trace_id for line in store.query(**asked) if not (bounded and line.reward == math.inf)]
    assert [line.trace_id for line in traces.query(**asked)] == expected
    assert expected or asked in ({"step": 99}, {"status": "running"})


def test_a_list_reads_no_spans(traces: MlflowTraces, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("spans were read")

    for name in ("get_trace", "batch_get_traces"):
        monkeypatch.setattr(type(traces.mlflow), name, read)
    assert len(list(traces.query())) == 13


def test_names_find_what_they_find_in_the_store(store: Store, traces: MlflowTraces) -> None:
    for name in (
        "11/5/0",
        "11/5/0@0",
        "11/5/0@1",
        "val/2/17/1",
        "1/17/1",
        str(store.load("2/17/0").trace_id),
    ):
        assert traces.load(name).trace_id == store.load(name).trace_id
    trace_id = store.load("1/17/0").trace_id
    assert traces.load(trace_id[:10]).trace_id == traces.load(f"tr-{trace_id}").trace_id == trace_id


def test_what_is_not_there_is_said_with_what_is(traces: MlflowTraces) -> None:
    with pytest.raises(TrajectoryNotFound, match=r"no trajectory 1/17/7 in .*; did you mean .*1/17/0"):
        traces.load("1/17/7")
    with pytest.raises(TrajectoryNotFound, match=r"no trace in .* has an id that begins with 123456"):
        traces.load("123456")
    with pytest.raises(TrajectoryNotFound, match="is not a trajectory key"):
        traces.load("seventeen")


def test_what_mlflow_lacks_is_said(recorded: Path, tmp_path: Path, blank_mlflow: Path) -> None:
    shutil.copy(blank_mlflow, tmp_path)
    exporter = MlflowExporter(TraceConfig(store=tmp_path, project=PROJECT))
    opened = Store(recorded)
    whole = opened.load("1/17/0")
    opened.close()
    long = replace(whole.spans[2], attributes={**whole.spans[2].attributes, "trackway.x": "y" * 4_100_000})
    spans = (*whole.spans[:2], long, *whole.spans[3:])
    assert exporter.export_trajectories([replace(whole, spans=spans)]) == {}
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database, database:
        database.execute("DELETE FROM spans WHERE span_id = ?", (whole.spans[-1].span_id,))
    found = MlflowTraces(embedded(tmp_path)).load("1/17/0")
    assert found.notes == (
        f"MLflow has {len(spans) - 1} of {len(spans)} spans; the Trackway store has all of them",
        "1 value is cut in MLflow; the Trackway store has the whole",
    )


def test_rollouts_that_died_come_back_as_such(tmp_path: Path, blank_mlflow: Path) -> None:
    run(
        tmp_path,
        """
        trackway.configure(store="store", project="reading", backend="mlflow", sync="off")
        with trajectory(step=1, sample_index=1):
            call(1)
            trackway.flush()
            os._exit(1)
        """,
    )
    run(
        tmp_path,
        """
        trackway.configure(store="store", project="reading", backend="mlflow", sync="off")
        @trackway.tool_trace
        def hang():
            store = trackway.open_store("store")
            while not any(call.name == "hang" for found in store.in_flight() for call in found.doing):
                time.sleep(0.05)
            os._exit(1)
        with trajectory(step=1, sample_index=2):
            call(2)
            hang()
        """,
    )
    path = tmp_path / "store"
    shutil.copy(blank_mlflow, path)
    assert sync.run(path, say=lambda _: None) == 0
    opened, traces = Store(path), MlflowTraces(embedded(path))
    for name in ("1/1/0", "1/2/0"):
        expected, found = opened.load(name), traces.load(name)
        assert expected.status == found.status == "died"
        for part in ("key", "error", "end_ns", "turns", "errors", "notes"):
            assert getattr(found, part) == getattr(expected, part), part
        states = [(span.name, span.status, span.end_ns) for span in expected.spans]
        assert [(span.name, span.status, span.end_ns) for span in found.spans] == states
    # When it died is known only to within its last call, and the index does not guess.
    lines = [replace(line, end_ns=None) for line in traces.query()]
    assert lines == [replace(line, end_ns=None) for line in opened.query()]
    opened.close()


def test_what_is_too_long_for_a_list_costs_the_list_no_counts(tmp_path: Path, blank_mlflow: Path) -> None:
    shutil.copy(blank_mlflow, tmp_path)
    exporter = MlflowExporter(TraceConfig(store=tmp_path, project=PROJECT))
    plain = _small(1, 1, 1)
    rewards = {f"a reward with a long name {number}": float(number) for number in range(200)}
    key = replace(plain.key, sample_index="x" * 5000)  # type: ignore[type-var]
    long = replace(plain, key=key, error="e" * 9000, status="error", rewards=rewards)
    assert exporter.export_trajectories([long]) == {}
    traces = MlflowTraces(embedded(tmp_path))
    (line,) = traces.query()
    assert (line.spans, line.start_ns, line.end_ns) == (1, plain.start_ns, plain.end_ns)
    assert (line.step, line.status, line.reward) == (1, "error", sum(rewards.values()))
    (info,) = traces.infos()
    assert all(len(value) <= 250 for value in info.trace_metadata.values())
    # A shorter one later leaves pieces of the longer one behind.
    assert exporter.export_trajectories([plain]) == {}
    (line,) = traces.query()
    assert (line.key, line.spans, line.error, line.status) == (plain.key, 1, None, "ok")


def test_links_come_back(tmp_path: Path, blank_mlflow: Path) -> None:
    shutil.copy(blank_mlflow, tmp_path)
    plain = _small(1, 1, 1)
    links = (Link("a" * 32, "b" * 16, {"why": "retry", "n": 2}),)
    linked = replace(plain, spans=(replace(plain.spans[0], links=links, side="server"),))
    exporter = MlflowExporter(TraceConfig(store=tmp_path, project=PROJECT))
    assert exporter.export_trajectories([linked]) == {}
    (span,) = MlflowTraces(embedded(tmp_path)).load("1/1/1").spans
    assert (span.links, span.side) == (links, "server")


# Pages, and what others wrote


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, blank_mlflow: Path) -> Path:
    """1,200 small rollouts: steps 1 to 12, samples 0 to 24, four each; beside them others' traces."""
    from mlflow.entities import Feedback
    from mlflow.tracing.client import TracingClient

    path = tmp_path_factory.mktemp("many")
    shutil.copy(blank_mlflow, path)
    exporter = MlflowExporter(TraceConfig(store=path, project=PROJECT))
    rollouts = [_small(step, sample, n) for step in range(1, 13) for sample in range(25) for n in range(4)]
    assert exporter.export_trajectories(rollouts) == {}
    client = TracingClient(tracking_uri=embedded(path))
    experiment = client.store.get_experiment_by_name(PROJECT).experiment_id
    _theirs(client.store, experiment, "a", {"step": "9", "sample_index": "3", "rollout_n": "7"})
    _theirs(client.store, experiment, "b", {"step": "not a step", "sample_index": "q", "validate": "maybe"})
    _theirs(client.store, experiment, "c", {})
    feedback = Feedback(name="reward", value=0.5)
    feedback.trace_id = f"tr-{'a' * 32}"
    client.store.create_assessment(feedback)
    return path


def _small(step: int, sample: int, n: int) -> Trajectory:
    from trackway.trace import semconv
    from trackway.trace.model import TrajectoryKey

    number = (step * 1000 + sample) * 10 + n + 1
    tags = {semconv.STEP: step, semconv.SAMPLE_INDEX: sample, semconv.ROLLOUT_N: n}
    start = 1_750_000_000_000_000_000 + number * 1_000_000
    span = Span(
        "trajectory", "trajectory", f"{number:032x}", f"{number:016x}", None, start, start + 5, "ok",
        attributes={**tags, semconv.KIND: "trajectory"},
    )  # fmt: skip
    return Trajectory(
        key=TrajectoryKey(step, sample, n), trace_id=span.trace_id, status="ok", error=None, start_ns=start,
        end_ns=start + 5, spans=(span,), turns=(), rewards={}, annotations={}, policy_versions=(),
        experiment="grpo",
    )  # fmt: skip


def _theirs(store: Any, experiment: str, digit: str, tags: dict[str, str]) -> None:
    """Write a trace as another tracer does: its own names, nothing of Trackway's."""
    from mlflow.entities import Span as MlflowSpan
    from mlflow.entities import TraceInfo, TraceLocation, TraceState
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, Status, StatusCode

    trace_id, begun = int(digit * 32, 16), 1_760_000_000_000_000_000
    info = TraceInfo(
        trace_id=f"tr-{digit * 32}",
        trace_location=TraceLocation.from_experiment_id(experiment),
        request_time=begun // 1_000_000,
        execution_duration=30,
        state=TraceState.OK,
        tags=tags,
    )
    store.start_trace(info)
    question = {"messages": [{"role": "user", "content": f"why? {HOSTILE}"}]}
    answer = {"choices": [{"message": {"role": "assistant", "content": "because"}}]}
    spans = []
    for place, (name, kind, inputs, outputs) in enumerate(
        [
            ("AgentLoop.run", "AGENT", {"sample": 1}, "fine"),
            ("Server.generate", "CHAT_MODEL", question, answer),
            ("search", "TOOL", {"query": "why"}, {"hits": 3}),
        ]
    ):
        attributes = {
            "mlflow.traceRequestId": json.dumps(info.trace_id),
            "mlflow.spanType": json.dumps(kind),
            "mlflow.spanInputs": json.dumps(inputs),
            "mlflow.spanOutputs": json.dumps(outputs),
        }
        spans.append(
            MlflowSpan(
                ReadableSpan(
                    name=name,
                    context=SpanContext(trace_id, place + 1, is_remote=False),
                    parent=SpanContext(trace_id, 1, is_remote=False) if place else None,
                    attributes=attributes,
                    status=Status(StatusCode.OK),
                    start_time=begun + place,
                    end_time=begun + 30_000_000,
                )
            )
        )
    store.log_spans(experiment, spans)


def test_pages_are_put_together(store: Store, traces: MlflowTraces, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("trackway.trace.formats.mlflow.PAGE", 5)
    page = traces._page
    monkeypatch.setattr(traces, "_page", lambda text, token: asked.append(token) or page(text, token))
    found = list(traces.query(all_attempts=True))
    assert [line.trace_id for line in found] == [line.trace_id for line in store.query(all_attempts=True)]
    assert len(asked) == 3


def test_more_than_one_page_comes_back_whole(many: Path) -> None:
    traces = MlflowTraces(embedded(many))
    assert PAGE < 600
    assert len(list(traces.query())) == 1203
    ours = [line for line in traces.query(step=Steps.parse(">=9")) if line.spans]
    assert len(ours) == 400
    assert {line.step for line in ours} == {9, 10, 11, 12}
    assert len({line.trace_id for line in ours}) == 400
    assert {line.sample_index for line in traces.query(sample=1)} == {1}
    assert len(list(traces.query(sample=1))) == 48
    assert [line.step for line in traces.query(step=Steps.parse("1,12,3..4"), sample=2, rollout=0)] == [
        1,
        3,
        4,
        12,
    ]


def test_what_others_wrote_is_listed_and_shown_as_far_as_it_can_be_read(many: Path) -> None:
    traces = MlflowTraces(embedded(many))
    found = {line.trace_id[0]: line for line in traces.query(newest=True, limit=3)}
    assert found.keys() == {"a", "b", "c"}
    assert str(found["a"].key) == "9/3/7"
    assert (found["a"].reward, found["a"].status, found["a"].end_ns) == (
        0.5,
        "ok",
        found["a"].start_ns + 30_000_000,
    )
    assert str(found["b"].key) == "-/q/0"
    assert found["c"].key is None
    shown = traces.load("9/3/7")
    assert [turn.text for turn in shown.turns if turn.role == "user"] == [f"why? {HOSTILE}"]
    assert [turn.text for turn in shown.turns if turn.role == "assistant"] == ["because"]
    assert [(call.name, call.arguments) for call in shown.tool_calls] == [("search", {"query": "why"})]
    assert shown.reward == 0.5
    assert traces.load("c" * 32).key is None


# The command


def test_ls_and_show_print_the_same_from_mlflow(recorded: Path, cli: Cli) -> None:
    place = ["--store", str(recorded)]
    for command in (["ls"], ["ls", "--step", ">=2", "--errors"], ["ls", "--json", "--all-attempts"]):
        here, there = cli(*command, *place), cli(*command, *place, "--from", "mlflow:")
        assert (there.code, there.out) == (0, here.out)
        assert here.out
    for command in (["show", "1/17/0"], ["show", "10/1/0", "--full"], ["show", "12/2/0", "--turn", "1"]):
        here, there = cli(*command, *place), cli(*command, *place, "--from", f"mlflow:{recorded}/mlflow.db")
        assert (there.code, there.out) == (0, here.out)
        assert here.out
    whole = json.loads(cli("show", "11/5/0", "--json", "--from", f"mlflow:{embedded(recorded)}").out)
    assert whole == json.loads(cli("show", "11/5/0", "--json", *place).out)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("2", {2}),
        ("1,10", {1, 10}),
        ("2..11", {2, 10, 11}),
        ("12..", {12, 100}),
        ("..2", {1, 2}),
        (">=12", {12, 100}),
        (">12", {100}),
        ("<2", {1}),
        ("<=2", {1, 2}),
        ("=2", {2}),
        (" 1 , 11..12 , >= 100 ", {1, 11, 12, 100}),
        (">=99999999999999999999999", set()),
    ],
)
def test_steps_are_numbers_in_the_store_and_in_mlflow(
    recorded: Path, cli: Cli, text: str, steps: set[int]
) -> None:
    place = ["--store", str(recorded), "--json", "--step", text]
    for more in ([], ["--from", "mlflow:"]):
        assert {line["step"] for line in json.loads(cli("ls", *place, *more).out)} == steps


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ten", "'ten' names no steps; write 7, 1,5,9, 100..200, >=100 or <50"),
        ("1,,2", "'' in '1,,2' names no steps"),
        ("..", "'..' names no steps"),
        ("200..100", "'200..100' ends before it begins; write 100..200"),
        ("1.5", "'1.5' names no steps"),
        (">= ", "names no steps"),
    ],
)
def test_a_wrong_choice_of_steps_shows_right_ones(recorded: Path, cli: Cli, text: str, sentence: str) -> None:
    result = cli("ls", "--store", str(recorded), "--step", text)
    assert result.code == 2
    assert sentence in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (["--from", "weave:x"], 2, "'weave:x' is no place to read from; write mlflow:URI"),
        (["--project", "p"], 2, "--project names an experiment of MLflow, and goes with --from only"),
        (["--from", "mlflow:", "--in-flight"], 2, "--from does not go with --in-flight"),
        (["--from", "mlflow:", "--store", "none"], 1, "there is no store at"),
        (["--from", "mlflow:sqlite:///none.db"], 1, "there is no database at"),
        (["--from", "mlflow:sqlite:///file:none.db?mode=ro"], 1, "there is no database at"),
        (["--from", "mlflow:none.db"], 1, "does not exist; Trackway reads MLflow's databases and servers"),
        (["--from", "mlflow:."], 1, "is a folder; Trackway reads"),
        (["--from", "mlflow:other.db"], 1, "is not a database of MLflow"),
        (["--from", "mlflow:text"], 1, "cannot be read: DatabaseError"),
        (["--from", "mlflow:sqlite://"], 2, "is a database in memory"),
        (["--from", "mlflow:postgresql+psycopg2://u:secret@127.0.0.1:PORT/x"], 1, "u:***@127.0.0.1"),
        (["--from", "mlflow:http://127.0.0.1:PORT"], 1, "does not answer"),
        (["--from", "mlflow:http://u:very/secret@127.0.0.1:PORT"], 1, "http://u:***@127.0.0.1"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_sentence_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, args: list[str], code: int, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(sqlite3.connect("other.db")) as other, other:
        other.execute("CREATE TABLE something (x)")
    (tmp_path / "text").write_text("no database")
    result = cli("ls", *(arg.replace("PORT", str(free_port())) for arg in args))
    assert (result.code, result.out) == (code, "")
    assert sentence in " ".join(result.err.split())
    assert "Traceback" not in result.err
    assert "secret" not in result.err
    assert {path.name for path in tmp_path.iterdir()} == {"other.db", "text"}


def test_an_unknown_project_names_those_there_are(
    recorded: Path, cli: Cli, tmp_path: Path, blank_mlflow: Path
) -> None:
    shutil.copy(blank_mlflow, tmp_path)
    place = ["--from", f"mlflow:{embedded(recorded)}"]
    result = cli("ls", *place, "--project", "raeding")
    assert (result.code, result.out) == (1, "")
    assert "there is no experiment 'raeding'" in result.err
    assert f"there are: '{PROJECT}'" in result.err
    for project in ("one", "two"):
        exporter = MlflowExporter(TraceConfig(store=tmp_path, project=project))
        assert exporter.export_trajectories([_small(1, 1, 1 if project == "one" else 2)]) == {}
    result = cli("ls", "--from", f"mlflow:{embedded(tmp_path)}")
    assert result.code == 1
    assert "has several experiments; choose one with --project: " in result.err
    found = cli("ls", "--from", f"mlflow:{embedded(tmp_path)}", "--project", "two", "--json")
    assert [line["key"] for line in json.loads(found.out)] == ["1/1/2"]


def test_a_database_without_traces_lists_nothing(blank_mlflow: Path, cli: Cli) -> None:
    result = cli("ls", "--from", f"mlflow:{blank_mlflow}")
    assert (result.code, result.out, result.err) == (0, "", "no trajectory matches\n")


def test_without_mlflow_the_error_says_what_to_install(
    recorded: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "mlflow" else find(name, *rest)
    )
    result = cli("ls", "--from", "mlflow:", "--store", str(recorded))
    assert (result.code, result.out) == (1, "")
    assert "pip install 'trackway[mlflow]'" in result.err


# Servers


def _export_to(uri: str, recorded: Path) -> list[Trajectory]:
    opened = Store(recorded)
    rollouts = [opened.load(line.trace_id) for line in opened.query(all_attempts=True)]
    opened.close()
    exporter = MlflowExporter(TraceConfig(store=recorded, project=PROJECT, tracking_uri=uri))
    assert exporter.export_trajectories(rollouts) == {}
    return rollouts


def _reads_back(uri: str, recorded: Path) -> None:
    rollouts = _export_to(uri, recorded)
    traces = MlflowTraces(uri, PROJECT)
    opened = Store(recorded)
    for asked in ({"step": Steps.parse(">=10")}, {"sample": 17}, {"status": "error"}, BOUNDED):
        expected = [repr(line) for line in opened.query(**asked)]  # type: ignore[arg-type]
        assert [repr(line) for line in traces.query(**asked)] == expected  # type: ignore[arg-type]
        assert expected
    opened.close()
    for rollout in rollouts:
        found = traces.load(rollout.trace_id)
        for name in ("key", "status", "error", "turns", "rewards", "annotations", "notes", "end_ns"):
            assert repr(getattr(found, name)) == repr(getattr(rollout, name)), (rollout.name, name)


def test_a_server_is_read_as_a_database_is(recorded: Path, tmp_path: Path) -> None:
    with mlflow_server(tmp_path) as server:
        _reads_back(server.address, recorded)
        traces = MlflowTraces(server.address)
        rollouts = [
            _small(step, sample, n) for step in range(50, 60) for sample in range(30) for n in range(2)
        ]
        MlflowExporter(
            TraceConfig(store=tmp_path, project=PROJECT, tracking_uri=server.address)
        ).export_trajectories(rollouts)
        assert len(list(traces.query(step=Steps.parse("50..59")))) == 600
    with pytest.raises(StoreError, match="does not answer"):
        traces.load("1/17/0")


def test_postgresql_is_read_as_sqlite_is_and_an_empty_one_stays_empty(recorded: Path) -> None:
    with postgres() as running:
        uri = running.database()
        with pytest.raises(StoreError, match="is not a database of MLflow"):
            MlflowTraces(uri)
        with pytest.raises(StoreError, match="is not a database of MLflow"):
            MlflowTraces(uri)  # the first look has made nothing
        _reads_back(uri, recorded)
