"""verl: its runs are traced without a changed line, with ``TRACKWAY_VERL=1`` or by ``install()``.

A drop-in stands where ``verl.utils.rollout_trace`` would, and a few methods of verl's workers are wrapped
while their modules are imported. Written against verl 0.9.1; what another version does not have stays
untraced, which is said once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .installing import install as install
    from .ops import rollout_trace_op as rollout_trace_op
    from .rollout import rollout_trace_attr as rollout_trace_attr
    from .settings import RolloutTraceConfig as RolloutTraceConfig

_HOMES = {
    "RolloutTraceConfig": "settings",
    "install": "installing",
    "rollout_trace_attr": "rollout",
    "rollout_trace_op": "ops",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    # Imported when first used: verl loads the plugin below here in every process, traced or not.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
