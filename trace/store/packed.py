"""Sequences of numbers as they stand in attributes: JSON of ids, run lengths of masks, packed floats."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from sys import byteorder
from typing import Any, TypeVar

import orjson

T = TypeVar("T")


def lenient(read: Callable[[Any], T], value: Any) -> T | None:
    """Read a value; one that somebody else damaged is as if it had not been recorded."""
    try:
        return None if value is None else read(value)
    except Exception:
        return None


def unpack_ids(text: str) -> tuple[int, ...]:
    """Read a JSON list."""
    return tuple(orjson.loads(text))


def unpack_mask(text: str) -> tuple[int, ...]:
    """Read run lengths: ``[[1, 12], [0, 30]]``."""
    bits: list[int] = []
    for bit, count in orjson.loads(text):
        bits.extend([bit] * count)
    return tuple(bits)


def unpack_floats(packed: bytes) -> tuple[float, ...]:
    """Read little-endian float32 values."""
    values = array("f")
    values.frombytes(packed[: len(packed) // 4 * 4])
    if byteorder == "big":
        values.byteswap()
    return tuple(values)
