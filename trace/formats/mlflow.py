"""Trajectories as MLflow has them: found and read without the store that they came from."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from typing import Any, Final, TypeVar

from ..model import Status, Summary, Trajectory, TrajectoryKey
from ..printable import without_password
from ..store import Steps, StoreError, TrajectoryNotFound, matches
from . import mlflow_open
from .mlflow_rows import summary_of
from .mlflow_traces import trajectory_of

T = TypeVar("T")

PAGE: Final = 500
"""Traces in one answer; MLflow's server gives no more."""
_STATES: Final = {"ok": "OK", "running": "IN_PROGRESS"}
_PLAIN = re.compile(r"[\w ./:@+=,#-]{1,1000}")
"""Values that mean the same in MLflow's filter language and in its tags; all others are compared here."""
_TRACE_ID = re.compile(r"(?:tr-)?([0-9a-f]{6,32})")


class MlflowTraces:
    """The traces of one experiment of MLflow.

    Args:
        uri: tracking URI of a server or a database, which must be there; nothing is made, nor changed.
        project: name of the experiment; may be left out where there is one only.

    Attributes:
        uri: likewise.
        project: the name of the experiment.
        experiment_id: its id.

    Raises:
        StoreError: there is no MLflow or no such experiment; the message says what there is.
    """

    def __init__(self, uri: str, project: str | None = None) -> None:
        self.uri = uri
        self._client = mlflow_open.open_mlflow(uri)
        self.experiment_id, self.project = self.ask(
            lambda: mlflow_open.experiment_of(uri, self.mlflow, project)
        )

    @property
    def place(self) -> str:
        """Where it is, in words, without a password."""
        return f"the experiment {self.project!r} of MLflow at {without_password(self.uri)}"

    @property
    def mlflow(self) -> Any:
        """MLflow's own store."""
        return self._client.store

    def ask(self, question: Callable[[], T]) -> T:
        """Ask MLflow something.

        Raises:
            StoreError: it fails; the message says why, and what to do.
        """
        mlflow_open.check_there(self.uri)  # MLflow itself would try for minutes
        return mlflow_open.asked(self.uri, self.mlflow, question)

    def infos(self, *conditions: str | None) -> Iterator[Any]:
        """Give the ``TraceInfo`` of every trace that meets some conditions, the latest first.

        Args:
            *conditions: in MLflow's filter language; those that are None are left out.

        Raises:
            StoreError: MLflow does not answer.
        """
        text = " AND ".join(filter(None, conditions))
        token: str | None = None
        known: set[str] = set()
        while True:
            found, token = self.ask(partial(self._page, text, token))
            for info in found:
                # Pages are counted from the latest: what comes in meanwhile moves the others on by one.
                if info.trace_id not in known:
                    known.add(info.trace_id)
                    yield info
            if not token:
                return

    def _page(self, text: str, token: str | None) -> tuple[list[Any], str | None]:
        found, following = self.mlflow.search_traces(
            locations=[self.experiment_id],
            filter_string=text or None,
            max_results=PAGE,
            order_by=["timestamp_ms DESC"],
            page_token=token,
        )
        return list(found), following

    def query(
        self,
        *,
        step: int | Steps | None = None,
        sample: int | str | None = None,
        rollout: int | None = None,
        validate: bool | None = None,
        status: Status | None = None,
        experiment: str | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        limit: int | None = None,
        all_attempts: bool = False,
        newest: bool = False,
    ) -> Iterator[Summary]:
        """Find trajectories, as ``Store.query`` does; no spans are read.

        MLflow itself compares what is equal, the state and the rewards; ranges of steps are compared here,
        since its tags are texts. MLflow knows no infinite numbers: such a reward meets no bound.
        """
        steps = Steps(((step, step),)) if isinstance(step, int) else step
        named = (
            _tag("step", None if steps is None else steps.only),
            _tag("sample_index", sample),
            # Others' traces may lack these two where they are 0 and False.
            _tag("rollout_n", rollout or None),
            _tag("validate", validate or None),
            _tag("experiment_name", experiment),
        )
        last = {} if all_attempts else self._last_attempts(*named)
        found = self.infos(
            *named,
            None if status is None else f"status = '{_STATES.get(status, 'ERROR')}'",
            _bound(">=", min_reward),
            _bound("<=", max_reward),
        )
        summaries = (summary_of(info, self.project) for info in found)
        matching = (
            summary
            for summary in summaries
            if matches(summary, steps, sample, rollout, validate, experiment, min_reward, max_reward)
            and (status is None or summary.status == status)
            and summary.attempt >= last.get(_same(summary), 0)
        )
        return islice(_newest_first(matching) if newest else sorted(matching, key=_order), limit)

    def _last_attempts(self, *conditions: str | None) -> dict[Any, int]:
        """Give the last attempt of every rollout that had several; these are few."""
        last: dict[Any, int] = {}
        for info in self.infos(*conditions, "tags.attempt != '0'"):
            summary = summary_of(info, self.project)
            last[_same(summary)] = max(summary.attempt, last.get(_same(summary), 0))
        return last

    def load(self, name: str | TrajectoryKey) -> Trajectory:
        """Read one trajectory, named as for ``Store.load``.

        Raises:
            TrajectoryNotFound: there is none, or the beginning of a trace id fits several.
            StoreError: MLflow does not answer, or has lost its spans.
        """
        trace_id = self._find(name)
        trace = self.ask(lambda: self._client.get_trace(trace_id))
        try:
            return trajectory_of(trace, self.project)
        except ValueError as error:
            raise StoreError(f"{error} at {without_password(self.uri)}") from None

    def _find(self, name: str | TrajectoryKey) -> str:
        text = str(name).strip()
        if isinstance(name, str) and (match := _TRACE_ID.fullmatch(text)):
            found = [info.trace_id for info in self.infos(f"request_id LIKE 'tr-{match[1]}%'")]
            if len(found) == 1:
                return str(found[0])
            if found:
                raise TrajectoryNotFound(
                    f"{text} is the beginning of {len(found)} trace ids; give more digits"
                )
            raise TrajectoryNotFound(f"no trace in {self.place} has an id that begins with {text}")
        try:
            key = name if isinstance(name, TrajectoryKey) else TrajectoryKey.parse(text)
        except ValueError as error:
            raise TrajectoryNotFound(f"{error}; a trace id works as well") from None
        infos = self.infos(_tag("step", key.step), _tag("sample_index", key.sample_index))
        wanted = replace(key, sample_index=_text(key.sample_index), attempt=0)
        candidates = [
            (info.trace_id, summary)
            for info in infos
            if (summary := summary_of(info, self.project)).key is not None
            and replace(summary.key, sample_index=_text(summary.sample_index), attempt=0) == wanted
            and ("@" not in text or summary.attempt == key.attempt)
        ]
        exact = [item for item in candidates if item[1].sample_index == key.sample_index]
        chosen = exact or candidates
        if not chosen:
            raise TrajectoryNotFound(f"no trajectory {text} in {self.place}{self._near(key)}")
        newest = max((summary for _, summary in chosen), key=lambda summary: summary.start_ns)
        same = [item for item in chosen if item[1].experiment == newest.experiment]
        return str(max(same, key=lambda item: item[1].attempt)[0])

    def _near(self, key: TrajectoryKey) -> str:
        names = {summary_of(info, self.project).name for info in islice(self.infos(), PAGE)}
        near = difflib.get_close_matches(str(key), names, n=3, cutoff=0.4)
        return f"; did you mean {', '.join(near)}?" if near else "; `trackway ls --from` lists them"


def _tag(name: str, value: int | str | None) -> str | None:
    """Ask for a tag; None where the value is none, or one that MLflow's filters or tags cannot hold."""
    text = str(value)
    return None if value is None or not _PLAIN.fullmatch(text) else f"tags.{name} = '{text}'"


def _bound(comparison: str, reward: float | None) -> str | None:
    plain = reward is not None and math.isfinite(reward) and "e" not in repr(reward)
    return f"feedback.reward {comparison} {reward!r}" if plain else None


def _text(sample: int | str | None) -> str | None:
    return None if sample is None else str(sample)


def _same(summary: Summary) -> Any:
    """Give what all attempts of one rollout have alike."""
    key = summary.key
    return summary.trace_id if key is None else (replace(key, attempt=0), summary.experiment)


def _newest_first(summaries: Iterable[Summary]) -> Iterator[Summary]:
    """Order by nanoseconds what comes in the order of MLflow's milliseconds."""
    for _, together in groupby(summaries, key=lambda summary: summary.start_ns // 1_000_000):
        yield from sorted(together, key=lambda summary: -summary.start_ns)


def _order(summary: Summary) -> Any:
    """Order as the store does: what is not known first, integers before texts."""
    sample = summary.sample_index
    return (
        summary.key is None,
        (summary.step is not None, summary.step or 0),
        summary.validate,
        (sample is not None, isinstance(sample, str), sample if sample is not None else 0),
        summary.rollout_n,
        summary.attempt,
        summary.start_ns,
    )
