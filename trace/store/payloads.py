"""Puts back the beginnings of lists and texts that a payload shares with those of earlier spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from .. import semconv
from ..model import Span
from .packed import lenient

_Base = tuple[str, list[Any], str, str, list[Any], int]
"""Field of the span, and what ``semconv.OUTPUT_BASE`` says."""
_NAMES = {"input": (semconv.INPUT_BASE, "inputs"), "output": (semconv.OUTPUT_BASE, "outputs")}


def whole_payloads(spans: Sequence[Span]) -> list[Span]:
    """Give spans with whole inputs and outputs; where a span that holds a beginning is gone, that is missing.

    The values of different spans may be the same objects, and must not be changed.
    """
    by_id = {span.span_id: span for span in spans}
    done: dict[str, Span] = {}
    for span in spans:
        # A conversation is a chain as long as the rollout has turns: no recursion.
        stack = [span.span_id]
        seen = set(stack)
        while stack:
            needed = [
                base
                for _, _, base, *_ in _bases(by_id[stack[-1]])
                if base in by_id and base not in done and base not in seen
            ]
            if needed:
                seen.update(needed)
                stack.extend(needed)
            else:
                span_id = stack.pop()
                done[span_id] = _whole(by_id[span_id], done)
    return [done[span.span_id] for span in spans]


def whole_attributes(span: Span) -> dict[str, Any]:
    """Give the attributes of a span for a reader that sees no other span: with whole inputs and outputs."""
    attributes = dict(span.attributes)
    for base, field in _NAMES.values():
        if attributes.pop(base, None) is not None:
            name = semconv.OUTPUT
            if field == "inputs":
                name = semconv.TOOL_ARGUMENTS if span.kind == "tool" else semconv.INPUT
            attributes[name] = orjson.dumps(getattr(span, field)).decode()
    return attributes


def _bases(span: Span) -> list[_Base]:
    """Give what a span's payloads begin with; entries that somebody else damaged are left out."""
    found = []
    for name, field in _NAMES.values():
        entries = lenient(orjson.loads, span.attributes.get(name))
        for entry in entries if isinstance(entries, list) else ():
            match entry:
                case [list(path), str(base), "input" | "output" as which, list(there), int(count)]:
                    found.append((field, path, base, which, there, count))
    return found


def _whole(span: Span, done: Mapping[str, Span]) -> Span:
    bases = _bases(span)
    if not bases:
        return span
    incomplete = span.incomplete
    holders = {field: {"": getattr(span, field)} for field, *_ in bases}
    for field, path, base, which, there, count in bases:
        beginning = _part(done.get(base), which, there)
        known = isinstance(beginning, (str, list)) and count >= 0
        put = known and _put(holders[field], path, beginning[:count])
        incomplete |= not put or len(beginning) < count
    return replace(span, incomplete=incomplete, **{field: holder[""] for field, holder in holders.items()})


def _part(span: Span | None, which: str, path: Sequence[str]) -> Any:
    value = None if span is None else getattr(span, _NAMES[which][1])
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _put(holder: dict[str, Any], path: Sequence[str], beginning: str | list[Any]) -> bool:
    *above, last = ("", *path)
    for name in above:
        inner = holder.get(name)
        if not isinstance(inner, dict):
            return False
        holder = inner
    if type(holder.get(last)) is not type(beginning):
        return False
    holder[last] = beginning + holder[last]
    return True
