"""trackio: a run in its local database, without its server, its background threads or its current run."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone
from hashlib import blake2s
from pathlib import Path
from typing import Any, Final

import orjson

from ..config_values import ConfigError, show, wrong
from .base import ExperimentLogger, Histogram, Level, Run, Status, Unavailable
from .values import Names

TABLE: Final = "val/generations"
"""The metric that holds the tables of generations, as verl names it."""
_RESERVED: Final = frozenset({"project", "run", "timestamp", "step", "time", "metrics"})
_LEVELS: Final = {"info": "info", "warning": "warn", "error": "error"}


class TrackioLogger(ExperimentLogger):
    """Writes one run to trackio's database on this machine, which ``trackio show`` and ``trackio sync`` read.

    Nothing is sent anywhere, whatever ``TRACKIO_SPACE_ID`` says, and the run that the program itself has
    begun with ``trackio.init`` is left alone. Records are written where ``trackio.Run`` writes them, and
    again by the same id when that failed, so that none is lost or doubled. On a network file system they
    are files that trackio takes in when it is opened, as ever with it; what waits there is never deleted.

    NaN and infinities stay. Every call is a row: of a step logged again trackio shows both. When a run is
    resumed, what it has of later steps is deleted. Names that trackio keeps for itself get two underscores
    in front; the configuration has the originals as ``trackway/metrics/<name>``. Each round of generations is
    a table at its step.
    """

    package = None  # it must not be imported before its directory is known
    settings = frozenset({"dir", "id"})

    def __init__(self, run: Run, *, dir: str | None = None, id: str | None = None) -> None:
        """Begin the run, or go on with it.

        Args:
            run: which one.
            dir: where trackio keeps everything. Default: ``TRACKIO_DIR``, else as trackio chooses.
            id: id or name of a run of the project to go on with. Default: a run of its own, by its own id.

        Raises:
            ConfigError: there is no such run.
        """
        from trackio.sqlite_storage import SQLiteStorage

        super().__init__(run)
        self._storage = SQLiteStorage
        self._project = _project(run.project)
        if id is not None:
            self.state |= self._find(id)
        self._id: str = self.state.setdefault("id", run.id)
        self._name: str = self.state.setdefault("name", run.experiment)
        self._config: dict[str, Any] = {}
        self._names = Names(_metric_name, 1000, self.state.get("names", {}))
        self._artifacts = Names(_artifact_name, 120, self.state.get("artifacts", {}))

    @classmethod
    def check(cls, settings: Mapping[str, Any], *, offline: bool) -> dict[str, Any]:
        """See ``ExperimentLogger.check``; imports trackio, which reads its directory at that moment."""
        place = settings.get("dir")
        if place is not None and (not isinstance(place, (str, os.PathLike)) or not os.fspath(place)):
            raise wrong("trackio.dir", place, "the path of a directory on this machine")
        name = settings.get("id")
        if name is not None and not (isinstance(name, str) and name.strip()):
            raise wrong("trackio.id", name, "the id or name of a run")
        wanted = None if place is None else Path(place).expanduser().absolute()
        used = _load(wanted)
        if wanted is not None and used.absolute() != wanted:
            raise ConfigError(
                f"trackio.dir={show(str(place))} comes too late: trackio was imported before, and keeps "
                f"everything in {used}; set the variable TRACKIO_DIR for the whole program"
            )
        return dict(settings) if wanted is None else {**settings, "dir": str(wanted)}

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a row of numbers."""
        self._log("metrics", metrics, step)

    def log_histograms(self, histograms: Mapping[str, Histogram], step: int) -> None:
        """Write a row of histograms, with the bins that they have."""
        import trackio

        kind = trackio.Histogram.TYPE
        found = {
            name: {"_type": kind, "bins": list(each.edges), "values": list(each.counts)}
            for name, each in histograms.items()
        }
        self._log("histograms", found, step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Add to the configuration, which trackio takes with the next row."""
        self._note({f"config{name}" if name.startswith("_") else name: config[name] for name in config})

    def log_artifact(self, artifact: Path, name: str) -> None:
        """Keep a version of an artifact; its bytes are kept once for each content."""
        from trackio import Artifact

        (given,) = self._artifacts.map({name: None})
        kept = Artifact(given, type="file", metadata={"name": name})
        if artifact.is_dir():
            kept.add_dir(artifact)
        else:
            kept.add_file(artifact)
        self._storage.commit_artifact_version(
            project=self._project,
            name=kept.name,
            type=kept.type,
            description=kept.description,
            manifest=kept._build_manifest(self._project),
            metadata=kept.metadata,
            aliases=[],
            run_name=self._name,
            run_id=self._id,
        )
        self.state["artifacts"] = self._artifacts.changed

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write a table of these rows."""
        import trackio

        self._log(TABLE, {TABLE: {"_type": trackio.Table.TYPE, "_value": [dict(row) for row in rows]}}, step)

    def alert(self, title: str, text: str, level: Level = "warning", step: int | None = None) -> None:
        """Write an alert, which the dashboard shows."""
        from trackio.fragments import alert_record

        entry = {"title": title, "text": text, "level": _LEVELS[level], "step": step}
        self._write(alert_record, "alert_id", entry)

    def rewind(self, step: int) -> None:
        """Delete the rows of this step and of later ones."""
        path = self._storage.get_project_db_path(self._project)
        if not path.exists():
            return
        with closing(sqlite3.connect(path, timeout=30)) as database, database:
            known = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            for table in {"metrics", "traces", "alerts"} & known:
                database.execute(f"DELETE FROM {table} WHERE run_id = ? AND step >= ?", (self._id, step))

    def finish(self, status: Status) -> None:
        """Note how the run ended, in its configuration; trackio itself keeps no such thing."""
        self._note({"trackway/status": status})
        self._log("end", {}, self.state.get("step", 0))

    def _find(self, wanted: str) -> dict[str, str]:
        """Give ``id`` and ``name`` of a run of trackio; of several with the same name the latest counts."""
        runs = self._storage.get_run_records(self._project)
        found = next((run for run in runs if run["id"] == wanted), None)
        found = found or self._storage.get_latest_run_record_by_name(self._project, wanted)
        if found is None:
            place = self._storage.get_project_db_path(self._project)
            raise ConfigError(f"trackio.id={show(wanted)}: there is no such run in {place}")
        return {key: str(found[key]) for key in ("id", "name")}

    def _log(self, what: str, values: Mapping[str, Any], step: int) -> None:
        """Write a row, and with it the configuration if that has changed."""
        from trackio.fragments import metric_record

        given = self._names.map(values) if what in ("metrics", "histograms") else values
        if self.state.get("names", {}) != self._names.changed:
            self.state["names"] = dict(self._names.changed)
            self._note({f"trackway/metrics/{to}": name for name, to in self._names.changed.items()})
        entry: dict[str, Any] = {"metrics": given, "step": step}
        if "config" in self.state:
            # It takes the place of what trackio has.
            self._config = entry["config"] = {**self._facts(), **self._known(), **self.state["config"]}
        self._write(metric_record, "log_id", entry)
        self.state["step"] = step
        self.state.pop("config", None)

    def _write(self, record_of: Any, id_name: str, entry: dict[str, Any]) -> None:
        """Write a record, once however often this is tried."""
        from trackio import fragments, utils

        time = datetime.fromtimestamp(self.time, timezone.utc).isoformat()
        entry |= {"project": self._project, "run": self._name, "run_id": self._id, "timestamp": time}
        record = record_of(entry)
        content = orjson.dumps({**record, "config": None}, option=orjson.OPT_SORT_KEYS)
        record[id_name] = blake2s(content, digest_size=16).hexdigest()
        if utils.get_storage_mode() == "jsonl":
            fragments.FragmentWriter().write_local([record])
        else:
            fragments.import_records([record])

    def _known(self) -> Mapping[str, Any]:
        """Give the configuration that trackio has of the run."""
        return self._config or self._storage.get_run_config(self._project, self._name, self._id) or {}

    def _facts(self) -> dict[str, Any]:
        return {
            "_Created": datetime.fromtimestamp(self.run.started, timezone.utc).isoformat(),
            "_Group": self.run.group,
            "trackway/run": self.run.id,
            "trackway/project": self.run.project,
        }

    def _note(self, facts: Mapping[str, Any]) -> None:
        self.state["config"] = {**self.state.get("config", {}), **facts}


def _load(directory: Path | None) -> Path:
    """Import trackio, with its directory where it is not imported yet, and give the one that it has.

    Raises:
        Unavailable: it is not installed.
    """
    before = os.environ.get("TRACKIO_DIR")
    if directory is not None and "trackio" not in sys.modules:
        os.environ["TRACKIO_DIR"] = str(directory)
    try:
        from trackio import fragments, utils
    except ImportError as error:
        raise Unavailable(
            f"logger trackio cannot be used: {error}; pip install 'trackway[trackio]'"
        ) from error
    finally:
        if before is None:
            os.environ.pop("TRACKIO_DIR", None)
        else:
            os.environ["TRACKIO_DIR"] = before
    del fragments  # which versions before 0.28 do not have
    return Path(utils.TRACKIO_DIR)


def _project(name: str) -> str:
    """Give a name of a project that trackio takes; some ends and beginnings are its own."""
    from trackio.sqlite_storage import SQLiteStorage

    try:
        SQLiteStorage.validate_project_name(name)
    except ValueError:
        return f"project-{name}-runs"
    return name


def _metric_name(name: str) -> str:
    return f"__{name}" if name in _RESERVED or name.startswith("__") else name


def _artifact_name(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)
