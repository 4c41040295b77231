"""What a training loop says of a rollout: its name, its rewards, facts about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ..model import TrajectoryKey
from . import runtime
from .scope import Elsewhere, NotSampled, Rollout, Scope, current
from .snapshot import clean, text

if TYPE_CHECKING:
    from .recorder import Recorder


class trajectory:  # noqa: N801 - used as a statement: `with trajectory(...)`
    """Name the rollout that the block runs: everything inside it belongs to one trace.

    The block is a root of its own, whatever it runs inside of. It is a plain context manager, for sync
    and async code alike.

    It never raises: a value that cannot be read as described here is left out of the name, which is said
    once as a warning and noted on the root span.

    Args:
        step: the trainer's global step, an integer of 64 bits.
        sample_index: id of the prompt in the data set; int or str, kept as it is, anything else as text.
        rollout_n: number of the rollout among those of the same prompt and step.
        validate: whether this is a validation rollout; also 0 or 1, ``"true"`` or ``"false"``.
        policy_version: version of the weights that generate it; int or str, another number as text.
        attempt: number of the retry, where the caller counts them.
        experiment: experiment to file it under; by default the configured one.
        run_id: MLflow run to link it to; by default the configured one, else the active one.
        name: name of the trace's root span.
    """

    __slots__ = ("_key", "_notes", "_scopes", "_settings")

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
        notes: list[str] = []
        self._key = key_of(step, sample_index, rollout_n, validate, attempt, notes)
        version = None if policy_version is None else _version(policy_version, notes)
        self._settings = (version, _text(experiment), _text(run_id), _text(name) or "trajectory")
        self._notes = tuple(notes)
        # More than one when the same object is entered again before it is left.
        self._scopes: list[Scope | NotSampled | None] = []

    def __enter__(self) -> Rollout:
        policy_version, experiment, run_id, name = self._settings
        recorder = runtime.get()
        if recorder is not None:
            try:
                return self._open(recorder, policy_version, experiment, run_id, name)
            except Exception as error:
                recorder.trouble("could not open a trajectory", error)
        self._scopes.append(None)
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
            rollout.trace_id = f"{scope.trace_id:032x}"
            for note in self._notes:
                recorder.warn_once(note.partition("=")[0], f"trajectory(...) was given {note}")
                scope.note(note)
            recorder.opened(scope)
        else:
            rollout.sampled = False
            scope = NotSampled()
        scope.enter()
        self._scopes.append(scope)
        return rollout

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        scopes = self._scopes
        if not scopes:
            return False
        # Tasks that share one object leave it in any order.
        inside = current()
        place = next((index for index, item in enumerate(scopes) if item is not None and item is inside), -1)
        scope = scopes.pop(place)
        if scope is not None:
            scope.leave()
            if isinstance(scope, Scope):
                scope.recorder.guard(scope.close, error)
        return False


def key_of(
    step: Any, sample_index: Any, rollout_n: Any, validate: Any, attempt: Any, notes: list[str]
) -> TrajectoryKey:
    """Make a key of what a caller gave; ``notes`` receives a remark on each part that is left out of it."""
    return TrajectoryKey(
        step=None if step is None else _whole("step", step, notes),
        sample_index=_sample(sample_index, notes),
        rollout_n=0 if rollout_n is None else _whole("rollout_n", rollout_n, notes) or 0,
        validate=_flag(validate, notes),
        attempt=0 if attempt is None else _whole("attempt", attempt, notes) or 0,
    )


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
        given = (_text(name) or "", score(value), _text(explanation), time.time_ns())
    except Exception as error:
        kind = type(value).__name__
        _trouble(f"reward {_text(name)!r} is neither a number nor a text: {kind}", error)
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
        notes: list[str] = []
        version = _version(facts.pop("policy_version"), notes)
        if version is not None:
            scope.rollout.policy_version = version
        for note in notes:
            _trouble(f"annotate() was given a version that is none: {note}")
            if isinstance(scope, Scope):
                scope.outermost().note(note)
    if facts:

        def keep(place: Scope) -> None:
            if place.annotations is None:
                place.annotations = {}
            for name, value in facts.items():
                place.annotations[name] = place.copy(value)

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


def score(value: Any) -> float | str:
    """Give a reward as a number or a text.

    Raises:
        TypeError, ValueError: it is neither.
    """
    if isinstance(value, str):
        return value
    item = getattr(value, "item", None)
    return float(item() if callable(item) else value)


def _text(value: Any) -> str | None:
    return None if value is None else text(value)


def integer(value: Any) -> int | None:
    """Give the integer that a value is, None when it is none or takes more than 64 bits."""
    try:
        number = int(value)
        if not isinstance(value, str) and number != value:
            return None
    except Exception:
        return None
    return number if -(2**63) <= number < 2**63 else None


def _whole(name: str, value: Any, notes: list[str]) -> int | None:
    number = integer(value)
    if number is None:
        notes.append(f"{name}={shown(value)}, which is not an integer of 64 bits, and is left out")
    return number


def _flag(value: Any, notes: list[str]) -> bool:
    if isinstance(value, str):
        known = {"true": True, "false": False, "1": True, "0": False}.get(value.strip().lower())
    else:
        known = {0: False, 1: True}.get(integer(value))  # type: ignore[arg-type]
    if known is not None or value is None:
        return bool(known)
    try:
        taken = bool(value)
    except Exception:
        taken = False
    notes.append(f"validate={shown(value)}, which is neither true nor false, and is taken for {taken}")
    return taken


def _sample(value: Any, notes: list[str]) -> int | str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return text(value)
    number = integer(value)
    if number is not None:
        return number
    try:
        return clean(str(value))
    except Exception:
        notes.append(f"sample_index={shown(value)}, which has no text, and is recorded as its type")
        return text(value)


def _version(value: Any, notes: list[str]) -> int | str | None:
    if isinstance(value, str):
        return text(value)
    number = integer(value)
    if number is not None:
        return number
    said = f"policy_version={shown(value)}, which is neither an integer of 64 bits nor a text"
    if isinstance(value, (int, float)):
        notes.append(f"{said}, and is recorded as text")
        return str(value)
    notes.append(f"{said}, and is left out")
    return None


def shown(value: Any) -> str:
    """Give a value for a note on what was left out of it."""
    said = text(value)
    said = f"{said[:80]}…" if len(said) > 80 else said
    return repr(said) if isinstance(value, str) else said
