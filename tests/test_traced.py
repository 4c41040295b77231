"""What is handed to Ray in place of a function or class, without Ray: Ray's part in it is played here."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest

import trackway
from trackway import ConfigError, TraceConfig, inject, llm_trace, tool_trace, trajectory
from trackway.trace.config import load_config
from trackway.trace.integrations.ray import runtime_env, traced
from trackway.trace.testing import recording


@tool_trace
def tool(argument: Any) -> Any:
    return argument


def sent(work: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Call as Ray does: the decorator of the invocation is asked what is to be sent."""
    return work.__ray_invocation_decorator__(lambda args, kwargs: (args, kwargs))(args, kwargs)


def far(work: Any, *args: Any, **kwargs: Any) -> Any:
    """Send a call from a rollout, and run it outside of that, as a worker does."""
    with trajectory(step=1, sample_index=1):
        args, kwargs = sent(work, *args, **kwargs)
    inspect.signature(work).bind(*args, **kwargs)  # so does Ray
    return work(*args, **kwargs)


@traced
def plain(number: int, *more: int, keyword: int = 0, **others: int) -> Any:
    """Says what it was given."""
    return [number, more, keyword, others, tool(number)]


class Base:
    def inherited(self) -> Any:
        return tool("inherited")


class Worker(Base):
    """Works."""

    def __init__(self, number: int = 1) -> None:
        self.number = number

    def method(self, more: int) -> int:
        return self.local() + more

    def local(self) -> int:
        return int(tool(self.number))

    @tool_trace
    def recorded(self, number: int) -> int:
        return number

    async def coroutine(self) -> Any:
        await asyncio.sleep(0)
        return tool("coroutine")

    async def stream(self) -> Any:
        for number in range(3):
            await asyncio.sleep(0)
            yield tool(number)

    def items(self) -> Any:
        for number in range(3):
            yield tool(number)


def below(rec: Any) -> list[str]:
    """Give what the spans below the only rollout were given."""
    (found,) = [item for item in rec.trajectories() if item.key]
    assert {span.parent_id for span in found.spans[1:]} == {found.spans[0].span_id}
    return [span.inputs.get("argument") for span in found.spans[1:]]


def test_a_call_from_outside_is_sent_as_it_is() -> None:
    keywords = {"keyword": 1}
    assert plain.__ray_invocation_decorator__(lambda args, kwargs: kwargs)((1,), keywords) is keywords
    with recording():
        assert sent(plain, 1, keyword=1) == ((1,), {"keyword": 1})
        assert plain(1, 2, keyword=3, other=4) == [1, (2,), 3, {"other": 4}, 1]


def test_a_call_from_inside_takes_the_rollout_along_and_nothing_else() -> None:
    with recording() as rec:
        assert far(plain, 1, 2, keyword=3, other=4) == [1, (2,), 3, {"other": 4}, 1]
        assert below(rec) == [1]
        assert inject() == {}


def test_it_is_still_the_same_function_to_look_at() -> None:
    assert (plain.__name__, plain.__doc__, plain.__module__) == ("plain", "Says what it was given.", __name__)
    given = list(inspect.signature(plain).parameters)
    assert [name for name in given if not name.startswith("_")] == ["number", "more", "keyword", "others"]
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    subclass = traced(Worker)
    for name in ("method", "coroutine", "stream", "items"):
        before, after = getattr(Worker, name), getattr(subclass, name)
        assert [kind(before) for kind in kinds] == [kind(after) for kind in kinds]


def test_a_class_is_left_as_it_is_and_gets_a_subclass() -> None:
    before = dict(vars(Worker))
    subclass = traced(Worker)
    assert dict(vars(Worker)) == before
    assert issubclass(subclass, Worker)
    assert (subclass.__name__, subclass.__qualname__, subclass.__doc__) == ("Worker", "Worker", "Works.")
    assert subclass(2).number == 2


def test_methods_of_all_kinds_take_the_rollout_along() -> None:
    worker = traced(Worker)(5)

    async def everything() -> list[Any]:
        got = [far(worker.method, 1), far(worker.inherited), await far(worker.coroutine)]
        got += [item async for item in far(worker.stream)]
        return [*got, *far(worker.items)]

    with recording() as rec:
        assert asyncio.run(everything()) == [6, "inherited", "coroutine", 0, 1, 2, 0, 1, 2]
        found = [item for item in rec.trajectories() if item.key]
        assert [len(item.spans) for item in found] == [2, 2, 2, 4, 4]
        assert len(found) == len(rec.trajectories())


def test_the_instance_is_no_argument_of_a_recorded_method() -> None:
    with recording() as rec:
        far(traced(Worker)().recorded, 3)
        (span,) = [span for span in rec.spans() if span.name == "recorded"]
    assert span.inputs == {"number": 3}


def test_a_class_that_inherits_from_a_traced_one_is_traced_as_well() -> None:
    @traced
    class Child(traced(Worker)):  # type: ignore[misc]
        def method(self, more: int) -> Any:
            return super().method(more), tool("child")

    with recording() as rec:
        assert far(Child().method, 1) == (2, "child")
        assert far(Child().inherited) == far(traced(Child)().inherited) == "inherited"
        found = [[span.inputs["argument"] for span in item.spans[1:]] for item in rec.trajectories()]
    assert sorted(map(str, found)) == ["['inherited']", "['inherited']", "[1, 'child']"]


def test_an_abstract_class_stays_abstract() -> None:
    class Shape(ABC):
        @abstractmethod
        def area(self) -> float: ...

    class Square(Shape):
        def area(self) -> float:
            return 1.0

    with pytest.raises(TypeError, match="abstract"):
        traced(Shape)()
    assert traced(Square)().area() == 1.0


def test_a_generator_leaves_its_rollout_with_itself() -> None:
    @traced
    def items() -> Any:
        with trajectory(step=2, sample_index="its own"):
            yield tool("first")
            yield tool("second")
        yield tool("third")

    with recording() as rec:
        generator = far(items)
        for _ in range(3):
            next(generator)
            assert inject() == {}
            tool("between")
        generator.close()
        own = {item.key.sample_index: item for item in rec.trajectories() if item.key}
    assert [span.inputs["argument"] for span in own["its own"].spans[1:]] == ["first", "second"]
    assert [span.inputs["argument"] for span in own[1].spans[1:]] == ["third"]


def test_a_generator_that_is_closed_early_ends_inside_of_its_rollout() -> None:
    ended = []

    def items() -> Any:
        try:
            yield 1
        finally:
            ended.append(bool(inject()))

    async def async_items() -> Any:
        try:
            yield 1
        finally:
            ended.append(bool(inject()))

    async def close_early() -> None:
        generator = far(traced(async_items))
        assert await anext(generator) == 1
        await generator.aclose()

    with recording():
        generator = far(traced(items))
        assert next(generator) == 1
        generator.close()
        asyncio.run(close_early())
        assert inject() == {}
    assert ended == [True, True]


def test_an_exception_passes_and_the_worker_is_outside_again() -> None:
    @traced
    def failing() -> None:
        raise ValueError("no")

    @traced
    def failing_items() -> Any:
        yield 1
        raise ValueError("no items")

    with recording():
        with pytest.raises(ValueError, match=r"^no$"):
            far(failing)
        assert inject() == {}
        with pytest.raises(ValueError, match="no items"):
            list(far(failing_items))
        assert inject() == {}


def test_a_rollout_that_is_not_sampled_is_recorded_nowhere() -> None:
    with recording(ratio=0) as rec:
        far(plain, 1)
        assert rec.trajectories() == []


@pytest.mark.parametrize("wrong", [1, "text", None, Worker(), print, llm_trace(tool).__call__])
def test_what_is_no_function_and_no_class_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"write @traced below @ray\.remote"):
        traced(wrong)


# Settings


def test_settings_reach_a_process_that_only_has_the_variables(tmp_path: Path) -> None:
    given = trackway.configure(
        store=tmp_path / "store",
        backend=["mlflow", "otlp"],
        tracking_uri="sqlite:////data/mlflow.db",
        project="p",
        sync="off",
        max_length=None,
        token2text=True,
        ratio=0.5,
        keep_samples=[17, "17", "a,b"],
        export_only={"mlflow": ["errors", "best"]},
        prompt_fields=["mine"],
        queue_timeout=2.5,
    )
    variables = runtime_env()["env_vars"]
    assert all(isinstance(value, str) for value in variables.values())
    assert load_config(environ=variables) == given
    assert "TRACKWAY_SEED" not in variables


def test_the_store_is_named_though_it_is_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trackway.configure(sync="off")
    assert runtime_env() == {"env_vars": {"TRACKWAY_STORE": str(TraceConfig().store), "TRACKWAY_SYNC": "off"}}


def test_without_settings_there_are_none_to_hand_on() -> None:
    with pytest.raises(ConfigError, match=r"call trackway\.configure"):
        runtime_env()
