"""What the benchmarks share: tables, limits, clocks, and a process of its own for each part.

Every benchmark is a module with ``measure(quick) -> Result``, which ``command`` makes runnable. Times depend
on the machine, and on what else it does; what counts are ratios of figures that were taken side by side.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

_OTHERS = ("TRACKWAY_", "MLFLOW_", "OTEL_", "WANDB_", "WEAVE_", "WF_")


@dataclass(frozen=True)
class Limit:
    """A figure that must not pass a bound.

    Attributes:
        what: what is measured, and against what.
        figure: what it came to.
        bound: what it may be.
        least: whether the bound is the least that it may be; by default it is the most.
        unit: what follows the figure: ``×``, `` %``, `` ms``.
        beside: the figures of others, as text.
    """

    what: str
    figure: float
    bound: float
    least: bool = False
    unit: str = ""
    beside: str = ""

    @property
    def reached(self) -> bool:
        return self.figure >= self.bound if self.least else self.figure <= self.bound

    def row(self) -> list[str]:
        """Give the cells of one line: what, figure, bound, whether it is reached, the figures of others."""
        asked = f"{'≥' if self.least else '≤'} {number(self.bound)}{self.unit}"
        reached = "reached" if self.reached else "NOT reached"
        return [self.what, f"{number(self.figure)}{self.unit}", asked, reached, self.beside]


@dataclass(frozen=True)
class Table:
    """Figures to be read by people; every cell is text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = [f"| {' | '.join(self.head)} |", f"|{'---|' * len(self.head)}"]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        note = f"{self.note}\n\n" if self.note else ""
        return f"**{self.title}**\n\n{note}" + "\n".join(lines)

    def rich(self) -> RichTable:
        table = RichTable(*map(escape, self.head), title=escape(self.title), title_justify="left", box=None)
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table


@dataclass
class Result:
    """What a benchmark found.

    Attributes:
        figures: everything that was measured, as JSON has it.
        tables: what people read of it.
        limits: what it must reach.
        seconds: how long it took.
    """

    figures: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "limits": [{**asdict(item), "reached": item.reached} for item in self.limits]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        limits = [
            Limit(**{name: value for name, value in item.items() if name != "reached"})
            for item in data["limits"]
        ]
        return cls(data["figures"], [Table(**item) for item in data["tables"]], limits, data["seconds"])


def limits_table(limits: Iterable[Limit], title: str = "Limits") -> Table:
    """Give limits as a table."""
    return Table(title, ["what", "measured", "asked for", "", "beside it"], [item.row() for item in limits])


def beside(figures: Mapping[str, float], unit: str) -> str:
    """Write the figures of all ways but the first."""
    return ", ".join(f"{name} {number(figure)}{unit}" for name, figure in list(figures.items())[1:])


def number(value: float, digits: int = 3) -> str:
    """Write a number with as many digits as mean something: 1,931, 62.9, 1.74, 0.021."""
    if value == 0 or value != value or value in (float("inf"), float("-inf")):
        return f"{value:.0f}"
    size = abs(value)
    places = 0
    while size < 10 ** (digits - 1) and places < 6:
        size *= 10
        places += 1
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text and value == round(value, 0) else text


def spread(values: Sequence[float]) -> str:
    """Write the median, and between which values all of them lie."""
    median = number(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({number(min(values))} … {number(max(values))})"


def ratios(own: Sequence[float], base: Sequence[float]) -> float:
    """Give the median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(own, base, strict=True))


def others_cpu() -> float:
    """Give the CPU seconds that all threads but the calling one have used."""
    return time.process_time() - time.thread_time()


def memory() -> dict[str, int]:
    """Give the resident memory of this process, now and at its peak, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(found[key].split()[0]) * 1024 for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


@contextmanager
def memory_growth(grown: dict[str, int]) -> Iterator[None]:
    """Put into ``grown["bytes"]`` by how much resident memory grows inside the block, at its peak."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here on
    before = memory()["now"]
    yield
    grown["bytes"] = max(0, memory()["peak"] - before)


def apart(file: str, part: str, /, **given: Any) -> Any:
    """Run a part of a benchmark in a process of its own, inside an empty folder that is then removed.

    Args:
        file: the benchmark's ``__file__``.
        part: name of a function in its ``PARTS``.
        given: its arguments, as JSON can have them.

    Returns:
        What it returned, as JSON can have it.

    Raises:
        RuntimeError: it failed; the message ends as its output did.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
    with tempfile.TemporaryDirectory(prefix="trackway-benchmark-", ignore_cleanup_errors=True) as folder:
        out = Path(folder) / "result.json"
        work = Path(folder) / "work"
        work.mkdir()
        command = [sys.executable, str(Path(file).absolute()), "--part", part, json.dumps(given), str(out)]
        done = subprocess.run(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode or not out.exists():
            said = done.stdout.decode(errors="replace")[-3000:]
            raise RuntimeError(f"{Path(file).name}: {part} ended with code {done.returncode}:\n{said}")
        return json.loads(out.read_bytes())


def command(
    doc: str | None,
    measure: Callable[[bool], Result],
    parts: Mapping[str, Callable[..., Any]] | None = None,
) -> None:
    """Be the command line of a benchmark: ``[--json] [--quick]``.

    Args:
        doc: the benchmark's docstring.
        measure: is told whether a small size is enough.
        parts: what ``apart`` may run.
    """
    if sys.argv[1:2] == ["--part"]:
        _, _, part, given, out = sys.argv
        Path(out).write_text(json.dumps((parts or {})[part](**json.loads(given))), encoding="utf-8")
        # What a peer would still do at exit has been measured, or is not wanted.
        sys.stdout.flush()
        os._exit(0)
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true", help="print everything that was measured as JSON")
    options.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    asked = options.parse_args()
    begin = time.perf_counter()
    result = measure(asked.quick)
    result.seconds = time.perf_counter() - begin
    if asked.json:
        print(json.dumps(result.as_json(), indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 200)
    for table in [*result.tables, *([limits_table(result.limits)] if result.limits else [])]:
        console.print(table.rich(), "", sep="\n")
        if table.note:
            console.print(table.note, markup=False, style="dim")
