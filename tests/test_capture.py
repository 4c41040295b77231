"""Decorated callables behave as they would without, and every call leaves one span."""

import asyncio
import functools
import gc
import inspect
import operator
import pickle
import re
import subprocess
import sys
import traceback
import typing
import weakref
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pydantic
import pytest

import trackway
from trackway import llm_trace, rollout_trace, tool_trace, trajectory
from trackway.trace import semconv
from trackway.trace.testing import recording

DECORATORS = {"rollout": rollout_trace, "llm": llm_trace, "tool": tool_trace}
STYLES = {
    "bare": lambda decorator: decorator,
    "brackets": lambda decorator: decorator(),
    "named": lambda decorator: decorator(name="given"),
}


# Every kind of callable. Each builder decorates something that adds one to ``x``.


def a_function(decorate):
    @decorate
    def add(x):
        return x + 1

    return add, "add"


def a_coroutine_function(decorate):
    @decorate
    async def add(x):
        await asyncio.sleep(0)
        return x + 1

    return add, "add"


def a_generator_function(decorate):
    @decorate
    def add(x):
        yield x + 1

    return add, "add"


def an_async_generator_function(decorate):
    @decorate
    async def add(x):
        yield x + 1

    return add, "add"


def a_method(decorate):
    class Agent:
        @decorate
        def add(self, x):
            return x + 1

    return Agent().add, "Agent.add"


def a_coroutine_method(decorate):
    class Agent:
        @decorate
        async def add(self, x):
            return x + 1

    return Agent().add, "Agent.add"


def a_classmethod_above(decorate):
    class Agent:
        @classmethod
        @decorate
        def add(cls, x):
            return x + 1

    return Agent.add, "Agent.add"


def a_classmethod_below(decorate):
    class Agent:
        @decorate
        @classmethod
        def add(cls, x):
            return x + 1

    return Agent().add, "Agent.add"


def a_staticmethod_above(decorate):
    class Agent:
        @staticmethod
        @decorate
        def add(x):
            return x + 1

    return Agent().add, "Agent.add"


def a_staticmethod_below(decorate):
    class Agent:
        @decorate
        @staticmethod
        async def add(x):
            return x + 1

    return Agent.add, "Agent.add"


def a_partial(decorate):
    def add(y, x):
        return x + y

    return decorate(functools.partial(add, 1)), "add"


def a_partial_of_a_coroutine_function(decorate):
    async def add(y, x):
        return x + y

    return decorate(functools.partial(functools.partial(add), 1)), "add"


def a_callable_object(decorate):
    class Adder:
        def __call__(self, x):
            return x + 1

    return decorate(Adder()), "Adder"


def an_async_callable_object(decorate):
    class Adder:
        async def __call__(self, x):
            return x + 1

    return decorate(Adder()), "Adder"


def a_bound_method(decorate):
    class Agent:
        def add(self, x):
            return x + 1

    return decorate(Agent().add), "Agent.add"


KINDS = [
    a_function,
    a_coroutine_function,
    a_generator_function,
    an_async_generator_function,
    a_method,
    a_coroutine_method,
    a_classmethod_above,
    a_classmethod_below,
    a_staticmethod_above,
    a_staticmethod_below,
    a_partial,
    a_partial_of_a_coroutine_function,
    a_callable_object,
    an_async_callable_object,
    a_bound_method,
]


async def outcome(result):
    if inspect.isawaitable(result):
        return await result
    if inspect.isasyncgen(result):
        return [item async for item in result]
    if inspect.isgenerator(result):
        return list(result)
    return result


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_any_kind_of_callable_leaves_one_span(kind, style):
    call, name = kind(STYLES[style](rollout_trace))
    with recording() as rec:
        result = asyncio.run(outcome(call(1)))
        again = asyncio.run(outcome(call(x=1)))
        first, second = rec.spans()
    assert result == again == ([2] if "generator" in kind.__name__ else 2)
    for span in (first, second):
        assert (span.name, span.kind, span.status) == ("given" if style == "named" else name, "rollout", "ok")
        assert span.inputs == {"x": 1}
        assert span.outputs == result
        assert span.parent_id is None
        assert span.end_ns >= span.start_ns


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_recording_the_same_is_returned(kind):
    call, _ = kind(tool_trace)
    assert asyncio.run(outcome(call(1))) == ([2] if "generator" in kind.__name__ else 2)


@pytest.mark.parametrize("kind", DECORATORS)
def test_the_decorator_says_what_kind_of_span_it_is(kind):
    @DECORATORS[kind]
    def work():
        return 1

    with recording() as rec:
        work()
        (span,) = rec.spans()
    assert span.kind == kind
    operations = {"rollout": "invoke_agent", "llm": "chat", "tool": "execute_tool"}
    assert span.attributes[semconv.OPERATION] == operations[kind]


@pytest.mark.parametrize("thing", [int, type("Agent", (), {}), property(lambda self: 1), 7, None.__class__])
def test_what_cannot_be_decorated_is_refused_at_once(thing):
    with pytest.raises(TypeError, match="needs a function"):
        rollout_trace(thing)


# The callable itself


def plain(a, /, b: int, *rest: str, c: float = 0.5, **more: bool) -> dict[str, int]:
    """Do nothing."""
    return {"a": a, "b": b}


async def plain_async(a: int = 1) -> int:
    return a


traced = rollout_trace(plain)
traced_async = rollout_trace(name="another")(plain_async)


@pytest.mark.parametrize(("before", "after"), [(plain, traced), (plain_async, traced_async)])
def test_the_look_of_a_function_stays(before, after):
    assert inspect.signature(after) == inspect.signature(before)
    assert inspect.getfullargspec(after) == inspect.getfullargspec(before)
    assert typing.get_type_hints(after) == typing.get_type_hints(before)
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        assert getattr(after, name) == getattr(before, name)
    assert after.__wrapped__ is before
    assert inspect.iscoroutinefunction(after) == inspect.iscoroutinefunction(before)
    assert inspect.isfunction(after)


def test_arguments_bind_as_before():
    assert inspect.getcallargs(traced, 1, 2, "x", c=1.0, d=True) == inspect.getcallargs(
        plain, 1, 2, "x", c=1.0, d=True
    )
    with recording() as rec:
        assert traced(1, 2, "x", "y", c=1.5, d=True) == {"a": 1, "b": 2}
        assert traced(1, b=2) == {"a": 1, "b": 2}
        many, few = rec.spans()
    assert many.inputs == {"a": 1, "b": 2, "rest": ["x", "y"], "c": 1.5, "d": True}
    assert few.inputs == {"a": 1, "b": 2}


def test_methods_keep_their_signature():
    class Agent:
        def run(self, question: str, *, retries: int = 3) -> str:
            return question

        traced = rollout_trace(run)

    assert inspect.signature(Agent.traced) == inspect.signature(Agent.run)
    assert inspect.signature(Agent().traced) == inspect.signature(Agent().run)


def test_inspect_tells_the_kinds_apart():
    checks = (
        inspect.iscoroutinefunction,
        asyncio.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    )

    async def coroutine():
        pass

    def generator():
        yield

    async def async_generator():
        yield

    for fn in (plain, coroutine, generator, async_generator):
        decorated = llm_trace(fn)
        assert [check(decorated) for check in checks] == [check(fn) for check in checks]


def test_abstract_methods_stay_abstract():
    import abc

    class Base(abc.ABC):
        @rollout_trace
        @abc.abstractmethod
        def run(self): ...

    with pytest.raises(TypeError, match="abstract"):
        Base()


def test_a_decorated_function_of_a_module_can_be_pickled():
    assert pickle.loads(pickle.dumps(outer)) is outer
    assert pickle.loads(pickle.dumps(async_outer)) is async_outer
    error = ValueError("x")
    with recording() as rec:
        with pytest.raises(ValueError, match="x"):
            pickle.loads(pickle.dumps(functools.partial(outer, error)))()
        assert len(rec.spans()) == 1


def test_a_decorated_function_of_a_script_can_be_pickled_by_value():
    # As Ray sends functions and classes of the driver to its workers.
    pytest.importorskip("cloudpickle")
    code = """
import cloudpickle, pickle, asyncio, trackway
from trackway.trace.testing import recording

class Agent:
    @trackway.rollout_trace
    async def run(self, x):
        return tool(x)

@trackway.tool_trace(name="adder")
def tool(x):
    return x + 1

data = cloudpickle.dumps(Agent)
del Agent, tool
Agent = pickle.loads(data)
with recording() as rec:
    assert asyncio.run(Agent().run(1)) == 2
    print([(span.name, span.inputs) for span in rec.spans()])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[('Agent.run', {'x': 1}), ('adder', {'x': 1})]\n", done.stderr


def test_parameters_may_be_called_anything():
    def body(self_like, func, args, kwargs, span, name, fn, target, recorder, call):
        return [self_like, func, args, kwargs, span, name, fn, target, recorder, call]

    names = list(inspect.signature(body).parameters)

    class Agent:
        run = rollout_trace(body)

        @rollout_trace
        def method(self, func, args, kwargs, span, name):
            return name

    given = dict(zip(names, range(10), strict=True))
    with recording() as rec:
        assert rollout_trace(body)(**given) == list(range(10))
        assert rollout_trace(body)(*range(10)) == list(range(10))
        assert Agent().method(func=1, args=2, kwargs=3, span=4, name=5) == 5
        by_name, by_place, method = rec.spans()
    assert by_name.inputs == by_place.inputs == given
    assert method.inputs == {"func": 1, "args": 2, "kwargs": 3, "span": 4, "name": 5}


def test_only_a_real_instance_is_left_out_of_the_inputs():
    class Agent:
        @tool_trace
        def method(self, x):
            return x

        also_known_as = method

        def other(self, x):
            return x

    @tool_trace
    def function(self, x):
        return x

    with recording() as rec:
        Agent().method(1)
        Agent.method(Agent(), 1)
        Agent().also_known_as(1)
        type("Child", (Agent,), {})().method(1)
        function(Agent(), 1)
        function("me", 1)
        spans = rec.spans()
    assert [span.inputs for span in spans[:4]] == [{"x": 1}] * 4
    assert spans[4].inputs["self"].endswith("Agent>")
    assert spans[5].inputs == {"self": "me", "x": 1}


def test_a_method_under_further_decorators_leaves_its_instance_out():
    def logged(fn):
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            return fn(*args, **kwargs)

        return wrapper

    class Agent:
        @logged
        @rollout_trace
        @logged
        def run(self, x):
            return x

    with recording() as rec:
        assert Agent().run(1) == 1
        (span,) = rec.spans()
    assert span.inputs == {"x": 1}


def test_callables_without_a_signature_are_recorded_by_place():
    stand_in = mock.Mock(return_value=3)
    before = len(stand_in.mock_calls)
    with recording() as rec:
        assert tool_trace(len)([1, 2]) == 2
        assert tool_trace(operator.itemgetter("a"))({"a": 1}) == 1
        assert tool_trace(dict.fromkeys)("ab") == {"a": None, "b": None}
        assert tool_trace(stand_in)(1, y=2) == 3
        assert tool_trace(max)(3, 4) == 4
        spans = rec.spans()
    assert stand_in.mock_calls[before:] == [mock.call(1, y=2)]
    assert [span.status for span in spans] == ["ok"] * 5
    assert spans[3].inputs == {"args": [1], "y": 2}
    assert spans[4].inputs == {"args": [3, 4]}


def test_an_async_mock_is_awaited_inside_its_span():
    with recording() as rec:
        assert asyncio.run(tool_trace(mock.AsyncMock(return_value=3))(1)) == 3
        (span,) = rec.spans()
    assert span.outputs == "3"


def test_a_missing_argument_is_the_functions_own_error():
    def needs(a, b):
        return a

    with pytest.raises(TypeError) as bare:
        needs(1)
    with recording() as rec:
        with pytest.raises(TypeError) as decorated:
            rollout_trace(needs)(1)
        with pytest.raises(TypeError) as too_many:
            rollout_trace(needs)(1, 2, 3)
        first, second = rec.spans()
    assert str(decorated.value) == str(bare.value)
    assert "takes 2 positional arguments but 3 were given" in str(too_many.value)
    assert first.status == second.status == "error"
    assert first.inputs == {"a": 1}
    assert second.inputs == {"a": 1, "b": 2, "args": [3]}


# Results


@dataclass(frozen=True, slots=True)
class FrozenOutput:
    prompt_ids: list[int]
    response_ids: list[int]
    text: str = "x"


class StrictOutput(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)
    prompt_ids: list[int]
    response_ids: list[int]
    text: str = "x"


TupleOutput = namedtuple("TupleOutput", ["prompt_ids", "response_ids", "text"], defaults=["x"])


class Decoding:
    """A tokenizer whose tokens are their numbers."""

    def decode(self, ids, **options):
        return " ".join(map(str, ids))

    def convert_ids_to_tokens(self, ids):
        return [f"{item} " for item in ids]

    def __len__(self):
        return 1000


@pytest.mark.parametrize(
    "make",
    [
        lambda **ids: {**ids, "text": "x"},
        FrozenOutput,
        StrictOutput,
        TupleOutput,
        lambda **ids: SimpleNamespace(**ids, text="x"),
    ],
    ids=["dict", "frozen dataclass with slots", "strict pydantic", "named tuple", "object"],
)
def test_the_result_is_the_very_same_object_and_unchanged(make):
    result = make(prompt_ids=[1, 2], response_ids=[3, 4])
    equal = make(prompt_ids=[1, 2], response_ids=[3, 4])

    @llm_trace
    def generate():
        return result

    with recording(tokenizer=Decoding(), token2text=True) as rec:
        assert generate() is result
        (span,) = rec.spans()
    assert result == equal
    assert not hasattr(result, "response_text")
    assert (span.prompt_ids, span.response_ids) == ((1, 2), (3, 4))
    assert span.prompt_text and span.response_text
    assert span.outputs == {"text": "x"}


def test_inputs_are_as_they_were_at_the_call():
    @rollout_trace
    async def turn(messages):
        messages[0]["content"] = f"seen {len(messages)} times"
        messages.append({"role": "assistant", "content": "again"})

    messages = [{"role": "user", "content": "start"}]
    with recording() as rec:
        for _ in range(4):
            asyncio.run(turn(messages))
        spans = rec.spans()
    assert [len(span.inputs["messages"]) for span in spans] == [1, 2, 3, 4]
    starts = [span.inputs["messages"][0]["content"] for span in spans]
    assert starts == ["start", "seen 1 times", "seen 2 times", "seen 3 times"]
    assert len(messages) == 5


def test_outputs_are_as_they_were_at_the_return():
    @rollout_trace
    def steps():
        return {"steps": ["one"], "response_ids": [1, 2], "inner": {"token_ids": [1]}}

    with recording() as rec:
        result = steps()
        result["steps"].append("two")
        result["response_ids"].append(3)
        result["inner"]["token_ids"].clear()
        (span,) = rec.spans()
    assert span.outputs["steps"] == ["one"]
    assert span.response_ids == (1, 2)


def test_nothing_is_kept_of_a_call_but_its_bytes():
    class Payload:
        def __init__(self):
            self.data = bytearray(10_000_000)

    @tool_trace
    def look(payload):
        return payload

    with recording() as rec:
        dead = []
        for _ in range(20):
            payload = Payload()
            look(payload)
            dead.append(weakref.ref(payload))
        del payload
        rec.status()
        gc.collect()
        assert [item() for item in dead] == [None] * 20


def test_an_exception_is_gone_when_its_handler_is_done():
    class Payload:
        pass

    @tool_trace
    def fail(payload):
        raise ValueError("no")

    gc.disable()
    try:
        with recording() as rec:
            payload = Payload()
            with pytest.raises(ValueError, match="no"):
                fail(payload)
            dead = weakref.ref(payload)
            del payload
            gc.collect()
            rec.status()
            assert dead() is None
    finally:
        gc.enable()


# Errors


class OddError(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.code = code


@rollout_trace
def outer(error):
    inner(error)


def inner(error):
    raise error


@rollout_trace
async def async_outer(error):
    await asyncio.sleep(0)
    inner(error)


@pytest.mark.parametrize("call", [outer, lambda error: asyncio.run(async_outer(error))])
def test_an_exception_passes_untouched(call):
    error = OddError(7)
    with recording() as rec:
        with pytest.raises(OddError) as caught:
            call(error)
        (span,) = rec.spans()
    assert caught.value is error
    assert error.args == (7,) and vars(error) == {"code": 7}
    assert error.__context__ is None and error.__cause__ is None
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[-2:] in (["outer", "inner"], ["async_outer", "inner"])
    assert names.count("wrapper") == 1
    assert span.status == "error"
    assert span.error == f"{__name__}.OddError: 7"
    (event,) = span.events
    assert event.attributes[semconv.EXCEPTION_TYPE] == f"{__name__}.OddError"
    assert event.attributes[semconv.EXCEPTION_MESSAGE] == "7"
    assert "raise error" in event.attributes[semconv.EXCEPTION_STACKTRACE]
    assert event.time_ns == span.end_ns


def test_an_exception_keeps_the_context_of_its_caller():
    first, second = ValueError("first"), KeyError("second")
    with recording():
        try:
            try:
                raise first
            except ValueError:
                outer(second)
        except KeyError as error:
            assert error is second
            assert error.__context__ is first
        assert first.__context__ is None


def deep(levels, error):
    if levels:
        deep_again(levels - 1, error)
    raise error


def deep_again(levels, error):
    deep(levels, error)


def stacktrace(call, *args):
    with recording() as rec:
        with pytest.raises(Exception):  # noqa: B017
            call(*args)
        return rec.spans()[0].events[0].attributes[semconv.EXCEPTION_STACKTRACE]


def test_of_a_deep_traceback_both_ends_are_kept():
    @tool_trace
    def tool():
        deep(100, ValueError("bottom"))

    text = stacktrace(tool)
    names = re.findall(r"in (\w+)$", text, re.MULTILINE)
    assert names[:4] == ["wrapper", "tool", "deep", "deep_again"]
    assert names[-2:] == ["deep_again", "deep"]
    assert text.rstrip().endswith("raise error")
    assert len(names) == 30
    assert re.search(r"^  … 173 frames left out …$", text, re.MULTILINE)
    assert "left out" not in stacktrace(outer, ValueError("shallow"))


def test_what_led_to_an_exception_is_named_with_its_place():
    @tool_trace
    def tool(chain):
        try:
            try:
                inner(KeyError("first"))
            except KeyError:
                inner(OddError("second"))
        except OddError as error:
            if chain:
                raise ValueError("last") from error
            raise ValueError("last") from None

    line = inner.__code__.co_firstlineno + 1
    assert stacktrace(tool, True).splitlines()[-2:] == [
        f"caused by {__name__}.OddError: second, at {__file__}:{line} in inner",
        f"raised while handling KeyError: 'first', at {__file__}:{line} in inner",
    ]
    assert "first" not in stacktrace(tool, False) and "OddError: second" not in stacktrace(tool, False)


def test_exceptions_that_lead_to_one_another_are_each_named_once():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert stacktrace(outer, one).count("caused by") == 1


def test_an_exception_whose_text_cannot_be_made_is_recorded_without():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    with recording() as rec:
        with pytest.raises(MuteError):
            outer(MuteError())
        (span,) = rec.spans()
    assert span.status == "error"
    assert "no message" in span.error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_program_is_not_a_failure_of_the_tool(kind):
    with recording() as rec:
        with pytest.raises(kind), trajectory(step=1, sample_index=1):
            outer(kind())
        root, span = rec.spans()
    assert root.status == span.status == "cancelled"
    assert span.end_ns


def test_a_timeout_closes_the_span_as_cancelled():
    @rollout_trace
    async def wait():
        await asyncio.Event().wait()

    async def main():
        with trajectory(step=1, sample_index=1):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wait(), 0.05)
            after()

    @tool_trace
    def after():
        pass

    with recording() as rec:
        asyncio.run(main())
        root, waited, then = rec.trajectory().spans
    assert (root.status, waited.status, then.status) == ("ok", "cancelled", "ok")
    assert waited.end_ns
    assert then.parent_id == root.span_id


def test_cancelled_rollouts_leave_nothing_open(tmp_path):
    started, all_started = [], None

    @rollout_trace
    async def rollout(number):
        started.append(number)
        if len(started) == 8:
            all_started.set()
        await tool()

    @tool_trace
    async def tool():
        await asyncio.Event().wait()

    async def one(number):
        with trajectory(step=1, sample_index=number):
            await rollout(number)

    async def main():
        nonlocal all_started
        all_started = asyncio.Event()
        tasks = [asyncio.create_task(one(number)) for number in range(8)]
        await all_started.wait()
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    trackway.configure(store=tmp_path / "store", sync="off")
    results = asyncio.run(main())
    trackway.shutdown()
    store = trackway.open_store(tmp_path / "store")
    assert [type(result) for result in results] == [asyncio.CancelledError] * 8
    trajectories = [store.load(summary.trace_id) for summary in store.query()]
    assert len(trajectories) == 8
    for item in trajectories:
        assert [span.status for span in item.spans] == ["cancelled"] * 3
        assert all(span.end_ns for span in item.spans)
        assert item.status == "cancelled"
    assert store.status().in_flight == 0
