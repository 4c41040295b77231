"""The runs of a store: where each is kept, and how one is found again."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..capture.snapshot import clean
from ..config_values import ConfigError, nearest, show
from . import environment, runlog
from .base import Run, Status
from .delivery import load, save

ID_FILE = "trackway-run.json"
"""Where ``Tracker.save_id`` leaves the id of a run."""
ENVIRONMENT = "environment.json"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What is known of a run without reading its log.

    Attributes:
        id, project, experiment, group, rank, directory, started: as in ``Run``.
        status: ``running``, ``finished``, ``failed``, ``killed``, or ``died`` when its process is gone and
            left no word.
        ended: seconds since 1970; None while it runs or when it died.
        loggers: their settings, by name.
    """

    id: str
    project: str
    experiment: str
    group: str | None
    rank: int | None
    directory: Path
    started: float
    status: str
    ended: float | None
    loggers: Mapping[str, Mapping[str, Any]]


def describe(
    store: Path, project: str, experiment: str, group: str | None, rank: int | None, directory: Path | None
) -> Run:
    """Make the description of a new run, or of one that goes on in its directory."""
    now = time.time()
    if directory is None:
        run_id = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(3)}"
        return Run(
            run_id, project, experiment, store / runlog.FOLDER / run_id, group=group, rank=rank, started=now
        )
    facts = load(directory / runlog.FACTS)
    return Run(
        directory.name,
        facts.get("project", project),
        facts.get("experiment", experiment),
        directory,
        group=facts.get("group", group),
        rank=facts.get("rank", rank),
        started=facts.get("started", now),
        resumed=True,
    )


def begin(run: Run, loggers: Mapping[str, Mapping[str, Any]]) -> None:
    """Note that a run begins, or goes on.

    Args:
        run: which one.
        loggers: their settings, by name, without those that are secret.
    """
    facts = load(run.directory / runlog.FACTS)
    facts |= {
        "id": run.id,
        "project": run.project,
        "experiment": run.experiment,
        "group": run.group,
        "rank": run.rank,
        "started": run.started,
        "status": "running",
        "ended": None,
        "loggers": {**facts.get("loggers", {}), **loggers},
        "lives": facts.get("lives", 0) + 1,
    }
    save(run.directory / runlog.FACTS, facts)


def end(run: Run, status: Status) -> None:
    """Note how a run ended."""
    facts = load(run.directory / runlog.FACTS)
    save(run.directory / runlog.FACTS, {**facts, "status": status, "ended": time.time()})


def record_environment(run: Run) -> None:
    """Write down what the run runs in; that of a later life stands beside that of the first."""
    lives = load(run.directory / runlog.FACTS).get("lives", 1)
    name = ENVIRONMENT if lives == 1 else f"environment-{lives}.json"
    save(run.directory / name, environment.facts())


def list_runs(store: Path) -> Iterator[RunSummary]:
    """Give the runs of a store, the latest first."""
    folder = store / runlog.FOLDER
    paths = [path for path in (folder.iterdir() if folder.is_dir() else ()) if (path / runlog.LOG).exists()]
    yield from sorted(map(summary, paths), key=lambda run: (run.started, run.id), reverse=True)


def summary(directory: Path) -> RunSummary:
    """Describe the run in a directory."""
    facts = load(directory / runlog.FACTS)
    status = facts.get("status", "running")
    if status == "running" and not runlog.is_written(directory):
        status = "died"
    return RunSummary(
        id=directory.name,
        project=str(facts.get("project", "?")),
        experiment=str(facts.get("experiment", "?")),
        group=facts.get("group"),
        rank=facts.get("rank"),
        directory=directory,
        started=float(facts.get("started") or 0.0),
        status=str(status),
        ended=facts.get("ended"),
        loggers=dict(facts.get("loggers") or {}),
    )


def find(store: Path, name: str | os.PathLike[str]) -> Path:
    """Find the directory of a run.

    Args:
        store: where to look.
        name: its id, or how that begins; ``last``; the name of an experiment, of which the latest run
            counts; or a directory in which ``Tracker.save_id`` left the id.

    Raises:
        ConfigError: there is no such run, or several ids begin so.
    """
    text = os.fspath(name)
    left = Path(text) / ID_FILE
    if left.is_file():
        text = str(load(left).get("run", ""))
    found = list(list_runs(store))
    exact = [run for run in found if run.id == text]
    begun = [run for run in found if text and run.id.startswith(text)]
    named = [run for run in found if run.experiment == text]
    if text == "last" and found:
        return found[0].directory
    if exact or named:
        return (exact or named)[0].directory
    if len(begun) > 1:
        raise ConfigError(f"{len(begun)} runs begin with {show(text)}: {', '.join(r.id for r in begun[:5])}")
    if not begun:
        ids = [run.id for run in found]
        hint = nearest(text, ids) if ids else "; there is no run yet"
        raise ConfigError(f"there is no run {show(text)} in {store}{hint}")
    return begun[0].directory


def keep(directory: Path, artifact: Any, name: str) -> dict[str, Any]:
    """Copy an artifact into the directory of a run, under its content's hash.

    Args:
        directory: of the run.
        artifact: the path of a file or directory, or bytes.
        name: how it is called.

    Returns:
        ``name``, ``path`` (relative to the directory of the run), ``hash`` and ``bytes``.

    Raises:
        OSError: it cannot be read or copied.
        ValueError: the name is none.
    """
    parts = [clean(part) for part in name.replace("\\", "/").split("/") if part]
    if not parts or any(part in (".", "..") for part in parts):
        raise ValueError(f"{name!r} cannot be the name of an artifact")
    folder = directory / runlog.ARTIFACTS
    folder.mkdir(exist_ok=True)
    fresh = folder / f".{secrets.token_hex(8)}"
    try:
        if isinstance(artifact, (bytes, bytearray, memoryview)):
            fresh.write_bytes(artifact)
        elif Path(artifact).is_dir():
            shutil.copytree(artifact, fresh)
        else:
            shutil.copyfile(artifact, fresh)
        digest, size = _digest(fresh)
        place = folder / digest / parts[-1]
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            fresh.rename(place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True) if fresh.is_dir() else fresh.unlink(missing_ok=True)
    return {
        "name": "/".join(parts),
        "path": f"{runlog.ARTIFACTS}/{digest}/{parts[-1]}",
        "hash": digest,
        "bytes": size,
    }


def _digest(path: Path) -> tuple[str, int]:
    """Hash the content of a file, or names and contents of a directory; give the bytes too."""
    whole = hashlib.sha256()
    size = 0
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            one = hashlib.sha256()
            with file.open("rb") as stream:
                while chunk := stream.read(2**20):
                    one.update(chunk)
                    size += len(chunk)
            if path.is_dir():
                whole.update(os.fsencode(file.relative_to(path)) + b"\0" + one.digest())
            else:
                whole = one
    return whole.hexdigest()[:32], size
