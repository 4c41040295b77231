"""Runs all benchmarks, prints what came out, and writes it to RESULTS.md.

    python benchmarks/run.py [--quick] [--out PATH] [NAME ...]

Each benchmark runs in a process of its own. With ``--quick``, sizes are so small that the figures mean
little: it shows that everything works, and writes only where ``--out`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from measuring import Result, limits_table
from peers import PEERS
from rich.console import Console

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
BENCHMARKS = {
    "overhead": "What a traced call costs its caller",
    "loop": "Many rollouts on one loop",
    "writer": "Writing, and bursts",
    "export": "Export to MLflow",
    "growth": "How it grows with turns, tokens and text",
    "scale": "How it grows with spans, processes and trajectories",
    "decoding": "Token ids to text",
    "loggers": "Metrics to five tools",
    "verl_worker": "Inside verl's worker",
}
# verl has an environment of its own, which `make verl` makes.
PYTHONS = {"verl_worker": HERE.parent / ".venv-verl" / "bin" / "python"}
PACKAGES = [
    "trackway", "opentelemetry-sdk", "mlflow", "weave", "verl", "transformers", "tokenizers", "orjson",
    "pydantic", "wandb", "swanlab", "tensorboard", "trackio",
]  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    options.add_argument("--out", type=Path, help=f"file to write; by default {RESULTS.name} beside this one")
    options.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; by default all"
    )
    asked = options.parse_args()
    unknown = [name for name in asked.names if name not in BENCHMARKS]
    if unknown:
        options.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    console = Console(width=None if sys.stdout.isatty() else 200)
    results: dict[str, Result] = {}
    failed: list[str] = []
    for name in asked.names or BENCHMARKS:
        console.print(f"{name} …", style="dim")
        python = str(PYTHONS.get(name, sys.executable))
        command = [python, str(HERE / f"{name}.py"), "--json", *(["--quick"] if asked.quick else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            failed.append(name)
            continue
        results[name] = Result.from_json(json.loads(done.stdout))
        for table in results[name].tables:
            console.print(table.rich(), "", sep="\n")
    everything = [limit for result in results.values() for limit in result.limits]
    console.print(limits_table(everything, "What it must reach, all measured in this run").rich())
    out = asked.out or (None if asked.quick or asked.names else RESULTS)
    if out is not None:
        out.write_text(page(results, failed, quick=asked.quick), encoding="utf-8")
        console.print(f"written to {out}", style="dim")
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="bold red")
    return 1 if failed else 0


def page(results: Mapping[str, Result], failed: list[str], *, quick: bool = False) -> str:
    """Give the page of results."""
    limits = [limit for result in results.values() for limit in result.limits]
    minutes = sum(result.seconds for result in results.values()) / 60
    lines = [
        "# Measured",
        "",
        f"{machine()} `make bench` wrote this page, in {minutes:.0f} minutes. All figures of a table were "
        "taken side by side; on a shared machine the ratios count, not the times. How each figure is taken "
        "stands at the beginning of the benchmark's file.",
        "",
    ]
    if quick:
        lines += ["**A quick run: the sizes are too small for these figures to mean much.**", ""]
    if failed:
        lines += [f"**These failed: {', '.join(failed)}.**", ""]
    lines += [
        "## What it must reach",
        "",
        limits_table(limits, "All limits").markdown().partition("\n\n")[2],
        "",
    ]
    for name, result in results.items():
        lines += [f"## {BENCHMARKS[name]}", "", f"`benchmarks/{name}.py`, {result.seconds:.0f} s", ""]
        for table in result.tables:
            lines += [table.markdown(), ""]
    return "\n".join(lines).rstrip() + "\n"


def machine() -> str:
    """Say what this was measured on."""
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {dist.name: dist.version for dist in distributions(path=[*sys.path, str(PEERS)])}
    packages = ", ".join(f"{name} {found[name]}" if name in found else f"no {name}" for name in PACKAGES)
    return (
        f"{os.cpu_count()} processors, {gigabytes:.0f} GiB of memory, {platform.system()} on "
        f"{platform.machine()}; Python {platform.python_version()}, {packages}."
    )


if __name__ == "__main__":
    sys.exit(main())
