"""A trajectory as one row of the index, and back as the one line that lists show."""

from __future__ import annotations

import math
from typing import Any
from zlib import crc32

import orjson

from .. import semconv
from ..model import Summary, Trajectory, TrajectoryKey

COLUMNS = (
    "trace_id, named, step, sample_index, rollout_n, attempt, validate, status, error, reward, rewards, "
    "turns, generations, tool_calls, tokens, errors, spans, start_ns, end_ns, policy_version, project, "
    "experiment, trained_step, discarded, truncated, ended, state"
)
_AT_THE_LIMIT = ("length", "max_tokens")
"""What engines call the end of a generation that came to its length limit: OpenAI and vLLM, Anthropic."""


def summary_of(trajectory: Trajectory) -> Summary:
    """Give the one line about a trajectory."""
    key = trajectory.key
    return Summary(
        key=key,
        trace_id=trajectory.trace_id,
        status=trajectory.status,
        step=key.step if key else None,
        sample_index=key.sample_index if key else None,
        rollout_n=key.rollout_n if key else 0,
        attempt=key.attempt if key else 0,
        validate=bool(key and key.validate),
        reward=trajectory.reward,
        rewards=dict(trajectory.rewards),
        turns=len(trajectory.turns),
        generations=trajectory.generations,
        tool_calls=len(trajectory.tool_calls),
        tokens=trajectory.tokens,
        errors=trajectory.errors,
        spans=len(trajectory.spans),
        start_ns=trajectory.start_ns,
        end_ns=trajectory.end_ns,
        policy_version=trajectory.policy_versions[0] if trajectory.policy_versions else None,
        project=trajectory.project,
        experiment=trajectory.experiment,
        error=trajectory.error,
        trained_step=trajectory.trained_step,
        discarded=trajectory.discarded,
        truncated=any(turn.finish_reason in _AT_THE_LIMIT for turn in trajectory.turns),
    )


def row_of(trajectory: Trajectory) -> tuple[Any, ...]:
    """Give the values of ``COLUMNS``."""
    line = summary_of(trajectory)
    root = trajectory.root
    # Nobody here knows when a rollout ends that was begun on another machine: all of it that is here is due.
    complete = root is not None and (
        semconv.AWAY in root.attributes
        if root.parent_id is not None
        else root.end_ns is not None or semconv.EXPIRED in root.attributes
    )
    return (
        line.trace_id,
        line.key is not None,
        line.step,
        line.sample_index,
        line.rollout_n,
        line.attempt,
        line.validate,
        line.status,
        line.error,
        line.reward,
        orjson.dumps({name: _plain(value) for name, value in line.rewards.items()}).decode(),
        line.turns,
        line.generations,
        line.tool_calls,
        line.tokens,
        line.errors,
        line.spans,
        line.start_ns,
        line.end_ns,
        line.policy_version,
        line.project,
        line.experiment,
        line.trained_step,
        line.discarded,
        line.truncated,
        complete,
        _state(trajectory),
    )


def _state(trajectory: Trajectory) -> int:
    """Give a number that changes with what a trajectory consists of.

    Its lower half is the number of spans; the upper half is 0, unless some of them have not ended or were
    attached, so that neither an end that comes later nor facts that go elsewhere remain unseen.
    """
    special = [
        f"{span.span_id} {span.end_ns is None}"
        for span in trajectory.spans
        if span.end_ns is None or span.kind == "attach"
    ]
    mark = crc32(",".join(sorted(special)).encode()) & 0x7FFFFFFF
    return len(trajectory.spans) + (mark << 32)


def _plain(value: float | str) -> float | str:
    # JSON has no NaN and no infinities; float() reads these words back.
    return value if isinstance(value, str) or value - value == 0 else f"\x00{value}"


def _number(value: float | str) -> float | str:
    return float(value[1:]) if isinstance(value, str) and value.startswith("\x00") else value


def summary_from(row: tuple[Any, ...], attempt: int) -> Summary:
    """Read a summary back from the values of ``COLUMNS``; the attempt is the one that the index counts."""
    (
        trace_id, named, step, sample_index, rollout_n, _, validate, status, error, reward, rewards, turns,
        generations, tool_calls, tokens, errors, spans, start_ns, end_ns, policy_version, project,
        experiment, trained_step, discarded, truncated, _, _,
    ) = row  # fmt: skip
    by_name = {name: _number(value) for name, value in orjson.loads(rewards).items()}
    if reward is None and any(isinstance(value, float) for value in by_name.values()):
        reward = math.nan  # SQLite keeps NaN as NULL
    return Summary(
        key=TrajectoryKey(step, sample_index, rollout_n, bool(validate), attempt) if named else None,
        trace_id=trace_id,
        status=status,
        step=step,
        sample_index=sample_index,
        rollout_n=rollout_n,
        attempt=attempt,
        validate=bool(validate),
        reward=reward,
        rewards=by_name,
        turns=turns,
        generations=generations,
        tool_calls=tool_calls,
        tokens=tokens,
        errors=errors,
        spans=spans,
        start_ns=start_ns,
        end_ns=end_ns,
        policy_version=policy_version,
        project=project,
        experiment=experiment,
        error=error,
        trained_step=trained_step,
        discarded=discarded,
        truncated=bool(truncated),
    )
