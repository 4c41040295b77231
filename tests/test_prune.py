"""``trackway prune``: what it deletes from MLflow, what it leaves alone, and what it says."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trackway
from trackway.trace.exporters import sync
from trackway.trace.exporters.election import stand
from trackway.trace.formats.mlflow import MlflowTraces
from trackway.trace.store import Store, locks

from .programs import Cli
from .servers import mlflow_server
from .test_from_mlflow import _theirs

pytest.importorskip("mlflow")
pytestmark = pytest.mark.slow  # every test here asks a database of MLflow

PROJECT = "pruning"


class Exported:
    """A store and its MLflow."""

    def __init__(self, path: Path, uri: str) -> None:
        self.path = path
        self.uri = uri

    @property
    def place(self) -> list[str]:
        return ["--store", str(self.path)]

    def names(self) -> list[str]:
        return [line.name for line in MlflowTraces(self.uri, PROJECT).query(all_attempts=True)]

    def rows(self, table: str) -> int:
        with contextlib.closing(sqlite3.connect(self.path / "mlflow.db")) as database:
            (count,) = database.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(count)


def record(path: Path, *, steps: int = 3, run_id: str | None = None, uri: str | None = None) -> None:
    """Record two training rollouts and a validation rollout for every step, and export them."""
    trackway.configure(
        store=path, project=PROJECT, backend="mlflow", sync="inline", run_id=run_id, tracking_uri=uri
    )

    @trackway.tool_trace
    def look(text: str) -> str:
        return text * 50

    for step in range(1, steps + 1):
        for sample, validate in ((1, False), (2, False), (1, True)):
            with trackway.trajectory(step=step, sample_index=sample, validate=validate):
                trackway.reward("reward", 0.5)
                look("a page of text " * 200)
    assert trackway.flush(timeout=300).pending == 0
    trackway.shutdown()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, blank_mlflow: Path) -> Path:
    path = tmp_path_factory.mktemp("prune") / "store"
    path.mkdir()
    shutil.copy(blank_mlflow, path)
    record(path)
    return path


@pytest.fixture
def exported(first: Path, tmp_path: Path) -> Exported:
    path = tmp_path / "store"
    shutil.copytree(first, path)
    return Exported(path, f"sqlite:///{path / 'mlflow.db'}")


ALL = [f"{kind}{step}/{sample}/0" for step in (1, 2, 3) for kind, sample in (("", 1), ("", 2), ("val/", 1))]


def test_traces_before_a_step_go_with_all_that_belongs_to_them(exported: Exported, cli: Cli) -> None:
    assert exported.names() == ALL
    result = cli("prune", *exported.place, "--before-step", "3", "--yes")
    assert result.code == 0
    assert exported.names() == ALL[6:]
    lines = result.out.splitlines()
    assert lines[0].startswith("6 traces with 12 spans, about ")
    assert "2 of them validation, in the experiment 'pruning' of MLflow at sqlite:" in lines[0]
    assert lines[1].startswith("deleted 6 traces with 12 spans, about ")
    assert "the journal of the store keeps these rollouts" in result.err
    for table, left in (("trace_info", 3), ("spans", 6), ("assessments", 3)):
        assert exported.rows(table) == left
    with contextlib.closing(Store(exported.path)) as store:
        assert [line.name for line in store.query()] == ALL


def test_a_dry_run_deletes_nothing_and_says_the_same(exported: Exported, cli: Cli) -> None:
    result = cli("prune", *exported.place, "--step", "2..3", "--dry-run")
    assert result.code == 0
    assert exported.names() == ALL
    first, last = result.out.splitlines()
    assert first == cli("prune", *exported.place, "--step", "2..3", "--yes").out.splitlines()[0]
    assert last == "nothing was deleted"
    assert exported.names() == ALL[:3]


@pytest.mark.parametrize(
    ("choice", "left"),
    [
        (["--step", "2"], ALL[:3] + ALL[6:]),
        (["--step", "1,3"], ALL[3:6]),
        (["--step", ">=2"], ALL[:3]),
        (["--older-than", "1h"], ALL),
        (["--older-than", "99999999999w"], ALL),
        (["--older-than", "0s"], []),
        (["--older-than", "0s", "--step", "1"], ALL[3:]),
        (["--run", "none of these"], ALL),
    ],
    ids=str,
)
def test_every_condition_has_to_be_met(
    exported: Exported, cli: Cli, choice: list[str], left: list[str]
) -> None:
    result = cli("prune", *exported.place, *choice, "--yes")
    assert result.code == 0
    assert exported.names() == left
    assert ("nothing to delete in the experiment" in result.out) == (left == ALL)


def test_the_traces_of_one_run(exported: Exported, cli: Cli) -> None:
    mlflow = MlflowTraces(exported.uri, PROJECT)
    run = mlflow.mlflow.create_run(mlflow.experiment_id, "me", 0, [], "a run").info.run_id
    record(exported.path, steps=1, run_id=run)
    assert len(exported.names()) == 12
    assert cli("prune", *exported.place, "--run", run, "--yes").code == 0
    assert exported.names() == ALL
    assert mlflow.mlflow.get_run(run).info.run_id == run


def test_what_others_wrote_stays(exported: Exported, cli: Cli) -> None:
    mlflow = MlflowTraces(exported.uri, PROJECT)
    _theirs(mlflow.mlflow, mlflow.experiment_id, "a", {"step": "1", "sample_index": "1", "rollout_n": "5"})
    result = cli("prune", *exported.place, "--older-than", "0s", "--yes")
    assert result.code == 0
    assert result.out.startswith("1 that match were not written by Trackway, and stay\n")
    assert exported.names() == ["1/1/5"]


def test_the_file_gets_smaller_where_nobody_writes(exported: Exported, cli: Cli) -> None:
    record(exported.path, steps=15)
    database = exported.path / "mlflow.db"
    before = database.stat().st_size
    lock = stand(exported.path)
    assert lock is not None
    try:
        result = cli("prune", *exported.place, "--step", "4..8", "--yes")
        assert "new traces take the room: a follower exports into it now" in result.out
        assert database.stat().st_size >= before
    finally:
        locks.release(lock)
    result = cli("prune", *exported.place, "--step", "9..15", "--yes")
    assert f"{database} went from " in result.out
    assert database.stat().st_size < before
    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_what_was_pruned_is_sent_again_only_when_it_changes(exported: Exported, cli: Cli) -> None:
    assert cli("prune", *exported.place, "--before-step", "3", "--yes").code == 0
    assert sync.run(exported.path, say=lambda _: None) == 0
    assert exported.names() == ALL[6:]
    trackway.configure(store=exported.path, project=PROJECT, backend="mlflow", sync="off")
    trackway.attach(trackway.TrajectoryKey(1, 1), rewards={"late": 1.0})
    trackway.flush()
    trackway.shutdown()
    assert sync.run(exported.path, say=lambda _: None) == 0
    assert exported.names() == ["1/1/0", *ALL[6:]]
    again = MlflowTraces(exported.uri, PROJECT).load("1/1/0")
    assert again.rewards == {"reward": 0.5, "late": 1.0}
    assert [span.name for span in again.spans] == ["trajectory", "look", "attach"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "say which traces: --before-step N, --step N, --older-than 7d or --run ID"),
        (["--yes"], "say which traces"),
        (["--before-step", "3", "--step", "1", "--yes"], "--before-step and --step both name steps"),
        (["--step", "x", "--yes"], "'x' names no steps"),
        (["--older-than", "7 weeks", "--yes"], "'7 weeks' is no age; write a number and s, m, h, d or w"),
        (["--older-than", "-1d", "--yes"], "'-1d' is no age"),
        (["--step", "1"], "nobody can be asked here: give --yes to delete"),
    ],
)
def test_wrong_use_deletes_nothing(exported: Exported, cli: Cli, args: list[str], sentence: str) -> None:
    result = cli("prune", *exported.place, *args)
    assert (result.code, result.out) == (2, "")
    assert sentence in " ".join(result.err.split())
    assert exported.names() == ALL


def test_a_terminal_is_asked(exported: Exported) -> None:
    for answer, code, left in (("n", 1, ALL), ("", 1, ALL), ("y", 0, ALL[3:])):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "trackway", "prune", *exported.place, "--step", "1"]
        with subprocess.Popen(
            command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            os.close(theirs)
            os.write(ours, f"{answer}\n".encode())
            out, _ = process.communicate(timeout=120)
        os.close(ours)
        assert "Delete them?" in out
        assert process.returncode == code
        assert exported.names() == left
        assert ("nothing was deleted" in out) == (answer != "y")


def test_an_interrupted_one_says_how_far_it_came(
    exported: Exported, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trackway.trace.formats import mlflow_prune

    monkeypatch.setattr(mlflow_prune, "BATCH", 2)
    delete = mlflow_prune._delete
    calls = []

    def interrupted(*args: Any) -> None:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args)
        delete(*args)

    monkeypatch.setattr(mlflow_prune, "_delete", interrupted)
    result = cli("prune", *exported.place, "--before-step", "4", "--yes")
    assert result.code == 130
    assert "deleted 4 traces with 8 spans" in result.out
    assert "5 are left, and the same command goes on with them" in result.out
    assert exported.names() == ALL[4:]  # the oldest went first
    monkeypatch.setattr(mlflow_prune, "_delete", delete)
    assert cli("prune", *exported.place, "--before-step", "4", "--yes").code == 0
    assert exported.names() == []


def test_a_database_that_fails_halfway_says_how_far_it_came(exported: Exported, cli: Cli) -> None:
    with contextlib.closing(sqlite3.connect(exported.path / "mlflow.db")) as database, database:
        database.execute(
            "CREATE TRIGGER refuse BEFORE DELETE ON trace_info BEGIN SELECT RAISE(ABORT, 'no room'); END"
        )
    result = cli("prune", *exported.place, "--step", "1", "--yes")
    assert result.code == 1
    assert "deleted 0 traces with 0 spans" in result.out
    assert "3 are left" in result.out
    assert "no room" in result.err
    assert "Traceback" not in result.err
    assert exported.names() == ALL


def test_more_than_one_call_deletes_and_a_server_does_so_too(tmp_path: Path, cli: Cli) -> None:
    with mlflow_server(tmp_path / "server") as server:
        record(tmp_path / "store", steps=50, uri=server.address)
        exported = Exported(tmp_path / "store", server.address)
        assert len(exported.names()) == 150
        result = cli("prune", *exported.place, "--before-step", "50", "--yes")
        assert result.code == 0
        assert "deleted 147 traces with 294 spans" in result.out
        assert "went from" not in result.out
        assert len(exported.names()) == 3
