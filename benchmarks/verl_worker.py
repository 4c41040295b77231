"""What tracing costs inside verl's own worker.

verl's ``AgentLoopWorker`` and ``ToolAgentLoop`` run whole batches, with a real tokenizer, a tool and rewards;
only the engine is stood in for, by one that follows a script at once. Untraced, with verl's own tracing into
MLflow and with Trackway take turns, each time in a new process, and decode token ids to text. CPU of the
process, all its threads, from the first rollout until everything that was traced has left it: with Trackway
into the journal, closed as at the end of a worker, with verl's tracing into MLflow's database. What
Trackway's exporting process then needs is measured apart, from its start to its end. Spans are counted in
the databases.

    .venv-verl/bin/python benchmarks/verl_worker.py [--json] [--quick]
"""

from __future__ import annotations

import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measuring import Limit, Result, Table, apart, command, number, ratios, spread

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

UNTRACED, OURS, VERLS = "untraced", "Trackway", "verl's own tracing"
SAMPLES, N, ROUNDS = 64, 4, 5
# A rollout is its block, `run`, two generations, two looks for tool calls, and with Trackway the tool's call.
SPANS = {UNTRACED: 0, OURS: 7, VERLS: 6}
_TRACE = "actor_rollout_ref.rollout.trace"


def measure(quick: bool) -> Result:
    samples, rounds = (4, 1) if quick else (SAMPLES, ROUNDS)
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in SPANS}
    for _ in range(rounds):
        for way, results in taken.items():
            results.append(apart(__file__, "batch", way=way, samples=samples))
    cpu = {way: [item["cpu_ms"] for item in results] for way, results in taken.items()}
    added = {
        way: [ms - base for ms, base in zip(cpu[way], cpu[UNTRACED], strict=True)] for way in (OURS, VERLS)
    }
    lost = {way: sum(item["lost"] for item in results) for way, results in taken.items()}
    export = statistics.median(item["export_ms"] for item in taken[OURS])
    rows = [
        [
            way,
            spread(cpu[way]),
            number(ratios(cpu[way], cpu[UNTRACED])),
            spread(added[way]) if way in added else "",
            number(export) if way == OURS else "",
            f"{lost[way]:,} of {sum(item['spans'] for item in taken[way]):,}" if SPANS[way] else "",
        ]
        for way in taken
    ]
    table = Table(
        "CPU of one rollout in verl's worker, everything drained",
        ["", "CPU ms", "times untraced", "CPU ms added", "ms in the exporting process", "spans lost"],
        rows,
        f"A batch of {samples} × {N} rollouts of two turns and about 220 tokens, in {rounds} rounds: median, "
        "least and most.",
    )
    share = ratios(added[OURS], added[VERLS])
    limits = [
        Limit("verl's worker: CPU that Trackway adds, of what verl's tracing adds", share, 0.05, unit="×"),
        Limit("verl's worker: spans lost by Trackway", lost[OURS], 0, beside=f"verl's own {lost[VERLS]:,}"),
    ]
    return Result({"cpu_ms": cpu, "added_ms": added, "lost": lost, "export_ms": export}, [table], limits)


def batch(way: str, samples: int) -> dict[str, Any]:
    """Run a batch in this process, after a small one that is not timed."""
    traced = way != UNTRACED
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{Path('mlflow.db').absolute()}"
    if way == OURS:
        os.environ |= {"TRACKWAY_VERL": "1", "TRACKWAY_STORE": "store", "TRACKWAY_SYNC": "off"}
    # verl's plugins are loaded here.
    from verl_world import Engine, follow, generate, make_model, make_worker, rows

    import trackway

    backend = "mlflow" if traced else "null"
    model = Path("model")
    model.mkdir()
    worker = make_worker(
        make_model(model.absolute()),
        f"{_TRACE}.backend={backend}",
        f"{_TRACE}.token2text={traced}",
        "actor_rollout_ref.rollout.full_determinism=true",
    )
    follow(worker, Engine())
    warm, drain = {
        UNTRACED: (lambda: None, lambda: None),
        OURS: (trackway.flush, trackway.shutdown),
        VERLS: (_flush_verls, _flush_verls),
    }[way]
    generate([worker], rows(range(2)), n=N, step=0)
    warm()
    before = time.process_time()
    generate([worker], rows(range(samples)), n=N)
    drain()
    cpu = time.process_time() - before
    rollouts = samples * N
    expected = SPANS[way] * (rollouts + 2 * N)
    export = _export() if way == OURS else 0.0
    kept = _in_mlflow() if traced else 0
    return {
        "cpu_ms": cpu * 1e3 / rollouts,
        "export_ms": export * 1e3 / rollouts,
        "spans": expected,
        "lost": expected - kept,
    }


def _flush_verls() -> None:
    import mlflow

    mlflow.flush_trace_async_logging()


def _export() -> float:
    """Send everything on, in a process as it does that beside a training; give its CPU seconds."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    command_ = [sys.executable, "-m", "trackway", "sync", "--store", "store"]
    subprocess.run(command_, check=True, stdout=subprocess.DEVNULL)
    return used() - before


def _in_mlflow() -> int:
    with sqlite3.connect("mlflow.db") as database:
        return int(database.execute("SELECT count(*) FROM spans").fetchone()[0])


if __name__ == "__main__":
    command(__doc__, measure, {"batch": batch})
