"""The ``trackway`` command: what it prints, where, and how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trackway
from trackway.trace.store.cursors import Cursors

from .programs import Cli, Result

HOSTILE = "[red]x[/INST]\x1b[2J\x9b\rEVIL\u202e"
LONG_ID = "a sample id / as long as a path / " * 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten rollouts: three steps, an integer and a text sample, failures, odd rewards, a retry, validation,
    two experiments."""
    path = tmp_path_factory.mktemp("cli") / "store"
    trackway.configure(store=path, project="p", experiment="e", backend=None, sync="off")

    @trackway.llm_trace
    def generate(prompt_ids: list[int]) -> dict[str, Any]:
        text = "thinking 你好 😀 " + HOSTILE
        return {"response_ids": [7, 8, 9], "response_logprobs": [-0.5, -0.25, -1.0], "text": text}

    @trackway.tool_trace
    def divide(left: int, right: int) -> str:
        return f"{left / right} {HOSTILE}"

    @trackway.rollout_trace
    def agent(right: int) -> str:
        generate([1, 2])
        divide(1, right)
        return "done"

    def roll(
        step: int, sample: int | str, rollout: int, reward: float | None, right: int = 2, **more: Any
    ) -> None:
        key = {"step": step, "sample_index": sample, "rollout_n": rollout, "policy_version": step}
        with trackway.trajectory(**key, **more):
            if reward is not None:
                trackway.reward("correct", reward)
            try:
                agent(right)
            finally:
                trackway.annotate(note=HOSTILE)

    roll(1, 17, 0, 1.0)
    roll(1, 17, 1, 0.0)
    roll(1, "task/3", 0, 0.5)
    roll(1, "17", 2, float("nan"))
    roll(2, 17, 0, None)
    roll(2, 17, 0, 0.25)
    roll(2, 17, 1, 2.0, validate=True)
    roll(2, LONG_ID, 0, -1.0)
    with pytest.raises(ZeroDivisionError):
        roll(2, 18, 0, 0.0, right=0)
    trackway.configure(store=path, project="p", experiment="another", backend=None, sync="off")
    with trackway.trajectory(step=3, sample_index=1), contextlib.suppress(ZeroDivisionError):
        divide(1, 0)
    trackway.shutdown()
    return path


@pytest.fixture
def cli(cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run the command in this process, on the store above."""
    monkeypatch.setenv("TRACKWAY_STORE", str(store))
    return cli


def process(*args: str, store: Path | None = None, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command as a shell would."""
    environ = {**os.environ, **env}
    if store:
        environ["TRACKWAY_STORE"] = str(store)
    return subprocess.run([sys.executable, "-m", "trackway", *args], env=environ, capture_output=True)


def keys(result: Result) -> list[str]:
    assert result.code == 0, result.err
    return [row["key"] for row in json.loads(result.out)]


# --- ls -----------------------------------------------------------------------------------------------------


def test_ls_json_is_one_array_with_everything_a_script_wants(cli: Cli) -> None:
    rows = json.loads(cli("ls", "--json").out)
    first = rows[0]
    assert first["key"] == "1/17/0"
    assert (first["step"], first["sample_index"], first["rollout_n"]) == (1, 17, 0)
    assert (first["attempt"], first["validate"], first["status"]) == (0, False, "ok")
    assert (first["reward"], first["rewards"], first["experiment"]) == (1.0, {"correct": 1.0}, "e")
    assert (first["generations"], first["tool_calls"], first["errors"], first["spans"]) == (1, 1, 0, 4)
    assert first["tokens"] == 5
    assert first["turns"] == 3
    assert re.fullmatch(r"[0-9a-f]{32}", first["trace_id"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00", first["start"])
    assert 0 < first["duration_s"] < 60


def test_ls_json_writes_null_where_json_has_no_number(cli: Cli) -> None:
    (row,) = [row for row in json.loads(cli("ls", "--json").out) if row["key"] == "1/%317/2"]
    assert row["reward"] is None
    assert row["rewards"] == {"correct": None}
    assert row["sample_index"] == "17"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--step", "2", "--train"], {"2/17/0@1", "2/18/0", str(trackway.TrajectoryKey(2, LONG_ID))}),
        (["--validate"], {"val/2/17/1"}),
        (["--sample", "task%2F3"], {"1/task%2F3/0"}),
        (["--sample", "task/3"], {"1/task%2F3/0"}),
        (["--sample", "18"], {"2/18/0"}),
        (["--rollout", "2"], {"1/%317/2"}),
        (["--status", "error"], {"2/18/0"}),
        (["--errors"], {"2/18/0", "3/1/0"}),
        (["--errors", "--limit", "1"], {"2/18/0"}),
        (["--experiment", "another"], {"3/1/0"}),
        (["--min-reward", "0.5", "--max-reward", "1"], {"1/17/0", "1/task%2F3/0"}),
        (["--step", "2", "--sample", "17", "--train", "--all-attempts"], {"2/17/0", "2/17/0@1"}),
    ],
)
def test_ls_filters(cli: Cli, args: list[str], expected: set[str]) -> None:
    assert set(keys(cli("ls", "--json", *args))) == expected


def test_ls_limit(cli: Cli) -> None:
    assert len(keys(cli("ls", "--json", "--limit", "3"))) == 3


def test_ls_prints_a_line_for_each_trajectory_also_with_long_keys(cli: Cli) -> None:
    shown = cli("ls").out
    for key in keys(cli("ls", "--json")):
        assert re.search(rf"^{re.escape(key)} ", shown, re.MULTILINE)
    assert re.search(r"^2/18/0 .* ERROR ", shown, re.MULTILINE)
    assert "9 trajectories, 1 failed, mean reward 0.393 (7 of 9 with a finite reward)" in shown


def test_ls_says_when_a_table_would_be_too_long(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trackway.cli.ROWS", 3)
    result = cli("ls")
    assert "3 trajectories shown (there are more)" in result.out
    assert "there are more than these 3" in result.err
    result = cli("ls", "--limit", "8")
    assert "8 trajectories shown (there are more)" in result.out
    assert result.err == ""
    assert "\n9 trajectories, " in cli("ls", "--limit", "9").out


def test_ls_newest_first(cli: Cli) -> None:
    assert keys(cli("ls", "--json", "--newest"))[:2] == ["3/1/0", "2/18/0"]


def test_ls_says_why_and_in_which_experiment(cli: Cli) -> None:
    shown = cli("ls").out
    assert re.search(r"^2/18/0 +ERROR +e  .*  ZeroDivisionError: division by zero$", shown, re.MULTILINE)
    assert re.search(r"^3/1/0 +ok +another ", shown, re.MULTILINE)
    assert shown.endswith("\nerrors: 1 ZeroDivisionError\n")
    assert not re.search(" $", shown, re.MULTILINE)
    assert "experiment" not in cli("ls", "--step", "3").out


def test_calls_outside_of_a_trajectory_are_listed_by_a_short_id_that_show_takes(
    tmp_path: Path, cli: Cli
) -> None:
    path = str(tmp_path / "store")
    trackway.configure(store=path, backend=None, sync="off")

    @trackway.tool_trace
    def probe() -> str:
        return "found"

    probe()
    with trackway.trajectory(step=1, sample_index=0):
        probe()
    trackway.shutdown()
    named, unnamed = json.loads(cli("ls", "--json", "--store", path).out)
    assert (named["key"], unnamed["key"]) == ("1/0/0", unnamed["trace_id"])
    last = cli("ls", "--store", path).out.splitlines()[3]
    assert last.split()[0] == unnamed["trace_id"][:12]
    assert "found" in cli("show", last.split()[0], "--store", path).out


def test_ls_without_a_match_says_so_and_is_no_error(cli: Cli) -> None:
    result = cli("ls", "--step", "99")
    assert (result.code, result.out) == (0, "")
    assert "no trajectory matches" in result.err
    result = cli("ls", "--step", "99", "--json")
    assert (result.code, json.loads(result.out)) == (0, [])


# --- show ---------------------------------------------------------------------------------------------------


def test_show_replays_by_key_by_trace_id_and_by_its_beginning(cli: Cli) -> None:
    shown = cli("show", "1/17/0").out
    assert shown.startswith("1/17/0  ok")
    assert "├ divide(left=1, right=2)" in shown
    trace_id = json.loads(cli("show", "1/17/0", "--json").out)["trace_id"]
    assert cli("show", trace_id).out == shown
    assert cli("show", trace_id[:12]).out == shown


def test_show_takes_later_attempts_validation_and_encoded_samples(cli: Cli) -> None:
    for key in ("2/17/0@1", "val/2/17/1", "1/task%2F3/0"):
        assert cli("show", key).out.startswith(f"{key}  ok")


def test_show_says_error_in_words(cli: Cli) -> None:
    shown = cli("show", "2/18/0").out
    assert shown.startswith("2/18/0  ERROR")
    assert "ERROR ZeroDivisionError: division by zero" in shown
    place = re.search(rf"{re.escape(__file__)}:\d+ in divide", re.sub(r"\n *│? *", "", shown))
    assert place
    whole = cli("show", "2/18/0", "--full").out
    assert re.sub(r"\n *│? *", "", whole).count('return f"{left / right} {HOSTILE}"') >= 1


def test_show_json_holds_the_whole_trajectory(cli: Cli) -> None:
    found = json.loads(cli("show", "1/17/0", "--json").out)
    assert [turn["role"] for turn in found["turns"]] == ["user", "assistant", "tool"]
    turn = found["turns"][1]
    assert turn["token_ids"] == [7, 8, 9]
    assert turn["logprobs"] == [-0.5, -0.25, -1.0]
    assert turn["text"] == "thinking 你好 😀 " + HOSTILE
    assert turn["policy_version"] == 1
    (call,) = turn["tool_calls"]
    assert (call["name"], call["arguments"]) == ("divide", {"left": 1, "right": 2})
    assert call["result"] == f"0.5 {HOSTILE}"
    assert found["rewards"] == {"correct": 1.0}
    assert found["annotations"] == {"note": HOSTILE}
    assert [span["kind"] for span in found["spans"]] == ["trajectory", "rollout", "llm", "tool"]
    assert "attributes" not in found["spans"][0]


def test_json_holds_what_was_attached_later(tmp_path: Path, cli: Cli) -> None:
    path = str(tmp_path / "store")
    trackway.configure(store=path, backend=None, sync="off")

    @trackway.llm_trace
    def generate(prompt_ids: list[int]) -> dict[str, Any]:
        return {"response_ids": [7, 8]}

    with trackway.trajectory(step=1, sample_index=0):
        generate([1, 2])
    trackway.attach("1/0/0", advantages=[0.5, -0.5], trained_step=2, discarded="stale")
    trackway.shutdown()
    (row,) = json.loads(cli("ls", "--json", "--store", path).out)
    found = json.loads(cli("show", "1/0/0", "--json", "--store", path).out)
    for each in (row, found):
        assert (each["trained_step"], each["discarded"]) == (2, "stale")
    assert [turn["advantages"] for turn in found["turns"]] == [[], [0.5, -0.5]]


def test_show_one_turn(cli: Cli) -> None:
    shown = cli("show", "1/17/0", "--turn", "1").out
    assert "\n1 assistant │" in shown
    assert "\n0 user" not in shown
    (turn,) = json.loads(cli("show", "1/17/0", "--turn", "1", "--json").out)["turns"]
    assert turn["index"] == 1


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["show", "1/17/9"], "no trajectory 1/17/9"),
        (["show", "abcdef"], "begins with abcdef"),
        (["show", "nonsense"], "not a trajectory key"),
        (["show", "-/17/0"], "no trajectory -/17/0"),
        (["show", "1/17/0", "--turn", "9"], "1/17/0 has no turn 9; its turns are 0 to 2"),
        (["show", "\x1b[2J"], r"\x1b[2J"),
        (["ls", "--store", __file__], f"{__file__} is a file; a store is a directory"),
        (["ls", "--store", "/nowhere"], "there is no store at /nowhere"),
        (["status", "--store", "/nowhere"], "there is no store at /nowhere"),
        (["sync", "--store", "/nowhere"], "there is no store at /nowhere"),
        (["ui", "--store", "/nowhere"], "there is no store at /nowhere"),
    ],
)
def test_what_is_not_there_is_said_on_stderr(cli: Cli, args: list[str], sentence: str) -> None:
    result = cli(*args)
    assert (result.code, result.out) == (1, "")
    assert sentence in result.err
    assert result.err.startswith("trackway: ")
    assert "Traceback" not in result.err
    assert "\x1b" not in result.err


def test_a_near_key_is_offered(cli: Cli) -> None:
    assert "did you mean" in cli("show", "1/17/9").err


@pytest.mark.parametrize(
    "args",
    [
        ["nope"],
        ["show"],
        ["ls", "--status", "broken"],
        ["ls", "--step", "x"],
        ["ls", "--limit", "0"],
        ["ls", "--stp", "1"],
        ["demo", "--prompts", "0"],
        ["ui", "--port", "0"],
    ],
)
def test_wrong_use_ends_with_2(cli: Cli, args: list[str]) -> None:
    result = cli(*args)
    assert (result.code, result.out) == (2, "")
    assert "Error: " in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["ls", "--step", "x"], "'--step': 'x' names no steps; write 7, 1,5,9, 100..200, >=100 or <50\n"),
        (["ls", "--limit", "0"], "'--limit': 0 is less than 1\n"),
        (["ls", "--min-reward", "much"], "'--min-reward': 'much' is not a number\n"),
        (["ui", "--port", "65536"], "'--port': 65536 is more than 65535\n"),
        (["show", "1/17/0", "--turn", "1.5"], "'--turn': '1.5' is not an integer\n"),
        (["demo", "--temperature", "nan"], "'--temperature': nan is no temperature: it is 0 or more\n"),
    ],
)
def test_a_wrong_number_is_named_in_plain_words(cli: Cli, args: list[str], sentence: str) -> None:
    result = cli(*args)
    assert result.code == 2
    assert result.err.endswith(sentence)


def test_a_wrong_status_names_the_right_ones(cli: Cli) -> None:
    assert "use one of ok, error, cancelled, running, died" in cli("ls", "--status", "broken").err


# --- the store, status, sync --------------------------------------------------------------------------------


def test_the_store_is_the_option_else_the_variable_else_the_folder(
    store: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKWAY_STORE", "/nowhere")
    assert cli("ls").code == 1
    assert keys(cli("ls", "--json", "--store", str(store)))
    monkeypatch.delenv("TRACKWAY_STORE")
    (tmp_path / "trackway-store").symlink_to(store)
    monkeypatch.chdir(tmp_path)
    assert keys(cli("ls", "--json"))


def test_status_adds_up(cli: Cli) -> None:
    state = json.loads(cli("status", "--json").out)
    assert state["recorded"] == 38
    assert state["recorded"] == state["exported"] + state["pending"] + state["dropped"]
    assert state["trajectories"] == 10
    shown = cli("status").out
    assert "38 recorded = 38 in the journal + 0 pending + 0 dropped" in shown


def test_sync_without_a_destination_says_so(cli: Cli) -> None:
    result = cli("sync")
    assert result.code == 0
    assert "no destination is configured" in result.out


def test_sync_beside_a_follower_tells_what_it_fails_at(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "store"
    trackway.configure(store=path, backend="mlflow", sync="off")
    trackway.shutdown()
    with (path / "sync.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = cli("sync", "--store", str(path))
        assert (result.code, result.out.count("\n")) == (0, 1)
        assert "a follower is at work" in result.out
        cursors = Cursors(path)
        cursors.fail("mlflow", "ConnectionError: connection refused")
        cursors.close()
        result = cli("sync", "--store", str(path))
        assert result.code == 1
        assert "mlflow: ConnectionError: connection refused\n" in result.out
    shown = cli("status", "--store", str(path)).out
    assert "\nlast error of mlflow: ConnectionError: connection refused\n" in shown


@pytest.mark.slow
def test_sync_delivers_to_mlflow(tmp_path: Path) -> None:
    path = tmp_path / "store"
    trackway.configure(store=path, backend="mlflow", sync="off", project="p")
    with trackway.trajectory(step=1, sample_index=0):
        pass
    trackway.shutdown()
    done = process("sync", "--once", store=path, MLFLOW_TRACKING_URI="")
    assert done.returncode == 0, done.stderr
    state = json.loads(process("status", "--json", store=path).stdout)
    assert (state["exported"], state["pending"]) == (1, 0)
    assert state["destinations"]["mlflow"]["exported"] == 1


# --- ui -----------------------------------------------------------------------------------------------------


def test_ui_without_mlflow_names_the_install_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    result = cli("ui", "--no-open")
    assert result.code == 1
    assert "pip install 'trackway[mlflow]'" in result.err


def test_ui_on_a_port_that_is_taken_offers_another(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = cli("ui", "--no-open", "--port", str(port))
    assert result.code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.err
    assert "--port" in result.err


def test_ui_of_a_store_that_goes_to_a_server_names_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@mlflow.example.org")
    result = cli("ui", "--no-open")
    assert result.code == 0
    assert "mlflow.example.org" in result.out
    assert "secret" not in result.out + result.err
    assert "Field = Tag" in result.out


@pytest.mark.slow
def test_ui_serves_the_traces_and_ends_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "store"
    trackway.configure(store=path, backend="mlflow", sync="off", project="p")
    with trackway.trajectory(step=1, sample_index=0):
        pass
    trackway.shutdown()
    env = {"MLFLOW_TRACKING_URI": "", "TRACKWAY_STORE": str(path)}
    assert process("sync", **env).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trackway", "ui", "--no-open", "--port", str(port)]
    environ = {**os.environ, **env}
    ui = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert ui.stdout
    try:
        said = ""
        while "in Python:" not in said:
            line = ui.stdout.readline().decode()
            assert line, said
            said += line
        page = re.search(rf"http://127\.0\.0\.1:{port}/#/experiments/\d+/traces", said)
        assert page
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(page[0]) as answer:
            assert answer.status == 200
        assert "&tag=step%3D1" in said
    finally:
        ui.send_signal(signal.SIGTERM)
        ui.stdout.read()  # ends when the last process that holds it has ended
        assert ui.wait() == 0
    with socket.create_server(("127.0.0.1", port)):
        pass


# --- terminals, pipes, encodings ----------------------------------------------------------------------------


def test_a_pipe_gets_no_escape_and_nothing_that_steers(store: Path) -> None:
    for args in (["show", "1/17/0"], ["show", "2/18/0", "--full"], ["ls"], ["status"]):
        done = process(*args, store=store)
        assert done.returncode == 0
        text = done.stdout.decode()
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    shown = process("show", "1/17/0", store=store).stdout.decode()
    assert r"[red]x[/INST]\x1b[2J\x9b\rEVIL\u202e" in re.sub(r"\n\s*│ ", "", shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONIOENCODING": ""},
        {"LC_ALL": "C", "PYTHONIOENCODING": "", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
)
def test_nothing_fails_where_little_can_be_encoded(store: Path, env: dict[str, str]) -> None:
    for args in (["show", "1/17/0", "--json"], ["ls"], ["show", "1/17/0"]):
        done = process(*args, store=store, **env)
        assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u4f60\\u597d" in done.stdout or "你好".encode() in done.stdout


def on_a_terminal(*args: str, store: Path, **env: str) -> str:
    import pty

    ours, theirs = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environ |= {"TRACKWAY_STORE": str(store), "TERM": "xterm", "COLUMNS": "80", **env}
    with subprocess.Popen([sys.executable, "-m", "trackway", *args], env=environ, stdout=theirs) as child:
        os.close(theirs)
        shown = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # how Linux tells that the other side is closed
                break
    os.close(ours)
    assert child.returncode == 0
    return shown.decode()


def test_a_terminal_gets_colours_unless_it_asks_for_none(store: Path) -> None:
    coloured = on_a_terminal("show", "2/18/0", store=store)
    assert "\x1b[1;31mERROR" in coloured
    plain = on_a_terminal("show", "2/18/0", store=store, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain)
    assert "ERROR" in plain


def test_a_closed_pipe_is_no_error(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    trackway.configure(store=path, backend=None, sync="off", max_text_length=10_000_000)
    with trackway.trajectory(step=1, sample_index=0):
        trackway.annotate(long="word " * 200_000)  # far more than a pipe holds
    trackway.shutdown()
    for args in (["show", "1/0/0", "--full"], ["show", "1/0/0", "--json"]):
        command = [sys.executable, "-m", "trackway", *args, "--store", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout
            assert child.stderr
            assert child.stdout.read(6)
            child.stdout.close()
            assert child.stderr.read() == b""
        assert child.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "args",
    [["ls"], ["show", "1/17/0", "--json"], ["status"], ["sync"], ["--version"], ["--help"], ["ls", "-h"]],
)
def test_a_full_disk_is_said_in_one_sentence(store: Path, args: list[str], unbuffered: str) -> None:
    environ = {**os.environ, "TRACKWAY_STORE": str(store), "PYTHONUNBUFFERED": unbuffered}
    if not unbuffered:
        del environ["PYTHONUNBUFFERED"]
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "trackway", *args]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environ)
    assert done.returncode == 1
    assert re.fullmatch(rb"trackway: .*No space left on device\n", done.stderr)


def test_a_closed_output_is_no_error(store: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m trackway ls --store {shlex.quote(str(store))} >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


# --- the demo -----------------------------------------------------------------------------------------------


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Callable[..., Result]:
    """Run a small scripted demo in an empty folder, with a tokenizer of our own."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {token: number for number, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.save_pretrained(tmp_path / "model")
    transformers.LlamaConfig(vocab_size=300).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("TRACKWAY_DEMO_MODEL", str(tmp_path / "model"))
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> Result:
        monkeypatch.delenv("TRACKWAY_STORE", raising=False)
        return cli("demo", "--no-model", "--prompts", "3", "--group", "2", *args)

    return run


def test_the_demo_tells_each_stage_and_pads_no_line(demo: Callable[..., Result]) -> None:
    result = demo()
    assert result.code == 0, result.err
    said = result.out.splitlines()
    assert said[0].startswith("Loading the tokenizer of SmolLM2")
    stages = ["  step 1 …", "  step 2 …", "  validation …"]
    assert [line for line in said if line in stages] == stages
    assert "Waiting until everything is written and sent …" in said
    rows = [line for line in said if re.match(r"key  |─|(val/)?\d/\d/\d  |\d+ trajectories", line)]
    assert len(rows) > 14
    assert [line for line in rows if line != line.rstrip()] == []


def test_the_replay_in_the_readme_has_the_lines_of_a_real_one(demo: Callable[..., Result], cli: Cli) -> None:
    assert demo("--steps", "1").code == 0
    shown = cli("show", "1/1/0", "--store", "trackway-store").out
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    excerpt = readme.partition("$ trackway show 1/1/0\n")[2].partition("\n```")[0]

    def head(text: str) -> dict[str, str]:
        return dict(re.findall(r"^(\w+) +(.*)", text.split("\n" + "─" * 80)[1], re.MULTILINE))

    assert list(head(excerpt)) == list(head(shown))
    assert head(excerpt)["experiment"] == head(shown)["experiment"]


def test_the_demo_names_the_store_in_its_hints_only_where_it_must(demo: Callable[..., Result]) -> None:
    result = demo("--steps", "1")
    assert " ls --step 1 --max-reward 0.5\n" in result.out
    assert "--store" not in result.out
    assert " ls --step 1 --max-reward 0.5 --store other\n" in demo("--steps", "1", "--store", "other").out


def test_the_demo_says_why_something_is_pending(cli: Cli, store: Path) -> None:
    from rich.console import Console

    from trackway.demo import _show
    from trackway.trace.store import Destination, StoreStatus, open_store

    opened = open_store(store)
    failing = Destination(exported=0, pending=38, refused=0, last_error="ConnectionError: \x1brefused")
    status = StoreStatus(38, 0, 38, 0, destinations={"mlflow": failing})
    _show(console := Console(record=True, width=200), opened, status, list(opened.query()))
    opened.close()
    assert r"mlflow did not take everything yet: ConnectionError: \x1brefused" in console.export_text()


# --- help and version ---------------------------------------------------------------------------------------


def test_help_has_a_line_for_each_command_and_option(cli: Cli) -> None:
    shown = cli("--help").out
    for command in ("demo", "ls", "show", "status", "sync", "ui"):
        assert re.search(rf"^  {command} +[A-Z].*\.$", shown, re.MULTILINE)
        options = cli(command, "--help").out
        assert "--store PATH" in options
        assert all(len(line) <= 80 for line in options.splitlines())
    assert "..." not in shown.partition("Commands:")[2]


def test_nothing_given_shows_the_help(cli: Cli) -> None:
    result = cli()
    assert "Usage: trackway" in result.out + result.err


def test_version(cli: Cli) -> None:
    from importlib.metadata import version

    assert cli("--version").out == f"trackway {version('trackway')}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['trackway', '--help']\n"
        "from trackway.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = set(re.findall(r"'(\w+)'", done.stderr))
    assert "trackway" in loaded
    heavy = {"mlflow", "transformers", "torch", "numpy", "opentelemetry", "orjson", "sqlite3"}
    assert not loaded & heavy
