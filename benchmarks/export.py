"""How fast traces reach MLflow on SQLite, and what that costs the process that trains.

    python benchmarks/export.py [--json] [--quick]

The same traces each way: ten spans (a rollout, what runs in it, four generations and four calls of a tool)
with some 4 KB of text in each, and the tags step, sample, rollout, validation and experiment. Each way
writes into a database of its own, which exists and has taken some traces before the clock starts.
Afterwards traces, spans and tags are counted in the database.

- **From the store**: Trackway's follower works off a store that is there already, index and all.
- **End to end**: the clock starts with the first span and stops when the last trace is in the database;
  the follower runs beside the traced process.
- **MLflow**: ``mlflow.start_span`` with asynchronous logging, from the first span to the end of the last
  flush; flushed now and then, since what its queues do not hold is lost. With a reward (``log_feedback``)
  and the link to a run (``link_traces_to_run``, a hundred at a time) as well in a second pass: neither can
  be given before the trace is stored.

**CPU in the training process**: a process that has recorded waits while the follower exports, and its CPU
is compared with that of one that waits with nothing to export. Of MLflow it is all CPU that its own
threads use from the first span to the end of the flush.
"""

from __future__ import annotations

import sqlite3
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measuring import Limit, Result, Table, apart, command, number, others_cpu, ratios, spread
from peers import MLFLOW, OURS, Way, installed, opened, rows_in_mlflow

TURNS = 4
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 28
"""Two of these make 4 KB, as a call's arguments and result do."""
SPANS = 2 + 2 * TURNS
MLFLOW_HOLDS = 80
"""Traces after which MLflow is flushed: its queue holds 1,000 tasks, one for each span and trace."""


def _record(way: Way, first: int, traces: int, *, rewards: bool = False) -> None:
    """Make traces of ten spans."""

    def generate(prompt: str, turn: int) -> str:
        return TEXT

    def search(query: str, turn: int) -> str:
        return TEXT

    def run(question: str) -> str:
        for turn in range(TURNS):
            search_(TEXT, turn)
            generate_(TEXT, turn)
        return TEXT

    generate_, search_, run_ = way.op("llm", generate), way.op("tool", search), way.op("rollout", run)
    for number_ in range(first, first + traces):
        with way.rollout(1, number_ // 8, number_ % 8):
            run_(TEXT)
            if rewards:
                way.reward(number_ % 8 / 8)


def _database() -> str:
    return f"sqlite:///{Path('mlflow.db').absolute()}"


@contextmanager
def _run() -> Any:
    """Make a run in the database to link traces to."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=_database())
    known = client.get_experiment_by_name("benchmark")
    artifacts = str(Path("artifacts").absolute())
    experiment = known.experiment_id if known else client.create_experiment("benchmark", artifacts)
    yield client, client.create_run(experiment).info.run_id


def from_store(traces: int, rewards: bool) -> dict[str, float]:
    """Export a store that was recorded before; with a reward and a link to a run, or without."""
    from trackway.trace.exporters.sync import Follower

    settings: dict[str, Any] = {
        "backend": "mlflow",
        "tracking_uri": f"sqlite:///{Path('mlflow.db').absolute()}",
    }
    with _run() as (_, run):
        if rewards:
            settings["run_id"] = run
        with opened(OURS, sync="off", **settings) as way:
            assert way.kept
            follower = Follower(Path("store"))
            _record(way, 0, 10, rewards=rewards)
            way.drain()
            _settle(follower)
            _record(way, 10, traces, rewards=rewards)
            while way.kept() < SPANS * (10 + traces):
                time.sleep(0.05)
            begin, cpu = time.perf_counter(), time.process_time()
            _settle(follower)
            taken = time.perf_counter() - begin
            cpu = time.process_time() - cpu
            follower.close()
    return {"seconds": taken, "cpu": cpu, **_stored(10, 10 * rewards)}


def _settle(follower: Any) -> None:
    if not follower.step(patient=False):
        raise RuntimeError(f"the export failed: {follower.errors()}")


def end_to_end(traces: int) -> dict[str, float]:
    """Record and export at once, the follower in a process of its own."""
    settings: dict[str, Any] = {
        "backend": "mlflow",
        "tracking_uri": f"sqlite:///{Path('mlflow.db').absolute()}",
    }
    with opened(OURS, sync="process", **settings) as way:
        _record(way, 0, 10)
        way.drain()
        begin = time.perf_counter()
        _record(way, 10, traces)
        way.drain()
        taken = time.perf_counter() - begin
    return {"seconds": taken, **_stored(10)}


def with_mlflow(traces: int, rewards: bool) -> dict[str, float]:
    """Let MLflow record and export the traces."""
    import mlflow

    with opened(MLFLOW) as way, _run() as (client, run):
        _record(way, 0, 10)
        way.drain()
        begin, cpu, others = time.perf_counter(), time.process_time(), others_cpu()
        for first in range(0, traces, MLFLOW_HOLDS):
            _record(way, 10 + first, min(MLFLOW_HOLDS, traces - first))
            way.drain()
        others = others_cpu() - others
        if rewards:
            # search_traces would read all spans again; the ids are what a program could have kept.
            ids = _trace_ids()[10:]
            for number_, trace_id in enumerate(ids):
                mlflow.log_feedback(trace_id=trace_id, name="reward", value=number_ % 8 / 8)
            for start in range(0, len(ids), 100):
                client.link_traces_to_run(ids[start : start + 100], run)
        return {
            "seconds": time.perf_counter() - begin,
            "cpu": time.process_time() - cpu,
            "others_cpu": others,
            **_stored(10),
        }


def _trace_ids() -> list[str]:
    with sqlite3.connect("mlflow.db") as db:
        return [row[0] for row in db.execute("SELECT request_id FROM trace_info ORDER BY timestamp_ms")]


def _stored(before: int, rewarded: int = 0) -> dict[str, int]:
    """Count what is in the database, without the traces that were there before the clock started."""
    return {
        "traces": rows_in_mlflow("trace_info") - before,
        "spans": rows_in_mlflow("spans") - before * SPANS,
        "step_tags": rows_in_mlflow("trace_tags WHERE key = 'step'") - before,
        "rewards": rows_in_mlflow("assessments") - rewarded,
        "linked": rows_in_mlflow("entity_associations") - rewarded,
    }


def waiting(traces: int, export: bool, idle: float = 6.0) -> dict[str, Any]:
    """Record, then wait while a follower exports, or ``idle`` seconds while nothing does.

    Returns:
        Seconds and CPU seconds of the wait, and whether the process has imported MLflow.
    """
    settings: dict[str, Any] = {"backend": "mlflow", "sync": "process"} if export else {}
    with opened(OURS, **settings) as way:
        assert way.kept
        _record(way, 0, 1)
        way.drain()  # by now the follower has been started
        _record(way, 1, traces)
        while way.kept() < SPANS * (1 + traces):
            time.sleep(0.05)
        database = Path("store/mlflow.db")
        begin, cpu = time.perf_counter(), time.process_time()
        # Looked at seldom, since looking costs as well.
        while time.perf_counter() - begin < (120 if export else idle) and _count(database) < 1 + traces:
            time.sleep(1)
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - begin
        arrived = _count(database)
    return {"seconds": seconds, "cpu": cpu, "arrived": arrived, "imports": "mlflow" in sys.modules}


def _count(database: Path) -> int:
    try:
        return rows_in_mlflow("trace_info", database)
    except sqlite3.Error:  # the follower has not made it yet
        return 0


def measure(quick: bool = False) -> Result:
    """Run each way several times, each time in a process of its own."""
    if not installed(MLFLOW):
        raise SystemExit("this benchmark needs MLflow: pip install 'trackway[mlflow]'")
    traces, rounds = (30, 1) if quick else (240, 3)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, (_, part, given) in WAYS.items():
            found[name].append(apart(__file__, part, traces=traces, **given))
    waits = {
        "exporting": apart(__file__, "waiting", traces=traces, export=True),
        "idle": apart(__file__, "waiting", traces=traces, export=False, idle=3 if quick else 6),
    }
    rates = {name: [traces / row["seconds"] for row in rows] for name, rows in found.items()}
    own_ms = _extra_cpu(waits) / traces
    mlflow_ms = statistics.median(1e3 * row["others_cpu"] / traces for row in found["mlflow"])
    own = [row for name in ("plain", "rich", "live") for row in found[name]]
    lost = sum(traces - row["traces"] + SPANS * traces - row["spans"] for row in own)
    plain, rich = ratios(rates["plain"], rates["mlflow"]), ratios(rates["rich"], rates["mlflow"])
    limits = [
        Limit("export: traces per second, times MLflow's", plain, 5, True, "×"),
        Limit("export with reward and run: traces per second, times MLflow's without", rich, 3, True, "×"),
        # Nothing, as far as that can be told from an idle process.
        Limit(
            "export: CPU ms per trace in the training process",
            own_ms,
            0.1,
            beside=f"MLflow {number(mlflow_ms)}",
        ),
        Limit("export: traces and spans that did not arrive", lost, 0),
    ]
    cpu = [
        ["Trackway", number(own_ms), "yes" if waits["exporting"]["imports"] else "no"],
        ["MLflow", number(mlflow_ms), "yes"],
    ]
    said = [f"{number(1e3 * wait['cpu'])} ms in {wait['seconds']:.0f} s" for wait in waits.values()]
    tables = [
        Table(
            "Traces of ten spans to MLflow on SQLite",
            [
                "",
                "traces per second",
                "times MLflow",
                "traces there",
                "spans there",
                "tagged",
                "rewarded",
                "linked",
            ],
            [
                _row(title, traces, found[name][-1], rates[name], rates["mlflow"])
                for name, (title, *_) in WAYS.items()
            ],
            f"{traces} traces; median and range of {rounds} rounds. "
            "Rewarded: with a reward; linked: to a run.",
        ),
        Table(
            "CPU of the training process for the export",
            ["", "ms per trace", "imports mlflow"],
            cpu,
            f"Trackway: {said[0]} while {traces} traces were exported, {said[1]} with nothing to export.",
        ),
    ]
    figures = {"traces": traces, "rounds": found, "rates": rates, "waits": waits, "own_ms": own_ms}
    return Result(figures, tables, limits)


def _extra_cpu(waits: dict[str, dict[str, float]]) -> float:
    """Give the milliseconds that a process used more than an idle one would have; noise may make it less."""
    exporting, idle = waits["exporting"], waits["idle"]
    return max(0.0, 1e3 * (exporting["cpu"] - idle["cpu"] / idle["seconds"] * exporting["seconds"]))


def _row(
    title: str, traces: int, stored: dict[str, float], rates: list[float], base: list[float]
) -> list[str]:
    there = [f"{stored[what]:.0f}" for what in ("step_tags", "rewards", "linked")]
    whole = [f"{stored['traces']:.0f} of {traces}", f"{stored['spans']:.0f} of {SPANS * traces}"]
    return [title, spread(rates), number(ratios(rates, base)), *whole, *there]


WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("Trackway, from the store", "from_store", {"rewards": False}),
    "mlflow": ("MLflow, start_span", "with_mlflow", {"rewards": False}),
    "rich": ("Trackway, from the store, with reward and run", "from_store", {"rewards": True}),
    "mlflow rich": ("MLflow, start_span, with reward and run", "with_mlflow", {"rewards": True}),
    "live": ("Trackway, end to end", "end_to_end", {}),
}
"""What a row is called, the part that measures it, and its arguments."""


if __name__ == "__main__":
    parts = (from_store, end_to_end, with_mlflow, waiting)
    command(__doc__, measure, {part.__name__: part for part in parts})
