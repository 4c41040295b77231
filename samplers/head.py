"""Which rollouts to record, decided when they start."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from trackway.trace.config import TraceConfig

from .hashing import unit_interval

_log = logging.getLogger(__name__)

_STEPS_KEPT = 64
"""Steps of which the chosen samples are remembered, training and validation each."""


class HeadSampler:
    """Decides for each sample of a step; all its rollouts share the decision.

    A sample is recorded when it is in ``keep_samples``, or when each of these says so:

    1. ``log_frequency`` divides the step (training only);
    2. the hash of (seed, step, sample) lies below ``ratio``, and below ``max_samples_per_step /
       samples_per_step``: alike in every process, so that a group is whole wherever its rollouts run;
    3. it is among the first ``max_samples_per_step_per_worker`` distinct samples of the step that this
       process asks about and that pass 1 and 2. When ``samples_per_step`` is not known,
       ``max_samples_per_step`` is counted here too.

    Samples of ``keep_samples`` use up no budget. Training and validation have separate budgets, also
    where they share a step; the settings of validation are those that begin with ``val_``.

    A budget counts what one process has seen: make a new sampler after a fork.
    """

    def __init__(self, config: TraceConfig) -> None:
        self._seed = config.seed
        self._keep = frozenset(config.keep_samples)
        self._log_frequency = config.log_frequency
        per_worker = config.val_max_samples_per_step_per_worker
        if per_worker is None:  # verl has one key for both, and applies it to each apart
            per_worker = config.max_samples_per_step_per_worker
        self._train = _Rules.make(
            config.ratio,
            config.max_samples_per_step,
            config.samples_per_step,
            config.max_samples_per_step_per_worker,
        )
        self._val = _Rules.make(
            1.0 if config.val_ratio is None else config.val_ratio,
            config.val_max_samples_per_step,
            config.val_samples_per_step,
            per_worker,
        )
        for prefix, cap, known in (
            ("", config.max_samples_per_step, config.samples_per_step),
            ("val_", config.val_max_samples_per_step, config.val_samples_per_step),
        ):
            if cap and known is None:
                _log.warning(
                    "%smax_samples_per_step=%d is counted in each process apart, since the size of a step "
                    "is not known: W workers record up to W times as many. Set %ssamples_per_step to the "
                    "distinct samples of one step to make it one number for all.",
                    prefix,
                    cap,
                    prefix,
                )

    def decide(
        self,
        step: int | None,
        sample_index: int | str | None,
        *,
        validate: bool = False,
        token: str | None = None,
    ) -> bool:
        """Say whether to record a rollout. Any thread may ask.

        Args:
            step: the trainer's step; None when the rollout has none.
            sample_index: the prompt's id; None when the rollout has none.
            token: names a rollout that has no ``sample_index``, for instance its trace id.

        Returns:
            The same for every rollout of a sample in a step. Where the step or the sample is not
            known, only ``keep_samples``, the ratio, and a maximum of 0 count.

        Raises:
            TypeError: a step or sample that is neither an integer nor a text.
        """
        if sample_index is not None and sample_index in self._keep:
            return True
        rules = self._val if validate else self._train
        if rules.budget == 0:
            return False
        if step is None or sample_index is None:
            name = (token,) if sample_index is None and token is not None else (step, sample_index)
            return rules.ratio >= 1 or unit_interval(self._seed, *name) < rules.ratio
        if not validate and step % self._log_frequency:
            return False
        if rules.budget is None:
            return rules.threshold >= 1 or unit_interval(self._seed, step, sample_index) < rules.threshold
        return self._within_budget(rules, rules.budget, step, sample_index)

    def _within_budget(self, rules: _Rules, budget: int, step: int, sample_index: int | str) -> bool:
        # A set only grows until it is full, so what it says without the lock stays true.
        chosen = rules.chosen.get(step, ())
        if sample_index in chosen:
            return True
        if len(chosen) >= budget:
            return False
        if rules.threshold < 1 and unit_interval(self._seed, step, sample_index) >= rules.threshold:
            return False
        with rules.lock:
            samples = rules.chosen.setdefault(step, set())
            if len(samples) < budget:
                samples.add(sample_index)
            if len(rules.chosen) > _STEPS_KEPT:
                del rules.chosen[next(iter(rules.chosen))]
            return sample_index in samples


@dataclass(slots=True)
class _Rules:
    """Those of training or of validation, with what was chosen of each step."""

    ratio: float
    threshold: float
    """Samples whose hash is not below this are not recorded."""
    budget: int | None
    """Most distinct samples of a step in this process."""
    chosen: dict[int, set[int | str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def make(
        cls, ratio: float, per_step: int | None, step_size: int | None, per_worker: int | None
    ) -> _Rules:
        if per_step is None or per_step == 0 or step_size is None:
            limits = [limit for limit in (per_step, per_worker) if limit is not None]
            return cls(ratio, ratio, min(limits, default=None))
        return cls(ratio, min(ratio, per_step / step_size), per_worker)
