"""Rules that watch metrics: ``reward/mean < 0.1 for 20 steps``, ``kl > 0.5``, ``isnan(loss)``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast, get_args

from ..config_values import ConfigError, nearest, show
from ..printable import visible
from .base import Level

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_CHECKS: dict[str, Callable[[float], bool]] = {
    "isnan": math.isnan,
    "isinf": math.isinf,
    "not isfinite": lambda value: not math.isfinite(value),
}
_LEVELS = get_args(Level)

_QUIET = 600.0
"""Seconds after an alert in which the same rule gives no other."""
_HOUR, _MOST_IN_HOUR = 3600.0, 20
_MOST_NAMES = 1_000
"""Of the metrics that were logged, for the hint what a rule may mean."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        text: the title of its alerts.
        metric: name of the metric that it watches.
        comparison: ``<``, ``<=``, ``>``, ``>=``, ``==``, ``!=``, ``isnan``, ``isinf`` or ``not isfinite``.
        threshold: what is compared with; NaN where nothing is.
        steps: in how many logged steps of the metric in a row it must hold.
        level: of the alert.
        absolute: whether the metric's sign is left out.
    """

    text: str
    metric: str
    comparison: str
    threshold: float = math.nan
    steps: int = 1
    level: Level = "warning"
    absolute: bool = False

    def __post_init__(self) -> None:
        expected = ", ".join((*_COMPARISONS, *_CHECKS))
        if self.comparison not in _COMPARISONS and self.comparison not in _CHECKS:
            raise ConfigError(f"Rule.comparison={show(self.comparison)}: expected one of {expected}")
        if (self.comparison in _CHECKS) != math.isnan(self.threshold):
            needs = "no threshold" if self.comparison in _CHECKS else "a threshold that is a number"
            raise ConfigError(f"Rule.threshold={self.threshold}: {self.comparison} takes {needs}")
        if self.steps < 1:
            raise ConfigError(f"Rule.steps={show(self.steps)}: expected 1 or more")
        if self.level not in _LEVELS:
            raise ConfigError(f"Rule.level={show(self.level)}: expected one of {', '.join(_LEVELS)}")

    def holds(self, value: float) -> bool:
        """Say whether it holds for a value; no comparison holds for NaN."""
        if self.comparison in _CHECKS:
            return _CHECKS[self.comparison](value)
        value = abs(value) if self.absolute else value
        return not math.isnan(value) and _COMPARISONS[self.comparison](value, self.threshold)


_LEVEL = re.compile(rf"({'|'.join(_LEVELS)})\s*:", re.IGNORECASE)
_QUOTED = r"\"[^\"\n]+\"|'[^'\n]+'"
# A call is one only where nothing of a name follows: timing(s)/gen is the name of a metric.
_CALL = re.compile(
    rf"(?P<function>(?:not\s+)?[A-Za-z_]\w*)\(\s*(?P<metric>{_QUOTED}|\S+?)\s*\)(?=\s*$|\s+for\s|\s*[<>=!])"
)
_METRIC = re.compile(rf"{_QUOTED}|(?![<>=!\"'])\S+?(?=\s|$|[<>]|[=!]=|=[<>])")
_COMPARISON = re.compile(r"<=|>=|==|!=|<|>")
_NUMBER = re.compile(r"[-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|inf)(?!\S)")
_STEPS = re.compile(r"for\s+([0-9]{1,9})\s+steps?(?!\S)")


class _Reader:
    """Takes a rule apart from left to right, and knows where it is."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Go past what the pattern describes, if that comes next."""
        self.rest()
        match = pattern.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match

    def rest(self) -> str:
        """Give what comes next, without the space before it and at the end."""
        text = self.text[self.at :].lstrip()
        self.at = len(self.text) - len(text)
        return text.rstrip()

    def fail(self, expected: str, hint: str = "") -> NoReturn:
        """Say what is wrong where it is, and what rules are like."""
        rest = self.rest()
        place = f"at {show(rest)} (character {self.at + 1})" if rest else "at the end"
        raise ConfigError(
            f"alerts={show(self.text)} is not allowed: expected {expected} {place}{hint}. Rules are "
            "'reward/mean < 0.1 for 20 steps', 'kl > 0.5', 'abs(kl) > 1', 'isnan(loss)' and the like, with "
            f"{', '.join((*_COMPARISONS, *_CHECKS))}; 'info:', 'warning:' or 'error:' may come before, and a "
            "name with spaces or comparison signs stands in quotes"
        )


def parse_rule(text: str) -> Rule:
    """Read a rule; it is never run as code.

    Args:
        text: ``[info|warning|error:] metric comparison number [for N steps]``, where ``abs(metric)`` may
            stand for the metric, or ``isnan(metric)``, ``isinf(metric)`` or ``not isfinite(metric)`` for the
            whole comparison. The name of the metric may be in quotes, and must where it has spaces.

    Raises:
        ConfigError: it is none; the message says what was expected, and where.
    """
    if not isinstance(text, str):
        raise ConfigError(f"alerts: {show(text)} is not a rule; expected a text such as 'kl > 0.5'")
    reader = _Reader(text)
    prefix = reader.take(_LEVEL)
    level = cast(Level, prefix[1].lower() if prefix else "warning")
    metric, comparison, absolute = _subject(reader)
    threshold = math.nan
    if not comparison:
        found = reader.take(_COMPARISON) or reader.fail(f"one of {', '.join(_COMPARISONS)}")
        comparison = found[0]
        if reader.rest().lower().startswith("nan"):
            reader.fail("a number, as nothing compares with nan: see isnan(),")
        threshold = float((reader.take(_NUMBER) or reader.fail("a number"))[0])
    steps = reader.take(_STEPS)
    if reader.rest():
        reader.fail("'for N steps' or nothing" if steps is None else "nothing more")
    if steps and int(steps[1]) < 1:
        reader.at = steps.start(1)
        reader.fail("1 step or more")
    title = visible(" ".join(text[prefix.end() if prefix else 0 :].split()), newlines=False)
    return Rule(title, metric, comparison, threshold, int(steps[1]) if steps else 1, level, absolute)


def _subject(reader: _Reader) -> tuple[str, str, bool]:
    """Read the metric; give its name, the check or an empty text, and whether its sign is left out."""
    call = reader.take(_CALL)
    if call is not None:
        function = " ".join(call["function"].split())
        metric = _unquoted(call["metric"])
        if function in _CHECKS:
            return metric, function, False
        compared = _COMPARISON.match(reader.rest())
        if function == "abs":
            return metric, "", True
        if not compared or function == "isfinite" or function.startswith("not "):
            reader.at = call.start()
            names = (*_CHECKS, "abs")
            hint = "" if function.startswith("not ") else nearest(function, names).rstrip("?")
            reader.fail(f"one of {', '.join(f'{name}()' for name in names)}", hint)
        reader.at = call.start()  # time(s) > 3
    found = reader.take(_METRIC) or reader.fail("the name of a metric")
    return _unquoted(found[0]), "", False


def _unquoted(name: str) -> str:
    return name[1:-1] if name[0] == name[-1] and name[0] in "\"'" and len(name) > 2 else name


class _Watch:
    """One rule, and how it stands."""

    __slots__ = ("before", "fired", "held", "last", "row", "rule", "step", "waits")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.step: int | None = None
        self.before = 0  # steps in a row in which it held, without the present one
        self.row = 0  # and with it
        self.fired = False
        self.waits = False  # for an alert to be allowed
        self.held = 0  # alerts that were not given
        self.last = -math.inf

    def due(self, value: float, step: int) -> bool:
        """Take a value; say whether an alert is due."""
        if step != self.step:
            self.fired = self.fired and self.row > 0
            self.before, self.step = self.row, step
        self.row = self.before + 1 if self.rule.holds(value) else 0
        if self.waits and not self.row:
            self.held += 1
            self.waits, self.fired = False, True  # this step is done with
        return self.row >= self.rule.steps and not self.fired


class Alerts:
    """Watches metrics.

    A rule gives an alert when it begins to hold, and again only after a step in which it did not. At most
    one comes in ten minutes, and twenty of all rules together in an hour. One that comes too early is given
    later if its rule still holds then; those that were never given are counted in the next alert.

    Args:
        rules: texts, see ``parse_rule``, or rules; one that comes twice counts once.

    Raises:
        ConfigError: one of them is none.
    """

    def __init__(self, rules: Iterable[str | Rule]) -> None:
        if isinstance(rules, str):
            rules = [rules]
        if isinstance(rules, (bytes, Mapping)) or not isinstance(rules, Iterable):
            raise ConfigError(f"alerts={show(rules)} is not allowed; expected a list of rules")
        read = (rule if isinstance(rule, Rule) else parse_rule(rule) for rule in rules)
        self._watches = [_Watch(rule) for rule in dict.fromkeys(read)]
        self._given: list[float] = []
        self._names: set[str] = set()

    def blind(self) -> dict[str, str]:
        """Give the rules whose metric was never logged, each with what to say about it."""
        found = {}
        for watch in self._watches:
            metric = watch.rule.metric
            if watch.step is None:
                like = sorted(name for name in self._names if metric in name)[:3]
                hint = (
                    f"; logged is {' and '.join(map(show, like))}" if like else nearest(metric, self._names)
                )
                found[watch.rule.text] = f"{show(metric)} was not logged so far{hint}"
        return found

    def look(self, metrics: Mapping[str, float], step: int, at: float) -> list[dict[str, Any]]:
        """Look at what was logged.

        Args:
            metrics: name -> value. Steps without a rule's metric do not count for it.
            step: which one; of several values in a row for the same step the last one counts.
            at: seconds since 1970.

        Returns:
            ``title``, ``text``, ``level`` and ``step`` of each alert.
        """
        if self._watches and len(self._names) < _MOST_NAMES:
            self._names.update(metrics)
        found = []
        for watch in self._watches:
            value = metrics.get(watch.rule.metric)
            if value is None or not watch.due(value, step):
                continue
            watch.fired = self._may(watch, at)
            watch.waits = not watch.fired
            if watch.fired:
                found.append(self._alert(watch, value))
        return found

    def _may(self, watch: _Watch, at: float) -> bool:
        # A clock that was set back must not silence a rule for longer than that.
        self._given = [given for given in self._given if abs(at - given) < _HOUR]
        if abs(at - watch.last) < _QUIET or len(self._given) >= _MOST_IN_HOUR:
            return False
        watch.last = at
        self._given.append(at)
        return True

    def _alert(self, watch: _Watch, value: float) -> dict[str, Any]:
        rule = watch.rule
        text = f"{visible(rule.metric, newlines=False)} is {value:g} at step {watch.step}"
        if watch.row > 1:
            text += f", and this has held for {watch.row} steps"
        own, watch.held = watch.held, 0
        others = sum(each.held for each in self._watches)
        if own or others:
            text += f"; held back since the last alert: {own} of this rule, {others} of others"
        for each in self._watches:
            each.held = 0
        return {"title": rule.text, "text": text, "level": rule.level, "step": watch.step}
