"""Two steps and a validation by verl's real workers in Ray, untraced and traced, and what MLflow then has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trackway import open_store
from trackway.trace.exporters.sync import is_followed

from .programs import installed, stop_followers, wait_until
from .verl_here import need_verl
from .verl_world import HERE, SAMPLES, SCRIPTS, N, make_model

pytestmark = pytest.mark.verl

TRACED = [
    "actor_rollout_ref.rollout.trace.backend=mlflow",
    "actor_rollout_ref.rollout.trace.token2text=true",
    "trainer.logger=[console,mlflow]",
]
TRAINED = {(step, 10 + sample, n, False) for step in (1, 2) for sample in range(SAMPLES) for n in range(N)}
VALIDATED = {(2, 10 + sample, 0, True) for sample in range(SAMPLES)}
TOOLS = [("add", "OK"), ("add", "ERROR"), ("fly", "ERROR"), ("recall", "OK")]
ANSWERS = [script[-1] for script in SCRIPTS]


class Ran(NamedTuple):
    """A run that has ended: what verl's workers gave the trainer, its folder, and what it printed."""

    outputs: list[Any]
    folder: Path
    printed: str

    @property
    def store(self) -> Path:
        return self.folder / "store"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    need_verl()
    return make_model(tmp_path_factory.mktemp("model"))


def run(folder: Path, model: Path, trainer: str, overrides: list[str], **environment: str) -> Ran:
    """Let verl's workers run in a network of their own, since Ray listens on more than the loopback."""
    folder.mkdir()
    job = {"trainer": trainer, "model": str(model), "out": str(folder / "out.json"), "overrides": overrides}
    script = f'{installed("ip")} link set lo up && exec "$@"'
    command = [installed("unshare"), "--net", "--map-root-user", "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*command, sys.executable, str(HERE / "verl_run.py"), json.dumps(job)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(HERE),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,  # a machine may be busy with other things
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return Ran(json.loads((folder / "out.json").read_text()), folder, done.stdout)


def run_traced(folder: Path, model: Path, trainer: str, *overrides: str, **environment: str) -> Ran:
    """Run, and wait until everything has arrived in a database that did not exist before."""
    variables = {
        "TRACKWAY_VERL": "1",
        "TRACKWAY_STORE": str(folder / "store"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlruns.db'}",
        **environment,
    }
    try:
        ran = run(folder, model, trainer, [*TRACED, *overrides], **variables)
        wait_until(lambda: not is_followed(ran.store))
    finally:
        if (folder / "store").exists():
            stop_followers(folder / "store")
    return ran


@pytest.fixture(scope="module")
def v0(model, tmp_path_factory) -> tuple[Ran, Ran]:
    """Give a run without and one with tracing, with six workers that start at once."""
    folder = tmp_path_factory.mktemp("v0")
    same = [
        "actor_rollout_ref.rollout.full_determinism=true",
        "actor_rollout_ref.rollout.agent.num_workers=6",
    ]
    return run(folder / "plain", model, "v0", same), run_traced(folder / "traced", model, "v0", *same)


@pytest.fixture(scope="module")
def v1(model, tmp_path_factory) -> tuple[Ran, Ran]:
    """Give a run without and one with tracing and our tracking in place of verl's."""
    folder = tmp_path_factory.mktemp("v1")
    traced = run_traced(folder / "traced", model, "v1", TRACKWAY_VERL_TRACKING="1")
    return run(folder / "plain", model, "v1", []), traced


def traces(ran: Ran) -> dict[tuple[int, int, int, bool], Any]:
    """Give what MLflow holds of a run, by what the tags say."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{ran.folder / 'mlruns.db'}")
    experiment = client.get_experiment_by_name("verl-tests")
    found: list[Any] = []
    token = None
    while token is not None or not found:
        page = client.search_traces(locations=[experiment.experiment_id], max_results=100, page_token=token)
        found += page
        token = page.token
    keys = [
        (int(tags["step"]), int(tags["sample_index"]), int(tags["rollout_n"]), tags["validate"] == "True")
        for tags in (trace.info.tags for trace in found)
    ]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, found, strict=True))


def tools_of(trace: Any) -> list[tuple[str, str]]:
    return [
        (span.name, span.status.status_code.name) for span in trace.data.spans if span.span_type == "TOOL"
    ]


def answer_of(trace: Any) -> str:
    (root,) = [span for span in trace.data.spans if span.parent_id is None]
    said = root.outputs["messages"][-1]
    assert said["role"] == "assistant"
    return str(said["content"]).removesuffix("<|im_end|>")


def rewards_of(trace: Any) -> dict[str, Any]:
    return {item.name: item.value for item in trace.info.assessments or ()}


def check(ran: Ran) -> dict[Any, Any]:
    """Check everything that MLflow holds of a run, and give it."""
    found = traces(ran)
    assert set(found) == TRAINED | VALIDATED
    for (_, _, _, validate), trace in found.items():
        names = Counter(span.name for span in trace.data.spans)
        (tool,) = tools_of(trace)
        assert names == {
            "agent_loop": 1,
            "ToolAgentLoop.run": 1,
            "LLMServerClient.generate": 2,
            "HermesToolParser.extract_tool_calls": 2,
            tool[0]: 1,
        }
        script = TOOLS.index(tool)
        answer = answer_of(trace)
        assert answer == ANSWERS[script]
        right = float(answer.endswith("5"))
        rewards = rewards_of(trace)
        assert (rewards["reward"], rewards["score"], rewards["acc"]) == (right - 0.5, right - 0.5, right)
        assert trace.info.state.name == "OK" and trace.info.tags["experiment_name"] == "tools"
        assert trace.info.tags["validate"] == str(validate)
    status = open_store(ran.store).status()
    assert status.recorded == status.exported == 7 * len(found) and not status.dropped
    assert not status.troubles
    return found


def versions(ran: Ran) -> set[tuple[int | None, tuple[int | str, ...]]]:
    """Give the steps of a run with the policy versions of their rollouts."""
    opened = open_store(ran.store)
    loaded = [opened.load(summary.trace_id) for summary in opened.query()]
    return {(item.key.step, item.policy_versions) for item in loaded if item.key}


def test_mlflow_holds_exactly_the_rollouts_of_the_trainer_before_v1(v0):
    _, ran = v0
    found = check(ran)
    # A row tells the engine which script to follow, so each rollout has its own.
    for (_, sample, n, validate), trace in found.items():
        place = sample - 10 if validate else N * (sample - 10) + n
        assert tools_of(trace) == [TOOLS[place % len(TOOLS)]]
    assert versions(ran) == {(1, (1,)), (2, (2,))}


def test_what_the_trainer_before_v1_gets_is_what_it_gets_untraced(v0):
    plain, ran = v0
    assert plain.outputs == ran.outputs
    assert len(ran.outputs[0]["rm_scores"]) == SAMPLES * N


def test_mlflow_holds_exactly_the_rollouts_of_the_default_trainer(v1):
    _, ran = v1
    found = check(ran)
    # The sessions of a prompt share out the scripts.
    of_groups = Counter(
        (step, sample, tools_of(trace)[0])
        for (step, sample, _, validate), trace in found.items()
        if not validate
    )
    assert set(of_groups.values()) == {1}
    assert versions(ran) == {(1, (1,)), (2, (2,))}


def test_what_the_default_trainer_gets_is_what_it_gets_untraced(v1):
    plain, ran = v1
    assert plain.outputs == ran.outputs


@pytest.mark.parametrize("trainer", ["v0", "v1"])
def test_all_traces_are_linked_to_the_run_of_the_trainers_logger(trainer, request):
    from mlflow.tracking import MlflowClient

    _, ran = request.getfixturevalue(trainer)
    client = MlflowClient(tracking_uri=f"sqlite:///{ran.folder / 'mlruns.db'}")
    (experiment,) = [item for item in client.search_experiments() if item.name == "verl-tests"]
    (logged,) = client.search_runs([experiment.experiment_id])
    assert client.get_metric_history(logged.info.run_id, "reward")
    assert ("trackway.run" in logged.data.tags) == (trainer == "v1")  # whose logger wrote it
    assert {trace.info.request_metadata.get("mlflow.sourceRun") for trace in traces(ran).values()} == {
        logged.info.run_id
    }
    linked = client.search_traces(
        locations=[experiment.experiment_id], run_id=logged.info.run_id, max_results=100
    )
    assert len(linked) == len(TRAINED | VALIDATED)


def test_six_workers_that_start_at_once_are_each_recorded(v0):
    _, ran = v0
    status = open_store(ran.store).status()
    # Ray may kill a worker that has nothing left to do: such a one counts among them.
    assert (status.writers_alive, status.writers_dead) == (0, 6)
    assert status.died == 0
