"""The journal on disk, its index, and what a reader gets back."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

import trackway
from trackway import (
    StoreError,
    TrajectoryKey,
    annotate,
    llm_trace,
    open_store,
    reward,
    rollout_trace,
    tool_trace,
)
from trackway import trajectory as named
from trackway.trace.store import Store, journal, otlp
from trackway.trace.testing import recording

from .programs import wait_until


@llm_trace
def generate(prompt_ids: list[int], answer: list[int]) -> dict[str, Any]:
    return {"token_ids": answer, "log_probs": [-0.5] * len(answer), "finish_reason": "stop"}


@tool_trace
def lookup(word: str) -> str:
    if word == "missing":
        raise KeyError(word)
    return f"found {word}"


@rollout_trace
def rollout(turns: int = 2, word: str = "x") -> list[int]:
    ids = list(range(100, 120))
    for turn in range(turns):
        ids = ids + generate(ids, [turn, turn, turn])["token_ids"]
        try:
            ids = [*ids, len(lookup(word))]
        except KeyError:
            ids = [*ids, 0]
    return ids


def record(**key: Any) -> None:
    with named(**key):
        rollout()


def test_every_line_of_a_journal_is_an_otlp_traces_object_of_one_trace() -> None:
    with recording() as recorded:
        for number in range(3):
            with named(step=1, sample_index=f"s{number}", policy_version=7):
                rollout(word="missing")
                reward("r", float("nan"))
                annotate(note={"a": [1, None]})
        trackway.flush()
        lines = [line for path in (recorded.path / "journal").glob("*.0*.jsonl") for line in path.open()]
        assert lines
        for line in lines:
            data = json_format.Parse(line, TracesData())
            spans = [
                span for item in data.resource_spans for scope in item.scope_spans for span in scope.spans
            ]
            assert len({span.trace_id for span in spans}) == 1
            assert all(span.end_time_unix_nano > span.start_time_unix_nano for span in spans)


def test_a_trajectory_reads_back_whole() -> None:
    with recording() as recorded:
        with named(step=3, sample_index=17, rollout_n=2, policy_version=9):
            rollout(turns=3)
            reward("answer", 1.0)
            reward("format", 0.25)
            annotate(source="unit")
        found = recorded.trajectory()
    assert found.key == TrajectoryKey(3, 17, 2)
    assert (found.status, found.reward, found.rewards) == ("ok", 1.25, {"answer": 1.0, "format": 0.25})
    assert found.annotations == {"source": "unit"}
    assert found.policy_versions == (9,)
    assert [turn.role for turn in found.turns] == ["user", *["assistant", "tool"] * 3]
    assert [turn.text for turn in found.turns if turn.role == "tool"] == ["found x"] * 3
    assert [call.arguments for call in found.tool_calls] == [{"word": "x"}] * 3
    # Each turn holds the tokens it added, a generation also all that it was given.
    last = [turn for turn in found.turns if turn.role == "assistant"][-1]
    assert last.prompt_ids == (*range(100, 120), 0, 0, 0, 7, 1, 1, 1, 7)
    assert last.token_ids == (2, 2, 2)
    assert last.logprobs == (-0.5, -0.5, -0.5)
    assert last.finish_reason == "stop"


def test_a_failing_tool_is_an_error_of_its_span_and_not_of_the_rollout() -> None:
    with recording() as recorded:
        with named(step=1, sample_index=1):
            rollout(turns=1, word="missing")
        found = recorded.trajectory()
    assert found.status == "ok"
    assert found.errors == 1
    (call,) = found.tool_calls
    assert call.error == "KeyError: 'missing'"
    assert call.result is None
    assert found.turns[-1].error == call.error


def test_the_type_of_a_sample_id_is_kept_and_both_are_found() -> None:
    with recording() as recorded:
        record(step=1, sample_index=17)
        record(step=1, sample_index="17")
        trackway.flush()
        store = open_store(recorded.path)
        assert [summary.sample_index for summary in store.query(sample=17)] == [17, "17"]
        assert store.load("1/17/0").key == TrajectoryKey(1, 17, 0)
        assert store.load("1/%317/0").key == TrajectoryKey(1, "17", 0)
        assert store.load(TrajectoryKey(1, "17", 0)).key == TrajectoryKey(1, "17", 0)


def test_filters_compare_numbers_as_numbers() -> None:
    with recording() as recorded:
        for step in (2, 10):
            for sample in (1, 10):
                with named(step=step, sample_index=sample, validate=step == 10):
                    reward("reward", step / 10)
        trackway.flush()
        store = open_store(recorded.path)
        names = lambda **where: [summary.name for summary in store.query(**where)]  # noqa: E731
        assert names() == ["2/1/0", "2/10/0", "val/10/1/0", "val/10/10/0"]
        assert names(sample=1) == ["2/1/0", "val/10/1/0"]
        assert names(step=10, sample=10) == ["val/10/10/0"]
        assert names(validate=False) == ["2/1/0", "2/10/0"]
        assert names(min_reward=0.5) == ["val/10/1/0", "val/10/10/0"]
        assert names(max_reward=0.5, limit=1) == ["2/1/0"]
        assert names(rollout=1) == []
        assert names(newest=True)[0] == "val/10/10/0"


def test_a_repeated_key_becomes_a_later_attempt_and_the_latest_is_shown() -> None:
    with recording() as recorded:
        for value in (0.0, 1.0, 2.0):
            with named(step=8, sample_index=1):
                reward("reward", value)
        with named(step=9, sample_index=1, attempt=4):
            pass
        trackway.flush()
        store = open_store(recorded.path)
        assert [summary.name for summary in store.query()] == ["8/1/0@2", "9/1/0@4"]
        assert [summary.name for summary in store.query(step=8, all_attempts=True)] == [
            "8/1/0",
            "8/1/0@1",
            "8/1/0@2",
        ]
        assert store.load("8/1/0").reward == 2.0
        assert store.load("8/1/0@0").reward == 0.0
        assert store.load("8/1/0@1").reward == 1.0
        assert store.load("8/1/0").key == TrajectoryKey(8, 1, 0, attempt=2)


def test_a_trace_is_found_by_a_beginning_of_its_id_and_a_near_key_is_suggested() -> None:
    with recording() as recorded:
        record(step=1, sample_index=17)
        trace_id = recorded.trajectory().trace_id
        store = open_store(recorded.path)
        assert store.load(trace_id[:8]).trace_id == trace_id
        with pytest.raises(StoreError, match="1/17/0"):
            store.load("1/17/3")
        with pytest.raises(StoreError, match="not a trajectory key"):
            store.load("17")


def test_a_rollout_that_runs_is_seen_and_one_whose_process_was_killed_is_closed_by_the_reader(
    tmp_path: Path,
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent("""
        import time, trackway
        trackway.configure(store="store", sync="off")
        @trackway.tool_trace
        def quick(): return "done"
        @trackway.rollout_trace
        def hang():
            quick()
            print("inside", flush=True)
            time.sleep(600)
        with trackway.trajectory(step=5, sample_index="a", policy_version=2):
            trackway.reward("so far", 0.5)
            hang()
        """)
    )
    worker = subprocess.Popen([sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    try:
        assert worker.stdout.readline() == "inside\n"
        store = open_store(tmp_path / "store")
        found = wait_until(lambda: [item for item in store.query(status="running") if item.step == 5])
        assert [summary.name for summary in found] == ["5/a/0"]
        running = wait_until(lambda: store.load("5/a/0") if len(store.load("5/a/0").spans) == 3 else None)
        assert {span.name: span.status for span in running.spans} == {
            "trajectory": "running",
            "hang": "running",
            "quick": "ok",
        }
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    assert [summary.status for summary in store.query()] == ["died"]
    dead = store.load("5/a/0")
    assert dead.status == "died"
    assert {span.name: span.status for span in dead.spans} == {
        "trajectory": "died",
        "hang": "died",
        "quick": "ok",
    }
    assert dead.root is not None
    assert "process ended" in str(dead.root.error)
    assert dead.rewards == {"so far": 0.5}
    assert list(store.query(status="running")) == []


def test_a_torn_line_is_skipped_counted_and_what_follows_is_read() -> None:
    with recording() as recorded:
        record(step=1, sample_index=1)
        trackway.flush()
        record(step=1, sample_index=2)
        trackway.flush()
        trackway.shutdown()
        for path in recorded.path.glob("index.sqlite*"):
            path.unlink()
        (segment,) = journal.segments(recorded.path)
        lines = segment.path.read_bytes().splitlines(keepends=True)
        half = lines[0][: len(lines[0]) // 2]
        segment.path.write_bytes(half + b"\n" + b"".join(lines) + half)
        store = open_store(recorded.path)
        assert [summary.name for summary in store.query()] == ["1/1/0", "1/2/0"]
        # One in the middle, and the last one, which nobody can finish any more.
        assert store.status().torn_lines == 2


def test_the_index_can_be_deleted_damaged_or_of_another_version() -> None:
    with recording() as recorded:
        record(step=1, sample_index=1)
        trackway.flush()
        for damage in (None, b"not a database at all" * 100):
            store = open_store(recorded.path)
            assert [summary.name for summary in store.query()] == ["1/1/0"]
            store.close()
            for path in recorded.path.glob("index.sqlite*"):
                path.unlink()
            if damage:
                (recorded.path / "index.sqlite").write_bytes(damage)
        store = open_store(recorded.path)
        assert [summary.name for summary in store.query()] == ["1/1/0"]
        store.close()
        with sqlite3.connect(recorded.path / "index.sqlite") as old:
            old.execute("PRAGMA user_version = 999")
        old.close()
        assert [summary.name for summary in open_store(recorded.path).query()] == ["1/1/0"]


def test_segments_rotate_and_a_sequence_is_whole_across_them() -> None:
    with recording(max_segment_bytes=4_096) as recorded:
        with named(step=1, sample_index=1):
            ids = list(range(1_000))
            for turn in range(6):
                ids = ids + generate(ids, [turn] * 20)["token_ids"]
                trackway.flush()
        found = recorded.trajectory()
        assert len(journal.segments(recorded.path)) > 2
    last = [turn for turn in found.turns if turn.role == "assistant"][-1]
    assert list(last.prompt_ids + last.token_ids) == ids


def test_a_prompt_costs_what_it_adds_and_not_what_it_repeats() -> None:
    def size(turns: int) -> int:
        with recording() as recorded:
            with named(step=1, sample_index=1):
                ids = list(range(50_000, 54_000))
                for turn in range(turns):
                    ids = ids + generate(ids, [60_000 + turn] * 50)["token_ids"]
            trackway.flush()
            return sum(segment.path.stat().st_size for segment in journal.segments(recorded.path))

    few, many = size(2), size(20)
    # Eighteen more turns of 50 tokens; the 4,000 of the prompt stand there once.
    assert many - few < 18 * 50 * 60
    assert few < 4_000 * 12


def test_a_drifted_prompt_is_kept_exactly_with_the_place_where_it_parts() -> None:
    with recording() as recorded:
        with named(step=1, sample_index=1):
            first = list(range(40))
            generate(first, [1, 2, 3])
            generate([*range(30), 999, *range(31, 40), 1, 2, 3, 50], [4])
        found = recorded.trajectory()
    second = [span for span in found.spans if span.kind == "llm"][1]
    assert second.prompt_ids == (*range(30), 999, *range(31, 40), 1, 2, 3, 50)
    assert str(second.attributes["trackway.prompt.base"]).endswith(":30")


def test_a_store_that_cannot_be_written_can_still_be_read() -> None:
    with recording() as recorded:
        record(step=1, sample_index=1)
        trackway.shutdown()
        for path in recorded.path.glob("index*"):
            path.unlink()
        for path in [recorded.path, *recorded.path.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        recorded.path.parent.chmod(0o755)
        # Root may write anywhere, so the reader becomes somebody who may not.
        code = textwrap.dedent(f"""
            import os, trackway
            trackway.open_store
            if os.geteuid() == 0:
                os.setgroups([])
                os.setuid(65534)
            print([found.name for found in trackway.open_store({str(recorded.path)!r}).query()])
        """)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
        for path in [recorded.path, *recorded.path.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        assert not list(recorded.path.glob("index*"))
    assert done.stdout.strip() == "['1/1/0']", done.stderr


@pytest.mark.parametrize(
    "counters",
    ["nonsense", "[]", '{"recorded": "x", "written": null, "dropped": 7}', '{"dropped": {"why": "x"}}'],
)
def test_damaged_counters_take_nothing_else_along(counters: str) -> None:
    with recording() as recorded:
        record(step=1, sample_index=1)
        recorded.status()
        for path in (recorded.path / "journal").glob("*[0-9a-f].json"):
            path.write_text(counters)
        status = open_store(recorded.path).status()
        assert (status.recorded, status.exported, status.dropped, status.trajectories) == (6, 6, 0, 1)
        assert len(status.writers) == 1


def test_a_missing_or_foreign_directory_is_said_to_be_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="is not a store"):
        open_store(tmp_path)


def test_counts_add_up_and_drops_are_counted_exactly() -> None:
    with recording(max_queue_bytes=40_000, queue_policy="drop") as recorded:
        writer = trackway.trace.capture.runtime.get().writer
        # Hold the journal back, so that the queue fills.
        append, writer._journal.append = (
            writer._journal.append,
            lambda lines: (time.sleep(0.2), append(lines)),
        )
        with named(step=1, sample_index=1):
            for _ in range(500):
                lookup("x")
        status = recorded.status()
        (found,) = recorded.trajectories()
    assert status.recorded == 501
    assert status.dropped > 0
    assert found.status == "ok"
    assert found.notes == (f"{status.dropped} spans of this rollout were dropped: the queue was full",)
    assert status.dropped_by_reason == {"queue full": status.dropped}
    assert status.recorded == status.exported + status.pending + status.dropped


def test_a_full_queue_makes_the_caller_wait_when_so_configured() -> None:
    with recording(max_queue_bytes=40_000, queue_policy="block", queue_timeout=30.0) as recorded:
        with named(step=1, sample_index=1):
            for _ in range(500):
                lookup("x")
        status = recorded.status()
    assert (status.recorded, status.dropped) == (501, 0)


def test_many_processes_write_one_store_at_once(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys, trackway
        trackway.configure(store="store", sync="off")
        for sample in range(20):
            with trackway.trajectory(step=1, sample_index=sample, rollout_n=int(sys.argv[1])):
                trackway.reward("reward", sample)
    """)
    workers = [subprocess.Popen([sys.executable, "-c", code, str(n)], cwd=tmp_path) for n in range(6)]
    store = None
    while any(worker.poll() is None for worker in workers):
        # Readers and the index are at work meanwhile.
        if (tmp_path / "store" / "journal").is_dir():
            store = store or open_store(tmp_path / "store")
            list(store.query())
    assert [worker.returncode for worker in workers] == [0] * 6
    found = list(open_store(tmp_path / "store").query())
    assert sorted((item.sample_index, item.rollout_n) for item in found) == [
        (sample, n) for sample in range(20) for n in range(6)
    ]
    assert all(item.reward == item.sample_index for item in found)


def test_settings_are_left_in_the_store_for_the_exporting_process() -> None:
    with recording(backend="mlflow", project="p") as recorded:
        settings = orjson.loads((recorded.path / "config.json").read_bytes())
    assert settings["backend"] == ["mlflow"]
    assert settings["project"] == "p"


def test_two_experiments_in_one_store_do_not_replace_each_other() -> None:
    with recording() as recorded:
        for experiment in ("a", "b", "a"):
            with named(step=1, sample_index=17, experiment=experiment):
                reward("reward", ord(experiment))
        trackway.flush()
        store = open_store(recorded.path)
        assert [(found.name, found.experiment) for found in store.query()] == [
            ("1/17/0", "b"),
            ("1/17/0@1", "a"),
        ]
        assert [found.name for found in store.query(experiment="a")] == ["1/17/0@1"]
        (only,) = store.query(experiment="b")
        assert store.load(only.trace_id).key == TrajectoryKey(1, 17, 0)
        assert store.load("1/17/0").experiment == "a"


def test_calls_outside_of_any_trajectory_stand_last() -> None:
    with recording() as recorded:
        lookup("x")
        record(step=1, sample_index=1)
        trackway.flush()
        assert [found.key is None for found in open_store(recorded.path).query()] == [False, True]


def test_an_error_counts_where_it_arose_and_not_on_its_way_up() -> None:
    with recording() as recorded:
        with pytest.raises(KeyError), named(step=1, sample_index=1):
            lookup("missing")
        assert recorded.trajectory().errors == 1


def test_an_unknown_status_and_a_file_instead_of_a_store_are_said(tmp_path: Path) -> None:
    with recording() as recorded:
        trackway.flush()
        with pytest.raises(ValueError, match="'failed' is none of ok, error"):
            list(open_store(recorded.path).query(status="failed"))  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is a file"):
        open_store(tmp_path / "file")


def test_a_destination_that_nothing_was_sent_to_has_everything_pending() -> None:
    with recording(backend="mlflow") as recorded:
        record(step=1, sample_index=1)
        status = recorded.status()
    assert (status.recorded, status.exported, status.pending) == (6, 0, 6)
    assert status.destinations["mlflow"].pending == 6


def test_of_several_experiments_a_key_means_the_one_that_ran_last() -> None:
    with recording() as recorded:
        for experiment in ("a", "a", "b"):
            with named(step=1, sample_index=1, experiment=experiment):
                pass
        trackway.flush()
        assert open_store(recorded.path).load("1/1/0").experiment == "b"


@pytest.mark.parametrize("experiment", [None, "another"])
def test_a_rollout_that_runs_is_numbered_among_those_of_its_experiment(experiment: str | None) -> None:
    with recording() as recorded:
        record(step=1, sample_index=17, experiment=experiment)
        record(step=1, sample_index=17, experiment="aside")
        with named(step=1, sample_index=17, experiment=experiment):
            lookup("x")
            recorded.status()
            where = {"experiment": experiment or "default", "all_attempts": True}
            found = open_store(recorded.path).query(**where)
            assert [(str(item.key), item.status) for item in found] == [
                ("1/17/0", "ok"),
                ("1/17/0@1", "running"),
            ]


def test_attempts_that_were_given_the_same_number_get_numbers_of_their_own() -> None:
    with recording() as recorded:
        for attempt in (0, 1, 1, 5, 5):
            with named(step=1, sample_index=1, attempt=attempt):
                reward("reward", attempt)
        trackway.flush()
        store = open_store(recorded.path)
        names = [found.name for found in store.query(all_attempts=True)]
        assert names == ["1/1/0", "1/1/0@1", "1/1/0@2", "1/1/0@5", "1/1/0@6"]
        assert [str(store.load(name).key) for name in names[1:]] == names[1:]
        found = [store.load(summary.trace_id) for summary in store.query(all_attempts=True)]
        assert [item.name for item in found] == names


def test_status_under_load_never_shows_a_loss_that_did_not_happen(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import trackway
        trackway.configure(store="store", sync="off", max_segment_bytes=200_000)
        @trackway.tool_trace
        def tool(n): return "x" * 500
        for sample in range(150):
            with trackway.trajectory(step=1, sample_index=sample):
                for n in range(5): tool(n)
            if sample % 20 == 0: trackway.flush()
    """)
    workers = [subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) for _ in range(3)]
    wait_until(lambda: (tmp_path / "store" / "journal").is_dir())
    store = open_store(tmp_path / "store")
    looks = 0
    while any(worker.poll() is None for worker in workers):
        status = store.status()
        looks += 1
        assert status.dropped_by_reason == {}
        assert status.recorded == status.exported + status.pending + status.dropped
        assert min(status.exported, status.pending) >= 0
    assert looks > 3
    assert (store.status().recorded, store.status().dropped) == (3 * 150 * 6, 0)


def test_a_look_that_has_no_time_for_the_whole_journal_counts_the_rest_as_pending() -> None:
    with recording() as recorded:
        for sample in range(60):
            with named(step=1, sample_index=sample):
                for _ in range(50):
                    lookup("x")
                trackway.trace.lifecycle._active.recorder.writer.flush(10)
        trackway.flush()
        for path in recorded.path.glob("index*"):
            path.unlink()
        store = open_store(recorded.path)
        # Lines are taken in by the thousands, and there are fewer here: make the portions small.
        from trackway.trace.store import lines

        portion, lines.PORTION = lines.PORTION, 10
        try:
            early = store.status(deadline=0.0)
        finally:
            lines.PORTION = portion
        late = store.status()
    assert 0 < early.exported < late.exported
    assert (early.recorded, early.dropped) == (late.recorded, 0) == (60 * 51, 0)
    assert early.pending == early.recorded - early.exported


# What processes leave behind


TRACE = "ab" * 16


def line(span: str, *, parent: str = "", end: int = 0, trace: str = TRACE, **attributes: Any) -> bytes:
    """Give a journal line with one span; without an end it is open."""
    tags = {"trackway.step": 1, "trackway.sample_index": 17, "trackway.rollout_n": 0}
    kind = "tool" if parent else "trajectory"
    raw = {
        "traceId": trace,
        "spanId": span * 16,
        "parentSpanId": parent * 16,
        "name": span,
        "startTimeUnixNano": str(1_750_000_000_000_000_000 + ord(span)),
        "endTimeUnixNano": str(1_750_000_001_000_000_000 + end if end else 0),
        "attributes": otlp.encode_attributes({"trackway.kind": kind, **tags, **attributes}),
        "status": {"code": otlp.OK if end else otlp.UNSET},
    }
    return otlp.LineEncoder({}).line([orjson.dumps(raw)])


def new_store(path: Path) -> Store:
    (path / journal.FOLDER).mkdir(parents=True)
    return open_store(path)


def look(store: Store) -> tuple[str, str | None, dict[str, str]]:
    """Give the status of the only trajectory as it is listed and loaded, and those of its spans."""
    (summary,) = store.query()
    found = store.load(summary.trace_id)
    assert (summary.status, summary.error) == (found.status, found.error)
    assert [each.trace_id for each in store.query(status=found.status)] == [found.trace_id]
    return found.status, found.error, {span.name: span.status for span in found.spans}


DIED = "process ended before this did"


def test_a_rollout_of_which_nothing_had_ended_is_counted_and_due_when_its_process_was_killed(
    tmp_path: Path,
) -> None:
    code = textwrap.dedent("""
        import time, trackway
        trackway.configure(store="store", sync="off")
        @trackway.rollout_trace
        def hang():
            time.sleep(600)
        with trackway.trajectory(step=5, sample_index="a"):
            trackway.reward("so far", 0.5)
            hang()
    """)
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    try:
        wait_until(lambda: list((tmp_path / "store" / "journal").glob("*.open.jsonl")))
        store = open_store(tmp_path / "store")
        assert [summary.status for summary in store.query()] == ["running"]
        assert store.due({}) == []
        assert not store.unread()
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    assert store.unread()
    (summary,) = store.query()
    assert (summary.name, summary.status, summary.spans, summary.reward) == ("5/a/0", "died", 2, 0.5)
    assert not store.unread()
    ((trace_id, state),) = store.due({})
    assert trace_id == summary.trace_id
    assert store.due({trace_id: state}) == []
    (found,) = store.load_all([trace_id])
    assert {span.name: (span.status, span.error) for span in found.spans} == {
        "trajectory": ("died", DIED),
        "hang": ("died", DIED),
    }
    status = store.status()
    assert (status.recorded, status.exported, status.pending, status.dropped) == (2, 2, 0, 0)
    assert (status.trajectories, status.in_flight) == (1, 0)
    # The index is derived: without it, everything is found again.
    store.close()
    for path in (tmp_path / "store").glob("index*"):
        path.unlink()
    assert open_store(tmp_path / "store").due({}) == [(trace_id, state)]


@pytest.mark.parametrize("ended_is_known", [False, True])
def test_a_span_that_ended_after_all_replaces_what_its_process_left_open(
    tmp_path: Path, ended_is_known: bool
) -> None:
    store = new_store(tmp_path)
    ended = b"".join([line("a", end=9), line("b", parent="a", end=5)])
    writer = journal.SegmentWriter(tmp_path, 10**9)
    if ended_is_known:
        writer.append(ended)
        list(store.query())
    # It died before it could remove the list of its open spans.
    writer.set_open_spans(line("a") + line("b", parent="a") + line("c", parent="a"))
    writer.close()
    spans = {"a": "ok" if ended_is_known else "died", "b": "ok" if ended_is_known else "died", "c": "died"}
    assert look(store) == (*(("ok", None) if ended_is_known else ("died", DIED)), spans)
    had = dict(store.due({}))
    if not ended_is_known:
        other = journal.SegmentWriter(tmp_path, 10**9)
        other.append(ended)
        # A number of spans that stays the same does not hide that two of them have ended now.
        assert [trace_id for trace_id, _ in store.due(had)] == [TRACE]
        other.close()
    assert look(store) == ("ok", None, {"a": "ok", "b": "ok", "c": "died"})
    assert store.status().recorded == 3


def test_a_rollout_that_another_process_still_works_at_is_not_given_up(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    first, second, third = (journal.SegmentWriter(tmp_path, 10**9) for _ in range(3))
    first.set_open_spans(line("a"))
    second.append(line("b", parent="a", end=5))
    third.set_open_spans(line("c", parent="a"))
    assert look(store) == ("running", None, {"a": "running", "b": "ok", "c": "running"})
    first.close()
    # The root's process is gone for good, which the others may not know.
    assert look(store) == ("died", DIED, {"a": "died", "b": "ok", "c": "running"})
    assert store.due({}) == []
    second.close()
    assert store.due({}) == []
    third.close()
    assert [trace_id for trace_id, _ in store.due({})] == [TRACE]
    assert look(store) == ("died", DIED, {"a": "died", "b": "ok", "c": "died"})


def test_a_span_that_was_given_up_has_died_until_its_end_comes(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    writer = journal.SegmentWriter(tmp_path, 10**9)
    writer.append(line("b", parent="a", end=5))
    writer.set_open_spans(line("a"))
    assert look(store) == ("running", None, {"a": "running", "b": "ok"})
    assert store.due({}) == []
    writer.append(line("a", **{"trackway.expired": "open for 3600 s"}))
    assert look(store) == ("died", "open for 3600 s", {"a": "died", "b": "ok"})
    had = dict(store.due({}))
    assert list(had) == [TRACE]
    assert (store.status().recorded, store.status().in_flight) == (2, 0)
    # It has not ended, so of two that the writer has recorded, one is still to be written.
    writer.set_counters({"recorded": 2, "written": 1})
    assert (store.status().recorded, store.status().pending) == (3, 1)
    writer.append(line("a", end=9))
    assert look(store) == ("ok", None, {"a": "ok", "b": "ok"})
    assert [trace_id for trace_id, _ in store.due(had)] == [TRACE]
    status = store.status()
    assert (status.recorded, status.pending, status.dropped) == (2, 0, 0)
    writer.close()
