"""Traced programs that tests run in processes of their own, and what such a program has left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from trackway import open_store
from trackway.trace.exporters.sync import is_followed
from trackway.trace.store import Store

BEGIN = """\
import os, signal, sys, threading, time
import trackway
from trackway import llm_trace, trajectory

@llm_trace
def call(number):
    return number

def say(number):  # that the call with this number has ended
    os.write(1, b"%d\\n" % number)
"""
"""What every program begins with. One that wants to record calls ``trackway.configure``."""

T = TypeVar("T")


class Result(NamedTuple):
    """How a command ended that was run in this process, and what it wrote."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]
"""Runs the ``trackway`` command in this process; the fixture ``cli`` gives it."""

_numbers = count()

WINDOW = 20
"""Calls 10 ms apart that a sudden death may cost: those of the last 200 ms."""


def write(folder: Path, code: str) -> Path:
    """Write a program that begins with ``BEGIN``."""
    path = folder / f"program{next(_numbers)}.py"
    path.write_text(BEGIN + textwrap.dedent(code))
    return path


def start(
    folder: Path, code: str, *, before: Sequence[str] = (), **environment: str
) -> subprocess.Popen[str]:
    """Start a program in a folder, where its store is ``store``.

    Args:
        folder: the folder.
        code: what comes after ``BEGIN``.
        before: a command that the program's own is added to.
        **environment: variables; ``TRACKWAY_STRICT`` is off, as outside of tests.
    """
    return subprocess.Popen(
        [*before, sys.executable, str(write(folder, code))],
        cwd=folder,
        env={**os.environ, "TRACKWAY_STRICT": "0", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    folder: Path, code: str, *, timeout: float = 60, before: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, see ``start``; one that hangs is killed and fails the test."""
    with start(folder, code, before=before, **environment) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            _, err = process.communicate()
            raise AssertionError(f"the program hangs; it wrote: {err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def line(process: subprocess.Popen[str]) -> str:
    """Read the next line that a program writes."""
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, process.communicate()[1]
    return text.rstrip("\n")


def order(process: subprocess.Popen[str], text: str) -> str:
    """Tell a program something, and give its answer."""
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()
    return line(process)


def wait_until(look: Callable[[], T | None]) -> T:
    """Wait for something that must happen, and give it; a minute is far more than it needs."""
    for _ in range(1200):
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def said(output: str) -> list[int]:
    """Give the numbers of the calls that a program said had ended."""
    return [int(word) for word in output.split()]


def calls(store: Store | Path) -> Counter[int]:
    """Count the recorded calls of every number; ids of spans must not repeat."""
    opened = open_store(store) if isinstance(store, Path) else store
    spans = [
        span for summary in opened.query(all_attempts=True) for span in opened.load(summary.trace_id).spans
    ]
    ids = [span.span_id for span in spans]
    assert len(ids) == len(set(ids))
    return Counter(_number(span.inputs) for span in spans if span.name == "call" and span.end_ns)


def _number(inputs: Any) -> int:
    return int(inputs["number"])


def installed(name: str) -> str:
    """Give the path of a program; a test that needs one skips where it is missing, and fails under CI."""
    places = [os.environ.get("PATH", os.defpath), *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]
    path = shutil.which(name, path=os.pathsep.join(places))
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} is not installed")
    return path


def install_exporter(folder: Path, code: str) -> dict[str, str]:
    """Install a third-party exporter, as a package would, and give the environment that finds it.

    Args:
        folder: where to put it.
        code: defines a class ``Exporter``; it becomes the backend ``elsewhere``.
    """
    packages = folder / "packages"
    info = packages / "elsewhere-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "elsewhere.py").write_text(textwrap.dedent(code))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trackway.exporters]\nelsewhere = elsewhere:Exporter\n")
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path}


def followers(store: Path) -> list[int]:
    """Give the processes that export from a store."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"sync" in words and os.fsencode(store) in words:
            found.append(int(path.parent.name))
    return found


def stop_followers(store: Path) -> None:
    """End the followers of a store, which would try for two more minutes."""
    while (pids := followers(store)) or is_followed(store):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
