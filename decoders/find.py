"""Finding the tokenizer of a user's object without running any of the user's code."""

from __future__ import annotations

import os
from types import MemberDescriptorType
from typing import Any


def find_tokenizer(owner: Any) -> Any:
    """Give the tokenizer of an object, or None: itself, its ``.tokenizer``, or its ``.processor.tokenizer``.

    Only what stands in the instance (its ``__dict__`` or slots) or in its class is looked at; no property and
    no ``__getattr__`` is run. The path or name of a tokenizer counts as one. Nothing is remembered, so that a
    tokenizer which is set later is found later.
    """
    if _has(owner, "decode") and (_has(owner, "convert_ids_to_tokens") or _has(owner, "id_to_token")):
        return owner
    for holder in (owner, _attribute(owner, "processor")):
        tokenizer = _attribute(holder, "tokenizer")
        if _is(tokenizer, (str, os.PathLike)):
            if os.fspath(tokenizer):
                return tokenizer
        elif _has(tokenizer, "decode"):
            return tokenizer
    return None


def _is(value: Any, kind: Any) -> bool:
    """``isinstance``, which itself may ask the value for its ``__class__``."""
    return issubclass(type(value), kind)


def _has(owner: Any, method: str) -> bool:
    value = _attribute(owner, method)
    return callable(value) or _is(value, (classmethod, staticmethod))


def _attribute(owner: Any, name: str) -> Any:
    """Look an attribute up as ``inspect.getattr_static`` does, in a fraction of its time."""
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        own = {}
    if name in own:
        return own[name]
    for base in (*(owner.__mro__ if _is(owner, type) else ()), *type(owner).__mro__):
        value = base.__dict__.get(name)
        if _is(value, MemberDescriptorType):  # a slot
            try:
                return value.__get__(owner)
            except AttributeError:
                return None
        if value is not None:
            return value
    return None
