"""Texts and JSON within what destinations, the databases behind them and their pages can take."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

import orjson

from ..capture.redact import Redactor
from ..capture.snapshot import clean
from ..printable import without_password

TEXT_LIMIT: Final = 100_000
"""Most characters of one text, or of one value written as JSON; MLflow's page takes seconds for more."""
NAME_LIMIT: Final = 250
"""Characters of a session id, a feedback's name and a trace's name; MLflow refuses longer ones."""

_MAX_DEPTH = 50
ELSEWHERE: Final = "are left out here; the Trackway store has them"
"""What a mark says about the characters or messages that it stands for."""
_shown_by: ContextVar[str | None] = ContextVar("shown_by", default=None)


def without_secrets(text: str) -> str:
    """Mask what looks like a credential in what a destination or a package of it says."""
    return _redactor().text(without_password(text))


@cache
def _redactor() -> Redactor:
    return Redactor()  # when first needed: processes that train import this module, and send nothing


@contextmanager
def pointing_to(command: str) -> Iterator[None]:
    """Let every mark that is made inside name the command that shows what it stands for."""
    token = _shown_by.set(command)
    try:
        yield
    finally:
        _shown_by.reset(token)


def elsewhere() -> str:
    """Say of characters, messages or calls that they are left out, and where they are."""
    command = _shown_by.get()
    return f"are left out here; `{command}` shows them" if command else ELSEWHERE


def cut(text: str, limit: int = TEXT_LIMIT) -> str:
    """Make a text storable everywhere, and keep its head and tail when it is over the limit."""
    text = clean(text)
    if len(text) <= limit:
        return text
    tail = limit // 4
    head = limit - tail
    return f"{text[:head]}⟨{len(text) - limit} characters {elsewhere()}⟩{text[len(text) - tail :]}"


def dumps(value: Any) -> str:
    """Write any value as JSON; what has none becomes a placeholder, a NaN or infinity a text or null."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'"{value}"'
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_plain(value, 0), ensure_ascii=False)


def _plain(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return "⟨nested too deeply⟩"
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {clean(str(name)): _plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    return f"⟨{type(value).__module__}.{type(value).__qualname__}⟩"


def short_name(text: str) -> str:
    """Keep a name within MLflow's limit and different from every other one."""
    text = clean(text)
    if len(text) <= NAME_LIMIT:
        return text
    return f"{text[: NAME_LIMIT - 18]}--{digest(text, 8)}"


def digest(text: str, size: int) -> str:
    """Hash a text, to hex digits of ``size`` bytes."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()
