"""verl's workers: each rollout gets its true name, and its reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ...capture import runtime
from ...capture.rollouts import annotate, reward
from .dealing import dealt, is_copy
from .hooks import replace
from .naming import has_sessions, true_name
from .rollout import facts_of_rollout
from .runs import run_of
from .settings import tracing

_FACTS = ("uid", "data_source")


def change_workers(module: ModuleType) -> None:
    """Change ``AgentLoopWorker``, from which the workers of all of verl's trainers inherit.

    Raises:
        AttributeError: this verl has other workers.
    """
    replace(module.AgentLoopWorker, "_run_agent_loop", _named)
    replace(module.AgentLoopWorker, "_compute_score", _scored)
    replace(module.AgentLoopWorker, "generate_sequences", dealt)


def _named(original: Callable[..., Any]) -> Callable[..., Any]:
    async def run_agent_loop(
        self: Any, sampling_params: Any, trajectory: Any, *, trace: bool = True, **row: Any
    ) -> Any:
        if not tracing():
            return await original(self, sampling_params, trajectory, trace=trace, **row)
        facts = None
        # The default trainer says no to all of its rollouts, of which it knows the session.
        traced = trace or has_sessions(self)
        try:
            traced = traced and not is_copy(row)
            trajectory = true_name(self, sampling_params, trajectory, row)
            facts = _facts(self, trajectory, row)
        except Exception as error:
            _trouble("could not tell which rollout this is", error)
        token = facts_of_rollout.set(facts)
        try:
            return await original(self, sampling_params, trajectory, trace=traced, **row)
        finally:
            facts_of_rollout.reset(token)

    return run_agent_loop


def _facts(worker: Any, trajectory: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    facts = {name: str(row[name]) for name in _FACTS if row.get(name) is not None}
    run = run_of(worker, trajectory["step"])
    return facts if run is None else {**facts, "run_id": run}


def _scored(original: Callable[..., Any]) -> Callable[..., Any]:
    async def compute_score(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = await original(self, outputs, *args, **kwargs)
        if tracing():
            try:
                _note_reward(outputs[-1])
            except Exception as error:
                _trouble("could not read the reward of a rollout", error)
        return result

    return compute_score


def _note_reward(output: Any) -> None:
    if output.reward_score is None:
        return  # the trainer will compute it, for the whole batch at once
    reward("reward", output.reward_score)
    rest = {}
    extra = output.extra_fields.get("reward_extra_info")
    for name, value in (extra if isinstance(extra, Mapping) else {}).items():
        if name != "reward" and _is_number(value):
            reward(str(name), value)
        else:
            rest[str(name)] = value
    if rest:
        annotate(reward_extra_info=rest)


def _is_number(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return True
    return (
        type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 and value.dtype.kind in "biuf"
    )


def _trouble(what: str, error: Exception) -> None:
    recorder = runtime.get()
    if recorder is not None:
        recorder.trouble(what, error)
