"""Rules that watch metrics: ``reward/mean < 0.1 for 20 steps``, ``kl > 0.5``, ``isnan(loss)``."""

from __future__ import annotations

import math
import operator
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ..config_values import ConfigError, show
from .base import Level

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_CHECKS: dict[str, Callable[[float], bool]] = {"isnan": math.isnan, "isinf": math.isinf}
_RULE = re.compile(
    r"\s*(?:(?P<level>info|warning|error)\s*:\s)?\s*"
    r"(?:(?P<check>[a-z]+)\(\s*(?P<of>[^()\s]+)\s*\)"
    r"|(?P<metric>[^\s<>=!]+)\s*(?P<comparison><=|>=|==|!=|<|>)\s*(?P<threshold>[-+.\w]+))"
    r"(?:\s+for\s+(?P<steps>[0-9]+)\s+steps?)?\s*"
)
_EXPECTED = (
    "such as 'reward/mean < 0.1 for 20 steps', 'kl > 0.5' or 'isnan(loss)', with <, <=, >, >=, ==, !=, isnan "
    "and isinf, and 'info:', 'warning:' or 'error:' before it"
)

_QUIET = 600.0
"""Seconds after an alert in which the same rule gives no other."""
_HOUR, _MOST_IN_HOUR = 3600.0, 20


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        text: as it was written.
        metric: name of the metric that it watches.
        comparison: ``<``, ``<=``, ``>``, ``>=``, ``==``, ``!=``, ``isnan`` or ``isinf``.
        threshold: what is compared with; nothing where there is none.
        steps: in how many logged steps of the metric in a row it must hold.
        level: of the alert.
    """

    text: str
    metric: str
    comparison: str
    threshold: float = math.nan
    steps: int = 1
    level: Level = "warning"

    def holds(self, value: float) -> bool:
        """Say whether it holds for a value; no comparison holds for NaN."""
        if self.comparison in _CHECKS:
            return _CHECKS[self.comparison](value)
        return not math.isnan(value) and _COMPARISONS[self.comparison](value, self.threshold)


def parse_rule(text: str) -> Rule:
    """Read a rule; it is never run as code.

    Raises:
        ConfigError: it is none.
    """
    match = _RULE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"alerts: {show(text)} is not a rule; expected one {_EXPECTED}")
    level = cast(Level, match["level"] or "warning")
    steps = int(match["steps"] or 1)
    if steps < 1:
        raise ConfigError(f"alerts: {show(text)} holds for {steps} steps; expected 1 or more")
    if match["check"]:
        if match["check"] not in _CHECKS:
            raise ConfigError(
                f"alerts: {show(text)}: there is no {match['check']}(); expected a rule {_EXPECTED}"
            )
        return Rule(text, match["of"], match["check"], steps=steps, level=level)
    try:
        threshold = float(match["threshold"])
    except ValueError:
        raise ConfigError(f"alerts: {show(text)}: {match['threshold']} is not a number") from None
    return Rule(text, match["metric"], match["comparison"], threshold, steps, level)


class _State:
    __slots__ = ("fired", "held", "last", "row", "step")

    def __init__(self) -> None:
        self.row = 0  # steps in which it held, one after the other
        self.step: int | None = None
        self.fired = False
        self.last = -math.inf
        self.held = 0  # alerts that were not given


class Alerts:
    """Watches metrics.

    A rule gives an alert when it begins to hold, and again only after it has not held; at most one in ten
    minutes, and all rules together twenty in an hour. Those that were not given are counted in the next one.

    Args:
        rules: texts, see ``parse_rule``, or rules.
    """

    def __init__(self, rules: Iterable[str | Rule]) -> None:
        if isinstance(rules, str):
            rules = [rules]
        self._rules = [(rule if isinstance(rule, Rule) else parse_rule(rule), _State()) for rule in rules]
        self._given: deque[float] = deque()

    def look(self, metrics: Mapping[str, float], step: int, at: float) -> list[dict[str, Any]]:
        """Look at what was logged.

        Args:
            metrics: name -> value.
            step: which one; several calls for the same step count once.
            at: seconds since 1970.

        Returns:
            ``title``, ``text``, ``level`` and ``step`` of each alert.
        """
        found = []
        for rule, state in self._rules:
            value = metrics.get(rule.metric)
            if value is None:
                continue
            if not rule.holds(value):
                state.row, state.fired = 0, False
            elif state.row == 0 or state.step != step:
                state.row += 1
            state.step = step
            if state.row >= rule.steps and not state.fired:
                state.fired = True
                if self._may(state, at):
                    found.append(self._alert(rule, state, value, step))
                else:
                    state.held += 1
        return found

    def _may(self, state: _State, at: float) -> bool:
        while self._given and self._given[0] <= at - _HOUR:
            self._given.popleft()
        if at - state.last < _QUIET or len(self._given) >= _MOST_IN_HOUR:
            return False
        state.last = at
        self._given.append(at)
        return True

    def _alert(self, rule: Rule, state: _State, value: float, step: int) -> dict[str, Any]:
        text = f"{rule.metric} is {value:g} at step {step}"
        if rule.steps > 1:
            text += f", the last of {rule.steps} steps in which this holds"
        if state.held:
            text += f"; {state.held} more such alerts were held back"
            state.held = 0
        return {"title": rule.text.strip(), "text": text, "level": rule.level, "step": step}
