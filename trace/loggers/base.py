"""What every logger does: the interface behind which W&B, MLflow, the console and the others stand."""

from __future__ import annotations

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..config_values import ConfigError

Level = Literal["info", "warning", "error"]
Status = Literal["finished", "failed", "killed"]


@dataclass(frozen=True, slots=True)
class Histogram:
    """The distribution of an array, already counted.

    Attributes:
        edges: borders of the bins, ascending, one more than there are counts.
        counts: values in each bin; the last bin includes its upper border.
        total: sum of all finite values.
        squares: sum of their squares.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    squares: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as its loggers know it.

    Attributes:
        id: unique, 15 to 22 letters, digits and dashes.
        project: the name of what it belongs to.
        experiment: its own name; several runs may have the same.
        directory: where its log is kept, inside the store.
        group: ties together the runs of one job; None for a run alone.
        rank: the process's number in the job; None when it has none.
        started: seconds since 1970.
        resumed: whether this is a further life of a run that ended before.
        kept: what the same logger left in ``state`` in an earlier life, else empty.
    """

    id: str
    project: str
    experiment: str
    directory: Path
    group: str | None = None
    rank: int | None = None
    started: float = 0.0
    resumed: bool = False
    kept: Mapping[str, Any] = field(default_factory=dict)


class Unavailable(ConfigError):  # noqa: N818 - it is the state, said as other errors of settings are
    """A logger cannot work here as it is: a package or credentials are missing."""


class ExperimentLogger(ABC):
    """Writes one run to one destination.

    A ``Tracker`` calls it, from a thread of its own for each logger and never from two at once, and tries
    again what raises. What it is given is plain: see each method. ``trackway.loggers`` is the group of
    entry points under which a package registers its own.

    Attributes:
        package: what it needs imported, which is also the name of the extra of ours that installs it; None
            for nothing. It is imported before the logger is made, where the run begins.
        settings: names of the settings that the constructor takes beside the run.
        secrets: those of them that are never written to a disk; whoever goes on with the run takes them from
            the environment.
        state: plain JSON that a later life of the run, or ``trackway sync``, is given as ``run.kept``: the
            id of the run over there, and the like.
        time: when what is written now was logged, in seconds since 1970; the same when it is tried again.
    """

    package: ClassVar[str | None] = None
    settings: ClassVar[frozenset[str]] = frozenset()
    secrets: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, run: Run) -> None:
        """Open the run at the destination.

        Args:
            run: which one.
        """
        self.run = run
        self.state: dict[str, Any] = dict(run.kept)
        self.time = run.started

    @classmethod
    def check(cls, settings: Mapping[str, Any], *, offline: bool) -> dict[str, Any]:
        """Look, before anything is opened, whether it can work.

        Args:
            settings: as the user gave them; each is one of ``cls.settings``.
            offline: whether to go on without a connection, where the destination knows such a thing,
                in place of an error.

        Returns:
            The settings to open it with.

        Raises:
            ConfigError: a setting is wrong.
            Unavailable: credentials or the like are missing; with ``offline`` the run goes on without it.
        """
        return dict(settings)

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers of one step.

        Args:
            metrics: name -> ``int`` or ``float``, perhaps not finite. Names are not empty.
            step: not negative; repeated, skipped and earlier ones occur.
        """

    @abstractmethod
    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration.

        Args:
            config: plain JSON, nested.
        """

    @abstractmethod
    def log_artifact(self, artifact: Path, name: str) -> None:
        """Keep a file, or a directory with all that is in it.

        Args:
            artifact: its path; it stays as it is until the run has ended.
            name: how it is called there, perhaps with slashes.
        """

    def log_histograms(self, histograms: Mapping[str, Histogram], step: int) -> None:
        """Write distributions; unless overridden, their mean and deviation as metrics.

        Args:
            histograms: name -> counted values.
            step: as in ``log_metrics``.
        """
        metrics: dict[str, float] = {}
        for name, histogram in histograms.items():
            n = sum(histogram.counts)
            if n:
                mean = histogram.total / n
                metrics[f"{name}/mean"] = mean
                metrics[f"{name}/std"] = max(0.0, histogram.squares / n - mean * mean) ** 0.5
                metrics[f"{name}/min"] = histogram.edges[0]
                metrics[f"{name}/max"] = histogram.edges[-1]
        if metrics:
            self.log_metrics(metrics, step)

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write what the model generated in a validation; unless overridden, as a JSON Lines artifact.

        Args:
            rows: one for each rollout: ``sample``, ``rollout``, ``prompt``, ``completion`` (texts), then one
                number, or None, for each score. Their columns and number may change from step to step.
            step: as in ``log_metrics``.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"step_{step:06d}.jsonl"
            path.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows), encoding="utf-8")
            self.log_artifact(path, f"generations/{path.name}")

    def alert(self, title: str, text: str, level: Level = "warning", step: int | None = None) -> None:  # noqa: B027
        """Tell people; unless overridden, nobody is told, as the console and the log have it already.

        Args:
            title: one line.
            text: what happened.
            level: how bad it is.
            step: the step that it is about, if any.
        """

    def rewind(self, step: int) -> None:  # noqa: B027
        """Forget the values of this step and of later ones: the run was resumed from there.

        Unless overridden nothing is forgotten, and the destination shows both.

        Args:
            step: the first one that the resumed run has logged.
        """

    def flush(self) -> None:  # noqa: B027
        """See to it that what was written is safe; called whenever nothing waits to be written."""

    def finish(self, status: Status) -> None:  # noqa: B027
        """Close the run at the destination; nothing is written afterwards.

        Args:
            status: how the program ended.
        """
