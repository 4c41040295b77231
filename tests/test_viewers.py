"""What a person sees in the terminal, and what a trace must never do to it."""

from __future__ import annotations

import io
import re
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from trackway.trace import semconv
from trackway.trace.model import Event, Span, Status, Summary, ToolCall, Trajectory, TrajectoryKey, Turn
from trackway.trace.printable import visible
from trackway.trace.store import Destination, InFlight, StoreStatus, WriterStatus
from trackway.viewers.state import Rates, status_view
from trackway.viewers.tables import in_flight_table, table
from trackway.viewers.terminal import replay
from trackway.viewers.text import cut, fold

START = 1_767_605_400_000_000_000  # 2026-01-05 09:30:00 UTC
MS = 1_000_000
NOW = 1_800_000_000_000_000_000
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def printed(view: RenderableType, width: int = 80, encoding: str = "utf-8", color: bool = False) -> str:
    """What reaches a stream of this encoding; strict, so that what cannot be encoded raises."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
    system = "standard" if color else None
    Console(file=stream, width=width, force_terminal=color, color_system=system).print(view)
    stream.flush()
    return raw.getvalue().decode(encoding)


def lines(view: RenderableType, width: int = 80, encoding: str = "utf-8") -> str:
    return "\n".join(line.rstrip() for line in printed(view, width, encoding).splitlines())


def span(
    span_id: str, kind: Any = "llm", status: Status = "ok", error: str | None = None, **more: Any
) -> Span:
    end = START + 9 * MS
    facts: dict[str, Any] = {"name": kind, "parent_id": "root", "start_ns": START, "end_ns": end}
    return Span(kind=kind, trace_id=TRACE, span_id=span_id, status=status, error=error, **{**facts, **more})


def episode(**changes: Any) -> Trajectory:
    """A rollout with two generations, a tool that fails, one that answers, and a new policy on the way."""
    adding = ToolCall(
        "calculator",
        {"expression": "17*23"},
        result="391",
        start_ns=START + 1350 * MS,
        end_ns=START + 1350 * MS + 80_000,
        span_id="call1",
    )
    program = ToolCall(
        "python",
        {"code": "total = 17 * 23\nprint(total / 0)", "timeout_s": 10},
        error="ZeroDivisionError: division by zero",
        start_ns=START + 1351 * MS,
        end_ns=START + 1409 * MS,
        span_id="call2",
    )
    turns = (
        Turn(0, "system", "Use the calculator.", token_ids=(1,) * 9),
        Turn(1, "user", "What is 17 times 23?", token_ids=(2,) * 12),
        Turn(
            2,
            "assistant",
            "<tool>17*23</tool>",
            token_ids=(3,) * 11,
            mask=(1,) * 11,
            tool_calls=(adding, program),
            finish_reason="tool_calls",
            policy_version=4,
            start_ns=START + 10 * MS,
            end_ns=START + 1350 * MS,
            span_id="gen1",
        ),
        Turn(3, "tool", "391", token_ids=(4,) * 14, mask=(0,) * 14, name="calculator", span_id="call1"),
        Turn(
            4,
            "assistant",
            "Answer: 391",
            token_ids=(5,) * 7,
            mask=(1,) * 6 + (0,),
            finish_reason="stop",
            policy_version=5,
            start_ns=START + 1500 * MS,
            end_ns=START + 2000 * MS,
            span_id="gen2",
        ),
    )
    facts: dict[str, Any] = {
        "key": TrajectoryKey(1, 17, 2),
        "trace_id": TRACE,
        "status": "ok",
        "error": None,
        "start_ns": START,
        "end_ns": START + 2010 * MS,
        "spans": (
            span("root", "rollout", parent_id=None),
            span("gen1"),
            span("call1", "tool"),
            span("call2", "tool", "error", "ZeroDivisionError: division by zero"),
            span("gen2"),
        ),
        "turns": turns,
        "rewards": {"correct": 1.0, "format": 0.1},
        "annotations": {"gold": 391},
        "policy_versions": (4, 5),
        "project": "demo",
        "experiment": "calculator",
        "notes": ("the tokenizer raised once; its token ids are kept",),
    }
    return Trajectory(**{**facts, **changes})


def said(text: str, **changes: Any) -> Trajectory:
    """A rollout in which the model says one text."""
    return episode(turns=(Turn(0, "assistant", text, **changes),), notes=())


# --- text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("good\rEVIL", r"good\rEVIL"),
        ("ab\b\b\x7f\x00", r"ab\x08\x08\x7f\x00"),
        ("\u202eabc\u2066d\u2069\u200e\u200f", r"\u202eabc\u2066d\u2069\u200e\u200f"),
        ("a\ud83eb\udc80", r"a\ud83eb\udc80"),
        ("zero\u200bwidth\ufeff\U000e0041", r"zero\u200bwidth\ufeff\U000e0041"),
        ("one\u2028line", r"one\u2028line"),
    ],
)
def test_what_steers_or_hides_becomes_an_escape(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    "text",
    ["", "a[i] = b[0] [x] [/]", "tab\tand\nline", "你好 😀 👩‍👩‍👧 é", r"a backslash \x1b stays", "é שלום"],
)
def test_harmless_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_tabs_and_line_breaks_are_escaped_on_request() -> None:
    assert visible("a\tb\nc\x1b", newlines=False) == r"a\tb\nc\x1b"


@given(st.text(st.characters()))
def test_visible_text_never_steers_a_terminal(text: str) -> None:
    shown = visible(text)
    assert not [each for each in shown if unicodedata.category(each) in ("Cc", "Cs") and each not in "\t\n"]
    assert not {unicodedata.bidirectional(each) for each in shown} & {"LRE", "RLE", "PDF", "LRO", "RLO"}
    assert visible(shown) == shown
    shown.encode()


@given(st.text("ab \n你é\u0301😀\u200d-", max_size=120), st.integers(2, 12))
def test_folding_loses_nothing_and_fits(text: str, width: int) -> None:
    folded = list(fold(text, width))
    assert "".join(folded) == text.replace("\n", "")
    assert all(cell_len(line) <= width for line in folded)


def test_folding_breaks_between_words_and_keeps_indentation() -> None:
    assert list(fold("the quick brown fox", 8)) == ["the ", "quick ", "brown ", "fox"]
    assert list(fold("    " + "x" * 12, 10)) == ["    xxxxxx", "xxxxxx"]


def test_folding_does_not_part_a_mark_or_a_joined_emoji_from_its_base() -> None:
    family = "\U0001f469\u200d\U0001f467"
    for text in ("abcde\u0301fg", f"abcd{family}fg"):
        for line in fold(text, 5):
            assert unicodedata.combining(line[0]) == 0
            assert ("\u200d" in line) == (family in line)
    assert list(fold("abcde\u0301fg", 5)) == ["abcde\u0301", "fg"]


@given(st.text("ab \n\u0301", max_size=300), st.integers(10, 100))
def test_a_cut_keeps_both_ends_and_counts_the_rest(text: str, limit: int) -> None:
    head, hidden, tail = cut(text, limit)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + hidden + len(tail) == len(text)
    if hidden:
        assert len(head) + len(tail) <= limit


def test_a_cut_falls_between_words() -> None:
    head, hidden, tail = cut("some words " * 100, 90)
    assert head.endswith(("words ", "some "))
    assert tail.startswith(("words ", "some "))
    assert hidden > 1000


def test_a_text_of_very_many_lines_is_cut_too() -> None:
    head, hidden, tail = cut("\n" * 1000, 2000)
    assert hidden > 900
    assert head.count("\n") + tail.count("\n") <= 50


# --- replay -------------------------------------------------------------------------------------------------


def test_replay_at_80_columns() -> None:
    assert lines(replay(episode())) == (
        """\
1/17/2  ok                                                            reward 1.1
────────────────────────────────────────────────────────────────────────────────
rollout     step 1 · sample 17 · rollout 2 · training
policy      4 → 5
rewards     correct 1 · format 0.1
time        2026-01-05 09:30:00 UTC · 2.01 s
turns       5 turns · 2 generations · 2 tool calls · 1 error
tokens      21 prompt · 32 response (18 generated)
experiment  demo / calculator
trace       4bf92f3577b34da6a3ce929d0e0e4736
noted       gold = 391
warning     the tokenizer raised once; its token ids are kept
────────────────────────────────────────────────────────────────────────────────

0 system    │ Use the calculator.
            ╰ 9 tokens

1 user      │ What is 17 times 23?
            ╰ 12 tokens

2 assistant │ <tool>17*23</tool>
            ├ calculator(expression="17*23")  0.08 ms
            │   → turn 3
            ├ python  58 ms
            │   code       total = 17 * 23
            │              print(total / 0)
            │   timeout_s  10
            │   ERROR ZeroDivisionError: division by zero
            ╰ 1.34 s · 11 tokens · tool_calls · policy 4

3 tool      │ 391
            ╰ calculator · 14 tokens

4 assistant │ Answer: 391
            ╰ 500 ms · 7 tokens (6 trained) · stop · policy 5"""
    )


def test_replay_where_only_ascii_can_be_printed() -> None:
    trajectory = said("你好 😀", tool_calls=(ToolCall("f", {"x": "é"}, result="ö"),))
    shown = lines(replay(trajectory), encoding="ascii").split("\n\n")[1]
    assert shown == (
        r"""0 assistant | \u4f60\u597d \U0001f600
            + f(x="\xe9")
            |   -> \xf6"""
    )


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_no_line_is_wider_than_the_terminal(width: int, encoding: str) -> None:
    call = ToolCall("t" * 300, {"a" * 99: "b" * 500})
    trajectory = episode(
        turns=(
            Turn(0, "assistant", "word " * 100 + "你好😀" * 50, tool_calls=(call,)),
            Turn(1, "tool", "x" * 300, name="n" * 150, error="e" * 300),
        ),
        key=TrajectoryKey(1, "a sample id that is as long as a path/" * 3, 0),
        error="failure " * 40,
    )
    for full in (False, True):
        for line in printed(replay(trajectory, full=full), width, encoding).splitlines():
            assert cell_len(line) <= width


def test_colour_never_carries_the_meaning_alone() -> None:
    trajectory = episode(status="error", error="RuntimeError: out of memory")
    plain = printed(replay(trajectory))
    assert "\x1b" not in plain
    assert plain.startswith("1/17/2  ERROR")
    assert "error       RuntimeError: out of memory" in plain
    coloured = printed(replay(trajectory), color=True)
    assert "\x1b[1;31mERROR" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


@pytest.mark.parametrize(
    ("status", "word"),
    [("ok", "ok"), ("error", "ERROR"), ("died", "DIED"), ("cancelled", "cancelled"), ("running", "running")],
)
def test_each_status_has_a_word(status: Status, word: str) -> None:
    assert lines(replay(episode(status=status))).splitlines()[0].split()[1] == word


def test_a_rollout_that_is_still_open_says_so() -> None:
    assert "2026-01-05 09:30:00 UTC · still open" in lines(replay(episode(status="running", end_ns=None)))


def test_a_rollout_that_died_says_once_why_and_not_how_long_it_took() -> None:
    why = "process ended before this did"
    fallen: dict[str, Any] = {"status": "died", "error": why, "end_ns": None}
    spans = (
        span("root", "trajectory", parent_id=None, **fallen),
        span("agent", "rollout", name="solve", **fallen),
        span("call", "tool", "error", "Timeout: no answer", name="fetch", parent_id="agent"),
    )
    shown = lines(replay(episode(status="died", error=why, spans=spans, end_ns=START + 9 * MS)))
    assert shown.count(why) == 1
    assert "\ntime        2026-01-05 09:30:00 UTC · last call ended after 9.0 ms\n" in shown
    assert shown.endswith("\nopen then   solve\n\nerrors of other calls\nERROR fetch: Timeout: no answer")
    nothing = lines(replay(episode(status="died", error=why, spans=spans, end_ns=None)))
    assert "09:30:00 UTC · end unknown\n" in nothing


def test_what_was_attached_to_a_discarded_rollout_is_not_called_trained() -> None:
    facts = {semconv.ATTACHED_ADVANTAGES: 0.5}
    spans = (*episode().spans, span("fact", "attach", attributes=facts))
    shown = lines(replay(episode(spans=spans, discarded="stale policy")))
    assert "\nattached    mean advantage 0.5\ndiscarded   stale policy\n" in shown
    assert "\ntrained " not in shown
    shown = lines(replay(episode(spans=spans, trained_step=4)))
    assert "\ntrained     step 4\nattached    mean advantage 0.5\n" in shown


def test_a_rollout_nobody_named_is_known_by_its_trace_id() -> None:
    shown = lines(replay(episode(key=None)))
    assert shown.startswith(f"{TRACE}  ok")
    assert "no trajectory(...) named it" in shown


def test_validation_and_attempt_are_in_the_header() -> None:
    shown = lines(replay(episode(key=TrajectoryKey(3, "task/7", 1, validate=True, attempt=2))))
    assert shown.startswith("val/3/task%2F7/1@2  ok")
    assert "step 3 · sample task/7 · rollout 1 · attempt @2 · validation" in shown


def test_warnings_are_told_once_each_and_not_by_the_thousand() -> None:
    notes = tuple(f"note {number}." for number in range(300))
    shown = lines(replay(episode(notes=notes + notes)))
    assert shown.count("note 0.") == 1
    assert "… 250 more (--full shows all)" in shown
    assert len(re.findall(r"note \d+\.", lines(replay(episode(notes=notes), full=True)))) == 300


def test_missing_beginnings_of_token_sequences_are_told() -> None:
    spans = (*episode().spans, span("late", incomplete=True))
    assert "some turns lack token ids at their start" in lines(replay(episode(spans=spans)), width=120)


def test_a_tool_turn_that_was_not_traced_keeps_its_text() -> None:
    turns = (Turn(0, "tool", "the reply", tool_calls=(ToolCall("f", result="other"),)),)
    assert "│ the reply" in lines(replay(episode(turns=turns)))


def test_rewards_that_are_no_plain_numbers_are_shown() -> None:
    shown = lines(replay(episode(rewards={"accuracy": float("nan"), "verdict": "refused"})))
    assert "accuracy nan · verdict refused" in shown
    assert "reward nan" in shown.splitlines()[0]


def test_a_rollout_without_generations_says_so_and_shows_what_the_root_got_and_gave() -> None:
    root = span("root", "rollout", parent_id=None, inputs={"prompt": "Hi", "n": 2}, outputs="two\nlines")
    shown = lines(replay(episode(turns=(), spans=(root,), notes=()))).split("\n\n", 1)[1]
    assert shown == (
        """\
no generation was recorded inside this rollout

inputs      │ {
            │   "prompt": "Hi",
            │   "n": 2
            │ }

outputs     │ two
            │ lines"""
    )


def test_inputs_and_outputs_that_are_not_there_are_not_shown() -> None:
    root = span("root", "trajectory", parent_id=None)
    shown = lines(replay(episode(turns=(), spans=(root,), notes=())))
    assert shown.endswith("\nno generation was recorded inside this rollout")


def test_tool_turns_alone_are_shown_and_the_lack_of_generations_too() -> None:
    call = ToolCall("search", {"q": "x"}, result="nothing", span_id="t")
    turns = (Turn(0, "tool", "nothing", name="search", tool_calls=(call,), span_id="t"),)
    shown = lines(replay(episode(turns=turns)))
    assert "no generation was recorded inside this rollout" in shown
    assert shown.count("nothing") == 1
    assert 'search(q="x")' in shown


def test_the_error_of_a_tool_turn_alone_is_told_once() -> None:
    call = ToolCall("search", {"q": "x"}, error="Timeout: no answer", span_id="t")
    turns = (Turn(0, "tool", "", name="search", tool_calls=(call,), error="Timeout: no answer", span_id="t"),)
    assert lines(replay(episode(turns=turns, spans=()))).count("ERROR Timeout: no answer") == 1


def test_the_error_of_the_rollout_is_told_once() -> None:
    root = span("root", "rollout", "error", "RuntimeError: no", parent_id=None)
    shown = lines(replay(episode(spans=(root,), status="error", error="RuntimeError: no")))
    assert shown.count("RuntimeError") == 1


def test_a_failed_call_without_a_turn_is_still_shown() -> None:
    spans = (*episode().spans, span("x", "other", "error", "Timeout: no answer", name="fetch [page]"))
    shown = lines(replay(episode(spans=spans)))
    assert "2 errors" in shown
    assert shown.endswith("errors of other calls\nERROR fetch [page]: Timeout: no answer")
    assert shown.count("ZeroDivisionError") == 1


def test_a_tool_error_that_its_own_turn_tells_is_told_once() -> None:
    call = ToolCall("f", {}, error="ValueError: no", span_id="t")
    turns = (
        Turn(0, "assistant", "go", tool_calls=(call,)),
        Turn(1, "tool", "", name="f", error="ValueError: no", span_id="t"),
    )
    shown = lines(replay(episode(turns=turns)))
    assert shown.count("ValueError") == 1
    assert "→ ERROR, turn 1" in shown


def test_results_are_matched_to_the_turn_that_repeats_them_as_whole_words() -> None:
    def shown(reply: str) -> str:
        call = ToolCall("f", result="4")
        turns = (Turn(0, "assistant", "x", tool_calls=(call,)), Turn(1, "tool", reply))
        return lines(replay(episode(turns=turns)))

    assert "→ turn 1" in shown("<|im_start|>tool\n4<|im_end|>")
    assert "→ 4" in shown("24 is the number")


def test_every_turn_and_every_call_stands_once_and_in_order_when_the_context_was_trimmed() -> None:
    turns: list[Turn] = []
    for number in range(6):
        prompt = (7,) * (10 if number < 3 else 2)  # from the fourth turn on it no longer holds the first ones
        calls = tuple(
            ToolCall("look", {"at": f"place-{name}"}, result=f"view-{name}", span_id=name)
            for name in (f"{number}-0", f"{number}-1")
        )
        thought = Turn(3 * number, "assistant", f"thought-{number}", tool_calls=calls, policy_version=1)
        turns.append(replace(thought, prompt_ids=prompt))
        turns += [
            Turn(3 * number + each, "tool", call.result or "", name="look", span_id=call.span_id)
            for each, call in enumerate(calls, 1)
        ]
    shown = lines(replay(episode(turns=tuple(turns), policy_versions=(1,))))
    found = re.findall(r"thought-\d|place-\d-\d|view-\d-\d", shown)
    expected = []
    for number in range(6):
        expected.append(f"thought-{number}")
        expected += [f"place-{number}-0", f"place-{number}-1", f"view-{number}-0", f"view-{number}-1"]
    assert found == expected
    assert shown.count("policy 1") == 1


def test_one_turn_alone() -> None:
    shown = lines(replay(episode(), turn=4))
    assert shown.split("\n\n")[1].startswith("4 assistant │ Answer: 391")
    assert "system" not in shown


def test_a_turn_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(LookupError, match=r"1/17/2 has no turn 9; its turns are 0 to 4"):
        replay(episode(), turn=9)
    with pytest.raises(LookupError, match="it has no turns"):
        replay(episode(turns=()), turn=0)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (None, "f()"),
        ({}, "f()"),
        ("{bad", "f({bad)"),
        ([1, None], "f([1, null])"),
        ({"x": None, "y": [True, {"z": 1.5}]}, 'f(x=null, y=[true, {"z": 1.5}])'),
        ({"x": object()}, 'f(x="<object>")'),
        ({1: "int key"}, 'f(1="int key")'),
        ({"q": "你好"}, 'f(q="你好")'),
    ],
)
def test_arguments_of_every_shape(arguments: Any, shown: str) -> None:
    assert f"├ {shown}\n" in lines(replay(said("", tool_calls=(ToolCall("f", arguments, result="r"),))))


def test_arguments_too_deep_or_circular_get_a_typed_placeholder() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    circular: dict[str, Any] = {}
    circular["self"] = circular
    shown = lines(replay(said("", tool_calls=(ToolCall("f", deep), ToolCall("g", circular)))))
    assert "f(<list>)" in shown
    assert "g(self=<dict>)" in shown
    while deep:  # freed step by step: the interpreter would recurse
        deep = deep.pop()


def test_unusual_turns_are_shown() -> None:
    turns: Any = (Turn(0, "ipython", "out"), Turn(1, "assistant", "", token_ids=(1, 2)))  # type: ignore[arg-type]
    shown = lines(replay(episode(turns=turns)))
    assert "0 ipython   │ out" in shown
    assert "1 assistant ╰ no text: set token2text=True and tokenizer=… · 2 tokens" in shown


def test_a_turn_without_text_says_why_once() -> None:
    turns = (
        Turn(0, "user", token_ids=(1, 2)),
        Turn(1, "assistant", "", token_ids=(3,), span_id="gen"),
        Turn(2, "tool", "", name="note", span_id="note"),
        Turn(3, "tool", "", name="sleep", span_id="sleep"),
        Turn(4, "user"),
    )
    spans = (span("gen"), span("note", "tool", outputs=""), span("sleep", "tool"))
    shown = lines(replay(episode(turns=turns, spans=spans)))
    assert "0 user      ╰ no text: set token2text=True and tokenizer=… · 2 tokens\n" in shown
    assert "1 assistant ╰ no text: set token2text=True and tokenizer=… · 1 token\n" in shown
    assert "2 tool      ╰ (empty) · note\n" in shown
    assert "3 tool      ╰ (no result) · sleep\n" in shown
    assert "4 user      ╰ no text was recorded" in shown
    spans = (span("gen", response_text=""), span("other", prompt_text="it was decoded"))
    shown = lines(replay(episode(turns=turns, spans=spans)))
    assert "0 user      ╰ no text was recorded · 2 tokens\n" in shown
    assert "1 assistant ╰ (empty) · 1 token\n" in shown


def test_an_empty_result_of_a_call_is_told() -> None:
    shown = lines(replay(said("x", tool_calls=(ToolCall("f", result=""), ToolCall("g")))))
    assert "├ f()\n            │   → (empty)\n            ├ g()\n            │   (no result)" in shown


def test_an_error_without_a_message_is_its_type() -> None:
    call = ToolCall("f", error="TimeoutError: ", span_id="t")
    spans = (
        span("root", "trajectory", "error", "asyncio.TimeoutError: ", parent_id=None),
        span("x", "other", "error", "KeyError: ", name="fetch"),
    )
    trajectory = episode(
        turns=(Turn(0, "assistant", "x", tool_calls=(call,), error="OSError: "),),
        spans=spans,
        status="error",
        error=spans[0].error,
    )
    shown = lines(replay(trajectory)).splitlines()
    assert "error       asyncio.TimeoutError" in shown
    assert "            │   ERROR TimeoutError" in shown
    assert "            ├ ERROR OSError" in shown
    assert "ERROR fetch: KeyError" in shown
    assert "ValueError: a:" in lines(replay(said("x", error="ValueError: a:")))


STACK = """\
  File "/app/agent.py", line 31, in run
    return self.tools[name](**arguments)
  File "/app/tools/<py>.py", line 7, in python
    exec(code)
"""


def stacked(span_id: str, kind: Any = "tool", **more: Any) -> Span:
    facts = {"exception.type": "ValueError", "exception.message": "no", "exception.stacktrace": STACK}
    return span(span_id, kind, "error", "ValueError: no", events=(Event("exception", START, facts),), **more)


def test_an_error_is_followed_by_where_it_was_raised() -> None:
    call = ToolCall("python", error="ValueError: no", span_id="call")
    trajectory = episode(
        status="error",
        error="ValueError: no",
        turns=(Turn(0, "assistant", "x", tool_calls=(call,)), Turn(1, "tool", error="no", span_id="own")),
        spans=(stacked("root", "trajectory", parent_id=None), stacked("call"), stacked("own"), stacked("x")),
    )
    shown = lines(replay(trajectory))
    place = "/app/tools/<py>.py:7 in python"
    assert f"error       ValueError: no\n            {place}\n" in shown
    assert f"│   ERROR ValueError: no\n            │         {place}\n" in shown
    assert f"├ ERROR no\n            │       {place}" in shown
    assert shown.endswith(f"ERROR tool: ValueError: no\n      {place}")
    assert "exec(code)" not in shown
    whole = lines(replay(trajectory, full=True))
    assert whole.count('  File "/app/agent.py", line 31, in run') == 4
    assert whole.count("    exec(code)") == 4
    assert place not in whole


def test_a_stack_that_is_empty_or_no_stack_costs_nothing() -> None:
    for stack in ("", "no frame in here", 7):
        event = Event("exception", START, {"exception.stacktrace": stack})
        spans = (span("t", "tool", "error", "E: no", events=(event,)),)
        shown = lines(replay(episode(turns=(Turn(0, "tool", error="E: no", span_id="t"),), spans=spans)))
        assert shown.endswith("0 tool      ├ ERROR E: no")


def test_what_the_loop_told_the_model_stands_beside_the_error_of_the_tool() -> None:
    told = "the tool failed, try again"
    asked = ToolCall("f", error="ValueError: no", span_id="t")
    turns = (
        Turn(0, "assistant", "go", tool_calls=(asked,)),
        Turn(1, "tool", told, name="f", error="ValueError: no", span_id="t"),
    )
    shown = lines(replay(episode(turns=turns)))
    assert "1 tool      │ the tool failed, try again\n            ├ ERROR ValueError: no\n" in shown
    alone = (Turn(0, "tool", told, name="f", error="ValueError: no", span_id="t", tool_calls=(asked,)),)
    shown = lines(replay(episode(turns=alone)))
    assert shown.count(told) == 1
    assert shown.count("ERROR ValueError: no") == 1


def test_each_turn_names_the_sub_agent_it_ran_in() -> None:
    spans = (
        span("top", "trajectory", parent_id=None),
        span("main", "rollout", parent_id="top", name="agent"),
        span("plan", parent_id="main"),
        span("w1", "rollout", parent_id="main", name="worker"),
        span("w2", "rollout", parent_id="main", name="worker"),
        span("between", "other", parent_id="w1"),
        span("judge", "rollout", parent_id="w2", name="judge"),
        span("g1", parent_id="between"),
        span("g2", parent_id="w2"),
        span("t2", "tool", parent_id="w2"),
        span("g3", parent_id="judge"),
    )
    turns = tuple(
        Turn(number, "assistant", f"by {name}", finish_reason="stop", span_id=name)
        for number, name in enumerate(("plan", "g1", "g2", "t2", "g3"))
    )
    shown = lines(replay(episode(spans=spans, turns=(*turns, Turn(9, "user", "u")))))
    said = re.findall(r"│ (by \w+)\n +╰ (.*)\n", shown)
    assert said == [
        ("by plan", "stop"),
        ("by g1", "stop · in worker #1"),
        ("by g2", "stop · in worker #2"),
        ("by t2", "stop · in worker #2"),
        ("by g3", "stop · in judge"),
    ]
    side = (span("a", "rollout", parent_id="top", name="left"), span("b", "rollout", parent_id="top"))
    spans = (*spans[:1], *side, span("g1", parent_id="a"))
    assert "╰ stop · in left" in lines(replay(episode(spans=spans, turns=turns[1:2])))


def test_one_agent_alone_is_not_named_at_each_turn() -> None:
    spans = (span("root", "rollout", parent_id=None, name="agent"), span("gen1"), span("gen2"))
    assert " in agent" not in lines(replay(episode(spans=spans)))


def test_spans_in_a_circle_do_not_hang_the_replay() -> None:
    spans = (span("a", parent_id="b"), span("b", "rollout", parent_id="c"), span("c", parent_id="a"))
    assert lines(replay(episode(spans=spans)))


# --- a hostile trace ----------------------------------------------------------------------------------------

MARKUP = ["[/]", "x [/INST]", "[/usr/bin]", "[bold", "[red]", "a[i] = b[0] [x]", "[link=http://e]c[/link]"]
MARKUP += [":smile:", "[@click=quit]"]
CONTROL = [
    "\x1b[2J",
    "\x1b]52;c;aGk=\x07",
    "\x1b]8;;http://e\x1b\\x\x1b]8;;\x1b\\",
    "\x9b2J",
    "good\rEVIL",
    "a\b\b\v\f",
    "\u202etxet",
    "a\ud83eb",
    "\x00\x7f",
    "\x1b[31mred\x1b[0m",
]


def filled(text: str) -> Trajectory:
    """A trajectory that holds ``text`` everywhere where a trace can hold text, marked with a number each."""
    number = iter(range(100))

    def mark() -> str:
        return f"<{next(number)}{text}>"

    call = ToolCall(mark(), {mark(): mark(), "lines": f"{mark()}\n{mark()}"}, result=mark(), error=mark())
    odd = ToolCall(mark(), mark(), result=mark())
    turns = (
        Turn(0, "user", mark(), error=mark()),
        Turn(1, "assistant", mark(), tool_calls=(call, odd), finish_reason=mark(), policy_version=mark()),
        Turn(2, "tool", mark(), name=mark()),
    )
    return episode(
        key=TrajectoryKey(1, mark(), 0),
        error=mark(),
        status="error",
        spans=(span("root", parent_id=None), span("a", "other", "error", mark(), name=mark())),
        turns=turns,
        rewards={mark(): mark()},
        annotations={mark(): mark()},
        policy_versions=(mark(),),
        project=mark(),
        experiment=mark(),
        run_id=mark(),
        notes=(mark(),),
    )


def read_back(shown: str) -> str:
    """Undo the layout: the gutter, line breaks and spaces are gone."""
    return re.sub(r"(?m:^.{12}[│├╰])|\s", "", shown)


@pytest.mark.parametrize("text", MARKUP)
def test_markup_is_shown_as_it_is_everywhere(text: str) -> None:
    shown = read_back(printed(replay(filled(text)), width=400))
    bare = text.replace(" ", "")
    assert [number for number in range(28) if f"<{number}{bare}>" not in shown] == []


@pytest.mark.parametrize("text", CONTROL)
@pytest.mark.parametrize("color", [False, True])
def test_no_control_character_reaches_the_terminal(text: str, color: bool) -> None:
    shown = re.sub(r"\x1b\[[0-9;]*m", "", printed(replay(filled(text)), width=400, color=color))
    assert not [each for each in shown if unicodedata.category(each) in ("Cc", "Cs") and each != "\n"]
    assert "\u202e" not in shown
    shown = read_back(shown)
    assert [number for number in range(28) if f"<{number}{visible(text)}>" not in shown] == []


def test_a_text_cannot_pose_as_a_tool_call_or_as_a_fact() -> None:
    shown = lines(replay(said("hello\n├ transfer(amount=1)\n╰ 3 tokens", finish_reason="stop")))
    assert "│ ├ transfer(amount=1)\n" in shown
    assert "│ ╰ 3 tokens\n" in shown
    assert "\n            ╰ stop" in shown


@pytest.mark.parametrize("text", ["a\ud83eb", "😀你"])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_text_that_cannot_be_encoded_is_replaced(text: str, encoding: str) -> None:
    shown = printed(replay(filled(text)), encoding=encoding)
    assert "\\ud83e" in shown or "😀你" in shown or r"\U0001f600\u4f60" in shown


# --- size ---------------------------------------------------------------------------------------------------


def test_a_long_text_is_cut_before_it_is_laid_out() -> None:
    def size(length: int) -> int:
        text = "x" * length
        call = ToolCall(text, {text: text}, result=text, error=text)
        turns = (Turn(0, "assistant", text, tool_calls=(call,), error=text),)
        return len(printed(replay(episode(turns=turns, error=text))))

    assert size(2_000_000) < size(20_000) * 1.1 < 40_000


def test_a_cut_says_how_much_it_hides_and_how_to_see_it() -> None:
    text = "a" * 2000 + "b" * 3210
    shown = lines(replay(said(text), max_chars=2000))
    hidden = re.search(r"… ([\d,]+) more characters \(--full shows all\)", shown)
    assert hidden
    assert int(hidden[1].replace(",", "")) == len(text) - 1999
    assert hidden[0] not in lines(replay(said(text), full=True))
    assert read_back(printed(replay(said(text), full=True))).count("b" * 3210) == 1


def test_very_many_turns_are_folded_in_the_middle() -> None:
    turns = tuple(Turn(number, "assistant", f"turn-{number}.") for number in range(3000))
    trajectory = episode(turns=turns, spans=episode().spans * 1000)
    shown = lines(replay(trajectory))
    assert "turn-0." in shown
    assert "turn-2999." in shown
    assert "… 2,800 more turns (--full shows all, --turn N shows one)" in shown
    assert len(re.findall(r"turn-\d+\.", shown)) == 200
    assert len(shown) < 40_000
    assert "turn-1500." in lines(replay(trajectory, turn=1500))


def test_full_shows_every_turn_and_call() -> None:
    calls = tuple(ToolCall("f", {"n": number}, result="r") for number in range(120))
    turns = (Turn(0, "assistant", "x", tool_calls=calls), *(Turn(n, "user", f"u{n}.") for n in range(1, 300)))
    assert "… 70 more tool calls (--full shows all)" in lines(replay(episode(turns=turns)))
    whole = lines(replay(episode(turns=turns), full=True))
    assert len(re.findall(r"f\(n=\d+\)", whole)) == 120
    assert len(re.findall(r"u\d+\.", whole)) == 299
    assert "more" not in whole


# --- table --------------------------------------------------------------------------------------------------


def summary(
    key: TrajectoryKey | None, status: Status = "ok", reward: float | None = 1.0, **changes: Any
) -> Summary:
    facts: dict[str, Any] = {
        "key": key,
        "trace_id": TRACE,
        "status": status,
        "step": key and key.step,
        "sample_index": key and key.sample_index,
        "rollout_n": key.rollout_n if key else 0,
        "attempt": 0,
        "validate": bool(key and key.validate),
        "reward": reward,
        "rewards": {},
        "turns": 5,
        "generations": 2,
        "tool_calls": 1,
        "tokens": 1204,
        "errors": 0,
        "spans": 4,
        "start_ns": START,
        "end_ns": START + 5470 * MS,
        "policy_version": 1,
        "project": "p",
        "experiment": "e",
    }
    return Summary(**{**facts, **changes})


def test_table_at_80_columns() -> None:
    rows = [
        summary(TrajectoryKey(1, 17, 0), reward=1.1),
        summary(TrajectoryKey(1, 17, 1), "error", 0.0, errors=2, turns=12, end_ns=START + 67_000 * MS),
        summary(TrajectoryKey(1, 18, 0), "running", None, end_ns=None, tokens=98),
        summary(TrajectoryKey(1, "a", 0, validate=True), "died", float("nan"), end_ns=START + 4 * MS),
    ]
    assert lines(table(rows)) == (
        """\
key        status   reward  turns  tools  tokens  errors    time      started
─────────────────────────────────────────────────────────────────────────────
1/17/0     ok        1.100      5      1   1,204       0  5.47 s  01-05 09:30
1/17/1     ERROR     0.000     12      1   1,204       2  1m 07s  01-05 09:30
1/18/0     running       -      5      1      98       0       -  01-05 09:30
val/1/a/0  DIED        nan      5      1   1,204       0       -  01-05 09:30
4 trajectories, 2 failed, mean reward 0.55 (2 of 4 with a finite reward)"""
    )


def failures() -> list[Summary]:
    return [
        summary(TrajectoryKey(12, 1700 + number, 3), "error", None, error=error)
        for number, error in enumerate(
            [
                "ZeroDivisionError: division by zero",
                "TimeoutError: ",
                "ValueError: the answer is no number:\n\twhat the model said is far too long for one line",
                "TimeoutError: the sandbox did not answer",
            ]
        )
    ]


def test_a_table_says_why_at_80_columns_instead_of_when() -> None:
    rows = [*failures(), summary(TrajectoryKey(12, 9, 0), reward=2 / 3)]
    assert lines(table(rows)) == (
        """\
key        status  reward  tools  errors    time  error
────────────────────────────────────────────────────────────────────────────────
12/1700/3  ERROR        -      1       0  5.47 s  ZeroDivisionError: division b…
12/1701/3  ERROR        -      1       0  5.47 s  TimeoutError
12/1702/3  ERROR        -      1       0  5.47 s  ValueError: the answer is no…
12/1703/3  ERROR        -      1       0  5.47 s  TimeoutError: the sandbox did…
12/9/0     ok       0.667      1       0  5.47 s
5 trajectories, 4 failed, mean reward 0.667 (1 of 5 with a reward)
errors: 2 TimeoutError, 1 ZeroDivisionError, 1 ValueError"""
    )


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_row_of_a_table_is_wider_than_the_terminal_nor_padded(width: int) -> None:
    rows = [*failures(), summary(None), summary(TrajectoryKey(1, "q", 0), experiment="another one")]
    for line in printed(table(rows), width).splitlines():
        assert cell_len(line) <= width
        assert line == line.rstrip()
    shown = printed(table(rows), width)
    assert re.search("^12/1700/3 +ERROR", shown, re.MULTILINE)
    assert ("another one" in shown) == (width >= 80)


def test_a_wide_terminal_shows_when_as_well_and_more_of_why() -> None:
    shown = lines(table(failures()), width=150)
    assert "started" in shown
    assert "ValueError: the answer is no number: what the model said is far too" in shown


def test_very_many_kinds_of_errors_are_summed_up() -> None:
    rows = [summary(TrajectoryKey(1, n, 0), "error", error=f"Error{n}: no") for n in range(9)]
    assert lines(table(rows)).endswith("1 Error4, 4 others")


def test_a_table_of_several_experiments_names_them() -> None:
    rows = [summary(TrajectoryKey(1, 1, 0)), summary(TrajectoryKey(1, 2, 0), experiment="[b]x\x1b")]
    shown = lines(table(rows), width=120)
    assert re.search(r"^1/1/0  ok +e  ", shown, re.MULTILINE)
    assert r"  [b]x\x1b  " in shown
    assert "experiment" not in lines(table(rows[:1]), width=120)


def test_a_table_that_was_cut_says_that_it_counts_what_it_shows() -> None:
    assert lines(table([summary(TrajectoryKey(1, 1, 0))], more=True)).splitlines()[-1] == (
        "1 trajectory shown (there are more), mean reward 1"
    )


def test_the_mean_has_no_more_digits_than_the_rewards() -> None:
    rows = [summary(TrajectoryKey(1, n, 0), reward=reward) for n, reward in enumerate([1.0, 1.0, 0.0001])]
    assert "mean reward 0.667" in lines(table(rows))
    assert " with " not in lines(table(rows))


def test_a_long_key_is_whole_also_at_80_columns() -> None:
    key = TrajectoryKey(1, "django__django-11099", 0)
    shown = lines(table([summary(key), summary(None)]))
    width = shown.index("status")
    column = "".join(line[:width].strip() for line in shown.splitlines())
    assert str(key) in column
    assert f"{key} " in shown
    assert "started" not in shown
    assert TRACE[:12] in column
    assert TRACE[:13] not in column
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_one_long_key_and_one_long_error_leave_room_for_the_other_columns() -> None:
    long = TrajectoryKey(1, "as/long/as/a/path/" * 12, 0)
    rows = [
        summary(TrajectoryKey(1, 17, 0), reward=1.0),
        summary(long, "error", 0.5, error="ValueError: " + "why " * 100, errors=1),
    ]
    shown = lines(table(rows)).splitlines()
    assert all(cell_len(line) <= 80 for line in shown)
    assert shown[0].split()[:3] == ["key", "status", "reward"]
    assert shown[0].split()[-1] == "error"
    assert shown[2].split()[:3] == ["1/17/0", "ok", "1.000"]
    width = shown[0].index("status")
    assert 20 <= width <= 40
    assert shown[-3][width:].split()[:3] == ["ERROR", "0.500", "ValueError:"]
    assert "".join(line[:width].strip() for line in shown[3:-2]) == str(long)
    # Where nothing went wrong, its room goes to the counts.
    names = lines(table([rows[0], summary(long)])).splitlines()[0].split()
    assert names == ["key", "status", "reward", "tools", "tokens", "errors", "time"]


def test_a_table_where_only_ascii_can_be_printed() -> None:
    assert printed(table([summary(TrajectoryKey(1, "ö😀", 0))]), encoding="ascii").isascii()


def test_an_empty_table_is_a_table() -> None:
    assert "0 trajectories" in lines(table([]))


# --- what runs now ------------------------------------------------------------------------------------------


def in_flight(
    key: TrajectoryKey | None, *calls: tuple[Any, str, float], last: float, **facts: Any
) -> InFlight:
    """A rollout with the calls that are open in it (kind, name, seconds), silent for ``last`` seconds."""
    doing = tuple(
        span("a", kind, "running", name=name, start_ns=NOW - int(ago * 1e9), end_ns=None)
        for kind, name, ago in calls
    )
    line = summary(key, "running", None, end_ns=None)
    return InFlight(
        line, doing, NOW - int(last * 1e9), "name-of-its-files", **{"pid": 4711, "host": "node-3", **facts}
    )


def test_what_runs_at_80_columns() -> None:
    rows = [
        in_flight(TrajectoryKey(120, 17, 3), ("tool", "search", 4000), ("tool", "search", 9), last=9),
        in_flight(TrajectoryKey(120, 5, 0, validate=True), ("llm", "generate", 62.4), last=62.4),
        in_flight(TrajectoryKey(120, 6, 0), ("rollout", "solve", 0.35), last=0.35, host="10.0.0.7"),
        in_flight(TrajectoryKey(120, 7, 0), ("trajectory", "trajectory", 90_000), last=12, host=None),
        in_flight(None, last=0, pid=None),
    ]
    assert lines(in_flight_table(rows, NOW, died=1_234)) == (
        """\
key           doing                   for   last sign  turns  process
───────────────────────────────────────────────────────────────────────────────
120/17/3      tool search (+1)     1h 06m   9.0 s ago      5  4711@node-3
val/120/5/0   generation generate  1m 02s  1m 02s ago      5  4711@node-3
120/6/0       rollout solve         0.3 s   0.3 s ago      5  4711@10.0.0.7
120/7/0       between calls        1d 01h    12 s ago      5  4711@?
4bf92f3577b3  -                         -   0.0 s ago      5  name-of-its-files
5 rollouts run; 1,234 died with their process: trackway ls --status died"""
    )


def test_names_of_calls_and_processes_steer_nothing() -> None:
    hostile = "[red]x[/]\x1b[2J\x9b\rEVIL\u202e"
    row = in_flight(TrajectoryKey(1, hostile, 0), ("tool", hostile, 1), last=1, host=hostile)
    shown = printed(in_flight_table([row], NOW), width=200)
    assert shown.count(r"[red]x[/]\x1b[2J\x9b\rEVIL\u202e") == 2
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)


# --- the state of a store -----------------------------------------------------------------------------------


def test_status_at_80_columns() -> None:
    status = StoreStatus(
        recorded=1352,
        exported=1000,
        pending=340,
        dropped=12,
        trajectories=120,
        in_flight=3,
        bytes=1_234_567,
        torn_lines=1,
        died=2,
        unmatched=1,
        writers_alive=2,
        writers_dead=2,
        writers_died=1,
        troubles=4,
        dropped_by_reason={"queue full": 12},
        destinations={
            "mlflow": Destination(exported=1000, pending=340, refused=0, sent_bytes=2_500_000),
            "otlp": Destination(
                exported=1300,
                pending=38,
                refused=2,
                last_error="ConnectionError: connection\n refused",
                lag=3_725.0,
            ),
        },
        writers=(
            writer(1, alive=True, last_wrote=5, recorded=1000, running=2),
            writer(2, alive=True, last_wrote=65, recorded=340, dropped=12, running=1),
            writer(3, alive=False, last_wrote=7_200, recorded=12),
            writer(4, alive=False, last_wrote=3_600, died=True),
        ),
    )
    shown = lines(status_view(status, "/data/run7/trackway-store", followed=False, now_ns=NOW))
    assert shown == (
        """\
store      /data/run7/trackway-store
holds      120 trajectories, 3 running, 2 died, 1.2 MB
processes  2 recording now, 1 ended, 1 DIED
spans      1,352 recorded = 1,000 exported + 340 pending or refused + 12 dropped
dropped    12 queue full
torn       1 line cut short by a crash or a full disk
trouble    4 failures while recording; the log of the training tells more
attached   1 time to a rollout that is not here
follower   none at work; trackway sync sends what is complete

sent to  exported  pending  refused     sent  behind
────────────────────────────────────────────────────
mlflow      1,000      340        0   2.5 MB       -
otlp        1,300       38        2  0 bytes  1h 02m

last error of otlp: ConnectionError: connection refused

process      program   state      recorded  dropped  running  last wrote
────────────────────────────────────────────────────────────────────────
4702@node-3  train.py  recording       340       12        1  1m 05s ago
4701@node-3  train.py  recording     1,000        0        2   5.0 s ago
4704@node-3  train.py  DIED              0        0        0  1h 00m ago
4703@node-3  train.py  ended            12        0        0  2h 00m ago"""
    )


def writer(number: int, *, last_wrote: float, **facts: Any) -> WriterStatus:
    return WriterStatus(
        name=f"20270115T080000-node-3-470{number}-abcdef",
        pid=4700 + number,
        host="node-3.cluster.local",
        program="/home/me/train.py",
        last_wrote_ns=NOW - int(last_wrote * 1e9),
        **facts,
    )


def test_many_writers_are_told_in_a_few_lines() -> None:
    many = [
        writer(
            n,
            alive=n < 40,
            died=40 <= n < 60,
            last_wrote=n,
            recorded=10,
            dropped=1,
            running=n < 40,
        )
        for n in range(1000)
    ]
    status = StoreStatus(10_000, 9_000, 0, 1_000, writers_alive=40, writers_dead=960, writers=tuple(many))
    rows = lines(status_view(status, now_ns=NOW)).partition("last wrote\n")[2].splitlines()[1:]
    assert len(rows) == 20
    # Those that live and were silent longest have a line of their own.
    assert [row.split()[0] for row in rows[:2]] == ["4739@node-3", "4738@node-3"]
    assert rows[12].split() == ["28", "more", "recording", "280", "28", "28", "0.0", "s", "ago"]
    # Of those that died the last ones.
    assert [row.split()[0] for row in rows[13:18]] == [f"47{n}@node-3" for n in range(40, 45)]
    assert rows[18].split() == ["15", "more", "DIED", "150", "15", "0", "45", "s", "ago"]
    assert rows[19].split() == ["940", "ended", "ended", "9,400", "940", "0", "1m", "00s", "ago"]


def test_a_writer_that_left_no_word_is_known_by_its_files() -> None:
    status = StoreStatus(
        0, 0, 0, 0, writers=(WriterStatus("20270115T080000-node-3-4711-abcdef", alive=True),)
    )
    shown = lines(status_view(status), width=100)
    assert "\n20270115T080000-node-3-4711-abcdef  -        recording " in shown


def test_rates_stand_beside_the_counts() -> None:
    places = {"mlflow": Destination(exported=10, pending=2, refused=0)}
    status = StoreStatus(12, 10, 2, 0, destinations=places)
    rates = Rates(recorded=1234.4, bytes=2_000_000, exported={"mlflow": 0.25})
    shown = lines(status_view(status, rates=rates, news=[("08:00:01", "4711@node-3 began to record")]))
    assert "\neach second  1,234 spans, 2.0 MB\n" in shown
    assert "\n08:00:01     4711@node-3 began to record\n" in shown
    assert re.search(r"^mlflow +10 +0\.2 +2 +0 +0 bytes +-$", shown, re.MULTILINE)


def test_facts_are_folded_beside_their_labels_in_a_narrow_terminal() -> None:
    shown = lines(status_view(StoreStatus(1_000_000, 900_000, 100_000, 0)), width=40)
    assert "spans      1,000,000 recorded = 900,000\n           in the journal + 100,000\n" in shown


def test_status_of_a_store_that_is_sent_nowhere() -> None:
    status = StoreStatus(recorded=7, exported=7, pending=0, dropped=0, trajectories=1)
    assert lines(status_view(status)) == (
        """\
holds      1 trajectory, 0 running, 0 bytes
processes  0 recording now, 0 ended
spans      7 recorded = 7 in the journal + 0 pending + 0 dropped
sent to    nowhere yet"""
    )


def test_status_says_when_the_counts_do_not_add_up() -> None:
    shown = lines(status_view(StoreStatus(recorded=9, exported=5, pending=1, dropped=1)))
    assert "ERROR 2 are not accounted for" in shown


def test_status_shows_names_and_errors_as_they_are() -> None:
    status = StoreStatus(
        recorded=1,
        exported=1,
        pending=0,
        dropped=0,
        dropped_by_reason={"[red]\x1b[2J": 1},
        destinations={"[/x]\x9b": Destination(1, 0, 0, "[bold]boom\rbang")},
    )
    shown = printed(status_view(status, "/tmp/[/store]\x1b"))
    for text in (r"[red]\x1b[2J", r"[/x]\x9b", r"[bold]boom\rbang", r"/tmp/[/store]\x1b"):
        assert text in shown
    assert "\x1b" not in shown
