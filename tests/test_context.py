"""Where a call belongs: tasks, threads, executors, nested and overlapping rollouts, foreign telemetry."""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import numpy
import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import trackway
from trackway import annotate, carry, detached, llm_trace, reward, rollout_trace, tool_trace, trajectory
from trackway.trace import semconv
from trackway.trace.testing import recording

TAGS = (
    semconv.STEP,
    semconv.SAMPLE_INDEX,
    semconv.ROLLOUT_N,
    semconv.ATTEMPT,
    semconv.VALIDATE,
    semconv.POLICY_VERSION,
)


@tool_trace
def tool(argument=None):
    return argument


@tool_trace
async def async_tool(argument=None):
    await asyncio.sleep(0)
    return argument


def tags(span):
    return tuple(span.attributes.get(name) for name in TAGS)


def names(found):
    return [span.name for span in found.spans]


# Tags


def test_every_span_carries_the_tags_with_their_types():
    with recording() as rec:
        for sample in (17, "17", "a/b é", numpy.int64(3), ""):
            with trajectory(
                step=4, sample_index=sample, rollout_n=2, validate=True, attempt=1, policy_version="v7"
            ) as rollout:
                tool()
            assert rollout.sampled and len(rollout.trace_id) == 32
        found = rec.trajectories()
    assert [tags(span) for item in found for span in item.spans] == [
        (4, sample, 2, 1, True, "v7") for sample in (17, "17", "a/b é", 3, "") for _ in range(2)
    ]
    assert [item.key.sample_index for item in found] == [17, "17", "a/b é", 3, ""]


class Mute:
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __bool__ = __int__ = __eq__ = __str__
    __hash__ = None


MUTE = quote(f'"<{__name__}.Mute>"', safe="")


@pytest.mark.parametrize(
    ("given", "key", "version"),
    [
        ({"step": "one"}, "-/17/0", None),
        ({"step": 1.5}, "-/17/0", None),
        ({"step": 10**20}, "-/17/0", None),
        ({"step": Mute()}, "-/17/0", None),
        ({"rollout_n": 2**63}, "1/17/0", None),
        ({"attempt": "x"}, "1/17/0", None),
        ({"sample_index": Mute()}, f"1/{MUTE}/0", None),
        ({"validate": "perhaps"}, "val/1/17/0", None),
        ({"validate": Mute()}, "1/17/0", None),
        ({"policy_version": 1.5}, "1/17/0", "1.5"),
        ({"policy_version": 2**63}, "1/17/0", str(2**63)),
        ({"policy_version": [1]}, "1/17/0", None),
    ],
)
def test_a_tag_that_is_none_is_left_out_noted_and_told_once(given, key, version, caplog):
    (name,) = given
    for _ in range(2):
        with trajectory(**{"step": 1, "sample_index": 17, **given}):
            tool()  # nothing is recorded
    assert caplog.text == ""
    with recording() as rec:
        for _ in range(2):
            with trajectory(**{"step": 1, "sample_index": 17, **given}):
                tool()
        found = rec.trajectories()[0]
    assert str(found.key) == key
    assert found.status == "ok"
    assert found.policy_versions == (() if version is None else (version,))
    assert [note.startswith(f"{name}=") for note in found.notes] == [True]
    assert caplog.text.count(f"was given {name}=") == 1


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"step": "5"}, "5/17/0"),
        ({"step": numpy.int64(5)}, "5/17/0"),
        ({"step": 5.0}, "5/17/0"),
        ({"rollout_n": None, "attempt": None}, "1/17/0"),
        ({"sample_index": 2**70}, f"1/%31{str(2**70)[1:]}/0"),
        ({"sample_index": ("a", 1)}, "1/%28%27a%27%2C%201%29/0"),
        ({"validate": "False"}, "1/17/0"),
        ({"validate": "true"}, "val/1/17/0"),
        ({"validate": 1}, "val/1/17/0"),
        ({"validate": numpy.bool_(False)}, "1/17/0"),
        ({"validate": None}, "1/17/0"),
        ({"name": 123, "experiment": 5, "run_id": 7}, "1/17/0"),
    ],
)
def test_a_tag_may_come_in_another_type(given, key, caplog):
    with recording() as rec:
        with trajectory(**{"step": 1, "sample_index": 17, **given}):
            tool()
        found = rec.trajectory()
    assert str(found.key) == key
    assert (found.status, found.notes) == ("ok", ())
    assert found.spans[0].name == str(given.get("name", "trajectory"))
    assert "was given" not in caplog.text


def test_step_zero_and_minus_one_are_steps():
    with recording() as rec:
        for step in (0, -1):
            with trajectory(step=step, sample_index=0, validate=True):
                tool()
        assert [item.key.step for item in rec.trajectories()] == [0, -1]


# Tasks


def test_rollouts_running_at_once_keep_to_themselves():
    order = random.Random(7)

    @rollout_trace
    async def rollout(question):
        await asyncio.sleep(order.uniform(0, 0.005))
        await step(question, "one")
        return {"answer": question}

    @rollout_trace
    async def step(question, label):
        await asyncio.sleep(order.uniform(0, 0.005))
        await generate(question)

    @llm_trace
    async def generate(question):
        await asyncio.sleep(order.uniform(0, 0.005))
        return {"token_ids": [question]}

    async def one(sample, number):
        with trajectory(step=1, sample_index=sample, rollout_n=number):
            await rollout(100 * sample + number)
            reward("own", 100 * sample + number)

    async def main():
        await asyncio.gather(*(one(sample, number) for sample in range(16) for number in range(4)))

    with recording() as rec:
        asyncio.run(main())
        found = rec.trajectories()
    assert len(found) == 64
    for item in found:
        own = 100 * item.key.sample_index + item.key.rollout_n
        assert [(depth, span.name) for depth, span in item.walk()] == [
            (0, "trajectory"),
            (1, "rollout"),
            (2, "step"),
            (3, "generate"),
        ]
        assert {tags(span)[:3] for span in item.spans} == {(1, item.key.sample_index, item.key.rollout_n)}
        assert item.spans[1].inputs == {"question": own}
        assert item.spans[1].outputs == {"answer": own}
        assert item.spans[0].inputs is None and item.spans[0].outputs is None
        assert [turn.token_ids for turn in item.turns] == [(own,)]
        assert item.rewards == {"own": float(own)}


def test_a_task_started_inside_belongs_to_the_rollout():
    async def main():
        with trajectory(step=1, sample_index=1):
            await asyncio.gather(
                async_tool(1), asyncio.create_task(async_tool(2)), asyncio.to_thread(tool, 3)
            )

    with recording() as rec:
        asyncio.run(main())
        found = rec.trajectory()
    assert {span.parent_id for span in found.spans[1:]} == {found.spans[0].span_id}
    assert len(found.spans) == 4


def test_long_lived_workers_keep_their_items_apart():
    """Workers that were started inside an open span record each item under its own name."""

    @rollout_trace
    async def process(item):
        await asyncio.sleep(0)
        if item == 7:
            raise ValueError("seven")

    async def worker(queue):
        while (item := await queue.get()) is not None:
            try:
                with trajectory(step=2, sample_index=item):
                    await process(item)
            except ValueError:
                pass

    @rollout_trace
    async def unrelated(queue):
        return [asyncio.create_task(worker(queue)) for _ in range(4)]

    async def main():
        queue = asyncio.Queue()
        with trajectory(step=1, sample_index="unrelated"):
            workers = await unrelated(queue)
        for item in [*range(20), *[None] * 4]:
            queue.put_nowait(item)
        await asyncio.gather(*workers)

    with recording() as rec:
        asyncio.run(main())
        first, *items = sorted(rec.trajectories(), key=lambda item: (item.key.step, item.start_ns))
    assert names(first) == ["trajectory", "unrelated"]
    assert sorted(item.key.sample_index for item in items) == list(range(20))
    for item in items:
        assert names(item) == ["trajectory", "process"]
        assert [span.attributes[semconv.SAMPLE_INDEX] for span in item.spans] == [item.key.sample_index] * 2
        assert item.status == ("error" if item.key.sample_index == 7 else "ok")
        assert item.notes == ()


async def _left_behind(started, go, work):
    started.set()
    await go.wait()
    work()


def run_after_the_rollout(work):
    async def main():
        started, go = asyncio.Event(), asyncio.Event()
        with trajectory(step=1, sample_index=1):
            task = asyncio.create_task(_left_behind(started, go, work))
            await started.wait()
        trackway.flush()  # the rollout is written before anything is added to it
        go.set()
        await task

    asyncio.run(main())


def test_a_call_after_the_end_of_its_rollout_stays_with_it_and_is_noted():
    with recording() as rec:
        run_after_the_rollout(tool)
        found = rec.trajectory()
    assert names(found) == ["trajectory", "tool"]
    assert found.status == "ok"
    assert found.spans[1].parent_id == found.spans[0].span_id
    assert found.spans[1].start_ns >= found.spans[0].end_ns
    assert found.notes == ("tool was called after the call around it had ended; see trackway.detached",)


def test_a_reward_after_the_end_of_its_rollout_is_kept():
    def late():
        reward("early", 2)
        reward("late", 3, explanation="the judge was slow")
        annotate(judged=True)

    with recording() as rec:
        run_after_the_rollout(late)
        found = rec.trajectory()
    assert found.rewards == {"early": 2.0, "late": 3.0}
    assert found.annotations == {"judged": True}
    assert found.status == "ok"


def test_a_detached_block_belongs_to_no_rollout():
    def work():
        with detached():
            tool("alone")

    with recording() as rec:
        run_after_the_rollout(work)
        with trajectory(step=1, sample_index=2):
            work()
            tool("inside")
        trajectories = rec.trajectories()
    alone = [item for item in trajectories if item.key is None]
    named = [item for item in trajectories if item.key is not None]
    assert [names(item) for item in alone] == [["tool"]] * 2
    assert all(item.spans[0].attributes[semconv.UNATTACHED] is True for item in alone)
    assert [names(item) for item in named] == [["trajectory"], ["trajectory", "tool"]]
    assert named[1].spans[1].inputs == {"argument": "inside"}


def test_a_trajectory_inside_another_is_a_root_of_its_own():
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            tool("outer")
            with trajectory(step=1, sample_index=2):
                tool("inner")
                reward("inner", 1)
            tool("outer again")
            reward("outer", 2)
        first, second = rec.trajectories()
    assert [span.inputs for span in first.spans[1:]] == [{"argument": "outer"}, {"argument": "outer again"}]
    assert [span.inputs for span in second.spans[1:]] == [{"argument": "inner"}]
    assert second.spans[0].parent_id is None
    assert (first.rewards, second.rewards) == ({"outer": 2.0}, {"inner": 1.0})


def test_a_block_that_raises_leaves_its_place():
    with recording() as rec:
        with pytest.raises(ValueError, match="no"), trajectory(step=1, sample_index=1):
            raise ValueError("no")
        tool()
        first, second = rec.trajectories()
    assert (first.status, first.error) == ("error", "ValueError: no")
    assert second.key is None


@pytest.mark.parametrize("sampled", [True, False])
def test_blocks_that_end_in_the_order_they_began_leave_nothing_behind(sampled):
    settings = {} if sampled else {"max_samples_per_step_per_worker": 0}
    with recording(**settings, keep_samples=["kept"]) as rec:
        outside = otel_context.get_current()
        blocks = [trajectory(step=1, sample_index=name) for name in ("a", "kept", "b")]
        for block in blocks:
            block.__enter__()
        for block in blocks:
            block.__exit__(None, None, None)
        assert otel_context.get_current() is outside
        assert trackway.inject() == {}
        tool()
        found = [item for item in rec.trajectories() if item.key]
    assert [str(item.key) for item in found] == (["1/a/0", "1/kept/0", "1/b/0"] if sampled else ["1/kept/0"])
    assert all(item.status == "ok" and len(item.spans) == 1 for item in found)


def test_a_block_that_ends_before_a_call_inside_it_leaves_nothing_behind():
    with recording() as rec:
        block = trajectory(step=1, sample_index="a")

        @tool_trace
        def ends_it():
            block.__exit__(None, None, None)

        block.__enter__()
        ends_it()
        tool()
        _, last = rec.trajectories()
    assert last.key is None


def test_one_block_entered_again_is_another_trajectory_each_time():
    block = trajectory(step=1, sample_index="a")
    with recording() as rec:
        with block as outer:
            tool()
            with block as inner:
                tool()
            tool()
        with block as later:
            tool()
        tool()
        *found, last = rec.trajectories()
    assert [item.trace_id for item in found] == [outer.trace_id, inner.trace_id, later.trace_id]
    assert [(str(item.key), item.status) for item in found] == [
        ("1/a/0", "ok"),
        ("1/a/0@1", "ok"),
        ("1/a/0@2", "ok"),
    ]
    assert [len(item.spans) for item in found] == [3, 2, 2]
    assert last.key is None


def test_one_block_that_two_tasks_share_ends_the_one_of_each():
    block = trajectory(step=1, sample_index="a")

    async def task(turns):
        with block as rollout:
            for _ in range(turns):
                await asyncio.sleep(0)
            tool()
        return rollout.trace_id

    async def main():
        return await asyncio.gather(task(2), task(9))

    with recording() as rec:
        ids = asyncio.run(main())
        found = rec.trajectories()
    assert [item.trace_id for item in found] == ids
    assert [(item.status, len(item.spans)) for item in found] == [("ok", 2)] * 2


def test_a_block_that_another_task_ends_leaves_that_tasks_place_alone():
    async def episode():
        with trajectory(step=1, sample_index=1):
            tool("first")
            yield

    async def closing(generator):
        with trajectory(step=1, sample_index=2):
            await generator.aclose()
            tool("second")

    async def main():
        generator = episode()
        await asyncio.create_task(generator.__anext__())
        await asyncio.create_task(closing(generator))
        tool("outside")

    with recording() as rec:
        asyncio.run(main())
        found = rec.trajectories()
    assert [[span.inputs["argument"] for span in item.spans if span.inputs] for item in found] == [
        ["first"],
        ["second"],
        ["outside"],
    ]
    assert [item.status for item in found] == ["cancelled", "ok", "ok"]


# Threads


def test_work_that_is_carried_belongs_to_the_rollout():
    async def main(pool):
        loop = asyncio.get_running_loop()
        with trajectory(step=3, sample_index=7, rollout_n=1):
            await loop.run_in_executor(None, carry(tool), 1)
            await loop.run_in_executor(carry(pool), tool, 2)
            assert carry(pool).submit(tool, 3).result() == 3
            assert list(carry(pool).map(tool, [4, 5])) == [4, 5]
            thread = threading.Thread(target=carry(tool), kwargs={"argument": 6})
            thread.start()
            thread.join()
            await asyncio.to_thread(tool, 7)

    with ThreadPoolExecutor(2) as pool, recording() as rec:
        asyncio.run(main(pool))
        found = rec.trajectory()
    assert sorted(span.inputs["argument"] for span in found.spans[1:]) == [1, 2, 3, 4, 5, 6, 7]
    assert {span.parent_id for span in found.spans[1:]} == {found.spans[0].span_id}
    assert {tags(span)[:3] for span in found.spans} == {(3, 7, 1)}


def test_work_that_is_not_carried_is_unattached_and_nobody_elses():
    def both(pool):
        return pool.submit(tool, "pool").result()

    async def main(pool):
        loop = asyncio.get_running_loop()
        with trajectory(step=3, sample_index=7):
            await loop.run_in_executor(None, tool, "loop")
            both(pool)
            thread = threading.Thread(target=tool, args=("thread",))
            thread.start()
            thread.join()

    with ThreadPoolExecutor(1) as pool, recording() as rec:
        with trajectory(step=3, sample_index="first user of the thread"):
            carry(pool).submit(tool, "carried").result()
        asyncio.run(main(pool))
        trajectories = rec.trajectories()
    alone = [item for item in trajectories if item.key is None]
    assert sorted(item.spans[0].inputs["argument"] for item in alone) == ["loop", "pool", "thread"]
    for item in alone:
        assert item.spans[0].attributes[semconv.UNATTACHED] is True
        assert tags(item.spans[0]) == (None,) * 6
    assert [names(item) for item in trajectories if item.key] == [["trajectory", "tool"], ["trajectory"]]


def test_a_carried_function_leaves_the_threads_own_place_alone():
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            carried = carry(tool)
        with trajectory(step=1, sample_index=2):
            carried("first")
            tool("second")
        first, second = rec.trajectories()
    assert [span.inputs for span in first.spans[1:]] == [{"argument": "first"}]
    assert [span.inputs for span in second.spans[1:]] == [{"argument": "second"}]


def test_a_carried_coroutine_function_is_one():
    carried_outside = carry(async_tool)

    async def main():
        with trajectory(step=1, sample_index=1):
            carried = carry(async_tool)
        assert asyncio.iscoroutinefunction(carried)
        assert carried.__name__ == "async_tool"
        with trajectory(step=1, sample_index=2):
            assert await asyncio.gather(carried("first"), async_tool("second")) == ["first", "second"]
            await carried_outside("outside")

    with recording() as rec:
        asyncio.run(main())
        arguments = {
            item.key and item.key.sample_index: [
                span.inputs["argument"] for span in item.spans if span.inputs
            ]
            for item in rec.trajectories()
        }
    assert arguments == {1: ["first"], 2: ["second"], None: ["outside"]}


def test_carry_passes_results_and_errors_through():
    def work(*args, **kwargs):
        """Do it."""
        if kwargs:
            raise error
        return args

    error = KeyError("x")
    carried = carry(work)
    assert carried(1, 2) == (1, 2)
    assert (carried.__name__, carried.__doc__) == ("work", "Do it.")
    with pytest.raises(KeyError) as caught:
        carried(x=1)
    assert caught.value is error


@pytest.mark.parametrize("work", [7, (lambda: (yield))])
def test_what_cannot_be_carried_is_refused(work):
    with pytest.raises(TypeError, match="carry needs a function"):
        carry(work)


def test_threads_that_record_at_once_do_not_mix():
    def one(sample):
        for number in range(20):
            with trajectory(step=1, sample_index=sample, rollout_n=number):
                tool(sample)
                reward("own", sample)

    with recording() as rec:
        threads = [threading.Thread(target=one, args=(sample,)) for sample in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = rec.trajectories()
    assert len({item.trace_id for item in found}) == 160
    for item in found:
        assert item.spans[1].inputs == {"argument": item.key.sample_index}
        assert item.rewards == {"own": float(item.key.sample_index)}


# Policy versions


def test_step_and_version_are_those_of_the_start_however_late_they_are_written():
    async def one(step, running, proceed):
        with trajectory(step=step, sample_index=0, policy_version=step):
            tool("early")
            running.set()
            await proceed.wait()
            tool("late")

    async def main():
        proceed = asyncio.Event()
        running = [asyncio.Event() for _ in range(4)]
        tasks = [
            asyncio.create_task(one(step, event, proceed))
            for step, event in zip((3, 4, 5, 6), running, strict=True)
        ]
        for event in running:
            await event.wait()
        proceed.set()
        await asyncio.gather(*tasks)

    with recording() as rec:
        asyncio.run(main())
        found = rec.trajectories()
    assert [(item.key.step, item.policy_versions) for item in found] == [(n, (n,)) for n in (3, 4, 5, 6)]


def test_a_version_that_changes_on_the_way_is_seen_span_by_span():
    with recording() as rec:
        with trajectory(step=3, sample_index=0, policy_version=3):
            tool("old")
            annotate(policy_version=4)
            tool("new")
            annotate(policy_version=numpy.int64(5), why="weights were synced")

            def late():
                annotate(policy_version=6)

            late_call = carry(late)
        late_call()
        found = rec.trajectory()
    assert [span.attributes[semconv.POLICY_VERSION] for span in found.spans] == [3, 3, 4]
    assert found.spans[0].attributes[semconv.POLICY_VERSION_END] == 5
    assert found.policy_versions == (3, 4, 5)
    assert found.annotations == {"why": "weights were synced"}
    assert found.key.step == 3


def test_a_version_that_is_none_does_no_harm(caplog):
    with recording() as rec:
        with trajectory(step=1, sample_index=0, policy_version=1):
            annotate(policy_version=[2])
            tool()
            annotate(policy_version=2**64)
            tool()
        found = rec.trajectory()
    assert found.policy_versions == (1, str(2**64))
    assert [note.startswith("policy_version=") for note in found.notes] == [True, True]
    assert "annotate() was given a version that is none" in caplog.text


# Rewards and annotations


def test_rewards_of_any_kind_of_number():
    torch = pytest.importorskip("torch")
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            tool()
            reward("int", 1)
            reward("numpy", numpy.float32(0.5))
            reward("torch", torch.tensor([0.25]))
            reward("bool", True)
            reward("nan", float("nan"))
            reward("inf", float("-inf"))
            reward("verdict", "good", explanation="well done")
            reward("int", 2)
        found = rec.trajectory()
    nan = found.rewards.pop("nan")
    assert nan != nan
    assert found.rewards == {
        "int": 2.0,
        "numpy": 0.5,
        "torch": 0.25,
        "bool": 1.0,
        "inf": float("-inf"),
        "verdict": "good",
    }
    explained = [event.attributes.get(semconv.EVALUATION_EXPLANATION) for event in found.spans[0].events]
    assert [item for item in explained if item] == ["well done"]


def test_rewards_and_annotations_of_threads_come_together():
    def judge(number):
        reward(f"judge {number}", number)
        annotate(**{f"note {number}": [number]})

    with ThreadPoolExecutor(8) as pool, recording() as rec:
        with trajectory(step=1, sample_index=1):
            list(carry(pool).map(judge, range(200)))
        found = rec.trajectory()
    assert found.rewards == {f"judge {number}": float(number) for number in range(200)}
    assert found.annotations == {f"note {number}": [number] for number in range(200)}


def test_a_reward_outside_of_any_rollout_is_told_once(caplog):
    with recording() as rec:
        reward("lost", 1)
        reward("lost", 1)
        annotate(lost=1)
        assert rec.trajectories() == []
    told = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert [text for text in told if "rollout" in text] == [
        "reward() was called outside of any rollout and is not recorded",
        "annotate() was called outside of any rollout and is not recorded",
    ]


def test_without_a_recording_nothing_is_needed():
    reward("x", object())
    annotate(policy_version="new", x=1)
    with trajectory(step=1, sample_index=1, experiment="e") as rollout:
        reward("x", 1)
    assert not rollout.sampled
    with detached():
        assert carry(tool)(1) == 1


# Foreign telemetry


def test_the_global_provider_and_its_spans_are_left_alone(caplog):
    before = otel.get_tracer_provider()
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("user")

    @tool_trace
    def nested():
        with tracer.start_as_current_span("the user's inside"):
            tool("deep")

    with recording() as rec:
        with tracer.start_as_current_span("the user's outside") as outside:
            with trajectory(step=1, sample_index=1):
                nested()
            assert otel.get_current_span() is outside
        found = rec.trajectory()
    assert otel.get_tracer_provider() is before
    theirs = {span.name: span for span in exporter.get_finished_spans()}
    assert set(theirs) == {"the user's inside", "the user's outside"}
    assert names(found) == ["trajectory", "nested", "tool"]
    root, call, deep = found.spans
    assert root.parent_id is None
    assert deep.parent_id == call.span_id
    inside = theirs["the user's inside"]
    assert f"{inside.parent.span_id:016x}" == call.span_id
    assert f"{inside.context.trace_id:032x}" == found.trace_id
    assert theirs["the user's outside"].parent is None
    assert "provider" not in caplog.text.lower()


def test_attributes_that_other_instrumentation_sets_are_kept_and_cannot_displace_the_tags(monkeypatch):
    for name in (
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_SPAN_EVENT_COUNT_LIMIT",
    ):
        monkeypatch.setenv(name, "16")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "10")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=somebody")

    @tool_trace
    def busy():
        span = otel.get_current_span()
        for number in range(200):
            span.set_attribute(f"user.{number}", "a long value")
        span.add_event("noticed", {"what": "it"})
        span.set_attribute(semconv.STEP, 99)

    with recording() as rec:
        with trajectory(step=5, sample_index="s", rollout_n=3, policy_version=2):
            busy()
        found = rec.trajectory()
    span = found.spans[1]
    assert tags(span) == (5, "s", 3, 0, False, 2)
    assert [span.attributes[f"user.{number}"] for number in range(200)] == ["a long value"] * 200
    assert [event.name for event in span.events] == ["noticed"]
    assert span.resource["service.name"] == "trackway"


# Experiment and run


def test_the_destination_is_the_one_in_force_when_the_rollout_started(tmp_path):
    store = tmp_path / "store"
    trackway.configure(store=store, sync="off", project="p", experiment="first")
    with trajectory(step=1, sample_index=0):
        tool()
        trackway.configure(store=store, sync="off", project="q", experiment="second", run_id="r2")
        tool("after the change")
        reward("after the change", 1)
    with trajectory(step=1, sample_index=1, experiment="its own", run_id="r3"):
        tool()
    with trajectory(step=1, sample_index=2):
        tool()
    trackway.shutdown()
    opened = trackway.open_store(store)
    first, second, third = (opened.load(f"1/{sample}/0") for sample in range(3))
    assert (first.project, first.experiment, first.run_id) == ("p", "first", None)
    assert (first.status, len(first.spans), first.rewards) == ("ok", 3, {"after the change": 1.0})
    assert (second.project, second.experiment, second.run_id) == ("q", "its own", "r3")
    assert (third.project, third.experiment, third.run_id) == ("q", "second", "r2")


def test_runs_named_by_threads_stay_apart():
    def one(run):
        for number in range(50):
            with trajectory(step=1, sample_index=run, rollout_n=number, run_id=run):
                tool()

    with recording() as rec:
        threads = [threading.Thread(target=one, args=(run,)) for run in ("run-a", "run-b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = rec.trajectories()
    assert len(found) == 100
    assert all(item.run_id == item.key.sample_index for item in found)


@pytest.mark.slow
def test_the_active_mlflow_run_is_bound_at_the_start_and_carried_into_threads(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")

    def one(sample):
        with trajectory(step=1, sample_index=sample):
            tool()

    def own_run(sample):
        with mlflow.start_run() as run:
            one(sample)
        return run.info.run_id

    with recording(backend="mlflow") as rec:
        with ThreadPoolExecutor(4) as pool:
            with mlflow.start_run() as run:
                list(carry(pool).map(one, range(4)))
                with trajectory(step=1, sample_index="here"):
                    mlflow.end_run()
                    tool()
            own = list(pool.map(own_run, ["a", "b"]))
            list(pool.map(one, ["none"]))
        runs = {item.key.sample_index: item.run_id for item in rec.trajectories()}
    assert {runs[sample] for sample in (0, 1, 2, 3, "here")} == {run.info.run_id}
    assert [runs["a"], runs["b"]] == own
    assert runs["none"] is None


@pytest.mark.parametrize(
    "touch",
    [
        lambda span: span.set_attribute(5, 6),
        lambda span: span.set_attribute(None, "x"),
        lambda span: span.set_attribute("list", cyclic()),
        lambda span: span.set_attributes(None),
        lambda span: span.add_event("odd", {7: "x", "fine": 1}, timestamp=1.5),
        lambda span: span.add_event(None, "no mapping", timestamp="now"),
        lambda span: span.record_exception(UnspeakableError()),
        lambda span: span.add_link(span.get_span_context()),
        lambda span: span.update_name(None),
        lambda span: span.set_status(7),
        lambda span: span.end(1.5),
        lambda span: span.end("now"),
        lambda span: span.end(2**80),
    ],
)
@pytest.mark.filterwarnings("error")
def test_whatever_other_instrumentation_does_to_a_span_the_rollout_is_whole(touch):
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            touch(otel.get_current_span())
            tool("inside")
        status = rec.status()
        found = rec.trajectory()
    assert (str(found.key), found.status, names(found)) == ("1/1/0", "ok", ["trajectory", "tool"])
    assert (status.recorded, status.exported, status.dropped) == (2, 2, 0)
    assert 0 <= found.root.duration_ns < 60e9


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("not now")


def cyclic():
    items = [1]
    items.append(items)
    return items
