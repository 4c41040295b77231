"""SwanLab, without its cloud: runs of real programs, read back with SwanLab's own reader."""

from __future__ import annotations

import json
import os
from pathlib import Path
from textwrap import dedent

import pytest

from trackway.trace.config_values import ConfigError
from trackway.trace.loggers.base import Unavailable
from trackway.trace.loggers.swanlab import SwanlabLogger

from .programs import run as run_program
from .programs import start

pytest.importorskip("swanlab")

BEGIN = """
import json, math, numpy, swanlab
from trackway import Tracker

def tracker(**more):
    settings = {"mode": "offline", **more.pop("swanlab", {})}
    named = {"store": "store", "project": "math/1", "experiment": "grpo", **more}
    return Tracker("swanlab", swanlab=settings, **named)

"""


class Logged:
    """What is in the file of one run.

    Attributes:
        values: name -> steps and values, in the order in which they were written.
        media: name -> steps and what the files hold.
        start, config: of the run.
        state: how it ended; None when it was not closed.
    """

    def __init__(self, folder: Path) -> None:
        import yaml
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record
        from swanlab.proto.swanlab.run.v1.run_pb2 import RunState
        from swanlab.sdk.internal.core_python.store import DataStoreReader

        (file,) = folder.glob("*.swanlab")
        reader = DataStoreReader()
        reader.open(file)
        self.values: dict[str, list[tuple[int, float]]] = {}
        self.media: dict[str, list[tuple[int, list[str]]]] = {}
        self.state: str | None = None
        for data in reader:
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "scalar":
                self.values.setdefault(record.scalar.key, []).append(
                    (record.scalar.step, record.scalar.value.number)
                )
            elif kind == "media":
                names = [item.filename for item in record.media.value.items]
                texts = [next(folder.glob(f"media/*/{name}")).read_text() for name in names]
                self.media.setdefault(record.media.key, []).append((record.media.step, texts))
            elif kind == "start":
                self.start = record.start
            elif kind == "finish":
                self.state = RunState.Name(record.finish.state).removeprefix("RUN_STATE_").lower()
        reader.close()
        noted = yaml.safe_load((folder / "files" / "config.yaml").read_text())
        self.config = {name: each["value"] for name, each in noted.items()}


def logged(folder: Path) -> list[Logged]:
    """Read all runs in a folder of SwanLab's, the first one first."""
    return [Logged(each) for each in sorted(folder.glob("run-*"), key=os.path.getctime)]


def surroundings(folder: Path, **more: str) -> dict[str, str]:
    """Give an environment that has nothing of the user's."""
    return {"HOME": str(folder), "TRACKWAY_STRICT": "1", **more}


def run(folder: Path, code: str, **more: str) -> str:
    done = run_program(folder, BEGIN + dedent(code), timeout=120, **surroundings(folder, **more))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _nothing_of_the_user(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("SWANLAB_") or name == "RANK":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Give what one run has left that logs something of every kind, and what it has printed."""
    folder = tmp_path_factory.mktemp("swanlab")
    code = """
        import sys
        before = sys.excepthook, sys.stdout.write, signal.getsignal(signal.SIGINT)
        config = {"lr": 1e-6, "actor": {"layers": [1, 2]}, "none": None}
        with tracker(group="job", config=config) as tracked:
            tracked.log_metrics({"loss": 0.5, "val/acc@1": 0.25, "奖励/均值": 2, "x" * 600: 1}, 10)
            tracked.log_metrics({"edge": 4, "./edge/": 3, "alerts": 5, "val/generations": 6}, 10)
            tracked.log_metrics({"__swanlab__.cpu": 7, "a\\nb": 8}, 10)
            tracked.log_metrics({"loss": 0.4}, 10)
            tracked.log_metrics({"loss": 0.3, "nan": math.nan, "inf": math.inf}, 11)
            tracked.log_metrics({"loss": 0.9, "inf": -math.inf}, 9)
            tracked.log_metrics({"advantages": numpy.arange(11.0)}, 12)
            code = "--x_x--0_0--alert(1)--x_x--0_0--"
            row = {"sample_index": 7, "rollout_n": 0, "prompt": "<b>2<3?</b>", "completion": code}
            tracked.log_generations([{**row, "reward": None}, {**row, "reward": 1}], 20)
            tracked.log_generations([{**row, "judge": "fine"}], 20)
            tracked.log_artifact(b"weights", "final/model")
            tracked.log_config({"lr": 2e-6})
            tracked.alert("fell", "reward is 0", "error", 12)
            tracked.alert("again", "", "info", 12)
            tracked.flush()
            print("same:", before == (sys.excepthook, sys.stdout.write, signal.getsignal(signal.SIGINT)))
        print("same:", before == (sys.excepthook, sys.stdout.write, signal.getsignal(signal.SIGINT)))
    """
    out = run(folder, code)
    (found,) = logged(folder / "swanlog")
    return found, out


@pytest.mark.slow
def test_values_and_steps_are_those_that_were_logged(once):
    found, _ = once
    assert found.values["loss"] == [(10, 0.4), (11, 0.3), (9, 0.9)]
    assert found.values["val/acc@1"] == [(10, 0.25)]
    assert found.values["奖励/均值"] == [(10, 2)]
    assert found.values["advantages/mean"] == [(12, 5)]


@pytest.mark.slow
def test_names_that_swanlab_does_not_take_are_changed_and_told(once):
    found, _ = once
    originals = {
        name: key.removeprefix("trackway/metrics/")
        for key, name in found.config.items()
        if key.startswith("trackway/metrics/")
    }
    expected = {
        "x" * 600: 1,
        "./edge/": 3,
        "alerts": 5,
        "val/generations": 6,
        "__swanlab__.cpu": 7,
        "a\nb": 8,
    }
    assert {name: found.values[originals[name]] for name in expected} == {
        name: [(10, value)] for name, value in expected.items()
    }
    assert found.values["edge"] == [(10, 4)]


@pytest.mark.slow
def test_what_is_not_finite_is_counted_in_place_of_another_number(once):
    found, _ = once
    assert not {"nan", "inf"} & set(found.values)
    assert found.values["nonfinite/nan"] == [(11, 1)]
    assert found.values["nonfinite/inf"] == [(11, 1), (9, 2)]


@pytest.mark.slow
def test_each_round_of_generations_is_a_table_without_code(once):
    found, _ = once
    ((step, (text,)),) = found.media["val/generations"]
    table = json.loads(text)
    assert step == 20
    code = "--x_x- -0_0--alert(1)--x_x- -0_0--"
    assert [(row["step"], row["prompt"], row["completion"], row["reward"]) for row in table["rowData"]] == [
        (20, "<b>2<3?</b>", code, ""),
        (20, "<b>2<3?</b>", code, 1),
    ]
    assert [row["trajectory"] for row in table["rowData"]] == ["val/20/7/0", "val/20/7/0"]
    ((step, (text,)),) = found.media["val/generations-2"]
    assert (step, json.loads(text)["rowData"][0]["judge"]) == (20, "fine")


@pytest.mark.slow
def test_the_run_is_described(once):
    found, _ = once
    assert (found.start.project, found.start.name, found.start.group) == ("math-1", "grpo", "job")
    assert (found.config["lr"], found.config["actor"]) == (2e-6, {"layers": [1, 2]})
    assert found.config["trackway/project"] == "math/1"
    assert Path(found.config["trackway/artifacts/final/model"]).read_bytes() == b"weights"
    assert found.media["alerts"] == [
        (12, ["error at step 12: fell\nreward is 0"]),
        (13, ["info at step 12: again\n"]),
    ]
    assert found.state == "finished"


@pytest.mark.slow
def test_nothing_of_the_programs_own_is_touched(once):
    _, out = once
    assert out.count("same: True") == 2


@pytest.mark.slow
def test_runs_of_one_process_are_not_mixed(tmp_path):
    code = """
        from trackway.trace.loggers import Unavailable
        with tracker() as first:
            first.log_metrics({"loss": 1}, 1)
            first.flush()
            try:
                tracker()
            except Unavailable as error:
                print(error)
            second = tracker(experiment="second", on_error="offline")
            second.log_metrics({"loss": 2}, 1)
            first.log_metrics({"loss": 3}, 2)
        second.finish()
        own = swanlab.init(project="p", experiment_name="own", mode="offline")
        third = tracker(experiment="third", on_error="offline")
        third.log_metrics({"loss": 4}, 1)
        swanlab.log({"loss": 5}, step=1)
        own.finish()
        third.finish()
    """
    out = run(tmp_path, code)
    assert "this process has a SwanLab run already" in out
    found = {each.start.name: each.values["loss"] for each in logged(tmp_path / "swanlog")}
    assert found == {"grpo": [(1, 1), (2, 3)], "second": [(1, 2)], "own": [(1, 5)], "third": [(1, 4)]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("", "finished"),
        ("raise RuntimeError('out of memory')", "crashed"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "aborted"),
    ],
)
def test_a_program_that_does_not_finish_its_run_has_logged_everything(tmp_path, end, state):
    code = f"""
        tracked = tracker()
        for step in range(100):
            tracked.log_metrics({{"loss": step}}, step)
        tracked.flush()
        {end}
    """
    done = run_program(tmp_path, BEGIN + dedent(code), timeout=120, **surroundings(tmp_path))
    assert ("out of memory" in done.stderr) == ("memory" in end)
    (found,) = logged(tmp_path / "swanlog")
    assert (found.values["loss"], found.state) == ([(step, step) for step in range(100)], state)


@pytest.mark.slow
def test_a_killed_run_has_what_was_flushed_and_goes_on_with_the_rest(tmp_path):
    code = """
        tracked = tracker(config={"lr": 1})
        for step in range(5):
            tracked.log_metrics({"loss": step}, step)
        tracked.flush()
        print("run", tracked.run.id, flush=True)
        time.sleep(600)
    """
    with start(tmp_path, BEGIN + dedent(code), **surroundings(tmp_path)) as process:
        assert process.stdout is not None
        texts = iter(process.stdout.readline, "")
        run_id = next(text.removeprefix("run ").strip() for text in texts if text.startswith("run "))
        process.kill()
    (before,) = logged(tmp_path / "swanlog")
    assert (before.values["loss"], before.state) == ([(step, step) for step in range(4)], None)
    run(
        tmp_path,
        f"""
        with tracker(resume={run_id!r}) as tracked:
            tracked.log_metrics({{"loss": 5}}, 5)
        """,
    )
    before, after = logged(tmp_path / "swanlog")
    assert after.start.id == before.start.id
    assert after.values["loss"][-2:] == [(4, 4), (5, 5)]
    assert after.state == "finished"


@pytest.mark.slow
def test_what_is_logged_after_the_program_has_ended_the_run_arrives(tmp_path):
    code = """
        with tracker() as tracked:
            for step in range(1, 5):
                tracked.log_metrics({"loss": step}, step)
                tracked.flush()
                swanlab.finish()
    """
    run(tmp_path, code)
    found = logged(tmp_path / "swanlog")
    assert [value for each in found for value in each.values.get("loss", [])] == [(s, s) for s in range(1, 5)]


@pytest.mark.slow
def test_variables_of_swanlab_hold(tmp_path):
    code = """
        with Tracker("swanlab", store="store", project="p") as tracked:
            tracked.log_metrics({"loss": 1}, 1)
        with Tracker("swanlab", store="store", swanlab={"mode": "disabled"}, config={"a": 1}) as tracked:
            tracked.log_metrics({"loss": 1, "nan": math.nan}, 1)
            tracked.log_generations([{"prompt": "a", "completion": "b"}], 1)
            tracked.log_artifact(b"a", "a")
            tracked.alert("a", "b")
    """
    run(tmp_path, code, SWANLAB_MODE="offline", SWANLAB_LOG_DIR=str(tmp_path / "elsewhere"))
    (found,) = logged(tmp_path / "elsewhere")
    assert found.values["loss"] == [(1, 1)]
    for kept in tmp_path.glob("store/runs/*/swanlab.json"):
        assert json.loads(kept.read_text())["finished"] == "finished"


@pytest.mark.slow
def test_a_cloud_that_is_away_holds_up_nobody_and_its_key_is_not_written(tmp_path):
    code = """
        tracked = Tracker("swanlab", store="store", project="p", swanlab={"api_key": "k3y" * 7})
        tracked.log_metrics({"loss": 1}, 1)
        tracked.finish(timeout=2)
    """
    run(tmp_path, code, SWANLAB_API_HOST="http://127.0.0.1:9", SWANLAB_MODE="cloud")
    (log,) = tmp_path.glob("store/runs/*/log.jsonl")
    assert '"loss"' in log.read_text()
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert not [path for path in files if "k3yk3y" in path.read_text(errors="replace")]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "clod"}, r"swanlab\.mode='clod' is not allowed; expected one of cloud, online, local"),
        ({"id": ""}, r"swanlab\.id='' is not allowed"),
        ({"save_dir": 3}, r"swanlab\.save_dir=3 is not allowed"),
        ({"offline": True, "mode": "local"}, "contradict each other"),
    ],
)
def test_a_wrong_setting_is_an_error(settings, said):
    with pytest.raises(ConfigError, match=said):
        SwanlabLogger.check(settings, offline=False)


def test_a_key_is_never_shown():
    with pytest.raises(ConfigError) as caught:
        SwanlabLogger.check({"api_key": ["secret"]}, offline=False)
    assert "secret" not in str(caught.value)


def test_without_credentials_the_cloud_is_an_error_or_offline(monkeypatch):
    with pytest.raises(Unavailable, match="there is no API key"):
        SwanlabLogger.check({}, offline=False)
    assert SwanlabLogger.check({}, offline=True) == {"mode": "offline"}
    monkeypatch.setenv("SWANLAB_API_KEY", "k" * 21)
    assert SwanlabLogger.check({}, offline=False) == {}
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    assert SwanlabLogger.check({}, offline=False) == {}
    monkeypatch.setenv("SWANLAB_MODE", "nonsense")
    with pytest.raises(ConfigError, match="nonsense"):
        SwanlabLogger.check({}, offline=False)


def test_swanlabs_dashboard_is_told_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("trackway.trace.loggers.swanlab.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip install 'swanlab\[dashboard\]'"):
        SwanlabLogger.check({"mode": "local"}, offline=False)
