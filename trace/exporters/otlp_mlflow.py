"""The spans of a trajectory for an MLflow server that is sent them by OTLP.

They have the attributes that MLflow's page is drawn from. What else a trace has there, its tags, its session
and its name, the server reads from attributes of the root. Rewards become no feedback on this way, for which
OTLP has no place: they stand in the outputs of the root, and as tags ``reward.<name>``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from ..model import Trajectory
from .mlflow_payload import payload_of
from .mlflow_payload import session_id as session_of
from .otlp_spans import plain
from .span_size import fitted

MLFLOW_HEADER: Final = "x-mlflow-experiment-id"
"""Header in which an MLflow server is told the experiment."""
ATTRIBUTE_LIMIT: Final = 1_000_000


def mlflow_spans(
    trajectory: Trajectory, experiment: str, environment: Mapping[str, Any]
) -> list[ReadableSpan]:
    """Give the spans of a trajectory as they are sent to an MLflow server, the root first.

    Args:
        experiment: name of the experiment of a trajectory that does not say its own.
        environment: attributes of the resource.

    Raises:
        ValueError: the trajectory has no spans, or ids that are not those of OpenTelemetry.
    """
    payload = payload_of(trajectory, experiment)
    tags = dict(payload.tags)
    tags |= {f"reward.{reward.name}": str(reward.error or reward.value) for reward in payload.rewards}
    facts: dict[str, Any] = {f"mlflow.traceTag.{name}": value for name, value in tags.items()}
    session = session_of(trajectory.key)
    if session:
        facts["session.id"] = session
    return [
        _native(span, facts if number == 0 else {}, environment) for number, span in enumerate(payload.spans)
    ]


def _native(span: ReadableSpan, facts: Mapping[str, Any], environment: Mapping[str, Any]) -> ReadableSpan:
    """Give a span whose attributes are not encoded for MLflow: a server does that with what it gets."""
    attributes = {
        name: _decoded(str(value))
        for name, value in (span.attributes or {}).items()
        if name != "mlflow.traceRequestId"  # the server's own
    }
    return ReadableSpan(
        name=span.name,
        context=span.context,
        parent=span.parent,
        resource=Resource(plain(environment)),
        attributes=fitted(plain({**attributes, **facts}), ATTRIBUTE_LIMIT),
        events=span.events,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
    )


def _decoded(text: str) -> Any:
    """Read an encoded attribute; what has parts stays text, which an MLflow server reads by itself."""
    return text if text[:1] in ("{", "[") else orjson.loads(text)
