"""Recording in several processes: forked, spawned, and handed a rollout of another process."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy
import pytest

import trackway
from trackway import (
    annotate,
    carry,
    extract,
    inject,
    llm_trace,
    reward,
    tool_trace,
    trajectory,
)
from trackway.trace import semconv
from trackway.trace.testing import recording

# Python 3.12 warns of every fork of a process with threads; that it works is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

fork = multiprocessing.get_context("fork")
spawn = multiprocessing.get_context("spawn")


@tool_trace
def tool(argument):
    return os.getpid(), argument


@llm_trace
def generate(prompt_ids):
    return {"token_ids": [len(prompt_ids)]}


def run(context, target, *args):
    process = context.Process(target=target, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def journal_lines(store):
    for path in sorted(Path(store).glob("journal/*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            yield path, json.loads(line)


def journal_spans(store):
    for path, line in journal_lines(store):
        for resource in line["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    yield path, span


# Fork


def work_in_child(store):
    tool("child")
    reward("from the child", 2)
    annotate(child=os.getpid())


def test_a_forked_child_writes_its_own_part_of_the_rollout(tmp_path):
    store = tmp_path / "store"
    trackway.configure(store=store, sync="off")
    with trajectory(step=1, sample_index=7, policy_version=3):
        tool("before")
        reward("before", 1)
        run(fork, work_in_child, store)
        tool("after")
        reward("after", 3)
    trackway.shutdown()
    found = trackway.open_store(store).load("1/7/0")
    tools = [span for span in found.spans if span.name == "tool"]
    assert [span.inputs["argument"] for span in tools] == ["before", "child", "after"]
    assert {span.parent_id for span in tools} == {found.spans[0].span_id}
    assert {span.attributes[semconv.SAMPLE_INDEX] for span in found.spans} == {7}
    assert {span.attributes[semconv.POLICY_VERSION] for span in found.spans} == {3}
    assert found.rewards == {"before": 1.0, "from the child": 2.0, "after": 3.0}
    assert found.annotations["child"] != os.getpid()
    assert found.status == "ok"
    ids = [span["spanId"] for _, span in journal_spans(store)]
    assert len(ids) == len(set(ids))
    writers = {path.name.rpartition(".0000")[0] for path, _ in journal_spans(store)}
    assert len(writers) == 2
    assert trackway.open_store(store).status().dropped == 0


def many_in_child(store, number):
    random.seed(0)
    numpy.random.seed(0)
    for rollout in range(25):
        with trajectory(step=number, sample_index=rollout):
            for argument in range(3):
                tool(argument)


@pytest.mark.parametrize("context", [fork, spawn], ids=["fork", "spawn"])
def test_ids_of_processes_with_the_same_seed_do_not_repeat(tmp_path, context, monkeypatch):
    store = tmp_path / "store"
    if context is fork:
        trackway.configure(store=store, sync="off")
        tool("in the parent")
    else:
        monkeypatch.setenv("TRACKWAY_STORE", str(store))
        monkeypatch.setenv("TRACKWAY_SYNC", "off")
    processes = [context.Process(target=many_in_child, args=(store, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    trackway.shutdown()
    opened = trackway.open_store(store)
    found = [opened.load(summary.trace_id) for summary in opened.query()]
    named = [item for item in found if item.key]
    assert sorted((item.key.step, item.key.sample_index) for item in named) == [
        (step, sample) for step in range(4) for sample in range(25)
    ]
    assert all(len(item.spans) == 4 for item in named)
    spans = [span["spanId"] for _, span in journal_spans(store)]
    assert len(set(spans)) == len(spans) == 400 + (context is fork)
    assert len({item.trace_id for item in found}) == len(found)


def test_recording_draws_from_no_random_generator():
    before = random.getstate(), numpy.random.get_state()
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            tool(1)
            reward("x", 1)
        random.setstate(before[0])
        ids = set()
        for _ in range(5):
            random.seed(1)
            tool(1)
        ids = {span.span_id for span in rec.spans()} | {item.trace_id for item in rec.trajectories()}
        random.setstate(before[0])
        with trajectory(step=1, sample_index=1):
            tool(1)
    assert len(ids) == 7 + 6
    after = random.getstate(), numpy.random.get_state()
    assert after[0] == before[0]
    assert all(numpy.array_equal(one, other) for one, other in zip(after[1], before[1], strict=True))


def fork_at_once(store):
    # Forks again before anything was recorded here, and leaves the block that its grandparent opened.
    tool("child")
    run(fork, work_in_child, store)


def test_a_child_of_a_child_belongs_to_the_same_rollout(tmp_path):
    store = tmp_path / "store"
    trackway.configure(store=store, sync="off")
    with trajectory(step=1, sample_index=1):
        run(fork, fork_at_once, store)
    trackway.shutdown()
    found = trackway.open_store(store).load("1/1/0")
    assert [span.inputs["argument"] for span in found.spans if span.name == "tool"] == ["child", "child"]
    assert found.rewards == {"from the child": 2.0}


def test_a_fork_that_leaves_the_block_writes_nothing_twice(tmp_path):
    store = tmp_path / "store"
    trackway.configure(store=store, sync="off")
    block = trajectory(step=1, sample_index=1)
    block.__enter__()
    tool(1)
    trackway.flush()
    pid = os.fork()
    block.__exit__(None, None, None)
    if pid == 0:
        trackway.shutdown()
        os._exit(0)
    os.waitpid(pid, 0)
    opened = trackway.open_store(store)
    assert opened.status().dropped == 0
    trackway.shutdown()
    assert len(list(journal_spans(store))) == len(opened.load("1/1/0").spans) == 2
    assert opened.status().dropped == 0


# Spawn, with a carrier


def extracted(store, carrier, results):
    trackway.configure(store=store, sync="off")
    with extract(carrier):
        tool("remote")
        generate([1, 2, 3])
        reward("remote", 5)
        results.put(inject())
    tool("outside")


def given_keywords(**keywords):
    return keywords


@pytest.fixture
def results():
    queue = spawn.SimpleQueue()
    yield queue
    queue.close()


def test_a_spawned_worker_continues_the_rollout_that_it_was_handed(tmp_path, results):
    store = tmp_path / "store"
    trackway.configure(store=store, sync="off")
    with trajectory(
        step=3, sample_index="a/b", rollout_n=2, validate=True, attempt=1, policy_version="v9"
    ) as rollout:
        carrier = inject()
        assert all(type(text) is str and text.isascii() for item in carrier.items() for text in item)
        run(spawn, extracted, store, carrier, results)
        passed_on = results.get()
    trackway.shutdown()
    opened = trackway.open_store(store)
    found = opened.load("val/3/a%2Fb/2@1")
    root, *inside = found.spans
    assert found.trace_id == rollout.trace_id
    assert [span.name for span in inside] == ["tool", "generate", "reward"]
    assert {span.parent_id for span in inside} == {root.span_id}
    names = (semconv.STEP, semconv.SAMPLE_INDEX, semconv.ROLLOUT_N, semconv.VALIDATE, semconv.ATTEMPT)
    for span in found.spans:
        assert [span.attributes[name] for name in names] == [3, "a/b", 2, True, 1]
        assert span.attributes[semconv.POLICY_VERSION] == "v9"
    assert found.rewards == {"remote": 5.0}
    assert found.generations == 1
    assert passed_on == carrier
    (alone,) = [item for item in map(opened.load, {s.trace_id for s in opened.query()}) if item.key is None]
    assert alone.spans[0].inputs == {"argument": "outside"}


@pytest.mark.parametrize("carrier", [None, {}, {"unrelated": "x"}])
def test_without_a_carrier_the_work_is_a_trace_of_its_own(carrier):
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            with extract(carrier):
                tool("alone")
            tool("inside")
        trajectories = rec.trajectories()
    assert sorted(
        [span.inputs["argument"] for span in item.spans if span.inputs] for item in trajectories
    ) == [
        ["alone"],
        ["inside"],
    ]


@pytest.mark.parametrize(
    "carrier",
    [
        {"trackway": "{"},
        {"trackway": "[1]"},
        {"trackway": '{"key": "1"}', "traceparent": f"00-{1:032x}-{1:016x}-01"},
    ],
)
def test_a_broken_carrier_is_told_and_harms_nothing(carrier, swallowing, caplog):
    with recording() as rec:
        with extract(carrier):
            assert tool(1)[1] == 1
        assert rec.trajectory().key is None
        assert rec.status().troubles == 1
    assert "this carrier does not come from inject()" in caplog.text


def test_a_trace_of_foreign_telemetry_can_be_joined():
    with recording() as rec:
        with extract({"traceparent": f"00-{7:032x}-{8:016x}-01"}):
            tool(1)
        found = rec.trajectory()
    assert found.trace_id == f"{7:032x}"
    assert found.spans[0].parent_id == f"{8:016x}"
    assert found.spans[0].attributes[semconv.UNATTACHED] is True


def test_outside_of_a_rollout_there_is_nothing_to_inject():
    assert inject() == {}
    with recording():
        assert inject() == {}
    with extract({"trackway": "{}"}), trajectory(step=1, sample_index=1):
        assert tool(1)[1] == 1


def test_a_rollout_that_is_not_sampled_is_not_sampled_elsewhere():
    with recording(ratio=0.0) as rec, trajectory(step=1, sample_index=1):
        carrier = inject()
    with recording() as rec:
        with extract(carrier):
            tool(1)
            reward("x", 1)
        tool(2)
        assert [span.inputs["argument"] for span in rec.spans()] == [2]


def configure_worker(store):
    trackway.configure(store=store, sync="off")


@pytest.mark.parametrize("context", [fork, spawn], ids=["fork", "spawn"])
def test_a_pool_of_processes_can_be_carried_into(tmp_path, context):
    store = tmp_path / "store"
    trackway.configure(store=store, sync="off")
    pool = ProcessPoolExecutor(2, mp_context=context, initializer=configure_worker, initargs=(store,))
    with pool:
        for sample in range(3):
            with trajectory(step=1, sample_index=sample):
                carried = carry(pool)
                pids = {pid for pid, _ in carried.map(tool, [sample] * 2)}
                assert os.getpid() not in pids
                assert carried.submit(given_keywords, a=1).result() == {"a": 1}
    trackway.shutdown()
    opened = trackway.open_store(store)
    for sample in range(3):
        found = opened.load(f"1/{sample}/0")
        assert [span.inputs for span in found.spans[1:]] == [{"argument": sample}] * 2
        assert {span.parent_id for span in found.spans[1:]} == {found.spans[0].span_id}


# Processes that nobody configured in code


PROGRAM = r"""
import trackway
@trackway.llm_trace
def answer(text):
    return text
with trackway.trajectory(step=1, sample_index=1):
    answer("\u4f60\u597d \U0001f600")
"""


def python(code, **environ):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, **environ}, timeout=60
    )


def test_a_process_records_because_of_its_environment(tmp_path):
    store = tmp_path / "store"
    done = python(PROGRAM, TRACKWAY_STORE=str(store), TRACKWAY_SYNC="off")
    assert (done.returncode, done.stderr) == (0, b"")
    found = trackway.open_store(store).load("1/1/0")
    assert found.spans[1].inputs == {"text": "你好 😀"}


def test_a_wrong_environment_is_told_and_harms_nothing(tmp_path):
    done = python(PROGRAM, TRACKWAY_STORE=str(tmp_path / "store"), TRACKWAY_MAX_LENGHT="5")
    assert done.returncode == 0
    assert b"nothing is recorded in this process" in done.stderr
    assert b"TRACKWAY_MAX_LENGHT" in done.stderr and b"Traceback" not in done.stderr


def test_text_is_utf8_whatever_the_locale(tmp_path):
    store = tmp_path / "store"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LANG": "C"}
    done = python(PROGRAM, TRACKWAY_STORE=str(store), TRACKWAY_SYNC="off", **ascii_only)
    assert (done.returncode, done.stderr) == (0, b"")
    (segment,) = (store / "journal").glob("*.0000.jsonl")
    assert "你好 😀" in segment.read_bytes().decode("utf-8", "strict")


def test_a_limit_in_the_environment_does_not_reach_the_spans(tmp_path):
    store = tmp_path / "store"
    code = (
        PROGRAM
        + """
    from opentelemetry import trace
    @trackway.tool_trace
    def busy():
        for number in range(200):
            trace.get_current_span().set_attribute(f"user.{number}", number)
    busy()
"""
    )
    limits = {
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "16",
        "OTEL_ATTRIBUTE_COUNT_LIMIT": "16",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "3",
        "OTEL_SDK_DISABLED": "true",
        "OTEL_TRACES_SAMPLER": "always_off",
        "OTEL_PYTHON_ID_GENERATOR": "nonsense",
    }
    done = python(code, TRACKWAY_STORE=str(store), TRACKWAY_SYNC="off", **limits)
    assert (done.returncode, done.stderr) == (0, b"")
    found = trackway.open_store(store).load("1/1/0")
    busy = found.spans[2]
    assert [busy.attributes[f"user.{number}"] for number in range(200)] == list(range(200))
    assert (busy.attributes[semconv.STEP], busy.attributes[semconv.SAMPLE_INDEX]) == (1, 1)
