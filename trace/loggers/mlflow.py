"""MLflow: a run written by its id, beside whatever the program itself does with MLflow."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from ..config_values import ConfigError, wrong
from ..exporters.mlflow_errors import explained
from ..exporters.mlflow_store import check_server, experiment_id, open_store, tracking_uri
from ..exporters.text import short_name
from ..model import TrajectoryKey
from ..printable import without_password
from .base import ExperimentLogger, Level, Run, Status
from .values import Names, finite

_NAME: Final = 250
_VALUE: Final = 6000
"""Characters of a parameter's value, and of our longest tags; MLflow refuses longer ones."""
_METRICS_AT_ONCE: Final = 1000
_OTHERS_AT_ONCE: Final = 100
"""What one call may hold; MLflow refuses more."""
_BYTES_AT_ONCE: Final = 900_000
"""Of one call's JSON, of which a server takes a million."""
_TABLES: Final = 80
"""Rounds of generations that MLflow's page shows as tables, which a tag names; older ones stay as files."""
_CHANGED: Final = "trackway.config/"
"""Begins the tag of a parameter that got another value later; MLflow never changes a parameter."""
_STATUSES: Final = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


class MlflowLogger(ExperimentLogger):
    """Writes one run to MLflow, of the experiment that is called as the project.

    Neither the tracking URI nor the run that the program itself has active is changed. Metrics keep the time
    at which they were logged, and arrive once however often they are sent. Of a step logged again MLflow
    keeps both values and shows the later one as the latest; it forgets nothing when a run is resumed from an
    earlier step, so that the tag ``trackway.resumed_at`` says which step that was.

    Names get verl's rule: ``@`` becomes ``_at_``, what MLflow does not take ``_``; the tag
    ``trackway.metric_names`` has the originals. What is not finite is left out, since MLflow's databases keep
    infinities as huge numbers and NaN as a zero with a mark that not every version looks at; how often that
    happened so far is the metric ``nonfinite/<name>``.

    The configuration becomes parameters, joined by ``/`` and cut at 6,000 characters, and the artifact
    ``config.json``. A parameter that has another value later keeps the first, and the tag
    ``trackway.config/<name>`` has the last. Each round of generations is a table of its own among the
    artifacts, whose rows name their trajectories and where in MLflow's page these are listed. Alerts are
    artifacts, of which the tag ``trackway.alert`` shows the last.
    """

    package = "mlflow"
    settings = frozenset({"tracking_uri", "run_id", "parent_run_id"})
    secrets = frozenset({"tracking_uri"})  # it may hold a password

    def __init__(
        self,
        run: Run,
        *,
        tracking_uri: str | None = None,
        run_id: str | None = None,
        parent_run_id: str | None = None,
    ) -> None:
        """Begin the run at MLflow, or go on with it.

        Args:
            run: which one.
            tracking_uri: where MLflow is. Default: where this run was begun, else ``MLFLOW_TRACKING_URI``,
                else ``mlflow.db`` inside the store.
            run_id: of an MLflow run to write to, which somebody else ends. Default: ``MLFLOW_RUN_ID``.
            parent_run_id: of the MLflow run below which this one is listed.
        """
        super().__init__(run)
        self._folder = run.directory.parent.parent
        self._uri = self._place(tracking_uri)
        self._server: Any = None
        with self._speaking():
            from mlflow import MlflowClient

            self._server = open_store(self._uri)
            self._client = MlflowClient(tracking_uri=self._uri)
            self._open(run_id, parent_run_id)
        self._names = Names(_metric_name, _NAME, self.state.get("names", {}))
        self._params = Names(_metric_name, _NAME - len(_CHANGED), self.state.get("params", {}))

    @classmethod
    def check(cls, settings: Mapping[str, Any], *, offline: bool) -> dict[str, Any]:
        """See ``ExperimentLogger.check``."""
        for name in cls.settings:
            value = settings.get(name)
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise wrong(f"mlflow.{name}", value, "a text that is not empty")
        checked = dict(settings)
        given = settings.get("tracking_uri")
        try:
            place = tracking_uri(Path(), given)  # a relative path counts from where the run begins
        except ValueError as error:
            raise ConfigError(f"mlflow: {error}") from None
        if given is not None:
            checked["tracking_uri"] = place
        return checked

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers with the time at which they were logged; count what is not finite."""
        from mlflow.entities import Metric

        stamp = self._stamp()
        values = finite(metrics)
        before = self.state.get("nonfinite", {})
        odd = {name: before.get(name, 0) + 1 for name in metrics if name not in values}
        values |= {f"nonfinite/{name}": count for name, count in odd.items()}
        given = self._names.map(values)
        self._note_names()
        with self._speaking():
            for names in _portions([(name,) for name in given], _METRICS_AT_ONCE):
                self._client.log_batch(
                    self._id,
                    metrics=[Metric(name, float(given[name]), stamp, step) for (name,) in names],
                )
        if odd:
            self.state["nonfinite"] = {**before, **odd}

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write parameters, and the whole as an artifact."""
        from mlflow.entities import Param, RunTag

        text = json.dumps(config, indent=2, ensure_ascii=False)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if self.state.get("config") == digest:
            return
        flat = self._params.map({name: value[:_VALUE] for name, value in _flat("", config)})
        number = self.state.get("configs", 0) + 1
        with self._speaking():
            known = self._client.get_run(self._id).data.params
            fresh = [(name, value) for name, value in flat.items() if name not in known]
            for portion in _portions(fresh, _OTHERS_AT_ONCE):
                self._client.log_batch(self._id, params=[Param(*item) for item in portion])
            changed = [
                (f"{_CHANGED}{name}", value)
                for name, value in flat.items()
                if known.get(name, value) != value
            ]
            for portion in _portions(changed, _OTHERS_AT_ONCE):
                self._client.log_batch(self._id, tags=[RunTag(*item) for item in portion])
            self._client.log_text(self._id, text, "config.json" if number == 1 else f"config-{number}.json")
        self.state |= {"config": digest, "configs": number, "params": self._params.changed}

    def log_artifact(self, artifact: Path, name: str) -> None:
        """Upload a file, or a directory with all that is in it."""
        with self._speaking(), tempfile.TemporaryDirectory() as folder:
            if artifact.is_dir():
                self._client.log_artifacts(self._id, str(artifact), artifact_path=name)
                return
            above, leaf = posixpath.split(name)
            if artifact.name != leaf:  # MLflow takes the name from the file
                link = Path(folder, leaf)
                link.symlink_to(artifact.absolute())
                artifact = link
            self._client.log_artifact(self._id, str(artifact), artifact_path=above or None)

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write a table of its own for each round."""
        rounds = self.state.get("rounds", {})
        number = rounds.get(str(step), 0) + 1
        path = f"generations/step_{step:06d}{'' if number == 1 else f'-{number}'}.json"
        columns = [*dict.fromkeys(name for row in rows for name in row), "traces"]
        data = [[*(row.get(name) for name in columns[:-1]), self._traces(row)] for row in rows]
        with self._speaking():
            self._client.log_text(
                self._id, json.dumps({"columns": columns, "data": data}, ensure_ascii=False), path
            )
            self._show_as_table(path)
        self.state["rounds"] = {**rounds, str(step): number}

    def alert(self, title: str, text: str, level: Level = "warning", step: int | None = None) -> None:
        """Keep an alert as an artifact and show it as a tag of the run."""
        number = self.state.get("alerts", 0) + 1
        alert = {"time": self.time, "step": step, "level": level, "title": title, "text": text}
        at = "" if step is None else f" at step {step}"
        with self._speaking():
            self._client.log_text(
                self._id, json.dumps(alert, ensure_ascii=False), f"alerts/{number:06d}.json"
            )
            self._client.set_tag(self._id, "trackway.alert", f"{level}{at}: {title}: {text}"[:_VALUE])
            self._client.set_tag(self._id, "trackway.alerts", str(number))
        self.state["alerts"] = number

    def rewind(self, step: int) -> None:
        """Say from which step the run goes on; its tables are written anew from there."""
        with self._speaking():
            self._client.set_tag(self._id, "trackway.resumed_at", str(step))
        rounds = self.state.get("rounds", {})
        self.state["rounds"] = {at: number for at, number in rounds.items() if int(at) < step}

    def finish(self, status: Status) -> None:
        """End the MLflow run, unless somebody else has begun it."""
        if self.state["attached"]:
            return
        with self._speaking():
            self._client.set_terminated(self._id, _STATUSES[status], end_time=int(self.time * 1000))

    def _place(self, given: str | None) -> str:
        """Say where MLflow is; a run that was begun elsewhere than now is said begins there again."""
        kept: str | None = self.state.get("tracking_uri")
        wanted = tracking_uri(self._folder, given)
        if kept is not None and kept != without_password(wanted):
            if given is None:
                return kept
            self.state.clear()
        return wanted

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """Fail at once where a server is away, which MLflow would try for minutes, and say what is wrong."""
        try:
            check_server(self._uri)
            yield
        except Exception as error:
            raise explained(error, self._uri, self._server, "does not take what is logged") from error

    def _open(self, attach: str | None, parent: str | None) -> None:
        if attach is None and "run_id" not in self.state and self.run.rank in (None, 0):
            attach = os.environ.get("MLFLOW_RUN_ID")
        if attach is not None and attach != self.state.get("run_id"):
            self.state = {"run_id": attach, "attached": True}
        found = self._client.get_run(self.state["run_id"]) if "run_id" in self.state else self._begin(parent)
        self._id: str = found.info.run_id
        self._experiment: str = found.info.experiment_id
        self.state.setdefault("attached", False)
        self.state |= {"run_id": self._id, "tracking_uri": without_password(self._uri)}
        if self.state["attached"]:
            for name, value in self._tags().items():
                self._client.set_tag(self._id, name, value)
        elif found.info.status != "RUNNING":
            self._client.update_run(self._id, "RUNNING")

    def _begin(self, parent: str | None) -> Any:
        """Make the MLflow run, unless an attempt that was interrupted has made it already."""
        from mlflow.tracking.context.registry import resolve_tags

        experiment = experiment_id(self._client, short_name(self.run.project), self._uri, self._folder)
        made = self._client.search_runs([experiment], f"tags.`trackway.run` = '{self.run.id}'", max_results=1)
        if made:
            return made[0]
        tags = self._tags() if parent is None else {**self._tags(), "mlflow.parentRunId": parent}
        return self._client.create_run(
            experiment,
            start_time=int(self.run.started * 1000),
            tags=resolve_tags(tags),
            run_name=short_name(self.run.experiment),
        )

    def _tags(self) -> dict[str, str]:
        facts = {"run": self.run.id, "group": self.run.group, "rank": self.run.rank}
        return {f"trackway.{name}": str(value)[:_VALUE] for name, value in facts.items() if value is not None}

    def _stamp(self) -> int:
        """Give the millisecond at which something was logged; never the same one twice.

        So the later of two values stays the later; and whoever sends something again, perhaps in another
        life of the run, gives it the same one, by which MLflow knows what it has.
        """
        stamp: int
        logged, stamp = self.state.get("stamp", (None, 0))
        if logged != self.time:
            stamp = max(int(self.time * 1000), stamp + 1)
            self.state["stamp"] = (self.time, stamp)
        return stamp

    def _note_names(self) -> None:
        """Keep the originals of names that were changed where people find them."""
        changed = self._names.changed
        if changed == self.state.get("names", {}):
            return
        text = json.dumps({given: name for name, given in changed.items()}, ensure_ascii=False)
        with self._speaking():
            if len(text) > _VALUE:
                self._client.log_text(self._id, text, "metric_names.json")
                text = "see the artifact metric_names.json"
            self._client.set_tag(self._id, "trackway.metric_names", text)
        self.state["names"] = changed

    def _show_as_table(self, path: str) -> None:
        """Name a table in the tag by which MLflow's page knows tables from other files."""
        tag = "mlflow.loggedArtifacts"
        named = json.loads(self._client.get_run(self._id).data.tags.get(tag, "[]"))
        entry = {"path": path, "type": "table"}
        others = [each for each in named if each != entry]
        self._client.set_tag(self._id, tag, json.dumps([*others, entry][-_TABLES:]))

    def _traces(self, row: Mapping[str, Any]) -> str | None:
        """Give the address in MLflow's page that lists the trajectory of a row."""
        try:
            key = TrajectoryKey.parse(row.get("trajectory") or "")
        except ValueError:
            return None
        tags = {"step": key.step, "sample_index": key.sample_index, "rollout_n": key.rollout_n}
        asked = "&".join(f"tag={quote(f'{name}={value}', safe='')}" for name, value in tags.items())
        server = without_password(self._uri).rstrip("/") if self._uri.startswith("http") else ""
        return f"{server}/#/experiments/{self._experiment}/traces?startTimeLabel=ALL&{asked}"


def _metric_name(name: str) -> str:
    """Give a name that MLflow takes, by verl's rule, and that no file system takes for another."""
    name = re.sub(r"[^/\w.\- :]", "_", re.sub("/+", "/", name.replace("@", "_at_")))
    parts = [part if part.strip(".") else "_" * max(1, len(part)) for part in name.strip("/").split("/")]
    return re.sub(r"^\.\.", "__", "/".join(parts))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Give the parameters of a configuration: as verl has them, with lists by index and ``list_len``."""
    if isinstance(value, list):
        value = {"list_len": len(value), **{str(index): item for index, item in enumerate(value)}}
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(f"{name}/{key}" if name else str(key), item)
    elif name:
        yield name, str(value)


def _portions(items: Sequence[tuple[str, ...]], most: int) -> Iterator[list[tuple[str, ...]]]:
    """Divide what is to be sent into calls that MLflow takes."""
    portion: list[tuple[str, ...]] = []
    size = 0
    for item in items:
        more = 100 + sum(len(json.dumps(text)) for text in item)
        if portion and (len(portion) == most or size + more > _BYTES_AT_ONCE):
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += more
    if portion:
        yield portion
