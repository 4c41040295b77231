"""Trajectories to MLflow, each one trace that keeps its OpenTelemetry ids and times.

Ways to write a trace of ten spans of 4 KB with two rewards and a run into SQLite, 50 traces at a time, in
milliseconds of processor time for each (MLflow 3.17, Python 3.11, two cores; the disk comes on top, for each
commit): ``start_trace`` with the rewards inside, then one ``log_spans`` and one ``link_traces_to_run``: 12,
with 52 commits; the same with ``log_spans`` first: 19; ``log_spans`` and each reward by itself: 11, with 102
commits; the first way in one transaction: 8, with one commit. This last one is what happens here.
``mlflow.start_span`` with asynchronous logging takes 48, without rewards or a run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..log import logger
from ..model import Trajectory
from .arriving import WholeTraceExporter
from .mlflow_away import add_rewards
from .mlflow_errors import explained, is_passing, reason
from .mlflow_payload import LATER_TAGS, Reward, TracePayload, payload_of
from .mlflow_store import check_server, experiment_id, one_transaction, open_store, tracking_uri
from .mlflow_views import Views
from .text import short_name

if TYPE_CHECKING:
    from ..config import TraceConfig

__all__ = ["MlflowExporter", "tracking_uri"]

_log = logger(__name__)

SOURCE = "trackway"
"""Who gives the feedback that rewards become."""
BATCH_TRACES = 50
"""Most traces in one call of MLflow; more gain nothing, and more than 100 cannot be linked to a run."""
BATCH_BYTES = 16_000_000
"""Most bytes of spans in one call of MLflow, unless a single trace has more."""


class MlflowExporter(WholeTraceExporter):
    """Writes trajectories to an MLflow tracking server or database.

    The experiment of MLflow is the trajectory's project, as verl has it.

    Args:
        config: gives ``tracking_uri``, ``store`` (for the embedded database), ``project``, ``experiment``.

    Attributes:
        sent_bytes: names, attributes and events of the spans that MLflow has taken, in bytes.

    Raises:
        ImportError: MLflow is not installed.
        ValueError: the tracking URI names a database in memory.
    """

    destination = "MLflow"

    def __init__(self, config: TraceConfig) -> None:
        super().__init__()
        if importlib.util.find_spec("mlflow") is None:
            raise ImportError("MLflow is not installed; pip install 'trackway[mlflow]'")
        self._config = config
        self._uri = tracking_uri(config.store, config.tracking_uri)
        self._store: Any = None
        self._unknown_runs: set[str] = set()
        self._runs: dict[str, str | None] = {}
        self._views = Views()
        self.sent_bytes = 0

    def export_trajectories(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        """Write trajectories; one that was written before is brought up to date.

        Returns:
            trace id -> reason, of those that MLflow will never take.

        Raises:
            ConnectionError: MLflow cannot be reached, or cannot write now. Send all of them again later.
            RuntimeError: a person has to act first, for instance restore the experiment. Likewise.
        """
        try:
            return self._export(trajectories)
        except Exception as error:
            raise explained(error, self._uri, self._store) from error

    def _export(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        refused: dict[str, str] = {}
        projects: dict[str, dict[str, TracePayload]] = {}
        for trajectory in trajectories:
            try:
                linked = replace(trajectory, run_id=trajectory.run_id or self._run_of(trajectory.run))
                payload = payload_of(linked, self._config.experiment, self._config.store)
            except Exception as error:
                refused[trajectory.trace_id] = reason(error)
            else:
                project = short_name(trajectory.project or self._config.project)
                projects.setdefault(project, {})[payload.trace_id] = payload
        if projects:
            check_server(self._uri)
            self._store = self._store or open_store(self._uri)
        for project, payloads in projects.items():
            experiment = self._experiment(self._store, project)
            for batch in _batches(list(payloads.values())):
                with one_transaction(self._store) as store:
                    refused |= self._write(store, project, experiment, batch)
                self.sent_bytes += sum(each.size for each in batch if each.otel_trace_id not in refused)
            rewards = (reward.name for payload in payloads.values() for reward in payload.rewards)
            self._views.bring(self._store, experiment, rewards)
        return refused

    def size_of(self, trajectory: Trajectory) -> int:
        """Give the bytes of the spans that MLflow would get, as ``sent_bytes`` counts them."""
        return payload_of(trajectory, self._config.experiment, self._config.store).size

    def _run_of(self, run: str | None) -> str | None:
        """Give the run of MLflow that stands for the tracker's run that was going on."""
        from ..loggers.linked import run_at

        if run is not None and run not in self._runs:
            self._runs[run] = run_at(self._config.store, run, self._uri)
        return None if run is None else self._runs[run]

    def _experiment(self, store: Any, project: str) -> str:
        """Look it up for every call: it may have been renamed, deleted or restored meanwhile."""
        return experiment_id(store, project, self._uri, self._config.store)

    def _write(
        self, store: Any, project: str, experiment: str, batch: Sequence[TracePayload]
    ) -> dict[str, str]:
        refused: dict[str, str] = {}
        begun_here = [payload for payload in batch if not payload.away]
        _remove_outdated(store, begun_here)
        for payload in begun_here:
            error = _refusal(store.start_trace, _trace_info(experiment, payload))
            if error is not None:
                self._blame_the_trace(store, project, experiment)
                refused[payload.otel_trace_id] = reason(error)
        started = [payload for payload in batch if payload.otel_trace_id not in refused]
        if started:
            refused |= self._log_spans(store, project, experiment, started)
        taken = [payload for payload in started if payload.otel_trace_id not in refused]
        self._link(store, [payload for payload in taken if not payload.away])
        add_rewards(store, [payload for payload in taken if payload.away], _feedback)
        return refused

    def _log_spans(
        self, store: Any, project: str, experiment: str, batch: Sequence[TracePayload]
    ) -> dict[str, str]:
        """Write all spans at once; where MLflow refuses them, find the trace that it means by halving."""
        from mlflow.entities import Span

        spans = [Span(span) for payload in batch for span in payload.spans]
        error = _refusal(store.log_spans, experiment, spans)
        if error is None:
            return {}
        if len(batch) == 1:
            self._blame_the_trace(store, project, experiment)
            if not batch[0].away:
                _remove_empty(store, experiment, batch[0])
            return {batch[0].otel_trace_id: reason(error)}
        middle = len(batch) // 2
        left = self._log_spans(store, project, experiment, batch[:middle])
        return left | self._log_spans(store, project, experiment, batch[middle:])

    def _blame_the_trace(self, store: Any, project: str, experiment: str) -> None:
        """Raise when it is not the trace but the whole destination that refuses."""
        check_server(self._uri)
        if self._experiment(store, project) != experiment:
            raise ConnectionError(f"the MLflow experiment {project!r} was replaced meanwhile")

    def _link(self, store: Any, batch: Sequence[TracePayload]) -> None:
        runs: dict[str, list[str]] = {}
        for payload in batch:
            if payload.run_id:
                runs.setdefault(payload.run_id, []).append(payload.trace_id)
        for run, traces in runs.items():
            error = _refusal(store.link_traces_to_run, traces, run)
            if error is not None and run not in self._unknown_runs:
                self._unknown_runs.add(run)
                _log.warning("traces are written without a link to the run %s: %s", run, reason(error))


def _refusal(action: Callable[..., Any], *arguments: Any) -> Exception | None:
    """Call MLflow; give the error when it refuses, raise it when the trouble will pass."""
    try:
        action(*arguments)
    except Exception as error:
        if is_passing(error):
            raise
        return error
    return None


def _remove_outdated(store: Any, batch: Sequence[TracePayload]) -> None:
    """Take away rewards and tags of an earlier delivery that by now belong to another attempt.

    Writing a trace again replaces what it holds and leaves the rest.
    """
    from mlflow.exceptions import MlflowException

    payloads = {payload.trace_id: payload for payload in batch}
    try:
        known = store.batch_get_trace_infos(list(payloads))
    except (MlflowException, NotImplementedError) as error:
        _log.debug("MLflow does not say what it has: %s", reason(error))
        return
    for info in known:
        payload = payloads[info.trace_id]
        rewards = {reward.id for reward in payload.rewards}
        for feedback in info.assessments:
            if feedback.source.source_id == SOURCE and feedback.assessment_id not in rewards:
                store.delete_assessment(info.trace_id, feedback.assessment_id)
        for name in LATER_TAGS:
            if name in info.tags and name not in payload.tags:
                store.delete_trace_tag(info.trace_id, name)


def _remove_empty(store: Any, experiment: str, payload: TracePayload) -> None:
    """Take back a trace whose spans were refused: a page without spans helps nobody."""
    tags = store.get_trace_info(payload.trace_id).tags
    if "mlflow.trace.spansLocation" not in tags:  # else an earlier delivery has spans there
        store.delete_traces(experiment_id=experiment, trace_ids=[payload.trace_id])


def _batches(payloads: Sequence[TracePayload]) -> Iterator[list[TracePayload]]:
    batch: list[TracePayload] = []
    size = 0
    for payload in payloads:
        if batch and (len(batch) == BATCH_TRACES or size + payload.size > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(payload)
        size += payload.size
    if batch:
        yield batch


def _trace_info(experiment: str, payload: TracePayload) -> Any:
    from mlflow.entities import TraceInfo, TraceLocation, TraceState

    end_ms = payload.start_ms + payload.duration_ms
    return TraceInfo(
        trace_id=payload.trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment),
        request_time=payload.start_ms,
        execution_duration=payload.duration_ms,
        state=TraceState(payload.state),
        request_preview=payload.request_preview,
        response_preview=payload.response_preview,
        trace_metadata=dict(payload.metadata),
        tags=dict(payload.tags),
        assessments=[_feedback(payload.trace_id, reward, end_ms) for reward in payload.rewards],
    )


def _feedback(trace_id: str, reward: Reward, time_ms: int, source: str = SOURCE) -> Any:
    from mlflow.entities import AssessmentError, AssessmentSource, Feedback

    feedback = Feedback(
        name=reward.name,
        value=reward.value,
        error=AssessmentError("NOT_A_NUMBER", reward.error) if reward.error else None,
        source=AssessmentSource(source_type="CODE", source_id=source),
        trace_id=trace_id,
        rationale=reward.rationale,
        create_time_ms=time_ms,
        last_update_time_ms=time_ms,
    )
    # The store replaces an assessment whose id it has, so the same reward never stands there twice.
    feedback.assessment_id = reward.id
    return feedback
