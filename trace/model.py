"""The values that everybody passes around: keys, turns, tool calls, spans, trajectories."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote, unquote

from . import semconv

Status = Literal["ok", "error", "cancelled", "running", "died"]
Kind = Literal["trajectory", "rollout", "llm", "tool", "attach", "other"]
Role = Literal["system", "user", "assistant", "tool"]
Side = Literal["internal", "server", "client", "producer", "consumer"]
"""Which end of a call a span is, as OpenTelemetry has it."""

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_ATTACHED = {
    "advantages": semconv.ATTACHED_ADVANTAGES,
    "returns": semconv.ATTACHED_RETURNS,
    "trainer_logprobs": semconv.ATTACHED_LOGPROBS,
}


@dataclass(frozen=True, slots=True)
class TrajectoryKey:
    """Names one rollout.

    Its text is ``step/sample/rollout``: ``1/17/0``; a validation rollout is ``val/1/17/0``, a later
    attempt ``1/17/0@1``. Odd characters of a sample id are percent-encoded; so is the first character
    of a string that would read as an integer, so that ``17`` and ``"17"`` stay two samples. What is
    not known is ``-``.
    """

    step: int | None
    sample_index: int | str | None
    rollout_n: int = 0
    validate: bool = False
    attempt: int = 0

    def __str__(self) -> str:
        sample = self.sample_index
        if sample is None:
            text = "-"
        elif isinstance(sample, int):
            text = str(sample)
        else:
            text = quote(sample, safe="", errors="surrogatepass")
            if not text or text == "-" or _INTEGER.fullmatch(text):
                text = "".join(f"%{byte:02X}" for byte in sample[:1].encode()) + text[1:] if text else "%"
        step = "-" if self.step is None else str(self.step)
        attempt = f"@{self.attempt}" if self.attempt else ""
        return f"{'val/' if self.validate else ''}{step}/{text}/{self.rollout_n}{attempt}"

    @classmethod
    def parse(cls, text: str) -> TrajectoryKey:
        """Read a key back from its text.

        Raises:
            ValueError: the text is not a key; the message says what a key looks like.
        """
        body, _, attempt = text.strip().partition("@")
        parts = body.split("/")
        validate = len(parts) == 4 and parts[0] == "val"
        if validate:
            parts = parts[1:]
        try:
            if len(parts) != 3:
                raise ValueError
            step, sample, rollout = parts
            return cls(
                step=None if step == "-" else int(step),
                sample_index=_parse_sample(sample),
                rollout_n=int(rollout),
                validate=validate,
                attempt=int(attempt) if attempt else 0,
            )
        except ValueError:
            raise ValueError(
                f"{text!r} is not a trajectory key; a key is step/sample/rollout, for instance 1/17/0, "
                "val/1/17/0 for validation, 1/17/0@1 for a later attempt"
            ) from None


def _parse_sample(text: str) -> int | str | None:
    if text == "-":
        return None
    if text == "%":
        return ""
    if _INTEGER.fullmatch(text):
        return int(text)
    return unquote(text, errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at one moment of a span."""

    name: str
    time_ns: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Link:
    """A span, of this trace or another one, that a span refers to."""

    trace_id: str
    span_id: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """One recorded call.

    Attributes:
        inputs: the arguments by name, as plain JSON values; token sequences are taken out.
        outputs: the result, likewise.
        attributes: everything on the span under its wire name (see ``semconv``).
        prompt_ids, response_ids: whole sequences, whatever the journal stores; None when not recorded.
        incomplete: the journal lacks a span that holds the beginning of a sequence, a conversation or a
            text; it is then missing here.
        side: OpenTelemetry's kind of the span.
    """

    name: str
    kind: Kind
    trace_id: str
    span_id: str
    parent_id: str | None
    start_ns: int
    end_ns: int | None
    status: Status
    error: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    resource: Mapping[str, Any] = field(default_factory=dict)
    inputs: Any = None
    outputs: Any = None
    prompt_ids: tuple[int, ...] | None = None
    response_ids: tuple[int, ...] | None = None
    response_mask: tuple[int, ...] | None = None
    response_logprobs: tuple[float, ...] | None = None
    prompt_text: str | None = None
    response_text: str | None = None
    incomplete: bool = False
    links: tuple[Link, ...] = ()
    side: Side = "internal"

    @property
    def duration_ns(self) -> int | None:
        """Nanoseconds from start to end; None while the span is open."""
        return None if self.end_ns is None else self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, asked for by the turn that holds it.

    Attributes:
        arguments: parsed where they were JSON, else the text.
        result: what the tool gave back, as text; None when it did not return.
    """

    name: str
    arguments: Any = None
    result: str | None = None
    error: str | None = None
    call_id: str | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    span_id: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation, or one reply of a tool, the environment or the user.

    Attributes:
        token_ids: the tokens that this turn added to the sequence.
        mask: one 0 or 1 for each of ``token_ids``: 1 is trained on; empty when not recorded. The one that
            a trainer attached is what was trained, and stands in place of the recorded one.
        logprobs: natural log probability of each of ``token_ids``; empty when not recorded.
        advantages, returns, trainer_logprobs: what a trainer attached to each of ``token_ids``, NaN where
            that is nothing; empty when nothing of it belongs to this turn.
        prompt_ids: for a generation, the whole prompt it was given.
        tool_calls: for a generation, the tools that were called after it.
        text: what was said; of a tool's reply, what the model saw of it.
        name: for a tool's reply, the tool.
        call_id: for a tool's reply, the id of the call it answers, where there are ids.
    """

    index: int
    role: Role
    text: str = ""
    token_ids: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    call_id: str | None = None
    error: str | None = None
    finish_reason: str | None = None
    policy_version: int | str | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    span_id: str | None = None
    advantages: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()
    trainer_logprobs: tuple[float, ...] = ()

    @property
    def trained(self) -> tuple[int, ...]:
        """The mask; where none was recorded, what was generated is trained on and all else is not."""
        return self.mask or (int(self.role == "assistant"),) * len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What one rollout left behind.

    Attributes:
        key: None when no ``trajectory(...)`` named the rollout; ``trace_id`` always identifies it.
        status: ``ok``, ``error``, ``cancelled``, ``running`` (still open), ``died`` (its process ended).
        rewards: by name, in the order given; the value of a reward that is not a number is its text.
        annotations: what ``annotate`` added.
        spans: in order of their start; the first is the root where it is known, and those of ``attach``
            stand at the end.
        run_id: the MLflow run that it is linked to.
        run: the run whose metrics a ``Tracker`` logged meanwhile in the same process.
        trained_step: the trainer's step that consumed it, where one said so.
        discarded: why it was not trained on; None when nobody said that it was not.
    """

    key: TrajectoryKey | None
    trace_id: str
    status: Status
    error: str | None
    start_ns: int
    end_ns: int | None
    spans: tuple[Span, ...]
    turns: tuple[Turn, ...]
    rewards: Mapping[str, float | str]
    annotations: Mapping[str, Any]
    policy_versions: tuple[int | str, ...]
    project: str | None = None
    experiment: str | None = None
    run_id: str | None = None
    run: str | None = None
    notes: tuple[str, ...] = ()
    trained_step: int | None = None
    discarded: str | None = None

    @property
    def name(self) -> str:
        """The key as text, or the trace id."""
        return str(self.key) if self.key else self.trace_id

    @property
    def root(self) -> Span | None:
        """The span without a recorded parent that started first; None when there are no spans."""
        return self.spans[0] if self.spans else None

    @property
    def reward(self) -> float | None:
        """The reward called ``reward``, else the sum of all numeric ones; None when there is none."""
        numbers = {name: value for name, value in self.rewards.items() if not isinstance(value, str)}
        if "reward" in numbers:
            return numbers["reward"]
        return sum(numbers.values()) if numbers else None

    @property
    def generations(self) -> int:
        """Number of assistant turns."""
        return sum(turn.role == "assistant" for turn in self.turns)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """All tool calls, in order."""
        return tuple(call for turn in self.turns for call in turn.tool_calls)

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first generation; as the engine reported them where no ids were recorded."""
        if not any(turn.token_ids for turn in self.turns):
            return self._reported(0)[0]
        count = 0
        for turn in self.turns:
            if turn.role == "assistant":
                break
            count += len(turn.token_ids)
        return count

    @property
    def tokens(self) -> int:
        """Tokens of the whole trajectory, each counted once; as reported where no ids were recorded."""
        return sum(len(turn.token_ids) for turn in self.turns) or sum(self._reported(-1))

    def _reported(self, place: int) -> tuple[int, int]:
        """Give the prompt and response tokens that the engine reported of one of the generations."""
        spans = [span.attributes for span in self.spans if semconv.INPUT_TOKENS in span.attributes]
        if not spans:
            return 0, 0
        return spans[place][semconv.INPUT_TOKENS], spans[place].get(semconv.OUTPUT_TOKENS, 0)

    @property
    def errors(self) -> int:
        """Number of spans in which an error arose; those that it only passed through are not counted."""
        failed = [span for span in self.spans if span.status in ("error", "died")]
        passed_on = {(span.parent_id, span.error) for span in failed}
        return sum((span.span_id, span.error) not in passed_on for span in failed)

    @property
    def attached(self) -> dict[str, float]:
        """Means over the trained tokens of ``advantages``, ``returns`` and ``trainer_logprobs``, as attached.

        One number for all tokens is its own mean, also where no token ids were recorded.
        """
        means = {}
        for name, attribute in _ATTACHED.items():
            values = [
                value
                for turn in self.turns
                for value, trained in zip(getattr(turn, name), turn.trained, strict=False)
                if trained
            ]
            given = [span.attributes.get(attribute) for span in self.spans]
            given = [value for value in given if isinstance(value, (bytes, float))]
            if given and isinstance(given[-1], float):
                means[name] = given[-1]
            elif values:
                means[name] = sum(values) / len(values)
        return means

    def walk(self) -> Iterator[tuple[int, Span]]:
        """Give every span with its depth, parents before children, siblings in order of their start."""
        known = {span.span_id for span in self.spans}
        children: dict[str | None, list[Span]] = {}
        for span in self.spans:
            parent = span.parent_id if span.parent_id in known else None
            children.setdefault(parent, []).append(span)
        stack = [(0, span) for span in reversed(children.get(None, []))]
        while stack:
            depth, span = stack.pop()
            yield depth, span
            stack.extend((depth + 1, child) for child in reversed(children.get(span.span_id, [])))


@dataclass(frozen=True, slots=True)
class Summary:
    """One line about a trajectory, as the index keeps it."""

    key: TrajectoryKey | None
    trace_id: str
    status: Status
    step: int | None
    sample_index: int | str | None
    rollout_n: int
    attempt: int
    validate: bool
    reward: float | None
    rewards: Mapping[str, float | str]
    turns: int
    generations: int
    tool_calls: int
    tokens: int
    errors: int
    spans: int
    start_ns: int
    end_ns: int | None
    policy_version: int | str | None
    project: str | None
    experiment: str | None
    error: str | None = None
    trained_step: int | None = None
    discarded: str | None = None
    truncated: bool = False

    @property
    def name(self) -> str:
        """The key as text, or the trace id."""
        return str(self.key) if self.key else self.trace_id
