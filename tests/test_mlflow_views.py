"""The saved views that an experiment gets, and what becomes of them in people's hands."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from trackway.trace.exporters.mlflow_views import FAILURES, NOTE_TAG, ROLLOUTS, VIEW_TAG, Views

from .test_mlflow import Destination, rollout

pytest.importorskip("mlflow")
pytestmark = pytest.mark.slow  # every test here asks a database of MLflow


@pytest.fixture(scope="module")
def destination(tmp_path_factory: pytest.TempPathFactory) -> Destination:
    return Destination(tmp_path_factory.mktemp("store"))


@pytest.fixture
def project(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def tags(destination: Destination, project: str) -> dict[str, str]:
    return dict(destination.client.get_experiment(destination.experiment(project)).tags)


def state(destination: Destination, project: str, view: str = ROLLOUTS) -> dict[str, Any]:
    found = json.loads(tags(destination, project)[VIEW_TAG + view])
    return dict(json.loads(found["state"]))


def columns(destination: Destination, project: str, view: str = ROLLOUTS) -> list[str]:
    return [str(name) for name in state(destination, project, view)["single"]["cols"].split(",")]


def later(destination: Destination, *trajectories: Any) -> None:
    """Export as another process does, which remembers nothing."""
    assert Destination(destination.config.store).export(*trajectories) == {}


def test_an_experiment_gets_two_views_with_its_real_rewards(destination: Destination, project: str) -> None:
    destination.export(rollout(project=project, rewards={"format": 0.1, "answer": 1.0}))
    for view, name in ((ROLLOUTS, "Rollouts"), (FAILURES, "Failures")):
        found = json.loads(tags(destination, project)[VIEW_TAG + view])
        assert found["name"] == name
        assert state(destination, project, view)["customColumns"] == {
            "tag:step": True,
            "tag:sample_index": True,
            "tag:rollout_n": True,
        }
        rewards = [each for each in columns(destination, project, view) if each.startswith("assessment:")]
        assert rewards == ["assessment:reward", "assessment:answer", "assessment:format"]
    assert "filters" not in state(destination, project)
    wanted = [{"field": "span_status", "operator": "=", "value": "ERROR"}]
    assert state(destination, project, FAILURES)["filters"] == wanted


def test_a_reward_that_turns_up_later_gets_its_column(destination: Destination, project: str) -> None:
    destination.export(rollout(project=project, rewards={}))
    assert "assessment:reward" not in columns(destination, project)
    destination.export(rollout(2, project=project, rewards={"judge": 1.0}))
    later(destination, rollout(3, project=project, rewards={"length": 1.0}))
    assert columns(destination, project)[1:4] == [
        "assessment:reward",
        "assessment:judge",
        "assessment:length",
    ]


def test_views_are_written_only_when_there_is_something_new(destination: Destination, project: str) -> None:
    destination.export(rollout(project=project))
    before = tags(destination, project)
    destination.export(rollout(2, project=project))
    later(destination, rollout(3, project=project))
    assert tags(destination, project) == before


def test_what_a_person_changed_stays(destination: Destination, project: str) -> None:
    destination.export(rollout(project=project))
    mine = json.dumps({"name": "Mine", "createdAt": 1, "updatedAt": 2, "state": "deflate;x"})
    destination.client.set_experiment_tag(destination.experiment(project), VIEW_TAG + ROLLOUTS, mine)
    later(destination, rollout(2, project=project, rewards={"new": 1.0}))
    assert tags(destination, project)[VIEW_TAG + ROLLOUTS] == mine
    assert "assessment:new" in columns(destination, project, FAILURES)


def test_what_a_person_deleted_does_not_come_back(destination: Destination, project: str) -> None:
    destination.export(rollout(project=project))
    destination.client.delete_experiment_tag(destination.experiment(project), VIEW_TAG + FAILURES)
    later(destination, rollout(2, project=project, rewards={"new": 1.0}))
    later(destination, rollout(3, project=project, rewards={"newer": 1.0}))
    assert VIEW_TAG + FAILURES not in tags(destination, project)
    assert "assessment:newer" in columns(destination, project)


def test_views_that_were_there_before_stay(destination: Destination, project: str) -> None:
    experiment = destination.client.create_experiment(project, tags={VIEW_TAG + ROLLOUTS: "not ours"})
    destination.export(rollout(project=project))
    found = destination.client.get_experiment(experiment).tags
    assert found[VIEW_TAG + ROLLOUTS] == "not ours"
    assert VIEW_TAG + FAILURES in found


def test_odd_and_many_rewards_leave_a_view_that_fits(destination: Destination, project: str) -> None:
    odd = {"a,b": 1.0, "x" * 200: 1.0, 'say "é" \ud800': 1.0}
    many = {f"part {n}": float(n) for n in range(50)}
    destination.export(rollout(project=project, rewards={**odd, **many}))
    later(destination, rollout(2, project=project, rewards={"yet another": 1.0}))
    rewards = [each for each in columns(destination, project) if each.startswith("assessment:")]
    assert rewards[0] == "assessment:reward"
    assert len(rewards) == 6
    assert "a" not in columns(destination, project)
    assert all(len(value) < 4000 for value in tags(destination, project).values())


def test_a_broken_note_hinders_nothing(destination: Destination, project: str) -> None:
    destination.client.create_experiment(project, tags={NOTE_TAG: "[1"})
    destination.export(rollout(project=project))
    assert VIEW_TAG + ROLLOUTS in tags(destination, project)


def test_trouble_with_views_is_said_once_and_traces_arrive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    def refuse(*_: object) -> None:
        raise RuntimeError("tags are full")

    destination = Destination(tmp_path)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(SqlAlchemyStore, "set_experiment_tag", refuse)
        assert destination.export(rollout(project="p"), rollout(2, project="p")) == {}
        assert destination.export(rollout(3, project="p")) == {}
    assert len(destination.search("p")) == 3
    assert [record.getMessage() for record in caplog.records if "saved views" in record.getMessage()] == [
        "MLflow does not take the saved views: RuntimeError: tags are full"
    ]
    destination.export(rollout(4, project="p"))
    assert VIEW_TAG + ROLLOUTS in tags(destination, "p")


def test_views_ask_for_nothing_when_nothing_is_new() -> None:
    class Store:
        asked = 0

        def get_experiment(self, _: str) -> Any:
            self.asked += 1
            return type("Experiment", (), {"tags": dict(self.tags)})

        def set_experiment_tag(self, _: str, tag: Any) -> None:
            self.tags[tag.key] = tag.value

        tags: dict[str, str] = {}  # noqa: RUF012

    store, views = Store(), Views()
    for _ in range(3):
        views.bring(store, "1", ["reward"])
    assert store.asked == 1
