"""What MLflow gets of a rollout that was begun on another machine, beside its spans.

The trace itself, its tags, state and previews, comes from there. So rewards are added to it one by one, and
under a source of their own, since what comes from there takes away what it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from .mlflow_payload import Reward, TracePayload

SOURCE: Final = "trackway on another machine"
"""Who gives the feedback that these rewards become."""


def add_rewards(
    store: Any, payloads: Sequence[TracePayload], make: Callable[[str, Reward, int, str], Any]
) -> None:
    """Bring the rewards up to date; the traces are there.

    Args:
        make: gives the feedback of a trace id, a reward, a time in milliseconds since 1970 and a source.
    """
    for payload in payloads:
        if not payload.rewards:
            continue
        known = {
            feedback.name: feedback
            for feedback in store.get_trace_info(payload.trace_id).assessments
            if feedback.source.source_id == SOURCE
        }
        for reward in payload.rewards:
            wanted = make(payload.trace_id, reward, payload.start_ms + payload.duration_ms, SOURCE)
            before = known.get(reward.name)
            if before is not None:
                if (before.value, before.rationale) == (wanted.value, wanted.rationale):
                    continue
                store.delete_assessment(payload.trace_id, before.assessment_id)
            wanted.assessment_id = None  # MLflow gives one
            store.create_assessment(wanted)
