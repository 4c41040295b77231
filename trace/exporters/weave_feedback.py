"""Rewards as Weave's feedback on the call of the rollout, one row each, replaced when it is sent again."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .. import model, semconv
from ..store.assemble import evaluations
from .content import is_away
from .text import cut, dumps, short_name

if TYPE_CHECKING:
    from .weave_client import Connection

CREATOR: Final = "trackway"
"""Who gives the feedback; what others gave is left alone."""


@dataclass(frozen=True, slots=True)
class Reward:
    """One feedback on the root of a trajectory.

    Attributes:
        id: made of the trace and the name, so that sending again replaces.
        kind: the type of the feedback, which is the reward's name.
        payload: its ``value``, and the ``explanation`` where there is one.
    """

    id: str
    kind: str
    payload: Mapping[str, Any]


def rewards_of(trajectory: model.Trajectory) -> Iterator[Reward]:
    """Give the rewards of a trajectory, and their sum where none is called ``reward``."""
    values = dict(trajectory.rewards)
    # The total of a part would be none of the rollout's.
    if "reward" not in values and trajectory.reward is not None and not is_away(trajectory):
        values["reward"] = trajectory.reward
    reasons = {
        event.attributes.get(semconv.EVALUATION_NAME): event.attributes.get(semconv.EVALUATION_EXPLANATION)
        for event in evaluations(trajectory.spans)
    }
    for name, value in values.items():
        shown = plain(value)
        payload: dict[str, Any] = {"value": cut(shown) if isinstance(shown, str) else shown}
        if reasons.get(name):
            payload["explanation"] = cut(str(reasons[name]))
        kind = short_name(name) or "⟨no name⟩"
        if kind.startswith("wandb."):  # Weave keeps such names for itself
            kind = f"reward.{kind}"
        identity = f"trackway {trajectory.trace_id} {name}".encode("utf-8", "surrogatepass").hex()
        yield Reward(str(uuid.uuid5(uuid.NAMESPACE_OID, identity)), kind, payload)


def plain(value: float | str | None) -> float | str | None:
    """Give a number that JSON has, or its text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def replace_feedback(
    connection: Connection, project_id: str, wanted: Sequence[tuple[str, Sequence[Reward]]]
) -> None:
    """Bring the feedback on some calls up to date, in at most three requests.

    What is there already is left alone, since the server shows a row that is written twice as two until it
    has merged them; what a later word of the trainer has taken back goes.

    Args:
        project_id: ``entity/project``.
        wanted: ids of the calls, each with its rewards.
    """
    refs = {f"weave:///{project_id}/call/{call_id}": rewards for call_id, rewards in wanted}
    literals = [{"$literal": ref} for ref in refs]
    query = {"$expr": {"$in": [{"$getField": "weave_ref"}, literals]}}
    answer = connection.post("/feedback/query", _body({"project_id": project_id, "query": query}))
    there = {row["id"]: row for row in answer["result"] if row.get("creator") == CREATOR}
    rows = [
        {
            "project_id": project_id,
            "weave_ref": ref,
            "feedback_type": reward.kind,
            "payload": dict(reward.payload),
            "id": reward.id,
            "creator": CREATOR,
        }
        for ref, rewards in refs.items()
        for reward in rewards
    ]
    same = {row["id"] for row in rows if there.get(row["id"], {}).get("payload") == row["payload"]}
    if outdated := [{"$literal": id} for id in there if id not in same]:
        query = {"$expr": {"$in": [{"$getField": "id"}, outdated]}}
        connection.post("/feedback/purge", _body({"project_id": project_id, "query": query}))
    if new := [row for row in rows if row["id"] not in same]:
        connection.post("/feedback/batch/create", _body({"batch": new}))


def _body(value: Any) -> bytes:
    return dumps(value).encode()
