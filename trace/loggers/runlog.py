"""The log of a run: one line of JSON for everything that was logged, from which every logger is served."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ..capture.snapshot import clean
from ..store import locks
from .base import Histogram

FOLDER = "runs"
"""Where a store keeps its runs, each in a directory named by its id."""
LOG = "log.jsonl"
FACTS = "run.json"
ARTIFACTS = "artifacts"
_PORTION = 2**20


class Record(NamedTuple):
    """One line of a log.

    Attributes:
        kind: ``start``, ``config``, ``rewind``, ``metrics``, ``generations``, ``artifact``, ``alert`` or
            ``end``.
        data: what belongs to it.
        time: when it was logged, in seconds since 1970.
        end: offset of the next line in the file.
    """

    kind: str
    data: dict[str, Any]
    time: float
    end: int


class RunLog:
    """Appends to the log of a run; while it is open nobody else can, and others see that the run lives.

    Args:
        directory: of the run; made when it is not there.

    Raises:
        BlockingIOError: somebody else has it open.
        OSError: it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / LOG
        file = locks.take(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        if file is None:
            raise BlockingIOError(f"the run in {directory} is being written by another process")
        self._file = file
        size = os.fstat(file).st_size
        # Somebody who died may have left a line half written.
        self._torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"

    def append(self, kind: str, data: Mapping[str, Any], time: float) -> None:
        """Write one line.

        Raises:
            OSError: it could not be written; what has been of it is ended by the next one.
        """
        line = to_json({"kind": kind, "time": time, **data}) + b"\n"
        rest = memoryview(b"\n" + line if self._torn else line)
        self._torn = True
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._torn = False

    def close(self) -> None:
        """Let others write it."""
        locks.release(self._file)


def to_json(data: Mapping[str, Any]) -> bytes:
    """Write JSON, of text that no encoding has too: halves of characters become ``\\udXXX``."""
    try:
        return orjson.dumps(data)
    except TypeError:
        return orjson.dumps(_repaired(data))


def _repaired(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {_repaired(key): _repaired(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_repaired(item) for item in value]
    return value


def is_written(directory: Path) -> bool:
    """Say whether a process has the log of this run open."""
    try:
        return locks.is_held(directory / LOG)
    except OSError:
        return False


def read(path: Path, start: int = 0) -> Iterator[Record]:
    """Read the whole lines of a log; such as are damaged are left out.

    Args:
        path: of the file.
        start: offset of the first line.
    """
    with path.open("rb") as file:
        file.seek(start)
        while lines := file.readlines(_PORTION):
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                try:
                    data = orjson.loads(line)
                    record = Record(data.pop("kind"), data, float(data.pop("time")), start)
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue
                yield record


def metrics_record(step: int, values: Mapping[str, float | Histogram]) -> dict[str, Any]:
    """Make the data of a ``metrics`` record; JSON has no name for what is not finite."""
    metrics: dict[str, float] = {}
    odd: dict[str, str] = {}
    histograms: dict[str, Histogram] = {}
    for name, value in values.items():
        if isinstance(value, Histogram):
            histograms[name] = value
        elif math.isfinite(value):
            metrics[name] = value
        else:
            odd[name] = repr(value)
    data: dict[str, Any] = {"step": step, "metrics": metrics}
    if odd:
        data["nonfinite"] = odd
    if histograms:
        data["histograms"] = histograms
    return data


def metrics_of(data: Mapping[str, Any]) -> dict[str, float]:
    """Give the metrics of a ``metrics`` record."""
    odd = data.get("nonfinite")
    metrics: dict[str, float] = data["metrics"]
    return metrics | {name: float(text) for name, text in odd.items()} if odd else metrics


def histograms_of(data: Mapping[str, Any]) -> dict[str, Histogram]:
    """Give the histograms of a ``metrics`` record."""
    return {
        name: Histogram(tuple(each["edges"]), tuple(each["counts"]), each["total"], each["squares"])
        for name, each in data.get("histograms", {}).items()
    }


def history(path: Path) -> dict[str, dict[int, float]]:
    """Give the values of each metric by step, ascending.

    Of a step that was logged twice the last value counts. What a run had logged at and after the step from
    which it was resumed is replaced by what came then.
    """
    found: dict[str, dict[int, float]] = {}
    for record in read(path):
        if record.kind == "rewind":
            for values in found.values():
                for step in [step for step in values if step >= record.data["step"]]:
                    del values[step]
        elif record.kind == "metrics":
            for name, value in metrics_of(record.data).items():
                found.setdefault(name, {})[record.data["step"]] = value
    return {name: dict(sorted(values.items())) for name, values in found.items() if values}
