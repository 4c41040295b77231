"""Traces of MLflow as trajectories: what the exporter changed for MLflow's sake is changed back."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from .. import semconv
from ..exporters.mlflow_spans import RECORDED, RESOURCE, ROOT_EXCEPTION, usual_side
from ..model import Kind, Span, Trajectory
from ..store import otlp
from ..store.assemble import assemble, decode_span, unreadable
from ..store.packed import lenient
from ..store.results import parsed
from .mlflow_rows import facts_of, is_ours, key_of, rewards_of, status_of, trace_id_of

_BYTES = (
    semconv.RESPONSE_LOGPROBS,
    semconv.ATTACHED_ADVANTAGES,
    semconv.ATTACHED_RETURNS,
    semconv.ATTACHED_LOGPROBS,
)
"""Attributes that are bytes, unless they are one number."""
_FACTS = (*_BYTES[1:], semconv.ATTACHED_MASK, semconv.TRAINED_STEP, semconv.DISCARDED)
"""Attributes of the root that ``attach`` gave."""
_STAND_IN: Final = "unrecorded rollout"
"""Name of the root that the exporter makes where none was recorded."""
_SHORTENED: Final = 10_000
"""Characters that every text has which was cut for MLflow."""
_MARK = re.compile(r"⟨[0-9]+ characters are left out here; ")
_KINDS: Mapping[str, Kind] = {
    "AGENT": "rollout",
    "CHAT_MODEL": "llm",
    "LLM": "llm",
    "TOOL": "tool",
}


def trajectory_of(trace: Any, project: str) -> Trajectory:
    """Build the trajectory that a trace of MLflow tells.

    Args:
        trace: MLflow's ``Trace``.
        project: name of the experiment that holds it.

    Returns:
        The trajectory; ``notes`` says what of it MLflow does not have.

    Raises:
        ValueError: the trace has no spans.
    """
    info = trace.info
    read = [_span(span, trace_id_of(info), ours=is_ours(info)) for span in trace.data.spans]
    if not read:
        raise ValueError(f"MLflow has no spans of the trace {info.trace_id}")
    root = next((span for span in read if span.parent_id is None), None)
    if is_ours(info):
        resource = parsed(_attribute(root, RESOURCE)) if root else None
        read = [_with_resource(span, resource) for span in read]
        spans, facts = _without_facts(read)
        spans = [span for span in spans if not _is_stand_in(span)] or spans
        told = [*spans, *_as_attached(info, facts, spans)]
    else:
        spans = told = _with_tags(read, info)
    key = key_of(info)
    try:
        trajectory = assemble(told, attempt=None if key is None else key.attempt)
    except Exception as error:  # somebody else's spans may say anything
        trajectory = unreadable(told, error)
    if not is_ours(info):
        trajectory = _as_listed(trajectory, info)
    notes = (*trajectory.notes, *_missing(info, spans))
    return replace(trajectory, project=trajectory.project or project, notes=notes)


def _span(span: Any, trace_id: str, *, ours: bool) -> Span:
    attributes = dict(_attributes(span, ours))
    recorded = parsed(attributes.pop(RECORDED, None))
    recorded = recorded if isinstance(recorded, dict) else {}
    kind = attributes.get(semconv.KIND, "other")
    side = recorded.get("side") or usual_side(kind)
    failed = span.status.status_code.value == "ERROR"
    message = span.status.description or None
    raw = {
        "name": recorded.get("name", span.name),
        "traceId": trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent_id,
        "kind": 1 + otlp.SIDES.index(side) if side in otlp.SIDES else 1,
        "startTimeUnixNano": span.start_time_ns,
        "endTimeUnixNano": 0 if recorded.get("ended") is False else span.end_time_ns or 0,
        "status": {
            "code": otlp.ERROR if failed else otlp.OK,
            # The exporter says the status where there is no reason.
            "message": None if ours and message == attributes.get(semconv.STATUS, "error") else message,
        },
        "attributes": otlp.encode_attributes(attributes),
        "events": [
            {
                "name": semconv.EXCEPTION_EVENT if event.name == ROOT_EXCEPTION else event.name,
                "timeUnixNano": event.timestamp,
                "attributes": otlp.encode_attributes(_event_attributes(event)),
            }
            for event in span.events
            if not (ours and _is_made_up(event))
        ],
        "links": [
            {
                "traceId": str(link.trace_id).removeprefix("tr-"),
                "spanId": link.span_id,
                "attributes": otlp.encode_attributes(link.attributes or {}),
            }
            for link in span.links
        ],
    }
    return decode_span(raw, {})


def _attributes(span: Any, ours: bool) -> Iterator[tuple[str, Any]]:
    shown = span.attributes
    for name, value in shown.items():
        if name.startswith("mlflow.") and name != semconv.RUN_ID:
            continue
        if name in _BYTES and isinstance(value, str):
            value = lenient(base64.b64decode, value)
        yield name, value
    if not ours and semconv.KIND not in shown:
        yield from _foreign_attributes(shown)


def _foreign_attributes(shown: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Say in our words what MLflow's own attributes say."""
    kind = _KINDS.get(str(shown.get("mlflow.spanType")), "other")
    yield semconv.KIND, kind
    inputs, outputs = shown.get("mlflow.spanInputs"), shown.get("mlflow.spanOutputs")
    if inputs is not None:
        yield semconv.INPUT, orjson.dumps(inputs).decode()
    if outputs is not None:
        as_it_is = kind == "tool" and isinstance(outputs, str)
        name = semconv.TOOL_RESULT if kind == "tool" else semconv.OUTPUT
        yield name, outputs if as_it_is else orjson.dumps(outputs).decode()
    usage = shown.get("mlflow.chat.tokenUsage")
    if kind == "llm" and isinstance(usage, dict):
        for name, ours in (("input_tokens", semconv.INPUT_TOKENS), ("output_tokens", semconv.OUTPUT_TOKENS)):
            if isinstance(usage.get(name), int):
                yield ours, usage[name]


def _event_attributes(event: Any) -> dict[str, Any]:
    attributes = dict(event.attributes)
    score = attributes.get(semconv.EVALUATION_VALUE)
    if isinstance(score, str):
        attributes[semconv.EVALUATION_VALUE] = lenient(float, score)  # NaN and the infinities
    return attributes


def _is_made_up(event: Any) -> bool:
    """Say whether the exporter made an exception, for MLflow's page to show why a span failed."""
    return (
        event.name == semconv.EXCEPTION_EVENT
        and event.attributes.get(semconv.EXCEPTION_TYPE) in ("error", "cancelled", "running", "died")
        and semconv.EXCEPTION_STACKTRACE not in event.attributes
    )


def _with_resource(span: Span, of_root: Any) -> Span:
    attributes = dict(span.attributes)
    own = parsed(attributes.pop(RESOURCE, None))
    resource = own if isinstance(own, dict) else of_root
    return replace(span, attributes=attributes, resource=resource if isinstance(resource, dict) else {})


def _attribute(span: Span, name: str) -> Any:
    return span.attributes.get(name)


def _is_stand_in(span: Span) -> bool:
    return span.parent_id is None and span.name == _STAND_IN and semconv.KIND not in span.attributes


def _without_facts(spans: list[Span]) -> tuple[list[Span], dict[str, Any]]:
    """Take from the root what was attached to the rollout."""
    facts: dict[str, Any] = {}
    kept = []
    for span in spans:
        found = {name: value for name, value in span.attributes.items() if name in _FACTS}
        if span.parent_id is None and found:
            facts |= found
            rest = {name: value for name, value in span.attributes.items() if name not in found}
            span = replace(span, attributes=rest)
        kept.append(span)
    return kept, facts


def _as_attached(info: Any, facts: Mapping[str, Any], spans: list[Span]) -> Iterator[Span]:
    """Give what was attached as one span; rewards among it are told by the feedback alone."""
    told = {
        event.attributes.get(semconv.EVALUATION_NAME)
        for span in spans
        for event in span.events
        if event.name == semconv.EVALUATION_EVENT
    }
    rewards = {name: value for name, value in rewards_of(info).items() if name not in told}
    if not facts and not rewards:
        return
    last = max(span.start_ns if span.end_ns is None else span.end_ns for span in spans)
    events = [
        {
            "name": semconv.EVALUATION_EVENT,
            "timeUnixNano": last,
            "attributes": otlp.encode_attributes(
                {
                    semconv.EVALUATION_NAME: name,
                    (semconv.EVALUATION_LABEL if isinstance(value, str) else semconv.EVALUATION_VALUE): value,
                }
            ),
        }
        for name, value in rewards.items()
    ]
    raw = {
        "name": "attach",
        "traceId": trace_id_of(info),
        "spanId": f"{int(trace_id_of(info)[:16], 16) ^ 0xA77AC4ED:016x}",
        "startTimeUnixNano": last,
        "endTimeUnixNano": last,
        "attributes": otlp.encode_attributes({semconv.KIND: "attach", **facts}),
        "events": events,
    }
    yield decode_span(raw, spans[0].resource)


def _with_tags(spans: list[Span], info: Any) -> list[Span]:
    """Put on the first span what the tags of somebody else's trace say of the rollout."""
    key = key_of(info)
    experiment, run = info.tags.get("experiment_name"), info.trace_metadata.get("mlflow.sourceRun")
    facts = {semconv.EXPERIMENT: experiment, semconv.RUN_ID: run}
    if key is not None:
        facts |= {
            semconv.STEP: key.step,
            semconv.SAMPLE_INDEX: key.sample_index,
            semconv.ROLLOUT_N: key.rollout_n,
            semconv.VALIDATE: key.validate,
            semconv.ATTEMPT: key.attempt,
        }
    known = {name: value for name, value in facts.items() if value is not None}
    return [
        replace(span, attributes={**known, **span.attributes}) if span.parent_id is None else span
        for span in spans
    ]


def _as_listed(trajectory: Trajectory, info: Any) -> Trajectory:
    """Give somebody else's trajectory the rewards and the state that its trace has."""
    rewards = {**trajectory.rewards, **rewards_of(info)}
    running = status_of(info) == "running"
    return replace(trajectory, rewards=rewards, status="running" if running else trajectory.status)


def _missing(info: Any, spans: list[Span]) -> Iterator[str]:
    """Say what MLflow does not have of a trajectory."""
    facts = facts_of(info)
    recorded = (lenient(int, facts.get("spans")) or 0) - (lenient(int, facts.get("attached")) or 0)
    if recorded > len(spans):
        yield f"MLflow has {len(spans)} of {recorded} spans; the Trackway store has all of them"
    shortened = sum(
        isinstance(value, str) and len(value) > _SHORTENED and _MARK.search(value) is not None
        for span in spans
        for value in (span.error, *span.attributes.values())
    )
    if shortened:
        values = "value is" if shortened == 1 else "values are"
        yield f"{shortened} {values} cut in MLflow; the Trackway store has the whole"
