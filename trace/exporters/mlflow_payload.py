"""What one trajectory becomes in MLflow: a trace with its tags, rewards and spans, ready to be written.

Nothing here imports MLflow.

Tags keep the names and the values that verl's own tracing gives them, so ``validate`` is ``True`` or
``False``, capitalised, as every saved search of verl's users has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan

from .. import model, semconv
from ..capture.snapshot import clean
from ..store.assemble import evaluations
from .chat import Chat, chat_of, text_of
from .content import is_away, last_moment, rooted, total_usage
from .mlflow_fold import fold
from .mlflow_spans import spans_of
from .mlflow_summary import summary_metadata
from .sizes import bytes_in
from .text import cut, digest, dumps, elsewhere, pointing_to, short_name

TAG_LIMIT: Final = 4096
"""Characters of a tag that every database behind MLflow keeps (``MAX_CHARS_IN_TRACE_INFO_TAGS_VALUE``)."""
PREVIEW_LIMIT: Final = 1000
"""Characters of a preview that every database behind MLflow takes."""
FOLDED: Final = "folded"
"""Tag of a trace that lacks spans: how many of how many."""
_LONGEST_KEY: Final = 100
"""Characters of a key that a pointer can hold; a longer one gives way to the trace id."""
_METADATA_LIMIT: Final = 150
LATER_TAGS: Final = ("trained_step", "discarded")
"""Tags that a trainer's word gives, which it may also take back."""


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
        metadata: values that nobody changes in MLflow: the summary, the run, the session, the token usage.
        size: bytes of the names, attributes and events of all spans.
        away: whether only its spans and rewards are to be written, since another machine writes the rest.
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
    away: bool


def payload_of(trajectory: model.Trajectory, experiment: str, store: Path | None = None) -> TracePayload:
    """Make the trace of one trajectory.

    Args:
        experiment: name of the experiment of a trajectory that does not say its own.
        store: folder of the store that has all of it, where there is one.

    Raises:
        ValueError: the trajectory has no spans, or ids that are not those of OpenTelemetry.
    """
    if not trajectory.spans:
        raise ValueError("the trajectory has no spans")
    with pointing_to(f"trackway show {_name(trajectory)} --full") if store else nullcontext():
        return _payload(trajectory, experiment, store)


def _name(trajectory: model.Trajectory) -> str:
    """Name a trajectory as ``trackway show`` takes it; it needs no quotes in a shell."""
    return trajectory.name if len(trajectory.name) <= _LONGEST_KEY else trajectory.trace_id


def _payload(trajectory: model.Trajectory, experiment: str, store: Path | None) -> TracePayload:
    rewards = tuple(_rewards(trajectory))
    recorded, trajectory = trajectory, rooted(trajectory)
    chat = chat_of(trajectory.turns)
    folded = fold(trajectory)
    all_spans = (
        f"`trackway show {_name(trajectory)} --json` has them" if store else "the Trackway store has them"
    )
    left_out = {span_id: f"{note} are left out here; {all_spans}" for span_id, note in folded.notes.items()}
    tags = _tags(trajectory, trajectory.experiment or experiment)
    if folded.count:
        tags[FOLDED] = f"{folded.count} of {len(trajectory.spans)} spans"
        root = trajectory.spans[0].span_id
        note = f"; directly below: {folded.notes[root]}" if root in folded.notes else ""
        left_out[root] = (
            f"{tags[FOLDED]} are left out here; {all_spans}; the spans around them say what they were{note}"
        )
    spans = tuple(spans_of(folded.trajectory, chat, left_out))
    end_ns = trajectory.end_ns or last_moment(trajectory.spans)
    size = bytes_in(spans)
    metadata = summary_metadata(recorded, size)
    usage = total_usage(trajectory.spans)
    if usage is not None:
        metadata["mlflow.trace.tokenUsage"] = dumps(usage)
    session = session_id(trajectory.key)
    if session:
        metadata["mlflow.trace.session"] = session
    if store is not None:
        metadata["trackway.store"] = cut(str(store.absolute()), _METADATA_LIMIT)
        metadata["trackway.key"] = _name(trajectory)
    run_id = None
    if trajectory.run_id:
        # A server answers a NUL with an error that MLflow's client goes on trying against for minutes.
        run_id = metadata["mlflow.sourceRun"] = short_name(trajectory.run_id)
    return TracePayload(
        trace_id=f"tr-{trajectory.trace_id}",
        otel_trace_id=trajectory.trace_id,
        state="OK" if trajectory.status == "ok" else "ERROR",
        start_ms=trajectory.start_ns // 1_000_000,
        duration_ms=max(0, end_ns - trajectory.start_ns) // 1_000_000,
        tags=tags,
        metadata=metadata,
        request_preview=_request_preview(trajectory, chat),
        response_preview=_response_preview(trajectory, chat),
        rewards=rewards,
        run_id=run_id,
        spans=spans,
        size=size,
        away=is_away(recorded),
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
    return short_name(f"{'val:' if key.validate else ''}{step}:{sample}")


def _tags(trajectory: model.Trajectory, experiment: str) -> dict[str, str]:
    rollouts = (span.name for span in trajectory.spans if span.kind == "rollout")
    tags = {
        "mlflow.traceName": short_name(next(rollouts, trajectory.spans[0].name)),
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
    if trajectory.trained_step is not None:
        tags["trained_step"] = str(trajectory.trained_step)
    if trajectory.discarded is not None:
        tags["discarded"] = trajectory.discarded
    return {name: _tag(value) for name, value in tags.items()}


def _tag(value: str) -> str:
    value = clean(value)
    room = TAG_LIMIT - 40 - len(elsewhere())  # what stands around those words in a mark is no longer than 40
    return value if len(value) <= TAG_LIMIT else cut(value, room)


def _request_preview(trajectory: model.Trajectory, chat: Chat) -> str:
    texts = [text_of(message) for message in chat.messages[: chat.given] if message["role"] == "user"]
    if not texts:
        inputs = trajectory.spans[0].inputs
        texts = [inputs if isinstance(inputs, str) else "" if inputs is None else dumps(inputs)]
    return _preview(texts[-1])


def _response_preview(trajectory: model.Trajectory, chat: Chat) -> str:
    texts = [text_of(message) for message in chat.messages[chat.given :] if message["role"] == "assistant"]
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


def _rewards(trajectory: model.Trajectory) -> Iterator[Reward]:
    values = dict(trajectory.rewards)
    # The total of a part would be none of the rollout's.
    if "reward" not in values and trajectory.reward is not None and not is_away(trajectory):
        values["reward"] = trajectory.reward
    reasons = {
        event.attributes.get(semconv.EVALUATION_NAME): event.attributes.get(semconv.EVALUATION_EXPLANATION)
        for event in evaluations(trajectory.spans)
    }
    for name, value in values.items():
        reason = reasons.get(name)
        # A NaN in JSON breaks the page, and no database column takes it.
        odd = isinstance(value, float) and not math.isfinite(value)
        yield Reward(
            id=f"a-{digest(f'{trajectory.trace_id} {name}', 16)}",
            name=feedback_name(name),
            value=None if odd else cut(value) if isinstance(value, str) else value,
            error=f"the reward is {value}" if odd else None,
            rationale=cut(str(reason)) if reason else None,
        )


def feedback_name(reward: str) -> str:
    """Name the feedback that a reward becomes."""
    return short_name(reward) or "⟨no name⟩"
