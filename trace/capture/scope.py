"""The rollout and the call that the running code is inside of, and how both are opened and closed."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace

from .. import semconv
from ..model import Kind, Status, TrajectoryKey
from .shared import SharedParts
from .snapshot import Snapshot, message, take
from .span import RecordedSpan
from .streams import Tokens

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from .recorder import Recorder

Reward = tuple[str, "float | str", "str | None", int]
"""Name, value, explanation, and when it was given in nanoseconds."""

NO_PARENT = otel_context.Context()
_OUTER_FRAMES, _INNER_FRAMES = 10, 20
"""Frames kept of a traceback: of a deep one those that began it and those that raised."""
_MAX_CAUSES = 5


class Rollout:
    """One rollout while it runs: what all its spans share.

    Given by ``with trajectory(...) as rollout``.

    Attributes:
        key: its name; None for a decorated call outside of any ``trajectory``.
        sampled: whether it is recorded at all.
        trace_id: 32 hexadecimal digits; empty when it is not recorded.
    """

    __slots__ = (
        "_tags",
        "dropped",
        "experiment",
        "generates",
        "home",
        "key",
        "parts",
        "policy_version",
        "project",
        "run",
        "run_id",
        "sampled",
        "sequence",
        "sequence_span",
        "trace_id",
    )

    def __init__(
        self,
        key: TrajectoryKey | None,
        policy_version: int | str | None,
        project: str,
        experiment: str,
        run_id: str | None,
        run: str | None = None,
    ) -> None:
        self.key = key
        self.policy_version = policy_version
        self.project = project
        self.experiment = experiment
        self.run_id = run_id
        self.run = run
        self.sampled = True
        self.dropped = 0
        self.trace_id = ""
        self._tags: dict[str, Any] | None = None
        # Whether a generation was seen in it, or may be seen by another process.
        self.generates = False
        # A writer of the store that it was begun in, where that was another process; see carrying.
        self.home = ""
        # The writer's: the token ids of the last generation, and the span that holds them; and what else of
        # it stands in the journal.
        self.sequence: tuple[int, ...] = ()
        self.sequence_span = ""
        self.parts: SharedParts | None = None

    @property
    def tags(self) -> dict[str, Any]:
        """What stands on each of its spans."""
        if self._tags is None:
            self._tags = {semconv.UNATTACHED: True} if self.key is None else _tags(self.key)
        return self._tags

    @tags.setter
    def tags(self, tags: dict[str, Any]) -> None:
        self._tags = tags

    def forget(self) -> None:
        """Build nothing on what was stored so far: some of it did not reach the journal."""
        self.sequence = ()
        self.parts = None

    def elsewhere(self) -> Rollout:
        """Give the same rollout as another process has it: what it has said so far stays here."""
        rollout = Rollout(self.key, self.policy_version, self.project, self.experiment, self.run_id, self.run)
        rollout.trace_id = self.trace_id
        rollout.home = self.home
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

    __slots__ = ("_causes", "_inner", "_left_out", "_outer", "message", "type")

    def __init__(self, error: BaseException) -> None:
        self.type = _type_name(error)
        self.message = message(error)
        outer: list[tuple[FrameType, int]] = []
        inner: deque[tuple[FrameType, int]] = deque(maxlen=_INNER_FRAMES)
        self._left_out = -_INNER_FRAMES
        for frame in traceback.walk_tb(error.__traceback__):
            if len(outer) < _OUTER_FRAMES:
                outer.append(frame)
            else:
                inner.append(frame)
                self._left_out += 1
        self._outer = _summary(outer)
        self._inner = _summary(inner)
        self._causes = _causes(error)

    def stacktrace(self) -> str:
        """Give the frames as Python does, innermost last, and after them what led to the exception."""
        lines = self._outer.format()
        if self._left_out > 0:
            lines.append(f"  … {self._left_out} frames left out …\n")
        lines += self._inner.format()
        for how, kind, said, frame in self._causes:
            place = f", at {frame.filename}:{frame.lineno} in {frame.name}" if frame else ""
            lines.append(f"{how} {kind}: {said}{place}\n")
        return "".join(lines)


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _summary(frames: Iterable[tuple[FrameType, int]]) -> traceback.StackSummary:
    # Source lines are looked up by the writer, off the caller's thread.
    return traceback.StackSummary.extract(frames, lookup_lines=False)


_Cause = tuple[str, str, str, "traceback.FrameSummary | None"]
"""How it led to an exception, its type, its message, where it was raised."""


def _causes(error: BaseException) -> list[_Cause]:
    causes: list[_Cause] = []
    seen = {id(error)}
    with suppress(Exception):
        while len(causes) < _MAX_CAUSES:
            how, next_one = "caused by", error.__cause__
            if next_one is None and not error.__suppress_context__:
                how, next_one = "raised while handling", error.__context__
            if next_one is None or id(next_one) in seen:
                break
            error = next_one
            seen.add(id(error))
            place = deque(traceback.walk_tb(error.__traceback__), maxlen=1)
            causes.append((how, _type_name(error), message(error), next(iter(_summary(place)), None)))
    return causes


class Scope(RecordedSpan):
    """One span, and the place in the call tree that it holds while it is open.

    It makes few objects, and those that a call may do without only when it needs them: hundreds are open at
    once, each one brings the garbage collector's next walk nearer, and that one goes through all that the
    program has made meanwhile, its lists of token ids among it, while everything else stands still.

    ``enter`` and ``leave`` make it current and undo that; ``close`` ends the span and hands it to the
    writer. Generators enter and leave for every item, so that their caller never runs inside them.
    """

    __slots__ = (
        "_before",
        "_context",
        "_left",
        "_otel_before",
        "annotations",
        "extra",
        "failure",
        "given",
        "inputs",
        "items",
        "kind",
        "made",
        "output",
        "parent",
        "policy_version",
        "prompt",
        "recorder",
        "rewards",
        "rollout",
        "status",
        "tokenizer",
    )

    def __init__(
        self, recorder: Recorder, rollout: Rollout, parent: Scope | Elsewhere | None, name: str, kind: Kind
    ) -> None:
        if parent is None:
            super().__init__(name, None, None)
        else:
            super().__init__(name, parent.trace_id, parent.span_id)
        self.recorder = recorder
        self.rollout = rollout
        self.parent = parent
        self.kind: Kind = kind
        self.policy_version = rollout.policy_version
        self.inputs: Snapshot = None
        self.output: Snapshot = None
        self.items: tuple[Snapshot, ...] | None = None
        # Of the arguments: the prompt's ids, and the rarer sequences beside it. Of the result: all of them.
        self.prompt: tuple[Any, ...] | None = None
        self.given: Tokens | None = None
        self.made: Tokens | None = None
        self.status: Status = "running"
        self.failure: Failure | None = None
        self.extra: dict[str, Any] | None = None
        self.tokenizer: Any = None
        # Whether it was left while something else was current, which must not come back to it.
        self._left = False
        # What is said of the rollout stays with the outermost span.
        self.rewards: list[Reward] | None = None
        self.annotations: dict[str, Snapshot] | None = None
        self._context: Context | None = None

    @property
    def context(self) -> Context:
        """OpenTelemetry's context inside of it."""
        if self._context is None:
            self._context = otel_trace.set_span_in_context(self)
        return self._context

    def enter(self) -> None:
        self._before = _current.get()
        self._otel_before = otel_context.get_current()
        self._left = _is_collecting()
        if not self._left:
            _current.set(self)
            _attach(self.context)

    def leave(self) -> None:
        if _is_collecting():
            self._left = True
            return
        # Not by token: a generator or a block may be closed in another task, whose own state must stay.
        before, otel_before = self._before, self._otel_before
        while isinstance(before, (Scope, NotSampled)) and before._left:
            if isinstance(before, Scope) and otel_before is before._context:
                otel_before = before._otel_before
            before = before._before
        if _current.get() is self:
            _current.set(before)
        else:
            self._left = True
        if otel_context.get_current() is self._context:
            otel_context.attach(otel_before)

    def close(self, error: BaseException | None = None) -> None:
        if error is None:
            self.status = "ok"
        else:
            self.status = "error" if isinstance(error, Exception) else "cancelled"
            self.failure = Failure(error)
        if self.parent is None and self.rollout.policy_version is not None:
            self.add(semconv.POLICY_VERSION_END, self.rollout.policy_version)
        self.end()
        if not self._left:
            self._context = None  # which holds this scope
        self.recorder.record(self)

    def copy(self, value: Any) -> Snapshot:
        """Copy a value; see ``snapshot.take``."""
        return take(value, self.recorder.config.max_array_items, self.recorder.token_fields)

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
    """Stands where a parent's scope would, when that is open in another process.

    Args:
        rollout: as this process has it.
        context: OpenTelemetry's, with the span that is open there.
    """

    __slots__ = ("context", "rollout", "span_id", "trace_id")

    status: Status = "running"

    def __init__(self, rollout: Rollout, context: Context) -> None:
        self.rollout = rollout
        self.context = context
        span = otel_trace.get_current_span(context).get_span_context()
        self.trace_id, self.span_id = span.trace_id, span.span_id


class NotSampled:
    """Stands where a call's scope would, inside a rollout that is not recorded."""

    __slots__ = ("_before", "_left")

    def __init__(self) -> None:
        self._left = False

    def enter(self) -> None:
        self._before = _current.get()
        self._left = _is_collecting()
        if not self._left:
            _current.set(self)

    def leave(self) -> None:
        if _is_collecting():
            self._left = True
            return
        before = self._before
        while isinstance(before, (Scope, NotSampled)) and before._left:
            before = before._before
        if _current.get() is self:
            _current.set(before)
        else:
            self._left = True

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


def _nothing(context: Context) -> None:
    pass


_attach: Callable[[Context], object] = otel_context.attach


def hide(hidden: bool) -> None:
    """Keep calls out of OpenTelemetry's context, in which other instrumentation finds its parents, or not."""
    global _attach
    _attach = _nothing if hidden else otel_context.attach


def is_hidden() -> bool:
    """Say whether calls stay out of OpenTelemetry's context."""
    return _attach is _nothing


# What the garbage collector last said, to each thread and to all: "start" or "stop" comes last.
_told_here = threading.local()
_told: dict[str, Any] = {"start": None, "stop": None}

if sys.version_info < (3, 12):
    # No code of Python's may run there: a signal that came during a walk would be handled in it, and what the
    # handler raises, a KeyboardInterrupt for instance, would be lost. So these are methods of built-in types.
    gc.callbacks += [_told_here.__setattr__, _told.pop, _told.__setitem__]


def _is_collecting() -> bool:
    """Say whether this is the end of something that the garbage collector has found.

    Before Python 3.12 it may run in the middle of a ``ContextVar.set``, and one inside of that breaks it: it
    is lost, or memory is freed twice. So what ends here becomes current nowhere.
    """
    # A list is made in one go; between two steps of an iterator there may be another walk.
    return list(_told)[-1] == "start" and getattr(_told_here, "start", None) is _told["start"]


def current() -> Scope | Elsewhere | NotSampled | None:
    """Give the innermost open scope of this task or thread."""
    return _current.get()


def carried_run() -> str | None:
    """Give the MLflow run that was active where ``carry`` was called."""
    return _run.get()


_Place = tuple["Scope | Elsewhere | NotSampled | None", "Context", "str | None"]
"""Of the code that runs: the innermost open scope, OpenTelemetry's context, the MLflow run that is active."""


def _place() -> _Place:
    return _current.get(), otel_context.get_current(), _run.get()


def _stand(place: _Place) -> None:
    scope, otel, run = place
    _current.set(scope)
    _run.set(run)
    otel_context.attach(otel)


class Inside:
    """Runs a block at another place of the call tree than the code around it.

    Args:
        place: the innermost open scope there.
        otel: OpenTelemetry's context there.
        run: the MLflow run that is active there.
    """

    __slots__ = ("_before", "_place")

    def __init__(
        self, place: Scope | Elsewhere | NotSampled | None, otel: Context = NO_PARENT, run: str | None = None
    ) -> None:
        self._place: _Place = place, otel, run

    def __enter__(self) -> None:
        self._before = _place()
        _stand(self._place)

    def __exit__(self, *_: object) -> None:
        _stand(self._before)


class Alternating:
    """Keeps the place of a generator apart from that of whoever asks it for items.

    What it enters and does not leave before it yields stays current in it, and nowhere else.
    """

    __slots__ = ("_inside", "_outside")

    def __init__(self) -> None:
        self._inside: _Place | None = None
        self._outside: _Place | None = None

    def resume(self) -> None:
        """Go to where the generator was when it yielded; at first that is where its consumer is."""
        if _is_collecting():
            self._outside = None
            return
        self._outside = _place()
        if self._inside is not None:
            _stand(self._inside)

    def pause(self) -> None:
        """Go back to where the consumer was when it asked."""
        if self._outside is not None and not _is_collecting():
            self._inside = _place()
            _stand(self._outside)


def _after_fork() -> None:
    # The scopes that the child inherited are the parent's to close.
    scope = _current.get()
    if isinstance(scope, Scope):
        _current.set(Elsewhere(scope.rollout.elsewhere(), scope.context))


os.register_at_fork(after_in_child=_after_fork)
