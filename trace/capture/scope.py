"""The rollout and the call that the running code is inside of, and how both are opened and closed."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace

from .. import semconv
from ..model import Kind, Status, TrajectoryKey
from .snapshot import Snapshot, message

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OtelSpan

    from .recorder import Recorder

Reward = tuple[str, "float | str", "str | None", int]
"""Name, value, explanation, and when it was given in nanoseconds."""

NO_PARENT = otel_context.Context()
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
        "dropped",
        "experiment",
        "generates",
        "key",
        "policy_version",
        "project",
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
        self.tags: dict[str, Any] = {semconv.UNATTACHED: True} if key is None else _tags(key)
        # Whether a generation was seen in it, or may be seen by another process.
        self.generates = False
        # The writer's: the token ids of the last generation, and the span that holds them.
        self.sequence: tuple[int, ...] = ()
        self.sequence_span = ""

    def elsewhere(self) -> Rollout:
        """Give the same rollout as another process has it: what it has said so far stays here."""
        rollout = Rollout(self.key, self.policy_version, self.project, self.experiment, self.run_id)
        rollout.trace_id = self.trace_id
        return rollout


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
        self.message = message(error)
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
        "annotations",
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
        "rewards",
        "rollout",
        "span",
        "status",
        "tokenizer",
    )

    def __init__(
        self, recorder: Recorder, rollout: Rollout, parent: Scope | Elsewhere | None, name: str, kind: Kind
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
        # What is said of the rollout stays with the outermost span.
        outermost = parent is None or type(parent) is Elsewhere
        self.rewards: list[Reward] | None = [] if outermost else None
        self.annotations: dict[str, Snapshot] | None = {} if outermost else None
        self.span: OtelSpan = recorder.tracer.start_span(
            name, NO_PARENT if parent is None else parent.context
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
        if self.parent is None and self.rollout.policy_version is not None:
            self.add(semconv.POLICY_VERSION_END, self.rollout.policy_version)
        self.span.end()
        self.recorder.record(self)

    def add(self, name: str, value: Any) -> None:
        """Put one more attribute on the span."""
        if self.extra is None:
            self.extra = {}
        self.extra[name] = value

    def note(self, text: str) -> None:
        """Put a remark about the recording itself on the span."""
        self.add(semconv.NOTES, [*(self.extra or {}).get(semconv.NOTES, ()), text])

    def outermost(self) -> Scope:
        """Give the scope in this process that all others of the call tree are inside of."""
        scope = self
        while isinstance(scope.parent, Scope):
            scope = scope.parent
        return scope


class Elsewhere:
    """Stands where a parent's scope would, when that is open in another process."""

    __slots__ = ("context", "rollout")

    status: Status = "running"

    def __init__(self, rollout: Rollout, context: Context) -> None:
        self.rollout = rollout
        self.context = context


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

    def stop_early(self) -> None:
        pass


_current: ContextVar[Scope | Elsewhere | NotSampled | None] = ContextVar("trackway", default=None)
_run: ContextVar[str | None] = ContextVar("trackway-run", default=None)


def current() -> Scope | Elsewhere | NotSampled | None:
    """Give the innermost open scope of this task or thread."""
    return _current.get()


def carried_run() -> str | None:
    """Give the MLflow run that was active where ``carry`` was called."""
    return _run.get()


class Inside:
    """Runs a block at another place of the call tree than the code around it.

    Args:
        place: the innermost open scope there.
        otel: OpenTelemetry's context there.
        run: the MLflow run that is active there.
    """

    __slots__ = ("_before", "_otel", "_otel_before", "_place", "_run", "_run_before")

    def __init__(
        self, place: Scope | Elsewhere | NotSampled | None, otel: Context = NO_PARENT, run: str | None = None
    ) -> None:
        self._place = place
        self._otel = otel
        self._run = run

    def __enter__(self) -> None:
        self._before, self._run_before = _current.get(), _run.get()
        self._otel_before = otel_context.get_current()
        _current.set(self._place)
        _run.set(self._run)
        otel_context.attach(self._otel)

    def __exit__(self, *_: object) -> None:
        _current.set(self._before)
        _run.set(self._run_before)
        otel_context.attach(self._otel_before)


def _after_fork() -> None:
    # The scopes that the child inherited are the parent's to close.
    scope = _current.get()
    if isinstance(scope, Scope):
        _current.set(Elsewhere(scope.rollout.elsewhere(), scope.context))


os.register_at_fork(after_in_child=_after_fork)
