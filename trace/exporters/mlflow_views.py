"""The saved views that an experiment of MLflow is given, so that its page is useful at the first click.

MLflow's own default shows neither a rollout's step nor its rewards. A saved view is a tag of the experiment,
and its address is ``#/experiments/<id>/traces?traceViewShareKey=<id of the view>`` (seen in MLflow 3.17).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ..log import logger
from .text import digest, dumps

_log = logger(__name__)

VIEW_TAG: Final = "mlflow.tracesV4ViewState."
"""Begins the experiment tag of a view; the id of the view follows."""
NOTE_TAG: Final = "trackway.views"
"""Experiment tag that says what was written, so that what people changed or deleted stays as they left it."""
ROLLOUTS: Final = "trackway-rollouts"
"""Id of the view that ``trackway ui`` opens."""
FAILURES: Final = "trackway-failures"

_TAGS = ("step", "sample_index", "rollout_n")
_REWARDS = 6
"""Most columns of rewards; more would push the texts out of sight."""
_NAME = 60
"""Most characters of a reward that gets a column; a view must fit into a tag."""
_COLUMNS: Final = ("session", "input", "output")
"""Columns of both views; those of the rewards follow the first, and the page puts tags behind all others.

The session names step and sample. With more columns, those of the tags are out of sight on a laptop.
"""
_VIEWS: Mapping[str, tuple[str, tuple[dict[str, str], ...]]] = {
    ROLLOUTS: ("Rollouts", ()),
    # The status of a trace is that of the rollout; a call that failed in a rollout that went on counts too.
    FAILURES: ("Failures", ({"field": "span_status", "operator": "=", "value": "ERROR"},)),
}


class Views:
    """Brings the views to the experiments of one MLflow, and columns for rewards that turn up later."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = {}
        self._failed = False

    def bring(self, store: Any, experiment: str, rewards: Iterable[str]) -> None:
        """Write what an experiment lacks; trouble is logged once and tried again with the next traces.

        Args:
            store: MLflow's.
            experiment: its id.
            rewards: names of the feedback that its traces have.
        """
        names = {name for name in rewards if len(name) <= _NAME and "," not in name}
        if names <= self._known.get(experiment, set()) and experiment in self._known:
            return
        try:
            self._known[experiment] = _bring(store, experiment, names)
        except Exception as error:
            if not self._failed:
                self._failed = True
                _log.warning("MLflow does not take the saved views: %s: %s", type(error).__name__, error)


def _bring(store: Any, experiment: str, names: set[str]) -> set[str]:
    """Write the views; give the names of rewards that are settled."""
    from mlflow.entities import ExperimentTag

    tags = store.get_experiment(experiment).tags
    note = _parsed(tags.get(NOTE_TAG))
    written, known = note.get("views") or {}, list(note.get("rewards") or ())
    # The reward as a whole comes first, then its parts.
    columns = [*known, *sorted(names.difference(known), key=lambda name: (name != "reward", name))]
    shown = columns[:_REWARDS]
    if written and shown == known[:_REWARDS]:
        return {*columns}
    now = time.time_ns() // 1_000_000
    for place, view in enumerate(_VIEWS):
        here = tags.get(VIEW_TAG + view)
        if (view in written or here is not None) and written.get(view) != _mark(here):
            continue  # a person changed or deleted it
        value = _value(view, shown, here, now - place)  # the page lists the latest first
        store.set_experiment_tag(experiment, ExperimentTag(VIEW_TAG + view, value))
        written = {**written, view: _mark(value)}
    store.set_experiment_tag(experiment, ExperimentTag(NOTE_TAG, dumps({"views": written, "rewards": shown})))
    return {*columns}


def _value(view: str, rewards: list[str], before: str | None, now: int) -> str:
    name, filters = _VIEWS[view]
    scores = [f"assessment:{reward}" for reward in rewards]
    state: dict[str, Any] = {
        # All times: the page's own choice is the last week, and would show an older training as empty.
        "single": {"cols": ",".join([_COLUMNS[0], *scores, *_COLUMNS[1:]]), "startTimeLabel": "ALL"},
        "multi": {},
        "assessmentColumns": dict.fromkeys(rewards, True),
        "customColumns": {f"tag:{tag}": True for tag in _TAGS},
    }
    if filters:
        state["filters"] = list(filters)
    created = _parsed(before).get("createdAt", now)
    return dumps({"name": name, "createdAt": created, "updatedAt": now, "state": dumps(state)})


def _mark(value: str | None) -> str | None:
    """Tell one content of a view from another; when it was written does not count."""
    if value is None:
        return None
    view = _parsed(value)
    return digest(f"{view.get('name')} {view.get('state')}", 8)


def _parsed(value: str | None) -> dict[str, Any]:
    try:
        found = json.loads(value or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
