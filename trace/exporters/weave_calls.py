"""What one trajectory becomes in Weave: its calls, encoded and within its limits, and its feedback.

Nothing here imports Weave. The shapes are those that Weave's own client was seen to send (``weave`` 0.54):
an exception is JSON with ``type``, ``message`` and ``traceback``, tokens stand in ``summary.usage`` under
the model, and ``attributes.weave.kind`` gives a call its symbol.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Final

import orjson

from .. import model, semconv
from ..capture.snapshot import clean
from .chat import chat_of, fit
from .content import Content, contents_of, rooted, total_usage
from .mlflow_payload import session_id
from .text import ELSEWHERE, TEXT_LIMIT, cut, dumps, short_name
from .weave_feedback import Reward, plain, rewards_of

CALL_LIMIT: Final = 3_500_000
"""Bytes of one call. Of one with more than 3.5 MiB, Weave's server leaves out the largest fields."""
OP_LIMIT: Final = 128
"""Characters of the name of an operation (``op_name_validator`` of Weave's server)."""
NO_MODEL: Final = "policy"
"""Stands for the model of generations that do not name theirs."""
_ATTRIBUTE_LIMIT = 1_000_000
_FRAMES = 30

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_KINDS = {"trajectory": "agent", "rollout": "agent", "llm": "llm", "tool": "tool"}
_FRAME = re.compile(r'  File "([^"\n]*)", line (\d+), in ([^\n]*)\n(?:    ([^\n]*)\n)?')
_SHOWN = {
    semconv.KIND,
    semconv.STEP,
    semconv.SAMPLE_INDEX,
    semconv.ROLLOUT_N,
    semconv.ATTEMPT,
    semconv.VALIDATE,
    semconv.POLICY_VERSION,
    semconv.PROJECT,
    semconv.EXPERIMENT,
    semconv.STATUS,
    semconv.INPUT,
    semconv.INPUT_BASE,
    semconv.OUTPUT,
    semconv.OUTPUT_BASE,
    semconv.TOOL_ARGUMENTS,
    semconv.TOOL_RESULT,
}
"""Attributes of a span that a call shows in a place of its own."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        trace_id: of the trajectory that it belongs to.
        data: the call as JSON.
    """

    trace_id: str
    data: bytes

    def shorter(self) -> Call:
        """Give it with an eighth of the bytes at most, for a server that takes no more."""
        call = orjson.loads(self.data)
        return Call(self.trace_id, _within(call, min(CALL_LIMIT, len(self.data)) // 8))


@dataclass(frozen=True, slots=True)
class TraceCalls:
    """All that Weave gets of one trajectory."""

    trace_id: str
    root_id: str
    calls: tuple[Call, ...]
    rewards: tuple[Reward, ...]


def calls_of(trajectory: model.Trajectory, project_id: str, experiment: str) -> TraceCalls:
    """Make the calls of one trajectory.

    Args:
        project_id: ``entity/project``.
        experiment: name of the experiment of a trajectory that does not say its own.

    Raises:
        ValueError: the trajectory has no spans, or ids that are not those of OpenTelemetry.
    """
    if not trajectory.spans:
        raise ValueError("the trajectory has no spans")
    rewards = tuple(rewards_of(trajectory))
    trajectory = rooted(trajectory)
    experiment = trajectory.experiment or experiment
    root = trajectory.spans[0]
    ids = [root.trace_id, *(span.span_id for span in trajectory.spans)]
    for text, size in zip(ids, [32] + [16] * len(trajectory.spans), strict=True):
        if not re.fullmatch(f"[0-9a-f]{{{size}}}", text):
            raise ValueError(f"{text!r} is not an id of OpenTelemetry, of {size} hex digits")
    session = session_id(trajectory.key)
    thread = None if session is None else short_name(f"{experiment}:{session}")
    calls = []
    for content in contents_of(trajectory, chat_of(trajectory.turns)):
        span = content.span
        attributes = _attributes(trajectory, content, experiment)
        call = {
            "project_id": project_id,
            "id": span.span_id,
            "trace_id": trajectory.trace_id,
            "parent_id": span.parent_id if span is not root else None,
            "op_name": _op_name(span.name),
            "display_name": short_name(trajectory.name if span is root else content.name),
            "started_at": moment(span.start_ns),
            "ended_at": moment(max(span.start_ns, content.end_ns)),
            "thread_id": thread,
            # In a thread of Weave, the rollouts of a group are the turns.
            "turn_id": None if thread is None else root.span_id,
            "attributes": attributes,
            "inputs": _fragment(_inputs(content.inputs)),
            "output": _fragment(content.outputs),
            "exception": _exception(content),
            "summary": _summary(trajectory, content),
        }
        calls.append(Call(trajectory.trace_id, _within(call, CALL_LIMIT)))
    # Of a rollout that was begun on another machine the root is not here.
    first = root if len(calls) == len(trajectory.spans) else trajectory.spans[1]
    return TraceCalls(trajectory.trace_id, first.span_id, tuple(calls), rewards)


def moment(time_ns: int) -> str:
    """Write a time in nanoseconds since 1970 as Weave keeps it, to the microsecond."""
    return (_EPOCH + timedelta(microseconds=time_ns // 1000)).isoformat(timespec="microseconds")


def _op_name(name: str) -> str:
    # A name that looks like a reference would be taken for one.
    name = clean(name).replace("://", ":/") or "⟨no name⟩"
    return name if len(name) <= OP_LIMIT else f"{name[: OP_LIMIT - 1]}…"


def _inputs(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    return value if isinstance(value, Mapping) else {"input": value}


def _fragment(value: Any) -> orjson.Fragment:
    """Encode inputs or outputs; structure that is too large for a page becomes its text, cut."""
    if isinstance(value, str):
        return orjson.Fragment(dumps(cut(value)))
    text = dumps(value)
    if len(text) > TEXT_LIMIT:
        if isinstance(value, Mapping) and ("messages" in value or "choices" in value):
            parts = {
                clean(str(name)): orjson.Fragment(dumps(item))
                if name in ("messages", "choices")
                else _fragment(item)
                for name, item in value.items()
            }
            return orjson.Fragment(orjson.dumps(parts))
        text = dumps({"text": cut(text)})
    return orjson.Fragment(text)


def _within(call: Mapping[str, Any], limit: int) -> bytes:
    """Encode a call; of one that is over the limit, first what else was recorded goes, then the content."""
    data = orjson.dumps(call)
    if len(data) <= limit:
        return data
    attributes = dict(call["attributes"])
    if attributes.pop("recorded", None) is not None:
        attributes["left_out"] = f"⟨recorded attributes {ELSEWHERE}⟩"
    data = orjson.dumps({**call, "attributes": attributes})
    if len(data) <= limit:
        return data
    whole = orjson.loads(data)
    # A character takes six bytes at most.
    short = {name: _short(whole[name], limit // 16) for name in ("inputs", "output")}
    exception = whole["exception"] and cut(whole["exception"], limit // 64)
    return orjson.dumps({**whole, **short, "exception": exception})


def _short(value: Any, limit: int) -> Any:
    if isinstance(value, str):
        return cut(value, limit)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        others = {name: item for name, item in value.items() if name != "messages"}
        kept = {"messages": fit(value["messages"], limit // 2), **others}
        if len(dumps(kept)) <= limit:
            return kept
    text = dumps(value)
    return value if len(text) <= limit else {"text": cut(text, limit)}


def _attributes(trajectory: model.Trajectory, content: Content, experiment: str) -> dict[str, Any]:
    """Give the tags of the rollout, on each call so that each is found, and what else was recorded."""
    span = content.span
    root = trajectory.spans[0]
    found: dict[str, Any] = {}
    if span.kind in _KINDS:
        found["weave"] = {"kind": _KINDS[span.kind]}
    key = trajectory.key
    if key is not None:
        found |= {
            "key": str(key),
            "step": key.step,
            "sample_index": key.sample_index,
            "rollout_n": key.rollout_n,
            "attempt": key.attempt,
            "validate": key.validate,
        }
    versions = trajectory.policy_versions
    version = span.attributes.get(semconv.POLICY_VERSION)
    if span is root and versions:
        version = versions[0] if len(versions) == 1 else ",".join(map(str, versions))
    found |= {"policy_version": version, "experiment": experiment, "status": content.status}
    if span is root:
        found |= {
            "reward": plain(trajectory.reward),
            "rewards": {name: plain(value) for name, value in trajectory.rewards.items()} or None,
            "trained_step": trajectory.trained_step,
            "discarded": trajectory.discarded,
            "run_id": trajectory.run_id,
            "resource": dict(span.resource) or None,
        }
    found["recorded"] = {
        clean(name): _value(value) for name, value in span.attributes.items() if name not in _SHOWN
    } or None
    found["events"] = [
        {"name": event.name, "time": moment(event.time_ns), "attributes": dict(event.attributes)}
        for event in span.events
        if event.name not in (semconv.EXCEPTION_EVENT, semconv.EVALUATION_EVENT)
    ] or None
    kept = {name: value for name, value in found.items() if value is not None}
    loaded: dict[str, Any] = orjson.loads(dumps(kept))
    return loaded


def _value(value: Any) -> Any:
    if isinstance(value, bytes):
        value = base64.b64encode(value).decode()
    if isinstance(value, str):
        return cut(value, _ATTRIBUTE_LIMIT) if len(value) > _ATTRIBUTE_LIMIT else clean(value)
    return value


def _exception(content: Content) -> str | None:
    """Say why a call failed, as Weave's client does; a call without an exception counts as a success."""
    if content.status == "ok":
        return None
    raised = [event for event in content.span.events if event.name == semconv.EXCEPTION_EVENT]
    facts = raised[-1].attributes if raised else {}
    message = facts.get(semconv.EXCEPTION_MESSAGE) or content.error or content.status
    frames = _FRAME.findall(str(facts.get(semconv.EXCEPTION_STACKTRACE) or "")[-TEXT_LIMIT:])
    return dumps(
        {
            "type": cut(str(facts.get(semconv.EXCEPTION_TYPE) or content.status), 1000),
            "message": cut(str(message), TEXT_LIMIT),
            "traceback": [
                {
                    "filename": clean(file),
                    "line_number": int(line),
                    "function_name": clean(name),
                    "text": clean(text),
                }
                for file, line, name, text in frames[-_FRAMES:]
                if len(line) < 10
            ],
        }
    )


def _summary(trajectory: model.Trajectory, content: Content) -> dict[str, Any]:
    """Give tokens by model and how many calls went well; on the root those of all, as Weave sums up."""
    root = trajectory.spans[0]
    if content.span is root:
        spans = trajectory.spans
        failed = sum(span.status != "ok" for span in spans[1:]) + (content.status != "ok")
        usage = _usage_by_model(spans)
    else:
        spans = (content.span,)
        failed = int(content.status != "ok")
        usage = {} if content.usage is None else {_model(content.span): dict(content.usage) | {"requests": 1}}
    summary: dict[str, Any] = {"status_counts": {"success": len(spans) - failed, "error": failed}}
    if usage:
        summary["usage"] = usage
    return summary


def _usage_by_model(spans: tuple[model.Span, ...]) -> dict[str, dict[str, int]]:
    counts: dict[str, int] = {}
    for span in spans:
        if span.kind == "llm":
            counts[_model(span)] = counts.get(_model(span), 0) + 1
    found = {}
    for name, count in counts.items():
        used = total_usage([span for span in spans if span.kind != "llm" or _model(span) == name])
        if used is not None:
            found[name] = used | {"requests": count}
    return found


def _model(span: model.Span) -> str:
    given = span.inputs.get("model") if isinstance(span.inputs, Mapping) else None
    name = span.attributes.get(semconv.REQUEST_MODEL) or (given if isinstance(given, str) else None)
    return short_name(str(name or NO_MODEL))
