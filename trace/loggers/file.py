"""JSON Lines, as verl's own file logger writes them, and readable by whatever reads those."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import orjson

from .base import ExperimentLogger, Histogram, Level, Run, Status
from .values import finite


class FileLogger(ExperimentLogger):
    """Appends one line for each call: ``{"step": 3, "data": {"loss": 0.1}}``.

    Other lines have ``config``, ``generations``, ``histograms``, ``artifact`` or ``alert`` in place of
    ``data``. What is not finite stands in ``nonfinite`` as text, since JSON has no numbers for it.

    Args:
        run: which run.
        path: of the file. Default: ``$VERL_FILE_LOGGER_PATH``, else ``<project>/<experiment>.jsonl`` below
            ``$VERL_FILE_LOGGER_ROOT`` or the current directory. Where that file is there already, ``-`` and
            the run's id are added to its name.
    """

    settings: ClassVar[frozenset[str]] = frozenset({"path"})

    def __init__(self, run: Run, *, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(run)
        kept = self.state.get("path")
        self._path = Path(kept) if kept else _make(run, path)
        self.state["path"] = str(self._path)
        self._file = self._path.open("ab", buffering=0)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        plain = finite(metrics)
        line: dict[str, Any] = {"step": step, "data": plain}
        if len(plain) < len(metrics):
            line["nonfinite"] = {name: repr(value) for name, value in metrics.items() if name not in plain}
        self._write(line)

    def log_histograms(self, histograms: Mapping[str, Histogram], step: int) -> None:
        self._write({"step": step, "histograms": histograms})

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._write({"run": self.run.id, "config": config})

    def log_artifact(self, artifact: Path, name: str) -> None:
        self._write({"artifact": name, "path": str(artifact)})

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self._write({"step": step, "generations": list(rows)})

    def alert(self, title: str, text: str, level: Level = "warning", step: int | None = None) -> None:
        self._write({"step": step, "alert": {"title": title, "text": text, "level": level}})

    def rewind(self, step: int) -> None:
        """Leave out the lines of this step and of later ones."""
        self._file.close()
        fresh = self._path.with_name(f".{self._path.name}.rewound")
        with self._path.open("rb") as old, fresh.open("wb") as new:
            for line in old:
                if not _is_from(line, step):
                    new.write(line)
        shutil.copymode(self._path, fresh)
        fresh.replace(self._path)
        self._file = self._path.open("ab", buffering=0)

    def finish(self, status: Status) -> None:
        self._file.close()


def _make(run: Run, path: str | os.PathLike[str] | None) -> Path:
    given = path or os.environ.get("VERL_FILE_LOGGER_PATH")
    if given:
        place = Path(given).expanduser()
    else:
        root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT") or ".").expanduser()
        place = root / _safe(run.project) / f"{_safe(run.experiment)}.jsonl"
    place = place.absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.touch(exist_ok=False)  # so that of two runs which begin at once one has it
    except FileExistsError:
        place = place.with_name(f"{place.stem}-{run.id}{place.suffix}")
    return place


def _safe(name: str) -> str:
    """Keep a name from leading out of its directory."""
    return name.replace("/", "_").replace("\0", "_").strip(".") or "_"


def _is_from(line: bytes, step: int) -> bool:
    try:
        at = orjson.loads(line).get("step")
    except (ValueError, AttributeError):
        return False
    return isinstance(at, int) and at >= step
