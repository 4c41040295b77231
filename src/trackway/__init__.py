"""Trackway records what an LLM agent does in every reinforcement-learning rollout."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trace.capture.attaching import attach as attach
    from .trace.capture.carrying import carry as carry
    from .trace.capture.carrying import detached as detached
    from .trace.capture.carrying import extract as extract
    from .trace.capture.carrying import inject as inject
    from .trace.capture.decorators import llm_trace as llm_trace
    from .trace.capture.decorators import rollout_trace as rollout_trace
    from .trace.capture.decorators import tool_trace as tool_trace
    from .trace.capture.rollouts import annotate as annotate
    from .trace.capture.rollouts import reward as reward
    from .trace.capture.rollouts import trajectory as trajectory
    from .trace.config import ConfigError as ConfigError
    from .trace.config import TraceConfig as TraceConfig
    from .trace.lifecycle import configure as configure
    from .trace.lifecycle import flush as flush
    from .trace.lifecycle import shutdown as shutdown
    from .trace.loggers import ExperimentLogger as ExperimentLogger
    from .trace.loggers import Tracker as Tracker
    from .trace.model import Trajectory as Trajectory
    from .trace.model import TrajectoryKey as TrajectoryKey
    from .trace.store import StoreError as StoreError
    from .trace.store import open_store as open_store

_HOMES = {
    "ConfigError": "config",
    "ExperimentLogger": "loggers",
    "StoreError": "store",
    "TraceConfig": "config",
    "Tracker": "loggers",
    "Trajectory": "model",
    "TrajectoryKey": "model",
    "annotate": "capture.rollouts",
    "attach": "capture.attaching",
    "carry": "capture.carrying",
    "configure": "lifecycle",
    "detached": "capture.carrying",
    "extract": "capture.carrying",
    "flush": "lifecycle",
    "inject": "capture.carrying",
    "llm_trace": "capture.decorators",
    "open_store": "store",
    "reward": "capture.rollouts",
    "rollout_trace": "capture.decorators",
    "shutdown": "lifecycle",
    "tool_trace": "capture.decorators",
    "trajectory": "capture.rollouts",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    # Each name is imported when it is first used, so that `import trackway` costs nothing.
    if name in _HOMES:
        value = getattr(import_module(f"trackway.trace.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trackway' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
