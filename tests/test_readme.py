"""What the README says is true: its code runs, its tables are complete."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trackway

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def table(heading: str) -> str:
    return README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.slow
def test_the_code_of_the_readme_runs_from_top_to_bottom(tmp_path: Path) -> None:
    code = "\n".join([*blocks("python"), "print(len(traces), 'traces found')"])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "pending=0" in lines[0]
    assert lines[1:5] == [f"1/17/{n} ok 1.0 3" for n in range(4)]
    assert lines[5:8] == ["user What is 6 times 7?", "tool 42", "assistant 6 × 7 = 42"]
    assert "42 6 × 7 = 42" in lines
    assert lines[-1] == "1 traces found"
    # The last block only configures, and that nothing ran under it is said.
    assert [line for line in done.stderr.splitlines() if "no decorated function ran" not in line] == []
    store = trackway.open_store(tmp_path / "trackway-store")
    assert [call.name for call in store.load("2/17/0").tool_calls] == ["calculator", "calculator"]
    assert store.load("3/17/0").rewards == {"judge": 0.75}
    assert store.load("3/17/0").annotations == {"difficulty": "easy"}


def test_code_that_needs_what_is_not_there_is_at_least_python() -> None:
    (code,) = blocks("py")
    assert "tokenizer=" in code
    compile(code, "README.md", "exec")


def test_every_setting_stands_in_the_table() -> None:
    text = table("Settings")
    missing = [
        field.name for field in dataclasses.fields(trackway.TraceConfig) if f"`{field.name}`" not in text
    ]
    assert missing == []


def test_the_defaults_in_the_table_are_the_defaults() -> None:
    defaults = trackway.TraceConfig()
    rows = {
        name: cells[1].strip("` ")
        for line in table("Settings").splitlines()
        if line.startswith("| `") and len(cells := line.strip("|").split("|")) == 3
        for name in re.findall(r"`(\w+)`", cells[0])
    }
    for name in (
        "max_length",
        "max_text_length",
        "log_frequency",
        "ratio",
        "seed",
        "max_array_items",
        "sync",
    ):
        assert rows[name] == str(getattr(defaults, name)), name


def test_every_command_stands_in_the_table() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trackway", "--help"], capture_output=True, text=True, check=True
    )
    commands = set(re.findall(r"^  (\w+) +\S", done.stdout.partition("Commands:")[2], re.MULTILINE))
    assert {"demo", "ls", "show", "status", "sync", "ui"} <= commands
    assert set(re.findall(r"^\| `trackway (\w+)", table("On the command line"), re.MULTILINE)) == commands
