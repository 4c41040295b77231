"""Which trajectories of a step are worth sending on, decided when they have ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from trackway.trace.config_values import CRITERIA

from .hashing import unit_interval

_NEARLY = 1 - 1e-9
"""What a mean of equal numbers may be above them by rounding."""

Unit = tuple[str, ...]
"""Trace ids that are sent on together."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one trajectory of a step ended.

    Attributes:
        id: its trace id.
        sample_index: names its group; one without a sample is a group of its own.
        failed: whether it ended with an error, or its process died.
        truncated: whether a generation of it came to its length limit.
        reward: the total; None without one.
    """

    id: str
    sample_index: int | str | None = None
    rollout_n: int = 0
    attempt: int = 0
    failed: bool = False
    truncated: bool = False
    reward: float | None = None


def rank(
    outcomes: Collection[Outcome],
    *,
    step: int | None,
    seed: int,
    only: Collection[str] | None = None,
    ratio: float | None = None,
) -> list[Unit]:
    """Put the trajectories of a step that are worth sending on in order, the most important ones first.

    1. Those that failed, one by one.
    2. What differs within groups: a group whose rewards vary as a whole; of each other group the best and
       the worst trajectory. A group varies when the variance of its rewards is above zero, and not below the
       mean of all groups that have at least two. Where the rewards of a group do not differ, or fewer than
       two are known, none is best or worst; of equal ones the first rollout is taken.
    3. Those that were truncated, one by one.
    4. The rest, group by group.

    Within each of these the hash of (seed, step, sample) gives the order, so that it is the same whoever
    asks, in whatever order the trajectories stand. A group is followed by its members one by one, the best
    and the worst first, for a budget that is too small for any such group.

    Args:
        only: criteria of ``export_only``: nothing else comes up in 1 to 3, and of the rest nothing.
        ratio: share of the samples that the rest is taken from; alone, all of them count.

    Returns:
        Units; a trajectory may stand in several.
    """
    criteria = set(CRITERIA if only is None and ratio is None else only or ())
    share = ratio if ratio is not None else 1.0 if only is None else 0.0
    groups = _groups(outcomes, seed, step)
    rewards = {name: [each.reward for each in _rewarded(group)] for name, group in groups.items()}
    spread = {name: _variance(values) for name, values in rewards.items()}
    mean = _mean([spread[name] for name, values in rewards.items() if len(values) > 1] or [0.0])
    units: list[Unit] = []
    if "errors" in criteria:
        units += ((each.id,) for group in groups.values() for each in group if each.failed)
    for name, group in groups.items():
        if not spread[name]:
            continue
        if "varied" in criteria and spread[name] >= mean * _NEARLY:
            units += _whole(group, _ends(group, ("best", "worst")))
        else:
            units += ((each.id,) for each in _ends(group, criteria))
    if "truncated" in criteria:
        units += ((each.id,) for group in groups.values() for each in group if each.truncated)
    for name, group in groups.items():
        if share >= 1 or _place(seed, step, name) < share:
            units += _whole(group, _ends(group, ("best", "worst")) if spread[name] else ())
    return units


def take(units: Sequence[Unit], size: Callable[[str], int], budget: int, left: int) -> dict[str, int]:
    """Take units in their order, as long as they fit; what was taken with an earlier one costs nothing.

    It ends with the first unit that does not fit any more, although a smaller one further down might: so a
    larger budget takes all that a smaller one does, and what is not looked at need not be measured. Only
    what would not even fit into a whole budget is passed over.

    Args:
        size: gives the bytes of a trajectory.
        budget: bytes of the whole step.
        left: bytes of it that are not used yet.

    Returns:
        Trace id -> bytes, of those taken.
    """
    taken: dict[str, int] = {}
    for unit in units:
        sizes = {each: size(each) for each in unit if each not in taken}
        needed = sum(sizes.values())
        if needed > budget:
            continue
        if needed > left:
            break
        left -= needed
        taken.update(sizes)
    return taken


_Group = tuple[int | str | None, str | None]
"""Sample, and for one without a sample its trace id."""


def _groups(outcomes: Collection[Outcome], seed: int, step: int | None) -> dict[_Group, list[Outcome]]:
    found: dict[_Group, list[Outcome]] = {}
    for each in sorted(outcomes, key=lambda each: (each.rollout_n, each.attempt, each.id)):
        found.setdefault((each.sample_index, each.id if each.sample_index is None else None), []).append(each)
    # True is no sample, but 1 and "1" are two.
    order = sorted((unit_interval(seed, step, *_named(name)), str(name), name) for name in found)
    return {name: found[name] for *_, name in order}


def _named(name: _Group) -> tuple[int | str | None, ...]:
    sample, trace_id = name
    return (sample,) if trace_id is None else name


def _place(seed: int, step: int | None, name: _Group) -> float:
    # Not the place by which samples were chosen to be recorded: of these, each would be below its share.
    return unit_interval(seed, "export", step, *_named(name))


def _rewarded(group: Sequence[Outcome]) -> Iterator[Outcome]:
    return (each for each in group if each.reward is not None and math.isfinite(each.reward))


def _variance(rewards: Sequence[float | None]) -> float:
    values = [value for value in rewards if value is not None]
    if not values or min(values) == max(values):
        return 0.0
    middle = _mean(values)
    return _mean([(value - middle) * (value - middle) for value in values])


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)  # fsum: the order must not matter
    except OverflowError:
        return math.inf


def _ends(group: Sequence[Outcome], criteria: Collection[str]) -> Iterator[Outcome]:
    rewarded = list(_rewarded(group))
    if "best" in criteria:
        yield max(rewarded, key=lambda each: each.reward or 0.0)
    if "worst" in criteria:
        yield min(rewarded, key=lambda each: each.reward or 0.0)


def _whole(group: Sequence[Outcome], first: Iterable[Outcome]) -> Iterator[Unit]:
    yield tuple(each.id for each in group)
    if len(group) > 1:
        yield from ((name,) for name in dict.fromkeys(each.id for each in (*first, *group)))
