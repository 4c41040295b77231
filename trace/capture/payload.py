"""Snapshot -> the JSON text that is stored: secrets masked, oversized parts cut, token sequences found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

from trackway.decoders import cut_text

from . import snapshot
from .redact import MASK, Redactor
from .shared import Base, SharedParts
from .snapshot import Snapshot
from .streams import Found

if TYPE_CHECKING:
    from ..config import TraceConfig

_EDGE = 8
_LEAST_SHARED = 256
"""Bytes; a shorter payload is stored whole."""


class PayloadFormat:
    """How the payloads of one process are stored.

    Args:
        config: gives ``max_text_length`` (characters of a text), ``max_array_items`` and ``redact``.
        token_fields: field name -> ``prompt``, ``response``, ``mask`` or ``logprobs``.
        breathe: called now and then in the middle of long work.
    """

    def __init__(
        self, config: TraceConfig, token_fields: Mapping[str, str], breathe: Callable[[], object]
    ) -> None:
        self._breathe = breathe
        self._max_text = config.max_text_length
        self._max_items = config.max_array_items
        self._fields = token_fields
        self._redactor = Redactor(config.redact)
        # Only lists are sequences: logprobs is also the name of a sampling parameter.
        self._field_marks = [f'"{name}":['.encode() for name in token_fields]

    def value(self, value: Snapshot, found: Found | None = None) -> Any:
        """Give a snapshot as plain values, ready for ``orjson.dumps``.

        ``found`` receives the token sequences; without it they stay where they are, whole.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bytes):
            if not self._needs_care(value):
                return orjson.Fragment(value)
            return self._walk(orjson.loads(value), found)
        if type(value) is int and not -(2**63) <= value < 2**64:
            return str(value)  # more than JSON's readers take
        return value

    def json(self, value: Snapshot, found: Found | None = None) -> str:
        """Give a snapshot as JSON text; see ``value``."""
        if isinstance(value, bytes) and not self._needs_care(value):
            return value.decode()
        return orjson.dumps(self.value(value, found)).decode()

    def shared_json(
        self, value: Snapshot, found: Found, parts: SharedParts, span_id: str, which: str
    ) -> tuple[str, list[Base]]:
        """Give a snapshot as JSON text without what the rollout has stored before.

        Returns:
            The JSON, and what was left out of it; see ``SharedParts``.
        """
        # Which sequence of token ids is the turn's is decided by looking at all that there are.
        if (
            not isinstance(value, bytes)
            or len(value) < _LEAST_SHARED
            or any(mark in value for mark in self._field_marks)
        ):
            return self.json(value, found), []
        self._breathe()
        payload = {"": orjson.loads(value)}
        bases = parts.cut_lists(payload, span_id, which, self._changes)
        self._breathe()
        if self._needs_care(orjson.dumps(payload[""]) if bases else value):
            payload[""] = self._walk(payload[""], found)
        bases += parts.cut_texts(payload, span_id, which)
        return orjson.dumps(payload[""]).decode(), bases

    def _changes(self, name: str, value: Any) -> bool:
        return snapshot.clean(name) != name or self._redactor.is_secret_name(name, value)

    def field(self, name: str, value: Snapshot) -> str:
        """Give the snapshot of a named value as JSON text."""
        if self._redactor.is_secret_name(name, value):
            return orjson.dumps(MASK).decode()
        return self.json(value)

    def attribute(self, name: str, value: Any) -> Any:
        """Give an attribute that other instrumentation has set."""
        if isinstance(value, tuple):  # the values of a header, for instance
            value = list(value)
        if self._redactor.is_secret_name(name, value):
            return MASK
        if isinstance(value, list):
            return [self.text(item) if isinstance(item, str) else item for item in value]
        return self._attribute_text(value) if isinstance(value, str) else value

    def _attribute_text(self, text: str) -> str:
        """Give a text that others have set: where it is JSON, names in it tell secrets too."""
        text = snapshot.clean(text)
        if text[:1] in ("{", "[") and self._redactor.suspects(text.encode()):
            with suppress(ValueError):
                return orjson.dumps(self._walk(orjson.loads(text), None)).decode()
        return self.text(text)

    def text(self, text: str) -> str:
        """Mask, cut and clean one text."""
        self._breathe()
        text = snapshot.shorten_data_urls(snapshot.clean(text))
        if self._max_text is not None and len(text) > self._max_text:
            text = cut_text(text, self._max_text).text
        return self._redactor.text(text)

    def _needs_care(self, data: bytes) -> bool:
        return (
            self._redactor.suspects(data)
            or b"\\u0000" in data
            or (self._max_text is not None and len(data) > self._max_text)
            or (len(data) > 2 * self._max_items and data.count(b",") >= self._max_items)
            or (b";base64," in data and len(data) >= snapshot.MAX_DATA_URL)
            or any(mark in data for mark in self._field_marks)
        )

    def _walk(self, value: Any, found: Found | None, kept: frozenset[str] = frozenset()) -> Any:
        """Make a value as it is stored; sequences of what is in ``kept`` stay in it."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            if len(value) > self._max_items and all(isinstance(item, (int, float)) for item in value):
                return {"length": len(value), "first": value[:_EDGE], "last": value[-_EDGE:]}
            if found is not None and len(value) > 1:
                kept |= self._several(value, found, kept)
            return [self._walk(item, found, kept) for item in value]
        if isinstance(value, dict):
            plain: dict[str, Any] = {}
            for name, item in value.items():
                name = snapshot.clean(name)
                what = self._fields.get(name)
                if what is not None and isinstance(item, list):
                    tokens = snapshot.sequence(item)
                    if tokens is not None and found is not None and what not in kept | found.tokens.keys():
                        found.tokens[what] = tokens
                        continue
                    rows = snapshot.is_rows(item)
                    if tokens is not None or rows:
                        plain[name] = item  # whole, however long
                        if rows and found is not None:
                            found.several.add(what)
                        continue
                plain[name] = (
                    MASK if self._redactor.is_secret_name(name, item) else self._walk(item, found, kept)
                )
            return plain
        return value

    def _several(self, items: list[Any], found: Found, kept: frozenset[str]) -> frozenset[str]:
        """Give what more than one item of a list has a sequence of."""
        counts: dict[str, int] = {}
        for item in items:
            for what in self._held(item) if isinstance(item, (list, dict)) else ():
                counts[what] = counts.get(what, 0) + 1
        several = {what for what, count in counts.items() if count > 1} - kept - found.tokens.keys()
        found.several |= several
        if "response" in several:
            several |= {"mask", "logprobs"}  # they belong to it
        return frozenset(several)

    def _held(self, value: Any) -> set[str]:
        held: set[str] = set()
        if isinstance(value, (list, dict)):
            parts = value
            if isinstance(value, dict):
                parts = list(value.values())
                for name, item in value.items():
                    what = self._fields.get(name)
                    if what is not None and isinstance(item, list) and snapshot.sequence(item) is not None:
                        held.add(what)
            for part in parts:
                if isinstance(part, (list, dict)):
                    held |= self._held(part)
        return held
