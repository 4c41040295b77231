"""``rollout_trace_attr``: the block in which verl runs one rollout."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from opentelemetry import context as otel_context

from ...capture.rollouts import annotate, trajectory
from ...capture.scope import Inside, NotSampled, carried_run, current
from .settings import tracing

facts_of_rollout: ContextVar[Mapping[str, Any] | None] = ContextVar("trackway-verl-facts", default=None)
"""What else is known of the rollout that is about to begin: its annotations, and ``run_id``."""

_carrying: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def rollout_trace_attr(
    sample_index: Any = None,
    step: Any = None,
    rollout_n: Any = None,
    name: str = "rollout_trace",
    validate: Any = False,
    trace: bool = True,
) -> AbstractContextManager[object]:
    """Give the block around one rollout.

    Args:
        sample_index: id of the prompt in the data set.
        step: the trainer's global step.
        rollout_n: number of the rollout among those of the prompt.
        name: name of the trace's root span.
        validate: whether it is a validation rollout.
        trace: False records nothing of what happens inside.
    """
    if not tracing():
        return nullcontext()
    if not trace:
        return Inside(NotSampled())
    _carry_into_threads()
    facts = dict(facts_of_rollout.get() or {})
    block = trajectory(
        step=step,
        sample_index=sample_index,
        rollout_n=rollout_n,
        validate=validate,
        name=name,
        run_id=facts.pop("run_id", None),
    )
    return _Annotated(block, facts) if facts else block


class _Annotated:
    def __init__(self, block: trajectory, facts: Mapping[str, Any]) -> None:
        self._block = block
        self._facts = facts

    def __enter__(self) -> object:
        rollout = self._block.__enter__()
        annotate(**self._facts)
        return rollout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._block.__exit__(kind, error, trace)


def _carry_into_threads() -> None:
    """See to it that what the running loop hands to a thread belongs to the rollout that hands it over.

    ``loop.run_in_executor``, which verl's agents use throughout, leaves the context behind.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if loop in _carrying:
        return
    _carrying.add(loop)
    original: Callable[..., Any] = loop.run_in_executor

    def run_in_executor(executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        place = current()
        if place is not None and (executor is None or isinstance(executor, ThreadPoolExecutor)):
            otel, run = otel_context.get_current(), carried_run()

            def inside(*args: Any) -> Any:
                with Inside(place, otel, run):
                    return func(*args)

            return original(executor, inside, *args)
        return original(executor, func, *args)

    try:
        loop.run_in_executor = run_in_executor  # type: ignore[method-assign, assignment]
    except AttributeError:
        return  # a loop written in C: there, functions need trackway.carry
