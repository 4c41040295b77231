"""The MLflow run of ``trainer.logger=mlflow``, which the traces are linked to.

The trainer's process starts it and the workers' processes record, so it goes through Ray's own store of keys.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...capture import runtime
from ...capture.recorder import Recorder
from ...exporters.mlflow_store import tracking_uri
from ...log import logger
from ...loggers.linked import mlflow_run
from ...printable import without_password
from .hooks import replace

if TYPE_CHECKING:
    from ...loggers import Tracker

_NAMESPACE = b"trackway"


def change_tracking(module: ModuleType) -> None:
    """Let verl's ``Tracking`` tell which run it has started."""
    replace(module.Tracking, "__init__", _telling)


def _telling(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            if "mlflow" in self.logger:
                _tell(sys.modules["mlflow"])
        except Exception as error:
            logger().warning("traces will not be linked to the MLflow run of trainer.logger: %s", error)

    return init


def _tell(mlflow: Any) -> None:
    run = mlflow.active_run()
    if run is not None:
        _publish(run.info.run_id, os.environ.get("MLFLOW_TRACKING_URI") or mlflow.get_tracking_uri())


def tell_of(tracker: Tracker) -> None:
    """Tell the workers which run of MLflow our tracker writes to, as soon as that has begun."""
    try:
        found = mlflow_run(tracker.run.directory)
        if found is not None:
            _publish(*found)
    except Exception as error:
        logger().warning("traces will not be linked to the MLflow run of trainer.logger: %s", error)


def _publish(run_id: str, uri: str) -> None:
    facts = json.dumps({"run_id": run_id, "tracking_uri": uri}).encode()
    _ray_kv()._internal_kv_put(_key(), facts, True, namespace=_NAMESPACE)


class _Link:
    """What a process knows of the run."""

    __slots__ = ("asked", "run_id", "settled")

    def __init__(self) -> None:
        self.asked: Any = None  # the step in which Ray was asked last
        self.settled = False
        self.run_id: str | None = None


_links: WeakKeyDictionary[Recorder, _Link] = WeakKeyDictionary()


def run_of(worker: Any, step: Any) -> str | None:
    """Give the run that a worker's traces belong to; None when there is none, or the settings name one.

    Ray is asked for it once a step until it knows.
    """
    recorder = runtime.get()
    if recorder is None or "mlflow" not in recorder.config.backend or recorder.config.run_id:
        return None
    link = _links.setdefault(recorder, _Link())
    if link.settled or link.asked == (step,):
        return link.run_id
    link.asked = (step,)
    try:
        _ask(link, worker, recorder)
    except Exception as error:
        link.settled = True
        recorder.warn_once("run", f"traces are not linked to the MLflow run of trainer.logger: {error}")
    return link.run_id


def _ask(link: _Link, worker: Any, recorder: Recorder) -> None:
    if not _logs_to_mlflow(worker.config):
        link.settled = True
        return
    facts = _ray_kv()._internal_kv_get(_key(), namespace=_NAMESPACE)
    if not facts:
        return
    link.settled = True
    found = json.loads(facts)
    store = recorder.config.store
    theirs, ours = (
        without_password(tracking_uri(store, uri))
        for uri in (found["tracking_uri"], recorder.config.tracking_uri)
    )
    if theirs == ours:
        link.run_id = found["run_id"]
        return
    recorder.warn_once(
        "run",
        f"trainer.logger=mlflow logs to {theirs}, and traces go to {ours}: they are not linked to its run. "
        "Set MLFLOW_TRACKING_URI to have both in one place",
    )


def _logs_to_mlflow(config: Any) -> bool:
    loggers = config.trainer.get("logger") or ()
    return "mlflow" in ([loggers] if isinstance(loggers, str) else list(loggers))


def _ray_kv() -> Any:
    from ray.experimental import internal_kv

    if not internal_kv._internal_kv_initialized():
        raise ValueError("this process is not connected to Ray")
    return internal_kv


def _key() -> bytes:
    import ray

    return f"verl-run-{ray.get_runtime_context().get_job_id()}".encode()
