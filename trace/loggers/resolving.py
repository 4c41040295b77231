"""A configuration of any kind becomes plain JSON, without secrets, that nobody changes any more."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any
from uuid import UUID

from ..capture import runtime
from ..capture.redact import MASK, Redactor
from ..capture.snapshot import clean

_DEEPEST = 40
_MOST = 100_000
"""Values of one configuration; interpolations can make endless ones."""
_LONGEST = 100_000
"""Characters of one text; a chat template has a few thousand."""
_MOST_ITEMS = 16
"""Items of an array that is kept whole."""
_AS_TEXT = (date, time, timedelta, Decimal, Fraction, UUID, complex, range)


def redactor() -> Redactor:
    """Give the redactor of this process: with the names of ``TraceConfig.redact``, where it records."""
    recorder = runtime.started()
    return Redactor(() if recorder is None else recorder.config.redact)


def resolved(config: Any) -> dict[str, Any]:
    """Turn a configuration into plain JSON.

    Mappings, OmegaConf objects, dataclasses, namespaces, pydantic and attrs models become objects. The
    interpolations of OmegaConf are resolved; one that cannot be, and a missing value, stays as it is written.
    Members of enumerations, paths, dates, types, arrays, tensors and numbers that JSON has not become short
    texts, sets become sorted lists; of other objects only the type is told, since their text may be secret.
    Values of secret names, and credentials inside of texts, are redacted.

    Args:
        config: of any kind; it is not changed.

    Returns:
        Plain JSON of its own; ``{"config": …}`` around what has no names. Nothing in a configuration makes
        this raise.
    """
    try:
        value = _Resolver(redactor()).value(config)
    except Exception as error:
        value = f"⟨cannot be read: {type(error).__name__}⟩"
    return value if isinstance(value, dict) else {"config": value}


class _Resolver:
    """Walks one configuration."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._left = _MOST
        self._above: list[int] = []

    def value(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            return "⟨cut: there is too much of it⟩"
        if id(value) in self._above:
            return "⟨itself⟩"
        if len(self._above) >= _DEEPEST:
            return "⟨cut: nested too deep⟩"
        self._above.append(id(value))
        try:
            if value is None or isinstance(value, (bool, int, float, str)):
                return self._scalar(value)
            return self._other(value)
        except Exception as error:  # somebody else's object may do anything, even when asked for its type
            return f"⟨cannot be read: {type(error).__name__}⟩"
        finally:
            self._above.pop()

    def _scalar(self, value: Any) -> Any:
        if isinstance(value, Enum):
            value = value.value
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if -(2**63) <= value < 2**64 else str(int(value))
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else repr(float(value))
        return self.text(value) if isinstance(value, str) else self.value(value)

    def text(self, text: str) -> str:
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]}⟨cut: {len(text) - _LONGEST} more characters⟩"
        return self._redactor.text(clean(str.__str__(text)))

    def _other(self, value: Any) -> Any:
        if (items := _named(value)) is not None:
            return self._mapping(items)
        if isinstance(value, Enum):
            return self.text(value.name)
        if isinstance(value, os.PathLike):
            return self.text(os.fsdecode(value))
        if isinstance(value, (set, frozenset)):
            return sorted((self.value(item) for item in value), key=lambda item: (str(type(item)), str(item)))
        if isinstance(value, (list, tuple)) or _is_omegaconf(value):
            return self._list(_list_of(value), len(value))
        if isinstance(value, _AS_TEXT):
            return str(value)
        if isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodType)):
            return f"{value.__module__}.{value.__qualname__}"
        return self._array(value)

    def _mapping(self, items: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in items:
            if self._left < 0:
                break
            name = str(key.name if isinstance(key, Enum) else key) if _is_plain(key) else type(key).__name__
            name = clean(name[:_LONGEST])
            if name in found:  # 1 and "1"
                name = f"{name}~{type(key).__name__}"
            plain = self.value(item)
            found[name] = MASK if self._redactor.is_secret_name(name, plain) else plain
        return found

    def _list(self, items: Iterable[Any], length: int) -> list[Any]:
        found: list[Any] = []
        for item in items:
            if self._left <= 0:
                found.append(f"⟨cut: {length - len(found)} more⟩")
                break
            found.append(self.value(item))
        return found

    def _array(self, value: Any) -> Any:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            kind = str(value.dtype).removeprefix("torch.")
            return f"⟨tensor {kind} {list(value.shape)} on {value.device}⟩"
        if torch is not None and isinstance(value, (torch.dtype, torch.device)):
            return str(value)
        if numpy is not None and isinstance(value, numpy.generic):
            return self.value(value.item())
        if numpy is not None and isinstance(value, numpy.dtype):
            return str(value)
        if numpy is not None and isinstance(value, numpy.ndarray):
            if value.size <= _MOST_ITEMS and value.dtype.kind in "biufU":
                return self.value(value.tolist())
            return f"⟨array {value.dtype} {list(value.shape)}⟩"
        return f"⟨{type(value).__module__}.{type(value).__qualname__}⟩"


def _named(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Give the names and values of what has such; None for everything else."""
    if _is_omegaconf(value):
        return _omegaconf(value, list(value)) if isinstance(value, Mapping) or _is_dict(value) else None
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return _fields(value, (field.name for field in dataclasses.fields(value)))
    if isinstance(value, (Namespace, SimpleNamespace)):
        return vars(value).items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _fields(value, value._fields)
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        names = dict.fromkeys([*type(value).model_fields, *(value.model_extra or {})])
        return _fields(value, names)
    if hasattr(type(value), "__attrs_attrs__"):
        return _fields(value, (field.name for field in type(value).__attrs_attrs__))
    return None


def _fields(value: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        try:
            yield name, getattr(value, name)
        except Exception as error:  # a field that was never set, or a property
            yield name, f"⟨cannot be read: {type(error).__name__}⟩"


def _is_plain(key: Any) -> bool:
    return key is None or isinstance(key, (str, int, float, bytes, tuple, Enum))


def _is_omegaconf(value: Any) -> bool:
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and bool(omegaconf.OmegaConf.is_config(value))


def _is_dict(value: Any) -> bool:
    return bool(sys.modules["omegaconf"].OmegaConf.is_dict(value))


def _omegaconf(config: Any, keys: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Give the items of a DictConfig or ListConfig; what cannot be resolved as it is written."""
    written: Any = None
    for key in keys:
        try:
            yield key, config[key]
        except Exception:  # an interpolation to nowhere, a resolver that fails, a value that is missing
            if written is None:
                written = sys.modules["omegaconf"].OmegaConf.to_container(config, resolve=False)
            yield key, written[key]


def _list_of(value: Any) -> Iterable[Any]:
    if _is_omegaconf(value):
        return (item for _, item in _omegaconf(value, range(len(value))))
    return value  # type: ignore[no-any-return]
