"""The tokenizer of a user's object is found without running the user's code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from trackway.decoders import HFDecoder, find_tokenizer

from .tokenizers_for_tests import byte_level, ids_of, transformers_tokenizer

TOKENIZER = transformers_tokenizer(byte_level())


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class OfClass:
    tokenizer = TOKENIZER


class Child(OfClass):
    pass


class Slotted:
    __slots__ = ("tokenizer",)


@dataclass
class Worker:
    tokenizer: Any = None
    processor: Any = None


@pytest.mark.parametrize(
    "owner",
    [
        TOKENIZER,
        byte_level(),
        Holder(tokenizer=TOKENIZER),
        Holder(tokenizer=byte_level()),
        OfClass(),
        Child(),
        Child,
        Worker(tokenizer=TOKENIZER),
        Worker(processor=Holder(tokenizer=TOKENIZER)),
        Holder(tokenizer=None, processor=Holder(tokenizer=TOKENIZER)),
    ],
)
def test_found(owner: Any) -> None:
    assert HFDecoder(find_tokenizer(owner)).decode(ids_of(byte_level(), "Hello")) == "Hello"


@pytest.mark.parametrize(
    "owner",
    [
        *(None, 5, "text", b"bytes", [TOKENIZER], {"tokenizer": TOKENIZER}, object()),
        *(Holder(), Worker(), Slotted(), Holder(tokenizer=5), Holder(tokenizer="")),
        *(Holder(processor=5), Holder(processor=Holder())),
    ],
)
def test_not_found(owner: Any) -> None:
    assert find_tokenizer(owner) is None


def test_a_path_or_name_counts() -> None:
    assert find_tokenizer(Holder(tokenizer="some/model")) == "some/model"
    assert find_tokenizer(Holder(tokenizer=Path("folder"))) == Path("folder")


def test_one_set_later_is_found_later() -> None:
    for owner in (Worker(), Slotted(), Holder(tokenizer=None)):
        assert find_tokenizer(owner) is None
        owner.tokenizer = TOKENIZER
        assert find_tokenizer(owner) is TOKENIZER
        owner.tokenizer = None
        assert find_tokenizer(owner) is None


def test_no_code_of_the_owner_runs() -> None:
    ran: list[str] = []

    class Lively:
        @property
        def tokenizer(self) -> Any:
            ran.append("property")
            return TOKENIZER

        @cached_property
        def processor(self) -> Any:
            ran.append("cached property")
            return Holder(tokenizer=TOKENIZER)

        def __getattr__(self, name: str) -> Any:
            ran.append(name)
            return TOKENIZER

        def __getattribute__(self, name: str) -> Any:
            ran.append(name)
            return super().__getattribute__(name)

        def __bool__(self) -> bool:
            ran.append("bool")
            return True

        def __eq__(self, other: object) -> bool:
            ran.append("eq")
            return True

        __hash__ = None  # type: ignore[assignment]

    assert find_tokenizer(Lively()) is None
    assert find_tokenizer(Holder(tokenizer=Lively(), processor=Lively())) is None
    assert ran == []


def test_a_cached_property_that_has_run_is_a_value() -> None:
    class Lazy:
        @cached_property
        def tokenizer(self) -> Any:
            return TOKENIZER

    owner = Lazy()
    assert find_tokenizer(owner) is None
    assert owner.tokenizer is find_tokenizer(owner) is TOKENIZER
