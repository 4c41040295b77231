"""The trajectories of a run, where the store that keeps the run has recorded some."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ..model import Summary, Trajectory
from ..store import Store
from .reading import RunRecord

_TRIES = 10
"""How many trajectories are read for each that is wanted, where others may be of another run."""
_MOST_READ = 500
"""How many are read at most to learn whose they are."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What a run's rollouts came to.

    Attributes:
        count, validation, truncated: how many there are, are of a validation, came to a length limit.
        failures: kind of error, such as ``TimeoutError`` -> how many failed with it.
        best, worst: those of the highest and the lowest reward, both from the end; none is in both.
        mean: of the finite rewards; None where there is none.
    """

    count: int
    validation: int
    truncated: int
    failures: Mapping[str, int]
    best: Sequence[Trajectory]
    worst: Sequence[Trajectory]
    mean: float | None


def rollouts(store: Store, record: RunRecord, most: int = 5) -> Rollouts:
    """Find the trajectories that a run has recorded.

    These are the ones of its experiment that began while it ran; where its rollouts are filed under another
    experiment, those that carry the id of the run.

    Args:
        store: where to look.
        record: the run.
        most: how many of the best, and of the worst.
    """
    ended = record.run.ended or (math.inf if record.run.status == "running" else record.last)
    during = [each for each in store.query(newest=True) if record.run.started <= each.start_ns / 1e9 <= ended]
    found = [each for each in during if each.experiment == record.run.experiment]
    if not found:
        found = [each for each in during[:_MOST_READ] if store.load(each.trace_id).run == record.run.id]
    ranked = sorted(
        (each for each in found if each.reward is not None and math.isfinite(each.reward)),
        key=lambda each: (-(each.reward or 0.0), each.start_ns),
    )
    best = _load(store, ranked, record.run.id, min(most, (len(ranked) + 1) // 2))
    names = {each.trace_id for each in best}
    rest = [each for each in reversed(ranked) if each.trace_id not in names]
    worst = _load(store, rest, record.run.id, most)
    rewards = [each.reward for each in ranked if each.reward is not None]
    failures = Counter(
        (each.error or each.status).partition(":")[0] for each in found if each.status in ("error", "died")
    )
    return Rollouts(
        len(found),
        sum(each.validate for each in found),
        sum(each.truncated for each in found),
        dict(failures.most_common()),
        best,
        worst,
        math.fsum(rewards) / len(rewards) if rewards else None,
    )


def _load(store: Store, ranked: Iterable[Summary], run: str, most: int) -> list[Trajectory]:
    """Read the first of them; those of another run of the same name, at the same time, say so."""
    found: list[Trajectory] = []
    for each in islice(ranked, most * _TRIES):
        if len(found) == most:
            break
        trajectory = store.load(each.trace_id)
        if trajectory.run in (None, run):
            found.append(trajectory)
    return found
