"""What a training loop says of a rollout: its name, its rewards, facts about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ..model import TrajectoryKey
from . import runtime
from .scope import Elsewhere, NotSampled, Rollout, Scope, current
from .snapshot import clean

if TYPE_CHECKING:
    from .recorder import Recorder


class trajectory:  # noqa: N801 - used as a statement: `with trajectory(...)`
    """Name the rollout that the block runs: everything inside it belongs to one trace.

    The block is a root of its own, whatever it runs inside of. It is a plain context manager, for sync
    and async code alike.

    Args:
        step: the trainer's global step.
        sample_index: id of the prompt in the data set; int or str, kept as it is.
        rollout_n: number of the rollout among those of the same prompt and step.
        validate: whether this is a validation rollout.
        policy_version: version of the weights that generate it.
        attempt: number of the retry, where the caller counts them.
        experiment: experiment to file it under; by default the configured one.
        run_id: MLflow run to link it to; by default the configured one, else the active one.
        name: name of the trace's root span.

    Raises:
        TypeError: ``step``, ``rollout_n``, ``attempt`` or ``policy_version`` is not an integer.
    """

    __slots__ = ("_key", "_scope", "_settings")

    def __init__(
        self,
        *,
        step: int | None = None,
        sample_index: int | str | None = None,
        rollout_n: int = 0,
        validate: bool = False,
        policy_version: int | str | None = None,
        attempt: int = 0,
        experiment: str | None = None,
        run_id: str | None = None,
        name: str = "trajectory",
    ) -> None:
        self._key = TrajectoryKey(
            step=None if step is None else _integer("step", step),
            sample_index=_sample(sample_index),
            rollout_n=_integer("rollout_n", rollout_n),
            validate=bool(validate),
            attempt=_integer("attempt", attempt),
        )
        version = None if policy_version is None else _version(policy_version)
        self._settings = (version, experiment, run_id, name)
        self._scope: Scope | NotSampled | None = None

    def __enter__(self) -> Rollout:
        policy_version, experiment, run_id, name = self._settings
        recorder = runtime.get()
        if recorder is not None:
            try:
                return self._open(recorder, policy_version, experiment, run_id, name)
            except Exception as error:
                recorder.trouble("could not open a trajectory", error)
        rollout = Rollout(self._key, policy_version, "", "", None)
        rollout.sampled = False
        return rollout

    def _open(
        self,
        recorder: Recorder,
        policy_version: int | str | None,
        experiment: str | None,
        run_id: str | None,
        name: str,
    ) -> Rollout:
        rollout = recorder.new_rollout(self._key, policy_version, experiment, run_id)
        scope: Scope | NotSampled
        if recorder.sampled(self._key):
            scope = Scope(recorder, rollout, None, name, "trajectory")
            rollout.trace_id = f"{scope.span.get_span_context().trace_id:032x}"
            recorder.opened(scope)
        else:
            rollout.sampled = False
            scope = NotSampled()
        scope.enter()
        self._scope = scope
        return rollout

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        scope = self._scope
        if scope is not None:
            self._scope = None
            scope.leave()
            if isinstance(scope, Scope):
                scope.recorder.guard(scope.close, error)
        return False


def reward(name: str, value: Any, *, explanation: str | None = None) -> None:
    """Record a reward of the rollout that runs.

    Args:
        name: what is rewarded; the one called ``reward`` is the total, else the total is the sum.
        value: a number (Python, numpy, torch; NaN and infinities are kept), or a text for a verdict.
        explanation: why.
    """
    scope = _recorded("reward")
    if scope is None:
        return
    try:
        given = (str(name), _score(value), explanation, time.time_ns())
    except Exception as error:
        kind = type(value).__name__
        _trouble(f"reward {name!r} is neither a number nor a text: {kind}", error)
        return

    def keep(place: Scope) -> None:
        if place.rewards is None:
            place.rewards = []
        place.rewards.append(given)

    _tell("reward", scope, keep)


def annotate(**facts: Any) -> None:
    """Add facts to the rollout that runs.

    Args:
        **facts: anything that can be recorded, by name. ``policy_version`` is the version of the
            weights from now on: spans that start later carry it.
    """
    scope = _recorded("annotate")
    if scope is None:
        return
    if "policy_version" in facts:
        try:
            scope.rollout.policy_version = _version(facts.pop("policy_version"))
        except TypeError as error:
            _trouble("annotate() was given a version that is none", error)
    if facts:

        def keep(place: Scope) -> None:
            if place.annotations is None:
                place.annotations = {}
            for name, value in facts.items():
                place.annotations[name] = place.recorder.snapshot(value)

        _tell("annotate", scope, keep)


def _tell(what: str, scope: Scope | Elsewhere, keep: Callable[[Scope], None]) -> None:
    """Keep something on the outermost open span, or on one of its own when all of them have ended."""
    recorder = runtime.get()
    if recorder is None:
        return
    try:
        place = scope.outermost() if isinstance(scope, Scope) else None
        if place is not None and place.status == "running":
            keep(place)
        else:
            place = Scope(recorder, scope.rollout, scope, what, "other")
            keep(place)
            place.close()
    except Exception as error:
        recorder.trouble(f"{what}() could not be recorded", error)


def _trouble(what: str, error: BaseException | None = None) -> None:
    recorder = runtime.get()
    if recorder is not None:
        recorder.trouble(what, error)


def _recorded(what: str) -> Scope | Elsewhere | None:
    scope = current()
    if isinstance(scope, NotSampled):
        return None
    if scope is None:
        _trouble(f"{what}() was called outside of any rollout and is not recorded")
    return scope


def _score(value: Any) -> float | str:
    if isinstance(value, str):
        return value
    item = getattr(value, "item", None)
    return float(item() if callable(item) else value)


def _integer(name: str, value: Any) -> int:
    try:
        number = int(value)
        if number == value:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"{name}={value!r} is not an integer")


def _sample(value: Any) -> int | str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        try:
            return _integer("sample_index", value)
        except TypeError:
            value = str(value)
    return clean(value)


def _version(value: Any) -> int | str:
    return clean(value) if isinstance(value, str) else _integer("policy_version", value)
