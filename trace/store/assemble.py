"""Spans -> trajectories: whole token sequences, turns in order, rewards, status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import semconv
from ..model import Event, Kind, Link, Side, Span, Status, Trajectory, TrajectoryKey
from . import otlp
from .attached import latest, with_attached
from .packed import lenient, unpack_floats, unpack_ids, unpack_mask
from .payloads import whole_payloads
from .results import parsed
from .turns import turns_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

DIED = "process ended before this did"
_ELSEWHERE = "this rollout was begun on another machine; the rest of it is in the store there"

_KINDS: Mapping[str, Kind] = {"invoke_agent": "rollout", "chat": "llm", "execute_tool": "tool"}


def decode_span(raw: Mapping[str, Any], resource: Mapping[str, Any]) -> Span:
    """Read one span of a journal line.

    Raises:
        ValueError: it lacks an id or a time, or a value of it cannot be read.
    """
    try:
        attributes = otlp.decode_attributes(raw.get("attributes", ()))
        end = int(raw.get("endTimeUnixNano") or 0)
        status = raw.get("status") or {}
        events = tuple(
            Event(item["name"], int(item["timeUnixNano"]), otlp.decode_attributes(item.get("attributes", ())))
            for item in raw.get("events", ())
        )
        links = tuple(
            Link(item["traceId"], item["spanId"], otlp.decode_attributes(item.get("attributes", ())))
            for item in raw.get("links", ())
        )
        return _span(
            name=raw["name"],
            trace_id=raw["traceId"],
            span_id=raw["spanId"],
            parent_id=raw.get("parentSpanId") or None,
            start_ns=int(raw["startTimeUnixNano"]),
            end_ns=end or None,
            failed=status.get("code") in (otlp.ERROR, "STATUS_CODE_ERROR"),
            error=status.get("message") or None,
            attributes=attributes,
            events=events,
            links=links,
            side=_side(raw.get("kind")),
            resource=resource,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an OTLP span: {error!r}") from None


def from_readable(spans: Iterable[ReadableSpan]) -> list[Trajectory]:
    """Build trajectories from OpenTelemetry spans, one for each trace id, in order of appearance."""
    traces: dict[str, list[Span]] = {}
    for span in spans:
        context = span.get_span_context()
        if context is None or span.start_time is None:
            continue
        trace_id = f"{context.trace_id:032x}"
        traces.setdefault(trace_id, []).append(
            _span(
                name=span.name,
                trace_id=trace_id,
                span_id=f"{context.span_id:016x}",
                parent_id=f"{span.parent.span_id:016x}" if span.parent else None,
                start_ns=span.start_time,
                end_ns=span.end_time,
                failed=not span.status.is_ok,
                error=span.status.description,
                attributes=dict(span.attributes or {}),
                events=tuple(
                    Event(event.name, event.timestamp, dict(event.attributes or {})) for event in span.events
                ),
                links=tuple(
                    Link(
                        f"{link.context.trace_id:032x}",
                        f"{link.context.span_id:016x}",
                        dict(link.attributes or {}),
                    )
                    for link in span.links
                ),
                side=otlp.SIDES[span.kind.value],
                resource=dict(span.resource.attributes),
            )
        )
    return [assemble(trace) for trace in traces.values()]


def _side(number: Any) -> Side:
    return otlp.SIDES[number - 1] if isinstance(number, int) and 0 < number <= len(otlp.SIDES) else "internal"


def _span(
    *, attributes: dict[str, Any], failed: bool, error: str | None, end_ns: int | None, **rest: Any
) -> Span:
    status: Status = attributes.get(semconv.STATUS) or ("error" if failed else "ok")
    if end_ns is None:
        status = "running"
        if reason := attributes.get(semconv.EXPIRED):
            status, failed, error = "died", True, str(reason)
    kind = attributes.get(semconv.KIND) or _KINDS.get(attributes.get(semconv.OPERATION, ""), "other")
    return Span(
        kind=kind,
        status=status,
        error=error if failed else None,
        end_ns=end_ns,
        attributes=attributes,
        inputs=parsed(attributes.get(semconv.TOOL_ARGUMENTS) or attributes.get(semconv.INPUT)),
        outputs=_outputs(attributes, kind),
        response_mask=lenient(unpack_mask, attributes.get(semconv.RESPONSE_MASK)),
        response_logprobs=lenient(unpack_floats, attributes.get(semconv.RESPONSE_LOGPROBS)),
        prompt_text=attributes.get(semconv.PROMPT_TEXT),
        response_text=attributes.get(semconv.RESPONSE_TEXT),
        **rest,
    )


def _outputs(attributes: Mapping[str, Any], kind: Kind) -> Any:
    if kind == "tool":
        # A tool's text stands there as it is; whether a text that reads as JSON was one does not matter.
        return attributes.get(semconv.TOOL_RESULT)
    return parsed(attributes.get(semconv.OUTPUT))


def assemble(spans: Sequence[Span], *, alive: bool = False, attempt: int | None = None) -> Trajectory:
    """Build the trajectory that the spans of one trace tell, with what was attached to it.

    Args:
        spans: in any order; of two with the same id the ended one counts, else the one that was given up,
            else the later one. Those of ``attach`` may have a trace of their own.
        alive: whether a process still writes to it, so that open spans are running and not dead.
        attempt: number of the attempt, where the store knows better than the span.

    Raises:
        ValueError: there are no spans.
    """
    ordered, facts = _sorted(spans)
    if not alive:
        ordered = [dead(span) for span in ordered]
    ordered = whole_payloads(_whole_sequences(ordered))
    first = ordered[0]
    root = first if first.parent_id is None else None
    # The parent of an unrecorded root's children is that root.
    above = root.span_id if root else first.parent_id
    facts = [replace(span, trace_id=first.trace_id, parent_id=above) for span in facts]
    away = root is None and semconv.AWAY in first.attributes
    status, error = _status_here(ordered) if away else _status(root, alive)
    ends = [span.end_ns for span in ordered if span.end_ns is not None]
    finished = root.end_ns if root else None
    turns, unaligned = with_attached(turns_of(ordered), facts)
    everything = (*ordered, *facts)
    return Trajectory(
        key=_key(ordered, attempt),
        trace_id=first.trace_id,
        status=status,
        error=error,
        start_ns=min(span.start_ns for span in ordered),
        end_ns=finished if finished is not None else (max(ends) if ends and status != "running" else None),
        spans=everything,
        turns=turns,
        rewards=_rewards(everything),
        annotations={
            name.removeprefix(semconv.ANNOTATION_PREFIX): parsed(value)
            for span in ordered
            for name, value in span.attributes.items()
            if name.startswith(semconv.ANNOTATION_PREFIX)
        },
        policy_versions=_versions(ordered),
        project=_first(ordered, semconv.PROJECT) or first.resource.get(semconv.PROJECT),
        experiment=_first(ordered, semconv.EXPERIMENT) or first.resource.get(semconv.EXPERIMENT),
        run_id=_first(ordered, semconv.RUN_ID),
        run=_first(ordered, semconv.RUN),
        notes=(
            *(note for span in everything for note in span.attributes.get(semconv.NOTES, ())),
            *unaligned,
            *([_ELSEWHERE] if away else []),
        ),
        trained_step=latest(facts, semconv.TRAINED_STEP, int),
        discarded=latest(facts, semconv.DISCARDED, str) or None,
    )


def dead(span: Span) -> Span:
    """Give a span as it is when its process has ended."""
    return replace(span, status="died", error=DIED) if span.status == "running" else span


def _sorted(spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Give each span once, those of the trajectory itself and those of ``attach`` apart.

    Raises:
        ValueError: there are none of the trajectory itself.
    """
    unique: dict[str, Span] = {}
    for span in spans:
        known = unique.get(span.span_id)
        if known is None or _certainty(span) >= _certainty(known):
            unique[span.span_id] = span
    facts = sorted(
        (span for span in unique.values() if span.kind == "attach"),
        key=lambda span: (span.start_ns, span.span_id),
    )
    own = sorted(
        (span for span in unique.values() if span.kind != "attach"),
        key=lambda span: (span.parent_id is not None, span.start_ns),
    )
    if not own:
        raise ValueError("a trajectory needs at least one span")
    return own, facts


def _certainty(span: Span) -> int:
    return 2 if span.end_ns is not None else int(semconv.EXPIRED in span.attributes)


def unreadable(spans: Sequence[Span], error: Exception) -> Trajectory:
    """Give what can be said of a trajectory that cannot be put together: its id, its times, the reason."""
    note = f"cannot be read: {type(error).__name__}: {error}"
    own = [span for span in spans if span.kind != "attach"]
    ends = [span.end_ns for span in own if span.end_ns is not None]
    return Trajectory(
        key=None,
        trace_id=own[0].trace_id,
        status="error",
        error=note,
        start_ns=min(span.start_ns for span in own),
        end_ns=max(ends, default=None),
        spans=tuple(spans),
        turns=(),
        rewards={},
        annotations={},
        policy_versions=(),
        notes=(note,),
    )


def _status_here(spans: Sequence[Span]) -> tuple[Status, str | None]:
    """Say how the part of a rollout went whose root is elsewhere: as the worst of its outermost spans."""
    here = {span.span_id for span in spans}
    outermost = [span for span in spans if span.parent_id not in here]
    for status in ("running", "died", "error", "cancelled"):
        for span in outermost:
            if span.status == status:
                return status, span.error
    return "ok", None


def _status(root: Span | None, alive: bool) -> tuple[Status, str | None]:
    if root is not None:
        return root.status, root.error
    return ("running", None) if alive else ("died", DIED)


def _first(spans: Iterable[Span], name: str) -> Any:
    return next((span.attributes[name] for span in spans if name in span.attributes), None)


def _key(spans: Sequence[Span], attempt: int | None) -> TrajectoryKey | None:
    for span in spans:
        tags = span.attributes
        if semconv.ROLLOUT_N in tags:
            return TrajectoryKey(
                step=tags.get(semconv.STEP),
                sample_index=tags.get(semconv.SAMPLE_INDEX),
                rollout_n=tags[semconv.ROLLOUT_N],
                validate=bool(tags.get(semconv.VALIDATE)),
                attempt=tags.get(semconv.ATTEMPT, 0) if attempt is None else attempt,
            )
    return None


def _rewards(spans: Iterable[Span]) -> dict[str, float | str]:
    rewards: dict[str, float | str] = {}
    for event in evaluations(spans):
        facts = event.attributes
        value = facts.get(semconv.EVALUATION_VALUE, facts.get(semconv.EVALUATION_LABEL))
        if value is not None:
            rewards[str(facts.get(semconv.EVALUATION_NAME))] = value
    return rewards


def evaluations(spans: Iterable[Span]) -> list[Event]:
    """Give what rewards were given, in order of time: the last of a name counts."""
    events = [event for span in spans for event in span.events if event.name == semconv.EVALUATION_EVENT]
    return sorted(events, key=lambda event: event.time_ns)


def _versions(spans: Iterable[Span]) -> tuple[int | str, ...]:
    ordered = sorted(spans, key=lambda span: span.start_ns)
    found = [span.attributes.get(semconv.POLICY_VERSION) for span in ordered]
    found += [span.attributes.get(semconv.POLICY_VERSION_END) for span in ordered]
    return tuple(dict.fromkeys(version for version in found if version is not None))


def _whole_sequences(spans: Sequence[Span]) -> list[Span]:
    """Put back the beginnings that sequences share with those of earlier spans."""
    by_id = {span.span_id: span for span in spans}
    done: dict[str, Span] = {}

    def resolve(span: Span) -> Span:
        # Each span builds on one before it, so a chain is as long as the rollout has turns: no recursion.
        chain = [span]
        seen = {span.span_id}
        while (base := _base(chain[-1])) and base in by_id and base not in done and base not in seen:
            seen.add(base)
            chain.append(by_id[base])
        for item in reversed(chain):
            done[item.span_id] = _whole(item, done)
        return done[span.span_id]

    return [done.get(span.span_id) or resolve(span) for span in spans]


def _base(span: Span) -> str | None:
    for name in (semconv.PROMPT_BASE, semconv.RESPONSE_BASE):
        if name in span.attributes:
            return str(span.attributes[name]).partition(":")[0]
    return None


def _whole(span: Span, done: Mapping[str, Span]) -> Span:
    attributes = span.attributes
    prompt = lenient(unpack_ids, attributes.get(semconv.PROMPT_IDS))
    response = lenient(unpack_ids, attributes.get(semconv.RESPONSE_IDS))
    if prompt is None and response is None:
        return span
    incomplete = False
    if (reference := attributes.get(semconv.PROMPT_BASE)) and prompt is not None:
        base, _, count = reference.partition(":")
        shared = _sequence(done.get(base))[: int(count)]
        incomplete = len(shared) < int(count)
        prompt = shared + prompt
    if (reference := attributes.get(semconv.RESPONSE_BASE)) and response is not None:
        base, start, count = reference.split(":")
        shared = _sequence(done.get(base))[int(start) : int(start) + int(count)]
        incomplete = incomplete or len(shared) < int(count)
        response = shared + response
    return replace(span, prompt_ids=prompt, response_ids=response, incomplete=incomplete)


def _sequence(span: Span | None) -> tuple[int, ...]:
    return () if span is None else (span.prompt_ids or ()) + (span.response_ids or ())
