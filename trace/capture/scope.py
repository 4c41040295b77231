"""The rollout and the call that the running code is inside of, and how both are opened and closed."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace

from .. import semconv
from ..model import Kind, Status, TrajectoryKey
from . import runtime
from .snapshot import Snapshot, clean

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OtelSpan

    from .recorder import Recorder

P = ParamSpec("P")
R = TypeVar("R")

_NO_PARENT = otel_context.Context()
_MAX_FRAMES = 30


class Rollout:
    """One rollout while it runs: what all its spans share.

    Given by ``with trajectory(...) as rollout``.

    Attributes:
        key: its name; None for a decorated call outside of any ``trajectory``.
        sampled: whether it is recorded at all.
        trace_id: 32 hexadecimal digits; empty when it is not recorded.
    """

    __slots__ = (
        "annotations",
        "dropped",
        "experiment",
        "key",
        "policy_version",
        "project",
        "rewards",
        "run_id",
        "sampled",
        "sequence",
        "sequence_span",
        "tags",
        "trace_id",
    )

    def __init__(
        self,
        key: TrajectoryKey | None,
        policy_version: int | str | None,
        project: str,
        experiment: str,
        run_id: str | None,
    ) -> None:
        self.key = key
        self.policy_version = policy_version
        self.project = project
        self.experiment = experiment
        self.run_id = run_id
        self.sampled = True
        self.dropped = 0
        self.trace_id = ""
        self.rewards: list[tuple[str, float | str, str | None, int]] = []
        self.annotations: dict[str, Snapshot] = {}
        self.tags: dict[str, Any] = {semconv.UNATTACHED: True} if key is None else _tags(key)
        # The writer's: the token ids of the last generation, and the span that holds them.
        self.sequence: tuple[int, ...] = ()
        self.sequence_span = ""


def _tags(key: TrajectoryKey) -> dict[str, Any]:
    tags: dict[str, Any] = {semconv.VALIDATE: key.validate, semconv.ATTEMPT: key.attempt}
    if key.step is not None:
        tags[semconv.STEP] = key.step
    if key.sample_index is not None:
        tags[semconv.SAMPLE_INDEX] = key.sample_index
    tags[semconv.ROLLOUT_N] = key.rollout_n
    return tags


class Failure:
    """What is kept of an exception: no frame and no local variable stays alive through it."""

    __slots__ = ("frames", "message", "type")

    def __init__(self, error: BaseException) -> None:
        kind = type(error)
        self.type = (
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        )
        try:
            self.message = str(error)
        except Exception:
            self.message = "<no message: its __str__ raised>"
        # Source lines are looked up by the writer, off this thread.
        self.frames = traceback.StackSummary.extract(
            traceback.walk_tb(error.__traceback__), limit=_MAX_FRAMES, lookup_lines=False
        )


class Scope:
    """One open span, and the place in the call tree that it holds.

    ``enter`` and ``leave`` make it current and undo that; ``close`` ends the span and hands it to the
    writer. Generators enter and leave for every item, so that their caller never runs inside them.
    """

    __slots__ = (
        "_before",
        "_otel_before",
        "context",
        "extra",
        "failure",
        "inputs",
        "items",
        "kind",
        "output",
        "parent",
        "policy_version",
        "prompt",
        "recorder",
        "response",
        "rollout",
        "span",
        "status",
        "tokenizer",
    )

    def __init__(
        self, recorder: Recorder, rollout: Rollout, parent: Scope | None, name: str, kind: Kind
    ) -> None:
        self.recorder = recorder
        self.rollout = rollout
        self.parent = parent
        self.kind: Kind = kind
        self.policy_version = rollout.policy_version
        self.inputs: Snapshot = None
        self.output: Snapshot = None
        self.items: tuple[Snapshot, ...] | None = None
        self.prompt: Mapping[str, tuple[Any, ...]] | None = None
        self.response: Mapping[str, tuple[Any, ...]] | None = None
        self.status: Status = "running"
        self.failure: Failure | None = None
        self.extra: dict[str, Any] | None = None
        self.tokenizer: Any = None
        self.span: OtelSpan = recorder.tracer.start_span(
            name, _NO_PARENT if parent is None else parent.context
        )
        self.context: Context = otel_trace.set_span_in_context(self.span)

    def enter(self) -> None:
        self._before = _current.get()
        _current.set(self)
        self._otel_before = otel_context.get_current()
        otel_context.attach(self.context)

    def leave(self) -> None:
        # Not by token: a generator or a block may be closed in another task, whose own state must stay.
        if _current.get() is self:
            _current.set(self._before)
        if otel_context.get_current() is self.context:
            otel_context.attach(self._otel_before)

    def close(self, error: BaseException | None = None) -> None:
        if error is None:
            self.status = "ok"
        else:
            self.status = "error" if isinstance(error, Exception) else "cancelled"
            self.failure = Failure(error)
        self.span.end()
        self.recorder.record(self)


class NotSampled:
    """Stands where a call's scope would, inside a rollout that is not recorded."""

    __slots__ = ("_before",)

    def enter(self) -> None:
        self._before = _current.get()
        _current.set(self)

    def leave(self) -> None:
        if _current.get() is self:
            _current.set(self._before)

    def succeed(self, result: Any) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass

    def item(self, item: Any) -> None:
        pass

    def succeed_stream(self, value: Any) -> None:
        pass

    def stop_early(self) -> None:
        pass


_current: ContextVar[Scope | NotSampled | None] = ContextVar("trackway", default=None)


def current() -> Scope | NotSampled | None:
    """Give the innermost open scope of this task or thread."""
    return _current.get()


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
    if scope is not None:
        try:
            scope.rollout.rewards.append((str(name), _score(value), explanation, time.time_ns()))
        except Exception as error:
            scope.recorder.trouble(
                f"reward {name!r} is neither a number nor a text: {type(value).__name__}", error
            )


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
        scope.rollout.policy_version = _version(facts.pop("policy_version"))
    for name, value in facts.items():
        scope.rollout.annotations[name] = scope.recorder.snapshot(value)


def _recorded(what: str) -> Scope | None:
    scope = _current.get()
    if isinstance(scope, Scope):
        return scope
    recorder = runtime.get()
    if scope is None and recorder is not None:
        recorder.trouble(f"{what}() was called outside of any rollout and is not recorded")
    return None


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


@contextmanager
def detached() -> Iterator[None]:
    """Run the block outside of the rollout that the code was started from.

    For background tasks that inherited a rollout which is not theirs: decorated calls inside the block
    start traces of their own.
    """
    before, otel_before = _current.get(), otel_context.get_current()
    _current.set(None)
    otel_context.attach(_NO_PARENT)
    try:
        yield
    finally:
        _current.set(before)
        otel_context.attach(otel_before)


@overload
def carry(work: Executor) -> Executor: ...
@overload
def carry(work: Callable[P, R]) -> Callable[P, R]: ...
def carry(work: Any) -> Any:
    """Take the rollout that runs along into another thread.

    Args:
        work: a function, which will run inside the present rollout wherever it is called; or an
            executor, whose submitted functions will each run inside the rollout that submits them.

    Returns:
        The function, or an executor, to use instead.
    """
    if isinstance(work, Executor):
        return _CarryingExecutor(work)
    scope = _current.get()
    otel = otel_context.get_current()

    @functools.wraps(work, updated=())
    def carried(*args: Any, **kwargs: Any) -> Any:
        before, otel_before = _current.get(), otel_context.get_current()
        _current.set(scope)
        otel_context.attach(otel)
        try:
            return work(*args, **kwargs)
        finally:
            _current.set(before)
            otel_context.attach(otel_before)

    return carried


class _CarryingExecutor(Executor):
    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return self._executor.submit(carry(fn), *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._executor.shutdown(wait, cancel_futures=cancel_futures)
