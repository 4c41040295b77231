"""Finding the tokenizer of a user's object without running any of the user's code."""

from __future__ import annotations

import inspect
import os
from types import MemberDescriptorType
from typing import Any


def find_tokenizer(owner: Any) -> Any:
    """Give the tokenizer of an object, or None: the object itself, ``.tokenizer``, or ``.processor.tokenizer``.

    Only values that stand in the instance (its ``__dict__`` or slots) or in its class are looked at; properties
    and ``__getattr__`` are not run. A path or name of a tokenizer counts. Nothing is remembered, so a tokenizer
    that is set later is found later.
    """
    if _is_tokenizer(owner):
        return owner
    for holder in (owner, _plain(owner, "processor")):
        tokenizer = _plain(holder, "tokenizer")
        if isinstance(tokenizer, (str, os.PathLike)):
            if os.fspath(tokenizer):
                return tokenizer
        elif callable(inspect.getattr_static(tokenizer, "decode", None)):
            return tokenizer
    return None


def _is_tokenizer(value: Any) -> bool:
    return _has(value, "decode") and (_has(value, "convert_ids_to_tokens") or _has(value, "id_to_token"))


def _has(value: Any, name: str) -> bool:
    return callable(inspect.getattr_static(value, name, None))


def _plain(owner: Any, name: str) -> Any:
    value = inspect.getattr_static(owner, name, None)
    if isinstance(value, MemberDescriptorType):  # a slot
        try:
            return value.__get__(owner, type(owner))
        except AttributeError:
            return None
    return None if isinstance(value, property) else value
