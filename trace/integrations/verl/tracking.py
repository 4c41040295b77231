"""verl's experiment tracking on top of our ``Tracker``: the same calls, and the tools it knows besides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...config import ConfigError, load_config
from ...log import logger
from ...loggers import Tracker, choosing
from ...loggers.runs import ID_FILE
from . import runs

_FROM_TRAINER = ("log_frequency", "log_interval")
_RESUMES = "latest_checkpointed_iteration.txt"
"""What verl leaves in the directory of its checkpoints, and goes on from."""

_latest: list[Tracker] = []
"""The tracker that ``ValidationGenerationsLogger``, which knows of none, writes to."""


def change_tracking(module: ModuleType) -> None:
    """Put ours in place of verl's ``Tracking`` and ``ValidationGenerationsLogger``."""
    runs.change_tracking(module)  # tells the run of verl's own logger for MLflow
    theirs = module.Tracking

    class Tracking(_Tracking):
        supported_backend = tuple(dict.fromkeys([*theirs.supported_backend, *choosing.known()]))
        theirs_class = theirs

    Tracking.__qualname__ = "Tracking"
    module.Tracking = Tracking  # type: ignore[attr-defined]
    module.ValidationGenerationsLogger = ValidationGenerationsLogger  # type: ignore[attr-defined]


class _Tracking:
    """Takes the place of ``verl.utils.tracking.Tracking``.

    What we have a logger for goes through one ``Tracker``; the others (``clearml``, …) stay verl's own.

    Attributes:
        logger: what writes, by name of the backend.
    """

    theirs_class: Callable[..., Any]

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Iterable[str] = "console",
        config: Any = None,
    ) -> None:
        """Begin a run.

        Args:
            project_name, experiment_name: of the run.
            default_backend: ``trainer.logger``: names of loggers, of ours or verl's.
            config: the whole configuration. Of ``trainer``, ``log_frequency``, ``log_interval`` and
                ``wandb_proxy`` are read, and ``trackway``: a mapping of further arguments of ``Tracker``.

        Raises:
            ConfigError: see ``Tracker``.
        """
        wanted = _names(default_backend)
        known = choosing.known()
        ours = [name for name in wanted if name in known]
        others = [name for name in wanted if name not in known]
        trainer = (config or {}).get("trainer") or {}
        self.logger: dict[str, Any] = {}
        self._theirs: Any = None
        self._tracker: Tracker | None = None
        if others:
            self._theirs = self.theirs_class(project_name, experiment_name, others, config)
            self.logger.update(self._theirs.logger)
        if ours:
            arguments = _arguments(trainer, project_name, experiment_name)
            self._tracker = Tracker(ours, config=config, **arguments)
            if trainer.get("default_local_dir"):
                # Who goes on from there goes on with this run.
                self._tracker.save_id(str(trainer["default_local_dir"]))
            if "mlflow" in ours:
                runs.tell_of(self._tracker)
            _latest[:] = [self._tracker]
            self.logger.update(dict.fromkeys(ours, self))

    def log(self, data: Mapping[str, Any], step: int, backend: Any = None) -> None:
        """Write metrics of one step.

        Args:
            data: name -> value.
            step: which one.
            backend: only where this is one of verl's own backends it chooses; ours get everything.
        """
        if self._tracker is not None:
            self._tracker.log_metrics(data, step)
        if self._theirs is not None:
            self._theirs.log(data, step, backend)

    def finish(self, exit_code: int = 0) -> None:
        """End the run.

        Args:
            exit_code: of the program; other than 0 says that it failed.
        """
        if self._tracker is not None:
            self._tracker.finish("failed" if exit_code else "finished")
        if self._theirs is not None:
            self._theirs.finish(exit_code)


class ValidationGenerationsLogger:
    """Takes the place of ``verl.utils.tracking.ValidationGenerationsLogger``."""

    def __init__(self, project_name: str | None = None, experiment_name: str | None = None) -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name

    def log(self, loggers: Any, samples: Sequence[Sequence[Any]], step: int) -> None:
        """Write validation samples.

        Args:
            loggers: ``trainer.logger``; those of the ``Tracking`` that was made last are meant.
            samples: prompt, completion and score of each, chosen by verl.
            step: of the validation.
        """
        if not _latest:
            return
        rows = []
        for sample in samples:
            prompt, completion, *scores = sample
            row = {"prompt": prompt, "completion": completion}
            row |= {"score" if n == 0 else f"score_{n + 1}": score for n, score in enumerate(scores)}
            rows.append(row)
        _latest[0].log_generations(rows, step)


def _names(value: str | Iterable[str]) -> list[str]:
    items = value.split(",") if isinstance(value, str) else list(value)
    found = [str(item).strip() for item in items]
    if "tracking" in found:
        logger().warning("trainer.logger=tracking is an old name of wandb")
    return list(dict.fromkeys("wandb" if name == "tracking" else name for name in found))


def _arguments(trainer: Mapping[str, Any], project: str, experiment: str) -> dict[str, Any]:
    """Give what ``Tracker`` is made with.

    Raises:
        ConfigError: ``trainer.trackway`` is no mapping.
    """
    further = trainer.get("trackway") or {}
    if not isinstance(further, Mapping):
        raise ConfigError("trainer.trackway is not allowed; expected a mapping of arguments of Tracker")
    found: dict[str, Any] = {
        "project": project,
        "experiment": experiment,
        "store": load_config().store,
        # verl has chosen them already.
        "log_val_generations": -1,
    }
    found |= {name: trainer[name] for name in _FROM_TRAINER if trainer.get(name) is not None}
    found |= further
    if trainer.get("wandb_proxy"):
        found["wandb"] = {"wandb_proxy": trainer["wandb_proxy"], **found.get("wandb", {})}
    place = Path(str(trainer.get("default_local_dir") or ""))
    goes_on = trainer.get("resume_mode", "disable") != "disable" and (place / _RESUMES).exists()
    if goes_on and (place / ID_FILE).exists():
        found.setdefault("resume", place)
    return found
