"""The demo: a small model solves arithmetic with a calculator, and Trackway records every rollout."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from trackway.trace.model import Summary, Trajectory
    from trackway.trace.store import Store, StoreStatus

ROWS = 50
"""How many trajectories the table at the end shows."""


def run(
    *,
    store: str | Path,
    prompts: int = 4,
    group: int = 4,
    turns: int = 3,
    temperature: float = 0.7,
    steps: int = 2,
    model: bool = True,
    validation: int = 2,
) -> int:
    """Record the rollouts of a few training steps, and show them in the terminal.

    Nothing is trained: the policy version is the number of the step, the weights stay the same. A store
    that exists keeps what it has; the new rollouts are later attempts of those with the same keys.

    Args:
        store: directory to record into.
        prompts: samples in each step.
        group: rollouts of each sample; all rollouts of a step are in flight together.
        turns: generations in a rollout, at most.
        temperature: of the training rollouts; validation takes the likeliest tokens.
        steps: training steps.
        model: False for scripted replies with the real tokenizer.
        validation: rollouts after the last step, each of a sample that training does not see.

    Returns:
        The exit code: 0, or 1 with the reason on stderr.
    """
    from rich.console import Console

    import trackway

    from .model import DemoError

    console = Console(highlight=False)
    samples = prompts + validation  # the validation samples are those that follow
    try:
        tokenizer, engine = _load(console, samples, model=model)
    except DemoError as error:
        print(f"trackway: {error}", file=sys.stderr)
        return 1

    folder = Path(store)
    if (folder / "journal").is_dir():
        _say(console, f"{folder} holds earlier rollouts: they stay, these become their latest attempts.")
    backend = "mlflow" if find_spec("mlflow") else None
    trackway.configure(
        store=folder,
        project="trackway-demo",
        experiment="smollm2-calculator",
        backend=backend,
        tokenizer=tokenizer,
        token2text=True,
        sync="process",
    )
    _say(
        console,
        f"{'SmolLM2' if model else 'A script'} plays {steps} × {prompts} × {group} rollouts "
        f"(steps × prompts × group), then {validation} for validation.",
    )
    started = time.time_ns()
    try:
        batches = _batches(engine, tokenizer, prompts, group, turns, temperature, steps, validation)
        asyncio.run(_play(console, engine, batches, total=steps * prompts * group + validation))
        _say(console, f"Played in {(time.time_ns() - started) / 1e9:.1f} s.")
        _say(console, "Waiting until everything is written and sent …")
        status = trackway.flush(timeout=60)
    finally:
        trackway.shutdown()

    reader = trackway.open_store(folder)
    try:
        _show(console, reader, status, [row for row in reader.query() if row.start_ns >= started])
    finally:
        reader.close()
    return 0


def _load(console: Console, samples: int, *, model: bool) -> tuple[Any, Any]:
    from .arithmetic import task
    from .engine import Engine
    from .model import load_model, load_tokenizer
    from .scripted import ScriptedEngine

    if model:
        _say(console, "Loading SmolLM2-135M-Instruct; the first time it is fetched and converted …")
        tokenizer, weights = load_model()
        return tokenizer, Engine(weights)
    _say(console, "Loading the tokenizer of SmolLM2; the first time it is fetched and converted …")
    tokenizer = load_tokenizer()
    tasks = [task(index) for index in range(samples)]
    return tokenizer, ScriptedEngine(tokenizer, {each.question: each.expression for each in tasks})


def _batches(
    engine: Any,
    tokenizer: Any,
    prompts: int,
    group: int,
    turns: int,
    temperature: float,
    steps: int,
    validation: int,
) -> Iterator[tuple[str, list[Coroutine[Any, Any, None]]]]:
    from .agent import CalculatorAgent, rollout
    from .arithmetic import task

    agent = CalculatorAgent(engine, tokenizer, turns=turns, temperature=temperature)
    for step in range(1, steps + 1):
        yield (
            f"step {step}",
            [
                rollout(agent, task(sample), step=step, sample_index=sample, rollout_n=number)
                for sample in range(prompts)
                for number in range(group)
            ],
        )
    greedy = CalculatorAgent(engine, tokenizer, turns=turns, temperature=0.0)
    yield (
        "validation",
        [
            rollout(greedy, task(sample), step=steps, sample_index=sample, rollout_n=0, validate=True)
            for sample in range(prompts, prompts + validation)
        ],
    )


async def _play(
    console: Console, engine: Any, batches: Iterator[tuple[str, list[Coroutine[Any, Any, None]]]], total: int
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=total)
        async with engine:
            for name, rollouts in batches:
                progress.update(bar, description=name)
                if not console.is_terminal:
                    _say(console, f"  {name} …")
                await asyncio.gather(*(_then(each, lambda: progress.advance(bar)) for each in rollouts))


async def _then(work: Coroutine[Any, Any, None], done: Callable[[], None]) -> None:
    await work
    done()


def _show(console: Console, store: Store, status: StoreStatus, rows: list[Summary]) -> None:
    from trackway.trace.printable import visible
    from trackway.viewers.tables import table
    from trackway.viewers.terminal import replay

    if not rows:
        _say(console, "Nothing was recorded: a TRACKWAY_* variable leaves every one of these rollouts out.")
        return
    console.print(table(rows[:ROWS], more=len(rows) > ROWS))
    if len(rows) > ROWS:
        _say(console, f"… and {len(rows) - ROWS:,} more")
    failure, why = _failure(store, rows)
    command, where = _command(), _where(store.path)
    _say(console, f"\n{why}:\n")
    console.print(replay(failure, max_chars=500))
    _say(
        console,
        f"\n{status.trajectories:,} trajectories are in {store.path}: {status.recorded:,} spans recorded, "
        f"{status.exported:,} exported, {status.pending:,} pending, {status.dropped:,} dropped.",
    )
    if status.pending:
        for name, destination in status.destinations.items():
            if destination.last_error:
                _say(console, f"{name} did not take everything yet: {visible(destination.last_error)}")
        _say(console, f"What is pending will follow by itself; see: {command} status{where}")
    mlflow = find_spec("mlflow") is not None
    if not mlflow:
        _say(
            console, "MLflow is not installed, so they are in the store only: pip install 'trackway[mlflow]'"
        )
    console.print("\nTry these:\n", style="bold")
    _say(console, f"  {command} ls --step 1 --max-reward 0.5{where}")
    _say(console, f"  {command} show {failure.name}{where}")
    _say(console, f"  {command} {'ui' if mlflow else 'status'}{where}")


def _failure(store: Store, rows: list[Summary]) -> tuple[Trajectory, str]:
    for row in rows:
        if row.errors:
            trajectory = store.load(row.name)
            if any(call.error for call in trajectory.tool_calls):
                return trajectory, "One where the tool failed"
    worst = min(rows, key=lambda row: float("inf") if row.reward is None else row.reward)
    return store.load(worst.name), "The one with the lowest reward"


def _command() -> str:
    """Name the trackway command so that it works when pasted, in a virtual environment or outside."""
    script = Path(sys.executable).with_name("trackway")
    found = shutil.which("trackway")
    if not script.exists() or (found and Path(found).samefile(script)):
        return "trackway"
    return shlex.quote(_near(script))


def _where(store: Path) -> str:
    """Name the store as an option, unless the commands find it by themselves."""
    from trackway.trace.store import store_path

    return "" if store_path() == store.absolute() else f" --store {shlex.quote(_near(store))}"


def _near(path: Path) -> str:
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
