"""Immutable copies of arguments and results, taken in microseconds at the moment of the call.

What a function is given and what it returns may change a moment later, so nothing is kept by reference:
a snapshot is JSON made by orjson, and token sequences, which are long and plain, become tuples. Values
that are not data (clients, sessions, locks, generators) become a short typed placeholder; no property,
``__repr__`` or ``__getattr__`` of such an object is ever called.
"""

from __future__ import annotations

import base64
import ctypes
import datetime
import enum
import hashlib
import os
import re
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import orjson

Snapshot = bytes | str | int | float | bool | None
"""JSON as bytes, or an immutable value that is still to be made JSON."""

MAX_DEPTH = 100
MAX_PREVIEW_BYTES = 64
MAX_DATA_URL = 1024
MAX_HASHED_IMAGE = 16 * 2**20
"""Bytes; the hash of a larger image would take the caller's thread too long."""
_EDGE = 8  # items shown at each end of a long array
_MAX_LOOKS = 16
"""Values that are looked at to see whether an object holds token ids: a client may hold half the program."""
_MAX_PARTS = 64  # of one of them
_MAX_LEVELS = 4  # of objects and containers inside one another, in the same search

_DATA_URL = re.compile(rf"(data:[\w.+/;=-]{{0,200}};base64,)([A-Za-z0-9+/_=-]{{{MAX_DATA_URL},}})")
_SECRET_TYPES = {"SecretStr", "SecretBytes", "Secret"}


def take(value: Any, max_array_items: int, token_fields: Collection[str] = ()) -> Snapshot:
    """Copy any value.

    Args:
        value: anything.
        max_array_items: numpy arrays and torch tensors with more items are summarised.
        token_fields: names of fields that hold token ids and what belongs to them: arrays under these
            stay whole, and an object whose class declares no fields is data when it has one of them.

    Returns:
        The value itself when it is immutable and plain, else its JSON. NaN and infinities become null,
        as JSON has no numbers for them.
    """
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return value  # type: ignore[no-any-return]
    plain = _Plain(max_array_items, token_fields)
    try:
        data = orjson.dumps(value, default=plain.shallow)
        if not plain.summarised or not any(f'"{name}":{{"shape"'.encode() in data for name in token_fields):
            # orjson gives its texts in up to fifteen times their memory, and these will wait in a queue.
            return b"".join((data, b""))
        # orjson does not say under which name it found an array.
    except (TypeError, ValueError, RecursionError):
        pass
    # Lone surrogates, integers beyond 64 bits, keys that are not strings, cycles: rare, so worth a slower
    # walk that keeps everything else.
    return orjson.dumps(_Plain(max_array_items, token_fields).deep(value))


def sequence(value: Any) -> tuple[Any, ...] | None:
    """Copy a sequence of token ids, mask or log probabilities.

    Args:
        value: list, tuple, range, array, numpy array or torch tensor of shape (n,) or (1, n).

    Returns:
        The items, or None when the value is not such a sequence. They are plain Python numbers, but for
        numbers of numpy and torch between others, which ``numbers`` makes plain.
    """
    items = _items(value)
    if items is not None and len(items) == 1 and not _may_be_item(items[0]):
        row = _items(items[0])
        items = items if row is None else row
    if items and not (_may_be_item(items[0]) and _may_be_item(items[-1])):
        # A list of numpy numbers is common; a list of lists or of dicts is not a sequence of tokens.
        if not (_may_be_number(items[0]) and _may_be_number(items[-1])):
            return None
        items = numbers(items)
    if items and items is not value:
        untrack(items)
    return items


def _items(value: Any) -> tuple[Any, ...] | None:
    kind = type(value)
    if kind is list or kind is tuple or kind is range:
        return tuple(value)
    if not _is_array(kind) or not _is_here(value):
        return None
    dimensions = getattr(value, "ndim", 1)
    if dimensions == 2 and len(value) == 1:
        value = value[0]
    elif dimensions != 1:
        return None
    return tuple(value.tolist())


def numbers(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make plain numbers of those of numpy and torch; everything else stays as it is."""
    if set(map(type, items)) <= _NUMBERS:
        return items
    return tuple(item.item() if _is_scalar(item) else item for item in items)


def is_rows(value: Any) -> bool:
    """Say whether a plain value is a list of several lists of numbers: a batch of sequences."""
    return (
        type(value) is list
        and len(value) > 1
        and all(type(row) is list and set(map(type, row)) <= _NUMBERS for row in value)
    )


def _is_array(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("numpy", "torch", "array", "builtins") and hasattr(
        kind, "tolist"
    )


_NUMBERS = {int, float, bool, type(None)}


def _may_be_item(value: Any) -> bool:
    return type(value) in _NUMBERS


def _may_be_number(value: Any) -> bool:
    return type(value) in _NUMBERS or _is_scalar(value)


def _is_here(value: Any) -> bool:
    """Say whether the numbers are in this computer's memory: the caller would have to wait for others."""
    device = getattr(value, "device", None)
    return getattr(device, "type", device) in (None, "cpu")


def _is_scalar(value: Any) -> bool:
    kind = type(value)
    return (
        kind.__module__.partition(".")[0] in ("numpy", "torch")
        and getattr(value, "ndim", None) == 0
        and _is_here(value)
    )


def _untracker() -> Callable[[Any], object]:
    try:
        untrack = ctypes.pythonapi.PyObject_GC_UnTrack
    except AttributeError:  # not CPython
        return lambda _: None
    untrack.argtypes = [ctypes.py_object]
    untrack.restype = None
    return untrack


untrack = _untracker()
"""Takes a tuple of numbers from the garbage collector's list.

The collector does so itself, but only after it has gone three times over every item: for a few thousand
token ids, on the thread that made them, that takes longer than all the rest of recording a call.
"""


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
        try:
            return {key: value[key] for key in value}
        except Exception:
            return None  # its snapshot will say so
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
        stored = None
    slots = _slots(value)
    if not isinstance(stored, dict):
        return slots or None
    if slots:
        stored = {**slots, **stored}
    if hasattr(kind, "__pydantic_fields__") or hasattr(kind, "__fields__"):
        try:
            extra = object.__getattribute__(value, "__pydantic_extra__")
        except AttributeError:
            extra = None
        return {**stored, **extra} if isinstance(extra, dict) else stored
    return stored


def _slots(value: Any) -> dict[str, Any]:
    """Read what a class keeps in ``__slots__``, past any property of the same name."""
    found: dict[str, Any] = {}
    for base in type(value).__mro__[:-1]:
        if "__slots__" in vars(base):
            for name, member in list(vars(base).items()):
                # Names like __pydantic_extra__ belong to the machinery of the class.
                if type(member) is MemberDescriptorType and name not in found and name[:2] != "__":
                    with suppress(AttributeError):  # never set
                        found[name] = member.__get__(value)
    return found


def shown(value: Any, names: Collection[str]) -> dict[str, Any] | None:
    """Give what is data of an object whose class declares no fields: one that holds token sequences.

    It holds them itself, or in an attribute, list or dict a level or two further down. Clients and
    sessions do not, and stay unread.

    Returns:
        The sequences, plain public values beside them, and the objects that hold further sequences; of an
        object that holds none itself only short values. None when there are no sequences.
    """
    stored = fields(value)
    if not stored:
        return None
    public = {name: item for name, item in stored.items() if type(name) is str and not name.startswith("_")}
    itself = any(name in names and _may_be_sequence(item) for name, item in public.items())
    looks = [_MAX_LOOKS]
    holds = {
        name
        for name, item in public.items()
        if name in names or _holds_tokens(item, names, _MAX_LEVELS, looks)
    }
    if not itself and not holds - set(names):
        return None
    plain = _SHOWN if itself else _SHORT
    return {name: item for name, item in public.items() if name in holds or issubclass(type(item), plain)}


_SHOWN = (str, int, float, list, tuple, dict)
_SHORT = (str, int, float)


def _may_be_sequence(value: Any) -> bool:
    kind = type(value)
    return kind is list or kind is tuple or kind is range or _is_array(kind)


def _holds_tokens(value: Any, names: Collection[str], levels: int, looks: list[int]) -> bool:
    kind = type(value)
    if kind in _LEAVES or looks[0] <= 0 or (issubclass(kind, Mapping) and kind is not dict):
        return False
    looks[0] -= 1
    if kind is list or kind is tuple:
        parts = value[:_EDGE]
    else:
        held = fields(value)
        if not held:
            return False
        if not held.keys().isdisjoint(names) and any(
            name in held and _may_be_sequence(held[name]) for name in names
        ):
            return True
        parts = [
            item
            for name, item in islice(held.items(), _MAX_PARTS)
            if type(item) not in _LEAVES and not (type(name) is str and name.startswith("_"))
        ]
    return levels > 1 and any(_holds_tokens(part, names, levels - 1, looks) for part in parts)


_LEAVES = {str, bytes, int, float, bool, type(None), type, FunctionType, MethodType, ModuleType}


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


def shorten_data_urls(text: str) -> str:
    """Replace the bodies of long ``data:`` URLs by their size and hash, wherever in a text they stand."""
    if len(text) < MAX_DATA_URL or ";base64," not in text:
        return text
    return _DATA_URL.sub(_shorten, text)


def _shorten(match: re.Match[str]) -> str:
    body = match[2]
    return f"{match[1]}⟨{len(body)} characters, sha256 {_digest(body.encode())}⟩"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def text(value: Any) -> str:
    """Make a text of any value without asking it: of an object that is no data, its type."""
    kind = type(value)
    if issubclass(kind, str):
        return clean(str.__str__(value))
    copied = take(value, _EDGE)
    return copied.decode() if isinstance(copied, bytes) else str(copied)


def message(error: BaseException) -> str:
    """Give the message of an exception, whatever its ``__str__`` does."""
    try:
        return str(error)
    except Exception:
        return "<no message: its __str__ raised>"


class _Plain:
    """Turns anything into values that orjson knows."""

    def __init__(self, max_array_items: int, token_fields: Collection[str] = ()) -> None:
        self.max_array_items = max_array_items
        self.token_fields = token_fields
        self.summarised = False
        self.open: set[int] = set()

    def shallow(self, value: Any) -> Any:
        """Convert one value, one level: orjson's ``default`` hook."""
        try:
            return self._convert(value)
        except Exception as error:
            return _failed(value, error)

    def deep(self, value: Any, depth: int = 0) -> Any:
        """Convert a whole value with cycles, odd keys and odd text in it."""
        try:
            return self._deep(value, depth)
        except Exception as error:
            return _failed(value, error)

    def _deep(self, value: Any, depth: int) -> Any:
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
            return self.deep(int.__int__(value))
        if issubclass(kind, float):
            return float.__float__(value)
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
            if name in self.token_fields and _is_array(type(value)) and _is_here(value):
                value = value.tolist()
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
            return {"image": _image(value)}
        if module == "pydantic" and kind.__name__.partition("[")[0] in _SECRET_TYPES:
            return "**********"
        if issubclass(kind, str):
            return clean(str.__str__(value))
        if issubclass(kind, (bytes, bytearray, memoryview)):
            data = bytes(value[:MAX_PREVIEW_BYTES])
            return {"bytes": len(value), "base64": base64.b64encode(data).decode()}
        if issubclass(kind, BaseException):
            return {"type": kind.__qualname__, "message": clean(message(value))}
        if issubclass(kind, (set, frozenset)):
            return sorted(value, key=_sort_key)
        if issubclass(kind, deque) or (issubclass(kind, tuple) and not hasattr(kind, "_fields")):
            return list(value)
        if kind is range:
            return list(value) if len(value) <= self.max_array_items else str(value)
        if issubclass(kind, (Decimal, Fraction, complex, os.PathLike, uuid.UUID)):
            return str(value)
        if issubclass(kind, (datetime.date, datetime.time)):
            return value.isoformat()
        if issubclass(kind, datetime.timedelta):
            return value.total_seconds()
        if is_record(value):
            found = fields(value)
            return dict(found) if found is not None else placeholder(value)
        if self.token_fields and module != "builtins" and not issubclass(kind, type):
            with suppress(RuntimeError):  # another thread has changed it meanwhile
                held = shown(value, self.token_fields)
                if held is not None:
                    return held
        return placeholder(value)

    def _numpy(self, value: Any) -> Any:
        if not hasattr(type(value), "shape") or not hasattr(type(value), "tolist"):
            return placeholder(value)
        if value.size > self.max_array_items:
            self.summarised = True
            flat = value.reshape(-1)
            return _summary(value.shape, value.dtype, flat[:_EDGE].tolist(), flat[-_EDGE:].tolist())
        if value.dtype.kind in "mM":
            return value.astype(str).tolist()  # tolist() alone makes integers of nanoseconds
        plain = value.tolist()
        return float(plain) if type(plain) is type(value) else plain  # longdouble gives itself

    def _torch(self, value: Any) -> Any:
        tensor = value.detach()
        if not _is_here(tensor):
            return {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "device": str(tensor.device)}
        if tensor.numel() > self.max_array_items:
            self.summarised = True
            flat = tensor.reshape(-1)
            return _summary(tensor.shape, tensor.dtype, flat[:_EDGE].tolist(), flat[-_EDGE:].tolist())
        return tensor.tolist()


def _failed(value: Any, error: Exception) -> str:
    return f"<{type(value).__qualname__}: {type(error).__name__} while recording>"


def _image(value: Any) -> dict[str, Any]:
    facts = {"mode": str(value.mode), "size": list(value.size)}
    stored = vars(value)
    # An image that was opened and not read yet is left so: its file may be slow, or closed by now.
    loaded = stored.get("_im", stored.get("im")) is not None
    if loaded and value.width * value.height * len(value.getbands()) <= MAX_HASHED_IMAGE:
        facts["sha256"] = _digest(value.tobytes())
    return facts


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
