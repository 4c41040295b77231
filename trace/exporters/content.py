"""What each span of a trajectory shows at a destination: its name, what went in, what came out, its tokens.

The chat is laid out in the message format of OpenAI, which MLflow and Weave draw as a conversation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from .. import model, semconv
from .chat import CHAT_LIMIT, MESSAGES_LIMIT, Chat, Message, fit, recorded_messages, text_of
from .text import cut

CONTEXTS_LIMIT: Final = 4_000_000
"""Most characters that the prompts of all generations of a trajectory may fill together."""
MIN_CONTEXT: Final = 20_000
"""Characters that each of these prompts may fill in any case."""
CONTEXTS_MESSAGES: Final = 10_000
"""Most messages that these prompts may show together: a page reads them all before it draws any."""
MIN_MESSAGES: Final = 20
"""Messages that each of these prompts may show in any case."""


@dataclass(frozen=True, slots=True)
class Content:
    """What one span shows.

    Attributes:
        name: the name of the span, of a tool call that of the tool.
        inputs: of a generation ``{"messages": [...]}`` and its other arguments, of a tool its arguments;
            None when nothing was recorded.
        outputs: of a generation ``{"choices": [...]}``, of the root the whole conversation and what is
            known of the rollout; None when nothing was recorded.
        usage: tokens of a generation: ``input_tokens``, ``output_tokens``, ``total_tokens``; else None.
        status, error: of the span, for the root those of the trajectory.
        end_ns: in nanoseconds since 1970; of a span that never ended the last moment that the trajectory
            tells, since destinations take a trace whose root has no end for finished, or for running.
    """

    span: model.Span
    name: str
    inputs: Any
    outputs: Any
    usage: Mapping[str, int] | None
    status: model.Status
    error: str | None
    end_ns: int


def contents_of(trajectory: model.Trajectory, chat: Chat) -> Iterator[Content]:
    """Give what each span of a trajectory shows.

    Args:
        trajectory: as ``rooted`` gives it.
        chat: of its turns.
    """
    root = trajectory.spans[0]
    last = last_moment(trajectory.spans)
    generations = sum(span.kind == "llm" for span in trajectory.spans) or 1
    limit = min(CHAT_LIMIT, max(MIN_CONTEXT, CONTEXTS_LIMIT // generations))
    most = min(MESSAGES_LIMIT, max(MIN_MESSAGES, CONTEXTS_MESSAGES // generations))
    calls = {call.span_id: call for call in trajectory.tool_calls if call.span_id is not None}
    for span in trajectory.spans:
        name, usage = span.name, None
        if span is root and semconv.AWAY in span.attributes:
            continue  # it is sent from where it was recorded
        if span is root:
            inputs, outputs = _root_content(trajectory, chat)
        elif span.kind == "llm":
            inputs, outputs = _generation_content(span, chat, limit, most)
        elif span.kind == "tool":
            call = calls.get(span.span_id)
            name = str(span.attributes.get(semconv.TOOL_NAME) or (call.name if call else span.name))
            inputs, outputs = _tool_content(span, call)
        else:
            inputs, outputs = span.inputs, span.outputs
        if span.kind == "llm":
            usage = _usage(span)
        status, error = (trajectory.status, trajectory.error) if span is root else (span.status, span.error)
        end_ns = last if span.end_ns is None else span.end_ns
        yield Content(span, name, inputs, outputs, usage, status, error, end_ns)


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
    # In this order: the page where trajectories are compared shows the last three at first.
    extras = {
        "annotations": dict(trajectory.annotations),
        "notes": list(trajectory.notes),
        "attached": {name: _shown(mean) for name, mean in trajectory.attached.items()},
        "trained_step": trajectory.trained_step,
        "discarded": trajectory.discarded,
        "num_turns": len(trajectory.turns) or None,
        "status": trajectory.status,
        "termination": reasons[-1] if reasons else None,
        "error": trajectory.error,
        "rewards": {name: _shown(value) for name, value in trajectory.rewards.items() if name != "reward"},
        "reward": _shown(trajectory.reward),
    }
    return inputs, outputs | {name: value for name, value in extras.items() if value not in (None, {}, [])}


def _shown(value: float | str | None) -> float | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _generation_content(span: model.Span, chat: Chat, limit: int, most: int) -> tuple[Any, Any]:
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
    inputs = {"messages": fit(prompt, limit, most), **arguments} if prompt else span.inputs
    if answer is None or (span.status != "ok" and not text_of(answer)):
        return inputs, span.outputs
    choice = {"index": 0, "message": answer} | ({"finish_reason": reason} if reason else {})
    return inputs, {"choices": [choice]}


def _tool_content(span: model.Span, call: model.ToolCall | None) -> tuple[Any, Any]:
    arguments = call.arguments if call is not None and call.arguments is not None else span.inputs
    if arguments is not None and not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}
    return arguments, call.result if call is not None and call.result is not None else span.outputs


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


def total_usage(spans: Sequence[model.Span]) -> dict[str, int] | None:
    """Add up what the generations used, one inside another counted with the outer one; None without any."""
    by_id = {span.span_id: span for span in spans}
    total: dict[str, int] | None = None
    for span in spans:
        if span.kind != "llm":
            continue
        above = by_id.get(span.parent_id or "")
        passed: set[str] = set()  # parents in a circle would never end
        while above is not None and above.kind != "llm" and above.span_id not in passed:
            passed.add(above.span_id)
            above = by_id.get(above.parent_id or "")
        if above is None or above.kind != "llm":
            used = _usage(span)
            total = used if total is None else {name: total[name] + used[name] for name in used}
    return total


def last_moment(spans: Iterable[model.Span]) -> int:
    """Give the latest time that spans tell, in nanoseconds since 1970."""
    return max(span.end_ns if span.end_ns is not None else span.start_ns for span in spans)


def rooted(trajectory: model.Trajectory) -> model.Trajectory:
    """Give a trajectory as destinations show it: with a root as its first span, late facts upon it."""
    return _with_facts_on_root(_with_root(trajectory))


def is_away(trajectory: model.Trajectory) -> bool:
    """Say whether this is the part of a rollout that another machine has begun, and tells the rest of."""
    return all(span.parent_id is not None for span in trajectory.spans) and any(
        semconv.AWAY in span.attributes for span in trajectory.spans
    )


def _with_root(trajectory: model.Trajectory) -> model.Trajectory:
    """Put a root into a trajectory whose own one was never recorded, because its process died in it.

    It gets the id that the spans name as their parent, so the real one replaces it should it still come. Of a
    rollout that was begun on another machine it only stands for what is there, and is not shown.
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
        end_ns=last_moment(trajectory.spans),
        status=trajectory.status,
        error=trajectory.error,
        resource=first.resource,
        attributes={semconv.AWAY: True} if is_away(trajectory) else {},
    )
    return replace(trajectory, spans=(root, *trajectory.spans))


def _with_facts_on_root(trajectory: model.Trajectory) -> model.Trajectory:
    """Put what was attached on the root: as spans, hours later, they would fill the page's time axis."""
    facts = [span for span in trajectory.spans if span.kind == "attach"]
    if not facts:
        return trajectory
    root, *others = (span for span in trajectory.spans if span.kind != "attach")
    attributes = dict(root.attributes)
    for span in facts:
        attributes |= {name: value for name, value in span.attributes.items() if name in _FACTS}
    return replace(trajectory, spans=(replace(root, attributes=attributes), *others))


_FACTS = {
    semconv.ATTACHED_ADVANTAGES,
    semconv.ATTACHED_RETURNS,
    semconv.ATTACHED_LOGPROBS,
    semconv.ATTACHED_MASK,
    semconv.TRAINED_STEP,
    semconv.DISCARDED,
}
