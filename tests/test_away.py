"""Rollouts of which parts are recorded on another machine, into a store of its own."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import trackway
from trackway import annotate, extract, inject, llm_trace, open_store, reward, tool_trace, trajectory
from trackway.trace import semconv
from trackway.trace.exporters import sync
from trackway.trace.exporters.otlp_spans import genai_spans
from trackway.trace.exporters.weave_calls import calls_of
from trackway.trace.model import Trajectory

pytestmark = pytest.mark.slow  # most tests here ask a database of MLflow


@tool_trace
def tool(number: int) -> int:
    if number < 0:
        raise ValueError(number)
    return number


@tool_trace
def around(number: int) -> int:
    return tool(number)


@llm_trace
def generate(prompt_ids: list[int]) -> dict[str, Any]:
    return {"token_ids": [*prompt_ids, 1]}


def here(folder: Path) -> dict[str, str]:
    """Record a rollout that another machine will add to, and give its carrier."""
    trackway.configure(**settings(folder, "here"))
    with trajectory(step=1, sample_index=7, rollout_n=2, policy_version=3):
        tool(1)
        reward("correct", 1)
        carrier = inject()
    trackway.shutdown()
    return carrier


def there(folder: Path, carrier: dict[str, str], number: int = 2) -> None:
    """Add to it on that machine, which has another store."""
    trackway.configure(**settings(folder, "there"))
    with extract(carrier):
        around(number)
        reward("judge", 0.5, explanation="brief")
    trackway.shutdown()


@pytest.fixture(autouse=True)
def _database(tmp_path: Path, blank_mlflow: Path) -> None:
    shutil.copy(blank_mlflow, tmp_path)


def settings(folder: Path, store: str) -> dict[str, Any]:
    place = f"sqlite:///{folder}/mlflow.db"
    return {"store": folder / store, "sync": "off", "backend": "mlflow", "tracking_uri": place}


def send(folder: Path, *stores: str) -> None:
    for store in stores:
        assert sync.run(folder / store, say=lambda line: None) == 0


def only(store: Path) -> Trajectory:
    opened = open_store(store)
    (summary,) = opened.query()
    return opened.load(summary.trace_id)


def the_trace(folder: Path) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("trackway")
    (trace,) = client.search_traces(locations=[experiment.experiment_id])
    return trace


def test_another_process_of_the_same_store_is_not_away(tmp_path: Path) -> None:
    carrier = here(tmp_path)
    trackway.configure(**settings(tmp_path, "here"))
    with extract(carrier):
        tool(2)
    trackway.shutdown()
    found = only(tmp_path / "here")
    assert [span.name for span in found.spans] == ["trajectory", "tool", "tool"]
    assert not any(semconv.AWAY in span.attributes for span in found.spans)


def test_a_carrier_that_names_no_home_means_this_store(tmp_path: Path) -> None:
    carrier = here(tmp_path)
    there(tmp_path, {"traceparent": carrier["traceparent"]})
    assert not any(semconv.AWAY in span.attributes for span in only(tmp_path / "there").spans)


def test_a_part_has_the_key_and_the_state_of_what_is_there(tmp_path: Path) -> None:
    there(tmp_path, here(tmp_path))
    part, whole = only(tmp_path / "there"), only(tmp_path / "here")
    assert (part.trace_id, part.name, part.status) == (whole.trace_id, "1/7/2", "ok")
    assert part.policy_versions == (3,)
    assert part.rewards == {"judge": 0.5}
    assert [span.name for span in part.spans] == ["around", "tool", "reward"]
    assert part.spans[0].parent_id == whole.spans[0].span_id
    assert len(part.notes) == 1
    assert whole.notes == ()


def test_a_part_that_failed_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="-1"):
        there(tmp_path, here(tmp_path), -1)
    trackway.shutdown()
    part = only(tmp_path / "there")
    assert (part.status, part.error) == ("error", "ValueError: -1")


def test_what_a_part_hands_on_is_away_where_its_root_is_not(tmp_path: Path) -> None:
    carrier = here(tmp_path)
    trackway.configure(**settings(tmp_path, "there"))
    with extract(carrier):
        further = inject()
    trackway.shutdown()
    there(tmp_path, further)  # another process of the second machine
    assert only(tmp_path / "there").spans[0].attributes[semconv.AWAY] is True
    trackway.configure(**settings(tmp_path, "here"))
    with extract(further):  # and one that is back where it was begun
        tool(3)
    trackway.shutdown()
    assert not any(semconv.AWAY in span.attributes for span in only(tmp_path / "here").spans)


@pytest.mark.parametrize("order", [("here", "there"), ("there", "here"), ("there", "here", "there")])
def test_both_stores_make_one_trace_in_mlflow_in_any_order(tmp_path: Path, order: tuple[str, ...]) -> None:
    there(tmp_path, here(tmp_path))
    send(tmp_path, *order)
    trace = the_trace(tmp_path)
    spans = {span.name: span for span in trace.data.spans}
    assert sorted(span.name for span in trace.data.spans) == [
        "around",
        "reward",
        "tool",
        "tool",
        "trajectory",
    ]
    assert spans["around"].parent_id == spans["trajectory"].span_id
    assert (trace.info.state, trace.info.tags["status"], trace.info.tags["rollout_n"]) == ("OK", "ok", "2")
    rewards = {item.name: (item.value, item.rationale) for item in trace.info.assessments}
    assert rewards == {"correct": (1.0, None), "reward": (1.0, None), "judge": (0.5, "brief")}
    assert len(trace.info.assessments) == 3


def test_a_part_that_grows_and_a_root_that_is_sent_again_take_nothing_away(tmp_path: Path) -> None:
    carrier = here(tmp_path)
    there(tmp_path, carrier)
    send(tmp_path, "here", "there")
    trackway.configure(**settings(tmp_path, "there"))
    with extract(carrier):
        tool(5)
        reward("judge", 0.75)
        reward("style", "good")
    trackway.shutdown()
    send(tmp_path, "there")
    trackway.configure(**settings(tmp_path, "here"))
    trackway.attach("1/7/2", trained_step=4)
    trackway.shutdown()
    send(tmp_path, "here")
    trace = the_trace(tmp_path)
    names = Counter(span.name for span in trace.data.spans)
    assert names == {"trajectory": 1, "around": 1, "tool": 3, "reward": 3}
    rewards = sorted((item.name, item.value) for item in trace.info.assessments)
    assert rewards == [("correct", 1.0), ("judge", 0.75), ("reward", 1.0), ("style", "good")]
    assert trace.info.tags["trained_step"] == "4"
    for name, spans in (("here", 3), ("there", 6)):
        status = open_store(tmp_path / name).status()
        assert (status.recorded, status.pending, status.dropped) == (spans, 0, 0)


def test_other_destinations_get_no_second_root_either(tmp_path: Path) -> None:
    there(tmp_path, here(tmp_path))
    part, root = only(tmp_path / "there"), only(tmp_path / "here").spans[0]
    calls = calls_of(part, "entity/project", "default")
    assert len(calls.calls) == 3
    assert calls.root_id == part.spans[0].span_id != root.span_id
    assert [reward.kind for reward in calls.rewards] == ["judge"]
    spans = genai_spans(part, "default", {})
    assert [span.name for span in spans] == ["around", "tool", "reward"]
    assert spans[0].parent is not None
    assert f"{spans[0].parent.span_id:016x}" == root.span_id


def test_facts_and_generations_of_a_part_are_there(tmp_path: Path) -> None:
    carrier = here(tmp_path)
    trackway.configure(**settings(tmp_path, "there"))
    with extract(carrier):
        generate([1, 2, 3])
        generate([1, 2, 3, 1, 9])
        annotate(node="second")
    trackway.shutdown()
    part = only(tmp_path / "there")
    assert part.annotations == {"node": "second"}
    assert [span.prompt_ids for span in part.spans if span.kind == "llm"] == [(1, 2, 3), (1, 2, 3, 1, 9)]
    send(tmp_path, "there", "here")
    assert sorted(span.name for span in the_trace(tmp_path).data.spans) == [
        "annotate",
        "generate",
        "generate",
        "tool",
        "trajectory",
    ]
