"""verl's settings for tracing, and what they switch on in this process."""

from __future__ import annotations

from typing import Any, ClassVar

from ...config import ConfigError
from ...lifecycle import configure
from ...log import logger


class RolloutTraceConfig:
    """The one configuration of this process, as verl's class of this name.

    The first ``init`` counts, until ``reset``.

    Attributes:
        backend, token2text, project_name, experiment_name: as given to ``init``.
        client: always None: no client of a destination lives in a process that trains.
        max_samples_per_step_per_worker: always None, so that verl's workers choose no samples themselves,
            for which they draw from numpy's global generator. What ``init`` was given steers our own choice.
    """

    _instance: ClassVar[RolloutTraceConfig | None] = None

    backend: str | None = None
    client: object | None = None
    token2text: bool = False
    project_name: str | None = None
    experiment_name: str | None = None
    max_samples_per_step_per_worker: int | None = None
    _initialized = False
    _tracing = False

    def __new__(cls, *args: object, **kwargs: object) -> RolloutTraceConfig:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    @classmethod
    def get_instance(cls) -> RolloutTraceConfig:
        return cls()

    @classmethod
    def init(
        cls,
        project_name: str,
        experiment_name: str,
        backend: str | None,
        token2text: bool = False,
        max_samples_per_step_per_worker: int | None = None,
    ) -> None:
        """Start to record in this process.

        All that this does not say comes from ``TRACKWAY_*`` variables. A setting that is wrong is logged, and
        nothing is traced.

        Args:
            project_name: name of the MLflow experiment, as in verl.
            experiment_name: name of the run.
            backend: ``mlflow``, ``weave``, ``otlp``, or several with commas; None for ``TRACKWAY_BACKEND``,
                and without that for the journal alone.
            token2text: whether token ids are decoded.
            max_samples_per_step_per_worker: most samples that this process records of a step.
        """
        config = cls.get_instance()
        if config._initialized:
            return
        config._initialized = True
        config.backend = backend
        config.token2text = token2text
        config.project_name = project_name
        config.experiment_name = experiment_name
        trace: dict[str, Any] = {
            "project_name": project_name,
            "experiment_name": experiment_name,
            "backend": backend or None,
            "token2text": token2text or None,
            "max_samples_per_step_per_worker": max_samples_per_step_per_worker,
        }
        try:
            ours = configure({"actor_rollout_ref": {"rollout": {"trace": trace}}})
        except ConfigError as error:
            logger().error("no rollout is traced in this process: %s", error)
            return
        config._tracing = True
        if "mlflow" in ours.backend and ours.tracking_uri is None:
            # verl's own tracing has a database under /tmp for this.
            logger().warning(
                "MLFLOW_TRACKING_URI is not set: rollouts go to mlflow.db in %s, which "
                "`trackway ui --store %s` shows",
                ours.store,
                ours.store,
            )

    @classmethod
    def get_backend(cls) -> str | None:
        return cls.get_instance().backend

    @classmethod
    def get_client(cls) -> object | None:
        return cls.get_instance().client

    @classmethod
    def enable_token2text(cls) -> bool | None:
        return cls.get_instance().token2text

    @classmethod
    def reset(cls) -> None:
        """Forget the configuration: nothing is traced until the next ``init``."""
        cls._instance = None


def tracing() -> bool:
    """Say whether verl's calls are recorded in this process."""
    config = RolloutTraceConfig._instance
    return config is not None and config._tracing
