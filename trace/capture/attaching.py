"""What a trainer says of a rollout later, from whichever process, by its key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from itertools import groupby
from numbers import Real
from typing import TYPE_CHECKING, Any

import orjson

from .. import semconv
from ..log import logger
from ..model import TrajectoryKey
from . import runtime, snapshot
from .rollouts import integer, key_of, score, shown
from .scope import Scope
from .sequences import pack_floats

if TYPE_CHECKING:
    from .recorder import Recorder

log = logger()

_told = False
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_NO_REASON = "no reason given"


def attach(
    key: Any,
    *,
    rewards: Any = None,
    advantages: Any = None,
    returns: Any = None,
    mask: Any = None,
    trainer_logprobs: Any = None,
    trained_step: int | None = None,
    discarded: str | bool | None = None,
    experiment: str | None = None,
) -> None:
    """Say something of a rollout while it runs or later: in any process that records into the same store.

    It may be called before the rollout is in the store, after it has ended, and after it was exported, which
    it then is again. What is said later replaces what was said before under the same name. Whatever is said
    of a rollout that never was recorded stays in the store and is counted there.

    It never raises: a value that cannot be read as described here is left out, which is said once as a
    warning and noted on the rollout. Where nothing is recorded in this process, it only says so.

    Sequences are lists, tuples, numpy arrays or torch tensors of shape (n,) or (1, n); a tensor that lies
    elsewhere is copied over, which waits for what its device is doing. They have one value for each token
    of the response, which is everything after the first prompt, tool tokens included, or for each trained
    token only. Padding at their end is left out: 0, NaN, or whatever stands where a mask of the same length
    has only 0. NaN elsewhere is kept, and so is None as NaN; a mask has no None. Values are kept as float32.
    One number is the value of all trained tokens.

    Args:
        key: the rollout: a ``TrajectoryKey`` or its text, a trace id, or an object that has one: what ``with
            trajectory(...) as rollout`` gives, a ``Trajectory``, a ``Summary``. A key means the attempt that
            it names (``1/17/0@1``), else the latest that has started by now.
        rewards: values by name, numbers or texts; a number alone is the reward called ``reward``.
        advantages: per token, or one number.
        returns: per token, or one number.
        mask: 1 for each token of the response that was trained on, else 0; from now on the rollout's mask.
        trainer_logprobs: natural log probabilities that the trainer computed, per token, or one number.
        trained_step: the trainer's step that consumed the rollout, an integer of 64 bits.
        discarded: why it was not trained on; True where no reason is known, False where it was after all.
        experiment: experiment that the rollout is filed under; by default the configured one.
    """
    recorder = runtime.get()
    if recorder is None:
        global _told
        if not _told:
            _told = True
            log.warning(
                "attach() does nothing in this process, which records nothing: call "
                "trackway.configure(store=...) with the store of the rollouts, or set TRACKWAY_STORE"
            )
        return
    facts = {
        "rewards": rewards,
        "advantages": advantages,
        "returns": returns,
        "mask": mask,
        "trainer_logprobs": trainer_logprobs,
        "trained_step": trained_step,
        "discarded": discarded,
    }
    facts = {name: value for name, value in facts.items() if value is not None}
    recorder.idle = False
    if facts:
        try:
            _attach(recorder, key, facts, experiment)
        except Exception as error:
            recorder.trouble("attach() could not be recorded", error)


def _attach(recorder: Recorder, key: Any, facts: Mapping[str, Any], experiment: str | None) -> None:
    notes: list[str] = []
    trace_id, named, numbered = _target(key, notes)
    if trace_id == "":
        return  # of a rollout that is not recorded
    rollout = recorder.new_rollout(named, None, None if experiment is None else snapshot.text(experiment))
    tags = rollout.tags if named is not None else {}
    rollout.tags = {name: value for name, value in tags.items() if numbered or name != semconv.ATTEMPT}
    # A trace of its own: which one it belongs to is decided where both are known.
    scope = Scope(recorder, rollout, None, "attach", "attach")
    rollout.trace_id = f"{scope.trace_id:032x}"
    if trace_id is not None:
        scope.add(semconv.ATTACHED_TO, trace_id)
    for name, value in facts.items():
        try:
            _READERS[name](scope, name, value, notes)
        except Exception as error:
            notes.append(f"{name}={shown(value)}, which is left out: {snapshot.message(error)}")
    for note in notes:
        recorder.warn_once(f"attach {note.partition('=')[0]}", f"attach(...) was given {note}")
        scope.note(snapshot.clean(f"attach(...) was given {note}"))
    scope.close()


def _target(key: Any, notes: list[str]) -> tuple[str | None, TrajectoryKey | None, bool]:
    """Give the trace id where it is known, the key likewise, and whether that names an attempt.

    Raises:
        ValueError: there is neither.
    """
    if isinstance(key, str) and not _TRACE_ID.fullmatch(key):
        numbered = "@" in key
        key = TrajectoryKey.parse(key)
    elif isinstance(key, TrajectoryKey):
        numbered = key.attempt != 0
    else:
        trace_id = key if isinstance(key, str) else getattr(key, "trace_id", None)
        if not isinstance(trace_id, str):
            raise ValueError(f"{shown(key)} is no key, no trace id, and has none")
        named = getattr(key, "key", None)
        return trace_id, named if isinstance(named, TrajectoryKey) else None, True
    key = key_of(key.step, key.sample_index, key.rollout_n, key.validate, key.attempt, notes)
    return None, key, numbered


def _rewards(scope: Scope, name: str, value: Any, notes: list[str]) -> None:
    scope.rewards = []
    for reward, given in value.items() if isinstance(value, Mapping) else [("reward", value)]:
        try:
            read = score(given)
        except Exception:
            notes.append(f"{name}={shown(reward)}: {shown(given)}, which is neither a number nor a text")
        else:
            scope.rewards.append((snapshot.text(reward), read, None, scope.start_ns))


def _values(scope: Scope, name: str, value: Any, notes: list[str]) -> None:
    items = _sequence(value)
    scope.add(_SEQUENCES[name], float(value) if items is None else pack_floats(items))


def _mask(scope: Scope, name: str, value: Any, notes: list[str]) -> None:
    items = _sequence(value)
    if items is None:
        raise ValueError("no sequence of 0 and 1")
    if None in items:
        raise ValueError("a mask has 0 and 1, and this one None")
    odd = sum(item not in (0, 1) for item in items)
    if odd:
        notes.append(
            f"{name}=…, of which {odd} of {len(items)} are neither 0 nor 1; those above 0 count as 1"
        )
    runs = [(bit, len(list(run))) for bit, run in groupby(int(item > 0) for item in items)]
    scope.add(semconv.ATTACHED_MASK, orjson.dumps(runs).decode())


def _trained_step(scope: Scope, name: str, value: Any, notes: list[str]) -> None:
    step = integer(value)
    if step is None:
        raise ValueError("no integer of 64 bits")
    scope.add(semconv.TRAINED_STEP, step)


def _discarded(scope: Scope, name: str, value: Any, notes: list[str]) -> None:
    if isinstance(value, str):
        scope.add(semconv.DISCARDED, snapshot.text(value) or _NO_REASON)
    else:
        scope.add(semconv.DISCARDED, _NO_REASON if bool(value) else "")


_READERS: Mapping[str, Callable[[Scope, str, Any, list[str]], None]] = {
    "rewards": _rewards,
    "advantages": _values,
    "returns": _values,
    "mask": _mask,
    "trainer_logprobs": _values,
    "trained_step": _trained_step,
    "discarded": _discarded,
}
_SEQUENCES = {
    "advantages": semconv.ATTACHED_ADVANTAGES,
    "returns": semconv.ATTACHED_RETURNS,
    "trainer_logprobs": semconv.ATTACHED_LOGPROBS,
}


def _sequence(value: Any) -> tuple[Any, ...] | None:
    """Copy a sequence of numbers, among which None may be; None for a single number.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, (int, float, Decimal)) or getattr(value, "ndim", None) == 0:
        return None
    here = getattr(value, "cpu", None)
    if callable(here):
        value = here()
    elif isinstance(value, (list, tuple)) or str(getattr(value, "dtype", "")) == "object":
        value = _without_decimals(value)
    items = snapshot.sequence(value)
    if items is None:
        raise ValueError("neither a number nor a sequence of numbers")
    for kind in set(map(type, items)) - {type(None)}:
        if not issubclass(kind, Real):
            raise ValueError(f"it holds a {kind.__name__}, which is no number")
    return items


def _without_decimals(value: Any) -> list[Any]:
    row = value[0] if len(value) == 1 and isinstance(value[0], (list, tuple)) else value
    return [float(item) if isinstance(item, Decimal) else item for item in row]
