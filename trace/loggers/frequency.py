"""Which metrics are written at which step: a log of fewer lines, in which the first, the last, the
validations and what matters most are always there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Generic, TypeVar

KEY_METRICS = (
    "*acc*/mean*",
    "*accuracy",
    "critic/score/mean",
    "critic/rewards/mean",
    "*reward/mean",
    "*reward_mean",
    "reward",
    "*kl_loss",
    "*ppo_kl",
    "*/kl",
    "kl",
    "*pg_loss",
    "*/loss",
    "loss",
    "response_length/mean",
    "*response_length",
)
"""Patterns of metrics that are always logged: task accuracy, reward, KL, loss and response length, as
verl, TRL and loops of one's own name them."""

_VALIDATION = re.compile(r"(val|validation|eval|test)([-_][^/]*)?/")
"""How names begin that are measured in a validation: ``val/``, ``val-core/``, ``val-aux/``, ``eval/`` …"""

T = TypeVar("T")


class Frequency(Generic[T]):
    """Chooses what of each step is written.

    Args:
        every: write a metric in the steps that this number divides; or patterns of names -> such numbers,
            of which the first that fits a name counts and ``*`` stands for all others.
        key_metrics: patterns of names that are written in every step.
    """

    def __init__(self, every: int | Mapping[str, int], key_metrics: Sequence[str] = KEY_METRICS) -> None:
        self._every = dict(every) if isinstance(every, Mapping) else {"*": every}
        self._keys = tuple(key_metrics)
        self._whole: int | None = None  # the latest step of which everything is written
        self._step: int | None = None
        self._held: dict[str, T] = {}
        self.is_key = lru_cache(maxsize=None)(self._is_key)
        self._period = lru_cache(maxsize=None)(self._period_of)

    def _is_key(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._keys)

    def _period_of(self, name: str) -> int:
        if self.is_key(name):
            return 1
        return next((every for pattern, every in self._every.items() if fnmatchcase(name, pattern)), 1)

    def take(self, step: int, values: Mapping[str, T]) -> dict[str, T]:
        """Choose among what was logged at a step.

        Args:
            step: which one.
            values: metrics or histograms, by name.

        Returns:
            What is to be written of them, and of what was held back of the same step before.
        """
        if step != self._step:
            if self._step is None:
                self._whole = step
            self._step = step
            self._held.clear()
        if step != self._whole and any(map(_VALIDATION.match, values)):
            self._whole = step
        if step == self._whole:
            now = {**self._held, **values}
            self._held.clear()
            return now
        now = {name: value for name, value in values.items() if step % self._period(name) == 0}
        self._held.update((name, value) for name, value in values.items() if name not in now)
        return now

    def rest(self) -> tuple[int, dict[str, T]]:
        """Give what was held back of the last step, which turned out to be the last one."""
        held, self._held = self._held, {}
        return self._step or 0, held
