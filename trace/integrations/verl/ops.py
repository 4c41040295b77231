"""``rollout_trace_op``: what verl puts on the functions of a rollout that it traces."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ... import semconv
from ...capture.decorators import llm_trace, rollout_trace
from ...capture.rollouts import integer
from ...capture.scope import Scope, current
from .settings import tracing
from .spans import begin
from .tools import traced_tool

F = TypeVar("F", bound=Callable[..., Any])


def rollout_trace_op(func: F) -> F:
    """Record every call of a function while verl is traced.

    What it is shows in its parameters: with ``prompt_ids`` it generates, with ``responses_ids`` it looks for
    tool calls, ``execute`` with ``instance_id`` and ``parameters`` is a tool, and everything else is a step
    of the rollout. Functions, methods, classmethods, staticmethods and generators are taken, async or not.
    """
    return _decorate(func)  # type: ignore[no-any-return]


def _decorate(func: Any) -> Any:
    if isinstance(func, (staticmethod, classmethod)):
        return type(func)(_decorate(func.__func__))
    names = _parameters(func)
    waits = inspect.iscoroutinefunction(func)
    if waits and getattr(func, "__name__", "") == "execute" and {"instance_id", "parameters"} <= names:
        return traced_tool(func)
    if waits and "responses_ids" in names:
        return _parser(func)
    if "prompt_ids" not in names:
        traced = rollout_trace(func)
    elif waits:
        traced = llm_trace(_with_version(func))
    else:
        traced = llm_trace(func)
    return _while_tracing(func, traced)


def _parameters(func: Any) -> set[str]:
    try:
        return set(inspect.signature(func).parameters)
    except (TypeError, ValueError):  # some builtins have none
        return set()


def _while_tracing(func: Any, traced: Any) -> Any:
    wrapper: Any
    if inspect.iscoroutinefunction(func):

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await (traced if tracing() else func)(*args, **kwargs)

    elif inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        return traced

    else:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return (traced if tracing() else func)(*args, **kwargs)

    return functools.update_wrapper(wrapper, traced)


def _with_version(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    async def generate(*args: Any, **kwargs: Any) -> Any:
        result = await func(*args, **kwargs)
        scope = current()
        if isinstance(scope, Scope):
            scope.recorder.guard(_note_version, scope, result)
        return result

    return generate


def _note_version(scope: Scope, result: Any) -> None:
    """Note which weights generated, as verl's servers say; of a resumed generation, the first and last."""
    said = getattr(result, "extra_fields", None)
    if not isinstance(said, dict):
        return
    version = integer(said.get("global_steps"))
    first, last = integer(said.get("min_global_steps")), integer(said.get("max_global_steps"))
    first = version if first is None else first
    last = version if last is None else last
    if first is None or last is None:
        return
    scope.policy_version = first
    if last != first:
        scope.add(semconv.POLICY_VERSION_END, last)
    # The root began before anyone said which weights are in use; at its end it tells the last ones.
    root = scope.outermost()
    if root.policy_version is None:
        root.policy_version = first
    scope.rollout.policy_version = last


def _parser(func: Any) -> Any:
    @functools.wraps(func)
    async def extract(*args: Any, **kwargs: Any) -> Any:
        call = None
        if tracing():
            # The ids that it looks at stand on the generation before it, the tools' schemas in the prompt.
            call = begin("other", getattr(func, "__qualname__", ""), {})
        if call is None:
            return await func(*args, **kwargs)
        call.enter()
        try:
            result = await func(*args, **kwargs)
        except BaseException as error:
            call.leave()
            call.fail(error)
            raise
        call.leave()
        call.succeed(result)
        return result

    return extract
