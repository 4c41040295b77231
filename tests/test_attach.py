"""What a trainer says of a rollout later: by key, from any process, in any order."""

from __future__ import annotations

import io
import logging
import math
import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import trackway
from trackway import TrajectoryKey, attach, llm_trace, open_store, reward, tool_trace, trajectory
from trackway.trace import semconv
from trackway.trace.capture import attaching, runtime
from trackway.trace.exporters import sync
from trackway.trace.exporters.mlflow_payload import payload_of
from trackway.trace.model import Trajectory
from trackway.trace.store import Store, journal, otlp
from trackway.trace.testing import Recording, recording
from trackway.viewers.terminal import replay

FIRST, TOOL, SECOND = (4, 5, 6), (7, 8), (9,)
"""Token ids of a response: two generations, and a tool's reply between them."""
PROMPT = (1, 2, 3)


@llm_trace
def generate(prompt_ids: list[int], answer: list[int]) -> dict[str, Any]:
    return {"token_ids": answer}


@tool_trace
def look(word: str) -> str:
    return word


def rollout() -> None:
    generate([*PROMPT], [*FIRST])
    look("x")
    generate([*PROMPT, *FIRST, *TOOL], [*SECOND])


def record(**key: Any) -> None:
    with trajectory(**{"step": 1, "sample_index": 17, **key}):
        rollout()


def response(found: Trajectory, name: str) -> list[tuple[float, ...]]:
    """Give what the turns after the prompt have under a name."""
    assert found.turns[0].token_ids == PROMPT
    assert getattr(found.turns[0], name) == ()
    return [getattr(turn, name) for turn in found.turns[1:]]


def one(recorded: Recording, key: str = "1/17/0") -> Trajectory:
    trackway.flush()
    store = open_store(recorded.path)
    try:
        return store.load(key)
    finally:
        store.close()


# What is said, and how it is read


def test_everything_that_is_attached_is_read_back() -> None:
    with recording() as recorded:
        record()
        attach(
            "1/17/0",
            rewards={"judge": 0.5, "verdict": "good"},
            advantages=[0.1, 0.2, 0.3, 0.0, 0.0, 0.4],
            returns=2.5,
            trainer_logprobs=[-1.0, -2.0, -3.0, -4.0],
            mask=[1, 1, 0, 0, 0, 1],
            trained_step=12,
            discarded="stale policy",
        )
        attach("1/17/0", trainer_logprobs=[-1.0, -2.0, -6.0])
        found = one(recorded)
        (line,) = open_store(recorded.path).query()
    assert found.rewards == {"judge": 0.5, "verdict": "good"}
    assert (found.trained_step, found.discarded) == (12, "stale policy")
    assert (line.trained_step, line.discarded, line.reward) == (12, "stale policy", 0.5)
    assert response(found, "mask") == [(1, 1, 0), (0, 0), (1,)]
    assert response(found, "advantages") == [
        tuple(map(pytest.approx, part)) for part in ((0.1, 0.2, 0.3), (0.0, 0.0), (0.4,))
    ]
    assert str(response(found, "returns")) == "[(2.5, 2.5, nan), (), (2.5,)]"
    assert str(response(found, "trainer_logprobs")) == "[(-1.0, -2.0, nan), (), (-6.0,)]"
    assert found.attached == {
        "advantages": pytest.approx((0.1 + 0.2 + 0.4) / 3),
        "returns": 2.5,
        "trainer_logprobs": -3.0,
    }
    assert found.notes == ()
    # It is known when and by whom, and does not count as a part of the rollout's own time.
    root = found.spans[0]
    assert [(span.kind, span.parent_id) for span in found.spans[-2:]] == [("attach", root.span_id)] * 2
    assert found.end_ns == root.end_ns


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], "[(1.0, 2.0, 3.0), (4.0, 5.0), (6.0,)]"),  # one for each token of the response
        ([1, 2, 3, 6], "[(1.0, 2.0, 3.0), (), (6.0,)]"),  # one for each trained token
        ([1, 2, 3, 4, 5, 6, 0, 0], "[(1.0, 2.0, 3.0), (4.0, 5.0), (6.0,)]"),  # padding
        ([1, 2, 3, 4, 5, 6, math.nan, 0], "[(1.0, 2.0, 3.0), (4.0, 5.0), (6.0,)]"),
        ([Decimal("1.5"), 2, 3, 4], "[(1.5, 2.0, 3.0), (), (4.0,)]"),
        (Decimal("0.5"), "[(0.5, 0.5, 0.5), (), (0.5,)]"),
        ((1, 2, 3, math.nan), "[(1.0, 2.0, 3.0), (), (nan,)]"),
        ([math.nan] * 6, "[(nan, nan, nan), (nan, nan), (nan,)]"),
        (0.5, "[(0.5, 0.5, 0.5), (), (0.5,)]"),
        (math.nan, "[(nan, nan, nan), (), (nan,)]"),
        (np.float32(0.5), "[(0.5, 0.5, 0.5), (), (0.5,)]"),
        (np.arange(6), "[(0.0, 1.0, 2.0), (3.0, 4.0), (5.0,)]"),
        (np.array([[1.5, 2.5, 3.5, 4.5]], dtype=np.float16), "[(1.5, 2.5, 3.5), (), (4.5,)]"),
        ([np.float64(1), np.int32(2), 3, 4], "[(1.0, 2.0, 3.0), (), (4.0,)]"),
        ([[Decimal(1), 2, 3, 4]], "[(1.0, 2.0, 3.0), (), (4.0,)]"),
        (np.array([Decimal(1), None, 3, 4], dtype=object), "[(1.0, nan, 3.0), (), (4.0,)]"),
        (np.array([1, 2, 3, 4], dtype=np.longdouble), "[(1.0, 2.0, 3.0), (), (4.0,)]"),
        (np.array([1, 2, 3, 4], dtype=np.uint8), "[(1.0, 2.0, 3.0), (), (4.0,)]"),
        ([1, 2, 3, 4, 5, None, None, 0], "[(1.0, 2.0, 3.0), (4.0, 5.0), (nan,)]"),  # None is not known
    ],
)
def test_values_stand_beside_the_tokens_they_are_about(given: Any, expected: str) -> None:
    with recording() as recorded:
        record()
        attach("1/17/0", advantages=given)
        found = one(recorded)
    assert str(response(found, "advantages")) == expected
    assert found.notes == ()


def test_tensors_are_read() -> None:
    torch = pytest.importorskip("torch")
    with recording() as recorded:
        record()
        attach(
            "1/17/0",
            advantages=torch.tensor(0.5),
            returns=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], requires_grad=True),
            trainer_logprobs=torch.tensor([[-1.0, -2.0, -3.0, -4.0]], dtype=torch.bfloat16),
            mask=torch.tensor([True, False, True, False, False, True]),
            rewards={"judge": torch.tensor(0.25)},
            trained_step=torch.tensor(3),
        )
        attach("1/17/0", trainer_logprobs=torch.tensor([[-1.0, -2.0, -4.0]], dtype=torch.bfloat16))
        found = one(recorded)
    assert response(found, "mask") == [(1, 0, 1), (0, 0), (1,)]
    assert response(found, "returns") == [(1.0, 2.0, 3.0), (4.0, 5.0), (6.0,)]
    assert str(response(found, "trainer_logprobs")) == "[(-1.0, nan, -2.0), (), (-4.0,)]"
    assert (found.trained_step, found.rewards, found.attached["advantages"]) == (3, {"judge": 0.25}, 0.5)


def test_padding_that_the_mask_marks_is_cut_whatever_stands_there() -> None:
    with recording() as recorded:
        record()
        attach("1/17/0", mask=[1, 1, 1, 0, 0, 1, 0, 0], trainer_logprobs=[-1, -2, -3, -4, -5, -6, -7, -8])
        found = one(recorded)
    assert response(found, "trainer_logprobs") == [(-1.0, -2.0, -3.0), (-4.0, -5.0), (-6.0,)]
    assert response(found, "mask") == [(1, 1, 1), (0, 0), (1,)]


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("mask", [1, None, 1, 1, 1, 1], "a mask has 0 and 1, and this one None"),
        ("mask", [1, "x", 1, 1, 1, 1], "it holds a str, which is no number"),
        ("advantages", [1, "x", 3, 4], "it holds a str, which is no number"),
        ("returns", [1, [2], 3, 4], "it holds a list, which is no number"),
        ("trainer_logprobs", [None, 1 + 2j, 3], "it holds a complex, which is no number"),
        ("advantages", ["a", "b", "c", "d"], "neither a number nor a sequence of numbers"),
    ],
)
def test_a_sequence_that_is_none_is_left_out_with_one_reason(name: str, given: Any, said: str) -> None:
    with recording() as recorded:
        record()
        attach("1/17/0", **{name: given})
        found = one(recorded)
    assert response(found, name) == [(), (), ()]
    (note,) = found.notes
    assert note.startswith(f"attach(...) was given {name}=[")
    assert note.endswith(f", which is left out: {said}")


def test_in_a_mask_nan_counts_as_0() -> None:
    with recording() as recorded:
        record()
        attach("1/17/0", mask=[1, math.nan, 1, 0, 0, 1, math.nan, math.nan])
        found = one(recorded)
    assert response(found, "mask") == [(1, 0, 1), (0, 0), (1,)]
    (note,) = found.notes
    assert note.endswith("of which 3 of 8 are neither 0 nor 1; those above 0 count as 1")


@pytest.mark.parametrize("count", [0, 1, 3, 5, 7, 8])
def test_what_fits_no_tokens_is_kept_aside_with_both_lengths(count: int) -> None:
    with recording() as recorded:
        record()
        attach("1/17/0", advantages=[0.5] * count, mask=[1] * count)
        found = one(recorded)
    assert response(found, "advantages") == [(), (), ()]
    assert response(found, "mask") == [(), (), ()]
    assert found.notes == (
        f"the mask that was attached has {count} values, and the response 6 tokens",
        f"advantages: {count} values were attached, and the response has 6 tokens, 4 of them trained",
    )


def test_one_number_is_told_also_where_no_token_ids_were_recorded() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=17):
            look("x")
        attach("1/17/0", advantages=-0.25, returns=[1.0, 2.0])
        found = one(recorded)
    assert found.attached == {"advantages": -0.25}
    (note,) = found.notes
    assert note == "returns: 2 values were attached, and the response has 0 tokens, 0 of them trained"


def test_what_is_said_last_counts_whoever_says_it() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=17) as running:
            attach(running, rewards={"a": 1.0, "b": 1.0}, trained_step=1, discarded=True)
            reward("b", 2.0)
        attach("1/17/0", rewards={"a": math.nan}, trained_step=2)
        found = one(recorded)
        assert (found.trained_step, found.discarded) == (2, "no reason given")
        assert str(found.rewards) == "{'a': nan, 'b': 2.0}"
        attach("1/17/0", rewards=0.75, discarded=False)
        found = one(recorded)
    assert (found.trained_step, found.discarded, found.reward) == (2, None, 0.75)


def test_a_replay_shows_it_in_its_head() -> None:
    with recording() as recorded:
        record()
        attach("1/17/0", advantages=[1, 2, 3, 6], returns=0.5, trained_step=12, discarded="[b]old\x1b[1m")
        console = Console(width=90, color_system=None)
        with console.capture() as captured:
            console.print(replay(one(recorded)))
    lines = captured.get().splitlines()
    assert "trained     step 12" in lines
    assert "attached    mean advantage 3 · mean return 0.5" in lines
    assert "discarded   [b]old\\x1b[1m" in lines


# What cannot be used


class Opaque:
    pass


def test_a_value_that_cannot_be_used_is_said_once_and_noted(caplog: pytest.LogCaptureFixture) -> None:
    with recording() as recorded, caplog.at_level(logging.WARNING, "trackway"):
        record()
        for _ in range(2):
            attach(
                "1/17/0",
                rewards={"good": 1.0, "bad": Opaque()},
                advantages="much",
                returns=[[1.0], [2.0]],
                mask=0.5,
                trained_step=1.5,
                discarded=np.array([1, 2]),
            )
        found = one(recorded)
    assert found.rewards == {"good": 1.0}
    assert (found.trained_step, found.discarded, found.attached) == (None, None, {})
    assert len(found.notes) == 12
    assert found.notes[1] == (
        "attach(...) was given advantages='much', which is left out: "
        "neither a number nor a sequence of numbers"
    )
    assert [record.message for record in caplog.records] == list(found.notes[:6])


@pytest.mark.parametrize("key", ["17", "1/17", "", None, 17, Opaque(), {"step": 1}])
def test_a_key_that_is_none_is_said_and_harms_nothing(
    key: Any, caplog: pytest.LogCaptureFixture, swallowing: None
) -> None:
    with recording() as recorded, caplog.at_level(logging.WARNING, "trackway"):
        attach(key, advantages=1.0)
        status = recorded.status()
    assert (status.recorded, status.troubles) == (0, 1)
    assert "attach() could not be recorded" in caplog.text


def test_without_recording_nothing_happens_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attaching, "_told", False)
    assert runtime.get() is None
    attach("1/17/0", advantages=1.0)
    attach("1/17/1", advantages=1.0)
    assert list(tmp_path.iterdir()) == []
    assert [record.message[:22] for record in caplog.records] == ["attach() does nothing "]


def test_of_a_rollout_that_is_not_recorded_nothing_is_kept() -> None:
    with recording(ratio=0.0) as recorded:
        with trajectory(step=1, sample_index=17) as running:
            attach(running, advantages=1.0)
        attach("1/17/0")
        trackway.flush()
        assert sum(segment.path.stat().st_size for segment in journal.segments(recorded.path)) == 0


# Which rollout is meant


def test_a_rollout_is_named_in_any_way() -> None:
    with recording() as recorded:
        record(sample_index="a/b", rollout_n=2, validate=True)
        found = one(recorded, "val/1/a%2Fb/2")
        (line,) = open_store(recorded.path).query()
        with trajectory(step=9) as other:
            pass
        assert found.key is not None
        odd = TrajectoryKey(np.int64(1), "a/b", np.int64(2), np.bool_(True))  # type: ignore[arg-type]
        names = (str(found.key), found.key, found.trace_id, found, line, odd, f"{found.key}@0")
        for number, name in enumerate(names):
            attach(name, rewards={str(number): number})
        attach(other, rewards={"other": 1.0})
        assert one(recorded, found.trace_id).rewards == {str(n): n for n in range(len(names))}
        assert one(recorded, other.trace_id).rewards == {"other": 1.0}


def test_the_type_of_a_sample_is_part_of_its_name() -> None:
    with recording() as recorded:
        record(sample_index=17)
        record(sample_index="17")
        attach("1/17/0", trained_step=1)
        attach("1/%317/0", trained_step=2)
        assert [one(recorded, name).trained_step for name in ("1/17/0", "1/%317/0")] == [1, 2]


def test_a_key_means_the_latest_attempt_that_had_started_unless_it_names_one() -> None:
    with recording() as recorded:
        attach("1/17/0", rewards={"before all": 0})
        for number in range(3):
            with trajectory(step=1, sample_index=17):
                attach("1/17/0", rewards={f"in {number}": number})
        attach("1/17/0", rewards={"after all": 0})
        attach("1/17/0@1", rewards={"named": 1})
        attach(TrajectoryKey(1, 17, 0, attempt=1), rewards={"named too": 1})
        attach("1/17/0@0", rewards={"first": 0})
        attach("1/17/0@7", rewards={"unknown": 0})
        trackway.flush()
        store = open_store(recorded.path)
        assert {line.name: set(line.rewards) for line in store.query(all_attempts=True)} == {
            "1/17/0": {"before all", "in 0", "first"},
            "1/17/0@1": {"in 1", "named", "named too"},
            "1/17/0@2": {"in 2", "after all"},
        }
        assert store.unmatched() == 1


def test_the_own_experiment_comes_before_others() -> None:
    with recording(experiment="mine") as recorded:
        record(sample_index=1, experiment="theirs")
        record(sample_index=2, experiment="mine")
        record(sample_index=2, experiment="theirs")
        for sample in (1, 2):
            attach(f"1/{sample}/0", rewards={"mine": 1})
            attach(f"1/{sample}/0", rewards={"theirs": 1}, experiment="theirs")
        trackway.flush()
        found = open_store(recorded.path).query(all_attempts=True)
        assert {(line.name, line.experiment): set(line.rewards) for line in found} == {
            ("1/1/0", "theirs"): {"mine", "theirs"},  # nobody else has that key
            ("1/2/0", "mine"): {"mine"},
            ("1/2/0", "theirs"): {"theirs"},
        }


def test_a_rollout_that_still_runs_gets_what_is_said_of_it_at_once() -> None:
    with recording() as recorded:
        record()
        with trajectory(step=1, sample_index=17):
            look("x")
            attach("1/17/0", advantages=1.5)
            found = recorded.trajectories()
        again = recorded.trajectories()
    assert [item.status for item in found] == ["ok", "running"]
    assert [item.attached for item in found] == [{}, {"advantages": 1.5}]
    assert [item.attached for item in again] == [{}, {"advantages": 1.5}]


def test_what_waits_for_its_rollout_is_counted_apart_and_keeps_nobody_waiting() -> None:
    with recording() as recorded:
        attach("5/1/0", advantages=1.0, rewards={"a": 1.0})
        attach("f" * 32, trained_step=1)
        status = recorded.status()
        store = open_store(recorded.path)
        assert (status.recorded, status.pending, status.dropped, status.trajectories) == (0, 0, 0, 0)
        assert store.unmatched() == 2
        assert store.due({}) == []
        assert list(store.query()) == []
        assert not store.unread()
        record(step=5, sample_index=1)
        status = recorded.status()
        assert (status.recorded, status.pending, store.unmatched()) == (5, 0, 1)
        assert store.load("5/1/0").attached == {"advantages": 1.0}


def test_facts_that_somebody_else_wrote_break_nothing(tmp_path: Path) -> None:
    (tmp_path / journal.FOLDER).mkdir()
    writer = journal.SegmentWriter(tmp_path, 10**9)
    odd = [2**70, "text", [1], b"abc", 0.5, True, None]
    named = {"trackway.step": 1, "trackway.sample_index": 17, "trackway.rollout_n": 0}
    for number, value in enumerate(odd):
        said = dict.fromkeys(
            (
                semconv.ATTACHED_ADVANTAGES,
                semconv.ATTACHED_MASK,
                semconv.TRAINED_STEP,
                semconv.DISCARDED,
                semconv.ATTEMPT,
            ),
            value,
        )
        for place in ({}, dict.fromkeys(named, value), {semconv.ATTACHED_TO: value}):
            tags = {**named, semconv.KIND: "attach", **said, **place}
            writer.append(line(f"{number}{len(place)}", tags))
    writer.append(line("ff", {**named, semconv.KIND: "trajectory"}))
    writer.close()
    store = open_store(tmp_path)
    (found,) = store.query()
    Console(file=io.StringIO()).print(replay(store.load(found.trace_id)))
    assert payload_of(store.load(found.trace_id), "x").tags["step"] == "1"
    assert store.unmatched() + found.spans == 3 * len(odd) + 1


def line(name: str, tags: dict[str, Any]) -> bytes:
    span = {
        "traceId": name * 16,
        "spanId": name * 8,
        "name": "attach",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
        "attributes": otlp.encode_attributes(tags),
    }
    return otlp.LineEncoder({}).line([orjson.dumps(span)])


# In any order


@pytest.fixture(scope="module")
def journal_lines() -> tuple[list[bytes], str]:
    """Three attempts in one experiment, one in another, and what was attached before, meanwhile and after."""
    with recording(experiment="a") as recorded:

        def say(key: Any, name: str, **more: Any) -> None:
            attach(key, rewards={name: 1.0}, **more)
            trackway.flush()

        say("1/17/0", "before", trained_step=1)
        for number, experiment in enumerate(("a", "b", "a", "a")):
            with trajectory(step=1, sample_index=17, experiment=experiment) as running:
                generate([*PROMPT], [*FIRST])
                trackway.flush()
                say("1/17/0", f"meanwhile {number}", advantages=[1.0, 2.0, float(number)])
                say(running, f"by trace {number}")
            trackway.flush()
        say("1/17/0@1", "named", mask=[1, 0, 1])
        say("1/17/0", "elsewhere", experiment="b")
        say("1/17/0", "last", trained_step=2, discarded="old")
        say("1/18/0", "never")
        lines = [line for segment in journal.segments(recorded.path) for _, line in segment.read(0)]
        readers = Store(recorded.path)
        told = told_by(readers)
        readers.close()
    assert len(lines) == 4 * 4 + 5 == len(set(lines))
    assert told[1] == 1
    return lines, str(told)


def told_by(store: Store) -> tuple[list[Trajectory], int, list[tuple[str, int, bool]]]:
    found = [store.load(line.trace_id) for line in store.query(all_attempts=True)]
    return sorted(found, key=lambda item: item.start_ns), store.unmatched(), sorted(store.due({}))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_arrival_tells_the_same(
    journal_lines: tuple[list[bytes], str], data: st.DataObject
) -> None:
    lines, expected = journal_lines
    shuffled = data.draw(st.permutations(lines))
    looks = data.draw(st.sets(st.integers(0, len(lines)), max_size=4))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / journal.FOLDER).mkdir()
        writer = journal.SegmentWriter(Path(folder), 10**9)
        store = Store(Path(folder))
        for number, line in enumerate(shuffled):
            if number in looks:
                list(store.query())
            writer.append(line)
        writer.close()
        told = told_by(store)
        store.close()
    assert str(told) == expected


# At a destination


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, blank_mlflow: Path) -> str:
    return f"sqlite:///{shutil.copy(blank_mlflow, tmp_path_factory.mktemp('mlflow'))}"


class Mlflow:
    """A store whose trajectories go to a real MLflow when asked to."""

    def __init__(self, recorded: Recording, uri: str) -> None:
        from mlflow import MlflowClient

        self.recorded = recorded
        self.client = MlflowClient(tracking_uri=uri)

    def sync(self) -> None:
        trackway.flush()
        assert sync.run(self.recorded.path, say=print) == 0
        status = self.recorded.status()
        assert (status.pending, status.dropped, status.exported) == (0, 0, status.recorded)

    def trace(self, trace_id: str) -> Any:
        return self.client.get_trace(f"tr-{trace_id}")

    def rewards(self, trace_id: str) -> list[tuple[str, Any]]:
        return sorted((item.name, item.value) for item in self.trace(trace_id).info.assessments)

    def tags(self, trace_id: str) -> dict[str, str]:
        tags = self.trace(trace_id).info.tags
        return {name: tags[name] for name in ("trained_step", "discarded") if name in tags}


@pytest.fixture
def mlflow(database: str, request: pytest.FixtureRequest) -> Iterator[Mlflow]:
    pytest.importorskip("mlflow")
    with recording(backend="mlflow", tracking_uri=database, project=request.node.name) as recorded:
        yield Mlflow(recorded, database)


def attach_elsewhere(store: str, experiment: str, project: str) -> None:
    trackway.configure(store=store, sync="off", experiment=experiment, project=project)
    attach("1/17/0", rewards={"late": 3.0}, advantages=0.25, trained_step=4, discarded="too long")
    trackway.shutdown()


@pytest.mark.slow
def test_mlflow_shows_what_was_said_before_while_and_after_a_rollout_ran(mlflow: Mlflow) -> None:
    attach("1/17/0", rewards={"early": 1.0})
    mlflow.sync()
    with trajectory(step=1, sample_index=17) as running:
        rollout()
        attach(running, rewards={"meanwhile": 2.0})
    mlflow.sync()
    assert mlflow.rewards(running.trace_id) == [("early", 1.0), ("meanwhile", 2.0), ("reward", 3.0)]
    assert mlflow.tags(running.trace_id) == {}
    spawn = multiprocessing.get_context("spawn")
    config = runtime.get().config  # type: ignore[union-attr]
    process = spawn.Process(
        target=attach_elsewhere, args=(str(mlflow.recorded.path), config.experiment, config.project)
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    for _ in range(2):
        mlflow.sync()
        assert mlflow.rewards(running.trace_id) == [
            ("early", 1.0),
            ("late", 3.0),
            ("meanwhile", 2.0),
            ("reward", 6.0),
        ]
        assert mlflow.tags(running.trace_id) == {"trained_step": "4", "discarded": "too long"}
        # The next time everything is sent once more.
        (mlflow.recorded.path / "sync.sqlite").unlink()
    trace = mlflow.trace(running.trace_id)
    assert len(trace.data.spans) == 4
    root = next(span for span in trace.data.spans if span.parent_id is None)
    assert root.attributes["trackway.attached.advantages"] == 0.25
    assert root.outputs["attached"] == {"advantages": 0.25}
    assert root.outputs["trained_step"] == 4
    experiment = mlflow.client.get_experiment_by_name(config.project)
    found = mlflow.client.search_traces(
        locations=[experiment.experiment_id], filter_string="tags.trained_step = '4'"
    )
    assert [item.info.trace_id for item in found] == [f"tr-{running.trace_id}"]


def test_mlflow_shows_values_that_are_no_finite_numbers(mlflow: Mlflow) -> None:
    record()
    attach(
        "1/17/0",
        rewards={"judge": math.nan},
        advantages=[1.0, math.nan, None, 4.0],
        returns=math.nan,
        trainer_logprobs=-math.inf,
    )
    found = mlflow.recorded.trajectory()
    mlflow.sync()
    trace = mlflow.trace(found.trace_id)
    root = next(span for span in trace.data.spans if span.parent_id is None)
    assert root.outputs["attached"] == {"advantages": "nan", "returns": "nan", "trainer_logprobs": "-inf"}
    told = {name: root.attributes[f"trackway.attached.{name}"] for name in ("returns", "trainer_logprobs")}
    assert told == {"returns": "nan", "trainer_logprobs": "-inf"}
    assert dict(mlflow.rewards(found.trace_id))["judge"] is None


def test_mlflow_forgets_what_turned_out_to_be_of_a_later_attempt(mlflow: Mlflow) -> None:
    with trajectory(step=1, sample_index=17) as first:
        reward("own", 0.5)
    writer = runtime.get().writer  # type: ignore[union-attr]
    with trajectory(step=1, sample_index=17) as second:
        # It runs, and none of it stands in the journal yet.
        attach("1/17/0", rewards={"late": 3.0}, trained_step=4, discarded=True)
        assert writer.flush(10)
        mlflow.sync()
        assert mlflow.rewards(first.trace_id) == [("late", 3.0), ("own", 0.5), ("reward", 3.5)]
    mlflow.sync()
    assert mlflow.rewards(first.trace_id) == [("own", 0.5), ("reward", 0.5)]
    assert mlflow.tags(first.trace_id) == {}
    assert mlflow.rewards(second.trace_id) == [("late", 3.0), ("reward", 3.0)]
    assert mlflow.tags(second.trace_id) == {"trained_step": "4", "discarded": "no reason given"}


def test_feedback_of_people_outlives_what_is_attached_later(mlflow: Mlflow) -> None:
    from mlflow.entities import Feedback
    from mlflow.tracing.client import TracingClient

    record()
    found = mlflow.recorded.trajectory()
    mlflow.sync()
    people = TracingClient(tracking_uri=mlflow.client.tracking_uri)
    people.log_assessment(f"tr-{found.trace_id}", Feedback(name="by hand", value=5))
    attach("1/17/0", rewards={"late": 1.0})
    mlflow.sync()
    assert mlflow.rewards(found.trace_id) == [("by hand", 5), ("late", 1.0), ("reward", 1.0)]
    # What was attached counts as one span more, and hides nothing that is still to be sent.
    record(step=2)
    status = mlflow.recorded.status()
    assert (status.recorded, status.exported, status.pending, status.dropped) == (9, 5, 4, 0)


@pytest.mark.slow
def test_many_processes_attach_to_one_rollout(tmp_path: Path) -> None:
    trackway.configure(store=tmp_path / "store", sync="off")
    record()
    trackway.flush()
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=attach_numbers, args=(str(tmp_path / "store"), number)) for number in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    found = open_store(tmp_path / "store").load("1/17/0")
    assert found.rewards == {f"{number} {n}": n for number in range(3) for n in range(50)}
    assert len(found.spans) == 4 + 3 * 50


def attach_numbers(store: str, number: int) -> None:
    trackway.configure(store=store, sync="off")
    for n in range(50):
        attach("1/17/0", rewards={f"{number} {n}": n})
    trackway.shutdown()
