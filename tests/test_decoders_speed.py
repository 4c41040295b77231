"""The decoding benchmark runs, its texts are equal, and the table is what makes the difference."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "decoding.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("decoding_benchmark", BENCHMARK)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_decoding_is_many_times_as_fast_as_transformers() -> None:
    measured = load().measure(rounds=5, sequences=200)
    for ways in measured["results"].values():
        assert all(way["equal"] for way in ways.values())
    # Ten times on an idle machine; the bound leaves room for a busy one.
    assert measured["results"]["text"][load().OURS]["times_as_fast"] > 5


@pytest.mark.slow
def test_the_benchmark_prints_json() -> None:
    printed = subprocess.check_output([sys.executable, BENCHMARK, "--json", "--rounds", "1"], text=True)
    assert set(json.loads(printed)["results"]) == {"text", "random ids"}
