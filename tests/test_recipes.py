"""The recipes run as they stand on their page, with the real packages where there are any."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trackway import open_store
from trackway.trace.model import Trajectory

from .servers import serving

PAGE = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()
BLOCK = re.compile(r"^```python *([\w-]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def recipe(heading: str, *between: str) -> str:
    """Give the code below a heading, with something of our own before, between and after its blocks."""
    section = re.split(r"^## ", PAGE.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = [code for _, code in BLOCK.findall(section)]
    assert blocks, heading
    ours = iter([*between, *[""] * (len(blocks) + 1 - len(between))])
    return "\n".join([next(ours), *(part for block in blocks for part in (block, next(ours)))])


def run(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"TRACKWAY_SYNC": "off", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done


def recorded(folder: Path) -> list[Trajectory]:
    store = open_store(folder / "trackway-store")
    assert store.status().dropped == 0
    return [store.load(summary.trace_id) for summary in store.query(all_attempts=True)]


def needs(package: str) -> None:
    """Skip where a package is not installed; under CI, fail."""
    if find_spec(package) is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{package} is not installed")


def test_a_loop_without_a_framework(tmp_path: Path) -> None:
    run(tmp_path, recipe("A loop without a framework"))
    found = recorded(tmp_path)
    assert [item.name for item in found] == [
        f"{s}/{i}/{n}" for s in (0, 1) for i in (0, 1, 2) for n in range(4)
    ]
    for item in found:
        assert [turn.role for turn in item.turns if turn.role != "user"] == ["assistant", "tool", "assistant"]
        assert item.rewards == {"length": 3.0}
        assert item.policy_versions == (item.key.step,)
        assert item.turns[-1].token_ids == (7, 8, 9)


class Served(BaseHTTPRequestHandler):
    """Asks for the calculator, and answers when it has its result."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message: dict[str, Any] = {"role": "assistant", "content": "It is 42."}
        if body["messages"][-1]["role"] == "user":
            call = {"name": "calculator", "arguments": '{"expression": "6 * 7"}'}
            calls = [{"id": "call_1", "type": "function", "function": call}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15},
        }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def test_an_openai_compatible_client(tmp_path: Path) -> None:
    needs("openai")
    with serving(Served) as address:
        code = recipe("An OpenAI-compatible client")
        run(tmp_path, code, OPENAI_BASE_URL=f"{address}/v1", OPENAI_API_KEY="of nobody")
    (found,) = recorded(tmp_path)
    assert [turn.role for turn in found.turns] == ["user", "assistant", "tool", "assistant"]
    asked, answered = found.turns[1], found.turns[3]
    (call,) = asked.tool_calls
    assert (call.name, call.arguments, call.result, call.call_id) == (
        "calculator",
        {"expression": "6 * 7"},
        "42",
        "call_1",
    )
    assert (asked.finish_reason, answered.finish_reason) == ("tool_calls", "stop")
    assert answered.text == "It is 42."
    assert found.rewards == {"correct": 1.0}
    assert "of nobody" not in "".join(map(str, found.spans))


def test_slime(tmp_path: Path) -> None:
    ours = """
import asyncio
from types import SimpleNamespace

@llm_trace
async def post(prompt_ids):
    await asyncio.sleep(0)
    return {"token_ids": [len(prompt_ids)], "text": "<search>capital</search>"}

@tool_trace
async def search(query):
    return "Paris"

async def agent(args, sample, sampling_params):
    made = await post([1, 2, 3])
    await search("capital")
    sample.tokens, sample.loss_mask = [1, 2, 3, *made["token_ids"]], [1]
    return sample

async def step():
    samples = [SimpleNamespace(index=index, group_index=index // 2) for index in range(4)]
    args = SimpleNamespace(n_samples_per_prompt=2)
    done = await asyncio.gather(*[generate(args, sample, {}) for sample in samples])
    for sample in done:
        n = sample.index % args.n_samples_per_prompt
        trackway.attach(f"-/{sample.group_index}/{n}", rewards=float(n))

asyncio.run(step())
"""
    run(tmp_path, recipe("slime", "", ours))
    found = recorded(tmp_path)
    assert [item.name for item in found] == ["-/0/0", "-/0/1", "-/1/0", "-/1/1"]
    assert [item.reward for item in found] == [0.0, 1.0, 0.0, 1.0]
    assert all([call.name for call in item.tool_calls] == ["search"] for item in found)


# TRL

TINY = """
from pathlib import Path
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
plain = Tokenizer(models.BPE({text: number for number, text in enumerate([*special, *letters])}, []))
plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
plain.decoder = decoders.ByteLevel()
template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
PreTrainedTokenizerFast(
    tokenizer_object=plain, eos_token="<|im_end|>", pad_token="<|endoftext|>",
    additional_special_tokens=special, chat_template=template.read_text(),
).save_pretrained("model")
LlamaForCausalLM(LlamaConfig(
    vocab_size=len(special) + len(letters), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, max_position_embeddings=4096, eos_token_id=2, pad_token_id=0,
)).save_pretrained("model")
tokenizer = PreTrainedTokenizerFast.from_pretrained("model")
model = LlamaForCausalLM.from_pretrained("model")
args = GRPOConfig(
    "out", per_device_train_batch_size=4, per_device_eval_batch_size=2, num_generations=2, max_steps=3,
    eval_strategy="steps", eval_steps=3, max_completion_length=400, learning_rate=1e-3, use_cpu=True,
    report_to=[], save_strategy="no", logging_steps=1, bf16=False, gradient_checkpointing=False,
)
"""
QUIET = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.mark.trl
def test_trl_with_a_rollout_function(tmp_path: Path) -> None:
    needs("trl")
    data = """
dataset = Dataset.from_dict({"prompt": ["one", "two", "three", "four"]})
evaluation = Dataset.from_dict({"prompt": ["five"]})
"""
    run(tmp_path, recipe("TRL, with a rollout function", TINY + data), **QUIET)
    found = recorded(tmp_path)
    training = [item for item in found if not item.key.validate]
    assert Counter(item.key.step for item in training) == {0: 4, 1: 4, 2: 4}
    assert {item.key.rollout_n for item in training} == {0, 1}
    groups = Counter((item.key.step, item.key.sample_index) for item in training)
    assert set(groups.values()) == {2}
    assert {name for _, name in groups} <= {"one", "two", "three", "four"}
    for item in training:
        assert item.policy_versions == (item.key.step,)
        assert item.trained_step == item.key.step + 1
    validation = [item for item in found if item.key.validate]
    assert [item.name for item in validation] == ["val/3/five/0", "val/3/five/1"]
    assert {item.trained_step for item in validation} == {None}
    for item in found:
        assert set(item.rewards) == {"brevity"}
        generations = [span for span in item.spans if span.kind == "llm"]
        assert [call.name for call in item.tool_calls] == ["word_count"]
        assert len(generations) == 2
        first, second = generations
        whole = first.prompt_ids + first.response_ids
        assert second.prompt_ids[: len(whole)] == whole
        for span in generations:
            assert 0 < len(span.response_ids) == len(span.response_logprobs) <= 8
            assert all(value <= 0 for value in span.response_logprobs)
        assert first.prompt_text == item.key.sample_index


@pytest.mark.trl
def test_trl_with_tools_of_its_own_loop(tmp_path: Path) -> None:
    needs("trl")
    data = '''
dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in "abcd"]})
args.eval_strategy = "no"
asked = '<tool_call>\\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\\n</tool_call><|im_end|>'

def calculator(expression: str) -> str:
    """Calculates.

    Args:
        expression: What to calculate.
    """
    calls.append(expression)
    return "42"

calls = []

class GRPOTrainer(GRPOTrainer):  # an engine that says what it is to say; all else is TRL's
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        prompts = tokenizer.batch_decode(prompt_ids)
        texts = ["It is 42.<|im_end|>" if "<tool_response>" in prompt else asked for prompt in prompts]
        return [tokenizer(text)["input_ids"] for text in texts], None
'''
    done = run(tmp_path, recipe("TRL, with `tools=`", TINY + data, "", "print(len(calls), 'calls')"), **QUIET)
    assert done.stdout.endswith("12 calls\n")
    found = recorded(tmp_path)
    assert len(found) == 12
    assert Counter(item.key.step for item in found) == {0: 4, 1: 4, 2: 4}
    for item in found:
        assert [turn.role for turn in item.turns] == ["user", "assistant", "tool", "assistant"]
        (call,) = item.tool_calls
        assert (call.name, call.arguments, call.result) == ("calculator", {"expression": "6 * 7"}, "42")
        assert item.turns[-1].text == "It is 42."
        assert item.rewards == {"correct": 1.0}
        assert item.key.sample_index == item.turns[0].text
