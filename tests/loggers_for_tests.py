"""Loggers that tests install as a package would be: found through an entry point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trackway.trace.loggers import runlog

FAKE = """
import json, os, time
from pathlib import Path
from trackway.trace.loggers import ExperimentLogger

class Fake(ExperimentLogger):
    '''Writes down each call it takes, in the directory that TOLD names; what it does else, rules() says.'''
    settings = frozenset({"rules"})
    name = "fake"

    def __init__(self, run, *, rules=None):
        super().__init__(run)
        self.rules = rules or {}
        self._told = Path(os.environ["TOLD"]) / f"{self.name}.jsonl"
        self._tell("open", run.resumed, self.state.get("lives", 0))
        self.state["lives"] = self.state.get("lives", 0) + 1

    def _tell(self, *call):
        if (Path(os.environ["TOLD"]) / f"{self.name}.down").exists():
            raise ConnectionError("nobody answers")
        if self.rules.get("slow"):
            time.sleep(self.rules["slow"])
        with self._told.open("a") as file:
            file.write(json.dumps(call) + "\\n")

    def log_metrics(self, metrics, step):
        if step == self.rules.get("refuses"):
            raise ValueError("not this one")
        self._tell("metrics", step, metrics)

    def log_config(self, config):
        if self.rules.get("refuses_config"):
            raise ValueError("not this one")
        self._tell("config", config)

    def log_artifact(self, artifact, name):
        self._tell("artifact", name, artifact.read_text() if artifact.is_file() else sorted(
            str(each.relative_to(artifact)) for each in artifact.rglob("*")))

    def rewind(self, step):
        self._tell("rewind", step)

    def alert(self, title, text, level="warning", step=None):
        self._tell("alert", title, text, level, step)

    def finish(self, status):
        self._tell("finish", status)

class Other(Fake):
    name = "other"

class Plain(Fake):
    '''Has only what an ExperimentLogger must have.'''
    name = "plain"
    rewind = ExperimentLogger.rewind
    alert = ExperimentLogger.alert
"""


class Installed:
    """A package of three loggers, ``fake``, ``other`` and ``plain``, and what these were told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "site"

    def told(self, name: str = "fake") -> list[Any]:
        """Give the calls that a logger took."""
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self, name: str = "fake") -> list[int]:
        """Give the steps of which a logger has metrics, in the order in which they came."""
        return [call[1] for call in self.told(name) if call[0] == "metrics"]

    def down(self, name: str = "fake") -> Path:
        """Give the file that makes a logger unreachable as long as it is there."""
        return self.folder / f"{name}.down"


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Install three loggers for this test."""
    installed = Installed(tmp_path)
    info = installed.path / "fakes-1.0.dist-info"
    info.mkdir(parents=True)
    (installed.path / "fake_loggers.py").write_text(FAKE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fakes\nVersion: 1.0\n")
    entries = {"fake": "fake_loggers:Fake", "other": "fake_loggers:Other", "plain": "fake_loggers:Plain"}
    entries["absent"] = "no_such_package_anywhere:Logger"
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[trackway.loggers]", *lines, ""]))
    monkeypatch.syspath_prepend(str(installed.path))
    monkeypatch.setenv("TOLD", str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "fake_loggers", raising=False)
    monkeypatch.chdir(tmp_path)
    return installed


def records(run_directory: Path, kind: str) -> list[dict[str, Any]]:
    """Give the data of one kind of records in a run's log."""
    return [record.data for record in runlog.read(run_directory / runlog.LOG) if record.kind == kind]
