"""MLflow as people run it, a file, servers, PostgreSQL: all of them get the same, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import trackway
from trackway import llm_trace, open_store, reward, rollout_trace, tool_trace, trajectory
from trackway.trace import semconv
from trackway.trace.config import TraceConfig
from trackway.trace.exporters.mlflow import MlflowExporter
from trackway.trace.exporters.sync import is_followed, load_settings, save_settings
from trackway.trace.store import Store

from .programs import Cli, line, order, run, start, stop_followers, wait_until
from .servers import PASSWORD, Answer, MlflowServer, mlflow_server, postgres, web_server

pytest.importorskip("mlflow")
pytestmark = pytest.mark.slow

STEPS, SAMPLES, ROLLOUTS = range(1, 13), range(25), range(4)
"""1,200 short rollouts: more than MLflow gives on one page."""
LOGIN = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": PASSWORD}


# What is recorded


@tool_trace(name="calculator")
def calculate(expression: str) -> str:
    if "/ 0" in expression:
        raise ZeroDivisionError("durch Null: ÷ 0")
    return f"Ergebnis → {expression} ✓"


@llm_trace
def generate(prompt_ids: list[int], messages: list[dict[str, str]]) -> dict[str, Any]:
    made = [7 * item % 50_000 for item in range(len(prompt_ids))]
    return {"response_ids": made, "response_logprobs": [-0.25] * len(made), "text": "Grüße 🙂 漢字"}


@rollout_trace
def solve(sample: int | str, n: int) -> None:
    messages = [{"role": "user", "content": f"Wie viel ist das? — {sample}"}]
    prompt = list(range(50 + n))
    for turn in range(2):
        answer = generate(prompt, messages)
        with suppress(ZeroDivisionError):
            calculate("1 / 0" if (n, turn) == (1, 1) else f"{n} + {turn}")
        prompt = [*prompt, *answer["response_ids"], turn]
        messages = [*messages, {"role": "assistant", "content": answer["text"]}]
    if n == 2:
        raise ValueError("gab auf: é")


def record_some() -> None:
    for step in (1, 2):
        for sample in (1, 10, "größe/7"):
            for n in range(3):
                validate = step == 2 and sample == 10
                with (
                    suppress(ValueError),
                    trajectory(step=step, sample_index=sample, rollout_n=n, validate=validate),
                ):
                    reward("correct", float(n), explanation="genau so → ja")
                    reward("format", 0.5)
                    reward("Urteil", "gut")
                    solve(sample, n)


@rollout_trace
def quick(sample: int, n: int) -> int:
    if (sample, n) == (7, 3):
        raise ValueError("no")
    return sample


def record_many() -> None:
    for step in STEPS:
        for sample in SAMPLES:
            for n in ROLLOUTS:
                with (
                    suppress(ValueError),
                    trajectory(step=step, sample_index=sample, rollout_n=n, validate=step % 4 == 0),
                ):
                    reward("reward", n / 4)
                    quick(sample, n)


# Where it goes


@dataclass
class Place:
    """A set-up of MLflow.

    Attributes:
        uri: the tracking URI.
        environment: variables that whoever writes or reads there needs.
    """

    uri: str
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.uri)

    def experiment(self, project: str) -> str:
        found = self.client.get_experiment_by_name(project)
        assert found is not None
        return str(found.experiment_id)

    def search(self, project: str, where: str | None = None, **more: Any) -> list[Any]:
        """Give what is found, page by page, without spans."""
        found, token = [], None
        while True:
            page = self.client.search_traces(
                locations=[self.experiment(project)],
                filter_string=where,
                max_results=500,
                page_token=token,
                include_spans=False,
                **more,
            )
            found += page
            token = page.token
            if not token:
                return found


def make_place(name: str, folder: Path, stack: ExitStack) -> Place:
    if name == "SQLite":
        return Place(f"sqlite:///{folder}/mlflow.db")
    if name == "server":
        return Place(stack.enter_context(mlflow_server(folder, "--serve-artifacts")).address)
    if name == "server without artifacts":
        return Place(stack.enter_context(mlflow_server(folder, "--no-serve-artifacts")).address)
    if name == "server with a login":
        return Place(stack.enter_context(mlflow_server(folder, password=PASSWORD)).address, LOGIN)
    database = stack.enter_context(postgres()).database()
    if name == "PostgreSQL":
        return Place(database)
    assert name == "server on PostgreSQL"
    return Place(stack.enter_context(mlflow_server(folder, backend=database)).address)


PLACES = [
    "SQLite",
    "server",
    "server without artifacts",
    "server with a login",
    "PostgreSQL",
    "server on PostgreSQL",
]


@pytest.fixture(scope="module", params=PLACES)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with ExitStack() as stack:
        yield make_place(request.param, tmp_path_factory.mktemp("place"), stack)


@pytest.fixture
def place(running: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    return running


def deliver(folder: Path, record: Callable[[], None], place: Place, **settings: Any) -> Store:
    """Record in this process, let the follower deliver, and give the store."""
    store = folder / "store"
    settings = {"backend": "mlflow", "tracking_uri": place.uri, "experiment": "grpo", **settings}
    trackway.configure(store=store, sync="process", **settings)
    record()
    status = trackway.flush(300)
    trackway.shutdown()
    assert (status.pending, status.dropped, status.exported) == (0, 0, status.recorded)
    wait_until(lambda: not is_followed(store))
    return open_store(store)


def comparable(trace: Any) -> dict[str, Any]:
    """Give all of a trace but what differs from one experiment to another."""
    content: dict[str, Any] = trace.to_dict()
    info = content["info"]
    del info["trace_location"], info["tags"]["mlflow.artifactLocation"]
    info["assessments"].sort(key=lambda item: item["assessment_name"])
    content["data"]["spans"].sort(key=lambda span: span["span_id"])
    for span in content["data"]["spans"]:
        # A server writes the JSON of a value anew.
        span["attributes"] = {name: json.loads(value) for name, value in span["attributes"].items()}
    return content


def check_filters(place: Place, project: str, counts: dict[str, int]) -> None:
    for where, count in counts.items():
        found = [trace.info.trace_id for trace in place.search(project, where)]
        assert (where, len(found), len(set(found))) == (where, count, count)


def test_every_set_up_holds_the_same_and_all_that_the_journal_holds(place: Place, tmp_path: Path) -> None:
    client = place.client
    project = "same everywhere é"
    run_id = client.create_run(client.create_experiment(project)).info.run_id
    store = deliver(tmp_path, record_some, place, project=project, run_id=run_id)
    known = [store.load(summary.trace_id) for summary in store.query(all_attempts=True)]
    found = place.search(project)
    assert {trace.info.trace_id for trace in found} == {f"tr-{item.trace_id}" for item in known}
    assert len(found) == len(known) == 18
    beside = Place(f"sqlite:///{tmp_path}/beside.db")
    exporter = MlflowExporter(TraceConfig(store=tmp_path / "store", tracking_uri=beside.uri))
    assert exporter.export_trajectories(known) == {}
    for item in known:
        trace = client.get_trace(f"tr-{item.trace_id}")
        assert item.key is not None
        spans = {span.span_id: span for span in trace.data.spans}
        assert {
            name: (span.parent_id, span.start_time_ns, span.end_time_ns) for name, span in spans.items()
        } == {span.span_id: (span.parent_id, span.start_ns, span.end_ns) for span in item.spans}
        for span in item.spans:
            stored = spans[span.span_id].attributes
            for name in (semconv.PROMPT_IDS, semconv.RESPONSE_IDS, semconv.INPUT, semconv.OUTPUT):
                assert stored.get(name) == span.attributes.get(name)
        tags = trace.info.tags
        assert tags["step"] == str(item.key.step)
        assert tags["sample_index"] == str(item.key.sample_index)
        assert tags["validate"] == str(item.key.validate)
        assert trace.info.state.value == ("ERROR" if item.key.rollout_n == 2 else "OK")
        assert trace.info.trace_metadata["mlflow.sourceRun"] == run_id
        scores = {score.name: score.value for score in trace.info.assessments}
        expected = {"correct": float(item.key.rollout_n), "format": 0.5, "Urteil": "gut"}
        assert scores == {**expected, "reward": item.reward}
        assert comparable(trace) == comparable(beside.client.get_trace(f"tr-{item.trace_id}"))
    text = json.dumps(client.get_trace(f"tr-{known[0].trace_id}").to_dict(), ensure_ascii=False)
    assert "Grüße 🙂 漢字" in text
    assert len(place.search(project, run_id=run_id)) == 18
    check_filters(
        place,
        project,
        {
            "tags.step = '1'": 9,
            "tags.sample_index = '1'": 6,  # and not 10
            "tags.sample_index = 'größe/7'": 6,
            "tags.rollout_n = '2'": 6,
            "tags.validate = 'True'": 3,
            "tags.experiment_name = 'grpo'": 18,
            "status = 'ERROR'": 6,
            "feedback.correct > 0.5": 12,
            "feedback.Urteil = 'gut'": 18,
            f"metadata.`mlflow.sourceRun` = '{run_id}'": 18,
            "metadata.`mlflow.trace.session` = 'val:2:10'": 3,
        },
    )


def test_a_server_that_is_sent_otlp_holds_the_same_spans_and_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow_server(tmp_path / "server") as server:
        place = Place(server.address)
        experiment = place.client.create_experiment("otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-mlflow-experiment-id={experiment}")
        store = deliver(tmp_path, record_some, place, backend="otlp", tracking_uri=None, project="otlp")
        known = [store.load(summary.trace_id) for summary in store.query(all_attempts=True)]
        found = place.search("otlp")
        assert len(found) == len(known) == 18
        for item in known:
            trace = place.client.get_trace(f"tr-{item.trace_id}")
            spans = {span.span_id: span for span in trace.data.spans}
            assert {
                name: (span.parent_id, span.start_time_ns, span.end_time_ns) for name, span in spans.items()
            } == {span.span_id: (span.parent_id, span.start_ns, span.end_ns) for span in item.spans}
            assert trace.info.state.value == ("OK" if item.status == "ok" else "ERROR")
        check_filters(
            place,
            "otlp",
            {
                "tags.step = '1'": 9,
                "tags.sample_index = '1'": 6,
                "tags.sample_index = 'größe/7'": 6,
                "tags.rollout_n = '2'": 6,
                "tags.validate = 'True'": 3,
                "tags.experiment_name = 'grpo'": 18,
                "status = 'ERROR'": 6,
            },
        )


@pytest.mark.parametrize("running", ["SQLite", "server", "server on PostgreSQL"], indirect=True)
def test_what_is_found_comes_back_whole_from_all_pages(place: Place, tmp_path: Path) -> None:
    client = place.client
    run_id = client.create_run(client.create_experiment("many")).info.run_id
    store = deliver(tmp_path, record_many, place, project="many", run_id=run_id)
    check_filters(
        place,
        "many",
        {
            "tags.step = '1'": 100,
            "tags.step = '12'": 100,
            "tags.sample_index = '1'": 48,
            "tags.sample_index = '10'": 48,
            "tags.rollout_n = '3'": 300,
            "tags.validate = 'True'": 300,
            "tags.experiment_name = 'grpo'": 1_200,
            "tags.experiment_name = 'grp'": 0,
            "status = 'ERROR'": 12,
            "feedback.reward >= 0.75": 300,
            "feedback.reward > 0.25": 600,
            "metadata.`mlflow.trace.session` = '1:1'": 4,
            f"metadata.`mlflow.sourceRun` = '{run_id}'": 1_200,
            "tags.step = '3' AND tags.sample_index = '7' AND status = 'ERROR'": 1,
        },
    )
    ones = place.search("many", "tags.sample_index = '1'")
    assert {trace.info.tags["sample_index"] for trace in ones} == {"1"}
    assert {trace.info.tags["step"] for trace in ones} == {str(step) for step in STEPS}
    assert store.status().exported == 2 * 1_200


# Together


@pytest.mark.parametrize("name", ["SQLite", "server", "PostgreSQL"])
def test_exporters_that_start_together_on_nothing_make_one_experiment(name: str, tmp_path: Path) -> None:
    """Each of four programs has a store and a follower of its own; the database is not there or empty."""
    with ExitStack() as stack:
        place = make_place(name, tmp_path / "place", stack)
        programs = []
        for number in range(4):
            folder = tmp_path / str(number)
            folder.mkdir()
            programs.append(stack.enter_context(start(folder, RACER, PLACE=place.uri, NUMBER=str(number))))
        for program in programs:
            assert line(program) == "ready"
        for program in programs:
            assert program.stdin is not None
            program.stdin.write("go\n")
            program.stdin.flush()
        for program in programs:
            assert line(program) == "0 pending, 20 exported", program.communicate()[1]
        for program in programs:
            assert program.wait(timeout=60) == 0
        names = [experiment.name for experiment in place.client.search_experiments()]
        assert sorted(names) == ["Default", "race"]
        traces = place.search("race")
        assert len({trace.info.trace_id for trace in traces}) == len(traces) == 80
        assert place.search("Default") == []


RACER = """
    number = int(os.environ["NUMBER"])
    print("ready", flush=True)
    sys.stdin.readline()
    trackway.configure(store="store", backend="mlflow", tracking_uri=os.environ["PLACE"], project="race")
    for sample in range(20):
        with trajectory(step=number, sample_index=sample):
            pass
    status = trackway.flush(280)
    print(f"{status.pending} pending, {status.exported} exported", flush=True)
"""


def test_four_writers_and_a_reader_share_one_file(tmp_path: Path) -> None:
    place = Place(f"sqlite:///{tmp_path}/mlflow.db")
    code = RACER.replace("range(20)", "range(100)")
    with ExitStack() as stack:
        programs = []
        for number in range(4):
            folder = tmp_path / str(number)
            folder.mkdir()
            programs.append(stack.enter_context(start(folder, code, PLACE=place.uri, NUMBER=str(number))))
        for program in programs:
            assert order(program, "go") == "ready"
        wait_until(lambda: any(exported(tmp_path / str(number) / "store") for number in range(4)))
        seen = [0]
        while seen[-1] < 400:
            seen.append(len(place.search("race")))
        for program in programs:
            assert line(program) == "0 pending, 100 exported"
            assert program.wait(timeout=60) == 0
    assert seen == sorted(seen)
    for step in range(4):
        samples = [trace.info.tags["sample_index"] for trace in place.search("race", f"tags.step = '{step}'")]
        assert sorted(map(int, samples)) == list(range(100))


# A login


TRAINER = """
    trackway.configure(store="store", backend="mlflow", tracking_uri=os.environ["PLACE"], project="login")
    with trajectory(step=1, sample_index=1):
        call(1)
    trackway.flush(float(os.environ["TIMEOUT"]))
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("guarded"), password=PASSWORD) as server:
        yield server


def signed(address: str, user: str, password: str) -> str:
    return address.replace("://", f"://{user}:{quote(password, safe='')}@")


def last_error(store: Path) -> str | None:
    with suppress(trackway.StoreError):
        opened = open_store(store)
        try:
            return opened.status().destinations["mlflow"].last_error
        finally:
            opened.close()
    return None


def exported(store: Path) -> int:
    with suppress(trackway.StoreError):
        opened = open_store(store)
        try:
            return opened.status().exported
        finally:
            opened.close()
    return 0


def everything_written_about(store: Path) -> str:
    """Give what a person may come to read: the state, and the follower's log."""
    shown = trackway_command("status", "--store", str(store)).stdout
    shown += trackway_command("status", "--store", str(store), "--json").stdout
    return shown + (store / "sync.log").read_text()


def trackway_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trackway", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TRACKWAY_STRICT": "0", "COLUMNS": "200", **environment},
    )


def test_a_password_in_the_address_serves_the_follower_and_is_shown_nowhere(
    guarded: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = signed(guarded.address, "admin", PASSWORD)
    done = run(tmp_path, TRAINER, timeout=120, PLACE=uri, TIMEOUT="90")
    assert done.returncode == 0, done.stderr
    store = tmp_path / "store"
    status = open_store(store).status()
    assert (status.exported, status.pending) == (2, 0)
    assert len(Place(uri).search("login", "tags.step = '1'")) == 1
    written = everything_written_about(store) + done.stdout + done.stderr
    assert guarded.address.partition("://")[2] in (store / "config.json").read_text()
    for secret in (PASSWORD, quote(PASSWORD, safe="")):
        assert secret not in written


@pytest.mark.parametrize("given", ["none", "in variables", "in the address"])
def test_a_wrong_login_is_said_once_and_everything_arrives_with_the_right_one(
    guarded: MlflowServer, tmp_path: Path, given: str
) -> None:
    wrong = "not the word"
    place, environment = guarded.address, {"HOME": str(tmp_path)}
    if given == "in variables":
        environment |= {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": wrong}
    if given == "in the address":
        place = signed(place, "admin", wrong)
    done = run(tmp_path, TRAINER, timeout=120, PLACE=place, TIMEOUT="0", **environment)
    assert done.returncode == 0, done.stderr
    store = tmp_path / "store"
    try:
        error = wait_until(lambda: last_error(store))
        assert "refuses the login" in error
        assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in error
        written = everything_written_about(store) + done.stdout + done.stderr
        assert wrong not in written
        assert quote(wrong) not in written
        status = open_store(store).status()
        assert (status.recorded, status.exported, status.pending, status.dropped) == (2, 0, 2, 0)
        if given == "none":
            # The follower that runs already reads this file for every call.
            (tmp_path / ".mlflow").mkdir()
            word = PASSWORD.replace("%", "%%")
            login = f"[mlflow]\nmlflow_tracking_username = admin\nmlflow_tracking_password = {word}\n"
            (tmp_path / ".mlflow" / "credentials").write_text(login)
        if given == "in the address":
            # As a training does that is configured anew; the same follower goes on.
            settings = load_settings(store)
            save_settings(replace(settings, tracking_uri=signed(guarded.address, "admin", PASSWORD)))
        if given != "in variables":
            wait_until(lambda: exported(store))
    finally:
        stop_followers(store)
    if given == "in variables":
        sent = trackway_command("sync", "--store", str(store), **LOGIN)
        assert sent.returncode == 0, sent.stdout + sent.stderr
    status = open_store(store).status()
    assert (status.recorded, status.exported, status.pending, status.dropped) == (2, 2, 0, 0)
    (trace_id,) = [summary.trace_id for summary in open_store(store).query()]
    found = Place(signed(guarded.address, "admin", PASSWORD)).search("login")
    assert f"tr-{trace_id}" in {trace.info.trace_id for trace in found}


# Servers that die, and what is none


def test_a_server_that_dies_in_mid_export_and_comes_back_has_everything_once(tmp_path: Path) -> None:
    with mlflow_server(tmp_path / "server") as server:
        place, store = Place(server.address), tmp_path / "store"
        trackway.configure(
            store=store, backend="mlflow", tracking_uri=server.address, project="many", experiment="grpo"
        )
        record_many()
        wait_until(lambda: exported(store))
        server.stop(signal.SIGKILL)
        assert 0 < exported(store) < 2 * 1_200
        server.start()
        status = trackway.flush(280)
        assert (status.exported, status.pending, status.dropped) == (2 * 1_200, 0, 0)
        found = [trace.info.trace_id for trace in place.search("many")]
        assert len(set(found)) == len(found) == 1_200
        for step in STEPS:
            assert len(place.search("many", f"tags.step = '{step}' AND feedback.reward >= 0")) == 100
        trackway.shutdown()
        wait_until(lambda: not is_followed(store))


HTML = b"<!DOCTYPE html><html><body>It works!</body></html>"


def nothing_there(path: str) -> tuple[int, str, bytes]:
    return 404, "text/html", HTML


def always_the_same_page(path: str) -> tuple[int, str, bytes]:
    return 200, "text/html", HTML


def too_old(path: str) -> tuple[int, str, bytes]:
    if path == "/version":
        return 200, "text/plain", b"2.9.2"
    if "/experiments/get-by-name" in path:
        found = {"experiment_id": "3", "name": "p", "lifecycle_stage": "active"}
        return 200, "application/json", json.dumps({"experiment": found}).encode()
    return (200, "text/plain", b"OK") if path == "/health" else nothing_there(path)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (nothing_there, "is no MLflow server: GET /version gives HTTP 404, text/html. Check the address"),
        (
            always_the_same_page,
            "is no MLflow server: GET /version gives HTTP 200, text/html. Check the address",
        ),
        (too_old, "is version 2.9.2: for spans, 3.4 or newer is needed"),
    ],
)
def test_what_is_no_fitting_server_is_told_and_costs_nothing(
    answer: Answer, said: str, tmp_path: Path, cli: Cli
) -> None:
    store = tmp_path / "store"
    with web_server(answer) as address:
        trackway.configure(store=store, backend="mlflow", tracking_uri=address, project="p", sync="off")
        for sample in range(3):
            with trajectory(step=1, sample_index=sample):
                quick(sample, 0)
        trackway.shutdown()
        sent = cli("sync", "--store", str(store))
        assert sent.code == 1
        assert f"{address} {said}" in sent.out
        assert said in cli("status", "--store", str(store), "--json").out
    status = open_store(store).status()
    assert (status.recorded, status.exported, status.pending, status.dropped) == (6, 0, 6, 0)
    # The right one stands there now.
    settings = load_settings(store)
    save_settings(replace(settings, tracking_uri=f"sqlite:///{tmp_path}/mlflow.db"))
    assert cli("sync", "--store", str(store)).code == 0
    assert len(Place(f"sqlite:///{tmp_path}/mlflow.db").search("p")) == 3


# Where it is


def test_a_relative_path_counts_from_where_the_training_began_and_is_said_once(tmp_path: Path) -> None:
    code = """
        import logging
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        for experiment in ("one", "two"):
            trackway.configure(store="store", backend="mlflow", project="here", experiment=experiment)
            with trajectory(step=1, sample_index=1):
                call(1)
        os.chdir("/")
        print(trackway.flush(100).pending)
    """
    done = run(tmp_path, code, timeout=120, MLFLOW_TRACKING_URI="sqlite:///runs/mlflow.db")
    assert done.stdout == "0\n", done.stderr
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert [words for words in done.stderr.splitlines() if "MLflow traces" in words] == [
        f"MLflow traces are at {uri}"
    ]
    assert len(Place(uri).search("here")) == 2
    wait_until(lambda: not is_followed(tmp_path / "store"))
