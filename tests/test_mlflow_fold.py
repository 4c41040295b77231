"""Trajectories with very many calls or very long texts in MLflow: what the page gets and what it says."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trackway
from trackway.trace.exporters.chat import MESSAGES_LIMIT, fit
from trackway.trace.exporters.content import CONTEXTS_MESSAGES
from trackway.trace.exporters.mlflow_fold import LIMIT, fold
from trackway.trace.exporters.mlflow_payload import payload_of
from trackway.trace.exporters.sync import run
from trackway.trace.exporters.text import TEXT_LIMIT, cut
from trackway.trace.model import Kind, Span, Status, Trajectory, Turn

from .test_mlflow import START, Destination, rollout

TRACE = "a" * 32


def span(
    number: int, parent: int | None, kind: Kind = "tool", *, ms: int = 1, status: Status = "ok", **more: Any
) -> Span:
    error = more.pop("error", None if status == "ok" else f"no {number}")
    start = START + number * 10
    return Span(
        more.pop("name", kind),
        kind,
        TRACE,
        f"{number + 1:016x}",
        None if parent is None else f"{parent + 1:016x}",
        start,
        start + ms * 1_000_000,
        status,
        error,
        **more,
    )


def trajectory(*spans: Span) -> Trajectory:
    return replace(rollout(project="fold"), trace_id=TRACE, spans=spans, turns=(), rewards={})


def numbers(found: Trajectory) -> set[int]:
    return {int(each.span_id, 16) - 1 for each in found.spans}


def parents(found: Trajectory) -> dict[int, int | None]:
    return {
        int(each.span_id, 16) - 1: None if each.parent_id is None else int(each.parent_id, 16) - 1
        for each in found.spans
    }


def agent(turns: int, inside: int) -> list[Span]:
    """Root > rollout > generations, each followed by tools that call another tool."""
    spans = [span(0, None, "trajectory"), span(1, 0, "rollout")]
    for _ in range(turns):
        spans.append(span(len(spans), 1, "llm"))
        for _ in range(inside):
            spans.append(span(len(spans), 1, "tool", name="search"))
            spans.append(span(len(spans), len(spans) - 1, "tool", name="fetch"))
    return spans


# What stays


def test_up_to_the_limit_nothing_is_folded() -> None:
    few = trajectory(*agent(1, (LIMIT - 3) // 2))
    folded = fold(few)
    assert folded.trajectory is few
    assert (folded.count, folded.notes) == (0, {})
    one_more = trajectory(*agent(1, (LIMIT - 3) // 2 + 1))
    assert len(fold(one_more).trajectory.spans) == LIMIT


def test_generations_errors_and_both_ends_stay() -> None:
    spans = agent(50, 49)
    failing = next(n for n, each in enumerate(spans) if n > 2000 and each.name == "fetch")
    spans[failing] = replace(spans[failing], status="error", error="no such page")
    folded = fold(trajectory(*spans))
    left = numbers(folded.trajectory)
    assert len(left) == LIMIT
    assert {n for n, each in enumerate(spans) if each.kind in ("trajectory", "rollout", "llm")} <= left
    assert {failing, failing - 1} <= left
    assert {*range(10), *range(len(spans) - 10, len(spans))} <= left


def test_where_the_calls_outnumber_the_limit_the_slowest_of_the_nearest_stay() -> None:
    spans = [span(0, None, "trajectory")]
    spans += [span(n, 0, "other", ms=1000 if n % 500 == 0 else 1) for n in range(1, 3000)]
    assert {500, 1000, 1500, 2000, 2500} <= numbers(fold(trajectory(*spans)).trajectory)


def test_too_many_errors_and_generations_leave_their_first_and_last() -> None:
    spans = [span(0, None, "trajectory")]
    spans += [span(n, 0, "tool", status="error") for n in range(1, 2001)]
    spans += [span(n, 0, "llm") for n in range(2001, 4001)]
    left = numbers(fold(trajectory(*spans)).trajectory)
    assert len(left) == LIMIT
    errors, generations = sorted(n for n in left if 0 < n <= 2000), sorted(n for n in left if n > 2000)
    assert len(errors) >= LIMIT // 2 and len(generations) >= LIMIT // 3
    assert (errors[0], errors[-1]) == (1, 2000)
    assert (generations[0], generations[-1]) == (2001, 4000)


# What is said of the rest


def test_what_is_folded_is_told_by_the_nearest_call_around_it_that_stays() -> None:
    spans = agent(2, 300)
    folded = fold(trajectory(*spans))
    assert folded.count == len(spans) - LIMIT
    told = Counter[str]()
    for note in folded.notes.values():
        for part in note.split(", "):
            name, _, count = part.partition(" (")[0].partition(" × ")
            told[name] += int(count)
    gone = [spans[n] for n in set(range(len(spans))) - numbers(folded.trajectory)]
    assert told == Counter(each.name for each in gone)
    assert set(folded.notes) <= {each.span_id for each in folded.trajectory.spans}


def test_a_note_tells_times_and_failures_and_no_more_than_eight_names() -> None:
    spans = [span(0, None, "trajectory"), span(1, 0, "rollout")]
    spans += [span(n, 1, "tool", status="error", ms=2, error="same") for n in range(2, 1002)]
    spans += [span(n, 1, "other", name=f"kind {n % 20}", ms=1) for n in range(1002, 2002)]
    note = fold(trajectory(*spans)).notes[spans[1].span_id]
    assert note.startswith("tool × ")
    assert " failed)" in note
    assert "12 other names" in note or "13 other names" in note
    assert len(note) < 400


def test_a_name_of_any_length_makes_a_short_note() -> None:
    spans = [span(0, None, "trajectory")]
    spans += [span(n, 0, "other", name=f"{n}" * 5000) for n in range(1, 400)]
    (note,) = fold(trajectory(*spans)).notes.values()
    assert len(note) < 3000


# Any shape


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_shape_stays_one_tree_within_the_limit(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 60))
    limit = data.draw(st.integers(21, 40))
    kinds: list[Kind] = ["rollout", "llm", "tool", "other"]
    spans = [span(0, None, "trajectory")]
    for n in range(1, count):
        parent = data.draw(st.integers(0, n + 3))  # also one that is unknown, later, or itself
        failed = data.draw(st.booleans())
        spans.append(span(n, parent, data.draw(st.sampled_from(kinds)), status="error" if failed else "ok"))
    folded = fold(trajectory(*spans), limit)
    left = numbers(folded.trajectory)
    assert len(left) == min(count, limit)
    assert folded.count == count - len(left)
    if folded.count:
        above = parents(folded.trajectory)
        assert above.pop(0) is None
        assert set(above.values()) <= left


def test_a_chain_of_calls_deeper_than_the_limit_keeps_its_error() -> None:
    spans = [span(0, None, "trajectory"), *(span(n, n - 1, "other") for n in range(1, 3000))]
    spans[2000] = replace(spans[2000], status="error", error="far inside")
    folded = fold(trajectory(*spans))
    left = numbers(folded.trajectory)
    assert 2000 in left and len(left) == LIMIT
    above = parents(folded.trajectory)
    assert above[2000] == max(n for n in left if n < 2000)


# What the trace says


def outputs(payload: Any, n: int = 0) -> Any:
    return json.loads(payload.spans[n].attributes["mlflow.spanOutputs"])


def test_a_folded_trace_says_so_in_its_tag_and_in_its_spans(tmp_path: Path) -> None:
    many = trajectory(*agent(50, 49))
    payload = payload_of(many, "e", tmp_path)
    assert len(payload.spans) == LIMIT
    assert payload.tags["folded"] == f"{len(many.spans) - LIMIT} of {len(many.spans)} spans"
    note = outputs(payload)["left_out"]
    assert note.startswith(payload.tags["folded"])
    assert "`trackway show 1/0/0 --json` has them" in note
    inside = outputs(payload, 1)["left_out"]
    assert inside.startswith("fetch × ") and "search × " in inside
    assert "folded" not in payload_of(trajectory(*agent(1, 1)), "e", tmp_path).tags


def test_tokens_and_times_of_folded_calls_still_count(tmp_path: Path) -> None:
    spans = agent(400, 0)
    used = {"gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 2}
    spans = [replace(each, attributes=used) if each.kind == "llm" else each for each in spans]
    payload = payload_of(trajectory(*spans), "e", tmp_path)
    assert len(payload.spans) == LIMIT
    assert '"total_tokens":2000' in payload.metadata["mlflow.trace.tokenUsage"]


def test_the_prompts_of_very_many_generations_show_some_thousand_messages_in_all(tmp_path: Path) -> None:
    spans, turns = agent(400, 0), []
    for each in spans:
        if each.kind == "llm":
            turns += [Turn(len(turns), "user", "Go on."), Turn(len(turns) + 1, "assistant", "ok")]
            turns[-1] = replace(turns[-1], span_id=each.span_id)
    payload = payload_of(replace(trajectory(*spans), turns=tuple(turns)), "e", tmp_path)
    prompts = [json.loads(each.attributes["mlflow.spanInputs"])["messages"] for each in payload.spans[2:]]
    assert len(prompts) == LIMIT - 2
    assert sum(map(len, prompts)) <= CONTEXTS_MESSAGES + len(prompts)  # each with a note
    assert all(prompt[-1] == {"role": "user", "content": "Go on."} for prompt in prompts)
    assert len(outputs(payload)["messages"]) == MESSAGES_LIMIT + 1  # the root has room for more


def test_what_is_cut_names_the_command_that_shows_it(tmp_path: Path) -> None:
    long = "x" * (TEXT_LIMIT + 5_000)
    whole = rollout(project="cut", sample="a b", tool_error=None)
    turns = tuple(replace(turn, text=long) if turn.role == "user" else turn for turn in whole.turns)
    payload = payload_of(replace(whole, turns=turns), "e", tmp_path)
    text = str(outputs(payload)["messages"])
    assert "⟨5000 characters are left out here; `trackway show 1/a%20b/0 --full` shows them⟩" in text
    assert payload.metadata["trackway.store"] == str(tmp_path)
    assert payload.metadata["trackway.key"] == "1/a%20b/0"
    assert len(payload.request_preview) <= 1000
    # Without a store there is nothing to point to.
    assert "the Trackway store has them" in cut(long)


def test_a_key_that_is_too_long_gives_way_to_the_trace_id(tmp_path: Path) -> None:
    odd = rollout(project="cut", sample="é" * 5_000)
    payload = payload_of(odd, "e", tmp_path)
    assert payload.metadata["trackway.key"] == odd.trace_id


def test_a_conversation_of_thousands_of_messages_shows_its_beginning_and_its_end() -> None:
    messages = [{"role": "user", "content": str(n)} for n in range(5_000)]
    shown = fit(messages)
    assert len(shown) == MESSAGES_LIMIT + 1
    assert shown[0] == messages[0] and shown[-1] == messages[-1]
    (note,) = [each["content"] for each in shown if each not in messages]
    assert note.startswith(f"⟨{5_000 - MESSAGES_LIMIT} messages of ")
    assert fit(messages[:MESSAGES_LIMIT]) == messages[:MESSAGES_LIMIT]


# From the journal to MLflow


def test_a_folded_trajectory_counts_as_wholly_exported(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    store = tmp_path / "store"
    trackway.configure(store=store, project="many", backend="mlflow", sync="off")

    @trackway.tool_trace
    def look(n: int) -> int:
        return n

    @trackway.rollout_trace
    def agent() -> None:
        for n in range(1000):
            look(n)

    with trackway.trajectory(step=1, sample_index=0):
        agent()
    trackway.shutdown()
    assert run(store, say=lambda _: None) == 0
    status = trackway.open_store(store).status()
    assert (status.recorded, status.exported, status.pending, status.dropped) == (1002, 1002, 0, 0)
    (found,) = Destination(store).search("many", "tags.folded = '702 of 1002 spans'")
    assert len(found.data.spans) == LIMIT
