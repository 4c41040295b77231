"""What a traced call costs the thread that makes it: Trackway beside OpenTelemetry's SDK and MLflow.

    python benchmarks/overhead.py [--json] [--rounds N] [--calls N]

One call is an async generation: 2,048 prompt ids in, 256 response ids with log probabilities out. Calls
come in small bursts with pauses between them, as they do while an engine generates, and each way is drained
before the next one runs. What is compared are ratios within a round, of which the median is given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
from decoding import packaged_tokenizer
from opentelemetry.sdk.trace import TracerProvider
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

import trackway

PROMPT, RESPONSE = 2_048, 256
BURST, PAUSE = 10, 0.06
BARE = "bare SDK span, ten attributes"
OURS = "trackway, text decoded"
MLFLOW = "mlflow.trace"

Generate = Callable[[str, list[int], dict[str, float]], Awaitable["Output"]]


@dataclass
class Output:
    """What an inference engine returns."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str = "completed"


def measure(rounds: int = 7, calls: int = 200) -> dict[str, Any]:
    """Time every way in turn, round by round.

    Args:
        rounds: how often each way runs.
        calls: calls in one run of one way.

    Returns:
        For each way the median microseconds that a call adds on the caller's thread (CPU time of that
        thread, and wall-clock time), and the medians of the ratios to a bare SDK span.
    """
    draw = random.Random(0)
    prompt = [draw.randrange(100_000) for _ in range(PROMPT)]
    output = Output(
        [draw.randrange(100_000) for _ in range(RESPONSE)], [-draw.random() for _ in range(RESPONSE)]
    )

    async def generate(request_id: str, prompt_ids: list[int], sampling_params: dict[str, float]) -> Output:
        return output

    with tempfile.TemporaryDirectory() as folder:
        ways = _ways(generate, Path(folder))
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, (call, drain) in ways.items():
                taken[name].append(asyncio.run(_run(name, call, prompt, calls)))
                drain()
        trackway.shutdown()
    plain = taken.pop("untraced")
    added = {
        name: [(cpu - base[0], wall - base[1]) for (cpu, wall), base in zip(times, plain, strict=True)]
        for name, times in taken.items()
    }
    return {
        "rounds": rounds,
        "calls": calls,
        "added": {
            name: {
                "cpu_us": statistics.median(cpu for cpu, _ in times),
                "wall_us": statistics.median(wall for _, wall in times),
                "cpu_ratio": statistics.median(
                    own[0] / bare[0] for own, bare in zip(times, added[BARE], strict=True)
                ),
                "wall_ratio": statistics.median(
                    own[1] / bare[1] for own, bare in zip(times, added[BARE], strict=True)
                ),
            }
            for name, times in added.items()
        },
    }


def _ways(generate: Generate, folder: Path) -> dict[str, tuple[Generate, Callable[[], object]]]:
    tracer = TracerProvider().get_tracer("benchmark")  # no processor: what it makes goes nowhere

    async def bare(request_id: str, prompt_ids: list[int], sampling_params: dict[str, float]) -> Output:
        with tracer.start_as_current_span("generate") as span:
            for number in range(10):
                span.set_attribute(f"attribute.{number}", number)
            return await generate(request_id, prompt_ids, sampling_params)

    trackway.configure(
        store=folder / "store",
        sync="off",
        token2text=True,
        tokenizer=PreTrainedTokenizerFast(tokenizer_file=str(packaged_tokenizer())),
    )
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    # Its artifacts would land in the current directory otherwise.
    mlflow.create_experiment("benchmark", artifact_location=str(folder / "artifacts"))
    mlflow.set_experiment("benchmark")
    return {
        "untraced": (generate, lambda: None),
        BARE: (bare, lambda: None),
        OURS: (trackway.llm_trace(generate), lambda: trackway.flush(60)),
        MLFLOW: (mlflow.trace(generate), mlflow.flush_trace_async_logging),
    }


async def _run(name: str, call: Generate, prompt: list[int], calls: int) -> tuple[float, float]:
    parameters = {"temperature": 1.0, "top_p": 0.95}
    cpu = wall = 0
    with trackway.trajectory(step=1, sample_index=0) if name == OURS else nullcontext():
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


def main() -> None:
    """Print the table, or JSON."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--json", action="store_true")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--calls", type=int, default=200)
    given = options.parse_args()
    result = measure(given.rounds, given.calls)
    if given.json:
        print(json.dumps(result, indent=2))
        return
    table = Table("added to one call", "CPU µs", "wall µs", "CPU ratio", "wall ratio", box=None)
    for name, row in result["added"].items():
        figures = (
            f"{row['cpu_us']:.0f}",
            f"{row['wall_us']:.0f}",
            f"{row['cpu_ratio']:.2f}",
            f"{row['wall_ratio']:.2f}",
        )
        table.add_row(name, *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
