"""Taking a rollout along: into threads and other processes, and leaving it behind."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .. import semconv
from ..model import TrajectoryKey
from ..store import journal
from . import runtime
from .scope import NO_PARENT, Elsewhere, Inside, NotSampled, Scope, current, is_hidden

if TYPE_CHECKING:
    from .recorder import Recorder

P = ParamSpec("P")
R = TypeVar("R")

_CARRIER = "trackway"
_PROPAGATOR = TraceContextTextMapPropagator()


def detached() -> AbstractContextManager[None]:
    """Run the block outside of the rollout that the code was started from.

    For background tasks that inherited a rollout which is not theirs: a decorated call inside the block
    starts a trace of its own. Without it, what a task does after its rollout has ended is still recorded
    as a part of that rollout, with a note that says so.
    """
    return Inside(None)


def inject() -> dict[str, str]:
    """Describe the rollout that runs, for another process, on this machine or another one.

    Returns:
        What ``extract`` takes there, to be sent along with the work: short ASCII texts by name, of which
        ``traceparent`` is W3C's. Empty outside of any rollout.
    """
    scope = current()
    if scope is None:
        return {}
    if isinstance(scope, NotSampled):
        return {_CARRIER: json.dumps({"sampled": False})}
    rollout = scope.rollout
    rollout.generates = True
    key = None if rollout.key is None else str(rollout.key)
    facts = {"key": key, "policy_version": rollout.policy_version, "home": _home(scope)}
    carrier = {_CARRIER: json.dumps(facts)}
    _PROPAGATOR.inject(carrier, scope.context)
    return carrier


def extract(carrier: Mapping[str, str] | None) -> AbstractContextManager[None]:
    """Run the block inside a rollout that is open in another process.

    Where that records into another store, on another machine, what the block records goes to the
    destinations from here, and adds to the rollout there; ``trackway`` shows of it what is in each store.

    Args:
        carrier: what ``inject`` gave there. Without one, decorated calls in the block start traces of
            their own.
    """
    recorder = runtime.get()
    place = None
    if recorder is not None and carrier:
        try:
            place = _read_carrier(recorder, carrier)
        except (ValueError, TypeError, AttributeError) as error:
            recorder.trouble(f"this carrier does not come from inject(): {carrier!r}", error)
    if is_hidden():
        return Inside(place, otel_context.get_current())
    return Inside(place, place.context if isinstance(place, Elsewhere) else NO_PARENT)


def _read_carrier(recorder: Recorder, carrier: Mapping[str, str]) -> Elsewhere | NotSampled | None:
    facts = json.loads(carrier.get(_CARRIER, "{}"))
    if facts.get("sampled") is False:
        return NotSampled()
    context = _PROPAGATOR.extract(carrier, NO_PARENT)
    parent = otel_trace.get_current_span(context).get_span_context()
    if not parent.is_valid:
        return None
    key = facts.get("key")
    named = None if key is None else TrajectoryKey.parse(key)
    rollout = recorder.new_rollout(named, facts.get("policy_version"))
    rollout.trace_id = f"{parent.trace_id:032x}"
    rollout.home = str(facts.get("home") or "")
    if rollout.home and not journal.knows(recorder.config.store, rollout.home):
        rollout.tags = {**rollout.tags, semconv.AWAY: True}
    return Elsewhere(rollout, context)


def _home(scope: Scope | Elsewhere) -> str:
    """Name a writer of the store that a rollout was begun in."""
    if scope.rollout.home:
        return scope.rollout.home
    recorder = scope.recorder if isinstance(scope, Scope) else runtime.get()
    return "" if recorder is None else recorder.writer.name


@overload
def carry(work: Executor) -> Executor: ...
@overload
def carry(work: Callable[P, R]) -> Callable[P, R]: ...
def carry(work: Any) -> Any:
    """Take the rollout that runs along into another thread, and the active MLflow run with it.

    Args:
        work: a function or coroutine function, which will run inside the present rollout wherever it is
            called; or an executor, whose submitted functions will each run inside the rollout that
            submits them. To a pool of processes the rollout goes as ``inject`` describes it.

    Returns:
        The function, or an executor, to use instead.

    Raises:
        TypeError: ``work`` is a generator function, whose body runs only later, or cannot be called.
    """
    if isinstance(work, Executor):
        return _CarryingExecutor(work)
    if not callable(work) or inspect.isgeneratorfunction(work) or inspect.isasyncgenfunction(work):
        raise TypeError(f"carry needs a function, coroutine function or executor, and was given {work!r}")
    recorder = runtime.get()
    run = None if recorder is None else recorder.active_run()
    inside = functools.partial(Inside, current(), otel_context.get_current(), run)
    carried: Any
    if inspect.iscoroutinefunction(work) or inspect.iscoroutinefunction(type(work).__call__):

        async def carried(*args: Any, **kwargs: Any) -> Any:
            with inside():
                return await work(*args, **kwargs)

    else:

        def carried(*args: Any, **kwargs: Any) -> Any:
            with inside():
                return work(*args, **kwargs)

    return functools.update_wrapper(carried, work, updated=())


class _CarryingExecutor(Executor):
    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        pools = sys.modules.get("concurrent.futures.process")
        self._processes = pools is not None and isinstance(executor, pools.ProcessPoolExecutor)

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        if self._processes:
            return self._executor.submit(_run_elsewhere, inject(), fn, *args, **kwargs)
        return self._executor.submit(carry(fn), *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._executor.shutdown(wait, cancel_futures=cancel_futures)


def _run_elsewhere(carrier: Mapping[str, str], fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    with extract(carrier):
        return fn(*args, **kwargs)
