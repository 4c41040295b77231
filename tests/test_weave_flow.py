"""From the training process to Weave's server and back: real processes, the real client, failures."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trackway import StoreError, open_store
from trackway.trace.exporters.weave_calls import calls_of
from trackway.trace.model import Trajectory

from .programs import BEGIN, followers, line, order, run, start, stop_followers, wait_until
from .weave_server import WeaveServer, serving

pytestmark = pytest.mark.slow

AGENT = """
from trackway import reward, rollout_trace, tool_trace

@tool_trace
def calculator(expression):
    if "/ 0" in expression:
        raise ZeroDivisionError("there is no such number")
    return "51"

@llm_trace
def generate(messages, model):
    return {"text": "It is 51.", "token_ids": [7, 8, 9], "prompt_ids": [1, 2]}

@rollout_trace
def solve(expression):
    question = {"role": "user", "content": "What is " + expression + "?"}
    generate([question], "small")
    return calculator(expression)

def record(first, end):
    for number in range(first, end):
        try:
            with trajectory(step=1, sample_index=number // 2, rollout_n=number % 2, policy_version=3):
                reward("reward", number / 8)
                solve(f"{number} / {number % 4}")
        except ZeroDivisionError:
            pass
"""
UNTIL_IT_FAILED = (
    "while not any(place.last_error for place in trackway.flush(1).destinations.values()): pass\n"
)
CONFIGURE = AGENT + "trackway.configure(store='store', project='maths', experiment='grpo', backend='weave')\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WeaveServer]:
    with serving(tmp_path / "server") as server:
        yield server


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which nobody is logged in, and no address leads out of this machine."""
    (tmp_path / "home").mkdir()
    nowhere = "http://127.0.0.1:9"
    for name in ("WANDB_API_KEY", "WANDB_ENTITY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    return {
        "HOME": str(tmp_path / "home"),
        "WANDB_BASE_URL": nowhere,
        "WF_TRACE_SERVER_URL": nowhere,
        "WANDB_ERROR_REPORTING": "false",
    }


@pytest.fixture(autouse=True)
def _no_follower_stays(tmp_path: Path) -> Iterator[None]:
    yield
    stop_followers(tmp_path / "store")


def trajectories(store: Path) -> list[Trajectory]:
    opened = open_store(store)
    return [opened.load(summary.trace_id) for summary in opened.query(all_attempts=True)]


def expected(store: Path) -> dict[str, dict[str, Any]]:
    """Give what must be at Weave, call by call."""
    return {
        call["id"]: call
        for one in trajectories(store)
        for call in (json.loads(call.data) for call in calls_of(one, "team/maths", "grpo").calls)
    }


def assert_arrived(server: WeaveServer, store: Path) -> None:
    stored = server.calls("team/maths")
    wanted = expected(store)
    assert sorted(call["id"] for call in stored) == sorted(wanted)
    for call in stored:
        assert wanted[call["id"]].items() <= call.items()


def failure(store: Path) -> str | None:
    """Give what last went wrong at Weave; None as long as nothing has, or there is no store yet."""
    try:
        place = open_store(store).status().destinations.get("weave")
    except StoreError:
        return None
    return place and place.last_error


def ran(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = run(folder, code, timeout=120, **environment)
    assert done.returncode == 0, done.stderr
    return done


def test_what_was_recorded_is_what_the_real_client_reads_back(
    tmp_path: Path, server: WeaveServer, home: dict[str, str]
) -> None:
    code = CONFIGURE + "record(0, 8); print(trackway.flush(60)); print('weave' in sys.modules)"
    done = ran(tmp_path, code, **home | server.environment)
    assert "recorded=32, exported=32, pending=0, dropped=0" in done.stdout
    assert done.stdout.endswith("False\n")  # the training process never imports it
    assert "weave:" not in done.stdout + done.stderr
    assert_arrived(server, tmp_path / "store")

    read = """
    import json, weave
    client = weave.init("maths")
    print("calls", json.dumps([
        [call.id, call.parent_id, call.trace_id, call.func_name, call.display_name,
         call.started_at.timestamp(), call.ended_at.timestamp(), call.inputs, call.output,
         call.exception is not None, call.summary.get("usage"), call.attributes["step"], call.thread_id]
        for call in client.get_calls()
    ], default=lambda value: value.unwrap() if hasattr(value, "unwrap") else list(value)))
    """
    back = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(read)],
        env={**os.environ, **home, **server.environment},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )
    assert back.returncode == 0, back.stderr
    (told,) = [text for text in back.stdout.splitlines() if text.startswith("calls ")]
    got = {call[0]: call for call in json.loads(told.removeprefix("calls "))}
    wanted = expected(tmp_path / "store")
    assert got.keys() == wanted.keys()
    spans = {span.span_id: span for one in trajectories(tmp_path / "store") for span in one.spans}
    for call_id, call in got.items():
        span, sent = spans[call_id], wanted[call_id]
        assert call[1:3] == [span.parent_id, span.trace_id]
        assert (call[3], call[4]) == (span.name, sent["display_name"])
        assert abs(call[5] * 1e6 - span.start_ns / 1e3) <= 1  # to the microsecond
        assert abs(call[6] * 1e6 - (span.end_ns or 0) / 1e3) <= 1
        assert call[7:9] == [sent["inputs"], sent["output"]]
        assert call[9] == (span.status != "ok")
        assert call[10] == sent["summary"].get("usage")
        assert call[11] == 1
        assert call[12].startswith("grpo:1:")
    assert sum(call[9] for call in got.values()) == 2 * 3  # the tool, what called it and the rollout
    assert len(server.feedback()) == 8


def test_one_recording_goes_to_mlflow_and_to_weave(
    tmp_path: Path, server: WeaveServer, home: dict[str, str]
) -> None:
    pytest.importorskip("mlflow")
    code = CONFIGURE.replace("'weave'", "['mlflow', 'weave']") + "record(0, 6); print(trackway.flush(100))"
    done = ran(tmp_path, code, **home | server.environment)
    assert "pending=0" in done.stdout, done.stdout + done.stderr
    assert_arrived(server, tmp_path / "store")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/store/mlflow.db")
    experiment = client.get_experiment_by_name("maths")
    assert experiment is not None
    there = client.search_traces(locations=[experiment.experiment_id])
    in_mlflow = {
        span.span_id: (span.parent_id, span.start_time_ns // 1000, span.end_time_ns // 1000)
        for trace in there
        for span in trace.data.spans
    }
    spans = {
        span.span_id: (span.parent_id, span.start_ns // 1000, (span.end_ns or 0) // 1000)
        for one in trajectories(tmp_path / "store")
        for span in one.spans
    }
    assert in_mlflow == spans
    assert {call["id"] for call in server.calls()} == set(spans)


def test_a_server_that_is_killed_and_comes_back_gets_everything_once(
    tmp_path: Path, server: WeaveServer, home: dict[str, str]
) -> None:
    code = CONFIGURE + "record(0, 4)\nfor text in sys.stdin:\n    exec(text); print('done', flush=True)"
    with start(tmp_path, code, **home | server.environment) as process:
        wait_until(lambda: len(server.calls()) == 16)
        server.stop()
        order(process, "record(4, 12)")
        assert "cannot be reached" in wait_until(lambda: failure(tmp_path / "store"))
        server.start()
        wait_until(lambda: len(server.calls()) == 48)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
    wait_until(lambda: not followers(tmp_path / "store"))
    assert_arrived(server, tmp_path / "store")
    status = open_store(tmp_path / "store").status()
    assert (status.recorded, status.exported, status.pending) == (48, 48, 0)
    assert status.destinations["weave"].last_error is None


def test_a_server_that_is_away_costs_the_training_nothing_but_a_line(
    tmp_path: Path, home: dict[str, str]
) -> None:
    code = CONFIGURE + "record(0, 4)\n" + UNTIL_IT_FAILED
    code += "print(trackway.flush(1)); trackway.shutdown(); print('trained')"
    done = ran(tmp_path, code, **home | {"WANDB_API_KEY": "local-" + "0" * 40})
    assert "recorded=16, exported=0, pending=16, dropped=0" in done.stdout
    assert done.stdout.endswith("trained\n")
    assert "weave lacks 16 of 16 spans (ConnectionError: Weave at http://127.0.0.1:9" in done.stderr


def test_a_quota_that_is_full_is_waited_for_and_shown_in_the_status(
    tmp_path: Path, server: WeaveServer, home: dict[str, str]
) -> None:
    server.fail(429, headers={"Retry-After": "2"})
    code = CONFIGURE + "record(0, 4)\nfor text in sys.stdin:\n    exec(text); print('done', flush=True)"
    with start(tmp_path, code, **home | server.environment) as process:
        wait_until(lambda: failure(tmp_path / "store"))
        shown = subprocess.run(
            [sys.executable, "-m", "trackway", "status", "--store", "store"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "429" in shown.stdout
        server.failures.clear()
        wait_until(lambda: len(server.calls()) == 16)
        order(process, "pass")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_trainer_that_is_killed_leaves_what_it_did_at_weave(
    tmp_path: Path, server: WeaveServer, home: dict[str, str]
) -> None:
    code = (
        CONFIGURE
        + """
record(0, 4)
with trajectory(step=1, sample_index=9):
    generate([{"role": "user", "content": "Wait."}], "small")
    calculator("1")
    time.sleep(1.5); print("waits", flush=True); time.sleep(600)
"""
    )
    with start(tmp_path, code, **home | server.environment) as process:
        assert line(process) == "waits"
        wait_until(lambda: len(server.calls()) == 16)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    wait_until(lambda: len(server.calls()) == 19)
    (root,) = [call for call in server.calls() if call["display_name"] == "1/9/0"]
    assert root["attributes"]["status"] == "died"
    assert json.loads(root["exception"])["message"] == "process ended before this did"
    wait_until(lambda: not followers(tmp_path / "store"))
    assert_arrived(server, tmp_path / "store")


def test_several_workers_of_one_store_arrive_together(
    tmp_path: Path, server: WeaveServer, home: dict[str, str]
) -> None:
    code = CONFIGURE + "number = int(sys.stdin.readline()); record(number, number + 8); trackway.flush(60)"
    workers = [start(tmp_path, code, **home | server.environment) for _ in range(4)]
    for number, worker in enumerate(workers):
        _, err = worker.communicate(f"{number * 8}\n", timeout=120)
        assert worker.returncode == 0, err
    wait_until(lambda: not followers(tmp_path / "store"))
    assert len(server.calls()) == 4 * 32
    assert len({call["attributes"]["resource"]["process.pid"] for call in roots(server)}) == 4
    assert_arrived(server, tmp_path / "store")


def roots(server: WeaveServer) -> list[dict[str, Any]]:
    return [call for call in server.calls() if call["parent_id"] is None]


NO_KEY = CONFIGURE + "record(0, 4)\n" + UNTIL_IT_FAILED + "trackway.shutdown(); print('trained')"


def assert_nobody_was_asked(out: str, err: str, store: Path) -> None:
    assert "trained" in out
    lines = err.splitlines()
    assert "there is no login for Weave: set WANDB_API_KEY" in lines[0]
    assert "weave lacks 16 of 16 spans (RuntimeError: there is no login for Weave at" in lines[-1]
    for word in ("Enter your choice", "Paste an API key", "wandb: (1)", "Traceback"):
        assert word not in out + err
    status = open_store(store).status()
    assert (status.recorded, status.exported, status.pending, status.dropped) == (16, 0, 16, 0)
    error = status.destinations["weave"].last_error
    assert error is not None
    assert "`wandb login`" in error


def test_without_a_key_and_without_input_nothing_asks_and_nothing_is_lost(
    tmp_path: Path, server: WeaveServer, home: dict[str, str]
) -> None:
    done = ran(tmp_path, NO_KEY, **home | server.environment | {"WANDB_API_KEY": ""})
    assert_nobody_was_asked(done.stdout, done.stderr, tmp_path / "store")
    stop_followers(tmp_path / "store")
    assert server.calls() == []
    # The login comes later, the training is over: what was kept goes with the next sync.
    later = subprocess.run(
        [sys.executable, "-m", "trackway", "sync", "--store", "store"],
        cwd=tmp_path,
        env={**os.environ, **home, **server.environment},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert later.returncode == 0, later.stdout + later.stderr
    assert_arrived(server, tmp_path / "store")


def test_without_a_key_nothing_asks_on_a_terminal_either(tmp_path: Path, home: dict[str, str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(BEGIN + NO_KEY)
    ours, theirs = pty.openpty()
    # As for somebody who starts a training by hand.
    process = subprocess.Popen(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**os.environ, **home, "TRACKWAY_STRICT": "0"},
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(theirs)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert_nobody_was_asked(os.read(ours, 100_000).decode(), err, tmp_path / "store")
    os.close(ours)


def test_the_stand_in_takes_what_the_real_client_sends_by_itself(
    tmp_path: Path, server: WeaveServer, home: dict[str, str]
) -> None:
    code = """
    import weave
    client = weave.init("maths")
    @weave.op
    def inner(x):
        if x == 2: raise ValueError("no")
        return x + 1
    @weave.op
    def outer(x): return inner(x)
    with weave.thread("a thread"), weave.attributes({"step": 1}):
        outer(1)
        try: outer(2)
        except ValueError: pass
    client.flush()
    weave.finish()
    """
    done = subprocess.run(
        [sys.executable, str(_file(tmp_path, code))],
        env={**os.environ, **home, **server.environment},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    calls = server.calls("team/maths")
    assert [call["op_name"].split("/op/")[1].partition(":")[0] for call in calls] == ["outer", "inner"] * 2
    assert [call["exception"] is None for call in calls] == [True, True, False, False]
    assert {call["thread_id"] for call in calls} == {"a thread"}
    assert "dropped" not in done.stdout + done.stderr


def _file(folder: Path, code: str) -> Path:
    path = folder / "ops.py"  # Weave reads the source of an op
    path.write_text(textwrap.dedent(code))
    return path
