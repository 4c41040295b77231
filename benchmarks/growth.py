"""How cost grows with the turns, tokens and text of a rollout.

    python benchmarks/growth.py [--json] [--quick]

**Turns.** Episodes of the same length, cut into more and more turns: each turn's prompt repeats all that
was before. Real text; a response of 256 ids in each turn with log probabilities and mask, the rest comes
from the environment; all ids are decoded and the whole text is kept; the rollout's result repeats ids,
mask and log probabilities, as verl's does. Bytes of the journal per token of the final sequence. One
episode is a single long response instead, and one is short. Beside it what MLflow's database takes when
verl traces the same, in which each prompt stands again.

**Tokens and text.** What a traced call adds on its caller's thread, by the length of its prompt.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import Output, Trajectory, text_ids, tokenizer
from measuring import Limit, Result, Table, apart, command, number
from peers import MLFLOW, OURS, UNTRACED, VERL, installed, opened

LENGTH = 32_768
RESPONSE = 256
TURNS = [1, 5, 10, 20, 40]
SIZES = {
    "ids": [1_024, 8_192, 32_768, 131_072],
    "characters": [10_000, 100_000, 1_000_000, 5_000_000],
}
_TEXT_IDS = 100_000
"""Ids of real text that are made; a longer prompt repeats them."""


def journal_bytes(turns: int, length: int, response: int, episodes: int) -> dict[str, float]:
    """Record episodes; give the bytes of the journal for each of their tokens."""
    return _episodes(OURS, turns, length, response, episodes, lambda: _size("store/journal/*.jsonl"))


def verl_bytes(turns: int, length: int, response: int, episodes: int) -> dict[str, float]:
    """Let verl trace the same into MLflow; give the bytes of the database for each token."""
    return _episodes(VERL, turns, length, response, episodes, lambda: _size("mlflow.db*"))


def _size(pattern: str) -> int:
    return sum(path.stat().st_size for path in Path().glob(pattern))


def _episodes(
    name: str, turns: int, length: int, response: int, episodes: int, size: Callable[[], int]
) -> dict[str, float]:
    first = max(16, (length - turns * response) // turns)
    step = (length - first - response) // max(1, turns - 1)
    pool = text_ids(4 * length)
    texts = [list(pool[n * length // 2 :][:length]) for n in range(episodes)]
    logprobs = [-((17 * n) % 997) / 131 for n in range(length)]

    async def generate(
        request_id: tuple[int, int], prompt_ids: list[int], sampling_params: dict[str, float]
    ) -> Output:
        at = len(prompt_ids)
        return Output(texts[request_id[0]][at : at + response], logprobs[at : at + response])

    async def run(episode: int, sampling_params: dict[str, float]) -> Trajectory:
        ids, mask = texts[episode], [0] * length
        end = first
        for turn in range(turns):
            at = first + turn * step
            end = at + response
            mask[at:end] = [1] * response
            await generate_((episode, turn), ids[:at], sampling_params)
        return Trajectory(ids[:first], ids[first:end], mask[first:end], logprobs[first:end], turns)

    async def all_episodes() -> int:
        tokens = 0
        for episode in range(episodes):
            with way.rollout(1, episode, 0):
                result = await run_(episode, {"temperature": 1.0})
            tokens += len(result.prompt_ids) + len(result.response_ids)
        return tokens

    # Nothing is cut.
    settings = {"token2text": True, "max_length": None, "max_text_length": None, "tokenizer": tokenizer()}
    with opened(name, **settings) as way:
        generate_, run_ = way.op("llm", generate), way.op("rollout", run)
        before = size()
        tokens = asyncio.run(all_episodes())
        way.drain()
        return {"tokens": tokens / episodes, "bytes": (size() - before) / tokens}


def call_cost(name: str, sizes: dict[str, list[int]], calls: int) -> dict[str, list[float]]:
    """Give, for each size, the median CPU microseconds that a call adds on the caller's thread.

    Args:
        name: the way to trace.
        sizes: how many ``ids``, and how many ``characters``, the call is given.
        calls: how often each.
    """
    result = Output(list(text_ids(16)), [-0.5] * 16)

    async def generate(prompt_ids: list[int], messages: list[dict[str, str]]) -> Output:
        return result

    async def run(what: str, size: int) -> float:
        prompt: list[int] = []
        text = "What is it?"
        if what == "ids":
            prompt = (list(text_ids(min(size, _TEXT_IDS))) * (1 + size // _TEXT_IDS))[:size]
        else:
            text = ("A line of text that somebody may have written. " * (1 + size // 47))[:size]
        taken = []
        for _ in range(calls + 1):
            messages = [{"role": "user", "content": text}]
            with way.rollout(1, 0, 0):
                begin = time.thread_time()
                await plain(prompt, messages)
                middle = time.thread_time()
                await traced(prompt, messages)
                end = time.thread_time()
            taken.append(1e6 * ((end - middle) - (middle - begin)))
            if name == OURS:  # the others have queues to spare for these few
                way.drain()
        return statistics.median(taken[1:])  # the first call brings everything into its place

    with opened(UNTRACED) as nothing, opened(name, token2text=True, tokenizer=tokenizer()) as way:
        plain, traced = nothing.op("llm", generate), way.op("llm", generate)
        return {what: [asyncio.run(run(what, size)) for size in some] for what, some in sizes.items()}


def measure(quick: bool = False) -> Result:
    """Measure both kinds of growth."""
    turns, limit = _turns(quick)
    costs, tables = _costs(quick)
    return Result({"turns": turns, "costs": costs}, [_turns_table(turns), *tables], [limit])


def _turns(quick: bool) -> tuple[list[dict[str, float]], Limit]:
    # turns, tokens, tokens of a response
    shapes = [(turns, LENGTH, RESPONSE) for turns in (TURNS[2:3] if quick else TURNS)]
    shapes.append((1, LENGTH, LENGTH - 1_024))
    if not quick:
        shapes.append((10, 4_096, RESPONSE))
    found = []
    for turns, length, response in shapes:
        given = {"turns": turns, "length": length, "response": response}
        row: dict[str, float] = {"turns": turns, "response": turns * response, "length": length}
        row |= apart(__file__, "journal_bytes", **given, episodes=4)
        if installed(VERL):
            row["verl"] = apart(__file__, "verl_bytes", **given, episodes=1)["bytes"]
        found.append(row)
    long = [row for row in found if row["length"] == LENGTH]
    verl = max(row.get("verl", 0) for row in long)
    beside = f"verl's database {number(verl)}" if verl else ""
    most = max(row["bytes"] for row in long)
    return found, Limit(f"journal: most bytes per token, {LENGTH:,} tokens", most, 20, beside=beside)


def _turns_table(found: list[dict[str, float]]) -> Table:
    return Table(
        "Turns: bytes per token",
        ["turns", "tokens of the sequence", "of them responses", "journal", "verl with MLflow"],
        [
            [
                f"{row['turns']}",
                f"{row['tokens']:,.0f}",
                f"{row['response']:,}",
                number(row["bytes"]),
                number(row["verl"]) if "verl" in row else "",
            ]
            for row in found
        ],
        "Ids, exact log probabilities, mask and text are kept.",
    )


def _costs(quick: bool) -> tuple[dict[str, Any], list[Table]]:
    sizes = {what: some[:2] for what, some in SIZES.items()} if quick else SIZES
    costs = {
        name: apart(__file__, "call_cost", name=name, sizes=sizes, calls=40 if name == OURS else 6)
        for name in (OURS, MLFLOW, VERL)
        if installed(name)
    }
    tables = [
        Table(
            f"{'Tokens' if what == 'ids' else 'Text'}: CPU µs that a call adds on the caller's thread",
            [f"{what} of the prompt", *costs, "Trackway, ns for each"],
            [
                [
                    f"{size:,}",
                    *(number(cost[what][n]) for cost in costs.values()),
                    number(1e3 * costs[OURS][what][n] / size),
                ]
                for n, size in enumerate(some)
            ],
        )
        for what, some in sizes.items()
    ]
    return {"sizes": sizes, "added_us": costs}, tables


if __name__ == "__main__":
    command(__doc__, measure, {part.__name__: part for part in (journal_bytes, verl_bytes, call_cost)})
