"""The benchmarks run, at sizes that say nothing of speed: what they count is right."""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NAMES = ["overhead", "loop", "writer", "export", "growth", "scale", "decoding", "loggers", "verl_worker"]

Load = Callable[[str], Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Import a module of the benchmarks, which stand in no package, and forget all of them afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def part(load: Load, benchmark: str, name: str, /, **given: Any) -> Any:
    """Run one part of a benchmark in a process of its own."""
    return load("measuring").apart(load(benchmark).__file__, name, **given)


def test_a_limit_says_whether_it_is_reached(load: Load) -> None:
    limit = load("measuring").Limit
    assert limit("cost", 1.5, 1.5).reached
    assert not limit("cost", 1.51, 1.5).reached
    assert limit("gain", 5.0, 5.0, least=True).reached
    assert not limit("gain", 4.99, 5.0, least=True).reached
    assert not limit("cost", float("nan"), 1.5).reached
    assert limit("cost", 1.51, 1.5, unit="×").row() == ["cost", "1.51×", "≤ 1.50×", "NOT reached", ""]


def test_the_page_of_results_has_every_figure_and_nothing_of_the_machine_but_its_size(load: Load) -> None:
    measuring, run = load("measuring"), load("run")
    table = measuring.Table("Costs", ["way", "µs"], [["ours", "31"]], "Medians.")
    limits = [
        measuring.Limit("cost", 1.2, 1.5),
        measuring.Limit("gain", 4.0, 5, least=True, beside="others 1"),
    ]
    result = measuring.Result({"raw": [1, 2]}, [table], limits, 3.0)
    again = measuring.Result.from_json(json.loads(json.dumps(result.as_json())))
    assert again.limits == limits and again.figures == {"raw": [1, 2]}
    page = run.page({"overhead": again}, ["loop"])
    assert "| cost | 1.20 | ≤ 1.50 | reached |  |" in page
    assert "| gain | 4 | ≥ 5 | NOT reached | others 1 |" in page
    assert "| way | µs |\n|---|---|\n| ours | 31 |" in page
    assert "These failed: loop" in page
    assert socket.gethostname() not in page.split()
    assert str(Path.home()) not in page and str(BENCHMARKS.parent) not in page


def test_every_benchmark_is_run_and_explained(load: Load) -> None:
    run = load("run")
    assert list(run.BENCHMARKS) == NAMES
    for name in NAMES:
        module = load(name)
        assert f"python benchmarks/{name}.py [--json] [--quick]" in module.__doc__
        assert callable(module.measure)


def test_a_part_that_fails_says_why(load: Load) -> None:
    with pytest.raises(
        RuntimeError, match=r"writer\.py: burst ended with code 1:[\s\S]*no way is called 'pen'"
    ):
        part(load, "writer", "burst", name="pen", spans=100)


@pytest.mark.slow
def test_callers_are_timed_round_by_round(load: Load) -> None:
    peers = load("peers")
    ways = [peers.UNTRACED, peers.BARE, peers.OURS]
    taken = part(load, "overhead", "callers", ways=ways, rounds=2, calls=10)
    assert list(taken) == ways
    assert all(
        len(times) == 2 and all(cpu > 0 and wall > 0 for cpu, wall in times) for times in taken.values()
    )


def test_all_spans_of_a_burst_are_found_in_the_journal(load: Load) -> None:
    own = part(load, "writer", "burst", name=load("peers").OURS, spans=1_000)
    assert own["made"] == own["kept"] == 1_000
    assert own["grown"] > 0


@pytest.mark.slow
def test_small_bursts_of_the_batch_processor_are_kept(load: Load) -> None:
    peers = load("peers")
    if not peers.installed(peers.BATCH):
        pytest.skip("OpenTelemetry's exporter is not here; `make bench` brings it")
    batch = part(load, "writer", "burst", name=peers.BATCH, spans=1_000)
    assert batch["made"] == batch["kept"] == 1_000 - 64  # the blocks around rollouts make no span there


def test_the_writer_is_timed_without_the_loop(load: Load) -> None:
    taken = part(load, "writer", "written", spans=640, rounds=2)
    assert len(taken["cpu"]) == 2 and min(taken["cpu"]) > 0


def test_processes_keep_every_span(load: Load) -> None:
    row = part(load, "scale", "processes", count=2, spans=200)
    assert row["made"] == row["kept"] == 400


@pytest.mark.slow
def test_stores_of_any_size_are_read(load: Load) -> None:
    row = part(load, "scale", "reading", trajectories=40)
    assert (row["trajectories"], row["found"]) == (40, 8)


@pytest.mark.slow
def test_bytes_are_counted_for_every_token(load: Load) -> None:
    row = part(load, "growth", "journal_bytes", turns=4, length=1_024, response=64, episodes=2)
    assert row["tokens"] == 1_024
    assert 5 < row["bytes"] < 100  # ids as text take some six bytes, and nothing is stored over and over


@pytest.mark.slow
def test_longer_prompts_are_recorded_once(load: Load) -> None:
    few, many = (
        part(load, "growth", "journal_bytes", turns=turns, length=16_384, response=64, episodes=1)
        for turns in (2, 32)
    )
    assert many["bytes"] < 2 * few["bytes"]


@pytest.mark.slow
def test_calls_of_any_size_are_timed(load: Load) -> None:
    peers = load("peers")
    sizes = {"ids": [64, 200_000], "characters": [100]}
    for name in (peers.OURS, peers.MLFLOW):
        costs = part(load, "growth", "call_cost", name=name, sizes=sizes, calls=3)
        assert {what: len(some) for what, some in costs.items()} == {"ids": 2, "characters": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OURS", "MLFLOW", "VERL"])
def test_a_loop_of_rollouts_is_traced_and_exported(load: Load, name: str) -> None:
    peers = load("peers")
    way = getattr(peers, name)
    if not peers.installed(way):
        pytest.skip("its package is not here; `make bench` brings it")
    program = {"rollouts": 4, "turns": 2, "prompts": [64, 512], "seconds": [0.01, 0.05]}
    plan = {"program": program, "rounds": 2, "backlog": way == peers.OURS}
    (found,) = part(load, "loop", "pairs", name=way, plans=[plan])
    assert len(found["untraced"]) == len(found["traced"]) == len(found["drained"]) == 2
    spans = 4 * (2 + 2 * 2)  # of a step
    assert found["spans"] == (4 * spans if way == peers.OURS else 2 * spans)
    assert found["kept"] == found["spans"]
    for step in [*found["untraced"], *found["traced"]]:
        assert step["worst_ms"] >= step["p999_ms"]


@pytest.mark.slow
def test_peers_are_the_real_packages(load: Load) -> None:
    peers = load("peers")
    ways = [name for name in (peers.MLFLOW, peers.VERL, peers.WEAVE) if peers.installed(name)]
    taken = part(load, "overhead", "callers", ways=[peers.UNTRACED, *ways], rounds=1, calls=40)
    plain = taken.pop(peers.UNTRACED)[0][0]
    # What they do to 2,304 numbers cannot be had for less, so that nobody can have been switched off.
    assert all(cpu > 20 * plain for ((cpu, _),) in taken.values())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ours", "sdks", "hanging"])
def test_metrics_are_logged_to_five_tools(load: Load, way: str) -> None:
    taken = part(load, "loggers", way, steps=4)
    assert 0 < taken["call"] <= taken["worst"]
    assert taken["cpu"] > 0


@pytest.mark.slow
def test_exported_traces_are_counted_in_the_database(load: Load) -> None:
    whole = {"traces": 8, "spans": 80, "step_tags": 8}
    for rewards in (False, True):
        for name in ("from_store", "with_mlflow"):
            row = part(load, "export", name, traces=8, rewards=rewards)
            expected = {**whole, "rewards": 8 * rewards, "linked": 8 * rewards}
            assert {what: row[what] for what in expected} == expected, name
    row = part(load, "export", "end_to_end", traces=8)
    assert {what: row[what] for what in whole} == whole


@pytest.mark.slow
def test_decoding_is_many_times_as_fast_as_transformers(load: Load) -> None:
    decoding = load("decoding")
    measured = decoding.compare(rounds=5, sequences=200)
    for ways in measured["results"].values():
        assert all(way["equal"] for way in ways.values())
    # Ten times on an idle machine; the bound leaves room for a busy one.
    assert measured["results"]["text"][decoding.OURS]["times_as_fast"] > 5


@pytest.mark.slow
def test_the_suite_prints_and_writes_what_it_ran(tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    command = [sys.executable, BENCHMARKS / "run.py", "--quick", "--out", out, "decoding"]
    printed = subprocess.check_output(command, text=True)
    assert "What it must reach" in printed
    page = out.read_text(encoding="utf-8")
    assert "A quick run" in page
    assert "| decoding: ways whose texts differ | 0 | ≤ 0 | reached |" in page
    alone = subprocess.check_output(
        [sys.executable, BENCHMARKS / "decoding.py", "--json", "--quick"], text=True
    )
    assert set(json.loads(alone)["figures"]["results"]) == {"text", "random ids"}
