"""Stands in for the engine where there is no model: replies from a script, with the real tokenizer."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .engine import Generation


class ScriptedEngine:
    """Most replies are right; some calculate the wrong thing, write what the tool rejects, or never answer.

    Args:
        tokenizer: the model's.
        expressions: what to calculate, by question.
    """

    def __init__(self, tokenizer: Any, expressions: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._expressions = expressions

    async def __aenter__(self) -> ScriptedEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Collection[int],
        seed: int,
    ) -> Generation:
        """Reply as ``Engine.generate`` does; at temperature 0 always right."""
        draw = random.Random(seed)
        await asyncio.sleep(draw.uniform(0.001, 0.01))
        text = self._reply(self._tokenizer.decode(prompt_ids), draw, careless=temperature > 0)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        ids = [*ids, *list(stop_ids)[:1]][:max_tokens]
        log_probs = [-draw.expovariate(8.0) for _ in ids]
        return Generation(ids, log_probs, "stop" if ids[-1] in stop_ids else "length")

    def _reply(self, conversation: str, draw: random.Random, careless: bool) -> str:
        question, _, rest = conversation.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")
        expression = self._expressions[question]
        results = re.findall(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", rest, re.DOTALL)
        luck = draw.random() if careless else 0.0
        if results and not results[-1].startswith("error"):
            return f"Answer: {results[-1]}" if luck < 0.85 else f"<tool>{results[-1]}*1</tool>"
        if luck < 0.55:
            return f"<tool>{expression}</tool>"
        if luck < 0.70:
            return f"<tool>{expression.replace('*', '+').replace('-', '*')}</tool>"
        if luck < 0.90:
            return draw.choice(["<tool>{0} = ?</tool>", "<tool>({0})^1</tool>", "<tool>{0}/0</tool>"]).format(
                expression
            )
        return "I would have to think about that."
