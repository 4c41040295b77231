"""What logging metrics costs the training: one Tracker with five loggers beside the five SDKs in turn.

    python benchmarks/loggers.py [--json] [--quick]

A step logs 50 metrics to W&B (offline), MLflow (SQLite), SwanLab (offline), TensorBoard and trackio, all
on this machine and without a network. The SDKs are called as a training script calls them, one after
the other. Between steps the training thread waits, as it does for its devices. Every way runs in a
process of its own; the ways take turns, and what is compared are ratios within a round, of which the
median is given. It measures the wall-clock time that the calls of a step hold up the thread that makes
them, mean over all steps but the first ones; the processor time of the whole process and of what it
starts for each step, until everything has arrived; and the same with one more logger, which never answers.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import Limit, Result, Table, apart, command, number, ratios

METRICS = 50
STEPS, WARM = 200, 20
PAUSE = 0.05
OURS, HANGING, SDKS = "Tracker, five loggers", "Tracker, and one that hangs", "five SDKs in turn"
NAMES = ["wandb", "mlflow", "swanlab", "tensorboard", "trackio"]


def measure(quick: bool = False) -> Result:
    """Run every way in turn, round by round.

    Returns:
        For each way the milliseconds that a step's calls take, and of processor time for a step.
    """
    rounds, steps = (1, 30) if quick else (3, STEPS)
    taken: dict[str, list[dict[str, float]]] = {OURS: [], HANGING: [], SDKS: []}
    for _ in range(rounds):
        for name, part in ((OURS, "ours"), (SDKS, "sdks"), (HANGING, "hanging")):
            taken[name].append(apart(__file__, part, steps=steps))
    rows = []
    for name, found in taken.items():
        calls = [each["call"] for each in found]
        rows.append(
            [
                name,
                number(1e3 * statistics.median(calls)),
                number(1e3 * statistics.median(each["worst"] for each in found)),
                number(1e3 * statistics.median(each["cpu"] for each in found)),
                number(ratios(calls, [each["call"] for each in taken[SDKS]])),
            ]
        )
    head = ["", "calls of a step, ms", "dearest step, ms", "processor, ms a step", "calls, times five SDKs"]
    note = f"{METRICS} metrics a step, {steps} steps, median of {rounds} rounds."
    limits = [
        Limit(
            f"time of the training thread: {name}, times five SDKs",
            ratios([each["call"] for each in taken[name]], [each["call"] for each in taken[SDKS]]),
            1 / 20,
            unit="×",
        )
        for name in (OURS, HANGING)
    ]
    return Result({"taken": taken}, [Table("Logging 50 metrics to five tools", head, rows, note)], limits)


def ours(steps: int) -> dict[str, float]:
    """Log through one Tracker."""
    return _tracked(NAMES, steps)


def hanging(steps: int) -> dict[str, float]:
    """Log through one Tracker, of which one logger more never answers."""
    site = Path("site")
    info = site / "hangs-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hangs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trackway.loggers]\nhangs = hangs:Hangs\n")
    (site / "hangs.py").write_text(
        "import time\n"
        "from trackway.trace.loggers import ExperimentLogger\n"
        "class Hangs(ExperimentLogger):\n"
        "    def log_metrics(self, metrics, step): time.sleep(3600)\n"
        "    def log_config(self, config): pass\n"
        "    def log_artifact(self, artifact, name): pass\n"
    )
    sys.path.insert(0, str(site.absolute()))
    return _tracked([*NAMES, "hangs"], steps)


def _tracked(names: list[str], steps: int) -> dict[str, float]:
    from trackway.trace.loggers import Tracker

    tracker = Tracker(
        names,
        project="bench",
        experiment="ours",
        wandb={"offline": True},
        swanlab={"mode": "offline"},
        mlflow={"tracking_uri": f"sqlite:///{Path('mlflow.db').absolute()}"},
    )
    tracker.flush(timeout=60 if "hangs" not in names else 20)

    def finish() -> None:
        tracker.finish(timeout=60 if "hangs" not in names else 20)
        missing = [each for each in tracker.behind if each != "hangs"]
        if missing:
            raise RuntimeError(f"{missing} lack something")

    return _time(tracker.log_metrics, finish, steps)


def sdks(steps: int) -> dict[str, float]:
    """Call the five SDKs one after the other."""
    import mlflow
    import swanlab
    import trackio
    import wandb
    from torch.utils.tensorboard import SummaryWriter

    mlflow.set_tracking_uri(f"sqlite:///{Path('mlflow.db').absolute()}")
    mlflow.set_experiment("bench")
    mlflow.start_run(run_name="sdks")
    wandb.init(project="bench", name="sdks", mode="offline")
    swanlab.init(project="bench", experiment_name="sdks", mode="offline")
    trackio.init(project="bench", name="sdks")
    writer = SummaryWriter("tensorboard")

    def log(metrics: dict[str, float], step: int) -> None:
        wandb.log(metrics, step=step)
        mlflow.log_metrics(metrics, step=step)
        swanlab.log(metrics, step=step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        trackio.log(metrics, step=step)

    def finish() -> None:
        wandb.finish()
        mlflow.end_run()
        swanlab.finish()
        writer.close()
        trackio.finish()

    return _time(log, finish, steps)


def _time(
    log: Callable[[dict[str, float], int], object], finish: Callable[[], object], steps: int
) -> dict[str, float]:
    taken = []
    before = _cpu()
    for step in range(steps):
        metrics = {f"group{n % 5}/metric{n}": step + n / 7 for n in range(METRICS)}
        begin = time.perf_counter()
        log(metrics, step)
        taken.append(time.perf_counter() - begin)
        time.sleep(PAUSE)
    finish()
    cpu = _cpu() - before
    counted = taken[min(WARM, steps // 3) :]
    return {"call": statistics.fmean(counted), "worst": max(counted), "cpu": cpu / steps}


def _cpu() -> float:
    """Give the processor seconds of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


PARTS: dict[str, Callable[..., Any]] = {"ours": ours, "hanging": hanging, "sdks": sdks}

if __name__ == "__main__":
    os.environ["WANDB_SILENT"] = "true"
    command(__doc__, measure, PARTS)
