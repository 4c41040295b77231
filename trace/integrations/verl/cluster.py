"""The variables that steer tracing, handed on to a Ray cluster that runs already.

Ray's workers inherit them from the program that starts Ray. One that joins a cluster has to name them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ...config import TraceConfig
from ...printable import without_password
from .hooks import replace

_SECRETS = ("TRACKWAY_EMAIL_PASSWORD", "TRACKWAY_WEBHOOK_URL", "TRACKWAY_WEBHOOK_HEADERS")
_OTHERS = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID")


def change_runtime_env(module: ModuleType) -> None:
    """Add our variables to the environment that verl's programs give to ``ray.init``."""
    replace(module, "get_ppo_ray_runtime_env", _with_ours)


def _with_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_ppo_ray_runtime_env(*args: Any, **kwargs: Any) -> Any:
        runtime_env = original(*args, **kwargs)
        variables = runtime_env.setdefault("env_vars", {})
        for name, value in _ours().items():
            variables.setdefault(name, value)
        return runtime_env

    return get_ppo_ray_runtime_env


def _ours() -> dict[str, str]:
    found = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith("TRACKWAY_") or name in _OTHERS) and value
    }
    # verl prints this environment, and Ray's dashboard shows it.
    found = {name: value for name, value in found.items() if not _is_secret(name, value)}
    found["TRACKWAY_VERL"] = "1"  # also where install() was called by hand
    # Workers have directories of their own as their current ones.
    store = found.get("TRACKWAY_STORE")
    found["TRACKWAY_STORE"] = str(
        TraceConfig().store if store is None else Path(store).expanduser().absolute()
    )
    return found


def _is_secret(name: str, value: str) -> bool:
    return name in _SECRETS or without_password(value) != value
