"""Turns are told right, however a rollout was written: loops of tokens, of messages, or of neither."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from trackway import llm_trace, rollout_trace, tool_trace, trajectory
from trackway.trace.model import Trajectory
from trackway.trace.testing import recording


def roles(found: Trajectory) -> list[str]:
    return [turn.role for turn in found.turns]


def texts(found: Trajectory) -> list[str]:
    return [turn.text for turn in found.turns]


def completion(
    text: str | None, calls: list[dict[str, Any]] | None = None, reason: str = "stop"
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"total_tokens": 3},
    }


@llm_trace(name="chat")
def chat(messages: list[dict[str, Any]], answer: dict[str, Any]) -> dict[str, Any]:
    return answer


@tool_trace
def search(query: str) -> dict[str, Any]:
    return {"hits": [query.upper()]}


def asked(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_loop_of_messages_becomes_one_conversation_without_repeats() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "find cats"}]
            for turn in range(2):
                call = asked("search", '{"query": "cats"}', turn)
                answer = completion(None, [call], "tool_calls")
                chat(messages, answer)
                result = search("cats")
                messages.append(answer["choices"][0]["message"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
            messages.append({"role": "user", "content": "and now?"})
            chat(messages, completion("done"))
        found = recorded.trajectory()
    assert roles(found) == ["system", "user", "assistant", "tool", "assistant", "tool", "user", "assistant"]
    assert texts(found)[:2] == ["be brief", "find cats"]
    assert texts(found)[-2:] == ["and now?", "done"]
    assert [(call.name, call.arguments) for call in found.tool_calls] == [("search", {"query": "cats"})] * 2
    assert [turn.finish_reason for turn in found.turns if turn.role == "assistant"] == [
        "tool_calls",
        "tool_calls",
        "stop",
    ]


def test_what_a_trimmed_context_leaves_out_is_still_told() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            history: list[dict[str, Any]] = [{"role": "system", "content": "s"}]
            for turn in range(6):
                if turn == 3:
                    history = [history[0], *history[-1:]]
                history.append({"role": "user", "content": f"question {turn}"})
                chat(history, completion(f"answer {turn}"))
                history.append({"role": "assistant", "content": f"answer {turn}"})
                if turn == 5:
                    search("a")
                    search("b")
        found = recorded.trajectory()
    assert texts(found)[1:13] == [
        text for turn in range(6) for text in (f"question {turn}", f"answer {turn}")
    ]
    assert roles(found)[13:] == ["tool", "tool"]
    assert len(found.tool_calls) == 2


def test_a_user_who_says_the_same_twice_is_heard_twice() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            history: list[dict[str, Any]] = []
            for _ in range(2):
                history.append({"role": "user", "content": "again"})
                chat(history, completion("yes"))
                history.append({"role": "assistant", "content": "yes"})
        found = recorded.trajectory()
    assert texts(found) == ["again", "yes", "again", "yes"]


def test_a_call_that_nobody_ran_is_shown_with_its_arguments_as_they_came() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            calls = [asked("search", '{"query": "x"}'), asked("unknown_tool", "{bad json", 1)]
            chat([{"role": "user", "content": "go"}], completion("", calls))
            search("x")
        found = recorded.trajectory()
    assert [(call.name, call.arguments, call.result is None) for call in found.tool_calls] == [
        ("search", {"query": "x"}, False),
        ("unknown_tool", "{bad json", True),
    ]


@pytest.mark.parametrize(
    "content",
    [
        None,
        [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "http://x"}}],
        5,
        {"a": 1},
    ],
)
def test_messages_of_any_shape_are_told(content: Any) -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            chat(
                [{"role": "ipython", "content": content}, {"role": "odd", "content": "x"}, None],
                completion("ok"),
            )
        found = recorded.trajectory()
    assert roles(found) == ["tool", "user", "assistant"]
    if isinstance(content, list):
        assert texts(found)[0] == "look\n[image_url]"


@dataclass
class LoopOutput:
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


OUTPUT = LoopOutput([1, 2, 3], [4, 5, 6, 7, 8], [1, 1, 0, 0, 1], [-0.5, -1.0, 0.0, 0.0, -0.25])


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_loop_that_only_returns_ids_is_split_by_its_mask(as_dict: bool) -> None:
    @rollout_trace
    def loop() -> Any:
        search("x")
        return vars(OUTPUT) if as_dict else OUTPUT

    with recording() as recorded:
        with trajectory(step=1, sample_index=1, policy_version=4):
            loop()
        found = recorded.trajectory()
    assert roles(found) == ["user", "assistant", "tool", "assistant"]
    assert [turn.token_ids for turn in found.turns] == [(1, 2, 3), (4, 5), (6, 7), (8,)]
    assert [turn.mask for turn in found.turns] == [(0, 0, 0), (1, 1), (0, 0), (1,)]
    assert [turn.logprobs for turn in found.turns if turn.role == "assistant"] == [(-0.5, -1.0), (-0.25,)]
    assert found.turns[2].name == "search"
    assert found.turns[3].prompt_ids == (1, 2, 3, 4, 5, 6, 7)
    assert found.turns[3].policy_version == 4


def test_a_loops_mask_and_its_last_tokens_complete_the_turns_that_generations_told() -> None:
    @llm_trace
    def generate(prompt_ids: list[int]) -> dict[str, Any]:
        return {"token_ids": [4, 5] if len(prompt_ids) == 3 else [8]}

    @rollout_trace
    def loop() -> LoopOutput:
        generate([1, 2, 3])
        search("x")
        generate([1, 2, 3, 4, 5, 6, 7])
        search("y")
        return LoopOutput([1, 2, 3], [4, 5, 6, 7, 8, 9], [1, 1, 0, 0, 1, 0], [-1, -2, 0, 0, -3, 0])

    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            loop()
        found = recorded.trajectory()
    assert [(turn.role, turn.token_ids, turn.mask) for turn in found.turns] == [
        ("user", (1, 2, 3), (0, 0, 0)),
        ("assistant", (4, 5), (1, 1)),
        ("tool", (6, 7), (0, 0)),
        ("assistant", (8,), (1,)),
        ("tool", (9,), (0,)),
    ]
    assert found.turns[3].logprobs == (-3.0,)
    assert found.tokens == 9
    assert found.prompt_tokens == 3


def test_a_rollout_without_any_generation_is_told_as_that() -> None:
    @rollout_trace
    def loop(question: str) -> str:
        return question + "!"

    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            loop("well")
        found = recorded.trajectory()
    assert (found.generations, found.turns, found.tokens) == (0, (), 0)
    assert [(span.inputs, span.outputs) for span in found.spans if span.kind == "rollout"] == [
        ({"question": "well"}, "well!")
    ]


def test_a_rollout_that_returns_its_messages_is_told_by_them() -> None:
    @rollout_trace
    def loop(messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"messages": [*messages, {"role": "assistant", "content": "hello"}], "reward": 1}

    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            loop([{"role": "user", "content": "hi"}])
        found = recorded.trajectory()
    assert list(zip(roles(found), texts(found), strict=True)) == [("user", "hi"), ("assistant", "hello")]


def test_a_generation_inside_a_tool_is_a_part_of_the_tool() -> None:
    @tool_trace
    def judge(text: str) -> str:
        return chat([{"role": "user", "content": text}], completion("fine"))["choices"][0]["message"][
            "content"
        ]

    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            chat([{"role": "user", "content": "write"}], completion("a poem"))
            judge("a poem")
        found = recorded.trajectory()
    assert list(zip(roles(found), texts(found), strict=True)) == [
        ("user", "write"),
        ("assistant", "a poem"),
        ("tool", "fine"),
    ]
    assert [(depth, span.name) for depth, span in found.walk()] == [
        (0, "trajectory"),
        (1, "chat"),
        (1, "judge"),
        (2, "chat"),
    ]


def test_a_stream_becomes_the_text_of_its_pieces() -> None:
    @llm_trace
    def stream(prompt: str) -> Any:
        yield from ("one ", "two ", "three")

    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            assert list(stream("count")) == ["one ", "two ", "three"]
        found = recorded.trajectory()
    assert list(zip(roles(found), texts(found), strict=True)) == [
        ("user", "count"),
        ("assistant", "one two three"),
    ]


def test_a_generation_that_fails_is_a_turn_with_its_error() -> None:
    @llm_trace
    def broken(prompt_ids: list[int]) -> None:
        raise TimeoutError("engine away")

    with recording() as recorded:
        with pytest.raises(TimeoutError), trajectory(step=1, sample_index=1):
            broken([1, 2])
        found = recorded.trajectory()
    assert found.status == "error"
    assert found.error == "TimeoutError: engine away"
    assert found.turns[-1].error == "TimeoutError: engine away"
    assert found.turns[0].token_ids == (1, 2)


def test_each_tool_message_is_joined_with_the_call_that_it_answers() -> None:
    class Toolbox:
        @tool_trace
        def run(self, code: str) -> float:
            return 1 / len(code)

    calls = [
        asked("run", '{"code": ""}', 1),
        asked("search", '{"query": broken', 2),
        asked("nowhere", "{}", 3),
        asked("run", '{"code": "ab"}', 4),
    ]
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
            answer = completion("", calls)
            chat(messages, answer)
            with pytest.raises(ZeroDivisionError):
                Toolbox().run("")
            Toolbox().run("ab")
            said = ["Tool failed, please retry", "error: bad JSON", "error: no such tool", "0.5 (cut)"]
            messages.append(answer["choices"][0]["message"])
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": text}
                for call, text in zip(calls, said, strict=True)
            ]
            chat(messages, completion("sorry"))
        found = recorded.trajectory()
    assert [(call.name, call.call_id) for call in found.tool_calls] == [
        ("run", "call_1"),
        ("search", "call_2"),
        ("nowhere", "call_3"),
        ("run", "call_4"),
    ]
    assert [call.result for call in found.tool_calls] == [None, said[1], said[2], "0.5"]
    replies = [turn for turn in found.turns if turn.role == "tool"]
    assert {(turn.call_id, turn.name, turn.text) for turn in replies} == {
        ("call_1", "run", said[0]),
        ("call_2", "search", said[1]),
        ("call_3", "nowhere", said[2]),
        ("call_4", "run", said[3]),
    }
    assert [turn.error for turn in replies if turn.call_id == "call_1"] == [
        "ZeroDivisionError: division by zero"
    ]


def test_messages_without_ids_answer_the_tools_in_their_order() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
            chat(messages, completion("calling"))
            search("a")
            search("b")
            messages += [{"role": "assistant", "content": "calling"}]
            messages += [{"role": "tool", "content": text} for text in ("saw a", "saw b", "and this")]
            chat(messages, completion("done"))
        found = recorded.trajectory()
    assert [turn.text for turn in found.turns if turn.role == "tool"] == ["saw a", "saw b", "and this"]


def test_the_usage_that_an_engine_reports_counts_where_no_ids_do() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            answer = {**completion("hi"), "usage": {"prompt_tokens": 20, "completion_tokens": 5}}
            chat([{"role": "user", "content": "go"}], answer)
            chat(
                [{"role": "user", "content": "on"}],
                {**answer, "usage": {"input_tokens": 31, "output_tokens": 7}},
            )
        found = recorded.trajectory()
    spans = [span for span in found.spans if span.kind == "llm"]
    assert [span.attributes["gen_ai.usage.input_tokens"] for span in spans] == [20, 31]
    assert [span.attributes["gen_ai.usage.output_tokens"] for span in spans] == [5, 7]
    assert (found.prompt_tokens, found.tokens) == (20, 38)


def test_the_result_of_an_engine_with_several_outputs_shows_the_first() -> None:
    @llm_trace
    def engine(prompt_token_ids: list[int]) -> dict[str, Any]:
        output = {"index": 0, "text": "hello", "token_ids": [4, 5], "finish_reason": "length"}
        return {"request_id": "7", "outputs": [output], "finished": True}

    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            engine([1, 2, 3])
        found = recorded.trajectory()
    assert (found.turns[-1].text, found.turns[-1].finish_reason) == ("hello", "length")
    assert found.turns[-1].token_ids == (4, 5)


def test_agents_that_run_at_the_same_time_keep_their_own_tool_calls() -> None:
    import asyncio

    @tool_trace
    async def work(name: str) -> str:
        return name

    @llm_trace
    async def think(name: str) -> str:
        return f"{name} thinks"

    @rollout_trace
    async def agent(name: str, mine: asyncio.Event, other: asyncio.Event) -> None:
        await think(name)
        mine.set()
        await other.wait()  # both have thought before either works
        await work(name)

    async def both() -> None:
        events = asyncio.Event(), asyncio.Event()
        with trajectory(step=1, sample_index=1):
            await asyncio.gather(agent("a", *events), agent("b", *reversed(events)))

    with recording() as recorded:
        asyncio.run(both())
        found = recorded.trajectory()
    answers = [turn for turn in found.turns if turn.role == "assistant"]
    assert [(turn.text, turn.tool_calls[0].result) for turn in answers] == [
        ("a thinks", "a"),
        ("b thinks", "b"),
    ]


@tool_trace(name="add")
def add(x: int) -> str:
    return f"raw{x}"


def tool_message(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_a_sliding_window_of_equal_replies_loses_none_of_them() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
            for turn in range(3):
                call = asked("nope", "{}", turn)
                answer = completion(f"try {turn}", [call])
                chat(messages, answer)
                said = {"role": "user", "content": "continue"}
                # Only the last answer, its reply and the user's word are kept.
                messages = [answer["choices"][0]["message"], tool_message(call["id"], "unknown tool"), said]
            chat(messages, completion("done"))
        found = recorded.trajectory()
    assert roles(found) == ["user", *["assistant", "tool", "user"] * 3, "assistant"]
    assert [call.result for call in found.tool_calls] == ["unknown tool"] * 3


def test_an_answer_whose_reasoning_was_stripped_is_not_told_again() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
            for turn in range(2):
                call = asked("add", f'{{"x": {turn}}}', turn)
                chat(messages, completion(f"<think>long</think>hi {turn}", [call]))
                add(turn)
                messages += [
                    {"role": "assistant", "content": f"hi {turn}", "tool_calls": [call]},
                    tool_message(call["id"], f"saw {turn}"),
                ]
            chat(messages, completion("<think>more</think>bye"))
            messages += [{"role": "assistant", "content": "bye"}, {"role": "user", "content": "ok"}]
            chat(messages, completion("end"))
        found = recorded.trajectory()
    assert texts(found) == [
        "go",
        "<think>long</think>hi 0",
        "saw 0",
        "<think>long</think>hi 1",
        "saw 1",
        "<think>more</think>bye",
        "ok",
        "end",
    ]
    assert len(found.tool_calls) == 2


def test_calls_of_one_tool_are_matched_by_their_arguments() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            calls = [asked("add", "{bad", 0), asked("add", '{"x": 1}', 1), asked("add", '{"x": 2}', 2)]
            answer = completion("", calls)
            chat([{"role": "user", "content": "go"}], answer)
            add(2)
            add(1)
            replies = [tool_message(f"call_{n}", text) for n, text in enumerate(("ERR parse", "", "saw 2"))]
            chat(
                [{"role": "user", "content": "go"}, answer["choices"][0]["message"], *replies],
                completion("ok"),
            )
        found = recorded.trajectory()
    assert [(call.call_id, call.arguments, call.result) for call in found.tool_calls] == [
        ("call_0", "{bad", "ERR parse"),
        ("call_1", {"x": 1}, "raw1"),
        ("call_2", {"x": 2}, "raw2"),
    ]
    # What the model saw, an empty text too.
    assert {turn.call_id: turn.text for turn in found.turns if turn.role == "tool"} == {
        "call_0": "ERR parse",
        "call_1": "",
        "call_2": "saw 2",
    }


def test_two_calls_with_one_id_are_answered_in_their_order() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            calls = [asked("add", '{"x": 1}'), asked("nope", "{}")]
            answer = completion("", calls)
            chat([{"role": "user", "content": "go"}], answer)
            add(1)
            replies = [tool_message("call_0", "saw add"), tool_message("call_0", "no such tool")]
            chat(
                [{"role": "user", "content": "go"}, answer["choices"][0]["message"], *replies],
                completion("ok"),
            )
        found = recorded.trajectory()
    assert [(turn.name, turn.text) for turn in found.turns if turn.role == "tool"] == [
        ("add", "saw add"),
        ("nope", "no such tool"),
    ]


@pytest.mark.parametrize("ids", [("a", "b"), ("call", "call")])
def test_agents_that_run_at_the_same_time_get_their_own_replies(ids: tuple[str, str]) -> None:
    import asyncio

    @llm_trace
    async def ask(messages: list[dict[str, Any]], answer: dict[str, Any]) -> dict[str, Any]:
        return answer

    @rollout_trace
    async def agent(number: int, mine: asyncio.Event, other: asyncio.Event) -> None:
        call = {**asked("add", f'{{"x": {number}}}'), "id": ids[number]}
        answer = completion(f"{number} asks", [call])
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"task {number}"}]
        await ask(messages, answer)
        mine.set()
        await other.wait()
        add(number)
        messages += [answer["choices"][0]["message"], tool_message(ids[number], f"saw {number}")]
        await ask(messages, completion(f"{number} done"))

    async def both() -> None:
        events = asyncio.Event(), asyncio.Event()
        with trajectory(step=1, sample_index=1):
            await asyncio.gather(agent(0, *events), agent(1, *reversed(events)))

    with recording() as recorded:
        asyncio.run(both())
        found = recorded.trajectory()
    assert sorted(texts(found)) == sorted(
        text for n in (0, 1) for text in (f"task {n}", f"{n} asks", f"saw {n}", f"{n} done")
    )
    asks = {turn.text: turn.tool_calls[0].span_id for turn in found.turns if turn.tool_calls}
    saw = {turn.text: turn.span_id for turn in found.turns if turn.role == "tool"}
    assert asks["0 asks"] == saw["saw 0"]
    assert asks["1 asks"] == saw["saw 1"]
