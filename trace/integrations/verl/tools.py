"""verl's tool calls: each is one span named as the tool, and an error where it failed.

verl's agents turn every failure into a text for the model, so what failed is noted where it was raised.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from ...capture.calls import Call
from ...capture.rollouts import score
from ...capture.scope import NotSampled
from .hooks import replace
from .settings import tracing
from .spans import begin

REWARD = "verl.tool_reward"
"""Attribute of a tool's span: the reward that the tool gave with its answer, where that is not 0."""
METRICS = "verl.tool_metrics"
"""Attribute of a tool's span: JSON of the metrics that the tool gave with its answer, where there are any."""


class ToolError(Exception):
    """A tool call that verl's agent answered with an error text."""


class _Running:
    """The tool call that the running code is a part of."""

    __slots__ = ("raised", "tool")

    def __init__(self, tool: Any = None) -> None:
        self.tool = tool  # None until the agent has come to the tool itself
        self.raised: Exception | None = None


_running: ContextVar[_Running | None] = ContextVar("trackway-verl-tool", default=None)


def change_calls(module: ModuleType) -> None:
    """Record the tool calls of ``ToolAgentLoop``."""
    replace(module.ToolAgentLoop, "_call_tool", _called)


def change_base_tool(module: ModuleType) -> None:
    """Record ``execute`` of all classes derived from ``BaseTool``, whose own lack verl's decorator."""
    base = module.BaseTool

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        execute = vars(cls).get("execute")
        if inspect.iscoroutinefunction(execute) and not hasattr(execute, "traced_tool"):
            cls.execute = traced_tool(execute)

    base.__init_subclass__ = classmethod(init_subclass)


def change_function_tool(module: ModuleType) -> None:
    """Record the calls of tools that are plain functions."""
    replace(module.FunctionTool, "call", traced_tool)


def traced_tool(func: Any) -> Any:
    """Decorate a coroutine method of a tool; inside the agent's span of the call it makes no second one."""

    @functools.wraps(func)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        around = _running.get()
        if not tracing() or (around is not None and around.tool is self):
            return await func(self, *args, **kwargs)
        token = _running.set(_Running(self))
        try:
            if around is None or around.tool is not None:
                return await _recorded(func, self, args, kwargs)
            try:
                return await func(self, *args, **kwargs)
            except Exception as error:
                around.raised = error
                raise
        finally:
            _running.reset(token)

    call.traced_tool = True  # type: ignore[attr-defined]
    return call


async def _recorded(func: Any, tool: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    given = {**dict(zip(("instance_id", "parameters")[-len(args) :], args, strict=False)), **kwargs}
    parameters = given.get("parameters")
    arguments = parameters if isinstance(parameters, Mapping) else {"parameters": parameters}
    call = begin("tool", str(getattr(tool, "name", "") or type(tool).__qualname__), arguments)
    if call is None:
        return await func(tool, *args, **kwargs)
    call.enter()
    try:
        result = await func(tool, *args, **kwargs)
    except BaseException as error:
        call.leave()
        call.fail(error)
        raise
    call.leave()
    _finish(call, result, None)
    return result


def _called(original: Callable[..., Any]) -> Callable[..., Any]:
    async def call_tool(self: Any, tool_call: Any, *args: Any, **kwargs: Any) -> Any:
        call = None
        if tracing():
            arguments, wrong = _arguments(getattr(tool_call, "arguments", None))
            # A name may be anything that a model says, nothing as well.
            call = begin("tool", str(getattr(tool_call, "name", "") or "tool"), arguments)
        if call is None:
            return await original(self, tool_call, *args, **kwargs)
        running = _Running()
        token = _running.set(running)
        call.enter()
        try:
            result = await original(self, tool_call, *args, **kwargs)
        except BaseException as error:
            call.leave()
            call.fail(error)
            raise
        finally:
            _running.reset(token)
        call.leave()
        _finish(call, result, _failure(tool_call.name, result, wrong, running.raised))
        running.raised = None  # its traceback leads back here
        return result

    return call_tool


def _arguments(text: Any) -> tuple[dict[str, Any], Exception | None]:
    """Give a model's arguments by name, and why they cannot be read."""
    try:
        arguments = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        return {"arguments": text}, error
    return (arguments if isinstance(arguments, dict) else {"arguments": arguments}), None


def _failure(name: str, result: Any, wrong: Exception | None, raised: Exception | None) -> Exception | None:
    """Say what failed, as the text for the model tells it."""
    said = _text(result)
    if said is None:
        return None
    if said.startswith(f"Unknown function '{name}'"):
        return LookupError(said)
    if said.startswith(f"Invalid JSON in arguments for '{name}'"):
        return wrong or ToolError(said)
    if not said.startswith(f"Error executing tool '{name}': "):
        return None
    return ToolError(said) if raised is None or str(raised) not in said else raised


def _finish(call: Call | NotSampled, result: Any, error: Exception | None) -> None:
    """End the span of a call: its result is the text that it gave, where there are no pictures beside it."""
    if isinstance(call, NotSampled):
        return
    answer = result
    if isinstance(result, tuple) and len(result) == 3:
        answer, reward, metrics = result
        call.recorder.guard(_note, call, reward, metrics)
    try:
        text = _text(answer)
        if text is not None and not getattr(answer, "image", None) and not getattr(answer, "video", None):
            answer = text
    except Exception as failed:  # of an object of the tool's own
        call.note(f"the text of the answer is not known: {type(failed).__name__}")
    if error is None:
        call.succeed(answer)
    else:
        call.fail(error, answer)


def _note(call: Call, reward: Any, metrics: Any) -> None:
    if reward:
        call.add(REWARD, score(reward))
    if metrics:
        copy = call.copy(metrics)
        call.add(METRICS, copy.decode() if isinstance(copy, bytes) else str(copy))


def _text(result: Any) -> str | None:
    response = result[0] if isinstance(result, tuple) and result else result
    text = response if isinstance(response, str) else getattr(response, "text", None)
    return text if isinstance(text, str) else None
