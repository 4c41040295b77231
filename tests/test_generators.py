"""Decorated generators and async generators: one span each, open while they run and not while they wait."""

import asyncio
import gc
import itertools
import logging
import threading

import pytest
from opentelemetry import trace as otel

import trackway
from trackway import llm_trace, rollout_trace, tool_trace, trajectory
from trackway.trace import semconv
from trackway.trace.capture.scope import current
from trackway.trace.testing import recording


def yielded(span):
    return span.attributes[semconv.ITEMS_YIELDED], span.attributes.get(semconv.STOPPED_EARLY, False)


closed = []


@llm_trace
def five():
    try:
        yield from range(5)
    finally:
        closed.append(True)


@llm_trace
async def async_five():
    try:
        for number in range(5):
            yield number
    finally:
        await asyncio.sleep(0)
        closed.append(True)


# Consumers that stop early


def take_and_break():
    for item in five():
        if item == 1:
            break


def take_and_close():
    generator = five()
    next(generator), next(generator)
    generator.close()


def take_a_slice():
    assert list(itertools.islice(five(), 2)) == [0, 1]


def take_and_forget():
    generator = five()
    next(generator), next(generator)
    del generator
    gc.collect(0)


@pytest.mark.parametrize("consume", [take_and_break, take_and_close, take_a_slice, take_and_forget])
def test_a_generator_that_is_left_early_is_closed(consume, tmp_path):
    closed.clear()
    trackway.configure(store=tmp_path / "store", sync="off")
    with trajectory(step=1, sample_index=1):
        for _ in range(250):
            consume()
        assert len(closed) == 250
    trackway.shutdown()
    found = trackway.open_store(tmp_path / "store").load("1/1/0")
    spans = found.spans[1:]
    assert len(spans) == 250
    assert {(span.status, *yielded(span)) for span in spans} == {("ok", 2, True)}
    assert all(span.end_ns for span in spans)
    assert spans[0].outputs == [0, 1]


async def async_break():
    async for item in async_five():
        if item == 1:
            break


async def async_close():
    generator = async_five()
    await generator.__anext__(), await generator.__anext__()
    await generator.aclose()


async def async_forget():
    generator = async_five()
    await generator.__anext__(), await generator.__anext__()
    del generator
    gc.collect(0)


async def close_in_another_task():
    generator = async_five()
    await generator.__anext__(), await generator.__anext__()
    await asyncio.create_task(generator.aclose())


async def leave_to_the_loop(kept=[]):  # noqa: B006 - kept until the loop ends
    generator = async_five()
    await generator.__anext__(), await generator.__anext__()
    kept.append(generator)


@pytest.mark.parametrize(
    "consume", [async_break, async_close, async_forget, close_in_another_task, leave_to_the_loop]
)
def test_an_async_generator_that_is_left_early_is_closed(consume, tmp_path, caplog):
    closed.clear()

    async def main():
        with trajectory(step=1, sample_index=1):
            for _ in range(50):
                await consume()
            after()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    @tool_trace
    def after():
        pass

    trackway.configure(store=tmp_path / "store", sync="off")
    asyncio.run(main())
    trackway.shutdown()
    found = trackway.open_store(tmp_path / "store").load("1/1/0")
    root, *streams = [span for span in found.spans if span.kind != "tool"]
    (then,) = [span for span in found.spans if span.kind == "tool"]
    assert len(closed) == len(streams) == 50
    assert {(span.status, *yielded(span)) for span in streams} == {("ok", 2, True)}
    assert {span.parent_id for span in (*streams, then)} == {root.span_id}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_closing_in_another_task_leaves_that_tasks_place_alone():
    @rollout_trace
    async def closer(generator):
        before = current(), otel.get_current_span()
        await generator.aclose()
        assert (current(), otel.get_current_span()) == before
        inside()

    @tool_trace
    def inside():
        pass

    async def one(sample, generator=None):
        with trajectory(step=1, sample_index=sample):
            if generator is None:
                generator = async_five()
                await generator.__anext__()
                return generator
            return await closer(generator)

    async def main():
        generator = await one(1)
        await asyncio.create_task(one(2, generator))

    with recording() as rec:
        asyncio.run(main())
        first, second = rec.trajectories()
    assert [span.name for span in first.spans] == ["trajectory", "async_five"]
    assert [span.name for span in second.spans] == ["trajectory", "closer", "inside"]
    assert second.spans[2].parent_id == second.spans[1].span_id
    assert second.spans[2].attributes[semconv.SAMPLE_INDEX] == 2


def test_a_generator_may_be_finished_by_another_thread():
    @rollout_trace
    def stream():
        for _ in range(2):
            inside()
            yield

    @tool_trace
    def inside():
        pass

    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            generator = stream()
            next(generator)
        thread = threading.Thread(target=lambda: list(generator))
        thread.start()
        thread.join()
        found = rec.trajectory()
    outer = next(span for span in found.spans if span.name == "stream")
    assert [span.parent_id for span in found.spans if span.name == "inside"] == [outer.span_id] * 2
    assert yielded(outer) == (2, False)


# Time and place


def test_a_stream_is_open_until_it_is_drained_and_holds_what_runs_inside():
    @llm_trace
    async def inner():
        for number in range(3):
            await asyncio.sleep(0.05)
            tool(number)
            yield number

    @rollout_trace
    async def outer():
        async for item in inner():
            yield item

    @tool_trace
    def tool(number):
        pass

    async def main():
        assert [item async for item in outer()] == [0, 1, 2]

    with recording() as rec:
        asyncio.run(main())
        found = rec.trajectory()
    by_name = {span.name: span for span in found.spans}
    assert found.spans[0].name == "outer"
    assert by_name["inner"].parent_id == by_name["outer"].span_id
    assert [span.parent_id for span in found.spans if span.name == "tool"] == [by_name["inner"].span_id] * 3
    assert by_name["inner"].duration_ns >= 140_000_000  # three sleeps
    assert by_name["outer"].duration_ns >= by_name["inner"].duration_ns


def test_nothing_is_recorded_of_a_generator_that_is_never_started():
    with recording() as rec:
        five()
        async_five()
        assert rec.trajectories() == []


def test_the_consumer_of_a_generator_is_not_inside_of_it():
    @rollout_trace
    def stream():
        yield 1
        yield 2

    @tool_trace
    def consumer():
        pass

    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            for _ in stream():
                assert current().kind == "trajectory"
                consumer()
        found = rec.trajectory()
    assert {span.parent_id for span in found.spans[1:]} == {found.spans[0].span_id}


def test_two_streams_read_in_turns_do_not_mix():
    @rollout_trace
    def stream(name):
        for _ in range(2):
            tool(name)
            yield name

    @tool_trace
    def tool(name):
        pass

    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            pairs = list(zip(stream("a"), stream("b"), strict=True))
        found = rec.trajectory()
    assert pairs == [("a", "b")] * 2
    streams = {span.span_id: span.inputs["name"] for span in found.spans if span.name == "stream"}
    tools = [span for span in found.spans if span.name == "tool"]
    assert [streams[span.parent_id] for span in tools] == [span.inputs["name"] for span in tools]


# The protocol of generators


def echo(first):
    got = [first]
    try:
        while True:
            try:
                sent = yield got[-1]
            except KeyError as error:
                sent = f"caught {error}"
            if sent is None:
                return got
            got.append(sent)
    finally:
        got.append("closed")


@pytest.mark.parametrize("decorate", [lambda fn: fn, llm_trace], ids=["bare", "decorated"])
def test_send_throw_and_return_work_as_ever(decorate):
    def caller():
        result = yield from decorate(echo)(1)
        yield ["result", *result]

    with recording():
        generator = caller()
        assert next(generator) == 1
        assert generator.send(5) == 5
        assert generator.throw(KeyError("k")) == "caught 'k'"
        assert generator.send(None) == ["result", 1, 5, "caught 'k'", "closed"]
        with pytest.raises(StopIteration):
            next(generator)
        other = decorate(echo)(1)
        next(other)
        error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError) as caught:
            other.throw(error)
        assert caught.value is error and error.__context__ is None
        with pytest.raises(StopIteration):
            next(other)


async def async_echo(first):
    got = [first]
    while True:
        try:
            sent = yield got[-1]
        except KeyError as error:
            sent = f"caught {error}"
        if sent is None:
            return
        got.append(sent)


@pytest.mark.parametrize("decorate", [lambda fn: fn, llm_trace], ids=["bare", "decorated"])
def test_asend_athrow_and_the_end_work_as_ever(decorate):
    async def main():
        generator = decorate(async_echo)(1)
        assert await generator.__anext__() == 1
        assert await generator.asend(5) == 5
        assert await generator.athrow(KeyError("k")) == "caught 'k'"
        with pytest.raises(StopAsyncIteration):
            await generator.asend(None)
        with pytest.raises(StopAsyncIteration):
            await generator.__anext__()
        other = decorate(async_echo)(1)
        await other.__anext__()
        error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError) as caught:
            await other.athrow(error)
        assert caught.value is error and error.__context__ is None

    with recording():
        asyncio.run(main())


def test_an_error_in_the_middle_of_a_stream_ends_its_span():
    @llm_trace
    def stream():
        yield 1
        raise ValueError("broken")

    @llm_trace
    async def async_stream():
        yield 1
        raise ValueError("broken")

    async def drain():
        return [item async for item in async_stream()]

    with recording() as rec:
        with pytest.raises(ValueError, match="broken"):
            list(stream())
        with pytest.raises(ValueError, match="broken"):
            asyncio.run(drain())
        spans = rec.spans()
    assert [(span.status, span.error, span.outputs) for span in spans] == [
        ("error", "ValueError: broken", [1])
    ] * 2
    assert [yielded(span) for span in spans] == [(1, False)] * 2


def test_a_generator_that_refuses_to_close_says_so_as_ever():
    @llm_trace
    def stubborn():
        while True:
            try:
                yield
            except GeneratorExit:
                yield

    with recording() as rec:
        generator = stubborn()
        next(generator)
        with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
            generator.close()
        (span,) = rec.spans()
    assert span.status == "error"


def test_a_cancelled_stream_is_cancelled():
    @llm_trace
    async def stream():
        yield 1
        await asyncio.Event().wait()

    async def drain():
        return [item async for item in stream()]

    async def main():
        await asyncio.wait_for(drain(), 0.05)

    with recording() as rec:
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(main())
        (span,) = rec.spans()
    assert span.status == "cancelled"
    assert yielded(span) == (1, False)


# What is kept of the items


def test_items_and_the_returned_value_are_kept():
    @tool_trace
    def stream():
        yield {"line": 1}
        yield {"line": 2}
        return "done"

    with recording() as rec:
        list(stream())
        (span,) = rec.spans()
    assert span.outputs == '[{"line":1},{"line":2},"done"]'


def test_of_many_items_the_first_and_the_last_are_kept_and_all_are_counted():
    @llm_trace
    def stream():
        yield from range(5000)

    with recording() as rec:
        list(stream())
        (span,) = rec.spans()
    assert yielded(span) == (5000, False)
    assert span.outputs == [*range(999), 4999]


@pytest.mark.parametrize(
    "parts",
    [
        [[5], [6], [7, 8]],
        [[5], [5, 6], [5, 6, 7, 8], [5, 6, 7, 8]],
        [[5, 6, 7, 8]],
        [[], [5, 6], [5, 6, 7], [], [5, 6, 7, 8]],
        [[5, 6], [7], [8], []],
    ],
    ids=["what is new", "all so far", "at once", "all so far, with gaps", "what is new, with an empty end"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_token_ids_of_a_stream_are_put_together(parts, nested):
    @llm_trace
    async def stream(prompt_ids):
        for part in parts:
            chunk = {"token_ids": part, "log_probs": [-0.5 * item for item in part]}
            yield {"outputs": [chunk]} if nested else {**chunk, "text": str(part)}

    async def drain():
        return [item async for item in stream([1, 2])]

    with recording() as rec:
        asyncio.run(drain())
        (span,) = rec.spans()
    assert span.prompt_ids == (1, 2)
    assert span.response_ids == (5, 6, 7, 8)
    assert span.response_logprobs == (-2.5, -3.0, -3.5, -4.0)
    assert len(span.outputs) == len(parts)


def test_a_stream_that_repeats_one_token_keeps_every_one():
    @llm_trace
    def stream():
        for _ in range(3):
            yield {"token_ids": [5]}

    with recording() as rec:
        list(stream())
        (span,) = rec.spans()
    assert span.response_ids == (5, 5, 5)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ends", ["exhausted", "closed"])
def test_a_rollout_that_a_generator_opens_and_yields_inside_is_its_own_only(asynchronous, ends):
    @tool_trace
    def inner(of):
        return of

    @rollout_trace
    def rollouts():
        for number in range(2):
            with trajectory(step=2, sample_index=number):
                inner(f"rollout {number}")
                yield number
                inner(f"rollout {number}")

    @rollout_trace
    async def async_rollouts():
        for number in range(2):
            with trajectory(step=2, sample_index=number):
                inner(f"rollout {number}")
                yield number
                inner(f"rollout {number}")

    def consume():
        items = rollouts()
        for _ in items:
            inner("consumer")
            if ends == "closed":
                items.close()
        inner("consumer")

    async def async_consume():
        items = async_rollouts()
        async for _ in items:
            inner("consumer")
            if ends == "closed":
                await items.aclose()
        inner("consumer")

    with recording() as recorded:
        with trajectory(step=1, sample_index=0):
            asyncio.run(async_consume()) if asynchronous else consume()
        found = {item.name: item for item in recorded.trajectories()}
    whose = {
        name: [span.inputs["of"] for span in item.spans if span.name.endswith("inner")]
        for name, item in found.items()
    }
    if ends == "exhausted":
        own = {f"2/{n}/0": [f"rollout {n}"] * 2 for n in range(2)}
        assert whose == {"1/0/0": ["consumer"] * 3, **own}
        assert {item.status for item in found.values()} == {"ok"}
    else:
        assert whose == {"1/0/0": ["consumer"] * 2, "2/0/0": ["rollout 0"]}
        assert found["1/0/0"].status == "ok"
