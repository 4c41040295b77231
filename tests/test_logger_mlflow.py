"""MLflow: runs in real databases and on a real server, read back with MLflow's own client."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from trackway import Tracker
from trackway.trace.config_values import ConfigError
from trackway.trace.exporters.mlflow_store import embedded_uri
from trackway.trace.loggers import catchup
from trackway.trace.loggers.base import Run
from trackway.trace.loggers.mlflow import MlflowLogger

from .browser import Browser, chromium
from .programs import line, run, start, wait_until
from .servers import MlflowServer, mlflow_server

pytest.importorskip("mlflow")

HOSTILE = "<img src=x onerror=alert(1)>**bold** [red]\n\x1b[31m"
ROW = {"sample_index": 7, "rollout_n": 0, "prompt": "2<3?", "completion": "yes\n"}


@dataclass
class Place:
    """A store with an MLflow database in it.

    Attributes:
        store: its directory.
        uri: of the database.
    """

    store: Path
    uri: str

    @property
    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri)

    def tracker(self, **more: Any) -> Tracker:
        arguments = {"project": "math/1", "experiment": "grpo", "store": self.store, **more}
        return Tracker("mlflow", **arguments)

    def id(self, tracker: Tracker) -> str:
        """Give the id of the MLflow run that a tracker writes."""
        return str(self.state(tracker)["run_id"])

    def state(self, tracker: Tracker) -> dict[str, Any]:
        state = json.loads((tracker.run.directory / "mlflow.json").read_text())["state"]
        assert isinstance(state, dict)
        return state

    def values(self, run_id: str, name: str) -> list[tuple[int, float]]:
        """Give steps and values of a metric in the order of their times."""
        history = sorted(self.client.get_metric_history(run_id, name), key=lambda each: each.timestamp)
        return [(each.step, each.value) for each in history]

    def artifact(self, run_id: str, path: str) -> str:
        """Give the text of an artifact."""
        from mlflow.artifacts import download_artifacts

        return Path(download_artifacts(run_id=run_id, artifact_path=path, tracking_uri=self.uri)).read_text()

    def artifacts(self, run_id: str, folder: str | None = None) -> list[str]:
        return sorted(each.path for each in self.client.list_artifacts(run_id, folder))


@pytest.fixture(scope="module")
def once(blank_mlflow, tmp_path_factory):
    """Give a database where one run has logged something of every kind, and that run."""
    place = make(tmp_path_factory.mktemp("once"), blank_mlflow)
    config = {
        "lr": 1e-6,
        "on": True,
        "none": None,
        "text": "x" * 7000,
        "empty": {},
        "actor": {"layers": [1, {"n": 2}]},
    }
    config["many"] = {str(number): number for number in range(250)}
    config["bad @name"] = 1
    with place.tracker(config=config, group="job") as tracker:
        tracker.log_metrics(
            {"loss": 0.5, "val/acc@1": 0.25, "val/acc_at_1": 0.5, "a//b": 1, "奖励/均值": 2}, 10
        )
        tracker.log_metrics(
            {"x" * 300: 1, "../up": 3, "a/./b": 4, "loss[d=1,3]": 5, "t(s)\n": 6, "a:b c": 7}, 10
        )
        tracker.log_metrics({"loss": 0.4, "nan": math.nan, "inf": math.inf}, 11)
        tracker.log_metrics({"loss": 0.9, "inf": -math.inf}, 9)
        tracker.log_metrics({"inf": 1.0}, 12)
        for number in range(20):  # in less than a millisecond each
            tracker.log_metrics({"again": 20 - number}, 13)
        tracker.log_metrics({f"m/{number}": number for number in range(2500)}, 14)
        tracker.log_generations([{**ROW, "reward": None}, {**ROW, "rollout_n": 1, "reward": 1}], 20)
        tracker.log_generations([{**ROW, "judge": "fine"}], 20)
        tracker.log_artifact(b"weights", "final/model")
        (place.store / "folder").mkdir()
        (place.store / "folder" / "a.txt").write_text("a")
        tracker.log_artifact(place.store / "folder", "final/folder")
        tracker.alert("fell", "reward is 0", "error", 12)
        tracker.alert("halfway", "", "info")
    return place, place.client.get_run(place.id(tracker)), tracker


def make(store: Path, blank: Path) -> Place:
    shutil.copy(blank, store / "mlflow.db")
    return Place(store, embedded_uri(store))


@pytest.fixture(autouse=True)
def _files_that_mlflow_leaves_are_not_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@contextmanager
def speaking_to(uri: str) -> Iterator[Any]:
    """Give MLflow as a program uses it that has set its tracking URI."""
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        yield mlflow
    finally:
        mlflow.set_tracking_uri(before)


@pytest.fixture
def place(tmp_path, blank_mlflow):
    return make(tmp_path, blank_mlflow)


@pytest.mark.slow
def test_values_steps_and_times_are_those_that_were_logged(once):
    place, found, tracker = once
    assert place.values(found.info.run_id, "loss") == [(10, 0.5), (11, 0.4), (9, 0.9)]
    stamps = [each.timestamp for each in place.client.get_metric_history(found.info.run_id, "loss")]
    assert all(tracker.run.started * 1000 - 1 <= stamp <= found.info.end_time for stamp in stamps)
    assert found.data.metrics["loss"] == 0.4  # that of the highest step
    assert all(found.data.metrics[f"m/{number}"] == number for number in range(2500))


@pytest.mark.slow
def test_the_latest_of_several_values_of_a_step_is_the_last_one_logged(once):
    place, found, _ = once
    assert found.data.metrics["again"] == 1
    assert place.values(found.info.run_id, "again") == [(13, 20 - number) for number in range(20)]


@pytest.mark.slow
def test_names_are_mapped_by_verls_rule_and_none_is_lost(once):
    _, found, _ = once
    metrics = found.data.metrics
    assert metrics["val/acc_at_1"] == 0.5
    assert metrics["a/b"] == 1
    assert metrics["奖励/均值"] == 2
    assert metrics["loss_d_1_3_"] == 5
    assert metrics["a:b c"] == 7
    given = {name: to for to, name in json.loads(found.data.tags["trackway.metric_names"]).items()}
    originals = {"val/acc@1": 0.25, "x" * 300: 1, "../up": 3, "a/./b": 4, "t(s)\n": 6}
    assert {name: metrics[given[name]] for name in originals} == originals
    assert all(len(name) <= 250 for name in metrics)


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "/",
        "//a/",
        "../../etc",
        "...x",
        "a/..",
        "..a/b",
        "@",
        "\ud800",
        "a\n",
        "é",
        " ",
        "a/ /b",
        "x" * 999,
    ],
)
def test_every_name_becomes_one_that_mlflow_takes(name):
    from mlflow.utils.validation import _validate_metric_name

    from trackway.trace.loggers.mlflow import _NAME, _metric_name
    from trackway.trace.loggers.values import Names

    (given,) = Names(_metric_name, _NAME).map({name: 1})
    assert given
    _validate_metric_name(given)


@pytest.mark.slow
def test_what_is_not_finite_is_counted_in_place_of_another_number(once):
    place, found, _ = once
    run_id = found.info.run_id
    assert "nan" not in found.data.metrics
    assert place.values(run_id, "nonfinite/nan") == [(11, 1)]
    assert place.values(run_id, "inf") == [(12, 1.0)]
    assert place.values(run_id, "nonfinite/inf") == [(11, 1), (9, 2)]


@pytest.mark.slow
def test_the_configuration_is_parameters_and_an_artifact(once):
    place, found, _ = once
    params = found.data.params
    assert (params["lr"], params["on"], params["none"]) == ("1e-06", "True", "None")
    assert (params["text"], params["empty"]) == ("x" * 6000, "{}")
    assert {name: params[name] for name in params if name.startswith("actor")} == {
        "actor/layers/list_len": "2",
        "actor/layers/0": "1",
        "actor/layers/1/n": "2",
    }
    assert params["many/249"] == "249"
    assert params["bad _at_name"] == "1"
    config = json.loads(place.artifact(found.info.run_id, "config.json"))
    assert config["text"] == "x" * 7000
    assert config["actor"] == {"layers": [1, {"n": 2}]}


@pytest.mark.slow
def test_the_run_is_found_by_what_it_belongs_to(once):
    place, found, tracker = once
    assert place.client.get_experiment(found.info.experiment_id).name == "math/1"
    assert found.info.run_name == "grpo"
    assert found.data.tags["trackway.run"] == tracker.run.id
    assert found.data.tags["trackway.group"] == "job"
    assert found.data.tags["mlflow.user"]
    assert found.info.start_time == int(tracker.run.started * 1000)
    assert place.state(tracker)["tracking_uri"] == place.uri


@pytest.mark.slow
def test_generations_are_tables_that_name_their_trajectories(once):
    place, found, _ = once
    run_id = found.info.run_id
    first, second = "generations/step_000020.json", "generations/step_000020-2.json"
    assert place.artifacts(run_id, "generations") == [second, first]
    table = json.loads(place.artifact(run_id, first))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["prompt"], row["completion"], row["reward"]) for row in rows] == [
        ("2<3?", "yes\n", None),
        ("2<3?", "yes\n", 1),
    ]
    assert [row["trajectory"] for row in rows] == ["val/20/7/0", "val/20/7/1"]
    address = unquote(rows[1]["traces"])
    assert address.startswith(f"/#/experiments/{found.info.experiment_id}/traces?startTimeLabel=ALL")
    assert address.endswith("&tag=step=20&tag=sample_index=7&tag=rollout_n=1")
    assert json.loads(place.artifact(run_id, second))["columns"][-2:] == ["judge", "traces"]
    named = json.loads(found.data.tags["mlflow.loggedArtifacts"])
    assert named == [{"path": path, "type": "table"} for path in (first, second)]


@pytest.mark.slow
def test_mlflows_own_reader_gives_each_round_as_a_table(once):
    place, found, _ = once
    with speaking_to(place.uri):
        tables = [
            place.client.load_table(found.info.experiment_id, path, [found.info.run_id])
            for path in ("generations/step_000020.json", "generations/step_000020-2.json")
        ]
    assert [len(table) for table in tables] == [2, 1]
    assert list(tables[0]["reward"].fillna(-1)) == [-1, 1]


@pytest.mark.slow
def test_artifacts_and_alerts_are_kept(once):
    place, found, _ = once
    run_id = found.info.run_id
    assert place.artifact(run_id, "final/model") == "weights"
    assert place.artifact(run_id, "final/folder/a.txt") == "a"
    alerts = [json.loads(place.artifact(run_id, f"alerts/{number:06d}.json")) for number in (1, 2)]
    assert [(each["step"], each["level"], each["title"], each["text"]) for each in alerts] == [
        (12, "error", "fell", "reward is 0"),
        (None, "info", "halfway", ""),
    ]
    assert found.data.tags["trackway.alert"] == "info: halfway: "
    assert found.data.tags["trackway.alerts"] == "2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "said"), [("finished", "FINISHED"), ("failed", "FAILED"), ("killed", "KILLED")]
)
def test_how_a_run_ended_is_told(place, status, said):
    tracker = place.tracker()
    tracker.finish(status)
    assert place.client.get_run(place.id(tracker)).info.status == said


@pytest.mark.slow
def test_a_parameter_that_changes_is_a_tag_and_costs_nothing_else(place):
    with place.tracker(config={"lr": 1, "same": 2}) as tracker:
        tracker.log_config({"lr": 3, "same": 2, "more": 4})
        tracker.log_config({"lr": 5})
        tracker.log_config({"lr": 5})
        tracker.log_metrics({"loss": 1}, 1)
    found = place.client.get_run(place.id(tracker))
    assert found.data.params == {"lr": "1", "same": "2", "more": "4"}
    assert found.data.tags["trackway.config/lr"] == "5"
    assert found.data.metrics == {"loss": 1}
    names = ["config-2.json", "config-3.json", "config.json"]
    assert place.artifacts(place.id(tracker)) == names
    assert json.loads(place.artifact(place.id(tracker), "config-3.json")) == {"lr": 5}


@pytest.mark.slow
def test_what_the_program_does_with_mlflow_is_left_alone(place, tmp_path, blank_mlflow):
    theirs = make(folder(tmp_path, "theirs"), blank_mlflow)
    with speaking_to(theirs.uri) as mlflow:
        mlflow.set_experiment("theirs")
        with mlflow.start_run() as own:
            environment = dict(os.environ)
            with place.tracker(mlflow={"tracking_uri": place.uri}, config={"a": 1}) as tracker:
                tracker.log_metrics({"loss": 1}, 1)
                tracker.log_generations([ROW], 1)
                tracker.flush()
                assert mlflow.active_run().info.run_id == own.info.run_id
                assert mlflow.get_tracking_uri() == theirs.uri
            assert mlflow.active_run().info.run_id == own.info.run_id
            assert dict(os.environ) == environment
            mlflow.log_metric("own", 2)
    data = theirs.client.get_run(own.info.run_id).data
    assert (data.metrics, data.params) == ({"own": 2}, {})
    assert place.client.get_run(place.id(tracker)).data.metrics == {"loss": 1}


def folder(above: Path, name: str) -> Path:
    made = above / name
    made.mkdir()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("by", ["setting", "variable"])
def test_a_run_that_somebody_else_began_is_written_and_not_ended(place, by, monkeypatch):
    experiment = place.client.create_experiment("theirs")
    theirs = place.client.create_run(experiment, run_name="theirs").info.run_id
    settings = {"run_id": theirs} if by == "setting" else {}
    if by == "variable":
        monkeypatch.setenv("MLFLOW_RUN_ID", theirs)
    with place.tracker(mlflow=settings, config={"lr": 1}) as tracker:
        tracker.log_metrics({"loss": 1}, 1)
    found = place.client.get_run(theirs)
    assert (found.info.status, found.info.run_name) == ("RUNNING", "theirs")
    assert (found.data.metrics, found.data.params) == ({"loss": 1}, {"lr": "1"})
    assert found.data.tags["trackway.run"] == tracker.run.id


@pytest.mark.slow
def test_only_the_first_of_a_job_writes_to_the_run_that_the_job_was_given(place, monkeypatch):
    experiment = place.client.create_experiment("theirs")
    theirs = place.client.create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", theirs)
    monkeypatch.setenv("RANK", "1")
    with place.tracker(all_ranks=True, group="job") as tracker:
        tracker.log_metrics({"loss": 1}, 1)
    assert place.client.get_run(theirs).data.metrics == {}
    found = place.client.get_run(place.id(tracker))
    assert (found.info.run_name, found.data.tags["trackway.rank"]) == ("grpo-rank1", "1")


@pytest.mark.slow
def test_a_run_is_listed_below_another(place):
    with place.tracker() as above:
        pass
    with place.tracker(mlflow={"parent_run_id": place.id(above)}) as below:
        pass
    tags = place.client.get_run(place.id(below)).data.tags
    assert tags["mlflow.parentRunId"] == place.id(above)


@pytest.mark.slow
def test_a_resumed_run_goes_on_and_says_from_where(place):
    with place.tracker(config={"lr": 1}) as first:
        for step in range(13):
            first.log_metrics({"loss@": step, "inf": math.inf}, step)
            first.log_generations([ROW], step)
        first.alert("one", "")
    with place.tracker(resume=first.run.id, config={"lr": 1}) as second:
        second.flush()
        assert place.client.get_run(place.id(second)).info.status == "RUNNING"
        for step in range(8, 11):
            second.log_metrics({"loss@": 100 + step, "inf": math.inf}, step)
            second.log_generations([{**ROW, "completion": "again"}], step)
        second.alert("two", "")
    run_id = place.id(second)
    assert run_id == place.id(first)
    found = place.client.get_run(run_id)
    assert (found.info.status, found.data.tags["trackway.resumed_at"]) == ("FINISHED", "8")
    assert place.values(run_id, "loss_at_")[-4:] == [(12, 12), (8, 108), (9, 109), (10, 110)]
    assert place.values(run_id, "nonfinite/inf")[-1] == (10, 16)
    assert len(place.artifacts(run_id, "generations")) == 13
    assert "again" in place.artifact(run_id, "generations/step_000008.json")
    assert len(place.artifacts(run_id, "alerts")) == 2
    assert "config-2.json" not in place.artifacts(run_id)


@pytest.mark.slow
def test_what_is_sent_again_arrives_once(place, tmp_path):
    run = Run("r1", "p", "e", tmp_path / "runs" / "r1")
    logger = MlflowLogger(run)
    logger.time = 5.0001
    logger.log_metrics({"loss": 1}, 1)
    kept = json.loads(json.dumps(logger.state))
    for time in (5.0001, 5.0002, 5.0003):  # the first of them again, and two that were logged beside it
        logger.time = time
        logger.log_metrics({"loss": 1, "nan": math.nan}, 1)
    again = MlflowLogger(replace(run, resumed=True, kept=kept))  # its process died before it saved more
    for time in (5.0002, 5.0003):
        again.time = time
        again.log_metrics({"loss": 1, "nan": math.nan}, 1)
    run_id = kept["run_id"]
    stamps = [each.timestamp for each in place.client.get_metric_history(run_id, "loss")]
    assert sorted(stamps) == [5000, 5001, 5002]
    lost = MlflowLogger(replace(run, resumed=True))  # it died before it saved anything
    assert lost.state["run_id"] == run_id


@pytest.mark.slow
def test_a_killed_run_is_brought_to_its_end_with_every_value_once(tmp_path, blank_mlflow):
    store = folder(tmp_path, "store")
    place = make(store, blank_mlflow)
    code = """
        from trackway import Tracker
        tracker = Tracker("mlflow", store="store", project="p")
        print(tracker.run.id, flush=True)
        for step in range(200):
            tracker.log_metrics({"loss": step, "nan": float("nan")}, step)
        time.sleep(600)
    """
    with start(tmp_path, code) as process:
        run_id = line(process)
        kept = store / "runs" / run_id / "mlflow.json"
        wait_until(lambda: kept.exists() and json.loads(kept.read_text())["delivered"] > 5)
        process.kill()
    lines: list[str] = []
    assert catchup.catch_up(store, lines.append), lines
    found = json.loads(kept.read_text())["state"]["run_id"]
    assert place.client.get_run(found).info.status == "KILLED"
    values = place.values(found, "loss")
    assert values == [(step, step) for step in range(200)]
    counts = place.values(found, "nonfinite/nan")
    assert [step for step, _ in counts[-3:]] == [step for step, _ in values[-3:]]


@pytest.mark.slow
def test_the_bytes_of_a_round_of_generations_do_not_grow(place):
    rounds = 120
    with place.tracker(log_val_generations=-1) as tracker:
        for step in range(rounds):
            rows = [
                {"sample_index": n + 10, "prompt": "p" * 200, "completion": "c", "score": 1}
                for n in range(20)
            ]
            tracker.log_generations(rows, 100 + step)
    run_id = place.id(tracker)
    sizes = [each.file_size for each in place.client.list_artifacts(run_id, "generations")]
    assert (len(sizes), max(sizes)) == (rounds, min(sizes))
    named = json.loads(place.client.get_run(run_id).data.tags["mlflow.loggedArtifacts"])
    assert named[-1]["path"] == f"generations/step_{99 + rounds:06d}.json"
    assert len(json.dumps(named)) < 8000


@pytest.mark.slow
def test_several_programs_make_one_database_together(tmp_path):
    code = """
        from trackway import Tracker
        with Tracker("mlflow", store="store", project="p", experiment=sys.argv[0]) as tracker:
            tracker.log_metrics({"loss": 1}, 1)
    """
    threads = [threading.Thread(target=run, args=(tmp_path, code), kwargs={"timeout": 120}) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    place = Place(tmp_path / "store", embedded_uri(tmp_path / "store"))
    experiment = place.client.get_experiment_by_name("p")
    found = place.client.search_runs([experiment.experiment_id])
    assert [(each.info.status, each.data.metrics) for each in found] == [("FINISHED", {"loss": 1})] * 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tracking_uri": "sqlite://"}, "in memory"),
        ({"tracking_uri": 5}, r"mlflow\.tracking_uri=5 is not allowed"),
        ({"run_id": " "}, r"mlflow\.run_id=' ' is not allowed"),
        ({"tracking_url": "x"}, "did you mean 'tracking_uri'"),
    ],
)
def test_a_wrong_setting_is_an_error_where_the_run_begins(settings, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        Tracker("mlflow", store=tmp_path, mlflow=settings)


@pytest.mark.slow
def test_a_relative_address_counts_from_where_the_run_begins(tmp_path, blank_mlflow, monkeypatch):
    shutil.copy(blank_mlflow, tmp_path / "own.db")
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path / "store", f"sqlite:///{tmp_path}/own.db")
    with place.tracker(mlflow={"tracking_uri": "sqlite:///own.db"}) as tracker:
        tracker.log_metrics({"loss": 1}, 1)
    assert place.client.get_run(place.id(tracker)).data.metrics == {"loss": 1}
    monkeypatch.chdir("/")
    with place.tracker(resume=tracker.run.id) as again:  # goes on where it was begun
        again.log_metrics({"loss": 2}, 2)
    assert place.values(place.id(tracker), "loss") == [(1, 1), (2, 2)]


@pytest.mark.slow
def test_a_server_that_is_away_gets_everything_later_as_it_was(tmp_path, monkeypatch):
    server = MlflowServer(tmp_path / "server")
    secret = "pa55word"
    address = server.address.replace("//", f"//user:{secret}@")
    place = Place(tmp_path / "store", server.address)
    tracker = place.tracker(mlflow={"tracking_uri": address}, config={"lr": 1})
    tracker.log_metrics({"loss": 1, "inf": math.inf, "long" * 100: 1}, 1)
    tracker.log_generations([ROW], 1)
    tracker.log_artifact(b"weights", "final/model")
    tracker.finish(timeout=3)
    files = [path for path in place.store.rglob("*") if path.is_file()]
    assert not [path for path in files if secret in path.read_text(errors="replace")]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    server.start()
    try:
        lines: list[str] = []
        assert catchup.catch_up(place.store, lines.append), lines
        found = place.client.get_run(place.id(tracker))
        assert found.info.status == "FINISHED"
        assert {name: found.data.metrics[name] for name in ("loss", "nonfinite/inf")} == {
            "loss": 1,
            "nonfinite/inf": 1,
        }
        assert found.data.params == {"lr": "1"}
        (value,) = place.client.get_metric_history(found.info.run_id, "loss")
        assert abs(value.timestamp - tracker.run.started * 1000) < 3000  # not when it arrived
        assert place.artifact(found.info.run_id, "final/model") == "weights"
        table = json.loads(place.artifact(found.info.run_id, "generations/step_000001.json"))
        assert table["data"][0][-1].startswith(
            f"{server.address.replace('//', '//user:***@')}/#/experiments/"
        )
        files = [path for path in place.store.rglob("*") if path.is_file()]
        assert not [path for path in files if secret in path.read_text(errors="replace")]
    finally:
        server.stop()


@pytest.mark.slow
def test_a_server_that_refuses_what_is_too_much_gets_it_in_portions(tmp_path):
    with mlflow_server(tmp_path / "server") as server:
        place = Place(tmp_path / "store", server.address)
        config = {f"{number:03d}{'é' * 200}": "é" * 6000 for number in range(120)}
        with place.tracker(mlflow={"tracking_uri": server.address}, config=config) as tracker:
            tracker.log_metrics({f"{'é' * 200}{number}": number for number in range(1500)}, 1)
        found = place.client.get_run(place.id(tracker))
        assert len(found.data.params) == 120
        assert len(found.data.metrics) == 1500


@pytest.mark.slow
def test_the_page_shows_generations_as_a_table_and_executes_nothing(tmp_path):
    with mlflow_server(tmp_path / "server") as server:
        place = Place(tmp_path / "store", server.address)
        with place.tracker(mlflow={"tracking_uri": server.address}) as tracker:
            tracker.log_generations([{**ROW, "prompt": HOSTILE, "completion": HOSTILE, "reward": 0.5}], 3)
            tracker.alert(HOSTILE, HOSTILE)
        found = place.client.get_run(place.id(tracker))
        address = f"{server.address}/#/experiments/{found.info.experiment_id}/runs/{found.info.run_id}"
        with chromium() as browser:
            shows(browser, f"{address}/artifacts/generations/step_000003.json")


def shows(browser: Browser, address: str) -> None:
    browser.go(address)
    browser.read(browser.page.locator("body"), "val/3/7/0", "<img src=x onerror=alert(1)>**bold**")
    assert browser.said == []
    assert browser.page.locator("img[src=x]").count() == 0


# The traces of its rollouts


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["process", "inline"])
def test_the_traces_of_rollouts_belong_to_the_run_of_their_tracker(blank_mlflow, tmp_path, sync):
    (tmp_path / "store").mkdir()
    place = make(tmp_path / "store", blank_mlflow)
    experiment = place.client.create_experiment("math")
    named = place.client.create_run(experiment).info.run_id
    done = run(
        tmp_path,
        f"""
        trackway.configure(store="store", backend="mlflow", sync="{sync}", project="math")

        def rollout(number, **more):
            with trajectory(step=1, sample_index=number, **more):
                call(number)

        rollout(1)
        outer = trackway.Tracker("mlflow", project="math")
        rollout(2, run_id="{named}")
        with trackway.Tracker("mlflow", project="math", experiment="first") as first:
            rollout(3)
        rollout(4)
        outer.finish()
        with trackway.Tracker("console", project="math"):
            rollout(5)
        with trackway.Tracker("mlflow", project="math", mlflow={{"tracking_uri": "sqlite:///other.db"}}):
            rollout(6)
        trackway.shutdown()
        print(outer.run.id, first.run.id)
        """,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    outer, first = (
        json.loads((place.store / "runs" / name / "mlflow.json").read_text())["state"]["run_id"]
        for name in done.stdout.split()[-2:]
    )

    def linked() -> dict[str, str | None]:
        infos = [each.info for each in place.client.search_traces(locations=[experiment])]
        return {each.tags["sample_index"]: each.trace_metadata.get("mlflow.sourceRun") for each in infos}

    wait_until(lambda: len(linked()) == 6)
    assert linked() == {"1": None, "2": named, "3": first, "4": outer, "5": None, "6": None}
    found = place.client.search_traces(locations=[experiment], run_id=first)
    assert [each.info.tags["sample_index"] for each in found] == ["3"]
