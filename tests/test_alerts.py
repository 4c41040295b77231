"""Rules that watch metrics: how they are read, when they give an alert, and how many."""

from __future__ import annotations

import math
import operator
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackway import Tracker
from trackway.trace.config_values import ConfigError
from trackway.trace.loggers.alerts import Alerts, Rule, parse_rule
from trackway.trace.loggers.email import EmailLogger
from trackway.trace.loggers.webhook import WebhookLogger

from .loggers_for_tests import records

HOUR = 3600.0
COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@pytest.mark.parametrize(
    ("text", "metric", "comparison", "threshold"),
    [
        ("kl > 0.5", "kl", ">", 0.5),
        ("kl>0.5", "kl", ">", 0.5),
        ("  kl\t>=  -.5e-3 ", "kl", ">=", -0.0005),
        ("val-core/gsm8k/acc/mean@1 != 1", "val-core/gsm8k/acc/mean@1", "!=", 1.0),
        ("timing(s)/gen < 3.", "timing(s)/gen", "<", 3.0),
        ("time(s) > 3", "time(s)", ">", 3.0),
        ("a:b == 0", "a:b", "==", 0.0),
        ("loss[d=1,3]<=+2", "loss[d=1,3]", "<=", 2.0),
        ("奖励/均值 < inf", "奖励/均值", "<", math.inf),
        ("'my loss' > 1", "my loss", ">", 1.0),
        ('"a < b">1', "a < b", ">", 1.0),
        ("'error:rate' > 1", "error:rate", ">", 1.0),
        ("a!b > 1", "a!b", ">", 1.0),
        ("not > 1", "not", ">", 1.0),
        ("for > 1", "for", ">", 1.0),
        ("abs > 1", "abs", ">", 1.0),
    ],
)
def test_a_comparison_names_a_metric_of_any_name(text, metric, comparison, threshold):
    rule = parse_rule(text)
    assert (rule.metric, rule.comparison, rule.threshold) == (metric, comparison, threshold)
    assert (rule.steps, rule.level, rule.absolute) == (1, "warning", False)


@pytest.mark.parametrize(
    ("text", "metric", "comparison"),
    [
        ("isnan(loss)", "loss", "isnan"),
        ("isinf( actor/loss )", "actor/loss", "isinf"),
        ("not isfinite(grad_norm)", "grad_norm", "not isfinite"),
        ("not  isfinite(timing(s)/gen)", "timing(s)/gen", "not isfinite"),
        ("isnan('my loss')", "my loss", "isnan"),
        ("isnan(奖励)", "奖励", "isnan"),
    ],
)
def test_a_check_names_a_metric_of_any_name(text, metric, comparison):
    rule = parse_rule(text)
    assert (rule.metric, rule.comparison) == (metric, comparison)
    assert parse_rule(f"{text} for 3 steps").steps == 3


def test_steps_and_level_may_be_given():
    rule = parse_rule("error: reward/mean  <  0.1 for 20 steps")
    assert rule == Rule("reward/mean < 0.1 for 20 steps", "reward/mean", "<", 0.1, 20, "error")
    assert parse_rule("kl > 1 for 1 step").steps == 1
    assert parse_rule("INFO:isnan(kl)").level == "info"
    assert parse_rule("warning : kl > 1").level == "warning"
    assert parse_rule("error: abs(kl) > 1") == Rule("abs(kl) > 1", "kl", ">", 1.0, 1, "error", True)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "the name of a metric at the end"),
        ("kl", "<=, >, >=, ==, != at the end"),
        ("kl >", "a number at the end"),
        ("kl >> 0.5", "a number at '> 0.5' (character 5)"),
        ("kl => 3", "!= at '=> 3' (character 4)"),
        ("kl=>3", "!= at '=>3' (character 3)"),
        ("kl = 3", "!= at '= 3' (character 4)"),
        ("kl === 3", "a number at '= 3' (character 6)"),
        ("kl > loss", "a number at 'loss' (character 6)"),
        ("0.1 > reward", "a number at 'reward' (character 7)"),
        ("0 < x < 1", "a number at 'x < 1' (character 5)"),
        ("kl > nan", "see isnan(), at 'nan' (character 6)"),
        ("kl > 50%", "a number at '50%' (character 6)"),
        ("kl > 10,000", "a number at '10,000' (character 6)"),
        ("kl > 0x10", "a number at '0x10' (character 6)"),
        ("kl > 1 and loss > 1", "'for N steps' or nothing at 'and loss > 1' (character 8)"),
        ("kl > 1 for 20", "'for N steps' or nothing at 'for 20' (character 8)"),
        ("kl > 1 for 20 epochs", "'for N steps' or nothing at 'for 20 epochs' (character 8)"),
        ("kl > 1 for -2 steps", "'for N steps' or nothing at 'for -2 steps' (character 8)"),
        ("kl > 1 for 0 steps", "1 step or more at '0 steps' (character 12)"),
        ("kl > 1 for 2 steps please", "nothing more at 'please' (character 20)"),
        ("my loss > 1", "!= at 'loss > 1' (character 4)"),
        ("critical: kl > 1", "!= at 'kl > 1' (character 11)"),
        ("> 3", "the name of a metric at '> 3' (character 1)"),
        ("'kl > 3", 'the name of a metric at "\'kl > 3" (character 1)'),
        ("isNaN(x)", "abs() at 'isNaN(x)' (character 1); did you mean 'isnan'"),
        ("isfinite(x)", "abs() at 'isfinite(x)' (character 1); did you mean 'not isfinite'"),
        ("isfinite(x) > 1", "abs() at 'isfinite(x) > 1' (character 1)"),
        ("not isnan(x)", "abs() at 'not isnan(x)' (character 1)"),
        ("isnan(x) > 3", "nothing at '> 3' (character 10)"),
        ("isnan(a b)", "!= at 'b)' (character 9)"),
        ("abs(x)", "!= at the end"),
        ("mean(x)", "abs() at 'mean(x)' (character 1)"),
        ("__import__('os').abort()", "abs() at \"__import__('os').abort()\" (character 1)"),
    ],
)
def test_a_wrong_rule_is_an_error_that_shows_the_place_and_what_is_allowed(text, place):
    with pytest.raises(ConfigError) as raised:
        parse_rule(text)
    assert f"alerts={text!r} is not allowed: expected " in str(raised.value)
    assert place in str(raised.value)
    assert "reward/mean < 0.1 for 20 steps" in str(raised.value)


PIECES = st.sampled_from(
    [
        *COMPARISONS,
        "isnan(",
        ")",
        "abs(",
        "not",
        "kl",
        "'",
        '"',
        "0.5",
        "for",
        "3",
        "steps",
        "error:",
        " ",
        "=",
    ]
)


@given(st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=10).map("".join)))
def test_any_text_is_a_rule_or_a_wrong_setting(text):
    try:
        rule = parse_rule(text)
    except ConfigError as error:
        assert "is not allowed: expected" in str(error)
    else:
        assert rule.metric in text and "\n" not in rule.text


NAMES = st.text(st.characters(exclude_characters='"\n', exclude_categories=["Cs"]), min_size=1, max_size=30)


@given(NAMES, st.sampled_from([*COMPARISONS]), st.floats(allow_nan=False), st.integers(1, 10**9 - 1))
def test_a_quoted_name_may_be_anything(name, comparison, threshold, steps):
    rule = parse_rule(f'info: "{name}" {comparison} {threshold!r} for {steps} steps')
    assert (rule.metric, rule.comparison, rule.threshold) == (name, comparison, threshold)
    assert (rule.steps, rule.level) == (steps, "info")


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("x < 1", [0, -math.inf, -5.5]),
        ("x <= 1", [0, 1, -math.inf, -5.5]),
        ("x > 1", [2, math.inf]),
        ("x >= 1", [1, 2, math.inf]),
        ("x == 1", [1]),
        ("x != 1", [0, 2, math.inf, -math.inf, -5.5]),
        ("abs(x) > 1", [2, math.inf, -math.inf, -5.5]),
        ("isnan(x)", [math.nan]),
        ("isinf(x)", [math.inf, -math.inf]),
        ("not isfinite(x)", [math.nan, math.inf, -math.inf]),
    ],
)
def test_for_which_values_a_rule_holds(rule, values):
    every = [0, 1, 2, -5.5, math.inf, -math.inf, math.nan]
    parsed = parse_rule(rule)
    assert [repr(value) for value in every if parsed.holds(value)] == [
        repr(value) for value in every if any(value is each or value == each for each in values)
    ]


def steps_of(rules: Any, *calls: tuple[int, float | None]) -> list[int]:
    """Give the steps at which rules give an alert, of calls far apart; None is a step without the metric."""
    alerts = Alerts(rules)
    found = []
    for number, (step, value) in enumerate(calls):
        metrics = {"other": 5.0} if value is None else {"x": value, "other": 5.0}
        found += [alert["step"] for alert in alerts.look(metrics, step, at=number * HOUR)]
    return found


def test_an_alert_comes_when_a_rule_begins_to_hold_and_again_only_after_it_did_not():
    values = [0, 2, 2, 2, 0, 2, 0, 0, 2, 2]
    assert steps_of("x > 1", *enumerate(values)) == [1, 5, 8]


def test_a_rule_for_several_steps_waits_for_as_many_in_a_row():
    values = [2, 2, 0, 2, 2, 2, 2, 2, 2, 2, 0, 2, 2, 2]
    assert steps_of("x > 1 for 3 steps", *enumerate(values)) == [5, 13]


def test_steps_without_the_metric_do_not_break_the_row_and_do_not_count():
    calls = [(1, 2), (2, None), (3, None), (4, 2), (5, None), (10, 2), (11, None), (12, None)]
    assert steps_of("x > 1 for 3 steps", *calls) == [10]


def test_several_calls_for_one_step_count_once():
    assert steps_of("x > 1 for 3 steps", (1, 2), (1, 2), (1, 2), (2, 2), (2, None), (2, 2), (3, 2)) == [3]


def test_of_several_values_of_one_step_the_last_one_counts():
    assert steps_of("x > 1 for 2 steps", (1, 2), (2, 2), (2, 0), (3, 2), (4, 2)) == [2, 4]
    assert steps_of("x > 1 for 2 steps", (1, 2), (1, 0), (2, 2), (3, 2)) == [3]
    assert steps_of("x > 1 for 2 steps", (1, 0), (1, 2), (2, 2)) == [2]


def test_one_step_gives_one_alert_however_its_values_change():
    assert steps_of("x > 1", (1, 2), (1, 0), (1, 2), (1, 0), (1, 2)) == [1]


def test_steps_may_be_left_out_and_come_late():
    assert steps_of("x > 1 for 3 steps", (10, 2), (9, 2), (30, 2)) == [30]


def test_nan_breaks_the_row_of_a_comparison_and_is_caught_by_a_check():
    calls = [(1, 2), (2, math.nan), (3, 2), (4, math.nan), (5, 0)]
    assert steps_of("x > 1 for 2 steps", *calls) == []
    assert steps_of("x != 7", *calls) == [1, 3, 5]
    assert steps_of("isnan(x)", *calls) == [2, 4]


def test_every_alert_says_what_happened():
    alerts = Alerts(["error: x > 1", "isnan(loss)", "x < 9 for 2 steps"])
    assert alerts.look({"x": 2.5}, 7, at=0) == [
        {"title": "x > 1", "text": "x is 2.5 at step 7", "level": "error", "step": 7}
    ]
    assert alerts.look({"x": 3, "loss": math.nan}, 8, at=1) == [
        {"title": "isnan(loss)", "text": "loss is nan at step 8", "level": "warning", "step": 8},
        {
            "title": "x < 9 for 2 steps",
            "text": "x is 3 at step 8, and this has held for 2 steps",
            "level": "warning",
            "step": 8,
        },
    ]


def test_a_name_with_hidden_characters_cannot_steer_what_shows_the_alert():
    (alert,) = Alerts(["'a\x1b[2J\u202eb\ud83e' > 1"]).look({"a\x1b[2J\u202eb\ud83e": 2}, 1, at=0)
    assert alert["title"] == r"'a\x1b[2J\u202eb\ud83e' > 1"
    assert alert["text"] == r"a\x1b[2J\u202eb\ud83e is 2 at step 1"


CALLS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, 0.0, 2.0, math.nan])), max_size=30)


def expected(calls: list[tuple[int, float | None]], steps: int) -> list[int]:
    """Say in which calls ``x > 1`` for so many steps gives an alert, from the whole sequence."""
    logged = [(number, step, value) for number, (step, value) in enumerate(calls) if value is not None]
    blocks: list[list[tuple[int, float]]] = []
    for position, (number, step, value) in enumerate(logged):
        if position == 0 or logged[position - 1][1] != step:
            blocks.append([])
        blocks[-1].append((number, value))
    found, row, armed = [], 0, True
    for block in blocks:
        holding = [number for number, value in block if value > 1]
        if holding and row + 1 >= steps and armed:
            found.append(holding[0])
            armed = False
        row = row + 1 if block[-1][1] > 1 else 0
        armed = armed or row == 0
    return found


@given(CALLS, st.integers(1, 4))
def test_alerts_depend_on_the_sequence_alone_and_never_come_while_the_metric_is_absent(calls, steps):
    alerts = Alerts([f"x > 1 for {steps} steps"])
    found = []
    for number, (step, value) in enumerate(calls):
        given_ = alerts.look({} if value is None else {"x": value}, step, at=number * HOUR)
        assert len(given_) <= (value is not None and value > 1)
        found += [number] * len(given_)
    assert found == expected(calls, steps)


@given(CALLS, st.integers(1, 4))
def test_rules_do_not_touch_one_another(calls, steps):
    rules = [f"x > 1 for {steps} steps", "y > 1", "isnan(x)"]
    together = Alerts(rules)
    apart = [Alerts([rule]) for rule in rules]
    for number, (step, value) in enumerate(calls):
        metrics = {"y": float(number % 2) * 2} if value is None else {"x": value, "y": 0.0}
        at = number * HOUR
        assert together.look(metrics, step, at) == [
            alert for each in apart for alert in each.look(metrics, step, at)
        ]


def counted(text: str) -> int:
    """Give how many alerts a text says were held back."""
    _, marker, rest = text.partition("; held back since the last alert: ")
    return sum(int(word) for word in rest.split() if word.isdecimal()) if marker else 0


RULES = 25


def named(bits: int) -> dict[str, float]:
    """Give the metrics of one step: those named by the bits are too high."""
    return {f"m{number}": float(bits >> number & 1) for number in range(RULES)}


@given(
    st.lists(st.tuples(st.integers(0, 2**RULES - 1), st.sampled_from([1.0, 61.0, 599.0, 601.0])), max_size=40)
)
def test_no_rule_gives_more_than_one_in_ten_minutes_nor_all_more_than_twenty_in_an_hour(history):
    alerts = Alerts([f"{name} > 0" for name in named(0)])
    at, given_, told, begun, before = 0.0, [], 0, 0, 0
    for step, (bits, pause) in enumerate(history):
        at += pause
        begun += (bits & ~before).bit_count()
        before = bits
        for alert in alerts.look(named(bits), step, at):
            given_.append((at, alert["title"]))
            told += counted(alert["text"])
    for time, title in given_:
        assert sum(time <= other < time + HOUR for other, _ in given_) <= 20
        assert sum(time <= other < time + 600 for other, which in given_ if which == title) == 1
    # Whatever began to hold was given, or is counted by the time of the next alert.
    assert alerts.look(named(0), 100, at) == []
    (alert,) = alerts.look(named(1), 101, at + HOUR)
    assert len(given_) + told + counted(alert["text"]) == begun


def test_an_alert_that_comes_too_early_is_given_later_while_its_rule_holds():
    alerts = Alerts(["x > 1"])
    found = []
    for step, (value, at) in enumerate([(2, 0), (0, 60), (2, 120), (2, 500), (2, 601), (2, 1300)]):
        found += alerts.look({"x": value}, step, at)
    assert [alert["step"] for alert in found] == [0, 4]
    assert found[1]["text"] == "x is 2 at step 4, and this has held for 3 steps"


def test_alerts_that_were_never_given_are_counted_in_the_next_one():
    alerts = Alerts(["x > 1", "y > 1"])
    found = []
    for step, (x, at) in enumerate([(2, 0), (0, 10), (2, 20), (0, 30), (2, 40), (0, 50)]):
        found += alerts.look({"x": x}, step, at)
    found += alerts.look({"y": 2}, 6, 60)
    found += alerts.look({"x": 2}, 7, 700)
    assert [alert["text"] for alert in found] == [
        "x is 2 at step 0",
        "y is 2 at step 6; held back since the last alert: 0 of this rule, 2 of others",
        "x is 2 at step 7",
    ]


def test_a_clock_that_is_set_back_does_not_silence_a_rule():
    alerts = Alerts(["x > 1"])
    year = 365 * 24 * HOUR
    found = []
    for step, (value, at) in enumerate([(2, year), (0, year + 1), (2, 5), (0, 6), (2, 7), (0, 8)]):
        found += alerts.look({"x": value}, step, at)
    assert [alert["step"] for alert in found] == [0, 2]


def test_watching_takes_no_more_memory_with_time():
    alerts = Alerts(["x > 1 for 3 steps", "isnan(x)", "y < 0"])

    def watch(steps: range) -> None:
        for step in steps:
            alerts.look(
                {"x": float(step % 7), "y": float(step % 3 - 1), f"name{step}": 1.0}, step, step * 97.0
            )

    watch(range(2_000))
    tracemalloc.start()
    try:
        watch(range(2_000, 3_000))
        first = tracemalloc.get_traced_memory()[0]
        watch(range(3_000, 12_000))
        assert tracemalloc.get_traced_memory()[0] < first + 5_000
    finally:
        tracemalloc.stop()


def test_one_rule_may_be_given_as_a_text_and_one_twice_counts_once():
    assert len(Alerts("kl > 1").look({"kl": 2}, 1, at=0)) == 1
    rules = ["kl > 1", "kl > 1", parse_rule("kl > 1"), Rule("too far", "kl", ">", 1)]
    assert [alert["title"] for alert in Alerts(rules).look({"kl": 2}, 1, at=0)] == ["kl > 1", "too far"]


@pytest.mark.parametrize("rules", [5, {"kl": 1}, b"kl > 1", [None], [["kl > 1"]], None])
def test_what_is_no_list_of_rules_is_a_wrong_setting(rules):
    with pytest.raises(ConfigError, match="alerts"):
        Alerts(rules)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"comparison": "=>", "threshold": 1}, "Rule.comparison='=>': expected one of <, <=,"),
        ({"comparison": ">"}, "> takes a threshold that is a number"),
        ({"comparison": "isnan", "threshold": 1}, "isnan takes no threshold"),
        ({"comparison": "isnan", "steps": 0}, "Rule.steps=0: expected 1 or more"),
        ({"comparison": "isnan", "level": "bad"}, "Rule.level='bad': expected one of info, warning, error"),
    ],
)
def test_a_rule_made_by_hand_is_checked(fields, message):
    with pytest.raises(ConfigError, match=message):
        Rule("r", "x", **fields)


def test_a_tracker_gives_alerts_of_steps_that_are_not_written(fakes, capsys):
    rules = ["error: timing/gen > 5", "isnan(loss)"]
    with Tracker(["fake", "console"], alerts=rules, log_frequency=100) as tracker:
        for step in range(1, 8):
            tracker.log_metrics({"timing/gen": step, "loss": math.nan if step == 3 else 1.0}, step=step)
    alerts = [call for call in fakes.told() if call[0] == "alert"]
    assert alerts == [
        ["alert", "isnan(loss)", "loss is nan at step 3", "warning", 3],
        ["alert", "timing/gen > 5", "timing/gen is 6 at step 6", "error", 6],
    ]
    assert [record["step"] for record in records(tracker.run.directory, "alert")] == [3, 6]
    assert "ERROR (step 6) timing/gen > 5: timing/gen is 6 at step 6" in capsys.readouterr().out


def test_a_wrong_rule_stops_a_tracker_before_it_begins(fakes):
    with pytest.raises(ConfigError, match="expected a number at 'much'"):
        Tracker("fake", alerts=["kl > much"])
    assert fakes.told() == []


DOCS = (Path(__file__).parent.parent / "docs" / "alerts.md").read_text()


def test_the_rules_in_the_docs_are_rules():
    (block,) = re.findall(r"^```text\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    rules = [parse_rule(line) for line in block.splitlines()]
    assert {rule.comparison for rule in rules} >= {">", "<", "isnan", "isinf", "not isfinite"}


@pytest.mark.parametrize("logger", [WebhookLogger, EmailLogger])
def test_every_setting_stands_in_the_docs(logger):
    heading = {WebhookLogger: "Webhook", EmailLogger: "E-mail"}[logger]
    section = DOCS.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = "".join(re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", cells)) == logger.settings


def test_the_code_of_the_docs_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, mail = re.findall(r"^```python\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    exec(first, {})
    assert "ERROR (step 1) isnan(actor/loss): actor/loss is nan at step 1" in capsys.readouterr().out
    names: dict[str, Any] = {}
    exec(mail, names)
    monkeypatch.setenv("TRACKWAY_EMAIL_PASSWORD", "x")
    assert EmailLogger.check(names["mail"], offline=False)["tls"] == "starttls"


def test_a_rule_whose_metric_never_comes_is_said_to_watch_nothing(tmp_path, caplog):
    rules = ["kl > 0.5", "los > 3", "reward/mean < 0.1", "isnan(nothing/like/it)"]
    with Tracker("console", store=tmp_path, alerts=rules) as tracker:
        for step in range(19):
            tracker.log_metrics({"actor/ppo_kl": 0.1, "loss": 1.0}, step)
        tracker.flush()
        assert "was not logged so far" not in caplog.text
        for step in range(19, 40):
            tracker.log_metrics({"actor/ppo_kl": 0.1, "loss": 1.0}, step)
        tracker.flush()
        said = [record.getMessage() for record in caplog.records if "so far" in record.getMessage()]
        assert said == [
            "alert 'kl > 0.5': 'kl' was not logged so far; logged is 'actor/ppo_kl'",
            "alert 'los > 3': 'los' was not logged so far; logged is 'loss'",
            "alert 'reward/mean < 0.1': 'reward/mean' was not logged so far",
            "alert 'isnan(nothing/like/it)': 'nothing/like/it' was not logged so far",
        ]
    assert len([record for record in caplog.records if "so far" in record.getMessage()]) == 4
    with Tracker("console", store=tmp_path, alerts=["kl > 1", "loss > 3"]) as tracker:
        tracker.log_metrics({"loss": 1.0}, 1)
    assert [record.getMessage() for record in caplog.records][-1].startswith("alert 'kl > 1': 'kl' was not")
