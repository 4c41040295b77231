"""What may stand where token ids are expected, and how that which has no text is shown."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

Item = int | str
"""An id that the vocabulary knows, or a string that stands for itself in the text."""

IGNORE_INDEX = -100
"""The label that PyTorch's cross-entropy leaves out (``ignore_index``); it marks masked positions."""


def as_list(ids: Any) -> Sequence[Any]:
    """Make a list or tuple of whatever holds ids, without importing the library it comes from.

    A batch of one row is that row; a single value is a list of one.
    """
    tolist = getattr(ids, "tolist", None)  # numpy, torch, array, memoryview
    if callable(tolist):
        ids = tolist()
    if isinstance(ids, (str, bytes, bytearray, dict)) or not isinstance(ids, Iterable):
        return [ids]
    values = ids if isinstance(ids, (list, tuple)) else list(ids)
    while len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = values[0]
    return values


def as_id(value: Any) -> int | str:
    """Give the id that a value stands for, or the marker of a value that cannot be one."""
    if type(value) is int:
        return value
    try:
        item = getattr(value, "item", None)  # a scalar of numpy or torch
        if callable(item):
            value = item()
        if isinstance(value, bool) or value is None:
            return marker(str(value))
        if isinstance(value, float):
            return int(value) if value.is_integer() else marker(str(value))
        if isinstance(value, str):
            return marker(repr(value) if len(value) <= 24 else repr(value[:24]) + "…")
        return operator.index(value)
    except Exception:
        return marker(type(value).__name__)


def id_marker(value: int) -> str:
    """Give the marker of an id that has no text, such as ``⟨153058⟩``."""
    bits = value.bit_length()
    return marker(str(value) if bits <= 128 else f"integer of {bits:,} bits")


def marker(label: str, count: int = 1) -> str:
    """Put what has no text, or what is repeated, between the brackets that mark it in decoded text."""
    return f"⟨{label}⟩" if count == 1 else f"⟨{label} ×{count:,}⟩"
