"""What becomes of spans after the call: how fast they are written, and how many of a burst are kept.

    python benchmarks/writer.py [--json] [--quick]

**Writer.** 64 concurrent rollouts call a small tool again and again, and pause so that the writer keeps
up. All CPU time of the process that was not spent on the thread of the loop is put down to the writer,
housekeeping and counters included. No token ids, so nothing is decoded.

**Burst.** 100,000 spans as fast as 64 concurrent rollouts can produce them. Afterwards the spans are
counted where they should be, not taken from anybody's counters; memory is the growth of the resident
memory at its peak. Trackway's settings are those for runs of which nothing may be lost:
``queue_policy="block"``. Peers run at their defaults.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from measuring import Limit, Result, Table, apart, beside, command, memory_growth, number, others_cpu, spread
from peers import BATCH, MLFLOW, OURS, Way, installed, opened

from trackway.trace.config import TraceConfig

ROLLOUTS = 64
BURST, BURST_MLFLOW = 100_000, 20_000
"""Spans of a burst; MLflow's takes a minute even so."""
KEEP_ALL = {"queue_policy": "block", "queue_timeout": 60.0}
PAUSE_EVERY, PAUSE = 500, 0.05
PATIENCE = 120.0


def _tool(way: Way) -> Any:
    def lookup(city: str, days: int) -> str:
        return "Sunny, 21 degrees, light wind from the west; rain is expected in the evening."

    return way.op("tool", lookup)


async def record(way: Way, spans: int, *, pause: bool, step: int = 1) -> int:
    """Run rollouts at once until there are so many spans, their own among them; give their number."""
    tool = _tool(way)
    share, rest = divmod(spans, ROLLOUTS)

    async def rollout(number_: int) -> None:
        with way.rollout(step, number_ // 8, number_ % 8):
            for turn in range(share + (number_ < rest) - 1):
                tool("Ulm", turn)
                if turn % 8 == 7:
                    await asyncio.sleep(PAUSE * 8 * ROLLOUTS / PAUSE_EVERY if pause else 0)

    await asyncio.gather(*[rollout(number_) for number_ in range(ROLLOUTS)])
    return spans


def written(spans: int, rounds: int) -> dict[str, Any]:
    """Measure the CPU that writing takes, round by round."""
    found: dict[str, Any] = {"spans": spans, "cpu": []}
    with opened(OURS) as way:
        assert way.kept
        asyncio.run(record(way, ROLLOUTS * 10, pause=False))
        way.drain()
        for _ in range(rounds):
            before = way.kept()
            cpu = others_cpu()
            made = asyncio.run(record(way, spans, pause=True))
            while True:
                spent = others_cpu() - cpu
                time.sleep(0.1)
                if others_cpu() - cpu - spent < 0.002:  # nothing but an idle thread
                    break
            found["cpu"].append(spent)
            kept = way.kept() - before
            if kept != made:
                raise RuntimeError(f"{kept} of {made} spans are in the journal")
    return found


def burst(name: str, spans: int) -> dict[str, Any]:
    """Let all spans come at once; count those that are kept."""
    settings: dict[str, Any] = KEEP_ALL if name == OURS else {}
    grown: dict[str, int] = {}
    with opened(name, **settings) as way:
        assert way.kept
        _tool(way)("Ulm", 0)
        way.drain()
        before = way.kept()
        with memory_growth(grown):
            begin = time.perf_counter()
            made = asyncio.run(record(way, spans, pause=False))
            produced = time.perf_counter() - begin
            if name == OURS:  # its flush reads the store as well, which is somebody else's work
                while way.kept() - before < made and time.perf_counter() - begin < PATIENCE:
                    time.sleep(0.05)
            else:
                way.drain()
            settled = time.perf_counter() - begin
        kept = way.kept() - before
    # The SDK knows no rollouts: there the block around one makes no span.
    made -= ROLLOUTS if name == BATCH else 0
    return {"made": made, "kept": kept, "produced": produced, "settled": settled, "grown": grown["bytes"]}


def measure(quick: bool = False) -> Result:
    """Measure the writer, and a burst each way."""
    few = 20 if quick else 1
    taken = apart(__file__, "written", spans=20_000 // few, rounds=2 if quick else 5)
    bursts = {OURS: BURST // few, BATCH: BURST // few, MLFLOW: BURST_MLFLOW // few}
    found: dict[str, dict[str, Any]] = {
        name: apart(__file__, "burst", name=name, spans=spans)
        for name, spans in bursts.items()
        if installed(name)
    }
    rates = [taken["spans"] / cpu for cpu in taken["cpu"]]
    rate = statistics.median(rates)
    own = found[OURS]
    bound = TraceConfig().max_queue_bytes  # what the documentation says
    lost = {name: float(row["made"] - row["kept"]) for name, row in found.items()}
    limits = [
        Limit("writer: small spans per second of its CPU", rate, 20_000, least=True),
        Limit(f"burst of {own['made']:,} spans: lost by Trackway", lost[OURS], 0, beside=beside(lost, "")),
        Limit("burst: memory of Trackway at its peak", own["grown"] / 2**20, bound / 2**20, unit=" MiB"),
    ]
    tables = [
        Table(
            "Writing small spans",
            ["spans", "spans per second of CPU", "µs of CPU per span"],
            [[f"{taken['spans']:,}", spread(rates), number(1e6 / rate)]],
            "Everything that the process does beside the loop's thread. Median and range of "
            f"{len(rates)} rounds.",
        ),
        Table(
            "A burst by 64 concurrent rollouts",
            ["", "spans", "kept", "lost", "lost %", "s to produce", "s until all is kept", "memory MiB"],
            [
                [
                    name,
                    f"{row['made']:,}",
                    f"{row['kept']:,}",
                    f"{row['made'] - row['kept']:,}",
                    number(100 * (1 - row["kept"] / row["made"])),
                    number(row["produced"]),
                    number(row["settled"]),
                    number(row["grown"] / 2**20),
                ]
                for name, row in found.items()
            ],
            "Trackway with queue_policy=block into the journal, BatchSpanProcessor at its defaults to a "
            "stand-in collector, MLflow asynchronous into SQLite.",
        ),
    ]
    return Result({"writer": taken, "bursts": found}, tables, limits)


if __name__ == "__main__":
    command(__doc__, measure, {"written": written, "burst": burst})
