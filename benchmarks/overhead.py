"""What a traced call costs the thread that makes it: Trackway beside what one would use instead.

    python benchmarks/overhead.py [--json] [--quick]

One call is an async generation inside a rollout: 2,048 prompt ids in, 256 response ids with log
probabilities out. Calls come in small bursts with pauses between them, as they do while an engine
generates, and each way is drained before the next one runs. All ways take turns in one process, round by
round; what is compared are ratios within a round, of which the median is given. What a way does on other
threads counts only as far as it keeps the interpreter's lock from the caller, or the caller waits for it:
that is the difference between CPU and wall clock.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from engine import Output, output, random_ids, tokenizer
from measuring import Limit, Result, Table, apart, command, number, ratios
from peers import BARE, BATCH, MLFLOW, OURS, UNTRACED, VERL, WEAVE, Way, installed, opened

PROMPT, RESPONSE = 2_048, 256
BURST, PAUSE = 10, 0.06
CALLS = {MLFLOW: 0.25, VERL: 0.25, WEAVE: 0.1}
"""Share of the calls that the dear ways make: all of theirs would take minutes, and say the same."""

Generate = Callable[[str, list[int], dict[str, float]], Awaitable[Output]]


def measure(quick: bool = False) -> Result:
    """Time every way in turn, round by round.

    Returns:
        For each way the median microseconds that a call adds on the caller's thread (CPU time of that
        thread, and wall-clock time), and the medians of the ratios to a bare SDK span and to Trackway.
    """
    rounds, calls = (1, 40) if quick else (7, 200)
    ways = [name for name in (UNTRACED, BARE, BATCH, OURS, MLFLOW, VERL, WEAVE) if installed(name)]
    taken = apart(__file__, "callers", ways=ways, rounds=rounds, calls=calls)
    added = _added(taken)
    tables = [_table(added, rounds, calls)]
    figures: dict[str, Any] = {"rounds": rounds, "calls": calls, "added": added}
    limits = [Limit("caller's CPU: Trackway, times a bare SDK span", added[OURS]["cpu_ratio"], 1.5, unit="×")]
    for name, least in ((VERL, 50), (MLFLOW, 10), (WEAVE, 10)):
        if name in added:
            times = added[name]["times_ours"]
            limits.append(Limit(f"caller's CPU: {name}, times Trackway", times, least, least=True, unit="×"))
    return Result(figures, tables, limits)


def callers(
    ways: list[str], rounds: int, calls: int, prompt: int = PROMPT, response: int = RESPONSE
) -> dict[str, list[tuple[float, float]]]:
    """Run all ways in this process; give for each and each round the CPU and wall microseconds of a call."""
    draw = random.Random(0)
    ids, result = random_ids(draw, prompt), output(draw, response)

    async def generate(request_id: str, prompt_ids: list[int], sampling_params: dict[str, float]) -> Output:
        return result

    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with ExitStack() as stack:
        open_ways: dict[str, tuple[Way, Generate]] = {}
        for name in ways:
            way = stack.enter_context(opened(name, token2text=True, tokenizer=tokenizer()))
            open_ways[name] = way, way.op("llm", generate)
        for number_ in range(rounds + 1):
            for name, (way, call) in open_ways.items():
                some = max(BURST, int(calls * CALLS.get(name, 1)))
                times = asyncio.run(_run(way, call, ids, some))
                way.drain()
                if number_:  # the first round only warms up
                    taken[name].append(times)
    return taken


async def _run(way: Way, call: Generate, prompt: list[int], calls: int) -> tuple[float, float]:
    parameters = {"temperature": 1.0, "top_p": 0.95}
    cpu = wall = 0
    with way.rollout(1, 0, 0):
        for _ in range(calls // BURST):
            wall -= time.perf_counter_ns()
            cpu -= time.thread_time_ns()
            for _ in range(BURST):
                await call("request", prompt, parameters)
            cpu += time.thread_time_ns()
            wall += time.perf_counter_ns()
            await asyncio.sleep(PAUSE)
    done = calls // BURST * BURST * 1e3
    return cpu / done, wall / done


def _added(taken: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    plain = taken[UNTRACED]
    added = {
        name: [(cpu - base[0], wall - base[1]) for (cpu, wall), base in zip(times, plain, strict=True)]
        for name, times in taken.items()
        if name != UNTRACED
    }
    cpu = {name: [time for time, _ in times] for name, times in added.items()}
    wall = {name: [time for _, time in times] for name, times in added.items()}
    return {
        name: {
            "cpu_us": statistics.median(cpu[name]),
            "wall_us": statistics.median(wall[name]),
            "cpu_ratio": ratios(cpu[name], cpu[BARE]),
            "wall_ratio": ratios(wall[name], wall[BARE]),
            "times_ours": ratios(cpu[name], cpu[OURS]),
            "wall_times_ours": ratios(wall[name], wall[OURS]),
        }
        for name in added
    }


def _table(added: dict[str, dict[str, float]], rounds: int, calls: int) -> Table:
    columns = ("cpu_us", "wall_us", "cpu_ratio", "wall_ratio", "times_ours")
    return Table(
        "What one traced call adds on the caller's thread",
        ["", "CPU µs", "wall µs", "CPU, times a bare span", "wall, times a bare span", "CPU, times Trackway"],
        [[name, *(number(row[column]) for column in columns)] for name, row in added.items()],
        f"{PROMPT:,} prompt ids in, {RESPONSE} response ids with log probabilities out; Trackway and verl "
        f"decode them to text. Medians of {rounds} rounds of {calls} calls.",
    )


if __name__ == "__main__":
    command(__doc__, measure, {"callers": callers})
