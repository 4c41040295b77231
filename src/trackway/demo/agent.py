"""A calculator agent, and how Trackway records it: three decorators, one ``with``, one line a reward."""

from __future__ import annotations

import re
from typing import Any

from trackway import llm_trace, reward, rollout_trace, tool_trace, trajectory

from .arithmetic import OPEN, Task, calculate, message, prompt
from .engine import Generation


class CalculatorAgent:
    def __init__(self, engine: Any, tokenizer: Any, *, turns: int, temperature: float) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.turns = turns
        self.temperature = temperature

    @rollout_trace(name="calculator_agent")
    async def run(self, task: Task, seed: int) -> str | None:
        """Let the model speak at most ``turns`` times; return its answer, None where it gave none."""
        ids = self.encode(prompt(task.question))
        answer = None
        for turn in range(self.turns):
            generation = await self.generate(ids, seed=seed + turn)
            text = self.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
            if found := re.fullmatch(r"Answer: (-?[\d.]+)", text.strip()):
                answer = found[1]
                break
            call = re.search(r"<tool>(.*?)</tool>", text)
            if call is None or generation.finish_reason == "length":
                break
            try:
                result = await self.calculator(call[1])
            except ValueError as error:
                result = f"error: {error}"
            # The ids that were sampled go back in as they are; only the tool's reply is tokenized.
            ids = [*ids, *generation.token_ids, *self.encode("\n" + message("tool", result) + OPEN)]
        reward("answer", 1.0 if answer == task.answer else 0.0)
        reward("format", 0.0 if answer is None else 0.1)
        return answer

    @llm_trace(name="generate")
    async def generate(self, prompt_ids: list[int], seed: int) -> Generation:
        generation: Generation = await self.engine.generate(
            prompt_ids,
            max_tokens=32,
            temperature=self.temperature,
            stop_ids=[self.tokenizer.eos_token_id],
            seed=seed,
        )
        return generation

    @tool_trace(name="calculator")
    async def calculator(self, expression: str) -> str:
        return calculate(expression)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


async def rollout(
    agent: CalculatorAgent,
    task: Task,
    *,
    step: int,
    sample_index: int,
    rollout_n: int,
    validate: bool = False,
) -> None:
    """Run the agent once. The weights that play step n are called version n, as in on-policy training."""
    with trajectory(
        step=step, sample_index=sample_index, rollout_n=rollout_n, validate=validate, policy_version=step
    ):
        await agent.run(task, seed=1_000_000 * step + 10_000 * sample_index + 100 * rollout_n)
