"""What is recorded at all: sampling through the decorators, configuring again, and missing packages."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

import trackway
from trackway import ConfigError, carry, llm_trace, reward, rollout_trace, tool_trace, trajectory
from trackway.trace.capture import runtime
from trackway.trace.testing import recording


@llm_trace
async def generate():
    await asyncio.sleep(0)
    return {"token_ids": [1]}


@tool_trace
def tool():
    return 1


@rollout_trace
async def rollout():
    await generate()
    tool()
    await generate()
    tool()


# Whole groups


@pytest.mark.parametrize("round_", range(20))
def test_of_the_samples_that_fit_every_rollout_is_whole(round_):
    async def one(sample, number):
        await asyncio.sleep(0)
        with trajectory(step=3, sample_index=sample, rollout_n=number):
            await rollout()
            reward("r", 1)

    async def main():
        await asyncio.gather(*(one(sample, number) for number in range(4) for sample in range(8)))

    with recording(max_samples_per_step_per_worker=2) as rec:
        asyncio.run(main())
        found = rec.trajectories()
        assert rec.status().recorded == 48
    assert Counter(item.key.sample_index for item in found).most_common() == [
        (sample, 4) for sample, _ in Counter(item.key.sample_index for item in found).most_common()
    ]
    assert len(found) == 8
    assert all(len(item.spans) == 6 and item.rewards == {"r": 1.0} for item in found)


def test_of_the_samples_that_fit_every_rollout_is_whole_in_threads_too():
    def one(sample, gate):
        gate.wait()
        with trajectory(step=3, sample_index=sample):
            tool()

    with recording(max_samples_per_step_per_worker=2) as rec:
        gate = threading.Barrier(32)
        threads = [threading.Thread(target=one, args=(number % 8, gate)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = rec.trajectories()
    assert sorted(Counter(item.key.sample_index for item in found).values()) == [4, 4]


def test_one_decision_is_made_at_the_root_and_holds_for_everything_inside():
    def inside():
        tool()
        thread = threading.Thread(target=carry(tool))
        thread.start()
        thread.join()
        reward("r", 1)
        asyncio.run(generate())
        list(stream())

    @tool_trace
    def stream():
        yield tool()

    async def deep():
        return [item async for item in async_stream()]

    @tool_trace
    async def async_stream():
        yield tool()

    with recording(ratio=0.5) as rec:
        for sample in range(100):
            with trajectory(step=1, sample_index=sample) as opened:
                inside()
                asyncio.run(deep())
                assert opened.sampled == bool(opened.trace_id)
        found = rec.trajectories()
    assert 30 < len(found) < 70
    assert {len(item.spans) for item in found} == {1 + 2 + 1 + 2 + 2}
    assert all(item.rewards == {"r": 1.0} for item in found)


def test_calls_outside_of_a_trajectory_are_sampled_whole_as_well():
    with recording(ratio=0.5) as rec:
        for _ in range(200):
            asyncio.run(rollout())
        for _ in range(100):
            tool()
        found = rec.trajectories()
    sizes = Counter(len(item.spans) for item in found)
    assert set(sizes) == {5, 1}
    assert 60 < sizes[5] < 140
    assert 20 < sizes[1] < 80


def test_a_call_that_ends_after_a_rollout_that_was_left_out_is_left_out_too():
    async def late(go):
        await go.wait()
        tool()
        await generate()
        reward("late", 1)

    async def main():
        go = asyncio.Event()
        with trajectory(step=1, sample_index=1):
            task = asyncio.create_task(late(go))
            thread_work = carry(tool)
            await asyncio.sleep(0)
        go.set()
        await task
        await asyncio.to_thread(thread_work)

    with recording(ratio=0.0) as rec:
        asyncio.run(main())
        assert rec.trajectories() == []
        assert rec.status().recorded == 0


def test_a_rollout_that_is_left_out_leaves_no_mark_on_what_follows():
    with recording(keep_samples=[2], ratio=0.0) as rec:
        with trajectory(step=1, sample_index=1):
            with trajectory(step=1, sample_index=2):
                tool()
            with pytest.raises(ZeroDivisionError):
                rollout_trace(lambda: 1 / 0)()
        with trajectory(step=1, sample_index=2, rollout_n=1):
            tool()
        assert [(str(item.key), len(item.spans)) for item in rec.trajectories()] == [
            ("1/2/0", 2),
            ("1/2/1", 2),
        ]
    assert runtime.get() is None


def test_training_and_validation_have_budgets_of_their_own():
    with recording(max_samples_per_step_per_worker=4) as rec:
        for validate in (False, True):
            for sample in range(16):
                with trajectory(step=10, sample_index=sample, validate=validate):
                    tool()
        found = rec.trajectories()
    assert Counter(item.key.validate for item in found) == {False: 4, True: 4}


# Configured again


def stored(path):
    store = trackway.open_store(path)
    return sorted(summary.name for summary in store.query(all_attempts=True) if summary.key)


def record(step):
    with trajectory(step=step, sample_index=0):
        tool()


def test_configured_again_with_the_same_settings_nothing_changes(tmp_path):
    first = trackway.configure(store=tmp_path / "a", sync="off")
    recorder = runtime.get()
    assert trackway.configure(store=str(tmp_path / "a"), sync="off") == first
    assert runtime.get() is recorder


def test_configured_again_with_other_settings_they_hold_and_nothing_is_lost(tmp_path):
    trackway.configure(store=tmp_path / "a", sync="off")
    record(1)
    trackway.configure(store=tmp_path / "b", sync="off", ratio=0.0)
    record(2)
    trackway.configure(store=tmp_path / "b", sync="off")
    record(3)
    trackway.shutdown()
    record(4)
    trackway.configure(store=tmp_path / "a", sync="off")
    record(5)
    trackway.shutdown()
    trackway.shutdown()
    assert stored(tmp_path / "a") == ["1/0/0", "5/0/0"]
    assert stored(tmp_path / "b") == ["3/0/0"]


def test_a_wrong_second_configuration_leaves_the_first_in_force(tmp_path):
    trackway.configure(store=tmp_path / "a", sync="off")
    with pytest.raises(ConfigError, match="mlflow"):
        trackway.configure(store=tmp_path / "b", backend="mlfow")
    record(1)
    trackway.shutdown()
    assert stored(tmp_path / "a") == ["1/0/0"]
    assert not (tmp_path / "b").exists()


def test_a_store_that_cannot_be_written_is_an_error_of_configure(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match="cannot be written"):
        trackway.configure(store=tmp_path / "file" / "store", sync="off")
    tool()
    assert runtime.get() is None


def test_many_threads_that_configure_at_once_leave_one_recorder(tmp_path):
    gate = threading.Barrier(8)
    failures = []

    def configure(number):
        gate.wait()
        try:
            trackway.configure(store=tmp_path / f"s{number % 2}", sync="off")
            record(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=configure, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writers = [thread for thread in threading.enumerate() if thread.name == "trackway-writer"]
    trackway.shutdown()
    assert failures == []
    assert len(writers) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "trackway-writer"]
    known = {
        int(name.split("/")[0]) for number in range(2) for name in stored_if_any(tmp_path / f"s{number}")
    }
    assert known <= set(range(8))


def stored_if_any(path):
    return stored(path) if path.exists() else []


def test_a_rollout_that_outlives_its_recording_is_counted_and_shown_as_unfinished(tmp_path):
    trackway.configure(store=tmp_path / "a", sync="off")
    with trajectory(step=1, sample_index=0):
        tool()
        trackway.shutdown()
        tool()
        reward("late", 1)
    store = trackway.open_store(tmp_path / "a")
    found = store.load("1/0/0")
    assert found.status == "died"
    assert [span.name for span in found.spans] == ["trajectory", "tool"]
    status = store.status()
    assert status.dropped_by_reason == {"after shutdown": 1}
    assert status.recorded == status.exported + status.pending + status.dropped


# Nothing to record


def test_a_recording_in_which_nothing_happens_says_so(caplog):
    with recording():
        pass
    assert "no decorated function ran" in caplog.text
    caplog.clear()
    with recording(ratio=0.0):
        record(1)
    with recording():
        tool()
    assert "no decorated function ran" not in caplog.text


def test_functions_that_are_not_async_are_recorded_as_well():
    @rollout_trace
    def plain_rollout():
        return tool()

    with recording() as rec:
        for step in (1, 2):
            with trajectory(step=step, sample_index=0):
                plain_rollout()
        assert [[span.name for span in item.spans] for item in rec.trajectories()] == [
            ["trajectory", "plain_rollout", "tool"]
        ] * 2


# What costs nothing when it is off, and what is imported


def test_a_rollout_that_is_left_out_costs_a_look_up():
    """Compared within one run with the same call recorded: a ratio, so that no machine is too slow."""

    @tool_trace
    def call(argument):
        return argument

    payload = {"messages": [{"role": "user", "content": "x" * 100}] * 50}

    def clock(number=300):
        start = time.perf_counter()
        for _ in range(number):
            call(payload)
        return time.perf_counter() - start

    times = {}
    for ratio in (1.0, 0.0):
        with recording(ratio=ratio), trajectory(step=1, sample_index=1):
            times[ratio] = min(clock() for _ in range(7))
    assert times[0.0] < times[1.0] / 4


BLOCKED = """
import os, sys, threading
for name in ("mlflow", "weave", "wandb", "swanlab", "tensorboard", "IPython", "torch", "numpy",
             "transformers", "tokenizers", "PIL", "pydantic", "attr", "attrs", "pandas"):
    sys.modules[name] = None
environ, threads = dict(os.environ), threading.active_count()
import trackway
assert (dict(os.environ), threading.active_count()) == (environ, threads)
from trackway import llm_trace, trajectory

@llm_trace
def generate(prompt_ids):
    return {"token_ids": [4], "when": object()}

trackway.configure(store=sys.argv[1], sync="off", token2text=True)
with trajectory(step=1, sample_index=1):
    generate([1, 2, 3])
print(trackway.flush().recorded)
trackway.shutdown()
print(trackway.open_store(sys.argv[1]).load("1/1/0").turns[1].token_ids)
try:
    trackway.configure(store=sys.argv[1], backend="mlflow")
except trackway.ConfigError as error:
    print(error)
"""


def test_without_any_optional_package_it_records_and_names_what_is_missing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    recorded, ids, error = done.stdout.splitlines()
    assert (recorded, ids) == ("2", "(4,)")
    assert "pip install 'trackway[mlflow]'" in error
