"""Token ids become the text that was sampled, whatever the ids and whatever the tokenizer."""

from __future__ import annotations

import array
import collections
import copy
import json
import logging
import os
import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trackway.decoders import DecoderError, HFDecoder

from .tokenizers_for_tests import (
    LARGE,
    SMALL,
    SPECIAL,
    TEXTS,
    PythonByteLevel,
    byte_fallback,
    byte_level,
    clean_up,
    deepseek_path,
    ids_of,
    transformers_tokenizer,
    unigram,
)

ALL = {**SMALL, **LARGE}
PAD, EOS, START = (byte_level().token_to_id(token) for token in SPECIAL)
HELLO = ids_of(byte_level(), "Hello")


@pytest.fixture(scope="module")
def decoder() -> HFDecoder:
    return HFDecoder(transformers_tokenizer(byte_level(), pad_token="<pad>", eos_token="<eos>"))


def own_text(tokenizer: Any, ids: list[int], skip: bool) -> str:
    """Decode with the tokenizer itself."""
    return tokenizer.decode(
        ids,
        skip_special_tokens=skip,
        **({"clean_up_tokenization_spaces": False} if hasattr(tokenizer, "pad_token_id") else {}),
    )


def random_lists(tokenizer: Any, count: int) -> list[list[int]]:
    """Draw short lists of ids, often of tokens that are parts of characters, or special."""
    draw = random.Random(7)
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else tokenizer.get_vocab_size()
    parts = [id_ for id_ in range(size) if "\ufffd" in tokenizer.decode([id_], skip_special_tokens=False)]
    pools = [range(size), parts or range(size), range(8)]
    lists = [
        [draw.choice(draw.choice(pools)) for _ in range(draw.choice([1, 2, 3, 9, 40]))] for _ in range(count)
    ]
    # Runs of padding are collapsed, which is a test of its own.
    return [ids for ids in lists if all(ids[n] != ids[n + 1] for n in range(len(ids) - 1))]


@pytest.mark.parametrize("skip", [False, True], ids=["with special tokens", "without special tokens"])
@pytest.mark.parametrize("name", ALL)
def test_text_equals_the_tokenizers_own(name: str, skip: bool) -> None:
    tokenizer = ALL[name]()
    decoder = HFDecoder(tokenizer, skip_special_tokens=skip)
    lists = random_lists(tokenizer, 400) + [ids_of(tokenizer, text) for text in TEXTS[:6]]
    assert len(lists) > 200
    for ids in lists:
        assert decoder.decode(ids) == own_text(tokenizer, ids, skip)


@pytest.mark.parametrize("name", ["byte-level", "byte fallback without strip", "deepseek"])
def test_real_text_comes_back(name: str) -> None:
    tokenizer = ALL[name]()
    for text in TEXTS[:6]:
        assert HFDecoder(tokenizer).decode(ids_of(tokenizer, text)).removeprefix(" ") == text


def test_special_tokens_are_kept_unless_told_otherwise() -> None:
    ids = [START, *HELLO, EOS]
    assert HFDecoder(byte_level()).decode(ids) == "<|im_start|>Hello<eos>"
    assert HFDecoder(byte_level(), skip_special_tokens=True).decode(ids) == "Hello"


@pytest.mark.parametrize("text", ["x != y , ok .", "': 'search", "a . b ? c !"])
def test_spaces_before_punctuation_stay(text: str) -> None:
    cleaning = transformers_tokenizer(byte_level(), clean_up_tokenization_spaces=True)
    assert HFDecoder(cleaning).decode(ids_of(byte_level(), text)) == text
    in_python = PythonByteLevel()
    ids = in_python.encode(text)
    assert clean_up(text) != text and in_python.decode(ids) == clean_up(text)
    assert HFDecoder(in_python).decode(ids) == text


class WordsInPython:
    """Has no vocabulary to look at, and cleans up unless told otherwise."""

    WORDS = ("x", " !=", " y", " ,", " ok", " .")

    def decode(self, token_ids: list[int], clean_up_tokenization_spaces: bool = True) -> str:
        text = "".join(self.WORDS[id_] for id_ in token_ids)
        return clean_up(text) if clean_up_tokenization_spaces else text


def test_spaces_stay_with_a_tokenizer_that_has_only_decode() -> None:
    assert HFDecoder(WordsInPython()).decode(range(6)) == "x != y , ok ."


class TestOddIds:
    def test_masked_positions_are_one_marker_with_a_count(self, decoder: HFDecoder) -> None:
        ids = [-100, -100, *HELLO, -1]
        for given_ids in (ids, np.array(ids), torch.tensor(ids), tuple(ids)):
            assert decoder.decode(given_ids) == "⟨-100 ×2⟩Hello⟨-1⟩"
        assert decoder.decode([-100] * 512) == "⟨-100 ×512⟩"
        assert decoder.decode([-100]) == "⟨-100⟩"
        assert decoder.decode([-100] * 1024 + HELLO + [-100] * 3) == "⟨-100 ×1,024⟩Hello⟨-100 ×3⟩"

    @pytest.mark.parametrize("name", ALL)
    def test_ids_beyond_the_vocabulary_are_shown(self, name: str) -> None:
        tokenizer = ALL[name]()
        ids = ids_of(tokenizer, "fox")
        text = HFDecoder(tokenizer).decode([*ids, 153_058_000, *ids])
        before, placeholder, after = text.partition("⟨153058000⟩")
        assert placeholder
        assert before == own_text(tokenizer, ids, False)
        assert after.strip() == before.strip()

    def test_a_hole_in_the_vocabulary_is_shown(self) -> None:
        state = json.loads(byte_level().to_str())
        vocabulary = state["model"]["vocab"]
        hole = vocabulary.pop("z")
        state["model"]["merges"] = [pair for pair in state["model"]["merges"] if "z" not in "".join(pair)]
        state["model"]["vocab"] = {token: id_ for token, id_ in vocabulary.items() if "z" not in token}
        tokenizer = type(byte_level()).from_str(json.dumps(state))
        assert HFDecoder(tokenizer).decode([*HELLO, hole, *HELLO]) == f"Hello⟨{hole}⟩Hello"

    def test_a_tokenizer_that_gives_none_for_a_token(self) -> None:
        class Holey(PythonByteLevel):
            def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
                return [
                    None if id_ == HELLO[0] else token
                    for id_, token in zip(ids, super().convert_ids_to_tokens(ids), strict=True)
                ]

        assert HFDecoder(Holey()).decode([HELLO[0], EOS]) == f"⟨{HELLO[0]}⟩<eos>"

    def test_integral_floats_are_ids(self, decoder: HFDecoder) -> None:
        floats = [float(id_) for id_ in HELLO]
        for given_ids in (floats, np.array(floats), np.array(floats, np.float32), torch.tensor(floats)):
            assert decoder.decode(given_ids) == "Hello"

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            (2**32 + 1, "⟨4294967297⟩"),
            (2**32, "⟨4294967296⟩"),
            (np.iinfo(np.int64).max, "⟨9223372036854775807⟩"),
            (-(2**63), "⟨-9223372036854775808⟩"),
            pytest.param(10**5000, "⟨integer of 16,610 bits⟩", id="too long to print"),
            (15.5, "⟨15.5⟩"),
            (float("nan"), "⟨nan⟩"),
            (float("-inf"), "⟨-inf⟩"),
            (True, "⟨True⟩"),
            (np.True_, "⟨True⟩"),
            (torch.tensor(False), "⟨False⟩"),
            ("15", "⟨'15'⟩"),
            ("\x1b[2J", r"⟨'\x1b[2J'⟩"),
            ("a" * 99, f"⟨'{'a' * 24}'…⟩"),
            (None, "⟨None⟩"),
            ([1, 2], "⟨list⟩"),
            (object(), "⟨object⟩"),
        ],
    )
    @pytest.mark.parametrize("name", ["byte-level", "byte fallback", "word piece"])
    def test_impossible_values_are_shown(self, name: str, value: Any, shown: str) -> None:
        tokenizer = SMALL[name]()
        ids = ids_of(tokenizer, "fox")
        assert HFDecoder(tokenizer).decode([*ids, value]) == own_text(tokenizer, ids, False) + shown

    def test_a_mask_given_for_ids_does_not_read_as_text(self, decoder: HFDecoder) -> None:
        mask = np.array([True, True, False])
        assert decoder.decode(mask) == decoder.decode(mask.tolist()) == "⟨True ×2⟩⟨False⟩"

    def test_counts_the_ids_without_text(self, decoder: HFDecoder) -> None:
        assert decoder.unknown([*HELLO, 99_999, -100, -100, -1, "15", *HELLO]) == 3
        assert decoder.unknown(HELLO) == 0

    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(
            st.integers()
            | st.integers(-101, 520)
            | st.floats()
            | st.text(max_size=3)
            | st.none()
            | st.booleans()
            | st.binary(max_size=2)
            | st.lists(st.integers(), max_size=2)
        ),
        st.sampled_from(sorted(SMALL)),
    )
    def test_never_raises_and_never_fails(self, ids: list[Any], name: str) -> None:
        decoder = HFDECODERS[name]
        text = decoder.decode(ids)
        assert isinstance(text, str) and "decode failed" not in text
        assert "".join(decoder.pieces(ids)) == text
        text.encode()  # no half of a surrogate pair in it


HFDECODERS = {name: HFDecoder(make()) for name, make in SMALL.items()}


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        iter,
        collections.deque,
        np.array,
        torch.tensor,
        lambda ids: np.array([ids]),
        lambda ids: torch.tensor([ids]),
        lambda ids: [ids],
        lambda ids: array.array("q", ids),
        lambda ids: [np.int64(id_) for id_ in ids],
        lambda ids: [torch.tensor(id_) for id_ in ids],
        lambda ids: np.array(ids, np.uint16),
    ],
)
@pytest.mark.parametrize("name", ["byte-level", "word piece"])
def test_takes_ids_in_any_container(name: str, make: Any) -> None:
    tokenizer = SMALL[name]()
    ids = ids_of(tokenizer, "The quick brown fox")
    assert HFDecoder(tokenizer).decode(make(ids)) == "The quick brown fox"
    assert HFDecoder(tokenizer).decode(make(ids[:1])) == own_text(tokenizer, ids[:1], False)


def test_takes_ranges_single_ids_and_nothing(decoder: HFDecoder) -> None:
    assert decoder.decode(range(40, 60)) == byte_level().decode(list(range(40, 60)))
    assert decoder.decode(HELLO[0]) == decoder.decode(torch.tensor(HELLO[0])) == decoder.decode(HELLO[:1])
    assert decoder.decode([]) == decoder.decode(np.array([], np.int64)) == decoder.decode(()) == ""


class TestPadding:
    def tokenizer(self, **special: str) -> Any:
        return transformers_tokenizer(byte_level(), **special)

    def test_padding_is_one_marker_with_a_count(self) -> None:
        decoder = HFDecoder(self.tokenizer(pad_token="<pad>", eos_token="<eos>"))
        assert decoder.decode([PAD] * 512 + HELLO) == "⟨<pad> ×512⟩Hello"
        assert decoder.decode([*HELLO, EOS] + [PAD] * 1024) == "Hello<eos>⟨<pad> ×1,024⟩"

    def test_the_real_end_is_kept_where_padding_is_the_same_token(self) -> None:
        decoder = HFDecoder(self.tokenizer(pad_token="<eos>", eos_token="<eos>"))
        assert decoder.decode([EOS] * 512 + HELLO) == "⟨<eos> ×512⟩Hello"
        assert decoder.decode([*HELLO, EOS] + [EOS] * 1024) == "Hello<eos>⟨<eos> ×1,024⟩"
        assert decoder.decode([EOS] + [EOS] * 1024) == "<eos>⟨<eos> ×1,024⟩"
        assert decoder.decode([*HELLO, EOS]) == "Hello<eos>"

    def test_padding_with_the_end_token_where_none_is_set(self) -> None:
        decoder = HFDecoder(self.tokenizer(eos_token="<eos>"))
        assert decoder.decode([*HELLO, EOS] + [EOS] * 9) == "Hello<eos>⟨<eos> ×9⟩"

    def test_a_tokenizer_that_does_not_name_its_padding(self) -> None:
        decoder = HFDecoder(byte_level())
        assert decoder.decode([PAD] * 512 + [*HELLO, EOS] + [EOS] * 9) == "⟨<pad> ×512⟩Hello<eos>⟨<eos> ×9⟩"

    def test_padding_that_is_no_special_token(self) -> None:
        backend = copy.deepcopy(byte_level())
        ordinary = backend.token_to_id("<tool>")
        backend.enable_padding(pad_id=ordinary, pad_token="<tool>")
        assert HFDecoder(backend).decode([*HELLO] + [ordinary] * 9) == "Hello<tool>⟨<tool> ×8⟩"

    def test_a_few_in_a_row_stay(self) -> None:
        decoder = HFDecoder(self.tokenizer(pad_token="<pad>", eos_token="<eos>"))
        assert decoder.decode([*HELLO, PAD, PAD, PAD]) == "Hello<pad><pad><pad>"

    def test_repetition_of_other_tokens_stays(self) -> None:
        decoder = HFDecoder(self.tokenizer(pad_token="<pad>", eos_token="<eos>"))
        assert decoder.decode(HELLO * 500) == "Hello" * 500

    def test_skipped_padding_leaves_no_marker(self) -> None:
        tokenizer = self.tokenizer(pad_token="<pad>", eos_token="<eos>")
        assert HFDecoder(tokenizer, skip_special_tokens=True).decode([PAD] * 512 + HELLO) == "Hello"

    @pytest.mark.parametrize("name", ["unigram", "byte fallback", "word piece"])
    def test_with_other_kinds_of_tokenizer(self, name: str) -> None:
        tokenizer = SMALL[name]()
        ids = ids_of(tokenizer, "fox")
        text = HFDecoder(tokenizer).decode([0] * 512 + ids + [0] * 5)
        assert text.replace(" ", "") == "⟨<pad>×512⟩fox⟨<pad>×5⟩"


class TestFailure:
    class Broken:
        def decode(self, ids: list[int]) -> str:
            raise ValueError("the vocabulary\nis gone " + "x" * 500)

    def test_the_error_is_the_text(self, caplog: pytest.LogCaptureFixture) -> None:
        decoder = HFDecoder(self.Broken())
        with caplog.at_level(logging.WARNING, logger="trackway.decoders"):
            texts = [decoder.decode([1, 2]) for _ in range(50)]
        assert set(texts) == {texts[0]}
        assert texts[0].startswith("⟨decode failed: ValueError: the vocabulary is gone xxx")
        assert texts[0].endswith("…⟩") and len(texts[0]) < 200 and "\n" not in texts[0]
        assert len(caplog.records) == 1
        assert caplog.records[0].name == "trackway.decoders"
        assert "ValueError: the vocabulary is gone" in caplog.records[0].getMessage()

    def test_each_kind_of_error_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        class Moody:
            errors = iter([ValueError("a"), KeyError("b"), ValueError("c"), KeyError("d")])

            def decode(self, ids: list[int]) -> str:
                raise next(self.errors)

        decoder = HFDecoder(Moody())
        texts = [decoder.decode([1]) for _ in range(4)]
        assert [text[:-1].rpartition(" ")[2] for text in texts] == ["a", "'b'", "c", "'d'"]
        assert len(caplog.records) == 2

    def test_pieces_and_streams_tell_it_too(self) -> None:
        decoder = HFDecoder(self.Broken())
        failed = decoder.decode([1, 2])
        assert decoder.pieces([1, 2]) == [failed, ""]
        assert decoder.pieces([]) == []
        assert decoder.feed([1, 2]) + decoder.flush() == failed
        assert decoder.flush() == ""

    def test_an_error_that_cannot_be_printed(self) -> None:
        class SilentError(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        class Tokenizer:
            def decode(self, ids: list[int]) -> str:
                raise SilentError

        assert HFDecoder(Tokenizer()).decode([1]).startswith("⟨decode failed: SilentError: ")

    def test_a_tokenizer_that_fails_only_when_looked_at_for_the_table(self) -> None:
        class Shy(PythonByteLevel):
            def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
                raise IndexError

            def decode(self, ids: list[int], **options: Any) -> str:
                raise AssertionError("asked for ids without tokens")

        assert HFDecoder(Shy()).decode([5, 6]) == "⟨5⟩⟨6⟩"


def test_a_table_that_disagrees_with_the_tokenizer_is_not_used() -> None:
    class Shouting(PythonByteLevel):
        def decode(self, ids: list[int], **options: Any) -> str:
            return super().decode(ids, **options).upper()

    tokenizer = Shouting()
    ids = tokenizer.encode("The quick brown fox")
    assert HFDecoder(tokenizer).decode(ids) == "THE QUICK BROWN FOX"
    assert "".join(HFDecoder(tokenizer).pieces([*ids, -100, -100])) == "THE QUICK BROWN FOX⟨-100 ×2⟩"


def test_tokens_added_later_have_their_text() -> None:
    tokenizer = copy.deepcopy(byte_level())
    decoder = HFDecoder(tokenizer)
    new = tokenizer.get_vocab_size()
    assert decoder.decode([new]) == f"⟨{new}⟩"
    tokenizer.add_tokens(["<later>"])
    assert decoder.decode([*HELLO, new]) == "Hello<later>"


def test_continued_text_keeps_the_space_at_its_start() -> None:
    for tokenizer in (unigram(), byte_fallback()):
        decoder = HFDecoder(tokenizer)
        ids = ids_of(tokenizer, "The quick brown fox")
        for cut in range(1, len(ids)):
            assert (
                decoder.decode(ids[:cut]) + decoder.decode(ids[cut:], continued=True) == "The quick brown fox"
            )


class TestLoading:
    def test_from_a_tokenizer_json(self) -> None:
        decoder = HFDecoder(deepseek_path())
        decoder.load()
        assert decoder.decode(ids_of(LARGE["deepseek"](), "x != y , ok .")) == "x != y , ok ."

    def test_from_a_folder(self, tmp_path: Path) -> None:
        transformers_tokenizer(byte_level(), pad_token="<pad>").save_pretrained(tmp_path)
        assert HFDecoder(str(tmp_path)).decode([*HELLO, *[PAD] * 8]) == "Hello⟨<pad> ×8⟩"

    def test_from_a_processor(self) -> None:
        class Processor:
            tokenizer = transformers_tokenizer(byte_level())

            def decode(self, *args: Any, **kwargs: Any) -> str:
                raise AssertionError("the tokenizer is asked, not the processor")

        assert HFDecoder(Processor()).decode(HELLO) == "Hello"

    @pytest.mark.parametrize("source", ["/no/such/folder", "nobody/no-such-model", "odd\0name"])
    def test_one_that_is_not_there(self, source: str, caplog: pytest.LogCaptureFixture) -> None:
        decoder = HFDecoder(source)
        with pytest.raises(DecoderError, match=r"no tokenizer .*nothing is downloaded") as caught:
            decoder.load()
        assert repr(source) in str(caught.value)
        texts = {decoder.decode([1, 2]) for _ in range(20)}
        assert len(texts) == 1 and texts.pop().startswith("⟨decode failed: DecoderError: no tokenizer ")
        assert len([r for r in caplog.records if r.name == "trackway.decoders"]) == 1

    def test_it_is_tried_once(self, tmp_path: Path) -> None:
        path = tmp_path / "tokenizer.json"
        decoder = HFDecoder(path)
        for _ in range(3):
            with pytest.raises(DecoderError):
                decoder.load()
        byte_level().save(str(path))
        with pytest.raises(DecoderError):
            decoder.load()
        assert HFDecoder(path).decode(HELLO) == "Hello"

    def test_a_file_that_is_no_tokenizer(self, tmp_path: Path) -> None:
        path = tmp_path / "tokenizer.json"
        path.write_text("{}")
        with pytest.raises(DecoderError, match=r"tokenizer\.json"):
            HFDecoder(path).load()

    def test_something_that_cannot_decode(self) -> None:
        with pytest.raises(DecoderError, match="int: it has no decode"):
            HFDecoder(5)


def test_threads_get_the_same_texts() -> None:
    decoder = HFDecoder(deepseek_path())  # loaded by whichever thread comes first
    lists = random_lists(LARGE["deepseek"](), 100)
    results: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: results.append([decoder.decode(ids) for ids in lists]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [LARGE["deepseek"]().decode(ids, skip_special_tokens=False) for ids in lists]
    assert results == [expected] * 4


@pytest.mark.parametrize("name", ["byte-level", "byte fallback", "word piece"])
def test_the_tokenizer_and_the_process_stay_as_they_were(name: str) -> None:
    backend = copy.deepcopy(SMALL[name]())
    backend.enable_padding(length=64)
    backend.enable_truncation(8)
    tokenizer = transformers_tokenizer(backend, pad_token="<pad>")
    before = (
        backend.to_str(),
        tokenizer.padding_side,
        dict(os.environ),
        random.getstate(),
        np.random.get_state()[2],
    )
    decoder = HFDecoder(tokenizer)
    decoder.pieces([1, 2, -100, *range(100)])
    after = (
        backend.to_str(),
        tokenizer.padding_side,
        dict(os.environ),
        random.getstate(),
        np.random.get_state()[2],
    )
    assert after == before
    assert decoder.decode(ids_of(SMALL[name](), " ".join(["fox"] * 40))).count("fox") == 40


@pytest.mark.parametrize("name", ["byte-level", "byte fallback", "word piece"])
def test_decoding_goes_on_in_a_forked_child(name: str, tmp_path: Path) -> None:
    # The process that forks must not have trained or encoded: those start threads by themselves.
    path = tmp_path / "tokenizer.json"
    SMALL[name]().save(str(path))
    script = f"""
        import os, sys, threading
        from trackway.decoders import HFDecoder

        environment = dict(os.environ)
        decoder = HFDecoder({str(path)!r})
        ids = [*range(100), -100, -100]
        text = decoder.decode(ids)
        thread = threading.Thread(target=lambda: [decoder.decode(ids) for _ in range(100)])
        thread.start()
        thread.join()
        child = os.fork()
        if child == 0:
            ok = all(decoder.decode(ids) == text for _ in range(100)) and dict(os.environ) == environment
            os._exit(0 if ok else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,  # a child that hangs would hang for ever
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_the_decoders_imports_nothing_heavy() -> None:
    script = (
        "import sys, trackway.decoders; "
        "print([m for m in ('numpy', 'torch', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_without_numpy_the_texts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = random_lists(byte_level(), 100)
    expected = [HFDecoder(byte_level()).decode(ids) for ids in lists]
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert [HFDecoder(byte_level()).decode(ids) for ids in lists] == expected
