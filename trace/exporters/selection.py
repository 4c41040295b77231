"""What of a step a destination gets, and when that is decided: once for each trajectory, and for good.

A step is decided when nothing of it runs any more and a later step of its experiment has begun, so that what
a trainer attaches meanwhile is seen; or when nothing of it was recorded for a while; or when nobody writes
any more; or when somebody waits for it. What ends later is decided by itself, in what is left of the budget.
What has no step is decided a while after its end, with what ended at that time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trackway.samplers.tail import rank, take

from ..config import TraceConfig, value_for
from ..store import Store
from ..store.cursors import Cursors
from ..store.members import StepKey

WAIT = 60.0
"""Seconds without anything new of a step after which it is decided; ten times that while some of it runs."""
_WHILE_IT_RUNS = 10
_BATCH = 50
"""Trajectories that are measured at once."""
_ASKED = "flush"
"""File with the moment until which everything is to be decided, nanoseconds since 1970."""

Due = Sequence[tuple[str, int]]
"""Trace ids, each with its state."""
Measure = Callable[[Sequence[str]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Rules:
    """What one destination gets of a step; see the fields of ``TraceConfig``."""

    only: Collection[str] | None
    ratio: float | None
    budget: int | None
    seed: int


def rules_for(backend: str, config: TraceConfig) -> Rules | None:
    """Give the rules of a destination; None when it gets everything."""
    rules = Rules(
        value_for(backend, config.export_only),
        value_for(backend, config.export_ratio),
        value_for(backend, config.max_bytes_per_step),
        config.seed,
    )
    return None if (rules.only, rules.ratio, rules.budget) == (None, None, None) else rules


def ask(store: Path, config: TraceConfig) -> None:
    """Have everything decided that has ended by now, so that one can wait for it to arrive."""
    if all(rules_for(backend, config) is None for backend in config.backend):
        return
    path = store / _ASKED
    draft = path.with_name(f"{_ASKED}.{os.getpid()}.new")
    draft.write_text(str(time.time_ns()))
    draft.replace(path)


def _asked(store: Path) -> int:
    """Give the moment until which everything is to be decided; 0 when nobody asked."""
    with suppress(OSError, ValueError):
        return int((store / _ASKED).read_text())
    return 0


class Selection:
    """Decides for one destination.

    Args:
        destination: name of its cursor.
        cursors: keep what was decided.
        store: what was recorded.
    """

    def __init__(self, destination: str, cursors: Cursors, store: Store) -> None:
        self._destination = destination
        self._cursors = cursors
        self._store = store
        self._chosen = cursors.chosen(destination)
        self._left_out = cursors.left_out(destination)
        self._keys: dict[str, StepKey] = {}
        self._marks: dict[StepKey, tuple[object, float]] = {}

    def sift(
        self,
        rules: Rules | None,
        due: Due,
        delivered: Mapping[str, int],
        measure: Measure,
        *,
        at_once: bool,
    ) -> tuple[Due, dict[str, int]]:
        """Sort what is due; what is in neither answer waits for its step to be over.

        Args:
            rules: what the destination gets; None is everything.
            due: what it lacks, or has in another state.
            delivered: what it has, and what was left out before.
            measure: gives the bytes of some trajectories, as they would be sent.
            at_once: whether nothing is to be waited for.

        Returns:
            What is to be sent; and trace id -> state of what is left out, from now on or in another state
            than before: what was left out stays so.
        """
        left_out = {trace_id: state for trace_id, state in due if trace_id in self._left_out}
        if left_out:
            self._cursors.leave_out(self._destination, left_out.items())
        if rules is not None:
            new = {
                trace_id: state
                for trace_id, state in due
                if trace_id not in delivered and trace_id not in self._chosen
            }
            complete = delivered.keys() | {trace_id for trace_id, _ in due}
            left_out |= self._decide_all(rules, new, complete, measure, at_once)
            due = [one for one in due if one[0] in self._chosen or one[0] in delivered]
        return [one for one in due if one[0] not in self._left_out], left_out

    def _decide_all(
        self,
        rules: Rules,
        new: Mapping[str, int],
        complete: Set[str],
        measure: Measure,
        at_once: bool,
    ) -> dict[str, int]:
        steps = self._by_step(new)
        self._marks = {key: mark for key, mark in self._marks.items() if key in steps}
        if not steps:
            return {}
        begun = set() if at_once else self._store.begun()
        until = 0 if at_once else _asked(self._store.path)
        left_out: dict[str, int] = {}
        for key, states in steps.items():
            if at_once or self._is_over(key, begun, complete):
                candidates = set(states)
            else:
                # What has no step is never followed by another one.
                by = max(until, time.time_ns() - round(WAIT * 1e9)) if key.step is None else until
                some = self._store.members.some(states) if by else []
                candidates = {each.outcome.id for each in some if each.last_ns <= by}
            if candidates:
                chosen = self._choose(rules, key, candidates, complete, measure)
                out = {each: states[each] for each in candidates if each not in chosen}
                self._cursors.decide(self._destination, str(key), chosen, out.items())
                self._chosen |= chosen.keys()
                self._left_out |= out.keys()
                left_out |= out
        return left_out

    def _by_step(self, new: Mapping[str, int]) -> dict[StepKey, dict[str, int]]:
        known = {trace_id: key for trace_id, key in self._keys.items() if trace_id in new}
        known.update(self._store.members.keys(new.keys() - known.keys()))
        self._keys = known
        steps: dict[StepKey, dict[str, int]] = {}
        for trace_id, state in new.items():
            if trace_id in known:
                steps.setdefault(known[trace_id], {})[trace_id] = state
        return steps

    def _is_over(self, key: StepKey, begun: Collection[StepKey], complete: Set[str]) -> bool:
        members = self._store.members
        runs = key in begun or not members.unfinished(key) <= complete
        if not runs and (members.has_later(key) or any(_is_later(each, key) for each in begun)):
            return True
        mark, now = members.mark(key), time.monotonic()
        before, since = self._marks.get(key, (None, now))
        if before != mark:
            since = now
        self._marks[key] = (mark, since)
        return now - since >= (_WHILE_IT_RUNS * WAIT if runs else WAIT)

    def _choose(
        self,
        rules: Rules,
        key: StepKey,
        candidates: Collection[str],
        complete: Set[str],
        measure: Measure,
    ) -> dict[str, int]:
        members = self._store.members
        known = members.some(candidates) if key.step is None else members.of(key)
        outcomes = [each.outcome for each in known if each.outcome.id in complete]
        units = [
            tuple(each for each in unit if each in candidates)
            for unit in rank(outcomes, step=key.step, seed=rules.seed, only=rules.only, ratio=rules.ratio)
        ]
        if rules.budget is None:
            return {each: 0 for unit in units for each in unit}
        left = rules.budget - self._cursors.used(self._destination, str(key))
        return take(units, _Sizes(units, measure), rules.budget, left)


class _Sizes:
    """Bytes of trajectories, measured some at a time and no more of them than are asked for."""

    def __init__(self, units: Sequence[Sequence[str]], measure: Measure) -> None:
        self._rest = iter(dict.fromkeys(each for unit in units for each in unit))
        self._measure = measure
        self._known: dict[str, int] = {}

    def __call__(self, trace_id: str) -> int:
        while trace_id not in self._known:
            some = list(islice(self._rest, _BATCH))
            self._known.update(zip(some, self._measure(some), strict=True))
        return self._known[trace_id]


def _is_later(one: StepKey, other: StepKey) -> bool:
    if one.step is None or other.step is None or one[:2] != other[:2]:
        return False
    return one.step > other.step
