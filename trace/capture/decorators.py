"""``@rollout_trace``, ``@llm_trace`` and ``@tool_trace``: one decorator, three kinds of span."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar, overload

from ..model import Kind
from . import runtime
from .calls import Call, Target
from .scope import Alternating, NotSampled

F = TypeVar("F", bound=Callable[..., Any])


@overload
def rollout_trace(fn: F, /) -> F: ...
@overload
def rollout_trace(*, name: str | None = None) -> Callable[[F], F]: ...
def rollout_trace(fn: Any = None, /, *, name: str | None = None) -> Any:
    """Record every call of a rollout function, or of any step inside one, as an agent span.

    Works on functions, coroutine functions, generators, async generators, methods, classmethods and
    staticmethods (above or below their decorator), partials and callable objects. Arguments and results
    are copied at the moment of the call; the function gets and returns the very same objects, and raises
    the very same exceptions. Outside of a recorded rollout it costs a look-up.

    Args:
        fn: the function, when used without brackets.
        name: name of the span; by default the function's.

    Raises:
        TypeError: what is decorated cannot be called, or is a class.
    """
    return _decorate("rollout", fn, name)


@overload
def llm_trace(fn: F, /) -> F: ...
@overload
def llm_trace(*, name: str | None = None) -> Callable[[F], F]: ...
def llm_trace(fn: Any = None, /, *, name: str | None = None) -> Any:
    """Record every call of a function that generates: each becomes an assistant turn.

    Token ids, mask and log probabilities are found by field name in arguments and result (``prompt_ids``,
    ``response_ids``, ``token_ids``, ``response_mask``, ``response_logprobs``, ``log_probs`` …). See
    ``rollout_trace`` for what can be decorated.
    """
    return _decorate("llm", fn, name)


@overload
def tool_trace(fn: F, /) -> F: ...
@overload
def tool_trace(*, name: str | None = None) -> Callable[[F], F]: ...
def tool_trace(fn: Any = None, /, *, name: str | None = None) -> Any:
    """Record every call of a tool; ``name`` is the tool's name as the model knows it.

    See ``rollout_trace`` for what can be decorated.
    """
    return _decorate("tool", fn, name)


def _decorate(kind: Kind, fn: Any, name: str | None) -> Any:
    if fn is None:
        return functools.partial(_wrap, kind, name=name)
    return _wrap(kind, fn, name=name)


def _wrap(kind: Kind, fn: Any, *, name: str | None) -> Any:
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(_wrap(kind, fn.__func__, name=name))
    if isinstance(fn, type) or not callable(fn):
        what = f"the class {fn.__qualname__}" if isinstance(fn, type) else repr(type(fn).__name__)
        raise TypeError(f"@{kind}_trace needs a function or another callable object, and was given {what}")
    target = Target(fn, kind, name)
    plain = inspect.isroutine(fn) or isinstance(fn, functools.partial)
    body = fn if plain else type(fn).__call__
    wrapper: Any
    if inspect.isasyncgenfunction(body):
        wrapper = _async_generator(fn, target)
    elif inspect.isgeneratorfunction(body):
        wrapper = _generator(fn, target)
    elif inspect.iscoroutinefunction(body) or asyncio.iscoroutinefunction(fn):
        wrapper = _coroutine(fn, target)
    else:
        wrapper = _function(fn, target)
    # A partial or a callable object has a __dict__ of its own that is not the wrapper's business.
    functools.update_wrapper(wrapper, fn, updated=("__dict__",) if inspect.isfunction(fn) else ())
    if target.signature is not None:
        # inspect.getfullargspec, and with it older schema builders, do not follow __wrapped__.
        wrapper.__signature__ = target.signature
    target.wrapper = wrapper
    return wrapper


def _function(fn: Callable[..., Any], target: Target) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = runtime.get()
        call = None if recorder is None else recorder.begin(target, args, kwargs)
        if call is None:
            return fn(*args, **kwargs)
        call.enter()
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            call.leave()
            call.fail(error)
            raise
        call.leave()
        call.succeed(result)
        return result

    return wrapper


def _coroutine(fn: Callable[..., Any], target: Target) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = runtime.get()
        call = None if recorder is None else recorder.begin(target, args, kwargs)
        if call is None:
            return await fn(*args, **kwargs)
        call.enter()
        try:
            work = fn(*args, **kwargs)
            del args, kwargs  # the work has them now; many calls are open at once, and all counts
            result = await work
        except BaseException as error:
            call.leave()
            call.fail(error)
            raise
        call.leave()
        call.succeed(result)
        return result

    return wrapper


def _generator(fn: Callable[..., Any], target: Target) -> Callable[..., Any]:
    target.streams = True

    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        recorder = runtime.get()
        call = None if recorder is None else recorder.begin(target, args, kwargs)
        if call is None:
            return (yield from fn(*args, **kwargs))
        generator: Any = None
        resume: Callable[[], Any] = lambda: generator.send(None)  # noqa: E731
        places = Alternating()
        while True:
            places.resume()
            try:
                if generator is None:
                    call.enter()
                    generator = fn(*args, **kwargs)
                item = resume()
            except StopIteration as stop:
                call.leave()
                places.pause()
                call.succeed(stop.value)
                return stop.value
            except BaseException as error:
                resume = _nothing  # it may hold this very error, whose traceback holds this frame
                call.leave()
                places.pause()
                call.fail(error)
                raise
            places.pause()
            call.item(item)
            try:
                sent = yield item
            except GeneratorExit:
                _close(call, places, generator)
                raise
            except BaseException as error:
                resume = functools.partial(generator.throw, error)
            else:
                resume = functools.partial(generator.send, sent)

    return wrapper


def _close(call: Call | NotSampled, places: Alternating, generator: Any) -> None:
    places.resume()
    try:
        generator.close()
    except BaseException as error:
        call.leave()
        places.pause()
        call.fail(error)
        raise
    call.leave()
    places.pause()
    call.stop_early()


def _async_generator(fn: Callable[..., Any], target: Target) -> Callable[..., Any]:
    target.streams = True

    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        recorder = runtime.get()
        call = None if recorder is None else recorder.begin(target, args, kwargs)
        if call is None:
            call = NotSampled()  # an async generator cannot delegate with `yield from`
        generator: Any = None
        resume: Callable[[], Any] = lambda: _first(generator)  # noqa: E731
        places = Alternating()
        while True:
            places.resume()
            try:
                if generator is None:
                    call.enter()
                    generator = fn(*args, **kwargs)
                item = await resume()
            except StopAsyncIteration:
                call.leave()
                places.pause()
                call.succeed(None)
                return
            except BaseException as error:
                resume = _nothing  # it may hold this very error, whose traceback holds this frame
                call.leave()
                places.pause()
                call.fail(error)
                raise
            places.pause()
            call.item(item)
            try:
                sent = yield item
            except GeneratorExit:
                await _aclose(call, places, generator)
                raise
            except BaseException as error:
                resume = functools.partial(generator.athrow, error)
            else:
                resume = functools.partial(generator.asend, sent)

    return wrapper


def _first(generator: Any) -> Any:
    """Start a generator unknown to the event loop, which would close it at its end together with ours."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return generator.asend(None)
    finally:
        sys.set_asyncgen_hooks(*hooks)


def _nothing() -> None:
    pass


async def _aclose(call: Call | NotSampled, places: Alternating, generator: Any) -> None:
    places.resume()
    try:
        await generator.aclose()
    except BaseException as error:
        call.leave()
        places.pause()
        call.fail(error)
        raise
    call.leave()
    places.pause()
    call.stop_early()
