"""What a trace in MLflow leaves out of a trajectory with very many calls, so that its page can be used.

The page opens a trace of 300 spans in some seconds and one of 5,000 in more than forty, with several seconds
for every click after that (MLflow 3.17, Chromium). Above ``LIMIT`` spans, the least interesting calls are
folded into the call around them, which then says what they were. The store keeps all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from .. import semconv
from ..model import Span, Trajectory
from .text import short_name

LIMIT: Final = 300
"""Most spans of one trace."""
_FAILED = LIMIT // 2
"""Most spans that are kept because they failed: the first and the last ones."""
_ENDS = 10
"""Spans at the beginning and at the end that are kept, whatever they are."""
_NAMES = 8
"""Most names of folded calls that a span tells one by one."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A trajectory within the limit.

    Attributes:
        trajectory: with the spans that are left, each below the nearest one around it that is left too.
        notes: id of a span -> what was folded into it: each name, how often, and the seconds it took in all.
        count: how many spans were folded.
    """

    trajectory: Trajectory
    notes: Mapping[str, str]
    count: int


def _note(spans: Iterable[Span]) -> str:
    """Say of calls that are folded into the same span: each name, how often, how long, how many failed."""
    by_name: dict[str, list[Span]] = {}
    for span in spans:
        name = short_name(str(span.attributes.get(semconv.TOOL_NAME) or span.name))
        by_name.setdefault(name, []).append(span)
    often = sorted(by_name, key=lambda name: (-len(by_name[name]), name))
    parts = [_told(name, by_name[name]) for name in often[:_NAMES]]
    if others := often[_NAMES:]:
        parts.append(_told(f"{len(others)} other names", [span for name in others for span in by_name[name]]))
    return ", ".join(parts)


def _told(name: str, spans: Sequence[Span]) -> str:
    seconds = sum(span.duration_ns or 0 for span in spans) / 1e9
    failed = sum(span.status != "ok" for span in spans)
    return f"{name} × {len(spans):,} ({seconds:.3g} s{f', {failed:,} failed' if failed else ''})"


def fold(trajectory: Trajectory, limit: int = LIMIT) -> Folded:
    """Bring a trajectory within a number of spans.

    What stays, in this order until the limit is reached: the root; the first and the last spans; those in
    which an error arose; rollouts and generations; then the calls nearest to the root, the slowest first.
    A span brings those around it along as long as there is room.

    Args:
        trajectory: as ``rooted`` gives it, its root first.
    """
    spans = trajectory.spans
    if len(spans) <= limit:
        return Folded(trajectory, {}, 0)
    by_id = {span.span_id: span for span in spans}
    kept = {spans[0].span_id}
    for span in _by_interest(spans, by_id):
        room = limit - len(kept)
        if room == 0:
            break
        around = _missing(span, by_id, kept, room)
        kept.update(around if len(around) <= room else [span.span_id])
    inside: dict[str, list[Span]] = {}
    above = _nearest_kept(spans, by_id, kept)
    left = []
    for span in spans:
        if span.span_id in kept:
            left.append(span if span is spans[0] else replace(span, parent_id=above[span.span_id]))
        else:
            inside.setdefault(above[span.span_id], []).append(span)
    notes = {span_id: _note(folded) for span_id, folded in inside.items()}
    return Folded(replace(trajectory, spans=tuple(left)), notes, len(spans) - len(left))


def _by_interest(spans: Sequence[Span], by_id: Mapping[str, Span]) -> Iterable[Span]:
    yield from spans[:_ENDS]
    yield from spans[-_ENDS:]
    passed_on = {(span.parent_id, span.error) for span in spans if span.status != "ok"}
    failed = [span for span in spans if span.status != "ok" and (span.span_id, span.error) not in passed_on]
    yield from _both_ends(failed, _FAILED)
    generations = [span for span in spans if span.kind == "llm"]
    yield from (span for span in spans if span.kind == "rollout")
    yield from _both_ends(generations, len(generations))
    depths = _depths(spans, by_id)
    yield from sorted(spans, key=lambda span: (depths[span.span_id], -(span.duration_ns or 0)))


def _both_ends(spans: Sequence[Span], count: int) -> list[Span]:
    """Give the first, the last, the second, the last but one and so on, until there are ``count``."""
    last = len(spans) - 1
    order = [last - n // 2 if n % 2 else n // 2 for n in range(len(spans))]
    return [spans[place] for place in order[:count]]


def _missing(span: Span, by_id: Mapping[str, Span], kept: set[str], room: int) -> list[str]:
    """Give a span and those around it that are not kept yet; more than there is room for need not be all."""
    missing: list[str] = []
    at: Span | None = span
    while at is not None and at.span_id not in kept and len(missing) <= room:
        missing.append(at.span_id)
        at = by_id.get(at.parent_id or "")
    return missing


def _depths(spans: Sequence[Span], by_id: Mapping[str, Span]) -> dict[str, int]:
    depths: dict[str, int] = {}
    for span in spans:
        chain: dict[str, None] = {}
        at: Span | None = span
        # A parent that was met before in the chain closes a circle.
        while at is not None and at.span_id not in depths and at.span_id not in chain:
            chain[at.span_id] = None
            at = by_id.get(at.parent_id or "")
        depth = -1 if at is None else depths.get(at.span_id, 0)
        for place, span_id in enumerate(reversed(chain)):
            depths[span_id] = depth + place + 1
    return depths


def _nearest_kept(spans: Sequence[Span], by_id: Mapping[str, Span], kept: set[str]) -> dict[str, str]:
    """Give for each span the id of the nearest one around it that is kept; the root where there is none."""
    root = spans[0].span_id
    found: dict[str, str] = {}
    for span in spans:
        chain: dict[str, None] = {}
        at: Span | None = span
        while at is not None and at.span_id not in found and at.span_id not in chain:
            chain[at.span_id] = None
            at = by_id.get(at.parent_id or "")
        nearest = root
        if at is not None and at.span_id in found:
            nearest = at.span_id if at.span_id in kept else found[at.span_id]
        for span_id in reversed(chain):
            found[span_id] = nearest
            if span_id in kept:
                nearest = span_id
    return found
