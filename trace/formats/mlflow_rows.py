"""What MLflow tells of a trace without its spans, as the one line that lists show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast, get_args

from ..exporters.mlflow_away import SOURCE as AWAY
from ..exporters.mlflow_payload import feedback_name
from ..exporters.mlflow_summary import SUMMARY, summary_facts
from ..model import Status, Summary, TrajectoryKey
from ..store.packed import lenient
from ..store.results import parsed

SOURCE: Final = "trackway"
"""Who gave the feedback that rewards became."""

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_STATES: Mapping[str, Status] = {"OK": "ok", "ERROR": "error", "IN_PROGRESS": "running"}


def is_ours(info: Any) -> bool:
    """Say whether Trackway wrote a trace."""
    return SUMMARY in info.trace_metadata


def facts_of(info: Any) -> Mapping[str, Any]:
    """Give what Trackway noted of a trace; nothing of a trace that somebody else wrote."""
    return summary_facts(info.trace_metadata)


def size_of(info: Any) -> int:
    """Estimate the bytes that the spans of a trace fill; 0 where nobody noted it."""
    noted = facts_of(info).get("size") or info.trace_metadata.get("mlflow.trace.sizeBytes")
    return lenient(int, noted) or 0


def trace_id_of(info: Any) -> str:
    """Give the id of a trace as a trajectory has it: 32 hexadecimal digits, where they are that."""
    return str(info.trace_id).removeprefix("tr-")


def key_of(info: Any) -> TrajectoryKey | None:
    """Give the key of a trace, where the tags of Trackway or of verl name one."""
    facts, tags = facts_of(info), info.tags
    if (text := facts.get("key")) and (key := lenient(TrajectoryKey.parse, text)):
        return key
    if ("key" in facts and text is None) or not ("step" in tags or "sample_index" in tags):
        return None
    sample = tags.get("sample_index")
    return TrajectoryKey(
        step=_number(tags.get("step")),
        # A long one has left no room for its key, so it is none that looks like a number.
        sample_index=int(sample) if sample is not None and _INTEGER.fullmatch(sample) else sample,
        rollout_n=_number(tags.get("rollout_n")) or 0,
        validate=str(tags.get("validate")).lower() == "true",
        attempt=_number(tags.get("attempt")) or 0,
    )


def status_of(info: Any) -> Status:
    """Give the status of a trace; finer than MLflow's own where Trackway wrote it."""
    named = info.tags.get("status")
    if is_ours(info) and named in get_args(Status):
        return cast(Status, named)
    return _STATES.get(str(info.state.value), "error")


def rewards_of(info: Any) -> dict[str, float | str]:
    """Give the rewards of a trace: what was recorded, or the feedback that others gave to their own trace."""
    given: dict[str, dict[str, float | str]] = {}
    for item in info.assessments:
        if (value := _value(item)) is not None:
            given.setdefault(item.source.source_id, {})[str(item.name)] = value
    if not is_ours(info):
        return {name: value for rewards in given.values() for name, value in rewards.items()}
    recorded, elsewhere = given.get(SOURCE, {}), given.get(AWAY, {})
    names = facts_of(info).get("rewards")
    if isinstance(names, list):
        # The feedback called "reward" may be the total of the others, which was none of them.
        shown = {str(name): feedback_name(str(name)) for name in names}
        recorded = {name: recorded[label] for name, label in shown.items() if label in recorded}
    return {**elsewhere, **recorded}


def _value(item: Any) -> float | str | None:
    value = getattr(getattr(item, "feedback", None), "value", None)
    if isinstance(value, (int, float)):
        return float(value)
    error = getattr(item, "error", None)
    if value is None and error is not None and item.source.source_id == SOURCE:
        return lenient(float, str(error.error_message).rpartition(" ")[2])  # NaN and the infinities
    return value if isinstance(value, str) else None


def summary_of(info: Any, project: str) -> Summary:
    """Give the one line about a trace.

    Args:
        info: MLflow's ``TraceInfo``. Of a trace that Trackway did not write it tells neither turns nor
            calls, which are then 0.
        project: name of the experiment that holds it.
    """
    facts, tags, key = facts_of(info), info.tags, key_of(info)
    status, rewards = status_of(info), rewards_of(info)
    numbers = {name: value for name, value in rewards.items() if not isinstance(value, str)}
    reward = numbers.get("reward")
    if reward is None and numbers and is_ours(info):
        reward = sum(numbers.values())
    errors = _count(facts, "errors") if facts else int(status == "error")
    start_ns = _count(facts, "start_ns") or info.request_time * 1_000_000
    end_ns: int | None = lenient(int, facts.get("end_ns"))
    if not facts and info.execution_duration is not None:
        end_ns = start_ns + info.execution_duration * 1_000_000
    return Summary(
        key=key,
        trace_id=trace_id_of(info),
        status=status,
        step=key.step if key else None,
        sample_index=key.sample_index if key else None,
        rollout_n=key.rollout_n if key else 0,
        attempt=key.attempt if key else 0,
        validate=bool(key and key.validate),
        reward=reward,
        rewards=rewards,
        turns=_count(facts, "turns"),
        generations=_count(facts, "generations"),
        tool_calls=_count(facts, "tool_calls"),
        tokens=_count(facts, "tokens") if facts else _used(info),
        errors=max(1, errors) if status == "died" else errors,
        spans=_count(facts, "spans"),
        start_ns=start_ns,
        end_ns=end_ns,
        policy_version=facts.get("policy_version", tags.get("policy_version")),
        project=project,
        experiment=tags.get("experiment_name"),
        error=facts.get("error"),
        trained_step=_number(tags.get("trained_step")),
        discarded=tags.get("discarded"),
    )


def _count(facts: Mapping[str, Any], name: str) -> int:
    return lenient(int, facts.get(name)) or 0


def _number(text: Any) -> int | None:
    return lenient(int, text)


def _used(info: Any) -> int:
    usage = parsed(info.trace_metadata.get("mlflow.trace.tokenUsage"))
    return _count(usage, "total_tokens") if isinstance(usage, dict) else 0
