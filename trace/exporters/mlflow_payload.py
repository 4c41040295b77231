"""What one trajectory becomes in MLflow: a trace with its tags, rewards and spans, ready to be written.

Nothing here imports MLflow: spans are OpenTelemetry's, with attributes under the names that MLflow
reads and encoded as it expects, each value JSON.

Tags keep the names and the values that verl's own tracing gives them, so ``validate`` is ``True`` or
``False``, capitalised, as every saved search of verl's users has it.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from .. import model, semconv
from .mlflow_chat import (
    CHAT_LIMIT,
    TEXT_LIMIT,
    Chat,
    Message,
    chat_of,
    clean,
    cut,
    dumps,
    fit,
    recorded_messages,
)

TAG_LIMIT: Final = 4096
"""Characters of a tag that every database behind MLflow keeps (``MAX_CHARS_IN_TRACE_INFO_TAGS_VALUE``)."""
NAME_LIMIT: Final = 250
"""Characters of a session id, a feedback's name and a trace's name; MLflow refuses longer ones."""
PREVIEW_LIMIT: Final = 1000
"""Characters of a preview that every database behind MLflow takes."""
ATTRIBUTE_LIMIT: Final = 4_000_000
"""Most characters of an attribute that is handed on as it was recorded, such as token ids."""
CONTEXTS_LIMIT: Final = 4_000_000
"""Most characters that the prompts of all generations of a trajectory may fill together."""
MIN_CONTEXT: Final = 20_000
"""Characters that each of these prompts may fill in any case."""

RESOURCE: Final = "trackway.resource"
"""JSON of a span's resource; on the root, and where it differs from the root's."""
ROOT_EXCEPTION: Final = "trackway.exception"
"""Name of the root's exception event: as ``exception`` it would hide the conversation on MLflow's page."""

_TYPES = {"trajectory": "AGENT", "rollout": "AGENT", "llm": "CHAT_MODEL", "tool": "TOOL", "other": "UNKNOWN"}
_NO_RESOURCE = Resource.get_empty()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@dataclass(frozen=True, slots=True)
class Reward:
    """One feedback of a trace.

    Attributes:
        id: made of the trace and the name, so that sending again updates.
        value: None where the reward is not a finite number; ``error`` then says what it is.
    """

    id: str
    name: str
    value: float | str | None
    error: str | None
    rationale: str | None


@dataclass(frozen=True, slots=True)
class TracePayload:
    """One trace as MLflow gets it.

    Attributes:
        trace_id: ``tr-`` and the OpenTelemetry trace id.
        otel_trace_id: the id of the trajectory.
        state: ``OK`` or ``ERROR``.
        start_ms: milliseconds since 1970.
        metadata: values that MLflow never changes: the run, the session, the token usage.
        size: characters in the attributes of all spans.
    """

    trace_id: str
    otel_trace_id: str
    state: str
    start_ms: int
    duration_ms: int
    tags: Mapping[str, str]
    metadata: Mapping[str, str]
    request_preview: str
    response_preview: str
    rewards: tuple[Reward, ...]
    run_id: str | None
    spans: tuple[ReadableSpan, ...]
    size: int


def payload_of(trajectory: model.Trajectory, experiment: str) -> TracePayload:
    """Make the trace of one trajectory.

    Args:
        experiment: name of the experiment of a trajectory that does not say its own.

    Raises:
        ValueError: the trajectory has no spans, or ids that are not those of OpenTelemetry.
    """
    if not trajectory.spans:
        raise ValueError("the trajectory has no spans")
    trajectory = _with_root(trajectory)
    chat = chat_of(trajectory.turns)
    usage = {span.span_id: _usage(span) for span in trajectory.spans if span.kind == "llm"}
    spans = tuple(_spans(trajectory, chat, usage))
    end_ns = trajectory.end_ns or _last_moment(trajectory.spans)
    metadata = {"mlflow.trace.tokenUsage": dumps(_total(trajectory.spans, usage))} if usage else {}
    session = session_id(trajectory.key)
    if session:
        metadata["mlflow.trace.session"] = session
    if trajectory.run_id:
        metadata["mlflow.sourceRun"] = _name(trajectory.run_id)
    return TracePayload(
        trace_id=f"tr-{trajectory.trace_id}",
        otel_trace_id=trajectory.trace_id,
        state="OK" if trajectory.status == "ok" else "ERROR",
        start_ms=trajectory.start_ns // 1_000_000,
        duration_ms=max(0, end_ns - trajectory.start_ns) // 1_000_000,
        tags=_tags(trajectory, trajectory.experiment or experiment),
        metadata=metadata,
        request_preview=_request_preview(trajectory, chat),
        response_preview=_response_preview(trajectory, chat),
        rewards=tuple(_rewards(trajectory)),
        run_id=trajectory.run_id,
        spans=spans,
        size=sum(len(str(value)) for span in spans for value in (span.attributes or {}).values()),
    )


def session_id(key: model.TrajectoryKey | None) -> str | None:
    """Name the group of a rollout: ``1:17``, for validation ``val:1:17``; None when it has no name.

    MLflow's page finds no session whose id holds a slash, ``#`` or ``?``, so what is special in a sample
    id is written as ``~`` and two hex digits.
    """
    if key is None or (key.step is None and key.sample_index is None):
        return None
    sample = str(model.TrajectoryKey(step=None, sample_index=key.sample_index)).split("/")[1]
    sample = sample.replace("~", "~7E").replace("%", "~")
    step = "-" if key.step is None else key.step
    return _name(f"{'val:' if key.validate else ''}{step}:{sample}")


def _name(text: str) -> str:
    """Keep a name within MLflow's limit and different from every other one."""
    text = clean(text)
    if len(text) <= NAME_LIMIT:
        return text
    return f"{text[: NAME_LIMIT - 18]}--{_digest(text, 8)}"


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()


def _with_root(trajectory: model.Trajectory) -> model.Trajectory:
    """Put a root into a trajectory whose own one was never recorded, because its process died in it.

    It gets the id that the spans name as their parent, so the real one replaces it should it still come.
    """
    first = trajectory.spans[0]
    if any(span.parent_id is None for span in trajectory.spans):
        return trajectory
    root = model.Span(
        name="unrecorded rollout",
        kind="trajectory",
        trace_id=trajectory.trace_id,
        span_id=first.parent_id or "",
        parent_id=None,
        start_ns=trajectory.start_ns,
        end_ns=_last_moment(trajectory.spans),
        status=trajectory.status,
        error=trajectory.error,
        resource=first.resource,
    )
    return replace(trajectory, spans=(root, *trajectory.spans))


def _last_moment(spans: Iterable[model.Span]) -> int:
    return max(span.end_ns if span.end_ns is not None else span.start_ns for span in spans)


# Tags, previews, rewards


def _tags(trajectory: model.Trajectory, experiment: str) -> dict[str, str]:
    rollouts = (span.name for span in trajectory.spans if span.kind == "rollout")
    tags = {
        "mlflow.traceName": _name(next(rollouts, trajectory.spans[0].name)),
        "status": trajectory.status,
        "experiment_name": experiment,
    }
    key = trajectory.key
    if key is not None:
        if key.step is not None:
            tags["step"] = str(key.step)
        if key.sample_index is not None:
            tags["sample_index"] = str(key.sample_index)
        tags["rollout_n"] = str(key.rollout_n)
        tags["attempt"] = str(key.attempt)
        tags["validate"] = str(key.validate)
    if trajectory.policy_versions:
        tags["policy_version"] = ",".join(map(str, trajectory.policy_versions))
    return {name: cut(value, TAG_LIMIT - 100) for name, value in tags.items()}


def _request_preview(trajectory: model.Trajectory, chat: Chat) -> str:
    texts = [_text(message) for message in chat.messages[: chat.given] if message["role"] == "user"]
    if not texts:
        inputs = trajectory.spans[0].inputs
        texts = [inputs if isinstance(inputs, str) else "" if inputs is None else dumps(inputs)]
    return _preview(texts[-1])


def _response_preview(trajectory: model.Trajectory, chat: Chat) -> str:
    texts = [_text(message) for message in chat.messages[chat.given :] if message["role"] == "assistant"]
    outputs = trajectory.spans[0].outputs
    text = next((text for text in reversed(texts) if text), "")
    if not texts and outputs is not None:
        text = outputs if isinstance(outputs, str) else dumps(outputs)
    if trajectory.status != "ok":
        reason = f"{trajectory.status}: {trajectory.error}" if trajectory.error else trajectory.status
        text = f"⟨{reason}⟩ {text}".rstrip()
    return _preview(text)


def _preview(text: str) -> str:
    text = clean(text)
    return text if len(text) <= PREVIEW_LIMIT else f"{text[: PREVIEW_LIMIT - 1]}…"


def _text(message: Message) -> str:
    content = message.get("content", "")
    if content or "tool_calls" not in message:
        return str(content)
    calls = (call["function"] for call in message["tool_calls"])
    return ", ".join(f"{call['name']}({call['arguments']})" for call in calls)


def _rewards(trajectory: model.Trajectory) -> Iterator[Reward]:
    values = dict(trajectory.rewards)
    if "reward" not in values and trajectory.reward is not None:
        values["reward"] = trajectory.reward
    reasons = {
        event.attributes.get(semconv.EVALUATION_NAME): event.attributes.get(semconv.EVALUATION_EXPLANATION)
        for span in trajectory.spans
        for event in span.events
        if event.name == semconv.EVALUATION_EVENT
    }
    for name, value in values.items():
        reason = reasons.get(name)
        # A NaN in JSON breaks the page, and no database column takes it.
        odd = isinstance(value, float) and not math.isfinite(value)
        yield Reward(
            id=f"a-{_digest(f'{trajectory.trace_id} {name}', 16)}",
            name=_name(name) or "⟨no name⟩",
            value=None if odd else cut(value) if isinstance(value, str) else value,
            error=f"the reward is {value}" if odd else None,
            rationale=cut(str(reason)) if reason else None,
        )


# Spans


def _spans(
    trajectory: model.Trajectory, chat: Chat, usage: Mapping[str, Mapping[str, int]]
) -> Iterator[ReadableSpan]:
    trace_id = int(trajectory.trace_id, 16)
    root = trajectory.spans[0]
    last = _last_moment(trajectory.spans)
    context_limit = min(CHAT_LIMIT, max(MIN_CONTEXT, CONTEXTS_LIMIT // max(1, len(usage))))
    calls = {call.span_id: call for call in trajectory.tool_calls if call.span_id is not None}
    for span in trajectory.spans:
        call = calls.get(span.span_id)
        attributes = dict(_recorded_attributes(span))
        attributes["mlflow.traceRequestId"] = dumps(f"tr-{trajectory.trace_id}")
        attributes["mlflow.spanType"] = dumps(_TYPES[span.kind])
        name = span.name
        if span is root:
            inputs, outputs = _root_content(trajectory, chat)
        elif span.kind == "llm":
            inputs, outputs = _generation_content(span, chat, context_limit)
        elif span.kind == "tool":
            name = str(span.attributes.get(semconv.TOOL_NAME) or (call.name if call else span.name))
            inputs, outputs = _tool_content(span, call)
        else:
            inputs, outputs = span.inputs, span.outputs
        if span.kind == "llm":
            attributes["mlflow.chat.tokenUsage"] = dumps(usage[span.span_id])
            if span.attributes.get(semconv.REQUEST_MODEL):
                attributes["mlflow.llm.model"] = dumps(str(span.attributes[semconv.REQUEST_MODEL]))
        if inputs is not None:
            attributes["mlflow.spanInputs"] = _content(inputs)
        if outputs is not None:
            attributes["mlflow.spanOutputs"] = _content(outputs)
        if span.resource and (span is root or span.resource != root.resource):
            attributes[RESOURCE] = dumps(dict(span.resource))
        # MLflow takes a trace for finished, and for good, when its root has no end.
        end_ns = span.end_ns if span.end_ns is not None else last
        status, error = (trajectory.status, trajectory.error) if span is root else (span.status, span.error)
        yield ReadableSpan(
            name=_name(name),
            context=_context(trace_id, span.span_id),
            parent=None if span.parent_id is None else _context(trace_id, span.parent_id),
            resource=_NO_RESOURCE,
            attributes=attributes,
            events=tuple(_events(span, end_ns, span is root)),
            status=Status(StatusCode.OK)
            if status == "ok"
            else Status(StatusCode.ERROR, clean(error or status)),
            start_time=span.start_ns,
            end_time=end_ns,
        )


def _context(trace_id: int, span_id: str) -> SpanContext:
    context = SpanContext(trace_id, int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)
    if not context.is_valid:
        raise ValueError(f"{trace_id:x}/{span_id} are not a trace id of 32 and a span id of 16 hex digits")
    return context


def _root_content(trajectory: model.Trajectory, chat: Chat) -> tuple[Any, Any]:
    root = trajectory.spans[0]
    inputs = root.inputs
    outputs: dict[str, Any] = {}
    if chat.messages:
        # The page leaves out what inputs and outputs begin with alike, and so shows each message once.
        inputs = {"messages": fit(chat.messages[: chat.given])}
        outputs["messages"] = fit(chat.messages)
    elif root.outputs is not None:
        outputs["result"] = root.outputs
    reasons = [turn.finish_reason for turn in trajectory.turns if turn.finish_reason]
    extras = {
        "error": trajectory.error,
        "reward": _shown(trajectory.reward),
        "rewards": {name: _shown(value) for name, value in trajectory.rewards.items() if name != "reward"},
        "status": trajectory.status,
        "termination": reasons[-1] if reasons else None,
        "num_turns": len(trajectory.turns) or None,
        "annotations": dict(trajectory.annotations),
        "notes": list(trajectory.notes),
    }
    return inputs, outputs | {name: value for name, value in extras.items() if value not in (None, {}, [])}


def _shown(value: float | str | None) -> float | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _generation_content(span: model.Span, chat: Chat, limit: int) -> tuple[Any, Any]:
    arguments = dict(span.inputs) if isinstance(span.inputs, Mapping) else {}
    arguments.pop("messages", None)
    index = chat.generations.get(span.span_id)
    prompt: Sequence[Message] | None = recorded_messages(span.inputs)
    answer: Message | None = None
    reason = None
    if index is not None:
        prompt = prompt or chat.messages[:index]
        answer = chat.messages[index]
        reason = chat.finish_reasons.get(index)
    elif span.response_text is not None:
        answer = {"role": "assistant", "content": cut(span.response_text)}
    if not prompt and span.prompt_text is not None:
        prompt = [{"role": "user", "content": cut(span.prompt_text)}]
    inputs = {"messages": fit(prompt, limit), **arguments} if prompt else span.inputs
    if answer is None or (span.status != "ok" and not _text(answer)):
        return inputs, span.outputs
    choice = {"index": 0, "message": answer} | ({"finish_reason": reason} if reason else {})
    return inputs, {"choices": [choice]}


def _tool_content(span: model.Span, call: model.ToolCall | None) -> tuple[Any, Any]:
    arguments = call.arguments if call is not None and call.arguments is not None else span.inputs
    if arguments is not None and not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}
    return arguments, call.result if call is not None and call.result is not None else span.outputs


def _content(value: Any) -> str:
    """Encode inputs or outputs; structure that is too large for the page becomes its text, cut."""
    if isinstance(value, str):
        return dumps(cut(value))
    text = dumps(value)
    if len(text) <= TEXT_LIMIT:
        return text
    if isinstance(value, Mapping) and ("messages" in value or "choices" in value):
        parts = (
            f"{dumps(str(name))}:{dumps(item) if name in ('messages', 'choices') else _content(item)}"
            for name, item in value.items()
        )
        return f"{{{','.join(parts)}}}"
    return dumps({"text": cut(text)})


def _recorded_attributes(span: model.Span) -> Iterator[tuple[str, str]]:
    for name, value in span.attributes.items():
        if name.startswith(("mlflow.", "session.", "user.")) and name != semconv.RUN_ID:
            continue
        if isinstance(value, bytes):
            value = base64.b64encode(value).decode()
        if isinstance(value, str):
            if len(value) > ATTRIBUTE_LIMIT:
                value = cut(value, TEXT_LIMIT)
            text = dumps(clean(value))
            # MLflow's store parses a text that is JSON and keeps the value; once more, and it stays text.
            yield clean(name), dumps(text) if value.lstrip()[:1] in ("{", "[", '"') else text
        else:
            yield clean(name), dumps(value)


def _events(span: model.Span, end_ns: int, is_root: bool) -> Iterator[Event]:
    raised = False
    for event in span.events:
        name = event.name
        if name == semconv.EXCEPTION_EVENT:
            raised = True
            name = ROOT_EXCEPTION if is_root else name
        attributes = {clean(key): _event_value(value) for key, value in event.attributes.items()}
        yield Event(clean(name), attributes, event.time_ns)
    if span.status != "ok" and not raised and not is_root:
        # Without an event, the page shows nowhere why a span failed.
        reason = {
            semconv.EXCEPTION_TYPE: span.status,
            semconv.EXCEPTION_MESSAGE: cut(span.error or span.status),
        }
        yield Event(semconv.EXCEPTION_EVENT, reason, end_ns)


def _event_value(value: Any) -> Any:
    if isinstance(value, str):
        return cut(value)
    return value if isinstance(value, int) else orjson.loads(dumps(value))


def _usage(span: model.Span) -> dict[str, int]:
    given = span.attributes.get(semconv.INPUT_TOKENS)
    made = span.attributes.get(semconv.OUTPUT_TOKENS)
    input_tokens = given if isinstance(given, int) else len(span.prompt_ids or ())
    output_tokens = made if isinstance(made, int) else len(span.response_ids or ())
    return {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
    }


def _total(spans: Sequence[model.Span], usage: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Add up what the generations used; one inside another is counted with the outer one."""
    parents = {span.span_id: span.parent_id for span in spans}
    total = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    for span_id, used in usage.items():
        above = parents[span_id]
        while above is not None and above not in usage:
            above = parents.get(above)
        if above is None:
            for name in total:
                total[name] += used[name]
    return total
