"""What of a step is worth sending on: a pure choice, the same whoever makes it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackway.samplers import HeadSampler, Outcome, rank, take, unit_interval
from trackway.trace.config import load_config
from trackway.trace.config_values import CRITERIA

STEP = 120


def outcome(sample: int | str | None, n: int = 0, reward: float | None = None, **more: bool) -> Outcome:
    return Outcome(f"{sample!r}/{n}", sample, n, reward=reward, **more)


def group(sample: int | str, *rewards: float | None) -> list[Outcome]:
    return [outcome(sample, n, reward) for n, reward in enumerate(rewards)]


def units(outcomes: Collection[Outcome], *only: str, ratio: float | None = None) -> list[set[str]]:
    """Give the units without what stands in an earlier one."""
    seen: set[str] = set()
    found = []
    for unit in rank(outcomes, step=STEP, seed=0, only=only or None, ratio=ratio):
        found.append(set(unit) - seen)
        seen.update(unit)
    return [unit for unit in found if unit]


def ids(outcomes: Collection[Outcome], *only: str, ratio: float | None = None) -> set[str]:
    return set().union(*units(outcomes, *only, ratio=ratio))


def test_each_criterion_finds_its_own() -> None:
    step = [
        *group(1, 0.0, 1.0, 0.5, 1.0),  # varies most
        *group(2, 0.4, 0.5, 0.4, 0.5),  # varies less than the average group
        *group(3, 1.0, 1.0),
        outcome(4, 0, failed=True),
        outcome(4, 1, truncated=True),
    ]
    assert ids(step, "errors") == {"4/0"}
    assert ids(step, "truncated") == {"4/1"}
    assert ids(step, "best") == {"1/1", "2/1"}
    assert ids(step, "worst") == {"1/0", "2/0"}
    assert ids(step, "varied") == {"1/0", "1/1", "1/2", "1/3"}
    assert ids(step, "best", "errors") == {"1/1", "2/1", "4/0"}
    assert ids(step, "varied", "best", "worst") == {"1/0", "1/1", "1/2", "1/3", "2/0", "2/1"}
    assert ids(step) == {each.id for each in step}


@pytest.mark.parametrize(
    "rewards",
    [(), (None, None), (1.0,), (1.0, None), (1.0, 1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (-math.inf,)],
)
def test_where_rewards_do_not_differ_nothing_is_best_worst_or_varied(rewards: tuple[float | None]) -> None:
    step = [*group(1, *rewards), *group("1", 0.0, 1.0)]
    assert ids(step, "best", "worst", "varied") == {"'1'/0", "'1'/1"}
    assert ids(group(1, *rewards), "best", "worst", "varied") == set()


def test_rewards_at_the_ends_of_what_a_number_can_be_are_compared() -> None:
    assert ids(group(1, 1e308, 1e308, -1e308), "best") == {"1/0"}
    assert ids(group(1, 1e308, 1e308, -1e308), "varied") == {"1/0", "1/1", "1/2"}


def test_groups_that_vary_alike_all_vary() -> None:
    for groups in range(1, 60):
        step = [each for sample in range(groups) for each in group(sample, 0.1, 0.2, 0.4)]
        assert len(ids(step, "varied")) == 3 * groups


def test_of_equal_rewards_the_first_rollout_is_taken_and_of_attempts_the_first() -> None:
    step = [replace(outcome(7, n, reward), id=str(n)) for n, reward in enumerate((0.0, 1.0, 1.0, 0.0))]
    again = [replace(each, id=f"{each.id}@1", attempt=1) for each in step]
    for order in (step + again, again[::-1] + step[::-1]):
        assert ids(order, "best", "worst") == {"0", "1"}


def test_without_criteria_a_budget_takes_errors_first_then_what_differs_then_what_was_cut() -> None:
    step = [
        *group(1, 0.0, 1.0),
        *group(2, 0.4, 0.5),
        *group(3, 1.0, 1.0),
        outcome(4, 0, failed=True),
        outcome(3, 9, truncated=True),
        outcome(None, 0),
    ]
    found = units(step)
    assert found[0] == {"4/0"}
    assert {frozenset(unit) for unit in found[1:4]} == {
        frozenset({"1/0", "1/1"}),
        frozenset({"2/0"}),
        frozenset({"2/1"}),
    }
    assert found[4] == {"3/9"}
    assert {frozenset(unit) for unit in found[5:]} == {
        frozenset({"3/0", "3/1"}),
        frozenset({"None/0"}),
    }


def test_a_share_of_the_samples_comes_besides_with_whole_groups() -> None:
    step = [each for sample in range(2_000) for each in group(sample, 1.0, 1.0, 1.0)]
    failed = outcome(-1, failed=True)
    some = ids([*step, failed], "errors", ratio=0.1)
    assert failed.id in some
    counts = Counter(each.sample_index for each in step if each.id in some)
    assert set(counts.values()) == {3}
    assert 120 <= len(counts) <= 280
    assert ids(step, ratio=0.1) == some - {failed.id}
    assert ids(step, ratio=0.05) < ids(step, ratio=0.1) < ids(step, ratio=0.5) < ids(step, ratio=1.0)
    assert ids(step, "errors", ratio=0.0) == set()


def test_of_samples_that_were_recorded_by_a_share_the_same_share_is_left() -> None:
    head = HeadSampler(load_config(ratio=0.1, environ={}))
    step = [outcome(sample) for sample in range(10_000) if head.decide(STEP, sample)]
    assert 850 <= len(step) <= 1_150
    assert 0.4 <= len(ids(step, ratio=0.5)) / len(step) <= 0.6


def test_the_order_is_another_one_in_another_step_and_with_another_seed() -> None:
    step = [outcome(sample) for sample in range(100)]
    orders = {tuple(rank(step, step=number, seed=seed)) for number in (1, 2) for seed in (0, 1)}
    assert len(orders) == 4


OUTCOMES = st.lists(
    st.builds(
        Outcome,
        id=st.uuids().map(str),
        sample_index=st.none() | st.integers(0, 4) | st.sampled_from(["0", "1"]),
        rollout_n=st.integers(0, 3),
        attempt=st.integers(0, 1),
        failed=st.booleans(),
        truncated=st.booleans(),
        reward=st.none() | st.sampled_from([0.0, 0.5, 1.0, math.nan]) | st.floats(),
    ),
    max_size=30,
    unique_by=lambda each: each.id,
)
ONLY = st.none() | st.lists(st.sampled_from(CRITERIA), min_size=1, unique=True)
RATIO = st.none() | st.floats(0, 1)


@given(OUTCOMES, ONLY, RATIO, st.integers(0, 2), st.randoms(use_true_random=False))
def test_no_order_of_arrival_changes_anything(
    outcomes: list[Outcome], only: list[str] | None, ratio: float | None, seed: int, chance: random.Random
) -> None:
    found = rank(outcomes, step=STEP, seed=seed, only=only, ratio=ratio)
    shuffled = chance.sample(outcomes, len(outcomes))
    assert rank(shuffled, step=STEP, seed=seed, only=only, ratio=ratio) == found
    listed = {each for unit in found for each in unit}
    assert listed <= {each.id for each in outcomes}
    if only is ratio is None:
        assert listed == {each.id for each in outcomes}


@given(OUTCOMES, ONLY, RATIO)
def test_what_stands_together_is_a_whole_group(
    outcomes: list[Outcome], only: list[str] | None, ratio: float | None
) -> None:
    by_id = {each.id: each for each in outcomes}
    for unit in rank(outcomes, step=STEP, seed=0, only=only, ratio=ratio):
        (sample,) = {by_id[each].sample_index for each in unit}
        if len(unit) > 1:
            assert set(unit) == {each.id for each in outcomes if each.sample_index == sample}


@given(OUTCOMES, st.data(), st.integers(1, 400), st.integers(0, 400))
def test_what_is_taken_fits_and_a_larger_budget_takes_no_less(
    outcomes: list[Outcome], data: st.DataObject, budget: int, more: int
) -> None:
    sizes = {each.id: data.draw(st.integers(1, 60)) for each in outcomes}
    found = rank(outcomes, step=STEP, seed=0)
    small = take(found, sizes.__getitem__, budget, budget)
    assert sum(small.values()) <= budget
    assert small.items() <= sizes.items()
    if all(sum(sizes[each] for each in unit) <= budget for unit in found):
        assert small.keys() <= take(found, sizes.__getitem__, budget + more, budget + more).keys()
    elif sizes:
        assert small or min(sizes.values()) > budget


@given(OUTCOMES, st.data(), st.integers(1, 400))
def test_a_group_whose_rewards_vary_is_taken_whole_or_none_of_it_that_did_not_fail(
    outcomes: list[Outcome], data: st.DataObject, budget: int
) -> None:
    sizes = {each.id: data.draw(st.integers(1, 60)) for each in outcomes}
    by_id = {each.id: each for each in outcomes}
    found = rank(outcomes, step=STEP, seed=0, only=["errors", "varied"])
    taken = take(found, sizes.__getitem__, budget, budget)
    for unit in found:
        rest = {each for each in unit if not by_id[each].failed}
        if len(unit) > 1 and sum(sizes[each] for each in unit) <= budget:
            assert len(rest & taken.keys()) in (0, len(rest))


@given(OUTCOMES, st.data())
def test_what_comes_later_gets_no_more_than_what_is_left(
    outcomes: list[Outcome], data: st.DataObject
) -> None:
    sizes = {each.id: data.draw(st.integers(0, 60)) for each in outcomes}
    budget = data.draw(st.integers(1, 400))
    left = data.draw(st.integers(0, budget))
    assert sum(take(rank(outcomes, step=1, seed=0), sizes.__getitem__, budget, left).values()) <= left


def test_what_never_fits_is_passed_over_and_the_rest_is_not_even_measured() -> None:
    measured: list[str] = []

    def size(each: str) -> int:
        measured.append(each)
        return {"giant": 1_000}.get(each, 40)

    found = [("giant",), ("a", "b"), ("c",), ("d", "e"), ("f",), *[(str(n),) for n in range(1_000)]]
    assert take(found, size, 130, 130) == {"a": 40, "b": 40, "c": 40}
    assert measured == ["giant", "a", "b", "c", "d", "e"]


def test_of_a_group_larger_than_the_budget_the_best_and_the_worst_are_taken_first() -> None:
    step = group(1, 0.5, 0.0, 0.7, 1.0, 0.2)
    found = rank(step, step=STEP, seed=0, only=["varied"])
    assert list(take(found, lambda each: 40, 100, 100)) == ["1/3", "1/1"]
    assert list(take(found, lambda each: 40, 130, 130)) == ["1/3", "1/1", "1/0"]
    assert list(take(found, lambda each: 40, 200, 200)) == [each.id for each in step]


def test_ten_thousand_trajectories_cost_what_some_hashes_of_each_cost() -> None:
    chance = random.Random(0)
    step = [outcome(n % 625, n // 625, float(chance.random() < 0.4)) for n in range(10_000)]
    begun = process_time()
    for n in range(20_000):
        unit_interval(0, STEP, n)
    hashing = process_time() - begun
    begun = process_time()
    take(rank(step, step=STEP, seed=0), lambda each: 1, 5_000, 5_000)
    assert process_time() - begun < 20 * hashing
