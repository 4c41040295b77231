"""Which rollouts are recorded, which validation samples are shown, and whose score is whose."""

import gc
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trackway.samplers import HeadSampler, join_scores, pick_generations, unit_interval
from trackway.trace.config import load_config
from trackway.trace.model import TrajectoryKey

ids = st.integers() | st.text()


def sampler(*arguments: str, **settings: Any) -> HeadSampler:
    return HeadSampler(load_config(list(arguments), environ={}, **settings))


def chosen(sampler: HeadSampler, step: int, samples: Any, *, validate: bool = False) -> set[Any]:
    return {sample for sample in samples if sampler.decide(step, sample, validate=validate)}


# Hashes


@given(st.integers(0), st.lists(ids | st.none() | st.tuples(ids, ids), max_size=4))
def test_a_name_has_one_place_below_one(seed, name):
    assert 0 <= unit_interval(seed, *name) < 1
    assert unit_interval(seed, *name) == unit_interval(seed, *name)


@given(st.lists(ids, max_size=4), st.lists(ids, max_size=4))
def test_different_names_have_different_places(one, other):
    if [(type(part), part) for part in one] != [(type(part), part) for part in other]:
        assert unit_interval(0, *one) != unit_interval(0, *other)


def test_names_that_look_alike_are_told_apart():
    names = [
        (1, 23),
        (12, 3),
        ("1", 23),
        (1, "23"),
        ("1", "23"),
        ("12", "3"),
        ("123",),
        (123,),
        ((1, 23),),
        (1, 23, None),
    ]
    names += [("a", "b"), ("ab",), ("asb",), ("as1:b",), ("ai1",), ("a", 1), ("ai1:1",)]
    assert len({unit_interval(0, *name) for name in names}) == len(names)
    assert unit_interval(0, 1) != unit_interval(1, 1)


def test_numbers_of_numpy_are_numbers():
    assert unit_interval(0, numpy.int64(5), numpy.int32(7)) == unit_interval(0, 5, 7)
    assert unit_interval(0, numpy.str_("a")) == unit_interval(0, "a")


def test_any_text_has_a_place():
    assert unit_interval(0, "\ud800") != unit_interval(0, "\udc00")


def test_a_name_of_another_kind_is_an_error():
    with pytest.raises(TypeError):
        unit_interval(0, 1.5)


def test_places_are_spread_evenly():
    tenths = Counter(int(unit_interval(0, 5, index) * 10) for index in range(10_000))
    assert sorted(tenths) == list(range(10))
    assert all(850 < count < 1150 for count in tenths.values())


# The ratio


def test_everything_is_recorded_unless_asked_otherwise():
    assert chosen(sampler(), 0, range(1000)) == set(range(1000))


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_the_ratio_is_that_of_the_samples(ratio):
    kept = chosen(sampler(ratio=ratio), 5, range(10_000))
    assert abs(len(kept) - ratio * 10_000) < 0.05 * 10_000


def test_a_ratio_of_none_and_of_all():
    assert chosen(sampler(ratio=0), 5, range(1000)) == set()
    assert chosen(sampler(ratio=1), 5, range(1000)) == set(range(1000))


def test_every_step_and_every_seed_chooses_anew():
    choices = [chosen(sampler(ratio=0.5), step, range(100)) for step in range(5)]
    choices += [chosen(sampler(ratio=0.5, seed=seed), 0, range(100)) for seed in range(1, 5)]
    assert len({frozenset(choice) for choice in choices}) == len(choices)


def test_what_a_smaller_ratio_records_a_larger_one_records_too():
    choices = [chosen(sampler(ratio=ratio / 10), 3, range(500)) for ratio in range(11)]
    assert all(smaller < larger for smaller, larger in pairwise(choices))


@given(st.integers(), ids, st.floats(0, 1), st.booleans())
def test_all_rollouts_of_a_sample_share_the_decision(step, sample, ratio, validate):
    workers = [sampler(ratio=ratio, val_ratio=ratio, max_samples_per_step_per_worker=3) for _ in range(2)]
    decisions = {worker.decide(step, sample, validate=validate) for worker in workers for _ in range(4)}
    assert len(decisions) == 1


DECIDE = """
import json, random, sys
from trackway.samplers import HeadSampler
from trackway.trace.config import load_config
train = HeadSampler(load_config(environ={}, ratio=0.5, seed=3))
capped = HeadSampler(load_config(environ={}, max_samples_per_step=16, samples_per_step=100))
samples = [*range(100), *map(str, range(100))]
print(json.dumps([[train.decide(5, s), capped.decide(5, s)] for s in samples]))
"""


def test_all_processes_decide_alike():
    outs = set()
    for hash_seed in ("0", "1", "42", "random"):
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", DECIDE]
        outs.add(subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout)
    (out,) = outs
    decisions = json.loads(out)
    assert {decision for decision, _ in decisions} == {True, False}
    assert decisions[:100] != decisions[100:]  # 17 and "17" are two samples


def test_no_random_generator_is_touched():
    random.seed(1)
    numpy.random.seed(1)
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    trained = sampler("max_samples_per_step_per_worker=2", ratio=0.5)
    for index in range(100):
        trained.decide(1, index)
        trained.decide(None, None, token=str(index))
    pick_generations(list(range(100)), 10)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


# The budget of a process


def test_a_worker_records_exactly_so_many_samples_with_all_their_rollouts():
    batch = [sample for sample in range(64) for _ in range(4)]
    for order in range(10):
        random.Random(order).shuffle(batch)
        worker = sampler("actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker=2")
        for step in (1, 2):
            kept = Counter(sample for sample in batch if worker.decide(step, sample))
            assert sorted(kept.values()) == [4, 4]


def test_two_workers_have_a_budget_each():
    batches = [range(32), range(32, 64)]
    assert [len(chosen(sampler(max_samples_per_step_per_worker=2), 1, batch)) for batch in batches] == [2, 2]


def test_a_budget_of_none_records_none():
    worker = sampler(max_samples_per_step_per_worker=0)
    assert chosen(worker, 1, range(64)) == set()
    assert not worker.decide(None, None, token="t")


class Yielding(str):
    """A sample id that lets other threads run whenever it is looked up."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()


def test_the_budget_holds_under_a_race():
    barrier = threading.Barrier(32)

    def ask(worker: HeadSampler, number: int) -> list[Any]:
        # One of four rollouts of one of eight samples, in training and in validation.
        sample = Yielding(number % 8)
        barrier.wait()
        return [
            (validate, sample) for validate in (False, True) if worker.decide(1, sample, validate=validate)
        ]

    with ThreadPoolExecutor(32) as pool:
        for _ in range(100):
            worker = sampler(max_samples_per_step_per_worker=2, val_max_samples_per_step_per_worker=3)
            groups = Counter(kept for said in pool.map(ask, [worker] * 32, range(32)) for kept in said)
            assert set(groups.values()) == {4}
            assert Counter(validate for validate, _ in groups) == {False: 2, True: 3}


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 9), st.booleans()), max_size=200),
    st.integers(0, 4),
    st.floats(0, 1),
    st.integers(1, 3),
)
def test_whatever_is_asked_in_whatever_order_the_budget_holds_and_groups_stay_whole(
    asked, budget, ratio, every
):
    worker = sampler(max_samples_per_step_per_worker=budget, ratio=ratio, log_frequency=every)
    decisions: dict[Any, set[bool]] = {}
    for step, sample, validate in asked:
        decisions.setdefault((step, validate, sample), set()).add(
            worker.decide(step, sample, validate=validate)
        )
    assert all(len(said) == 1 for said in decisions.values())
    kept = [name for name, said in decisions.items() if said == {True}]
    assert all(count <= budget for count in Counter(name[:2] for name in kept).values())
    for step, validate, sample in kept:
        assert validate or (step % every == 0 and unit_interval(0, step, sample) < ratio)


def memory_of(worker: HeadSampler, asked: Iterable[tuple[int, int]]) -> int:
    """Give the bytes that a sampler holds more after deciding on these steps and samples."""
    tracemalloc.start()
    try:
        for step, sample in asked:
            worker.decide(step, sample)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_old_steps_are_forgotten():
    worker = sampler(max_samples_per_step_per_worker=2)
    few = memory_of(worker, ((step, sample) for step in range(200) for sample in range(3)))
    assert memory_of(worker, ((step, sample) for step in range(200, 4000) for sample in range(3))) < 2 * few
    assert all(len(chosen(worker, step, range(3))) == 2 for step in range(3990, 4000))


def test_samples_that_are_not_recorded_take_no_room():
    few, many = (
        memory_of(sampler(max_samples_per_step_per_worker=2), ((1, sample) for sample in range(count)))
        for count in (100, 20_000)
    )
    assert many < 2 * few


# The budget of all processes


def test_a_global_budget_is_kept_on_average_and_alike_by_all_workers():
    workers = [sampler(max_samples_per_step=16, samples_per_step=64) for _ in range(2)]
    counts = []
    for step in range(200):
        one, other = (chosen(worker, step, range(64)) for worker in workers)
        assert one == other
        counts.append(len(one))
    assert abs(sum(counts) / len(counts) - 16) < 1


def test_a_global_budget_comes_with_verls_batch_size():
    tree = {"data": {"train_batch_size": 64}, "max_samples_per_step": 16}
    worker = HeadSampler(load_config(tree, environ={}))
    assert chosen(worker, 1, range(64)) == chosen(sampler(ratio=0.25), 1, range(64))


def test_a_global_budget_above_the_batch_records_all_and_of_none_none():
    assert len(chosen(sampler(max_samples_per_step=100, samples_per_step=64), 1, range(64))) == 64
    assert len(chosen(sampler(max_samples_per_step=0, samples_per_step=64), 1, range(64))) == 0


def test_a_global_budget_limits_a_ratio_rather_than_dividing_it_again():
    wide = chosen(sampler(ratio=0.9, max_samples_per_step=16, samples_per_step=64), 1, range(64))
    assert wide == chosen(sampler(max_samples_per_step=16, samples_per_step=64), 1, range(64))


def test_without_the_batch_size_each_process_counts_and_says_so_once(caplog):
    with caplog.at_level(logging.WARNING):
        worker = sampler(max_samples_per_step=3)
        assert [len(chosen(worker, step, range(64))) for step in range(3)] == [3, 3, 3]
    (record,) = caplog.records
    text = record.getMessage()
    assert "max_samples_per_step=3" in text
    assert "in each process" in text
    assert "Set samples_per_step" in text


def test_nothing_is_said_where_the_budget_is_one_number_for_all(caplog):
    with caplog.at_level(logging.DEBUG):
        sampler(max_samples_per_step=3, samples_per_step=64)
        sampler(max_samples_per_step=0)
        sampler(max_samples_per_step_per_worker=3)
    assert not caplog.records


def test_the_smaller_of_both_budgets_counts():
    assert len(chosen(sampler(max_samples_per_step=5, max_samples_per_step_per_worker=2), 1, range(64))) == 2
    assert len(chosen(sampler(max_samples_per_step=2, max_samples_per_step_per_worker=5), 1, range(64))) == 2
    both = sampler(max_samples_per_step=32, samples_per_step=64, max_samples_per_step_per_worker=2)
    kept = chosen(both, 1, range(64))
    assert len(kept) == 2
    assert kept < chosen(sampler(max_samples_per_step=32, samples_per_step=64), 1, range(64))


# Which steps, which samples


def test_every_so_many_steps():
    worker = sampler(log_frequency=5)
    assert [step for step in range(-1, 12) if worker.decide(step, 0)] == [0, 5, 10]
    assert all(worker.decide(step, 0, validate=True) for step in range(-1, 12))


def test_samples_to_keep_are_always_recorded():
    never = {"ratio": 0, "val_ratio": 0, "max_samples_per_step_per_worker": 0, "max_samples_per_step": 0}
    worker = sampler(keep_samples=[17, "ab"], log_frequency=1000, **never)
    for validate in (False, True):
        assert chosen(worker, 3, [*range(100), "17", "ab"], validate=validate) == {17, "ab"}
    assert worker.decide(None, 17)


def test_samples_to_keep_have_a_type():
    assert chosen(sampler(keep_samples=["17"], ratio=0), 1, [17, "17"]) == {"17"}
    assert chosen(sampler("keep_samples=17,x", ratio=0), 1, [17, "17", "x"]) == {17, "x"}
    assert sampler(keep_samples=[17], ratio=0).decide(1, numpy.int64(17))


def test_samples_to_keep_use_up_no_budget():
    worker = sampler(keep_samples=[0, 1], max_samples_per_step_per_worker=2)
    assert chosen(worker, 1, range(64)) == {0, 1, 2, 3}


# Validation


def test_training_and_validation_of_one_step_have_separate_budgets():
    worker = sampler(max_samples_per_step_per_worker=4)
    for step in (10, 0, -1):
        kept = Counter(
            validate
            for sample in range(16)
            for validate in (False, True)
            if worker.decide(step, sample, validate=validate)
        )
        assert kept == {False: 4, True: 4}


def test_validation_has_settings_of_its_own():
    worker = sampler(max_samples_per_step_per_worker=4, val_max_samples_per_step_per_worker=7)
    assert len(chosen(worker, 1, range(64))) == 4
    assert len(chosen(worker, 1, range(64), validate=True)) == 7
    worker = sampler(max_samples_per_step=4, samples_per_step=8, ratio=0.5)
    assert len(chosen(worker, 1, range(64), validate=True)) == 64
    worker = sampler(val_max_samples_per_step=16, val_samples_per_step=64)
    assert len(chosen(worker, 1, range(64))) == 64
    assert chosen(worker, 1, range(64), validate=True) == chosen(sampler(ratio=0.25), 1, range(64))
    assert chosen(sampler(val_ratio=0), 1, range(64), validate=True) == set()


def test_a_validation_budget_without_the_batch_size_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        worker = sampler(val_max_samples_per_step=3)
    assert "val_max_samples_per_step=3" in caplog.text
    assert "Set val_samples_per_step" in caplog.text
    assert len(chosen(worker, 1, range(64), validate=True)) == 3


# Rollouts that nobody named


def test_rollouts_without_a_name_have_only_the_ratio():
    worker = sampler(ratio=0.5, max_samples_per_step_per_worker=1, log_frequency=1000)
    tokens = [f"{number:032x}" for number in range(1000)]
    kept = [token for token in tokens if worker.decide(None, None, token=token)]
    assert 400 < len(kept) < 600
    assert kept == [token for token in tokens if worker.decide(7, None, token=token)]
    assert all(sampler(max_samples_per_step_per_worker=1).decide(None, None, token=token) for token in tokens)


def test_a_group_without_a_step_stays_whole():
    worker = sampler(ratio=0.5)
    decisions = [
        {worker.decide(None, sample, token=f"{sample}{n}") for n in range(4)} for sample in range(50)
    ]
    assert all(len(said) == 1 for said in decisions)
    assert {True, False} == set.union(*decisions)


def test_a_rollout_without_anything_to_tell_it_by_is_decided_too():
    assert sampler().decide(None, None)
    assert not sampler(ratio=0).decide(None, None)


# Generations of validation


@given(st.lists(ids, unique=True, max_size=30), st.integers(0, 40), st.randoms())
def test_the_same_samples_are_picked_whatever_their_order(samples, n, shuffle):
    picked = pick_generations(samples, n)
    assert len(picked) == min(n, len(samples))
    other = list(samples)
    shuffle.shuffle(other)
    assert pick_generations(other, n) == picked
    assert pick_generations(samples, n + 1)[:n] == picked


def test_picking_none_and_all():
    assert pick_generations(range(10), 0) == []
    assert sorted(pick_generations(range(10), -1)) == list(range(10))
    with pytest.raises(ValueError, match="n=-2"):
        pick_generations(range(10), -2)


def test_another_seed_picks_others():
    assert set(pick_generations(range(100), 10)) != set(pick_generations(range(100), 10, seed=1))


def test_the_first_are_taken_in_order_when_not_shuffled():
    # Whether the training set is shuffled is nothing that this knows of.
    rows = [{"sample_index": index, "output": str(index)} for index in (5, 3, 9, 1)]
    assert pick_generations(rows, 2, shuffle=False) == rows[:2]
    assert pick_generations(rows, -1, shuffle=False) == rows
    assert pick_generations(rows, 2) == pick_generations(rows[::-1], 2)


def test_a_picked_sample_comes_with_all_its_rollouts():
    rows = [{"sample_index": index, "rollout_n": n} for n in range(4) for index in range(16)]
    picked = pick_generations(rows, 3)
    assert Counter(row["sample_index"] for row in picked) == dict.fromkeys(pick_generations(range(16), 3), 4)
    assert [row["rollout_n"] for row in picked] == [0, 1, 2, 3] * 3


def test_the_sample_is_found_in_what_names_one():
    keys = [TrajectoryKey(step=3, sample_index=index, validate=True) for index in range(20)]
    wanted = pick_generations(range(20), 4)
    assert [key.sample_index for key in pick_generations(keys, 4)] == wanted
    assert [row["key"].sample_index for row in pick_generations([{"key": key} for key in keys], 4)] == wanted
    assert [row["uid"] for row in pick_generations([{"uid": index} for index in range(20)], 4)] == wanted
    assert pick_generations(numpy.arange(20), 4) == wanted
    rows = [{"source": source, "id": index} for source in "ab" for index in range(20)]
    assert len(pick_generations(rows, 3, key=lambda row: (row["source"], row["id"]))) == 3
    with pytest.raises(ValueError, match="sample_index"):
        pick_generations([{"output": "x"}], 1)


# Scores


def row(sample: int, n: int = 0, **columns: Any) -> dict[str, Any]:
    return {"step": 1, "sample_index": sample, "rollout_n": n, **columns}


def test_scores_follow_their_key_not_their_position():
    rows = [row(sample, n, output=f"{sample}.{n}") for sample in range(4) for n in range(2)]
    random.Random(0).shuffle(rows)
    scores = {(1, sample, n): sample * 10 + n for sample in range(4) for n in range(2)}
    extras = [{**row(sample, 1), "format": sample > 1} for sample in range(4)] + [{**row(0, 0), "acc": 0.5}]
    scored = join_scores(rows, scores)
    joined = join_scores(scored.rows, reversed(extras))
    assert not (scored.missing or scored.unknown or scored.duplicate or joined.unknown or joined.duplicate)
    for given_row, out in zip(rows, joined.rows, strict=True):
        sample, n = out["sample_index"], out["rollout_n"]
        assert out["output"] == given_row["output"] == f"{sample}.{n}"
        assert out["score"] == sample * 10 + n
        assert out["format"] == (sample > 1 if n == 1 else None)
        assert out["acc"] == (0.5 if (sample, n) == (0, 0) else None)
    assert len(joined.missing) == 3
    assert all("score" not in given_row for given_row in rows)


def test_columns_never_vanish():
    rows = [row(0, output="a"), row(1, gts="b"), row(2)]
    joined = join_scores(rows, {(1, 1, 0): {"acc": 1.0}, (1, 9, 0): {"lost": 2.0}})
    columns = ["step", "sample_index", "rollout_n", "output", "gts", "acc", "lost"]
    assert [list(out) for out in joined.rows] == [columns] * 3
    assert [out["acc"] for out in joined.rows] == [None, 1.0, None]
    assert [out["output"] for out in joined.rows] == ["a", None, None]
    assert joined.missing == (0, 2)


def test_no_scores_at_all_is_no_failure():
    joined = join_scores([row(0)], {})
    assert (joined.rows, joined.missing) == ([row(0)], (0,))
    assert join_scores([], {}).rows == []
    assert join_scores([], [{**row(0), "score": 1}]).unknown == ((1, 0, 0),)


def test_unknown_and_repeated_keys_are_reported(caplog):
    rows = [row(0), row(1), row(1)]
    scores = [{**row(sample), "score": score} for score, sample in enumerate([0, 0, 1, 7])] + [{"score": 4}]
    joined = join_scores(rows, scores)
    assert [out["score"] for out in joined.rows] == [0, None, None]
    assert joined.duplicate == ((1, 0, 0), (1, 1, 0))
    assert joined.unknown == ((1, 7, 0), None)
    assert joined.missing == (1, 2)
    (record,) = caplog.records
    assert "(1, 7, 0)" in record.getMessage()
    assert "(1, 1, 0)" in record.getMessage()


def test_nothing_is_said_when_all_is_well(caplog):
    join_scores([row(0), row(1)], {(1, 0, 0): 1.0})
    assert not caplog.records


def test_an_id_keeps_its_type():
    rows = [{"step": 1, "sample_index": sample, "rollout_n": 0} for sample in (1, "1")]
    assert [out["score"] for out in join_scores(rows, {(1, "1", 0): 5.0}).rows] == [None, 5.0]


def test_whole_keys_tell_validation_and_attempts_apart():
    keys = [
        TrajectoryKey(1, 0, 0),
        TrajectoryKey(1, 0, 0, validate=True),
        TrajectoryKey(1, 0, 0, validate=True, attempt=1),
    ]
    scores = {key: float(number) for number, key in enumerate(keys)}
    for rows in (
        [{"key": key} for key in keys],
        [row(0, validate=key.validate, attempt=key.attempt) for key in keys],
    ):
        joined = join_scores(rows, scores)
        assert [out["score"] for out in joined.rows] == [0.0, 1.0, 2.0]
        # What does not say which one it means belongs to none of them.
        assert join_scores(rows, {(1, 0, 0): 5.0}).duplicate == ((1, 0, 0),)
    assert join_scores([{"key": keys[0]}], [{"key": keys[1], "score": 1.0}]).unknown == (keys[1],)
    assert join_scores([row(0, validate=False)], [row(0, validate=True, score=1.0)]).unknown == (keys[1],)


def test_rows_that_do_not_say_whether_they_are_validation_take_either():
    assert join_scores([row(0)], {TrajectoryKey(1, 0, 0, validate=True): 3.0}).rows[0]["score"] == 3.0
    assert (
        join_scores([{"key": TrajectoryKey(1, 0, 0, validate=True)}], [row(0, score=3.0)]).rows[0]["score"]
        == 3.0
    )


def test_a_uid_is_a_key():
    rows = [{"uid": "b", "step": 1}, {"uid": "a", "step": 1}]
    assert [out["score"] for out in join_scores(rows, {"a": 1.0, "b": 2.0}).rows] == [2.0, 1.0]
    assert [out["acc"] for out in join_scores(rows, [{"uid": "a", "acc": 1.0}]).rows] == [None, 1.0]
    # Scores that know more than the rows still find them.
    assert join_scores(rows, [{**row(3), "uid": "a", "acc": 1.0}]).rows[1] == {**rows[1], "acc": 1.0}


def test_a_uid_that_all_rollouts_of_a_prompt_share_is_reported_not_spread():
    rows = [row(0, n, uid="prompt") for n in range(4)]
    joined = join_scores(rows, {"prompt": 1.0})
    assert joined.duplicate == ("prompt",)
    assert [out["score"] for out in joined.rows] == [None] * 4
    scores = [{**row(0, n), "uid": "prompt", "score": n} for n in range(4)]
    assert [out["score"] for out in join_scores(rows, scores).rows] == [0, 1, 2, 3]


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)))
def test_every_row_gets_its_own_score_or_none(order, scored):
    rows = [row(index // 4, index % 4) for index in range(12)]
    joined = join_scores(rows, [row(i // 4, i % 4, score=i) for i in order if i in scored])
    assert [out.get("score") for out in joined.rows] == [i if i in scored else None for i in range(12)]
    assert joined.missing == tuple(i for i in range(12) if i not in scored)
