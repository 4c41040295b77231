"""A conversation that every turn repeats is stored once, and read back whole."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trackway import llm_trace, rollout_trace, tool_trace, trajectory
from trackway.trace import semconv
from trackway.trace.testing import recording

WORDS = "the quick brown fox jumps over the lazy dog while an agent reads what a tool has said "


@llm_trace
def chat(messages, **settings):
    return {"role": "assistant", "content": f"answer {len(messages)}: {WORDS * 20}"}


@llm_trace
def complete(prompt):
    return {"text": f" answer {len(prompt)}: {WORDS * 20}"}


def journal_bytes(rec):
    rec.status()
    return sum(path.stat().st_size for path in (rec.path / "journal").glob("*.0*.jsonl"))


def talk(turns):
    """Hold a conversation; give what each generation was given, and the bytes that it took."""
    given = []
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            messages = [{"role": "system", "content": WORDS * 5}]
            for turn in range(turns):
                messages.append({"role": "user", "content": f"question {turn}: {WORDS * 20}"})
                given.append(copy.deepcopy(messages))
                messages.append(chat(messages, temperature=0.7))
        found = rec.trajectory()
        size = journal_bytes(rec)
    return given, found, size


def test_bytes_grow_with_the_conversation_and_not_with_its_square():
    sizes = {}
    for turns in (5, 10, 20, 40):
        given, found, sizes[turns] = talk(turns)
        generations = [span for span in found.spans if span.kind == "llm"]
        assert [span.inputs for span in generations] == [
            {"messages": messages, "temperature": 0.7} for messages in given
        ]
        assert not any(span.incomplete for span in found.spans)
    said = sum(len(json.dumps(message)) for message in given[-1])
    assert sizes[40] < 3 * said  # each answer stands in its own span, and in the next conversation
    assert sizes[40] / sizes[20] < 2.1
    assert sizes[20] / sizes[10] < 2.2


def test_a_prompt_that_grows_as_text_is_stored_once():
    sizes = {}
    for turns in (10, 20):
        prompts = []
        with recording() as rec:
            with trajectory(step=1, sample_index=1):
                prompt = WORDS * 10
                for _ in range(turns):
                    prompts.append(prompt)
                    prompt += complete(prompt)["text"] + "\nresult: 42\n"
            found = rec.trajectory()
            sizes[turns] = journal_bytes(rec)
        assert [span.inputs["prompt"] for span in found.spans if span.kind == "llm"] == prompts
    assert sizes[20] / sizes[10] < 2.2


def test_a_state_that_is_handed_from_step_to_step_is_stored_once():
    @rollout_trace
    def step(state):
        state["history"].append({"role": "tool", "content": f"{len(state['history'])} {WORDS * 20}"})
        return state["history"]

    sizes = {}
    for turns in (10, 20):
        wanted = []
        with recording() as rec:
            with trajectory(step=1, sample_index=1):
                state = {"history": [{"role": "user", "content": WORDS}], "score": 0}
                for _ in range(turns):
                    before = copy.deepcopy(state)
                    wanted.append((before, copy.deepcopy(step(state))))
            found = rec.trajectory()
            sizes[turns] = journal_bytes(rec)
        steps = [span for span in found.spans if span.name.endswith("step")]
        assert [(span.inputs["state"], span.outputs) for span in steps] == wanted
    assert sizes[20] / sizes[10] < 2.2


def test_a_conversation_that_was_edited_is_stored_from_the_edit_on():
    given = []
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            messages = [{"role": "user", "content": f"{number} {WORDS * 4}"} for number in range(10)]
            for edit in (None, 9, 5, 0):
                if edit is not None:
                    messages[edit] = {"role": "user", "content": f"edited {WORDS}"}
                given.append(copy.deepcopy(messages))
                chat(messages)
            del messages[3:]
            given.append(copy.deepcopy(messages))
            chat(messages)
        found = rec.trajectory()
    generations = [span for span in found.spans if span.kind == "llm"]
    assert [span.inputs["messages"] for span in generations] == given
    stored = [len(json.loads(span.attributes[semconv.INPUT])["messages"]) for span in generations]
    assert stored == [10, 1, 5, 10, 0]


def test_secrets_in_what_is_shared_stay_masked():
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            messages = [{"role": "system", "content": f"use sk-secret-123456789 {WORDS * 5}"}]
            prompt = f"Authorization: Bearer {WORDS * 5} Bearer "
            for number in range(3):
                messages.append({"role": "user", "content": f"{number} hf_secretsecretsecret"})
                chat(messages)
                complete(prompt)
                prompt += "secret-4711-0815 and so on, with a Bearer "
        found = rec.trajectory()
        text = b"".join(path.read_bytes() for path in (rec.path / "journal").iterdir()).decode()
    assert "secret-" not in text and "secretsecret" not in text
    last = [span for span in found.spans if span.name == "chat"][-1]
    assert last.inputs["messages"][0]["content"].startswith("use ⟨redacted⟩ the quick")
    assert [message["content"] for message in last.inputs["messages"][1:]] == [
        f"{number} ⟨redacted⟩" for number in range(3)
    ]


def test_what_is_masked_or_renamed_in_one_place_is_whole_in_another():
    @tool_trace
    def login(**fields):
        return "done"

    entries = [{"name": "sid", "value": WORDS * 4}]
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            login(cookies=entries)
            login(deep={"api_key": {"list": entries}})
            chat(entries)
            chat([*entries, {"more": 1}])
            login(**{"a\x00b": entries})
            login(**{"a\x00b": [*entries, {"more": 2}]})
        found = rec.trajectory()
    assert not any(span.incomplete for span in found.spans)
    assert [span.inputs for span in found.spans[1:]] == [
        {"cookies": "⟨redacted⟩"},
        {"deep": {"api_key": "⟨redacted⟩"}},
        {"messages": entries},
        {"messages": [*entries, {"more": 1}]},
        {"a␀b": entries},
        {"a␀b": [*entries, {"more": 2}]},
    ]


def test_messages_with_token_ids_are_read_as_before():
    """Which ids are the turn's depends on all messages, so nothing of them is left out."""
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            messages = [{"role": "user", "content": WORDS * 10, "token_ids": [1, 2, 3]}]
            for number in range(3):
                messages.append({"role": "assistant", "content": WORDS, "token_ids": [number, 5]})
                chat(messages)
        found = rec.trajectory()
    last = [span for span in found.spans if span.kind == "llm"][-1]
    assert [message["token_ids"] for message in last.inputs["messages"]] == [
        [1, 2, 3],
        [0, 5],
        [1, 5],
        [2, 5],
    ]


def test_where_the_span_with_the_beginning_is_gone_the_rest_is_read_and_marked():
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            messages = [{"role": "user", "content": WORDS * 10}]
            for number in range(3):
                rec.status()  # written line by line
                messages.append({"role": "user", "content": f"{number}"})
                chat(messages)
        rec.status()
        (segment,) = (rec.path / "journal").glob("*.0000.jsonl")
        lines = segment.read_bytes().splitlines(keepends=True)
        segment.write_bytes(b"".join(line for line in lines if b'\\"content\\":\\"0\\"' not in line))
        (rec.path / "index.sqlite").unlink()
        found = rec.trajectory()
    second, third = (span for span in found.spans if span.kind == "llm")
    assert [message["content"] for message in second.inputs["messages"]] == ["1"]
    assert [message["content"] for message in third.inputs["messages"]] == ["1", "2"]
    assert second.incomplete


@pytest.mark.parametrize(
    "bases",
    [
        "nonsense",
        "{}",
        "[1]",
        '[[["messages"], "0", "input", ["messages"], 1]]',
        '[[["messages"], "SELF", "input", ["messages"], 1]]',
        '[[["messages", "x"], "OTHER", "input", ["messages"], 1]]',
        '[[["messages"], "OTHER", "input", ["messages", "x", "y"], 1]]',
        '[[["messages"], "OTHER", "input", ["messages"], -1]]',
        '[[["messages"], "OTHER", "input", ["messages"], 99]]',
        '[[["messages"], "OTHER", "input", ["settings"], 1]]',
        '[[["messages"], "OTHER", "elsewhere", ["messages"], 1]]',
        '[[[7], "OTHER", "input", [null], true]]',
    ],
)
def test_a_damaged_reference_costs_only_what_it_refers_to(bases):
    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            chat([{"role": "user", "content": "first"}])
            chat([{"role": "user", "content": "second"}])
        other, span = rec.trajectory().spans[1:]
        bases = bases.replace("SELF", span.span_id).replace("OTHER", other.span_id)
        (segment,) = (rec.path / "journal").glob("*.0000.jsonl")
        mark = f'"spanId":"{span.span_id}"'
        facts = {"key": semconv.INPUT_BASE, "value": {"stringValue": bases}}
        head, tail = segment.read_text(encoding="utf-8").split(mark)
        tail = tail.replace('"attributes":[', f'"attributes":[{json.dumps(facts)},', 1)
        segment.write_text(head + mark + tail, encoding="utf-8")
        (rec.path / "index.sqlite").unlink()
        found = rec.trajectory()
    assert found.spans[2].attributes[semconv.INPUT_BASE] == bases
    assert found.spans[2].inputs["messages"][-1]["content"] == "second"
    assert found.status == "ok"


messages = st.lists(
    st.fixed_dictionaries({"content": st.text(max_size=3) | st.just(WORDS * 4)}), min_size=1, max_size=6
)
payloads = st.recursive(
    messages | st.text(max_size=20) | st.integers(0, 9).map(lambda number: WORDS * number),
    lambda inner: st.dictionaries(st.sampled_from("ab/~"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(st.tuples(st.booleans(), payloads, payloads), min_size=1, max_size=12))
def test_whatever_is_handed_around_is_read_back_as_it_was(calls):
    @rollout_trace
    def one(value):
        return result

    @llm_trace
    def two(value, more=None):
        return {"deep": result}

    def clean(value):
        return json.loads(json.dumps(value).replace("\\u0000", "␀"))

    wanted = []
    with recording(max_text_length=None) as rec:
        with trajectory(step=1, sample_index=1):
            for which, value, result in calls:
                if which:
                    one(value)
                    wanted.append(({"value": clean(value)}, clean(result)))
                else:
                    two(value, more=result)
                    wanted.append(({"value": clean(value), "more": clean(result)}, {"deep": clean(result)}))
        found = rec.trajectory()
    assert [(span.inputs, span.outputs) for span in found.spans[1:]] == wanted


def test_tools_share_their_arguments_too():
    @tool_trace
    def search(history, query):
        return "nothing"

    with recording() as rec:
        with trajectory(step=1, sample_index=1):
            history = [f"{number} {WORDS}" for number in range(5)]
            for number in range(3):
                search(history, query=str(number))
                history.append(f"again {number} {WORDS}")
        found = rec.trajectory()
    calls = [span for span in found.spans if span.kind == "tool"]
    assert [len(span.inputs["history"]) for span in calls] == [5, 6, 7]
    assert [len(json.loads(span.attributes[semconv.TOOL_ARGUMENTS])["history"]) for span in calls] == [
        5,
        1,
        1,
    ]
