"""verl's own worker and tool agent, in this process: names of rollouts, tools, rewards, policy versions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from trackway.trace import semconv
from trackway.trace.integrations.verl import install
from trackway.trace.model import Span, Trajectory

from .verl_here import make_worker, need_verl, recorded, tracing
from .verl_world import Engine, follow, generate, make_model, rows

pytestmark = pytest.mark.verl

SAY = [["Nothing to do"]]
SINGLE = "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    need_verl()
    install()
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def both(model):
    return [make_worker(model, SINGLE), make_worker(model, SINGLE)]


@pytest.fixture
def workers(both):
    """Give two workers of single turns."""
    return [follow(worker, Engine(scripts=SAY)) for worker in both]


@pytest.fixture
def worker(workers):
    return workers[0]


@pytest.fixture(scope="module")
def agent(model):
    """Give a worker whose agents call tools, and whose engine follows the script of a row's number."""
    return make_worker(model, "actor_rollout_ref.rollout.full_determinism=true")


def keys(found: Sequence[Trajectory]) -> list[str]:
    return [item.name for item in found]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def tools(trajectory: Trajectory) -> list[Span]:
    return [span for span in trajectory.spans if span.kind == "tool"]


# Names


def test_numbers_of_rollouts_go_on_where_a_group_is_dealt_to_two_workers(tmp_path, workers):
    with tracing(tmp_path / "store"):
        generate(workers, rows([5, "x", 5.5, 9]), n=5)
        found = recorded(tmp_path / "store")
    assert Counter(keys(found)) == Counter(f"1/{sample}/{n}" for sample in (5, "x", 5.5, 9) for n in range(5))
    assert {type(item.key.sample_index) for item in found} == {int, str}
    assert {item.key.attempt for item in found} == {0}


def test_keys_are_unique_where_the_settings_do_not_tell_the_size_of_a_group(tmp_path, workers):
    with tracing(tmp_path / "store"):
        generate(workers, rows([5, 6, 7, 8]), n=5, told=4)
        generate(workers, rows([5, 6, 7]), n=4, told=8, step=2)
        found = recorded(tmp_path / "store")
    assert len(set(keys(found))) == len(found) == 32


def test_samples_without_an_index_are_told_apart_by_their_prompts_on_every_worker(tmp_path, workers):
    prompts = [[{"role": "user", "content": f"Question {number}"}] for number in range(4)]
    batch = rows([None] * 4, raw_prompt=prompts)
    with tracing(tmp_path / "store"):
        generate(workers, batch, step=1, n=3)
        generate(workers, rows([None] * 4, raw_prompt=prompts), step=2, n=3)
        found = recorded(tmp_path / "store")
    assert len(set(keys(found))) == 24
    steps = [{item.key.sample_index for item in found if item.key.step == step} for step in (1, 2)]
    assert steps[0] == steps[1] and len(steps[0]) == 4
    assert all(str(sample).startswith("prompt-") for sample in steps[0])


def test_an_index_0_that_the_data_set_gave_is_a_name(tmp_path, workers):
    with tracing(tmp_path / "store"):
        generate(workers, rows([0, 1]))
        assert keys(recorded(tmp_path / "store")) == ["1/0/0", "1/1/0"]


def test_files_that_each_count_from_0_are_told_apart(tmp_path, model):
    files = "data.train_files=[a.parquet,b.parquet]"
    worker = follow(make_worker(model, SINGLE, files), Engine(scripts=SAY))
    with tracing(tmp_path / "store"):
        generate([worker], rows([0, 0], data_source=["gsm8k", "math"]))
        generate([worker], rows([0, 1], data_source=["gsm8k", "math"]), validate=True)  # one file
        found = {(item.key.validate, item.key.sample_index) for item in recorded(tmp_path / "store")}
    assert found == {(False, "gsm8k:0"), (False, "math:0"), (True, 0), (True, 1)}


def test_what_fills_up_a_validation_batch_and_is_thrown_away_is_not_recorded(tmp_path, workers):
    from verl import protocol

    batch, added = protocol.pad_dataproto_to_divisor(rows([3, 4, 5]), 2)
    assert added == 1
    with tracing(tmp_path / "store"):
        out = generate(workers, batch, validate=True)
        assert len(out) == 4
        assert keys(recorded(tmp_path / "store")) == ["val/1/3/0", "val/1/4/0", "val/1/5/0"]


def test_rows_that_are_made_of_a_filled_up_batch_are_no_copies(tmp_path, workers):
    from verl import protocol

    batch, _ = protocol.pad_dataproto_to_divisor(rows([3, 4, 5]), 2)
    with tracing(tmp_path / "store"):
        generate(workers, batch, n=3)
        generate(workers, protocol.unpad_dataproto(batch, 1), n=4, step=2)
        found = keys(recorded(tmp_path / "store"))
    again = [f"1/3/{n}@1" for n in range(3)]
    first = [f"1/{sample}/{n}" for sample in (3, 4, 5) for n in range(3)]
    second = [f"2/{sample}/{n}" for sample in (3, 4, 5) for n in range(4)]
    assert Counter(found) == Counter([*first, *again, *second])


def test_a_column_of_the_data_set_is_not_taken_for_the_number_of_a_session(tmp_path, workers):
    batch = rows([3, 4], session_id=["a talk", "a talk"], global_steps=["x", "y"])
    with tracing(tmp_path / "store"):
        generate(workers, batch, n=2)
        assert keys(recorded(tmp_path / "store")) == ["1/3/0", "1/3/1", "1/4/0", "1/4/1"]


def test_the_greedy_baseline_of_remax_stands_beside_the_samples_of_its_prompt(tmp_path, worker):
    import numpy as np
    from verl import DataProto

    sampled, greedy = rows([3, 4]).repeat(2, interleave=True), rows([3, 4])
    sampled.non_tensor_batch["__do_sample__"] = np.ones(4, dtype=bool)
    greedy.non_tensor_batch["__do_sample__"] = np.zeros(2, dtype=bool)
    with tracing(tmp_path / "store"):
        generate([worker], DataProto.concat([sampled, greedy]), told=2)
        found = keys(recorded(tmp_path / "store"))
    assert found == ["1/3/0", "1/3/1", "1/3/2", "1/4/0", "1/4/1", "1/4/2"]


def test_a_step_that_nobody_told_is_left_out(tmp_path, workers):
    with tracing(tmp_path / "store"):
        generate(workers, rows([3, 4]), step=-1)
        (step,) = {item.key.step for item in recorded(tmp_path / "store")}
    assert step is None


# Samples that are chosen


def test_verls_key_chooses_for_each_worker_whole_samples_without_drawing(tmp_path, workers):
    import numpy as np

    before = str(np.random.get_state())
    with tracing(tmp_path / "store", most=2):
        generate(workers[:1], rows([4, "b", 5, "c"]), n=3)
        generate(workers[:1], rows([4, "b", 5, "c"]), n=3, validate=True)
        found = recorded(tmp_path / "store")
    chosen = Counter((item.key.validate, item.key.sample_index) for item in found)
    assert list(chosen.values()) == [3] * 4 and Counter(validate for validate, _ in chosen) == {0: 2, 1: 2}
    assert str(np.random.get_state()) == before


def test_a_share_is_chosen_by_hash_and_whole_over_all_workers(tmp_path, workers):
    with tracing(tmp_path / "store", ratio="0.5"):
        generate(workers, rows(range(20)), n=3)  # 30 rows each: the tenth group is dealt to both
        found = recorded(tmp_path / "store")
    chosen = Counter(item.key.sample_index for item in found)
    assert set(chosen.values()) == {3} and 3 <= len(chosen) <= 17


def test_none_is_chosen_where_the_key_is_0(tmp_path, workers):
    with tracing(tmp_path / "store", most=0):
        assert len(generate(workers, rows([1, 2]))) == 2
        assert recorded(tmp_path / "store") == []


# Tools


def test_every_call_of_a_tool_is_one_span_and_an_error_where_it_failed(tmp_path, agent):
    scripts = [
        [call("add", '{"a": 2, "b": 3}'), "It is 5"],
        [call("add", '{"a": 6, "b": 7}'), "It failed"],
        [call("add", '{"a": 6}'), "One is missing"],
        [call("fly", "{}"), "No wings"],
        [call("recall", '{"word": "five"}'), "It is 5"],
        [call("recall", '{"word": "nothing"}'), "Forgotten"],
    ]
    follow(agent, Engine(scripts=scripts))
    with tracing(tmp_path / "store"):
        generate([agent], rows(range(6)))
        found = recorded(tmp_path / "store")
    spans = [tools(item) for item in found]
    assert [len(of_one) for of_one in spans] == [1] * 6
    said = [(span.name, span.status, span.error) for (span,) in spans]
    assert said[0] == ("add", "ok", None) and said[4] == ("recall", "ok", None)
    assert said[1] == ("add", "error", "ValueError: 6 + 7 brings bad luck")
    assert said[2][:2] == ("add", "error") and "missing 1 required" in str(said[2][2])
    assert said[3][:2] == ("fly", "error") and "Unknown function 'fly'" in str(said[3][2])
    assert said[5] == ("recall", "error", "KeyError: 'nothing'")
    (adding,), (failing,), *_ = spans
    assert (adding.inputs, adding.outputs) == ({"a": 2, "b": 3}, "5")
    assert failing.outputs == "Error executing tool 'add': 6 + 7 brings bad luck"
    (remembering,) = spans[4]
    assert remembering.outputs == "five it was"
    assert remembering.attributes["verl.tool_reward"] == 0.25
    assert remembering.attributes["verl.tool_metrics"] == '{"length":4}'
    roles = ["user", "assistant", "tool", "assistant"]
    assert all([turn.role for turn in item.turns] == roles for item in found)


def test_arguments_that_are_not_json_are_an_error_of_the_call(tmp_path, agent):
    with tracing(tmp_path / "store"):
        assert "Invalid JSON" in _call_tool(agent, "add", '{"a": 1').text
        found = recorded(tmp_path / "store")
    (span,) = [span for item in found for span in tools(item)]
    assert (span.name, span.status) == ("add", "error") and str(span.error).startswith("json.decoder")
    assert span.inputs == {"arguments": '{"a": 1'}


def named(worker: Any) -> dict[str, Any]:
    """Give a worker's tools by name."""
    return {tool.name: tool for tool in worker.tools}


def _call_tool(worker: Any, name: str, arguments: str) -> Any:
    """Let verl's agent call a tool."""
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.utils.rollout_trace import rollout_trace_attr

    loop = object.__new__(ToolAgentLoop)
    loop.tools = named(worker)

    async def main() -> Any:
        with rollout_trace_attr(1, 1, 0):
            asked = SimpleNamespace(name=name, arguments=arguments)
            return (await loop._call_tool(asked, {}, SimpleNamespace()))[0]

    return asyncio.run(main())


def test_tools_that_agents_call_themselves_are_spans_too(tmp_path, agent):
    from verl.tools.function_tool import FunctionTool
    from verl.utils.rollout_trace import rollout_trace_attr

    add, recall = named(agent)["add"], named(agent)["recall"]
    assert isinstance(add, FunctionTool)

    async def main() -> None:
        with rollout_trace_attr(1, 1, 0):
            await add.call({"a": 1, "b": 2})
            await recall.execute("id", {"word": "five"})
            with pytest.raises(KeyError):
                await recall.execute("id", parameters={"word": "nothing"})

    with tracing(tmp_path / "store"):
        asyncio.run(main())
        (found,) = recorded(tmp_path / "store")
    said = [(span.name, span.status, span.inputs, span.outputs) for span in tools(found)]
    assert said == [
        ("add", "ok", {"a": 1, "b": 2}, "3"),
        ("recall", "ok", {"word": "five"}, "five it was"),
        ("recall", "error", {"word": "nothing"}, None),
    ]


@pytest.mark.parametrize("arguments", ["[" * 100_000, "9" * 5_000], ids=["deep", "long"])
def test_arguments_that_python_cannot_read_are_not_in_the_way_of_verls_answer(tmp_path, agent, arguments):
    with tracing(tmp_path / "store"):
        assert "Unknown function 'fly'" in _call_tool(agent, "fly", arguments).text
        assert "Unknown function ''" in _call_tool(agent, "", arguments).text
        spans = [span for item in recorded(tmp_path / "store") for span in tools(item)]
    assert Counter((span.name, span.status) for span in spans) == {("fly", "error"): 1, ("tool", "error"): 1}


class Picky:
    """An answer of a tool's own kind, of which not everything can be read."""

    text = "said"

    @property
    def image(self) -> Any:
        raise ZeroDivisionError("no picture")


def test_an_answer_that_cannot_be_read_reaches_the_agent(tmp_path, agent, monkeypatch):
    from verl.tools.base_tool import BaseTool
    from verl.utils.rollout_trace import rollout_trace_attr

    class Own(BaseTool):
        def __init__(self) -> None:
            self.name = "own"

        async def execute(self, instance_id: str, parameters: Any, **kwargs: Any) -> Any:
            return parameters["answer"]

    async def main() -> None:
        answers = [Picky(), (Picky(), 0.5, {}), None, ("text", object(), object())]
        with rollout_trace_attr(1, 1, 0):
            for answer in answers:
                assert await Own().execute("id", {"answer": answer}) is answer

    monkeypatch.setenv("TRACKWAY_STRICT", "0")
    with tracing(tmp_path / "store"):
        asyncio.run(main())
        (found,) = recorded(tmp_path / "store")
    assert [(span.name, span.status) for span in tools(found)] == [("own", "ok")] * 4
    assert [len(span.attributes.get(semconv.NOTES, ())) for span in tools(found)] == [1, 1, 0, 0]


# Rewards and versions


def test_the_reward_and_what_came_with_it_are_on_the_trajectory(tmp_path, workers):
    with tracing(tmp_path / "store"):
        out = generate(workers, rows([1, 2]))
        found = recorded(tmp_path / "store")
    scores = out.batch["rm_scores"].sum(-1).tolist()
    assert [item.reward for item in found] == scores
    assert [item.rewards for item in found] == [{"reward": score, "even": score} for score in scores]
    assert found[0].annotations["reward_extra_info"] == {"judge": "counted"}
    assert found[0].annotations["data_source"] == "sums"


def test_a_reward_function_that_raises_fails_its_rollout_in_the_trace_as_well(tmp_path, worker, monkeypatch):

    async def compute_score(data: Any) -> Any:
        raise ZeroDivisionError("no tests")

    failing = SimpleNamespace(compute_score=SimpleNamespace(remote=compute_score))
    monkeypatch.setattr(worker, "reward_loop_worker_handles", [failing])
    with tracing(tmp_path / "store"):
        with pytest.raises(ZeroDivisionError):
            generate([worker], rows([1]))
        (found,) = recorded(tmp_path / "store")
    assert (found.status, found.error) == ("error", "ZeroDivisionError: no tests")
    assert [turn.role for turn in found.turns] == ["user", "assistant"]


class Aborting(Engine):
    """Stops in the middle of each answer, and goes on with newer weights."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = await super().generate(*args, **kwargs)
        self.version += 1
        if self.version % 2:
            output.stop_reason = "aborted"
        return output


def test_a_generation_that_is_resumed_is_one_turn_with_its_first_and_last_version(tmp_path, worker):
    engine = Aborting(scripts=SAY)
    engine.version = 4
    follow(worker, engine, resuming=True)
    with tracing(tmp_path / "store"):
        out = generate([worker], rows([1]))
        (found,) = recorded(tmp_path / "store")
    assert found.policy_versions == (4, 5)
    generations = [span for span in found.spans if span.kind == "llm"]
    assert [span.attributes[semconv.POLICY_VERSION] for span in generations] == [4, 4, 5]
    assert [turn.role for turn in found.turns] == ["user", "assistant"]
    ids = out.batch["responses"][0][out.batch["response_mask"][0].bool()].tolist()
    assert list(found.turns[1].token_ids) == ids and found.turns[1].policy_version == 4


# What verl gets


@pytest.mark.parametrize("settings", [{}, {"ratio": "0.5"}], ids=["all", "some"])
def test_what_verl_gets_is_the_same(tmp_path, agent, settings):
    follow(agent, Engine())

    def run() -> Any:
        out = generate([agent], rows(range(4)), n=4)
        tensors = {name: tensor.tolist() for name, tensor in out.batch.items()}
        return tensors, {name: list(values) for name, values in out.non_tensor_batch.items()}

    before = run()
    with tracing(tmp_path / "store", **settings):
        assert run() == before
        found = recorded(tmp_path / "store")
    assert (len(found) == 16) == (not settings) and found


class Odd:
    """A name of a sample that cannot be compared."""

    def __ne__(self, other: object) -> bool:
        raise ZeroDivisionError


def test_trouble_of_ours_costs_verl_nothing(tmp_path, worker, swallowing, caplog):
    with tracing(tmp_path / "store"):
        out = generate([worker], rows([Odd()]))
        assert len(out) == 1 and len(recorded(tmp_path / "store")) == 1
    assert "tracing problem (training goes on): could not tell which part of a batch this is" in caplog.text
