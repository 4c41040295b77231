"""How cost grows with spans, with processes, and with how much was recorded.

    python benchmarks/scale.py [--json] [--quick]

**Spans.** Bursts by 64 concurrent rollouts, as in ``writer.py``: what they take, and how much memory.

**Processes.** Several processes record small spans into one store at the same time. Afterwards the spans
are counted in the journal. The seconds are those from the first span of the first process to the end of
the last one.

**Trajectories.** How long the index takes, which the first question to a store builds, and how long the
next questions take; ``trackway ls`` is a process of its own, start of the interpreter included.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loop import Program
from measuring import Limit, Result, Table, apart, command, number, others_cpu
from peers import OURS, opened, spans_in_journal
from writer import KEEP_ALL, record
from writer import __file__ as writer_file

SPANS = [1_000, 10_000, 100_000]
PROCESSES = [1, 4, 8]
TRAJECTORIES = [100, 1_000, 5_000]


def processes(count: int, spans: int) -> dict[str, float]:
    """Let several processes record into one store at the same time."""
    store = Path("store").absolute()
    command_ = [sys.executable, __file__, "--part", "worker"]
    given = [json.dumps({"store": str(store), "spans": spans, "step": 1 + n}) for n in range(count)]
    workers = [subprocess.Popen([*command_, some, f"{n}.json"]) for n, some in enumerate(given)]
    if sum(worker.wait() != 0 for worker in workers):
        raise RuntimeError("a process that records has failed")
    reports = [json.loads(Path(f"{n}.json").read_text(encoding="utf-8")) for n in range(count)]
    return {
        "processes": count,
        "made": count * spans,
        "kept": spans_in_journal(store),
        "cpu": sum(report["cpu"] for report in reports),
        "seconds": max(report["end"] for report in reports) - min(report["begin"] for report in reports),
    }


def worker(store: str, spans: int, step: int) -> dict[str, float]:
    """Record small spans: one of the processes."""
    with opened(OURS, store=store, **KEEP_ALL) as way:
        begin, cpu = time.time(), others_cpu()
        asyncio.run(record(way, spans, pause=False, step=step))
    return {"begin": begin, "end": time.time(), "cpu": others_cpu() - cpu}


def reading(trajectories: int) -> dict[str, float]:
    """Record trajectories, eight of a sample and 64 samples of a step; time questions to the store."""
    import trackway

    program = Program(1, 4, (512, 1_024))
    with opened(OURS, **KEEP_ALL) as way:
        assert way.kept
        rollout = program.traced(way, instant=True)

        async def all_rollouts() -> None:
            for n in range(trajectories):
                await rollout(1 + n // 512, n % 512)

        asyncio.run(all_rollouts())
        while way.kept() < program.spans * trajectories:
            time.sleep(0.05)
    store = trackway.open_store("store")
    seconds: dict[str, float] = {}

    def timed(name: str, times: int, question: Callable[[], Any]) -> Any:
        taken = []
        for _ in range(times):
            begin = time.perf_counter()
            answer = question()
            taken.append(time.perf_counter() - begin)
        seconds[name] = statistics.median(taken)
        return answer

    total = timed("index", 1, store.status).trajectories
    found = timed("query", 5, lambda: len(list(store.query(step=1, sample=3))))
    timed("load", 5, lambda: store.load("1/3/0"))
    timed("status", 5, store.status)
    store.close()
    ls = [sys.executable, "-m", "trackway", "ls", "--store", "store", "--step", "1", "--sample", "3"]
    timed("ls", 3, lambda: subprocess.run(ls, check=True, stdout=subprocess.DEVNULL))
    return {"trajectories": total, "found": found, **seconds}


def measure(quick: bool = False) -> Result:
    """Measure all three kinds of growth."""
    bursts = [
        apart(writer_file, "burst", name=OURS, spans=count) for count in (SPANS[:2] if quick else SPANS)
    ]
    spans = 1_000 if quick else 10_000
    many = [
        apart(__file__, "processes", count=count, spans=spans)
        for count in (PROCESSES[:2] if quick else PROCESSES)
    ]
    stores = [
        apart(__file__, "reading", trajectories=count)
        for count in (TRAJECTORIES[:1] if quick else TRAJECTORIES)
    ]
    tables = [
        Table(
            "Spans: bursts",
            ["spans", "kept", "s to produce", "s until all is kept", "µs each", "memory MiB", "KiB each"],
            [
                [
                    f"{row['made']:,}",
                    f"{row['kept']:,}",
                    number(row["produced"]),
                    number(row["settled"]),
                    number(1e6 * row["settled"] / row["made"]),
                    number(row["grown"] / 2**20),
                    number(row["grown"] / 2**10 / row["made"]),
                ]
                for row in bursts
            ],
        ),
        Table(
            "Processes: small spans into one store",
            ["processes", "spans", "kept", "seconds", "spans per second", "µs of writer's CPU per span"],
            [
                [
                    f"{row['processes']}",
                    f"{row['made']:,}",
                    f"{row['kept']:,}",
                    number(row["seconds"]),
                    number(row["made"] / row["seconds"]),
                    number(1e6 * row["cpu"] / row["made"]),
                ]
                for row in many
            ],
        ),
        Table(
            "Trajectories: reading a store",
            [
                "trajectories",
                "index s",
                "index ms each",
                "query of 8, ms",
                "load of 1, ms",
                "status ms",
                "ls s",
            ],
            [
                [
                    f"{row['trajectories']:,}",
                    number(row["index"]),
                    number(1e3 * row["index"] / row["trajectories"]),
                    *(number(1e3 * row[what]) for what in ("query", "load", "status")),
                    number(row["ls"]),
                ]
                for row in stores
            ],
            "Ten spans each.",
        ),
    ]
    lost = sum(row["made"] - row["kept"] for row in [*bursts, *many])
    limit = Limit(f"bursts, and up to {many[-1]['processes']} processes on one store: spans lost", lost, 0)
    return Result({"bursts": bursts, "processes": many, "trajectories": stores}, tables, [limit])


if __name__ == "__main__":
    command(__doc__, measure, {part.__name__: part for part in (processes, worker, reading)})
