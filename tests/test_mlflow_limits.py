"""What MLflow's databases cannot hold: it arrives cut and marked, or waits in the store; nothing is lost."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import trackway
from trackway import annotate, llm_trace, open_store, reward, tool_trace, trajectory
from trackway.trace import semconv
from trackway.trace.exporters import sync
from trackway.trace.model import Trajectory

from .servers import mlflow_server, postgres
from .test_mlflow_servers import Place, make_place

pytest.importorskip("mlflow")
pytestmark = pytest.mark.slow  # every test here asks a database of MLflow

LEFT_OUT = re.compile(r"⟨(\d+) characters are left out here; `trackway show \S+ --full` shows them⟩")
BAD = "a\ud83eb\0c"
"""A lone surrogate, which no UTF-8 holds, and a NUL, which PostgreSQL refuses in any text."""
SHOWN = "a\\ud83eb␀c"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, blank_mlflow: Path) -> Place:
    """One database for all tests, each with an experiment of its own."""
    return Place(f"sqlite:///{shutil.copy(blank_mlflow, tmp_path_factory.mktemp('place'))}")


@pytest.fixture(
    scope="module",
    params=[
        "SQLite",
        "PostgreSQL",
        "server on PostgreSQL",
    ],
)
def place(
    request: pytest.FixtureRequest, file: Place, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    if request.param == "SQLite":
        yield file
        return
    with postgres() as running:
        if request.param == "PostgreSQL":
            yield Place(running.database())
            return
        with mlflow_server(tmp_path_factory.mktemp("server"), backend=running.database()) as server:
            yield Place(server.address)


class Recorded:
    """A store that is delivered to a place.

    Attributes:
        path: of the store.
        place: where it goes.
        project: its experiment there.
    """

    def __init__(self, path: Path, place: Place, project: str, **settings: Any) -> None:
        self.path, self.place, self.project = path, place, project
        trackway.configure(
            store=path, backend="mlflow", tracking_uri=place.uri, project=project, sync="off", **settings
        )

    def sync(self) -> str:
        """Deliver, and give what was said."""
        said: list[str] = []
        trackway.flush()
        sync.run(self.path, say=said.append)
        return "\n".join(said)

    def counts(self) -> tuple[int, int, int, int]:
        """Give how many spans are recorded, exported, pending and dropped."""
        opened = open_store(self.path)
        status = opened.status()
        opened.close()
        return status.recorded, status.exported, status.pending, status.dropped

    def trajectory(self) -> Trajectory:
        opened = open_store(self.path)
        (summary,) = opened.query(all_attempts=True)
        found = opened.load(summary.trace_id)
        opened.close()
        return found

    def trace(self) -> Any:
        return self.place.client.get_trace(f"tr-{self.trajectory().trace_id}")


def record_one(sample: Any = 0, step: int = 1) -> None:
    with trajectory(step=step, sample_index=sample):
        reward("reward", 1.0)


ALL = "every destination has everything"


# Lengths


@pytest.mark.parametrize("length", [249, 250, 251, 4_096, 4_097, 9_000])
def test_long_names_and_values_arrive_whole_or_cut_with_a_mark(
    place: Place, tmp_path: Path, length: int
) -> None:
    names = [mark * length for mark in "xeprakvt"]
    sample, experiment, project, run_id, name, key, value, text = names
    recorded = Recorded(tmp_path, place, project, experiment=experiment, run_id=run_id)
    with suppress(ValueError), trajectory(step=1, sample_index=sample):
        reward(name, 1.0, explanation=text)
        annotate(**{key: value})
        raise ValueError(text)
    assert recorded.sync() == ALL
    # The name of an experiment is cut like that of a reward, and still tells it from all others.
    shortened = [
        found.name for found in place.client.search_experiments() if found.name[:200] == project[:200]
    ]
    assert len({name[:250] for name in shortened}) == len(shortened)
    trace = recorded.trace()
    tags = trace.info.tags
    for tag, whole in (("sample_index", sample), ("experiment_name", experiment)):
        assert len(tags[tag]) <= 4_096
        if length <= 4_096:
            assert tags[tag] == whole
        else:
            head, hidden, tail = LEFT_OUT.split(tags[tag])
            assert head + whole[: int(hidden)] + tail == whole
    (score,) = (item for item in trace.info.assessments if item.name != "reward")
    assert (score.value, score.rationale) == (1.0, text)
    assert score.name == name if length <= 250 else len(score.name) <= 250
    session = trace.info.trace_metadata["mlflow.trace.session"]
    assert len(session) <= 250
    found = place.client.search_traces(
        locations=[trace.info.experiment_id],
        filter_string=f"metadata.`mlflow.trace.session` = '{session}'",
    )
    assert [item.info.trace_id for item in found] == [trace.info.trace_id]
    (root,) = trace.data.spans
    assert root.get_attribute(semconv.SAMPLE_INDEX) == sample
    assert root.outputs["annotations"] == {key: value}
    kept = recorded.trajectory()
    assert kept.key is not None
    assert (kept.key.sample_index, kept.experiment, kept.project, kept.run_id) == (
        sample,
        experiment,
        project,
        run_id,
    )
    assert dict(kept.rewards) == {name: 1.0}


def test_long_names_that_begin_alike_stay_apart(place: Place, tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, place, "alike")
    long = "n" * 300
    for sample in (f"{long}1", f"{long}2"):
        with trajectory(step=1, sample_index=sample):
            reward(f"{long}1", 1.0)
            reward(f"{long}2", 2.0)
    assert recorded.sync() == ALL
    traces = place.search("alike")
    assert len({trace.info.trace_metadata["mlflow.trace.session"] for trace in traces}) == 2
    for trace in traces:
        scores = {item.name: item.value for item in trace.info.assessments}
        assert sorted(scores.values()) == [1.0, 2.0, 3.0]
        assert len(scores) == 3


@pytest.mark.parametrize("value", [3, True, None, -1, 2**62, "", " ", "3", 'a"b', "§ 3 / é"])
def test_values_of_every_kind_keep_their_text(place: Place, tmp_path: Path, value: Any) -> None:
    recorded = Recorded(tmp_path, place, "kinds")
    with trajectory(step=1, sample_index=value if value is not True else 1):
        annotate(given=value)
        reward("reward", value if isinstance(value, int) else 1.0)
    assert recorded.sync() == ALL
    trace = recorded.trace()
    (root,) = trace.data.spans
    shown = root.outputs.get("annotations", {})
    assert shown == {"given": value}
    key = recorded.trajectory().key
    assert key is not None
    tag = trace.info.tags.get("sample_index")
    assert tag == (None if key.sample_index is None else str(key.sample_index))
    (score,) = trace.info.assessments
    assert score.value == (float(value) if isinstance(value, int) else 1.0)


@tool_trace
def read(text: str) -> str:
    return text


@llm_trace
def generate(prompt_ids: list[int], text: str) -> dict[str, Any]:
    return {"response_ids": prompt_ids[::-1], "text": text}


def test_spans_of_tens_of_megabytes_arrive_cut_and_stay_whole_in_the_store(
    place: Place, tmp_path: Path
) -> None:
    recorded = Recorded(tmp_path, place, "big", max_text_length=None, max_queue_bytes=2**30)
    big, ids = "ü" * 15_000_000, list(range(3_000_000))
    with trajectory(step=1, sample_index=1):
        read(big)
        generate(ids, big)
    record_one(2)
    assert recorded.sync() == ALL
    (trace,) = place.search("big", "tags.sample_index = '1'")
    trace = place.client.get_trace(trace.info.trace_id)
    sizes = {span.name: len(json.dumps(span.attributes)) for span in trace.data.spans}
    assert max(sizes.values()) < 20_000_000
    (tool,) = [span for span in trace.data.spans if span.name == "read"]
    assert LEFT_OUT.findall(tool.outputs) == ["14900000"]
    opened = open_store(tmp_path)
    (summary,) = opened.query(sample=1)
    kept = opened.load(summary.trace_id)
    assert [span.outputs for span in kept.spans if span.name == "read"] == [big]
    assert [list(span.prompt_ids or ()) for span in kept.spans if span.name == "generate"] == [ids]


# Texts and numbers


def test_texts_that_a_database_refuses_are_made_readable(place: Place, tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, place, "a\0c", experiment="a\0c", run_id="a\0c")
    with suppress(ValueError), trajectory(step=1, sample_index=BAD):
        reward(BAD, BAD, explanation=BAD)
        reward("kl", float("nan"))
        reward("length", float("inf"))
        annotate(**{BAD: BAD})
        read(BAD)
        generate([1, 2], BAD)
        raise ValueError(BAD)
    assert recorded.sync() == ALL
    trace = recorded.trace()
    assert (trace.info.tags["sample_index"], trace.info.tags["experiment_name"]) == (SHOWN, "a␀c")
    assert trace.info.trace_metadata["mlflow.sourceRun"] == "a␀c"
    scores = {item.name: item for item in trace.info.assessments}
    assert (scores[SHOWN].value, scores[SHOWN].rationale) == (SHOWN, SHOWN)
    assert (scores["kl"].value, scores["kl"].error.error_message) == (None, "the reward is nan")
    assert (scores["length"].value, scores["length"].error.error_message) == (None, "the reward is inf")
    spans = {span.name: span for span in trace.data.spans}
    assert spans["read"].outputs == SHOWN
    assert spans["trajectory"].outputs["annotations"] == {SHOWN: SHOWN}
    assert place.client.get_experiment_by_name("a␀c") is not None
    assert "\0" not in json.dumps(trace.to_dict())


# Experiments


def test_what_a_deleted_experiment_does_not_take_waits_until_it_is_restored(
    place: Place, tmp_path: Path
) -> None:
    recorded = Recorded(tmp_path, place, "deleted")
    record_one(1)
    assert recorded.sync() == ALL
    experiment = place.experiment("deleted")
    place.client.delete_experiment(experiment)
    record_one(2)
    for _ in range(2):
        said = recorded.sync()
        assert f"`mlflow experiments restore --experiment-id {experiment}`" in said
        assert "some of it is still pending" in said
        assert recorded.counts() == (2, 1, 1, 0)
    place.client.restore_experiment(experiment)
    assert recorded.sync() == ALL
    assert recorded.counts() == (2, 2, 0, 0)
    assert len(place.search("deleted")) == 2


def test_an_experiment_that_is_gone_for_good_is_made_anew(file: Place, tmp_path: Path) -> None:
    place, recorded = file, Recorded(tmp_path, file, "gone")
    follower = sync.Follower(recorded.path)
    record_one(1)
    trackway.flush()
    assert follower.step()
    gone = place.experiment("gone")
    place.client.delete_experiment(gone)
    record_one(2)
    trackway.flush()
    assert not follower.step()
    place.client._tracking_client.store._hard_delete_experiment(gone)
    assert follower.step(patient=False)
    follower.close()
    assert recorded.counts() == (2, 2, 0, 0)
    assert [trace.info.tags["sample_index"] for trace in place.search("gone")] == ["2"]
    # What it held goes there too when the store forgets what it has sent.
    (tmp_path / "sync.sqlite").unlink()
    assert recorded.sync() == ALL
    assert {trace.info.tags["sample_index"] for trace in place.search("gone")} == {"1", "2"}


def test_the_name_decides_where_traces_go_also_while_an_exporter_runs(file: Place, tmp_path: Path) -> None:
    place, recorded = file, Recorded(tmp_path, file, "moved")
    follower = sync.Follower(recorded.path)
    record_one(1)
    trackway.flush()
    assert follower.step()
    place.client.rename_experiment(place.experiment("moved"), "put away")
    record_one(2)
    trackway.flush()
    assert follower.step()
    place.client.rename_experiment(place.experiment("moved"), "put away too")
    place.client.rename_experiment(place.experiment("put away"), "moved")
    record_one(3)
    trackway.flush()
    assert follower.step()
    follower.close()
    found = {
        name: sorted(trace.info.tags["sample_index"] for trace in place.search(name))
        for name in ("moved", "put away too")
    }
    assert found == {"moved": ["1", "3"], "put away too": ["2"]}


# Databases of other versions of MLflow


def make_database(uri: str, back: int) -> None:
    """Make a database as an MLflow did that knew so many revisions less than the installed one."""
    import sqlalchemy
    from alembic import command
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config
    from mlflow.store.tracking.dbmodels.initial_models import Base

    engine = sqlalchemy.create_engine(uri)
    Base.metadata.create_all(engine)
    config = _get_alembic_config(uri)
    revisions = [step.revision for step in ScriptDirectory.from_config(config).walk_revisions()]
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revisions[back])
    engine.dispose()


def stamp(uri: str, revision: str) -> str:
    """Note another revision in a database, and give the one that stood there."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri)
    with engine.begin() as connection:
        before = connection.execute(sqlalchemy.text("SELECT version_num FROM alembic_version")).scalar_one()
        connection.execute(sqlalchemy.text("UPDATE alembic_version SET version_num = :it"), {"it": revision})
    engine.dispose()
    return str(before)


@pytest.mark.parametrize("back", [1, 30])
@pytest.mark.parametrize("command", [False, True])
def test_an_older_database_takes_everything_once_it_is_brought_up_to_date(
    tmp_path: Path, back: int, command: bool
) -> None:
    """MLflow does that by itself where a table is missing, else by its command."""
    place = Place(f"sqlite:///{tmp_path}/old.db")
    make_database(place.uri, back)
    if command:
        subprocess.run([sys.executable, "-m", "mlflow", "db", "upgrade", place.uri], check=True, timeout=200)
    recorded = Recorded(tmp_path / "store", place, "old")
    record_one()
    assert recorded.sync() == ALL
    assert len(place.search("old", "tags.step = '1'")) == 1


@pytest.mark.parametrize("kind", ["SQLite", "PostgreSQL"])
def test_a_database_of_another_revision_is_told_and_delivery_waits(kind: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        place = make_place(kind, tmp_path, stack)
        make_database(place.uri, 0)
        right = stamp(place.uri, "000000000000")
        recorded = Recorded(tmp_path / "store", place, "revision")
        record_one()
        for _ in range(2):
            said = recorded.sync()
            assert f"the MLflow database at {place.uri} was made by another version of MLflow" in said
            assert f"`mlflow db upgrade {place.uri}`" in said
            assert "found version 000000000000" in said
            assert recorded.counts() == (1, 0, 1, 0)
        stamp(place.uri, right)
        assert recorded.sync() == ALL
        assert recorded.counts() == (1, 1, 0, 0)
        assert len(place.search("revision")) == 1
