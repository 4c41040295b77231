"""What Weave gets of a trajectory, and what happens to what it does not take; through its real client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

import trackway
from trackway import attach, llm_trace, reward, rollout_trace, tool_trace, trajectory
from trackway.trace.config import TraceConfig
from trackway.trace.exporters.weave import WeaveExporter
from trackway.trace.exporters.weave_calls import CALL_LIMIT, calls_of, moment
from trackway.trace.exporters.weave_client import warn_without_login
from trackway.trace.model import Trajectory
from trackway.trace.testing import recording

from .servers import web_server
from .weave_server import KEY, Call, WeaveServer, serving

SYSTEM = {"role": "system", "content": "Use the calculator."}
QUESTION = {"role": "user", "content": "What is 17 * 3?"}


@tool_trace
def calculator(expression: str) -> str:
    if "/ 0" in expression:
        raise ZeroDivisionError("there is no such number")
    return "51"


@llm_trace
def generate(messages: list[dict[str, str]], model: str) -> dict[str, Any]:
    return {"text": "It is 51.", "token_ids": [7, 8, 9], "prompt_ids": [1, 2]}


@rollout_trace
def solve(expression: str) -> str:
    generate([SYSTEM, QUESTION], "small")
    calculator(expression)
    return str(generate([SYSTEM, QUESTION, {"role": "assistant", "content": "…"}], "small")["text"])


def record(sample: Any = 17, n: int = 0, expression: str = "17 * 3", score: float = 1.0) -> None:
    with trajectory(step=1, sample_index=sample, rollout_n=n, policy_version=7):
        reward("reward", score)
        solve(expression)


def recorded(*rollouts: Callable[[], None], **settings: Any) -> list[Trajectory]:
    with recording(**{"project": "maths", **settings}) as given:
        for rollout in rollouts:
            with suppress(ZeroDivisionError):
                rollout()
        return given.trajectories()


def as_calls(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Give its calls, each of which the server would take."""
    calls = [json.loads(call.data) for call in calls_of(trajectory, "team/maths", "grpo").calls]
    for call in calls:
        Call(**call)
    return calls


def named(calls: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(call for call in calls if call["op_name"] == name)


# What a call shows


def test_ids_times_and_parents_are_those_of_the_spans() -> None:
    (one,) = recorded(record)
    calls = as_calls(one)
    assert [(call["id"], call["parent_id"], call["trace_id"]) for call in calls] == [
        (span.span_id, span.parent_id, span.trace_id) for span in one.spans
    ]
    assert [(call["started_at"], call["ended_at"]) for call in calls] == [
        (moment(span.start_ns), moment(span.end_ns or 0)) for span in one.spans
    ]
    assert moment(1_750_000_000_123_456_789) == "2025-06-15T15:06:40.123456+00:00"


def test_a_rollout_is_found_by_its_tags_on_each_of_its_calls() -> None:
    (one,) = recorded(lambda: record(sample="17", n=3), experiment="grpo")
    calls = as_calls(one)
    tags = {
        "key": str(one.key),
        "step": 1,
        "sample_index": "17",
        "rollout_n": 3,
        "attempt": 0,
        "validate": False,
        "policy_version": 7,
        "experiment": "grpo",
        "status": "ok",
    }
    assert all(tags.items() <= call["attributes"].items() for call in calls)
    assert calls[0]["display_name"] == str(one.key)
    assert calls[0]["attributes"]["reward"] == 1.0
    assert [call["attributes"]["weave"]["kind"] for call in calls] == ["agent", "agent", "llm", "tool", "llm"]
    assert {call["thread_id"] for call in calls} == {"grpo:1:~317"}  # the text "17", not the number
    assert {call["turn_id"] for call in calls} == {calls[0]["id"]}


def test_the_chat_the_tool_and_the_tokens_stand_where_weave_looks_for_them() -> None:
    (one,) = recorded(record)
    calls = as_calls(one)
    first = named(calls, "generate")
    assert first["inputs"] == {"messages": [SYSTEM, QUESTION], "model": "small"}
    assert first["output"]["choices"][0]["message"]["content"] == "It is 51."
    usage = {"input_tokens": 2, "output_tokens": 3, "total_tokens": 5, "requests": 1}
    assert first["summary"] == {"status_counts": {"success": 1, "error": 0}, "usage": {"small": usage}}
    assert json.loads(first["attributes"]["recorded"]["trackway.response.token_ids"]) == [7, 8, 9]
    tool = named(calls, "calculator")
    assert (tool["inputs"], tool["output"]) == ({"expression": "17 * 3"}, "51")
    assert calls[0]["summary"] == {
        "status_counts": {"success": 5, "error": 0},
        "usage": {"small": {"input_tokens": 4, "output_tokens": 6, "total_tokens": 10, "requests": 2}},
    }
    assert calls[0]["output"]["messages"][0] == SYSTEM


def test_an_exception_reads_as_that_of_weave_itself() -> None:
    (one,) = recorded(lambda: record(expression="1 / 0"))
    calls = as_calls(one)
    failed = named(calls, "calculator")
    told = json.loads(failed["exception"])
    assert (told["type"], told["message"]) == ("ZeroDivisionError", "there is no such number")
    last = told["traceback"][-1]
    assert (Path(last["filename"]).name, last["function_name"]) == ("test_weave.py", "calculator")
    assert last["text"] == 'raise ZeroDivisionError("there is no such number")'
    assert isinstance(last["line_number"], int)
    assert [call["op_name"] for call in calls if call["exception"]] == ["trajectory", "solve", "calculator"]
    assert calls[0]["summary"]["status_counts"] == {"success": 1, "error": 3}


def test_a_rollout_whose_process_died_counts_as_failed() -> None:
    (one,) = recorded(record)
    died = replace(one, status="died", error="its process died", spans=(replace(one.spans[0], end_ns=None),))
    (call,) = as_calls(died)
    assert json.loads(call["exception"])["message"] == "its process died"
    assert call["ended_at"] >= call["started_at"]


def test_a_rollout_without_a_name_has_no_thread() -> None:
    (one,) = recorded(lambda: calculator("1"))  # type: ignore[arg-type]
    (call,) = as_calls(one)
    assert (call["thread_id"], call["turn_id"]) == (None, None)
    assert "step" not in call["attributes"]


def test_a_trajectory_that_has_not_changed_becomes_the_same_bytes() -> None:
    (one,) = recorded(record)
    assert calls_of(one, "team/maths", "x") == calls_of(one, "team/maths", "x")


def test_what_is_too_large_for_the_server_is_cut_and_says_so() -> None:
    text = "head " + "語" * 6_000_000 + " tail"

    @tool_trace
    def read(path: str) -> str:
        return text

    @llm_trace
    def chat(messages: list[dict[str, str]]) -> str:
        return "short"

    def rollout() -> None:
        with trajectory(step=1, sample_index=1):
            read("a")
            chat([{"role": "user", "content": text[:900_000]}] * 3)

    (one,) = recorded(rollout, max_text_length=None)
    calls = as_calls(one)
    assert all(len(call.data) <= CALL_LIMIT for call in calls_of(one, "team/maths", "x").calls)
    output = named(calls, "read")["output"]
    assert output.startswith("head 語")
    assert output.endswith("語 tail")
    assert "characters are left out here; the Trackway store has them" in output
    assert "left out here" in str(named(calls, "chat")["inputs"])


def test_a_call_can_be_made_much_shorter() -> None:
    @tool_trace
    def read(path: str) -> str:
        return "x" * 90_000

    (one,) = recorded(lambda: read("a" * 90_000))  # type: ignore[arg-type]
    (call,) = calls_of(one, "team/maths", "x").calls
    short = call.shorter()
    assert len(short.data) < len(call.data) / 8
    told = Call(**json.loads(short.data))
    assert (told.id, told.trace_id) == (one.spans[0].span_id, one.trace_id)


HOSTILE = st.text(st.characters(exclude_categories=()), max_size=300)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | HOSTILE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE, inner, max_size=3),
    max_leaves=8,
)
_one: list[Trajectory] = []


@given(name=HOSTILE, value=JSON, reward=st.floats() | HOSTILE, key=HOSTILE)
@settings(max_examples=60, deadline=None)
def test_whatever_is_recorded_becomes_calls_that_the_server_takes(
    name: str, value: Any, reward: Any, key: str
) -> None:
    if not _one:
        _one.extend(recorded(record))
    spans = tuple(
        replace(span, name=name, error=name, status="error", inputs=value, outputs=value)
        for span in _one[0].spans
    )
    spans = (*spans[:1], *(replace(span, attributes={**span.attributes, name: name}) for span in spans[1:]))
    changed = replace(_one[0], spans=spans, rewards={name: reward}, error=name, experiment=key)
    assert len(as_calls(changed)) == len(spans)
    for one in calls_of(changed, "team/maths", "x").rewards:
        json.dumps(one.payload, allow_nan=False)
        one.kind.encode()


def test_odd_ids_are_refused_with_the_reason() -> None:
    (one,) = recorded(record)
    odd = replace(one, spans=(replace(one.spans[0], span_id="17"), *one.spans[1:]))
    with pytest.raises(ValueError, match="'17' is not an id of OpenTelemetry, of 16 hex digits"):
        calls_of(odd, "team/maths", "x")


# A login


@pytest.fixture(autouse=True)
def _no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the user's own leads anywhere."""
    for name in ("WANDB_API_KEY", "WANDB_ENTITY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WF_TRACE_SERVER_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


def test_without_a_login_configure_says_at_once_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackway.configure(store=tmp_path / "store", backend="weave", sync="off")
    (said,) = [record.getMessage() for record in caplog.records if "Weave" in record.getMessage()]
    assert "set WANDB_API_KEY" in said
    assert "`wandb login`" in said


@pytest.mark.parametrize("way", ["variable", "netrc", "identity token"])
def test_a_login_is_seen_where_the_real_client_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    if way == "variable":
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    elif way == "netrc":
        (tmp_path / "home" / ".netrc").write_text(f"machine 127.0.0.1:9 login user password {KEY}\n")
        (tmp_path / "home" / ".netrc").chmod(0o600)
    else:
        monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", "/somewhere")
    warn_without_login()
    assert not caplog.records


# Through the real client


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeaveServer]:
    with serving(tmp_path / "server") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def exporter(tmp_path: Path, **settings: Any) -> WeaveExporter:
    return WeaveExporter(TraceConfig(store=tmp_path, **{"project": "maths", **settings}))


def many(count: int) -> list[Trajectory]:
    return recorded(*(lambda sample=n: record(sample) for n in range(count)))


@pytest.mark.slow
def test_what_was_sent_is_what_is_there_and_sent_again_it_is_there_once(
    tmp_path: Path, server: WeaveServer
) -> None:
    trajectories = many(5)
    weave = exporter(tmp_path)
    assert weave.export_trajectories(trajectories) == {}
    assert weave.export_trajectories(trajectories) == {}
    weave.shutdown()
    stored = {call["id"]: call for call in server.calls("team/maths")}
    sent = [
        json.loads(call.data) for one in trajectories for call in calls_of(one, "team/maths", "default").calls
    ]
    assert len(stored) == len(sent) == 25
    for call in sent:
        assert call.items() <= stored[call["id"]].items()
    assert set(server.writes().values()) == {2}
    calls = [path for method, path, size in server.requests if path.endswith("calls/complete")]
    assert len(calls) == 2  # a request for all of them, and not one for each


@pytest.mark.slow
def test_a_late_word_of_the_trainer_replaces_what_is_there(tmp_path: Path, server: WeaveServer) -> None:
    weave = exporter(tmp_path)
    with recording(project="maths") as given:
        record(score=0.25)
        (before,) = given.trajectories()
        weave.export_trajectories([before])
        root = server.calls()[0]
        server._feed(
            [
                {
                    "project_id": "team/maths",
                    "weave_ref": f"weave:///team/maths/call/{root['id']}",
                    "feedback_type": "somebody.else",
                    "payload": {"value": 5},
                }
            ]
        )
        attach(before.trace_id, rewards={"reward": 0.75, "style": 0.5}, trained_step=2)
        (after,) = given.trajectories()
    weave.export_trajectories([after])
    (root,) = [call for call in server.calls() if call["parent_id"] is None]
    assert root["attributes"]["rewards"] == {"reward": 0.75, "style": 0.5}
    assert root["attributes"]["trained_step"] == 2
    assert root["output"]["reward"] == 0.75
    assert len(server.calls()) == len(before.spans)
    assert [(row["feedback_type"], row["payload"]["value"]) for row in server.feedback()] == [
        ("reward", 0.75),
        ("somebody.else", 5),
        ("style", 0.5),
    ]
    # And when it turns out to have been about another attempt, it goes.
    weave.export_trajectories([before])
    assert [(row["feedback_type"], row["payload"]["value"]) for row in server.feedback()] == [
        ("reward", 0.25),
        ("somebody.else", 5),
    ]


@pytest.mark.slow
def test_the_entity_is_that_of_the_project_the_variable_or_the_key(
    tmp_path: Path, server: WeaveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = many(1)
    one = replace(one, project=None)
    exporter(tmp_path).export_trajectories([one])
    monkeypatch.setenv("WANDB_ENTITY", "others")
    exporter(tmp_path).export_trajectories([one])
    exporter(tmp_path, project="third/maths").export_trajectories([one])
    assert {call["project_id"] for call in server.calls()} == {"team/maths", "others/maths", "third/maths"}


@pytest.mark.slow
@pytest.mark.parametrize("project", ["a/b/maths", "team/"])
def test_a_project_that_cannot_be_one_is_told(tmp_path: Path, server: WeaveServer, project: str) -> None:
    (one,) = many(1)
    with pytest.raises(
        RuntimeError, match=f"'{project}' is no project of Weave: expected a name, or entity/"
    ):
        exporter(tmp_path).export_trajectories([replace(one, project=project)])


@pytest.mark.slow
def test_a_server_without_feedback_gets_the_calls(tmp_path: Path, server: WeaveServer) -> None:
    server.fail(404, path="^/feedback")
    weave = exporter(tmp_path)
    assert weave.export_trajectories(many(2)) == {}
    assert weave.export_trajectories(many(2)) == {}
    assert len(server.calls()) == 20
    assert sum(path.startswith("/feedback") for method, path, size in server.requests) == 1
    assert server.calls()[0]["attributes"]["rewards"] == {"reward": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("status", [500, 503, 0])
def test_trouble_that_passes_is_an_error_that_passes(
    tmp_path: Path, server: WeaveServer, status: int
) -> None:
    weave = exporter(tmp_path)
    trajectories = many(2)
    server.fail(status, times=1)
    with pytest.raises(ConnectionError, match=rf"Weave at http.*|{server.url} does not take calls now"):
        weave.export_trajectories(trajectories)
    assert server.calls() == []
    asked = [path for method, path, size in server.requests if path.endswith("calls/complete")]
    assert len(asked) == 1  # to try again is the follower's business, which knows when
    assert weave.export_trajectories(trajectories) == {}
    assert len(server.calls()) == 10


@pytest.mark.slow
@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_server_that_asks_to_wait_is_left_alone(tmp_path: Path, server: WeaveServer, form: str) -> None:
    weave = exporter(tmp_path)
    trajectories = many(2)
    date = format_datetime(datetime.now(timezone.utc) + timedelta(minutes=5), usegmt=True)
    server.fail(429, times=1, headers={"Retry-After": "300" if form == "seconds" else date})
    with pytest.raises(ConnectionError, match=r"HTTP 429.*it asks for \d+ s"):
        weave.export_trajectories(trajectories)
    before = len(server.requests)
    for _ in range(5):
        with pytest.raises(ConnectionError, match=r"asked to be left alone, for \d+ s more"):
            weave.export_trajectories(trajectories)
    assert len(server.requests) == before
    weave._not_before = time.monotonic()  # five minutes later
    assert weave.export_trajectories(trajectories) == {}
    assert len(server.calls()) == 10


@pytest.mark.slow
@pytest.mark.parametrize("told", ["soon", "-5", "nan", "1e999", "Mon, 99 Foo 2026"])
def test_an_odd_retry_after_blocks_nothing_for_long(tmp_path: Path, server: WeaveServer, told: str) -> None:
    weave = exporter(tmp_path)
    server.fail(429, times=1, headers={"Retry-After": told})
    with pytest.raises(ConnectionError, match="HTTP 429"):
        weave.export_trajectories(many(1))
    assert weave._not_before - time.monotonic() <= 3600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "does not accept the API key, which has expired.*set WANDB_API_KEY .* `wandb login`"),
        (402, "does not let this API key write there"),
        (403, "does not let this API key write there"),
        (404, "has no project team/maths, or is too old"),
    ],
)
def test_trouble_that_a_person_must_end_loses_nothing(
    tmp_path: Path, server: WeaveServer, status: int, message: str
) -> None:
    weave = exporter(tmp_path)
    trajectories = many(2)
    failure = server.fail(status)
    with pytest.raises(RuntimeError, match=message):
        weave.export_trajectories(trajectories)
    assert KEY not in str(failure.body)
    server.failures.clear()
    assert weave.export_trajectories(trajectories) == {}
    assert len(server.calls()) == 10


@pytest.mark.slow
def test_a_wrong_key_is_told_and_never_shown_and_a_new_login_is_taken_up(
    tmp_path: Path, server: WeaveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "local-" + "0" * 40)
    weave = exporter(tmp_path)
    trajectories = many(1)
    with pytest.raises(RuntimeError, match="does not accept the API key") as caught:
        weave.export_trajectories(trajectories)
    assert "0" * 40 not in str(caught.value)
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(RuntimeError, match="there is no login for Weave"):
        weave.export_trajectories(trajectories)
    # As `wandb login` in another terminal would.
    file = tmp_path / "home" / ".netrc"
    file.write_text(f"machine 127.0.0.1:{server.port} login user password {KEY}\n")
    file.chmod(0o600)
    assert weave.export_trajectories(trajectories) == {}
    assert len(server.calls()) == 5


@pytest.mark.slow
def test_nobody_there_is_told_with_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with pytest.raises(ConnectionError, match=r"Weave at http://127\.0\.0\.1:9 cannot be reached: .*refused"):
        exporter(tmp_path).export_trajectories(many(1))


@pytest.mark.slow
def test_one_call_that_is_too_large_for_the_server_is_cut_and_no_other(
    tmp_path: Path, server: WeaveServer
) -> None:
    @tool_trace
    def read(path: str) -> str:
        return "x" * 90_000

    def large() -> None:
        with trajectory(step=1, sample_index=99):
            read("a")

    trajectories = recorded(record, large, lambda: record(3))
    server.fail(413, over=60_000)
    assert exporter(tmp_path).export_trajectories(trajectories) == {}
    calls = server.calls()
    assert len(calls) == sum(len(one.spans) for one in trajectories)
    assert "left out here" in str(named(calls, "read")["output"])
    # The conversation on the root of the same rollout is as long.
    cut = {call["attributes"]["key"] for call in calls if "left out here" in str(call)}
    assert cut == {"1/99/0"}


@pytest.mark.slow
@pytest.mark.parametrize("status", [413, 422, 400])
def test_one_call_that_the_server_never_takes_is_refused_and_keeps_no_other(
    tmp_path: Path, server: WeaveServer, status: int
) -> None:
    trajectories = many(20)
    (bad,) = [span.span_id for span in trajectories[7].spans if span.name == "calculator"]
    server.fail(status, holding=f'"id":"{bad}"'.encode())
    refused = exporter(tmp_path).export_trajectories(trajectories)
    assert list(refused) == [trajectories[7].trace_id]
    assert f"HTTP {status}" in refused[trajectories[7].trace_id]
    missing = {span.span_id for one in trajectories for span in one.spans}
    missing -= {call["id"] for call in server.calls()}
    assert missing == {bad}


@pytest.mark.slow
def test_what_comes_one_by_one_waits_until_the_server_has_taken_something(
    tmp_path: Path, server: WeaveServer
) -> None:
    bad, *others = many(3)
    server.fail(400, holding=bad.trace_id.encode())
    weave = exporter(tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refuses every call"):
            weave.export_trajectories([bad])
    assert weave.export_trajectories([bad, *others]).keys() == {bad.trace_id}
    assert weave.export_trajectories([bad]).keys() == {bad.trace_id}
    assert len(server.calls()) == 10


@pytest.mark.slow
def test_a_web_page_is_no_server_of_weave(
    tmp_path: Path, server: WeaveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = 200, "text/html", b"<!doctype html><title>Please sign in</title>"
    with web_server(lambda path: page) as address:
        monkeypatch.setenv("WF_TRACE_SERVER_URL", address)
        weave = exporter(tmp_path)
        with pytest.raises(RuntimeError, match=f"what answers at {address} is no server of Weave"):
            weave.export_trajectories(many(1))
    assert weave.sent_bytes == 0


@pytest.mark.slow
def test_a_server_that_refuses_everything_is_trouble_and_no_refusal(
    tmp_path: Path, server: WeaveServer
) -> None:
    trajectories = many(40)
    server.fail(422)
    weave = exporter(tmp_path)
    with pytest.raises(RuntimeError, match="refuses every call"):
        weave.export_trajectories(trajectories)
    assert len(server.requests) < 40
    server.failures.clear()
    assert weave.export_trajectories(trajectories) == {}
    assert len(server.calls()) == 200


@pytest.mark.slow
def test_requests_are_split_by_bytes_and_by_count(tmp_path: Path, server: WeaveServer) -> None:
    @tool_trace
    def read(path: str) -> str:
        return "x" * 99_000

    def large() -> None:
        with trajectory(step=1, sample_index=1):
            for _ in range(100):
                read("a")

    def long() -> None:
        with trajectory(step=1, sample_index=2):
            for _ in range(1500):
                calculator("1")

    assert exporter(tmp_path).export_trajectories(recorded(large, long)) == {}
    sizes = [size for method, path, size in server.requests if path.endswith("calls/complete")]
    assert len(sizes) == 3
    assert max(sizes) <= 8 * 2**20 + 100
    assert len(server.calls()) == 1602


@pytest.mark.slow
def test_exporters_of_several_processes_may_write_at_once(tmp_path: Path, server: WeaveServer) -> None:
    trajectories = many(24)
    start = threading.Barrier(4)

    def work(part: int) -> dict[str, str]:
        start.wait()
        return exporter(tmp_path).export_trajectories(trajectories[part::4] + trajectories[:3])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [{}] * 4
    assert len(server.calls()) == 120


@pytest.mark.slow
def test_spans_of_any_tracer_provider_become_calls(tmp_path: Path, server: WeaveServer) -> None:
    weave = exporter(tmp_path)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("agent")
    with tracer.start_as_current_span("agent") as root, tracer.start_as_current_span("search") as child:
        pass
    assert weave.export([child]) is SpanExportResult.SUCCESS  # type: ignore[list-item]
    assert server.calls() == []  # not before its root has come
    assert weave.export([root]) is SpanExportResult.SUCCESS  # type: ignore[list-item]
    assert [call["op_name"] for call in server.calls()] == ["agent", "search"]
    with tracer.start_as_current_span("lost"), tracer.start_as_current_span("child") as lost:
        pass
    weave.export([lost])  # type: ignore[list-item]
    weave.shutdown()
    assert len(server.calls()) == 4
    server.stop()
    assert weave.export([root]) is SpanExportResult.FAILURE  # type: ignore[list-item]
