"""Immutable copies of arguments and results, taken in microseconds at the moment of the call.

What a function is given and what it returns may change a moment later, so nothing is kept by reference:
a snapshot is JSON made by orjson, and token sequences, which are long and plain, become tuples. Values
that are not data (clients, sessions, locks, generators) become a short typed placeholder; no property,
``__repr__`` or ``__getattr__`` of such an object is ever called.
"""

from __future__ import annotations

import base64
import datetime
import enum
import hashlib
import os
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import orjson

Snapshot = bytes | str | int | float | bool | None
"""JSON as bytes, or an immutable value that is still to be made JSON."""

MAX_DEPTH = 100
MAX_PREVIEW_BYTES = 64
MAX_DATA_URL = 1024
_EDGE = 8  # items shown at each end of a long array

_SECRET_TYPES = {"SecretStr", "SecretBytes", "Secret"}


def take(value: Any, max_array_items: int) -> Snapshot:
    """Copy any value.

    Args:
        value: anything.
        max_array_items: numpy arrays and torch tensors with more items are summarised.

    Returns:
        The value itself when it is immutable and plain, else its JSON. NaN and infinities become null,
        as JSON has no numbers for them.
    """
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value  # type: ignore[no-any-return]
    try:
        return orjson.dumps(value, default=_Plain(max_array_items).shallow)
    except (TypeError, ValueError, RecursionError):
        # Lone surrogates, integers beyond 64 bits, keys that are not strings, cycles: rare, so worth
        # a slower walk that keeps everything else.
        return orjson.dumps(_Plain(max_array_items).deep(value))


def sequence(value: Any) -> tuple[Any, ...] | None:
    """Copy a sequence of token ids, mask or log probabilities.

    Args:
        value: list, tuple, range, array, numpy array or torch tensor of shape (n,) or (1, n).

    Returns:
        The items as plain Python numbers, or None when the value is not such a sequence.
    """
    kind = type(value)
    if kind is tuple:
        items: Any = value
    elif kind is list:
        items = tuple(value)
    elif kind.__module__.partition(".")[0] in ("numpy", "torch", "array", "builtins") and hasattr(
        kind, "tolist"
    ):
        items = value.tolist()
        if isinstance(items, list) and len(items) == 1 and isinstance(items[0], list):
            items = items[0]
        items = tuple(items) if isinstance(items, list) else None
    elif kind is range:
        items = tuple(value)
    else:
        return None
    if items and not _is_number(items[0]) and items[0] is not None:
        # A list of numpy numbers is common; a list of lists or of dicts is not a sequence of tokens.
        if type(items[0]).__module__.partition(".")[0] not in ("numpy", "torch"):
            return None
        items = tuple(item.item() if hasattr(type(item), "item") else item for item in items)
        if not _is_number(items[0]):
            return None
    return items  # type: ignore[no-any-return]


def _is_number(value: Any) -> bool:
    kind = type(value)
    return kind is int or kind is float or kind is bool


def fields(value: Any) -> Mapping[str, Any] | None:
    """Give the data fields of a dict, pydantic model, dataclass, attrs object, named tuple or plain object.

    Only stored values are read, never properties.

    Returns:
        Names and values, or None when the value has no fields.
    """
    kind = type(value)
    if kind is dict:
        return value  # type: ignore[no-any-return]
    if kind.__module__ == "builtins":
        return None
    if issubclass(kind, tuple):
        names = getattr(kind, "_fields", None)
        return dict(zip(names, value, strict=False)) if names else None
    if issubclass(kind, Mapping):
        return {key: value[key] for key in value}
    declared = getattr(kind, "__dataclass_fields__", None) or getattr(kind, "__attrs_attrs__", None)
    if declared:
        names = [item if isinstance(item, str) else item.name for item in declared]
        found = {}
        for name in names:
            try:
                found[name] = object.__getattribute__(value, name)
            except AttributeError:
                continue  # a field that was never set
        return found
    try:
        stored = object.__getattribute__(value, "__dict__")
    except Exception:
        return None
    if not isinstance(stored, dict):
        return None
    if hasattr(kind, "__pydantic_fields__") or hasattr(kind, "__fields__"):
        try:
            extra = object.__getattribute__(value, "__pydantic_extra__")
        except AttributeError:
            extra = None
        return {**stored, **extra} if isinstance(extra, dict) else stored
    return stored


def is_record(value: Any) -> bool:
    """Say whether a value's class declares its fields, so that it is data and not a client or a session."""
    kind = type(value)
    return (
        hasattr(kind, "__dataclass_fields__")
        or hasattr(kind, "__attrs_attrs__")
        or hasattr(kind, "__pydantic_fields__")
        or (hasattr(kind, "__fields__") and hasattr(kind, "__validators__"))
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
        or issubclass(kind, Mapping)
    )


def placeholder(value: Any) -> str:
    """Name the type of a value that is not data: ``<package.Class>``."""
    kind = type(value)
    return f"<{kind.__module__}.{kind.__qualname__}>"


def clean(text: str) -> str:
    """Make a text valid UTF-8 without NUL: lone surrogates become ``\\udXXX``, NUL becomes ``␀``."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-8", "backslashreplace").decode()
    return text.replace("\x00", "␀") if "\x00" in text else text


def shorten_data_url(text: str) -> str:
    """Replace the body of a long ``data:`` URL by its size and hash."""
    head, comma, body = text.partition(",")
    if not comma or len(head) > 200 or len(body) < MAX_DATA_URL:
        return text
    digest = hashlib.sha256(body.encode("utf-8", "replace")).hexdigest()[:16]
    return f"{head},⟨{len(body)} characters, sha256 {digest}⟩"


class _Plain:
    """Turns anything into values that orjson knows."""

    def __init__(self, max_array_items: int) -> None:
        self.max_array_items = max_array_items
        self.open: set[int] = set()

    def shallow(self, value: Any) -> Any:
        """Convert one value, one level: orjson's ``default`` hook."""
        try:
            return self._convert(value)
        except Exception as error:
            return f"<{type(value).__qualname__}: {type(error).__name__} while recording>"

    def deep(self, value: Any, depth: int = 0) -> Any:
        """Convert a whole value with cycles, odd keys and odd text in it."""
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**64 else str(value)
        if issubclass(kind, enum.Enum):
            return self.deep(value.value, depth + 1)
        if issubclass(kind, str):
            return clean(str.__str__(value))
        if issubclass(kind, int):
            return self.deep(int(value))
        if issubclass(kind, float):
            return float(value)
        if id(value) in self.open:
            return "<cycle>"
        if depth > MAX_DEPTH:
            return "<nested too deeply>"
        self.open.add(id(value))
        try:
            if issubclass(kind, dict):
                return self._mapping(value.items(), depth)
            if issubclass(kind, (list, tuple)) and not hasattr(kind, "_fields"):
                return [self.deep(item, depth + 1) for item in value]
            return self.deep(self.shallow(value), depth + 1)
        finally:
            self.open.discard(id(value))

    def _mapping(self, items: Iterable[tuple[Any, Any]], depth: int) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for key, value in items:
            name = clean(_key(key))
            if name in plain:  # 1 and "1" are two keys in Python and one in JSON
                name = f"{name} ({type(key).__name__})"
                while name in plain:
                    name += "'"
            plain[name] = self.deep(value, depth + 1)
        return plain

    def _convert(self, value: Any) -> Any:
        kind = type(value)
        module = kind.__module__.partition(".")[0]
        if module == "numpy":
            return self._numpy(value)
        if module == "torch" and hasattr(kind, "detach"):
            return self._torch(value)
        if module == "PIL" and hasattr(kind, "getbands"):
            return {"image": {"mode": str(value.mode), "size": list(value.size)}}
        if module == "pydantic" and kind.__name__.partition("[")[0] in _SECRET_TYPES:
            return "**********"
        if issubclass(kind, str):
            return clean(str.__str__(value))
        if issubclass(kind, (bytes, bytearray, memoryview)):
            data = bytes(value[:MAX_PREVIEW_BYTES])
            return {"bytes": len(value), "base64": base64.b64encode(data).decode()}
        if issubclass(kind, BaseException):
            return {"type": kind.__qualname__, "message": clean(_message(value))}
        if issubclass(kind, (set, frozenset)):
            return sorted(value, key=_sort_key)
        if issubclass(kind, deque):
            return list(value)
        if kind is range:
            return list(value) if len(value) <= self.max_array_items else str(value)
        if issubclass(kind, Decimal):
            return str(value)
        if issubclass(kind, os.PathLike):
            return str(value)
        if issubclass(kind, (datetime.date, datetime.time, uuid.UUID)):
            return str(value)
        if issubclass(kind, datetime.timedelta):
            return value.total_seconds()
        if is_record(value):
            found = fields(value)
            return dict(found) if found is not None else placeholder(value)
        return placeholder(value)

    def _numpy(self, value: Any) -> Any:
        if not hasattr(type(value), "shape") or not hasattr(type(value), "tolist"):
            return placeholder(value)
        if value.size > self.max_array_items:
            flat = value.reshape(-1)
            return _summary(value.shape, value.dtype, flat[:_EDGE].tolist(), flat[-_EDGE:].tolist())
        return value.tolist()

    def _torch(self, value: Any) -> Any:
        tensor = value.detach()
        if tensor.device.type != "cpu":
            # Reading it would make the caller wait for the device.
            return {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "device": str(tensor.device)}
        if tensor.numel() > self.max_array_items:
            flat = tensor.reshape(-1)
            return _summary(tensor.shape, tensor.dtype, flat[:_EDGE].tolist(), flat[-_EDGE:].tolist())
        return tensor.tolist()


def _summary(shape: Iterable[int], dtype: Any, head: list[Any], tail: list[Any]) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": str(dtype), "first": head, "last": tail}


def _key(key: Any) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, enum.Enum):
        return _key(key.value)
    if key is None:
        return "null"
    if isinstance(key, bool):
        return "true" if key else "false"
    if isinstance(key, tuple):
        return f"({', '.join(_key(item) for item in key)})"
    if isinstance(key, (int, float, uuid.UUID, datetime.date, bytes)):
        return str(key)
    return placeholder(key)


def _sort_key(value: Any) -> tuple[str, str]:
    return type(value).__qualname__, str(value) if isinstance(value, (str, int, float, bytes)) else ""


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<no message: its __str__ raised>"
