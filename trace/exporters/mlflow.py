"""Trajectories to MLflow, each one trace that keeps its OpenTelemetry ids and times.

Written on one SQLite file in batches of 50 traces of ten spans of 4 KB with two rewards and a run (MLflow
3.17, one two-core machine, milliseconds a trace): ``start_trace`` with the rewards inside, then one
``log_spans`` and one ``link_traces_to_run`` a batch: 10; ``log_spans`` first: 16; ``log_spans`` and each
reward by itself: 21. So the first it is.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from ..model import Trajectory
from .mlflow_chat import clean
from .mlflow_payload import Reward, TracePayload, payload_of

if TYPE_CHECKING:
    from ..config import TraceConfig

_log = logging.getLogger(__name__)

BATCH_TRACES = 50
"""Most traces in one call of MLflow; more gain nothing, and more than 100 cannot be linked to a run."""
BATCH_CHARACTERS = 16_000_000
"""Most characters of attributes in one call of MLflow, unless a single trace has more."""
OPEN_TRACES = 256
"""Traces of another tracer provider that are remembered, so that spans which come later join theirs."""

_PASSING = {
    "TEMPORARILY_UNAVAILABLE",  # also every OperationalError of the database: locked, full, away
    "REQUEST_LIMIT_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "ABORTED",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "CUSTOMER_UNAUTHORIZED",
    "ENDPOINT_NOT_FOUND",
}
"""MLflow's error codes that say nothing about the trace; a person may have to help, but nothing is lost."""

_announced: set[str] = set()


class MlflowExporter(SpanExporter):
    """Writes trajectories to an MLflow tracking server or database.

    The experiment of MLflow is the trajectory's project, as verl has it.

    Args:
        config: gives ``tracking_uri``, ``store`` (for the embedded database), ``project``, ``experiment``.

    Raises:
        ImportError: MLflow is not installed.
        ValueError: the tracking URI names a database in memory.
    """

    def __init__(self, config: TraceConfig) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise ImportError("MLflow is not installed; pip install 'trackway[mlflow]'")
        self._config = config
        self._uri = tracking_uri(config.store, config.tracking_uri)
        self._store: Any = None
        self._experiments: dict[str, str] = {}
        self._unknown_runs: set[str] = set()
        self._open: OrderedDict[int, list[ReadableSpan]] = OrderedDict()

    def export_trajectories(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        """Write trajectories; one that was written before is brought up to date.

        Returns:
            trace id -> reason, of those that MLflow will never take.

        Raises:
            ConnectionError: MLflow cannot be reached, or cannot write now. Send all of them again later.
            RuntimeError: a person has to act first, for instance restore the experiment. Likewise.
        """
        refused: dict[str, str] = {}
        projects: dict[str, dict[str, TracePayload]] = {}
        for trajectory in trajectories:
            try:
                payload = payload_of(trajectory)
            except Exception as error:
                refused[trajectory.trace_id] = _reason(error)
                continue
            project = trajectory.project or self._config.project
            projects.setdefault(project, {})[payload.trace_id] = payload
        if projects:
            self._connect()
        for project, payloads in projects.items():
            experiment = self._experiment(project)
            for batch in _batches(list(payloads.values())):
                refused |= self._write(project, experiment, batch)
        return refused

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write spans of any tracer provider.

        A trace is written when its root has come; spans that come after it are written with it again.
        """
        complete: list[int] = []
        for span in spans:
            if span.context is None:
                continue
            trace_id = span.context.trace_id
            self._open.setdefault(trace_id, []).append(span)
            self._open.move_to_end(trace_id)
            complete.append(trace_id)
        ready = [
            self._open[trace_id]
            for trace_id in dict.fromkeys(complete)
            if any(span.parent is None for span in self._open[trace_id])
        ]
        while len(self._open) > OPEN_TRACES:
            ready += _without_root(self._open.popitem(last=False)[1])
        return self._export_traces(ready)

    def _export_traces(self, traces: Sequence[Sequence[ReadableSpan]]) -> SpanExportResult:
        from ..store import assemble

        trajectories = assemble.from_readable([span for spans in traces for span in spans])
        try:
            refused = self.export_trajectories(trajectories)
        except Exception:
            _log.exception("%d traces could not be written to MLflow", len(trajectories))
            return SpanExportResult.FAILURE
        for trace_id, reason in refused.items():
            _log.error("MLflow refuses trace %s: %s", trace_id, reason)
        return SpanExportResult.FAILURE if refused else SpanExportResult.SUCCESS

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Do nothing: every call writes what it is given."""
        return True

    def shutdown(self) -> None:
        """Write the traces of ``export`` whose root never came."""
        waiting = [spans for trace in self._open.values() for spans in _without_root(trace)]
        self._open.clear()
        if waiting:
            self._export_traces(waiting)

    # The destination

    def _connect(self) -> None:
        _check_server(self._uri)
        if self._store is not None:
            return
        from mlflow.tracing.client import TracingClient

        with _first_use(self._uri):
            self._store = TracingClient(tracking_uri=self._uri).store

    def _experiment(self, project: str) -> str:
        """Give the id of the experiment of this name, made when there is none yet."""
        project = clean(project)
        if project not in self._experiments:
            error = self._refusal(self._find_experiment, project)
            if error is not None:
                raise error
        return self._experiments[project]

    def _find_experiment(self, project: str) -> None:
        from mlflow.exceptions import MlflowException

        experiment = self._store.get_experiment_by_name(project)
        if experiment is None:
            try:
                self._store.create_experiment(project, artifact_location=self._artifacts(project))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process was first
                    raise
            experiment = self._store.get_experiment_by_name(project)
        if experiment.lifecycle_stage != "active":
            raise RuntimeError(
                f"the MLflow experiment {project!r} is deleted at {_public(self._uri)}; restore it with "
                f"`mlflow experiments restore --experiment-id {experiment.experiment_id}`, "
                "delete it for good with `mlflow gc`, or choose another project"
            )
        self._experiments[project] = str(experiment.experiment_id)

    def _artifacts(self, project: str) -> str | None:
        """Keep an embedded database's files beside it; its default is the directory one happens to be in."""
        if self._uri != _embedded(self._config.store):
            return None
        return str(self._config.store.absolute() / "mlartifacts" / quote(project, safe=" "))

    def _refusal(self, action: Callable[..., Any], *arguments: Any) -> Exception | None:
        """Call MLflow; give the error when it refuses, raise ConnectionError when it cannot take anything now."""
        try:
            action(*arguments)
        except Exception as error:
            if _is_passing(error):
                raise ConnectionError(
                    f"MLflow at {_public(self._uri)} does not take traces now: {_reason(error)}"
                ) from error
            return error
        return None

    # One batch

    def _write(self, project: str, experiment: str, batch: Sequence[TracePayload]) -> dict[str, str]:
        refused: dict[str, str] = {}
        for payload in batch:
            error = self._refusal(self._store.start_trace, _trace_info(experiment, payload))
            if error is not None:
                self._blame_the_trace(project)
                refused[payload.otel_trace_id] = _reason(error)
        started = [payload for payload in batch if payload.otel_trace_id not in refused]
        refused |= self._log_spans(project, experiment, started)
        self._link([payload for payload in started if payload.otel_trace_id not in refused])
        return refused

    def _log_spans(self, project: str, experiment: str, batch: Sequence[TracePayload]) -> dict[str, str]:
        """Write all spans at once; where MLflow refuses them, find the trace that it means by halving."""
        from mlflow.entities import Span

        if not batch:
            return {}
        spans = [Span(span) for payload in batch for span in payload.spans]
        error = self._refusal(self._store.log_spans, experiment, spans)
        if error is None:
            return {}
        if len(batch) == 1:
            self._blame_the_trace(project)
            self._remove_empty(experiment, batch[0])
            return {batch[0].otel_trace_id: _reason(error)}
        middle = len(batch) // 2
        left = self._log_spans(project, experiment, batch[:middle])
        return left | self._log_spans(project, experiment, batch[middle:])

    def _blame_the_trace(self, project: str) -> None:
        """Raise when it is not the trace but the whole destination that refuses."""
        self._experiments.pop(clean(project), None)
        _check_server(self._uri)
        self._experiment(project)

    def _remove_empty(self, experiment: str, payload: TracePayload) -> None:
        """Take back a trace whose spans were refused: a page without spans helps nobody."""
        tags = self._store.get_trace_info(payload.trace_id).tags
        if "mlflow.trace.spansLocation" not in tags:  # else an earlier delivery has spans there
            self._store.delete_traces(experiment_id=experiment, trace_ids=[payload.trace_id])

    def _link(self, batch: Sequence[TracePayload]) -> None:
        runs: dict[str, list[str]] = {}
        for payload in batch:
            if payload.run_id:
                runs.setdefault(payload.run_id, []).append(payload.trace_id)
        for run, traces in runs.items():
            error = self._refusal(self._store.link_traces_to_run, traces, run)
            if error is not None and run not in self._unknown_runs:
                self._unknown_runs.add(run)
                _log.warning("traces are written without a link to the run %s: %s", run, _reason(error))


def _without_root(trace: list[ReadableSpan]) -> list[list[ReadableSpan]]:
    return [] if any(span.parent is None for span in trace) else [trace]


def _batches(payloads: Sequence[TracePayload]) -> Iterator[list[TracePayload]]:
    batch: list[TracePayload] = []
    size = 0
    for payload in payloads:
        if batch and (len(batch) == BATCH_TRACES or size + payload.size > BATCH_CHARACTERS):
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


def _feedback(trace_id: str, reward: Reward, time_ms: int) -> Any:
    from mlflow.entities import AssessmentError, AssessmentSource, Feedback

    feedback = Feedback(
        name=reward.name,
        value=reward.value,
        error=AssessmentError("NOT_A_NUMBER", reward.error) if reward.error else None,
        source=AssessmentSource(source_type="CODE", source_id="trackway"),
        trace_id=trace_id,
        rationale=reward.rationale,
        create_time_ms=time_ms,
        last_update_time_ms=time_ms,
    )
    # The store replaces an assessment whose id it has, so the same reward never stands there twice.
    feedback.assessment_id = reward.id
    return feedback


def _is_passing(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, comes from the network, the file system or a busy database."""
    while error is not None:
        if isinstance(error, OSError) or getattr(error, "error_code", None) in _PASSING:
            return True
        if type(error).__name__ == "OperationalError":  # of SQLAlchemy, while the store is opened
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return text if len(text) <= 1000 else f"{text[:999]}…"


# Where MLflow is


def tracking_uri(store: Path, configured: str | None = None) -> str:
    """Say where MLflow keeps the traces of a store.

    That is what is configured, else ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` inside the store. A
    relative path counts from the current directory and comes back absolute.

    Raises:
        ValueError: a database in memory, which would be gone with the process that writes it.
    """
    uri = _absolute(configured or os.environ.get("MLFLOW_TRACKING_URI") or _embedded(store))
    if uri not in _announced:
        _announced.add(uri)
        _log.info("MLflow traces are at %s", _public(uri))
    return uri


def _embedded(store: Path) -> str:
    return f"sqlite:///{store.absolute() / 'mlflow.db'}"


def _absolute(uri: str) -> str:
    scheme, colon, rest = uri.partition(":")
    if scheme.startswith("sqlite"):
        path, question, query = rest.removeprefix("///").partition("?")
        if path in ("", "//", ":memory:"):
            raise ValueError(
                f"tracking_uri {uri!r} is a database in memory, gone when the exporting process ends; "
                "name a file, for instance sqlite:////data/mlflow.db"
            )
        return uri if path.startswith("file:") else f"{scheme}:///{Path(path).absolute()}{question}{query}"
    if scheme == "file" and not rest.startswith("/"):
        return Path(rest).absolute().as_uri()
    if not colon and not uri.startswith(("databricks", "uc")):
        return Path(uri).absolute().as_uri()
    return uri


def _public(uri: str) -> str:
    """Show a tracking URI without its password."""
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    return uri.replace(f":{parts.password}@", ":***@", 1)


@contextmanager
def _first_use(uri: str) -> Iterator[None]:
    """Let one process at a time open an SQLite database: the first of them creates its tables.

    Of four processes that did so at once, three failed; of eight all did, and the file stayed broken.
    """
    scheme, _, rest = uri.partition(":///")
    if not scheme.startswith("sqlite"):
        yield
        return
    database = Path(rest.partition("?")[0])
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(f"{database.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_server(uri: str) -> None:
    """Raise ConnectionError when a server does not answer at all; MLflow itself would try for minutes."""
    if not uri.startswith(("http://", "https://")):
        return
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=5).close()
    except urllib.error.HTTPError as error:
        if error.code in (502, 503, 504):
            raise ConnectionError(
                f"the MLflow server at {_public(uri)} is away: HTTP {error.code}"
            ) from error
    except OSError as error:
        raise ConnectionError(f"the MLflow server at {_public(uri)} does not answer: {error}") from error
