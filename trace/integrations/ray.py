"""Ray: what a traced task or actor method does belongs to the rollout that calls it with ``.remote()``."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing
from dataclasses import fields
from types import FunctionType
from typing import Any, TypeVar

from .. import semconv
from ..capture import runtime
from ..capture.carrying import extract, inject
from ..capture.scope import Alternating, Elsewhere, current
from ..config import ConfigError, TraceConfig, to_dict

T = TypeVar("T")
_Carrier = Mapping[str, str] | None

_CARRIER = "_trackway_carrier"
"""The keyword argument under which a rollout travels; it is taken away before the function is called."""


def traced(work: T) -> T:
    """Let a Ray task, or all methods of a Ray actor, run inside the rollout that calls them.

    It stands right below ``@ray.remote``, and nothing changes where they are called. It makes no span: what
    is decorated with ``@tool_trace`` and the like is recorded, here as everywhere. Calls from outside of any
    rollout, and an actor's constructor, run outside of any.

    Args:
        work: a function, or a class: its own and inherited methods then carry the rollout, whether they are
            plain, async or generators.

    Returns:
        What to hand to ``ray.remote`` in its place: a function of the same kind, or a subclass.

    Raises:
        TypeError: it is neither, for instance since ``ray.remote`` has been applied already.
    """
    if isinstance(work, type):
        return _carrying_class(work)  # type: ignore[return-value]
    if isinstance(work, FunctionType):
        return _carrying(work)  # type: ignore[return-value]
    raise TypeError(
        f"traced needs a function or class, before ray.remote makes something else of it, and was given a "
        f"{type(work).__name__}; write @traced below @ray.remote, or ray.remote(traced(...))"
    )


def runtime_env() -> dict[str, Any]:
    """Give the settings of this process for Ray's workers: ``ray.init(runtime_env=runtime_env())``.

    They are environment variables (``TRACKWAY_…``), which Ray shows in its dashboard. A tokenizer that is no
    path stays behind.

    Raises:
        ConfigError: nothing is recorded in this process.
    """
    recorder = runtime.get()
    if recorder is None:
        raise ConfigError("nothing is recorded in this process: call trackway.configure(...) first")
    given, defaults = to_dict(recorder.config), to_dict(TraceConfig())
    changed = {
        field.name
        for field in fields(TraceConfig)
        if field.name in given and given[field.name] != defaults.get(field.name)
    }
    variables = {
        f"TRACKWAY_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in given.items()
        if name in changed or name == "store"
    }
    return {"env_vars": variables}


def _carrying_class(cls: type) -> type:
    methods: dict[str, Any] = {}
    for name in dir(cls):
        attribute = inspect.getattr_static(cls, name)
        if name.startswith("__") and name.endswith("__") and name != "__call__":
            continue
        if isinstance(attribute, (staticmethod, classmethod)):
            if isinstance(attribute.__func__, FunctionType):
                methods[name] = type(attribute)(_carrying(attribute.__func__))
        elif isinstance(attribute, FunctionType):
            methods[name] = _carrying(attribute)
    about = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    # Not the class itself: it may be a library's, and others may use it.
    return type(cls)(cls.__name__, (cls,), about | methods)


def _carrying(fn: FunctionType) -> FunctionType:
    """Wrap a function so that Ray hands the caller's rollout to it, and it runs inside."""
    wrapper: Any = _wrapper(fn)
    functools.update_wrapper(wrapper, fn)
    # Ray looks through it for the signature, and finds no room for the carrier there.
    del wrapper.__wrapped__
    wrapper.__signature__ = _with_room(inspect.signature(fn))
    # Ray calls it with what would submit the task, and then the result of that in its place.
    wrapper.__ray_invocation_decorator__ = _submitting
    return wrapper  # type: ignore[no-any-return]


def _submitting(submit: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def submit_inside(args: Any, kwargs: Mapping[str, Any] | None) -> Any:
        carrier = inject()
        return submit(args, {**(kwargs or {}), _CARRIER: carrier} if carrier else kwargs)

    return submit_inside


def _with_room(signature: inspect.Signature) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    if _CARRIER in signature.parameters:
        return signature  # a method that a class inherits from a traced one
    room = inspect.Parameter(_CARRIER, inspect.Parameter.KEYWORD_ONLY, default=None)
    at = len(parameters)
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        at -= 1
    return signature.replace(parameters=[*parameters[:at], room, *parameters[at:]])


def _wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of the same kind, since Ray treats each kind in its own way."""
    wrapper: Any
    if inspect.isasyncgenfunction(fn):

        async def wrapper(
            *args: Any, _trackway_carrier: _Carrier = None, **kwargs: Any
        ) -> AsyncGenerator[Any, None]:
            async with aclosing(_async_apart(_async_inside(fn(*args, **kwargs), _trackway_carrier))) as items:
                async for item in items:
                    yield item

    elif inspect.isgeneratorfunction(fn):

        def wrapper(
            *args: Any, _trackway_carrier: _Carrier = None, **kwargs: Any
        ) -> Generator[Any, Any, Any]:
            return (yield from _apart(_inside(fn(*args, **kwargs), _trackway_carrier)))

    elif inspect.iscoroutinefunction(fn):

        async def wrapper(*args: Any, _trackway_carrier: _Carrier = None, **kwargs: Any) -> Any:
            with _Running(_trackway_carrier):
                return await fn(*args, **kwargs)

    else:

        def wrapper(*args: Any, _trackway_carrier: _Carrier = None, **kwargs: Any) -> Any:
            with _Running(_trackway_carrier):
                return fn(*args, **kwargs)

    return wrapper  # type: ignore[no-any-return]


class _Running:
    """Runs the block inside the rollout that came along, where one did."""

    __slots__ = ("_rollout",)

    def __init__(self, carrier: _Carrier) -> None:
        self._rollout = None if carrier is None else extract(carrier)

    def __enter__(self) -> None:
        if self._rollout is not None:
            self._rollout.__enter__()
            _note_attempt()

    def __exit__(self, *error: Any) -> None:
        if self._rollout is not None:
            self._rollout.__exit__(*error)
        recorder = runtime.started()
        if recorder is not None:
            recorder.writer.hurry()  # Ray ends its workers without a warning, as soon as it has the result


def _inside(items: Generator[Any, Any, Any], carrier: _Carrier) -> Generator[Any, Any, Any]:
    with _Running(carrier):
        return (yield from items)


async def _async_inside(items: AsyncGenerator[Any, None], carrier: _Carrier) -> AsyncGenerator[Any, None]:
    with _Running(carrier):
        async with aclosing(items):
            async for item in items:
                yield item


def _apart(items: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Keep the place that a generator runs at from whoever asks it for items; Ray only asks and closes."""
    places = Alternating()
    while True:
        places.resume()
        try:
            item = next(items)
        except StopIteration as stop:
            return stop.value
        finally:
            places.pause()
        try:
            yield item
        except GeneratorExit:
            places.resume()
            try:
                items.close()
            finally:
                places.pause()
            raise


async def _async_apart(items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    places = Alternating()
    while True:
        places.resume()
        try:
            item = await anext(items)
        except StopAsyncIteration:
            return
        finally:
            places.pause()
        try:
            yield item
        except GeneratorExit:
            places.resume()
            try:
                await items.aclose()
            finally:
                places.pause()
            raise


def _note_attempt() -> None:
    """Mark what follows, where Ray runs a task again: only parts of Ray that are not public tell that."""
    place = current()
    if not isinstance(place, Elsewhere):
        return
    try:
        from ray._private.worker import global_worker

        attempt = global_worker.core_worker.get_current_task_attempt_number()
    except Exception:
        return
    if attempt:
        place.rollout.tags = {**place.rollout.tags, semconv.RAY_ATTEMPT: attempt}
