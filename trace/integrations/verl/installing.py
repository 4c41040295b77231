"""Puts everything in place in one process."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from ...log import logger
from . import cluster, dealing, rollout_trace, runs, tools, worker
from .hooks import when_imported

_REPLACED = "verl.utils.rollout_trace"

_WORK = {
    "verl.experimental.agent_loop.agent_loop": worker.change_workers,
    "verl.experimental.agent_loop.tool_agent_loop": tools.change_calls,
    "verl.protocol": dealing.change_protocol,
    "verl.tools.base_tool": tools.change_base_tool,
    "verl.tools.function_tool": tools.change_function_tool,
    "verl.trainer.constants_ppo": cluster.change_runtime_env,
}
_TRACKING = "verl.utils.tracking"


def install() -> None:
    """Trace verl in this process, once ``RolloutTraceConfig.init`` is called in it, as its workers do.

    It may be called again.

    Raises:
        RuntimeError: verl's modules have been imported and hold functions of its own tracing.
        ModuleNotFoundError: verl is not installed.
    """
    utils = importlib.import_module("verl.utils")
    there = sys.modules.get(_REPLACED)
    if there is rollout_trace:
        return
    if there is not None:
        users = sorted(
            name for name, module in list(sys.modules.items()) if name != _REPLACED and _uses(module, there)
        )
        if users:
            raise RuntimeError(
                f"install() comes too late: {', '.join(users)} use verl's own tracing "
                "already. Call it right after `import verl`, or start the program with TRACKWAY_VERL=1"
            )
    sys.modules[_REPLACED] = rollout_trace
    utils.rollout_trace = rollout_trace  # type: ignore[attr-defined]
    for name, work in _WORK.items():
        when_imported(name, work)
    asked = os.environ.get("TRACKWAY_VERL_TRACKING", "")
    if asked not in ("", "0", "1"):
        logger().warning(
            "TRACKWAY_VERL_TRACKING=%r is neither 0 nor 1: verl's own Tracking stays. Set it to 1 for ours",
            asked,
        )
    if asked == "1":
        from .tracking import change_tracking

        when_imported(_TRACKING, change_tracking)
    else:
        when_imported(_TRACKING, runs.change_tracking)


def _uses(module: Any, tracing: ModuleType) -> bool:
    # A None in sys.modules forbids an import, and some put objects of other kinds there.
    content = getattr(module, "__dict__", {})
    return any(content.get(name) is getattr(tracing, name) for name in rollout_trace.__all__)
