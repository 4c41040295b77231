"""What a long episode costs on disk, with nothing of it left out."""

import json
import struct
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from trackway import llm_trace, rollout_trace, trajectory
from trackway.trace.testing import recording

from .tokenizers_for_tests import LARGE

TOKENS, RESPONSE = 32_768, 256
LOGPROBS = [-((17 * place) % 997) / 131 for place in range(TOKENS)]


@pytest.fixture(scope="module")
def ids() -> list[int]:
    """Token ids of real text: the standard library's sources."""
    found: list[int] = []
    for path in sorted(Path(json.__file__).parent.parent.glob("*.py")):
        found += LARGE["deepseek"]().encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
        if len(found) >= TOKENS:
            return found[:TOKENS]
    raise AssertionError(f"only {len(found)} ids")


def episode(ids: list[int], turns: int, tokens: int):
    """Record an episode of so many turns and tokens; give it as read back, and its bytes in the journal."""
    ends = [tokens * turn // turns for turn in range(1, turns + 1)]

    @llm_trace
    def generate(prompt_ids):
        at = len(prompt_ids)
        return {"token_ids": ids[at : at + RESPONSE], "log_probs": LOGPROBS[at : at + RESPONSE]}

    @rollout_trace
    def run():
        for end in ends:
            generate(ids[: end - RESPONSE])
        first = ends[0] - RESPONSE
        mask = [0] * (tokens - first)
        for end in ends:
            mask[end - RESPONSE - first : end - first] = [1] * RESPONSE
        return {"prompt_ids": ids[:first], "response_ids": ids[first:tokens], "response_mask": mask}

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=LARGE["deepseek"]())
    with recording(token2text=True, tokenizer=tokenizer, max_length=None, max_text_length=None) as rec:
        with trajectory(step=1, sample_index=1):
            run()
        found = rec.trajectory()
        size = sum(path.stat().st_size for path in (rec.path / "journal").glob("*.0*.jsonl"))
    return found, size


@pytest.mark.slow
def test_a_long_episode_costs_bytes_for_its_tokens_and_not_for_its_turns(ids: list[int]) -> None:
    sizes = {}
    for turns in (5, 20, 40):
        found, sizes[turns] = episode(ids, turns, TOKENS)
        generations = [span for span in found.spans if span.kind == "llm"]
        ends = [TOKENS * turn // turns for turn in range(1, turns + 1)]
        assert [span.prompt_ids for span in generations] == [tuple(ids[: end - RESPONSE]) for end in ends]
        assert [span.response_ids for span in generations] == [
            tuple(ids[end - RESPONSE : end]) for end in ends
        ]
        for span, end in zip(generations, ends, strict=True):
            given = LOGPROBS[end - RESPONSE : end]
            kept = struct.pack(f"<{RESPONSE}f", *(span.response_logprobs or ()))
            assert kept == struct.pack(f"<{RESPONSE}f", *given)
        text = "".join((span.prompt_text or "") + (span.response_text or "") for span in generations)
        assert text == LARGE["deepseek"]().decode(ids, skip_special_tokens=False)
        (whole,) = (span for span in found.spans if span.kind == "rollout")
        assert (whole.prompt_ids or ()) + (whole.response_ids or ()) == tuple(ids)
        assert sum(whole.response_mask or ()) == turns * RESPONSE
        assert sizes[turns] / TOKENS <= 20
    # The rest is logprobs, of which there are eight times as many.
    assert sizes[40] / sizes[5] < 2
    _, half = episode(ids, 20, TOKENS // 2)
    assert sizes[20] / half < 2.1
