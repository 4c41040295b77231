"""Pieces and streams give, joined, the same text as decoding all at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trackway.decoders import HFDecoder

from .tokenizers_for_tests import LARGE, SMALL, SPECIAL, byte_level, ids_of, transformers_tokenizer

PAD, EOS, _ = (byte_level().token_to_id(token) for token in SPECIAL)
EMOJI = "🦜鬱 🧑‍🔬ẽ"


def parts_of_characters(tokenizer: Any, size: int) -> list[int]:
    return [n for n in range(size) if "\ufffd" in tokenizer.decode([n], skip_special_tokens=False)] or [0]


def _decoders() -> dict[str, tuple[HFDecoder, st.SearchStrategy[list[int]]]]:
    """Give every small tokenizer with lists of ids that are hard for it."""
    found = {}
    for name, make in SMALL.items():
        tokenizer = make()
        size = len(tokenizer) if hasattr(tokenizer, "__len__") else tokenizer.get_vocab_size()
        ids = (
            st.integers(0, size - 1)
            | st.sampled_from(parts_of_characters(tokenizer, size))
            | st.sampled_from([0, 1, 2, -100, -1, size, 10**9])
        )
        lists = st.lists(
            ids | st.tuples(ids, st.integers(2, 6)).map(lambda run: [run[0]] * run[1]), max_size=12
        )
        flat = lists.map(
            lambda items: [i for item in items for i in (item if isinstance(item, list) else [item])]
        )
        for skip in (False, True):
            found[f"{name}, special tokens {'skipped' if skip else 'kept'}"] = (
                HFDecoder(tokenizer, skip_special_tokens=skip),
                flat,
            )
    padded_with_end = transformers_tokenizer(byte_level(), pad_token="<eos>", eos_token="<eos>")
    found["padded with the end token"] = (HFDecoder(padded_with_end), flat)
    return found


DECODERS = _decoders()


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_and_any_chunks_give_the_text(name: str, data: st.DataObject) -> None:
    decoder, lists = DECODERS[name]
    ids = data.draw(lists)
    text = decoder.decode(ids)
    pieces = decoder.pieces(ids)
    assert "".join(pieces) == text
    assert len(pieces) == len(ids)

    stream = decoder.stream()
    streamed, rest = "", ids
    while rest:
        size = data.draw(st.integers(1, 4))
        streamed += stream.feed(rest[:size])
        assert text.startswith(streamed)
        rest = rest[size:]
    assert streamed + stream.flush() == text
    assert stream.feed(ids) + stream.flush() == text  # a stream that was flushed begins anew


@pytest.mark.parametrize("name", ["byte-level", "byte fallback", "deepseek", "mistral sentencepiece"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_characters_of_several_tokens_come_whole(name: str, size: int) -> None:
    tokenizer = {**SMALL, **LARGE}[name]()
    ids = ids_of(tokenizer, EMOJI)
    assert len(ids) > len(EMOJI)
    decoder = HFDecoder(tokenizer)
    parts = [decoder.feed(ids[n : n + size]) for n in range(0, len(ids), size)] + [decoder.flush()]
    assert "".join(parts) == EMOJI
    assert "\ufffd" not in "".join(decoder.pieces(ids))


def test_a_piece_is_with_the_token_that_completes_it() -> None:
    ids = ids_of(byte_level(), "a😀b")
    pieces = HFDecoder(byte_level()).pieces(ids)
    assert [piece for piece in pieces if piece] == ["a", "😀", "b"]
    assert pieces.index("😀") == len(ids) - 2


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", [name for name in {**SMALL, **LARGE} if name != "word piece"])
def test_text_does_not_wait_for_the_end_where_a_table_gives_it(name: str, skip: bool) -> None:
    tokenizer = {**SMALL, **LARGE}[name]()
    stream = HFDecoder(tokenizer, skip_special_tokens=skip).stream()
    assert stream.feed(ids_of(tokenizer, "The quick brown fox")).strip() == "The quick brown fox"
    assert stream.flush() == ""


def test_text_comes_as_early_as_it_is_certain() -> None:
    stream = HFDecoder(byte_level()).stream()
    first, *others, last = ids_of(byte_level(), "😀")
    assert stream.feed(ids_of(byte_level(), "Hello")) == "Hello"
    assert stream.feed([first]) + stream.feed(others) == ""
    assert stream.feed([last]) == "😀"
    assert stream.feed([first]) == ""
    assert stream.feed(ids_of(byte_level(), "x")) == "\ufffdx"
    assert stream.feed([first]) == ""
    assert stream.flush() == "\ufffd"


def test_a_run_is_one_marker_however_it_arrives() -> None:
    decoder = HFDecoder(transformers_tokenizer(byte_level(), pad_token="<pad>", eos_token="<eos>"))
    hello = ids_of(byte_level(), "Hello")
    stream = decoder.stream()
    parts = [stream.feed([id_]) for id_ in [PAD] * 9 + hello + [EOS] + [-100] * 5]
    assert "".join(parts) == "⟨<pad> ×9⟩Hello<eos>"
    assert stream.flush() == "⟨-100 ×5⟩"
    assert decoder.pieces([PAD] * 9 + hello) == ["⟨<pad> ×9⟩", *[""] * 8, *decoder.pieces(hello)]


def test_streams_do_not_mix() -> None:
    decoder = HFDecoder(byte_level())
    ids = ids_of(byte_level(), "😀")
    one, other = decoder.stream(), decoder.stream()
    assert one.feed(ids[:1]) + other.feed(ids[:1]) + decoder.feed(ids[:1]) == ""
    assert one.feed(ids[1:]) == other.feed(ids[1:]) == decoder.feed(ids[1:]) == "😀"
    assert decoder.flush() == ""
