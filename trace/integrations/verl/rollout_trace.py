"""The module that stands where ``verl.utils.rollout_trace`` would, with the same public names."""

from .ops import rollout_trace_op
from .rollout import rollout_trace_attr
from .settings import RolloutTraceConfig

__all__ = ["RolloutTraceConfig", "rollout_trace_attr", "rollout_trace_op"]
