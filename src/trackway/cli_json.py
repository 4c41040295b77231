"""What ``--json`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trackway.trace.loggers.comparing import Difference
    from trackway.trace.loggers.reading import RunRecord
    from trackway.trace.model import Summary, Trajectory
    from trackway.trace.store import InFlight, StoreStatus


def summary_of(summary: Summary) -> dict[str, Any]:
    """Give one line of ``ls``."""
    return {
        "key": summary.name,
        "step": summary.step,
        "sample_index": summary.sample_index,
        "rollout_n": summary.rollout_n,
        "attempt": summary.attempt,
        "validate": summary.validate,
        "status": summary.status,
        "error": summary.error,
        "reward": summary.reward,
        "rewards": summary.rewards,
        "turns": summary.turns,
        "generations": summary.generations,
        "tool_calls": summary.tool_calls,
        "tokens": summary.tokens,
        "errors": summary.errors,
        "spans": summary.spans,
        "start": _iso(summary.start_ns),
        "duration_s": _lasted(summary),
        "policy_version": summary.policy_version,
        "trained_step": summary.trained_step,
        "discarded": summary.discarded,
        "project": summary.project,
        "experiment": summary.experiment,
        "trace_id": summary.trace_id,
    }


def in_flight_of(row: InFlight, now_ns: int) -> dict[str, Any]:
    """Give one line of ``ls --in-flight``; seconds are counted from ``now_ns``."""
    return {
        **summary_of(row.summary),
        "doing": [
            {
                "kind": call.kind,
                "name": call.name,
                "start": _iso(call.start_ns),
                "for_s": _seconds(call.start_ns, now_ns),
                "span_id": call.span_id,
            }
            for call in row.doing
        ],
        "last_sign": _iso(row.last_sign_ns),
        "silent_s": _seconds(row.last_sign_ns, now_ns),
        "writer": row.writer,
        "pid": row.pid,
        "host": row.host,
    }


def status_of(status: StoreStatus, path: str, followed: bool | None) -> dict[str, Any]:
    """Give the state of a store."""
    from dataclasses import asdict

    facts = asdict(status)
    for writer in facts["writers"]:
        writer["last_wrote"] = _iso(writer.pop("last_wrote_ns"))
    return {"store": path, "followed": followed, **facts}


def trajectory_of(trajectory: Trajectory, turn: int | None) -> dict[str, Any]:
    """Give a whole trajectory, with all of its turns or one."""
    key = trajectory.key
    turns = [
        {
            "index": each.index,
            "role": each.role,
            "name": each.name,
            "text": each.text,
            "token_ids": each.token_ids,
            "mask": each.mask,
            "logprobs": each.logprobs,
            "advantages": each.advantages,
            "returns": each.returns,
            "trainer_logprobs": each.trainer_logprobs,
            "tool_calls": [
                {
                    "name": call.name,
                    "arguments": call.arguments,
                    "result": call.result,
                    "error": call.error,
                    "call_id": call.call_id,
                    "start": _iso(call.start_ns),
                    "duration_s": _seconds(call.start_ns, call.end_ns),
                    "span_id": call.span_id,
                }
                for call in each.tool_calls
            ],
            "error": each.error,
            "finish_reason": each.finish_reason,
            "policy_version": each.policy_version,
            "start": _iso(each.start_ns),
            "duration_s": _seconds(each.start_ns, each.end_ns),
            "span_id": each.span_id,
        }
        for each in trajectory.turns
        if turn is None or each.index == turn
    ]
    spans = [
        {
            "name": span.name,
            "kind": span.kind,
            "span_id": span.span_id,
            "parent_id": span.parent_id,
            "status": span.status,
            "error": span.error,
            "start": _iso(span.start_ns),
            "duration_s": _seconds(span.start_ns, span.end_ns),
        }
        for span in trajectory.spans
    ]
    return {
        "key": trajectory.name,
        "step": key and key.step,
        "sample_index": key and key.sample_index,
        "rollout_n": key and key.rollout_n,
        "attempt": key and key.attempt,
        "validate": key and key.validate,
        "status": trajectory.status,
        "error": trajectory.error,
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        "annotations": trajectory.annotations,
        "policy_versions": trajectory.policy_versions,
        "trained_step": trajectory.trained_step,
        "discarded": trajectory.discarded,
        "tokens": trajectory.tokens,
        "errors": trajectory.errors,
        "start": _iso(trajectory.start_ns),
        "duration_s": _lasted(trajectory),
        "project": trajectory.project,
        "experiment": trajectory.experiment,
        "run_id": trajectory.run_id,
        "run": trajectory.run,
        "trace_id": trajectory.trace_id,
        "notes": trajectory.notes,
        "turns": turns,
        "spans": spans,
    }


def _iso(time_ns: int | None) -> str | None:
    if time_ns is None:
        return None
    from datetime import datetime, timedelta, timezone

    return (datetime.fromtimestamp(0, timezone.utc) + timedelta(microseconds=time_ns // 1000)).isoformat()


def _lasted(rollout: Summary | Trajectory) -> float | None:
    # Of one that died only the end of its last call is known.
    return None if rollout.status == "died" else _seconds(rollout.start_ns, rollout.end_ns)


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e9


def run_of(record: RunRecord) -> dict[str, Any]:
    """Give one line of ``runs``."""
    run, steps = record.run, record.steps
    return {
        "run": run.id,
        "project": run.project,
        "experiment": run.experiment,
        "group": run.group,
        "rank": run.rank,
        "status": run.status,
        "started": _iso(int(run.started * 1e9)),
        "ended": None if run.ended is None else _iso(int(run.ended * 1e9)),
        "last_step": steps[-1] if steps else None,
        "steps": len(steps),
        "results": {name: _or_word(value) for name, value in record.results.items()},
        "alerts": len(record.alerts),
        "loggers": {
            each.name: {
                "delivered": each.delivered,
                "pending": each.pending,
                "refused": each.refused,
                "finished": each.finished,
                "error": each.error,
            }
            for each in record.loggers
        },
        "directory": str(run.directory),
    }


def difference_of(row: Difference) -> dict[str, Any]:
    """Give one thing in which two runs differ; what one of them has not is left out."""
    sides = {side: _or_word(getattr(row, side)) for side in ("a", "b") if row.only in (None, side)}
    return {"name": row.name, **sides}


def _or_word(value: Any) -> Any:
    """The value, or the word for a number that JSON has not: null would say that there is none."""
    return value if not isinstance(value, float) or value - value == 0 else repr(value)


def dumps(value: Any) -> str:
    """JSON in ASCII, so that no text can steer a terminal and a lone surrogate survives."""
    import json

    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    """The same plain value with null for NaN and the infinities, which JSON has no word for."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if hasattr(value, "items"):
        return {str(name): _finite(each) for name, each in value.items()}
    return value
