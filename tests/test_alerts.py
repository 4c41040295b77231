"""Rules that watch metrics: when they speak, and when they hold their tongue."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackway import Tracker
from trackway.trace.config import ConfigError
from trackway.trace.loggers.alerts import Alerts, Rule, parse_rule


def fired(rule: str, values, *, seconds: float = 3600.0) -> list[int]:
    """Give the steps at which a rule speaks; steps are so many seconds apart."""
    alerts = Alerts([rule])
    return [step for step, value in enumerate(values) if alerts.look({"m": value}, step, step * seconds)]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("kl > 0.5", Rule("kl > 0.5", "kl", ">", 0.5)),
        ("reward/mean<0.1 for 20 steps", Rule("reward/mean<0.1 for 20 steps", "reward/mean", "<", 0.1, 20)),
        (
            "error: val-core/gsm8k/acc/mean@1 <= 1e-3",
            Rule(
                "error: val-core/gsm8k/acc/mean@1 <= 1e-3",
                "val-core/gsm8k/acc/mean@1",
                "<=",
                0.001,
                1,
                "error",
            ),
        ),
    ],
)
def test_a_rule_says_what_it_means(text, rule):
    found = parse_rule(text)
    assert (found.metric, found.comparison, found.threshold, found.steps, found.level) == (
        rule.metric, rule.comparison, rule.threshold, rule.steps, rule.level,
    )  # fmt: skip


def test_checks_of_one_value():
    assert parse_rule("isnan(loss)").holds(math.nan) and not parse_rule("isnan(loss)").holds(math.inf)
    assert parse_rule("isinf(loss)").holds(-math.inf)
    assert not parse_rule("loss != 1").holds(math.nan)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kl",
        "kl >",
        "kl > high",
        "> 1",
        "kl > 1 for steps",
        "kl > 1 for 0 steps",
        "exec(kl)",
        "a > 1; b",
        3,
    ],
)
def test_a_wrong_rule_is_an_error_before_the_run_begins(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="alerts"):
        Tracker("console", alerts=[text])
    assert list(tmp_path.iterdir()) == []


def test_it_speaks_when_it_begins_to_hold_and_not_again_until_it_has_not_held():
    assert fired("m > 1", [0, 2, 2, 2, 0, 2]) == [1, 5]
    assert fired("m > 1 for 3 steps", [2, 2, 0, 2, 2, 2, 2]) == [5]


def test_a_step_that_is_logged_twice_counts_once():
    alerts = Alerts(["m > 1 for 2 steps"])
    assert [len(alerts.look({"m": 2}, step, 0.0)) for step in (1, 1, 1, 2)] == [0, 0, 0, 1]


def test_what_is_held_back_is_counted_in_the_next():
    values = [2, 0] * 10
    alerts = Alerts(["m > 1"])
    found = [a for step, value in enumerate(values) for a in alerts.look({"m": value}, step, step * 61.0)]
    assert [alert["step"] for alert in found] == [0, 10]
    assert "4 more such alerts" in found[1]["text"]


def test_all_rules_together_stay_below_a_number():
    alerts = Alerts([f"m{n} > 1" for n in range(50)])
    assert len(alerts.look({f"m{n}": 2 for n in range(50)}, 1, 0.0)) == 20


@given(st.lists(st.sampled_from([0.0, 2.0, None]), max_size=60), st.integers(1, 4))
def test_steps_without_the_metric_change_nothing(values, steps):
    rule = f"m > 1 for {steps} steps"
    alerts = Alerts([rule])
    got = [
        step
        for step, value in enumerate(values)
        if alerts.look({} if value is None else {"m": value}, step, step * 3600.0)
    ]
    there = [(step, value) for step, value in enumerate(values) if value is not None]
    expected = [there[n][0] for n in fired(rule, [value for _, value in there])]
    assert got == expected


def test_an_alert_goes_to_every_logger_also_of_a_step_that_is_not_written(fakes, capsys):
    with Tracker(["fake", "console"], log_frequency=100, alerts=["m > 8"]) as tracker:
        for step in range(1, 20):
            tracker.log_metrics({"m": step}, step=step)
    assert [call for call in fakes.told() if call[0] == "alert"] == [
        ["alert", "m > 8", "m is 9 at step 9", "warning", 9]
    ]
    assert "WARNING (step 9) m > 8: m is 9 at step 9" in capsys.readouterr().out
