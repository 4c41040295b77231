"""What a run has left: its configuration, results, alerts and artifacts, and how far its loggers are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import runlog
from .delivery import load
from .frequency import KEY_METRICS
from .runs import ENVIRONMENT, RunSummary, summary

_FOR_NOBODY = ("start", "end")
"""Kinds of records that no logger is given."""


@dataclass(frozen=True, slots=True)
class LoggerState:
    """How far one logger of a run is.

    Attributes:
        delivered, refused: records that it took, and that it did not take.
        pending: records that it lacks.
        error: why, as far as is known.
        finished: how the run ended there; None while it is open there.
        state: what the logger keeps for itself: the id of the run over there, and the like.
    """

    name: str
    delivered: int
    refused: int
    pending: int
    error: str | None
    finished: str | None
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """All that is known of a run.

    Attributes:
        run: its names, and how it ended.
        metrics: name -> step -> value, steps ascending, as ``runlog.history`` gives them.
        steps: of which there are metrics, ascending.
        keys: names of those that matter most, as the run's key metrics say.
        config: plain JSON; what was logged later replaces what came before.
        environments: of each life of the run, the first one first.
        alerts: ``title``, ``text``, ``level``, ``step`` and ``time`` of each.
        generations: step -> the rows of that validation, ascending.
        artifacts: ``name``, ``hash``, ``bytes`` and ``path`` of each, by name; of several of the same name
            the last.
        loggers: those of the run.
        last: seconds since 1970 of the last thing that it logged.
    """

    run: RunSummary
    metrics: Mapping[str, Mapping[int, float]]
    steps: Sequence[int]
    keys: Sequence[str]
    config: Mapping[str, Any]
    environments: Sequence[Mapping[str, Any]]
    alerts: Sequence[Mapping[str, Any]]
    generations: Mapping[int, Sequence[Mapping[str, Any]]]
    artifacts: Mapping[str, Mapping[str, Any]]
    loggers: Sequence[LoggerState]
    last: float

    @property
    def environment(self) -> Mapping[str, Any]:
        """That of the run's last life."""
        return self.environments[-1] if self.environments else {}

    @property
    def results(self) -> dict[str, float]:
        """The last value of each key metric."""
        return {name: list(self.metrics[name].values())[-1] for name in self.keys}


def read_run(directory: Path, *, keys_only: bool = False) -> RunRecord:
    """Read all of a run.

    Args:
        directory: of the run, see ``runs.find``.
        keys_only: leave out all other metrics, which are most of what there is to read.

    Raises:
        OSError: its log cannot be read.
    """
    run = summary(directory)
    metrics = _Metrics(run.loggers.get("console", {}).get("key_metrics") or KEY_METRICS, keys_only)
    config: dict[str, Any] = {}
    alerts: list[dict[str, Any]] = []
    generations: dict[int, list[dict[str, Any]]] = {}
    artifacts: dict[str, dict[str, Any]] = {}
    cursors = {name: load(directory / f"{name}.json") for name in run.loggers}
    pending = dict.fromkeys(cursors, 0)
    last = run.started
    for record in runlog.read(directory / runlog.LOG):
        data = record.data
        last = max(last, record.time)
        if record.kind == "metrics":
            metrics.add(data["step"], runlog.metrics_of(data))
        elif record.kind == "config":
            config |= data["config"]
        elif record.kind == "rewind":
            metrics.rewind(data["step"])
            generations = {step: rows for step, rows in generations.items() if step < data["step"]}
        elif record.kind == "generations":
            generations[data["step"]] = data["rows"]
        elif record.kind == "artifact":
            artifacts[data["name"]] = data
        elif record.kind == "alert":
            alerts.append({**data, "time": record.time})
        if record.kind not in _FOR_NOBODY:
            for name, cursor in cursors.items():
                pending[name] += record.end > cursor.get("offset", 0)
    values = metrics.whole()
    return RunRecord(
        run,
        values,
        sorted(metrics.steps),
        metrics.keys_of(values),
        config,
        _environments(directory),
        alerts,
        dict(sorted(generations.items())),
        artifacts,
        [_state(name, cursor, pending[name]) for name, cursor in cursors.items()],
        last,
    )


class _Metrics:
    """Gathers metrics; looks up the names that it keeps, not all that it is given."""

    def __init__(self, patterns: Sequence[str], keys_only: bool) -> None:
        self._patterns = patterns
        self._keys_only = keys_only
        self._known: set[str] = set()
        self._found: dict[str, dict[int, float]] = {}
        self.steps: set[int] = set()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.add(step)
        for name in values.keys() - self._known:
            self._known.add(name)
            if not self._keys_only or self.keys_of((name,)):
                self._found[name] = {}
        for name in self._found.keys() & values.keys():
            self._found[name][step] = values[name]

    def rewind(self, step: int) -> None:
        self.steps = {each for each in self.steps if each < step}
        for values in self._found.values():
            for each in [each for each in values if each >= step]:
                del values[each]

    def whole(self) -> dict[str, dict[int, float]]:
        return {
            name: dict(sorted(self._found[name].items())) for name in sorted(self._found) if self._found[name]
        }

    def keys_of(self, names: Collection[str]) -> list[str]:
        """Give the key metrics in the order of their patterns, which is that of what matters."""
        found = [name for pattern in self._patterns for name in sorted(names) if fnmatchcase(name, pattern)]
        return list(dict.fromkeys(found))


def _environments(directory: Path) -> list[dict[str, Any]]:
    lives = load(directory / runlog.FACTS).get("lives", 1)
    stem = Path(ENVIRONMENT).stem
    names = [ENVIRONMENT, *(f"{stem}-{life}.json" for life in range(2, lives + 1))]
    return [found for name in names if (found := load(directory / name))]


def _state(name: str, cursor: Mapping[str, Any], pending: int) -> LoggerState:
    return LoggerState(
        name,
        delivered=int(cursor.get("delivered", 0)),
        refused=int(cursor.get("refused", 0)),
        pending=pending,
        error=cursor.get("error"),
        finished=cursor.get("finished"),
        state=cursor.get("state") or {},
    )
