"""trackio: runs in its database, written by real programs and read back with trackio itself."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from .programs import run as run_program
from .programs import start, wait_until

pytestmark = pytest.mark.slow

BEGIN = """
import json, math, numpy
from trackway import Tracker

def tracker(**more):
    return Tracker("trackio", **{"store": "store", "project": "math/1", "experiment": "grpo", **more})

"""
READ = """
import json, sys
import trackio
from trackio.sqlite_storage import SQLiteStorage as storage

project = sys.argv[1]
found = []
for run in trackio.Api().runs(project):
    found.append(
        {
            "id": run.id,
            "name": run.name,
            "rows": storage.get_logs(project, run.name, run_id=run.id),
            "config": storage.get_run_config(project, run.name, run.id),
            "alerts": storage.get_alerts(project, run_id=run.id),
        }
    )
artifacts = {}
for each in storage.list_artifacts(project):
    artifacts[each["name"]] = storage.get_artifact_manifest(project, each["name"], None)
print(json.dumps({"runs": found, "artifacts": artifacts}, default=str))
"""


def run(folder: Path, code: str, **more: str) -> str:
    environment = {
        "HOME": str(folder),
        "TRACKWAY_STRICT": "1",
        "TRACKIO_DIR": str(folder / "trackio"),
        **more,
    }
    done = run_program(folder, BEGIN + dedent(code), timeout=120, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(folder: Path, project: str = "math/1", place: str = "trackio") -> tuple[list[Any], dict[str, Any]]:
    """Give runs and artifacts of a project."""
    environment = {"HOME": str(folder), "TRACKIO_DIR": str(folder / place), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", READ, project]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    return [SimpleNamespace(**each) for each in found["runs"]], found["artifacts"]


def values(found: Any, name: str) -> list[tuple[int, Any]]:
    return [(row["step"], row[name]) for row in found.rows if name in row]


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Give what one run has left that logs something of every kind, and what it has printed."""
    folder = tmp_path_factory.mktemp("trackio")
    code = """
        import socket
        def refuse(*arguments):
            raise OSError("nothing may be sent")
        socket.socket.connect = refuse
        with tracker(group="job", config={"lr": 1e-6, "actor": {"layers": [1, 2]}, "_odd": 1}) as tracked:
            tracked.log_metrics({"loss": 0.5, "step": 7, "__own": 1, "val/acc@1": 0.25, "奖励/均值": 2}, 10)
            tracked.log_metrics({"loss": 0.4, "nan": math.nan, "inf": math.inf, "low": -math.inf}, 11)
            tracked.log_metrics({"loss": 0.9}, 9)
            tracked.log_metrics({"loss": 0.3, "advantages": numpy.arange(10.0)}, 11)
            row = {"sample_index": 7, "rollout_n": 0, "prompt": "<b>2<3?</b>", "completion": "yes\\n"}
            tracked.log_generations([{**row, "reward": None}, {**row, "reward": 1}], 20)
            tracked.log_generations([{**row, "judge": "fine"}], 20)
            tracked.log_artifact(b"weights", "final/model")
            tracked.log_artifact(b"others", "final-model")
            tracked.log_artifact(b"weights", "final/model")
            tracked.log_config({"lr": 2e-6, "more": True})
            tracked.alert("fell", "reward is 0", "error", 12)
            tracked.alert("halfway", "", "info")
        import sys, threading, trackio
        from trackio import context_vars
        print(context_vars.current_run.get(), [each.name for each in threading.enumerate()])
    """
    out = run(folder, code, TRACKIO_SPACE_ID="somebody/space", HF_TOKEN="hf_secret")
    (found,), artifacts = read(folder)
    return found, artifacts, out


def test_values_and_steps_are_those_that_were_logged(once):
    found, _, _ = once
    assert values(found, "loss") == [(10, 0.5), (11, 0.4), (9, 0.9), (11, 0.3)]
    assert values(found, "val/acc@1") == [(10, 0.25)]
    assert values(found, "奖励/均值") == [(10, 2)]


def test_what_is_not_finite_stays_so(once):
    found, _, _ = once
    ((step, nan),) = values(found, "nan")
    assert step == 11
    assert math.isnan(nan)
    assert (values(found, "inf"), values(found, "low")) == ([(11, math.inf)], [(11, -math.inf)])


def test_names_that_trackio_keeps_for_itself_are_changed_and_told(once):
    found, _, _ = once
    assert values(found, "__step") == [(10, 7)]
    assert values(found, "____own") == [(10, 1)]
    assert found.config["trackway/metrics/__step"] == "step"
    assert found.config["trackway/metrics/____own"] == "__own"


def test_histograms_have_their_bins(once):
    found, _, _ = once
    ((step, histogram),) = values(found, "advantages")
    assert (step, histogram["_type"], sum(histogram["values"])) == (11, "trackio.histogram", 10)
    assert (histogram["bins"][0], histogram["bins"][-1]) == (0, 9)


def test_each_round_of_generations_is_a_table(once):
    found, _, _ = once
    first, second = values(found, "val/generations")
    assert [step for step, _ in (first, second)] == [20, 20]
    assert first[1]["_type"] == "trackio.table"
    rows = first[1]["_value"]
    assert [(row["prompt"], row["completion"], row["reward"]) for row in rows] == [
        ("<b>2<3?</b>", "yes\n", None),
        ("<b>2<3?</b>", "yes\n", 1),
    ]
    assert second[1]["_value"][0]["judge"] == "fine"


def test_the_run_is_described(once):
    found, _, _ = once
    assert (found.name, found.id) == ("grpo", found.config["trackway/run"])
    assert (found.config["lr"], found.config["more"]) == (2e-6, True)
    assert found.config["actor"] == {"layers": [1, 2]}
    assert found.config["config_odd"] == 1
    assert found.config["_Group"] == "job"
    assert found.config["trackway/project"] == "math/1"
    assert found.config["trackway/status"] == "finished"


def test_alerts_and_artifacts_are_kept(once):
    found, artifacts, _ = once
    alerts = {each["title"]: (each["step"], each["level"], each["text"]) for each in found.alerts}
    assert alerts == {"fell": (12, "error", "reward is 0"), "halfway": (None, "info", "")}
    assert {each["metadata"]["name"] for each in artifacts.values()} == {"final/model", "final-model"}
    assert {each["version"] for each in artifacts.values()} == {0}
    assert all([entry["size"] for entry in each["manifest"]] in ([7], [6]) for each in artifacts.values())


def test_nothing_of_the_programs_own_trackio_is_touched(once):
    _, _, out = once
    assert out.startswith("None ['MainThread'")
    assert "Thread-" not in out  # trackio's own would be called so


def test_a_run_of_the_program_itself_stays_the_current_one(tmp_path):
    code = """
        import trackio
        own = trackio.init(project="math/1", name="own", auto_log_cpu=False)
        with tracker() as first, tracker(experiment="other") as second:
            first.log_metrics({"loss": 1}, 1)
            second.log_metrics({"loss": 2}, 1)
            trackio.log({"loss": 3}, step=1)
        trackio.log({"loss": 4}, step=2)
        trackio.finish()
    """
    run(tmp_path, code)
    found = {each.name: values(each, "loss") for each in read(tmp_path)[0]}
    assert found == {"own": [(1, 3), (2, 4)], "grpo": [(1, 1)], "other": [(1, 2)]}


def test_a_resumed_run_replaces_what_comes_again(tmp_path):
    code = """
        with tracker(**{}) as tracked:
            for step in range({}, {}):
                tracked.log_metrics({{"loss": step, "step": {}}}, step)
                tracked.alert("at", str({}), step=step)
            print(tracked.run.id)
    """
    run_id = run(tmp_path, code.format("{'config': {'lr': 1}}", 0, 13, 1, 1)).split()[-1]
    run(tmp_path, code.format(f"{{'resume': {run_id!r}}}", 8, 11, 2, 2))
    (found,) = read(tmp_path)[0]
    assert found.id == run_id
    assert values(found, "loss") == [(step, step) for step in range(11)]
    assert [value for _, value in values(found, "__step")] == [1] * 8 + [2] * 3
    assert sorted((each["step"], each["text"]) for each in found.alerts) == [
        (step, "1" if step < 8 else "2") for step in range(11)
    ]
    assert found.config["lr"] == 1


@pytest.mark.parametrize("by", ["id", "name"])
def test_a_run_of_somebody_else_goes_on(tmp_path, by):
    code = f"""
        import trackio
        own = trackio.init(project="math/1", name="own", config={{"a": 1}}, auto_log_cpu=False)
        trackio.log({{"loss": 1}}, step=1)
        trackio.finish()
        with tracker(trackio={{"id": own.{by}}}, config={{"b": 2}}) as tracked:
            tracked.log_metrics({{"loss": 2}}, 2)
    """
    run(tmp_path, code)
    (found,) = read(tmp_path)[0]
    assert (found.name, values(found, "loss")) == ("own", [(1, 1), (2, 2)])
    assert (found.config["a"], found.config["b"]) == (1, 2)


def test_a_run_that_is_not_there_is_told(tmp_path):
    code = """
        tracked = tracker(trackio={"id": "nobody"})
        tracked.log_metrics({"loss": 1}, 1)
        tracked.finish(timeout=2)
    """
    run(tmp_path, code)
    (kept,) = tmp_path.glob("store/runs/*/trackio.json")
    assert "trackio.id='nobody': there is no such run" in json.loads(kept.read_text())["error"]


def test_a_killed_run_loses_nothing_and_doubles_nothing(tmp_path):
    code = """
        tracked = tracker(config={"lr": 1})
        print(tracked.run.id, flush=True)
        for step in range(200):
            tracked.log_metrics({"loss": step}, step)
        time.sleep(600)
    """
    environment = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    with start(tmp_path, BEGIN + dedent(code), **environment) as process:
        assert process.stdout is not None
        run_id = process.stdout.readline().strip()
        kept = tmp_path / "store" / "runs" / run_id / "trackio.json"
        wait_until(lambda: kept.exists() and json.loads(kept.read_text())["delivered"] > 5)
        process.kill()
    state = json.loads(kept.read_text())
    state |= {"offset": 0, "delivered": 0, "state": {}}  # as if it had died before this was saved
    kept.write_text(json.dumps(state))
    run(
        tmp_path,
        """
        from pathlib import Path
        from trackway.trace.loggers import catchup
        assert catchup.catch_up(Path("store"), print)
        """,
    )
    (found,) = read(tmp_path)[0]
    assert values(found, "loss") == [(step, step) for step in range(200)]
    assert (found.config["lr"], found.config["trackway/status"]) == (1, "killed")


def test_the_directory_is_a_setting_as_long_as_trackio_is_not_imported(tmp_path):
    code = """
        from trackway.trace.config_values import ConfigError
        with tracker(trackio={"dir": "own"}) as tracked:
            tracked.log_metrics({"loss": 1}, 1)
        os.chdir("/")
        assert "TRACKIO_DIR" in os.environ and os.environ["TRACKIO_DIR"] != "own"
        try:
            tracker(store=sys.path[0] + "/other", trackio={"dir": "elsewhere"})
        except ConfigError as error:
            print(error)
    """
    out = run(tmp_path, code)
    assert "trackio.dir='elsewhere' comes too late" in out
    assert values(read(tmp_path, place="own")[0][0], "loss") == [(1, 1)]
    assert not (tmp_path / "trackio").exists()


def test_on_a_network_file_system_trackio_takes_the_records_in_later(tmp_path):
    code = """
        with tracker(config={"lr": 1}) as tracked:
            tracked.log_metrics({"loss": 1}, 1)
            tracked.alert("fell", "", step=1)
    """
    run(tmp_path, code, TRACKIO_STORAGE_MODE="jsonl")
    assert not list((tmp_path / "trackio").glob("*.db"))
    take_in = "from trackio import fragments; print(fragments.import_inbox_dir())"
    run(tmp_path, take_in)
    (found,) = read(tmp_path)[0]
    assert values(found, "loss") == [(1, 1)]
    assert found.config["lr"] == 1
    assert [each["title"] for each in found.alerts] == ["fell"]


def test_a_project_whose_name_trackio_keeps_for_itself_gets_another(tmp_path):
    run(tmp_path, "tracker(project='model_artifacts', config={'a': 1}).finish()")
    (found,) = read(tmp_path, "project-model_artifacts-runs")[0]
    assert found.config["trackway/project"] == "model_artifacts"


def test_the_times_are_those_at_which_things_were_logged(tmp_path):
    run(tmp_path, "with tracker() as tracked: tracked.log_metrics({'loss': 1}, 1)")
    (found,) = read(tmp_path)[0]
    (time,) = (row["timestamp"] for row in found.rows if "loss" in row)
    (log,) = tmp_path.glob("store/runs/*/log.jsonl")
    logged = [json.loads(text)["time"] for text in log.read_text().splitlines() if "loss" in text]
    assert abs(datetime.fromisoformat(time).timestamp() - logged[0]) < 1e-5
