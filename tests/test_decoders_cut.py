"""What is long is cut: head and tail stay, what is hidden is counted, and no character is cut apart."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trackway.decoders import Cut, HFDecoder, TextCut, cut_text, decode_cut

from .tokenizers_for_tests import LARGE, SMALL, byte_level, ids_of

DECODERS = {name: HFDecoder(make()) for name, make in SMALL.items()}
WORDS = ids_of(byte_level(), " fox") * 3000
MARKER = re.compile(r"⟨… ([\d,]+) (token|character)s? hidden …⟩")


class Watched(list[int]):
    """Counts how many of its ids are read."""

    read = 0

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        self.read += len(found) if isinstance(where, slice) else 1
        return found

    def __iter__(self) -> Any:
        self.read += len(self)
        return super().__iter__()


@pytest.fixture
def decoder() -> HFDecoder:
    return DECODERS["byte-level"]


class TestTokens:
    def test_head_and_tail_are_shown_and_the_rest_counted(self, decoder: HFDecoder) -> None:
        ids = [*ids_of(byte_level(), "Hello"), *WORDS, *ids_of(byte_level(), " 42")]
        cut = decode_cut(decoder, ids, 90)
        head, tail = MARKER.split(cut.text)[0], MARKER.split(cut.text)[-1]
        assert head.startswith("Hello fox fox") and tail.endswith(" fox 42")
        assert cut.tokens == len(ids)
        assert cut.hidden == len(ids) - 90
        assert f"⟨… {len(ids) - 90:,} tokens hidden …⟩" in cut.text and len(ids) > 1090
        assert (head, tail) == (decoder.decode(ids[:60]), decoder.decode(ids[-30:]))
        assert not cut.incomplete and cut.unknown == 0

    @pytest.mark.parametrize("more", [0, -1])
    def test_what_fits_is_untouched(self, decoder: HFDecoder, more: int) -> None:
        ids = WORDS[: 100 + more]
        assert decode_cut(decoder, ids, 100) == Cut(decoder.decode(ids), 100 + more, 0)

    def test_one_too_many(self, decoder: HFDecoder) -> None:
        cut = decode_cut(decoder, WORDS[:101], 100)
        assert cut.hidden == 1 and "⟨… 1 token hidden …⟩" in cut.text

    def test_the_smallest_lengths(self, decoder: HFDecoder) -> None:
        ids = ids_of(byte_level(), "a b c d e")
        pieces = decoder.pieces(ids)
        n = len(ids)
        assert decode_cut(decoder, ids, 0).text == f"⟨… {n} tokens hidden …⟩"
        assert decode_cut(decoder, ids, 1).text == f"⟨… {n - 1} tokens hidden …⟩{pieces[-1]}"
        assert decode_cut(decoder, ids, 2).text == f"{pieces[0]}⟨… {n - 2} tokens hidden …⟩{pieces[-1]}"
        three = decode_cut(decoder, ids, 3).text
        assert three == f"{pieces[0]}{pieces[1]}⟨… {n - 3} tokens hidden …⟩{pieces[-1]}"
        assert decode_cut(decoder, ids, None) == Cut("a b c d e", n, 0)
        assert decode_cut(decoder, [], 0) == decode_cut(decoder, [], None) == Cut("", 0, 0)

    @pytest.mark.parametrize("wrong", [-1, -100, 1.5, "100", True])
    def test_a_wrong_length_is_an_error(self, decoder: HFDecoder, wrong: Any) -> None:
        with pytest.raises(ValueError, match=rf"max_length is {wrong!r}; .* from 0 on"):
            decode_cut(decoder, WORDS, wrong)

    def test_a_million_ids_cost_what_is_shown(self, decoder: HFDecoder) -> None:
        class Counting:
            decoded = 0

            def decode(self, ids: list[int]) -> str:
                self.decoded += len(ids)
                return "x" * len(ids)

        few, many = Watched(WORDS[:2_000]), Watched(WORDS[:2000] * 500)
        assert len(many) == 1_000_000
        cuts = [decode_cut(decoder, ids, 100) for ids in (few, many)]
        assert few.read == many.read == 100
        assert [cut.hidden for cut in cuts] == [1_900, 999_900]
        tokenizer = Counting()
        assert decode_cut(HFDecoder(tokenizer), many, 100).hidden == 999_900
        assert tokenizer.decoded == 100

    @pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, list, iter, lambda ids: np.array([ids])])
    def test_ids_in_any_container(self, decoder: HFDecoder, make: Any) -> None:
        expected = decode_cut(decoder, WORDS[:300], 10)
        assert expected.hidden == 290
        assert decode_cut(decoder, make(WORDS[:300]), 10) == expected

    @pytest.mark.parametrize("name", ["byte-level", "byte fallback", "byte-level in Python", "deepseek"])
    def test_no_character_is_cut_apart(self, name: str) -> None:
        tokenizer = {**SMALL, **LARGE}[name]()
        decoder = HFDecoder(tokenizer)
        ids = ids_of(tokenizer, "😀你𝔘🧑🚀 ok 😀你𝔘🧑🚀")
        whole = decoder.decode(ids)
        for max_length in range(len(ids)):
            cut = decode_cut(decoder, ids, max_length)
            head, tail = re.split(MARKER, cut.text)[0], re.split(MARKER, cut.text)[-1]
            assert "\ufffd" not in cut.text and not cut.incomplete
            assert whole.startswith(head) and whole.endswith(tail)
            assert len(ids) - max_length <= cut.hidden <= len(ids) - max_length + 6
            assert f"⟨… {cut.hidden} token" in cut.text

    def test_bytes_that_make_no_character_are_said(self, decoder: HFDecoder) -> None:
        stray = next(n for n in range(300) if byte_level().decode([n]) == "\ufffd")
        cut = decode_cut(decoder, [stray] * 50, 12)
        assert cut.incomplete and cut.hidden == 38
        assert cut.text.count("\ufffd") == 12

    def test_ids_without_text_are_counted_among_the_shown(self, decoder: HFDecoder) -> None:
        cut = decode_cut(decoder, [99_999, *WORDS[:100], -100, -1], 12)
        assert cut.text.startswith("⟨99999⟩ fox") and cut.text.endswith("⟨-100⟩⟨-1⟩")
        assert cut.unknown == 2
        assert decode_cut(decoder, [5, 99_999, 6], None).unknown == 1

    def test_the_tail_keeps_the_space_at_its_start(self) -> None:
        for name in ("unigram", "byte fallback"):
            tokenizer = SMALL[name]()
            ids = ids_of(tokenizer, "The quick brown fox jumps over the lazy dog")
            decoder = DECODERS[name]
            for max_length in range(1, len(ids)):
                tail = MARKER.split(decode_cut(decoder, ids, max_length).text)[-1]
                assert decoder.decode(ids).endswith(tail)
                assert tail == "".join(decoder.pieces(ids)[len(ids) - (max_length - max_length * 2 // 3) :])

    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(st.integers(0, 480) | st.integers()), st.integers(0, 40), st.sampled_from(sorted(DECODERS))
    )
    def test_never_more_than_asked_for(self, ids: list[int], max_length: int, name: str) -> None:
        decoder = DECODERS[name]
        cut = decode_cut(decoder, ids, max_length)
        assert cut.tokens == len(ids)
        shown = len(ids) - cut.hidden
        assert shown <= max_length or cut.hidden == 0
        if len(ids) <= max_length:
            assert cut.text == decoder.decode(ids)
        else:
            assert max_length - 6 <= shown and f"⟨… {cut.hidden:,} token" in cut.text


class TestText:
    def test_head_and_tail_are_shown_and_the_rest_counted(self) -> None:
        text = "HEAD" + "x" * 10_000 + "TAIL"
        cut = cut_text(text, 200)
        assert 198 <= len(cut.text) <= 200
        head, count, unit, tail = MARKER.split(cut.text)
        assert head.startswith("HEADx") and tail.endswith("xTAIL")
        assert unit == "character"
        assert cut.characters == len(text)
        assert cut.hidden == int(count.replace(",", "")) == len(text) - len(head) - len(tail)
        assert len(tail) * 2 - 2 <= len(head) <= len(tail) * 2 + 2

    @pytest.mark.parametrize("text", ["x" * 100, "你好世界" * 25, "e\u0301" * 50, "👩‍🚀 " * 25])
    @pytest.mark.parametrize("max_length", [0, 1, 2, 3, 30, 40, 99, 100, 101, None])
    def test_the_result_is_never_longer(self, text: str, max_length: int | None) -> None:
        cut = cut_text(text, max_length)
        assert cut.characters == 100
        if max_length is None or max_length >= 100:
            assert cut == TextCut(text, 100, 0)
        else:
            assert len(cut.text) <= max_length
            assert cut.hidden > 0

    def test_where_the_marker_does_not_fit(self) -> None:
        assert cut_text("0123456789" * 10, 7) == TextCut("0123…89", 100, 94)
        assert cut_text("0123456789", 1) == TextCut("…", 10, 10)
        assert cut_text("0123456789", 0) == TextCut("", 10, 10)

    @pytest.mark.parametrize("wrong", [-1, 2.0, "9", False])
    def test_a_wrong_length_is_an_error(self, wrong: Any) -> None:
        with pytest.raises(ValueError, match=rf"max_length is {wrong!r}; .* from 0 on"):
            cut_text("text", wrong)

    @pytest.mark.parametrize(
        "character",
        [
            "e\u0301\u0323",  # a letter with two marks
            "👩‍❤️‍💋‍👨",  # emoji joined by zero-width joiners
            "👍🏽",  # an emoji with a skin tone
            "🇩🇪",  # a flag, of two letters
            "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",  # a flag, of tags
            "1\ufe0f\u20e3",  # a keycap
            "\u1112\u1161\u11ab",  # a syllable of Hangul, of its letters
            "\u1100\uac00",
            "\ud83d\ude00",  # a surrogate pair, as broken JSON leaves it
            "\r\n",
            "\u0915\u094d\u0937\u093f",  # a conjunct of Devanagari
            "\u0e01\u0e33" if unicodedata.category("\u0e33") == "Mc" else "ก\u0e34",
        ],
    )
    def test_no_character_is_cut_apart(self, character: str) -> None:
        text = "ab" + character * 40 + "cd"
        for max_length in range(len(text)):
            head, _, _, tail = (MARKER.split(cut_text(text, max_length).text) + [""] * 3)[:4]
            if not tail:
                head, _, tail = head.partition("…")
            for part in (head.removeprefix("ab"), tail.removesuffix("cd")):
                assert part.replace(character, "") in ("", "a", "c", "d", "b")

    def test_a_sequence_too_long_to_show_is_hidden_whole(self) -> None:
        tower = "z" + "\u0301" * 500
        cut = cut_text(tower, 100)
        assert cut == TextCut("⟨… 501 characters hidden …⟩", 501, 501)

    @given(st.text(st.characters(exclude_characters="⟨…⟩"), max_size=300), st.integers(0, 120))
    def test_counts_add_up(self, text: str, max_length: int) -> None:
        cut = cut_text(text, max_length)
        assert len(cut.text) <= max(max_length, 0) or cut.text == text
        marker = MARKER.search(cut.text)
        mark = marker.group() if marker else "…" if cut.hidden and max_length else ""
        assert len(cut.text) - len(mark) + cut.hidden == cut.characters == len(text)
        head, _, tail = cut.text.partition(mark) if mark else (cut.text, "", "")
        assert text.startswith(head) and text.endswith(tail)
