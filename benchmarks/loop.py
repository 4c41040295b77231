"""What tracing does to an asyncio loop in which many rollouts run at once: wall time, and stalls.

    python benchmarks/loop.py [--json] [--quick]

One step of a training: 256 concurrent rollouts of 8 turns. A turn is a generation, which the engine
answers after 0.5 to 1.5 seconds (``asyncio.sleep``, drawn beforehand from one seed, the same in every
run), and a call of a tool. Prompts hold ids of real text and grow from 2,048 to 8,192 of them; every
response has 256 ids with log probabilities; the rollout's result repeats all ids with mask and log
probabilities, as verl's does. All of this is generated before the clock starts, and taken out of the
garbage collector's sight (``gc.freeze``): it stands for what an engine holds. A turn's prompt is a fresh
list, as in a real loop. The collector runs as by default.

**Wall time.** A traced run follows an untraced one, several times over in one process; the extra time of
each pair is given by its median and range. Every way exports to SQLite. With Trackway its follower, a
process of its own, works off the rollouts of a step before while the clock runs, as in the middle of a
training; the other ways export from threads of the traced process.

**Stalls.** A coroutine sleeps for a millisecond again and again. By how much it comes late is how long the
loop stood still. Here prompts grow from 30,720 to 32,768 ids, and the rollouts begin within one second, not
in the same turn of the loop. Several steps run untraced, one after the other, and then as many traced; from
the worst stall of the traced ones that of the untraced ones is taken off. They have to be several: the worst
stalls, traced or not, are walks of Python's garbage collector over the lists of the program, and the long
one is every eleventh. Where in a step that one falls decides how many lists it finds, so each step begins at
another place of that cycle, the same for both. How many walks there were, and what they took, stands beside.
The same with the collector switched off shows what tracing itself holds up. What happens when all rollouts
begin in the same turn of the loop stands in a line of its own.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine import Output, Trajectory, text_ids, tokenizer
from measuring import Limit, Result, Table, apart, beside, command, others_cpu, spread
from peers import MLFLOW, OURS, UNTRACED, VERL, Way, installed, opened

RESPONSE = 256
OBSERVATION = "The document says that the answer is in the other document. " * 5
SHORT, LONG = (2_048, 8_192), (30_720, 32_768)
"""Prompt ids of the first and of the last turn."""
CYCLE = 11
"""Walks of the garbage collector over its youngest generation until one covers the second as well."""


class Program:
    """The program that is traced.

    Args:
        rollouts, turns: how many.
        prompts: prompt ids of the first and of the last turn.
        seconds: shortest and longest time of a generation.
        stagger: seconds within which the rollouts begin.
    """

    def __init__(
        self,
        rollouts: int,
        turns: int,
        prompts: tuple[int, int],
        seconds: tuple[float, float] = (0.5, 1.5),
        stagger: float = 0.0,
    ) -> None:
        draw = random.Random(0)
        first, last = prompts
        self.rollouts = rollouts
        self.lengths = [first + (last - first) * turn // max(1, turns - 1) for turn in range(turns)]
        whole = last + RESPONSE
        pool = list(text_ids(8 * whole))
        # Each rollout reads the same text from another place on.
        starts = [draw.randrange(len(pool) - whole) for _ in range(rollouts)]
        self.ids = [pool[start : start + whole] for start in starts]
        self.logprobs = [-draw.random() for _ in range(whole)]
        self.mask = [0] * whole
        for length in self.lengths:
            self.mask[length : length + RESPONSE] = [1] * RESPONSE
        self.delays = [[draw.uniform(*seconds) for _ in range(turns)] for _ in range(rollouts)]
        self.begins = [draw.uniform(0, stagger) for _ in range(rollouts)]

    @property
    def spans(self) -> int:
        """Spans of one step: each rollout has its own, one of what runs in it, and two in each turn."""
        return self.rollouts * (2 + 2 * len(self.lengths))

    def traced(self, way: Way, *, instant: bool = False) -> Any:
        """Give the coroutine function that runs one rollout, traced."""

        async def generate(
            request_id: int, prompt_ids: list[int], sampling_params: dict[str, float], turn: int
        ) -> Output:
            if not instant:
                await asyncio.sleep(self.delays[request_id][turn])
            at = self.lengths[turn]
            return Output(
                self.ids[request_id % self.rollouts][at : at + RESPONSE], self.logprobs[at : at + RESPONSE]
            )

        def search(query: str) -> str:
            return OBSERVATION

        async def run(request_id: int, sampling_params: dict[str, float]) -> Trajectory:
            ids = self.ids[request_id % self.rollouts]
            for turn, length in enumerate(self.lengths):
                await generate_(request_id, ids[:length], sampling_params, turn)
                search_("where is the answer?")
            first = self.lengths[0]
            return Trajectory(
                ids[:first], ids[first:], self.mask[first:], self.logprobs[first:], len(self.lengths)
            )

        generate_, search_, run_ = way.op("llm", generate), way.op("tool", search), way.op("rollout", run)

        async def rollout(step: int, number_: int) -> Trajectory:
            if not instant:
                await asyncio.sleep(self.begins[number_])
            with way.rollout(step, number_ // 8, number_ % 8):
                result: Trajectory = await run_(number_, {"temperature": 1.0, "top_p": 0.95})
                way.reward(0.5)
            return result

        return rollout

    async def all(self, rollout: Any, step: int) -> None:
        """Run all rollouts at once."""
        await asyncio.gather(*[rollout(step, number_) for number_ in range(self.rollouts)])

    async def step(self, rollout: Any, step: int) -> dict[str, float]:
        """Run all rollouts at once, beside a ticker; give the figures of the loop."""
        gaps: list[float] = []
        ticker = asyncio.create_task(_tick(gaps))
        await asyncio.sleep(0.05)
        gaps.clear()
        others = others_cpu()
        cpu, wall = time.thread_time(), time.perf_counter()
        with _walks() as walks:
            await self.all(rollout, step)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        others = others_cpu() - others
        ticker.cancel()
        gaps.sort()
        return {
            "seconds": wall,
            "cpu": cpu,
            "others_cpu": others,
            "worst_ms": 1e3 * gaps[-1],
            "p999_ms": 1e3 * gaps[-1 - len(gaps) // 1_000],
            "walks": len(walks),
            "walks_ms": 1e3 * sum(walks),
        }


@contextmanager
def _walks() -> Iterator[list[float]]:
    """Give the seconds that each walk of the garbage collector takes while the block runs."""
    found: list[float] = []
    begun = 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.perf_counter()
        else:
            found.append(time.perf_counter() - begun)

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


async def _tick(gaps: list[float]) -> None:
    before = time.perf_counter()
    while True:
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        gaps.append(now - before - 0.001)
        before = now


def pairs(name: str, plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run untraced and traced steps in turn, in this process.

    Args:
        name: the way to trace.
        plans: for each ``program`` (arguments of ``Program``), ``rounds`` (how many pairs), ``backlog``
            (whether the export of an earlier step is to go on while the clock runs), ``in_a_row`` (whether
            all untraced steps come before the traced ones), and ``collector`` (whether it runs).
    """
    given = {"backend": "mlflow", "sync": "process"} if name == OURS else {}
    with opened(UNTRACED) as nothing, opened(name, token2text=True, tokenizer=tokenizer(), **given) as way:
        return [_pairs(nothing, way, **plan) for plan in plans]


def _pairs(
    nothing: Way,
    way: Way,
    program: dict[str, Any],
    rounds: int,
    backlog: bool = False,
    in_a_row: bool = False,
    collector: bool = True,
) -> dict[str, Any]:
    work = Program(**program)
    untraced, traced = work.traced(nothing), work.traced(way)
    instant = work.traced(way, instant=True)
    # Everything is imported and in its place before the clock starts.
    asyncio.run(_first(instant))
    way.drain()
    begin = recorded = _kept(way)
    found: dict[str, Any] = {"untraced": [], "traced": [], "drained": [], "exported_meanwhile": []}
    gc.collect()
    gc.freeze()
    if not collector:
        gc.disable()
    if in_a_row:
        for number_ in range(rounds):
            _turn_to(number_ * CYCLE // rounds)
            found["untraced"].append(asyncio.run(work.step(untraced, number_)))
    for number_ in range(rounds):
        if in_a_row:
            _turn_to(number_ * CYCLE // rounds)
        else:
            found["untraced"].append(asyncio.run(work.step(untraced, number_)))
        if backlog:
            asyncio.run(work.all(instant, 1_000 + number_))
            recorded += work.spans
            while _kept(way) < recorded:
                time.sleep(0.1)
            before = _exported()
        found["traced"].append(asyncio.run(work.step(traced, number_)))
        recorded += work.spans
        if backlog:
            found["exported_meanwhile"].append(_exported() - before)
        clock = time.perf_counter()
        way.drain()
        found["drained"].append(time.perf_counter() - clock)
    gc.enable()
    gc.unfreeze()
    return {**found, "spans": recorded - begin, "kept": _kept(way) - begin}


def _turn_to(place: int) -> None:
    """Turn the garbage collector to a place of the cycle that ends with a walk over its second generation."""
    gc.collect(1)
    for _ in range(place):
        gc.collect(0)


async def _first(rollout: Any) -> None:
    await rollout(0, 0)


def _kept(way: Way) -> int:
    return 0 if way.kept is None else way.kept()


def _exported() -> int:
    import trackway

    store = trackway.open_store("store")
    try:
        return int(store.status().exported)
    finally:
        store.close()


def measure(quick: bool = False) -> Result:
    """Run all ways, each in a process of its own.

    Returns:
        For each way the figures of every untraced and traced step.
    """
    size: dict[str, Any] = {"rollouts": 256, "turns": 8}
    if quick:
        size = {"rollouts": 16, "turns": 2, "seconds": (0.1, 0.3)}
    figures: dict[str, Any] = {"wall": {}, "stall": {}, "own": {}, "at once": {}}
    for name in (OURS, MLFLOW, VERL):
        if not installed(name):
            continue
        many = 3 if name == OURS and not quick else 1
        long = {**size, "prompts": LONG, "turns": size["turns"] // 2}
        if name != OURS and not quick:
            long["rollouts"] = 64  # what the others have to write at these lengths takes minutes even so
        scattered = {"program": {**long, "stagger": 1.0}, "in_a_row": True}
        plans: dict[str, dict[str, Any]] = {
            "wall": {"program": {**size, "prompts": SHORT}, "rounds": many, "backlog": name == OURS},
            "stall": {**scattered, "rounds": 2 * many if many > 1 else 1},
        }
        if name == OURS:
            plans["own"] = {**scattered, "rounds": many, "collector": False}
        if not quick:
            plans["at once"] = {"program": long, "rounds": 1}
        results = apart(__file__, "pairs", name=name, plans=list(plans.values()))
        for (what, plan), found in zip(plans.items(), results, strict=True):
            figures[what][name] = {**plan["program"], **found}
    wall, stall = figures["wall"], figures["stall"]
    extra = {name: statistics.median(_extra(found)) for name, found in wall.items()}
    worst = {name: _worst(found, "traced") - _worst(found, "untraced") for name, found in stall.items()}
    own = figures["own"][OURS]
    lost = {name: float(found["spans"] - found["kept"]) for name, found in wall.items()}
    limits = [
        Limit(
            "loop: extra wall time of a step, Trackway",
            extra[OURS],
            1.0,
            unit=" %",
            beside=beside(extra, " %"),
        ),
        Limit(
            "loop: worst stall above untraced, 32k prompts, Trackway",
            worst[OURS],
            5.0,
            unit=" ms",
            beside=beside(worst, " ms"),
        ),
        Limit(
            "loop: the same with the garbage collector off, Trackway",
            _worst(own, "traced") - _worst(own, "untraced"),
            5.0,
            unit=" ms",
        ),
        Limit("loop: spans lost by Trackway", lost[OURS], 0, beside=beside(lost, "")),
    ]
    return Result({"size": size, **figures}, _tables({"size": size, **figures}), limits)


def _extra(found: dict[str, Any]) -> list[float]:
    """Give by how many percent each traced step was longer than the untraced one before it."""
    return [
        100 * (traced["seconds"] / plain["seconds"] - 1)
        for plain, traced in zip(found["untraced"], found["traced"], strict=True)
    ]


def _above(found: dict[str, Any], what: str) -> list[float]:
    """Give by how much each traced step passed the untraced one before it."""
    return [
        traced[what] - plain[what] for plain, traced in zip(found["untraced"], found["traced"], strict=True)
    ]


def _worst(found: dict[str, Any], which: str) -> float:
    """Give the worst stall of several steps, in milliseconds."""
    return max(step["worst_ms"] for step in found[which])


def _tables(figures: dict[str, Any]) -> list[Table]:
    size = figures["size"]
    own = figures["wall"][OURS]["untraced"]
    untraced = [step["seconds"] for step in own]
    rows = []
    for name, found in figures["wall"].items():
        meanwhile = [float(count) for count in found["exported_meanwhile"]]
        rows.append(
            [
                name,
                spread(_extra(found)),
                spread(_above(found, "cpu")),
                spread([step["others_cpu"] for step in found["traced"]]),
                spread(found["drained"]),
                f"{found['kept']:,} of {found['spans']:,}",
                spread(meanwhile) if meanwhile else "",
            ]
        )
    wall = Table(
        "A step of many rollouts: extra wall time",
        ["", "extra wall time %", "extra CPU s of the loop's thread", "CPU s of other threads",
         "s until all is in SQLite", "spans kept", "spans exported meanwhile"],
        rows,
        f"{size['rollouts']} rollouts of {size['turns']} turns, prompts of {SHORT[0]:,} to {SHORT[1]:,} ids; "
        f"untraced a step takes {spread(untraced)} s. Median (and range) of {len(own)} pairs, of one "
        "with the others.",
    )  # fmt: skip
    rows = []
    for begin, name_of in (
        ("stall", "within a second"),
        ("own", "within a second, collector off"),
        ("at once", "at once"),
    ):
        for name, found in figures[begin].items():
            for which in ("untraced", "traced"):
                steps = found[which]
                rows.append(
                    [
                        name if which == "traced" else "untraced, beside it",
                        f"{found['rollouts']} {name_of}",
                        f"{len(steps)}",
                        f"{_worst(found, which):.1f}",
                        spread([step["p999_ms"] for step in steps]),
                        spread([float(step["walks"]) for step in steps]),
                        spread([step["walks_ms"] for step in steps]),
                    ]
                )
    stall = Table(
        "A step of many rollouts: how long the loop stood still",
        ["", "rollouts, which begin", "steps", "worst stall ms", "99.9 % of the stalls are under ms",
         "walks of the collector in a step", "ms of them"],
        rows,
        f"{figures['stall'][OURS]['turns']} turns, prompts of {LONG[0]:,} to {LONG[1]:,} ids, a ticker of "
        "1 ms. Of several steps the worst, or the median (and range).",
    )  # fmt: skip
    return [wall, stall]


if __name__ == "__main__":
    command(__doc__, measure, {"pairs": pairs})
