"""verl's experiment tracking on top of ours: the calls its trainers make, in a process of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .test_verl_plugin import look

pytestmark = pytest.mark.verl

TRAINER = """
import json, os, sys
import verl
from verl.trainer.ppo.ray_trainer import ValidationGenerationsLogger  # as the trainers have it
from verl.utils.tracking import DapoFilteredRewardTableLogger, RLInsightLogger, Tracking

config = {"trainer": {"project_name": "p", "experiment_name": "e", "logger": %(logger)r,
          "default_local_dir": "checkpoints", "resume_mode": "auto", %(more)s}, "actor": {"lr": 1e-6}}
loggers = config["trainer"]["logger"]
tracking = Tracking(project_name="p", experiment_name="e", default_backend=loggers, config=config)
generations = ValidationGenerationsLogger(project_name="p", experiment_name="e")
for step in range(%(first)d, %(first)d + 3):
    tracking.log(data={"critic/rewards/mean": step / 10, "timing_s/gen": 1.0, "note": "text"}, step=step)
generations.log(config["trainer"]["logger"], [["2 + 2?", "4", 1.0], ["3 + 3?", "5", 0.0]], %(first)d)
DapoFilteredRewardTableLogger("p", "e").log(config["trainer"]["logger"], {0.0: 3}, %(first)d)
tracking.finish(exit_code=%(code)d)
tracking.finish()
print(json.dumps({"home": Tracking.__module__, "generations": ValidationGenerationsLogger.__module__,
    "loggers": sorted(tracking.logger), "supported": Tracking.supported_backend}))
"""
ON = {"TRACKWAY_VERL": "1", "TRACKWAY_VERL_TRACKING": "1", "TRACKWAY_STORE": "store"}


def train(folder: Path, logger, *, more: str = "", first: int = 1, code: int = 0, **environment: str):
    program = TRAINER % {"logger": logger, "more": more, "first": first, "code": code}
    return look(folder, program, **environment)


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "store" / "runs").iterdir())


def log(run: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_the_trainers_calls_arrive_in_ours(tmp_path):
    found, done = train(tmp_path, ["console", "file"], **ON)
    assert found["home"] == found["generations"] == "trackway.trace.integrations.verl.tracking"
    assert found["loggers"] == ["console", "file"]
    assert {"clearml", "vemlp_wandb", "rl_insight", "tensorboard"} <= set(found["supported"])
    (run,) = runs(tmp_path)
    metrics = [(line["step"], line["metrics"]) for line in log(run, "metrics")]
    assert metrics == [(s, {"critic/rewards/mean": s / 10, "timing_s/gen": 1.0}) for s in (1, 2, 3)]
    assert log(run, "config")[0]["config"]["actor"] == {"lr": 1e-6}
    (generated,) = log(run, "generations")
    rows = sorted((row["prompt"], row["completion"], row["score"]) for row in generated["rows"])
    assert rows == [("2 + 2?", "4", 1.0), ("3 + 3?", "5", 0.0)]
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert "step:3 - critic/rewards/mean:0.3 - timing_s/gen:1" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "p" / "e.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "data" in line] == [1, 2, 3]


def test_a_failed_training_is_a_failed_run_and_settings_of_the_trainer_count(tmp_path):
    more = '"log_frequency": 2, "trackway": {"group": "g", "alerts": ["critic/rewards/mean > 0.2"]}'
    train(tmp_path, "console", more=more, code=1, **ON)
    (run,) = runs(tmp_path)
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["group"]) == ("failed", "g")
    timed = [line["step"] for line in log(run, "metrics") if "timing_s/gen" in line["metrics"]]
    assert timed == [1, 2, 3]  # the first, one that 2 divides, the last
    assert [line["step"] for line in log(run, "alert")] == [3]


def test_a_training_that_goes_on_from_a_checkpoint_goes_on_with_its_run(tmp_path):
    train(tmp_path, "console", **ON)
    train(tmp_path, "console", **ON)
    assert len(runs(tmp_path)) == 2  # nothing to go on from: another run
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    train(tmp_path, "console", first=3, **ON)
    latest = runs(tmp_path)[-1]
    assert len(runs(tmp_path)) == 2
    assert [line["step"] for line in log(latest, "metrics")] == [1, 2, 3, 3, 4, 5]
    assert [line["step"] for line in log(latest, "rewind")] == [3]


def test_without_being_asked_verls_own_tracking_stays(tmp_path):
    found, _ = train(tmp_path, ["console"], TRACKWAY_VERL="1", TRACKWAY_STORE="store")
    assert found["home"] == found["generations"] == "verl.utils.tracking"
    assert not (tmp_path / "store" / "runs").exists()
