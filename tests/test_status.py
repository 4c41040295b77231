"""The counts of a store, what runs now, and both shown again and again while others record."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trackway
from trackway import StoreError, open_store, tool_trace
from trackway import trajectory as named
from trackway.trace.store import InFlight, Store, journal, status
from trackway.trace.store.cursors import Cursors
from trackway.trace.testing import recording

from .programs import Cli, run, wait_until
from .programs import start as start_program

HOSTILE = "[red]x[/]\x1b[2J\x9b\rEVIL\u202e"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# Three rollouts, each of which gets stuck before the next one begins.
STUCK = """
import asyncio, trackway
trackway.configure(store="store", sync="off")

@trackway.llm_trace
async def generate(prompt_ids):
    return {"response_ids": [7, 8]}

@trackway.llm_trace
async def think(prompt_ids):
    await asyncio.sleep(600)

@trackway.tool_trace
async def search(query):
    await asyncio.sleep(600)

@trackway.rollout_trace
async def with_tools():
    await generate([1, 2])
    first = asyncio.ensure_future(search("a"))
    await asyncio.sleep(0.01)
    await asyncio.gather(first, search("b"))

@trackway.rollout_trace
async def with_thought():
    await generate([1, 2])
    await think([1, 2, 7, 8])

async def outside_of_calls():
    await generate([1, 2])
    await asyncio.sleep(600)

async def roll(n, body):
    with trackway.trajectory(step=4, sample_index="s/1", rollout_n=n, policy_version=9):
        trackway.reward("so far", 0.5)
        await body()

async def main():
    tasks = []
    for n, body in enumerate([with_tools, with_thought, outside_of_calls]):
        tasks.append(asyncio.create_task(roll(n, body)))
        await asyncio.sleep(0.1)
    print("stuck", flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main())
"""

BUSY = """
import time, trackway
trackway.configure(store="store", sync="off")

@trackway.tool_trace
def tool(n):
    return "x" * 1000

step = 0
while True:
    step += 1
    with trackway.trajectory(step=step, sample_index=0):
        for n in range(5):
            tool(n)
    time.sleep(0.05)
"""


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[Any]]]:
    """Processes that are ended when the test is over."""
    started: list[subprocess.Popen[Any]] = []
    yield started
    for each in started:
        each.kill()
        each.wait()


def start(processes: list[subprocess.Popen[Any]], code: str, cwd: Path) -> subprocess.Popen[Any]:
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=cwd, stdout=subprocess.PIPE, text=True)
    processes.append(worker)
    return worker


def all_doing(store: Store, number: int) -> list[InFlight]:
    """Give what runs as soon as it is so many rollouts, and known of each what it does."""

    def look() -> list[InFlight] | None:
        rows = store.in_flight()
        return rows if len(rows) == number and all(row.doing for row in rows) else None

    return wait_until(look)


# --- what runs now ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_runs_is_listed_with_what_it_does_and_after_a_kill_as_died(
    tmp_path: Path, cli: Cli, processes: list[subprocess.Popen[Any]]
) -> None:
    worker = start(processes, STUCK, tmp_path)
    assert worker.stdout
    assert worker.stdout.readline() == "stuck\n"
    path = str(tmp_path / "store")
    store = open_store(path)
    rows = all_doing(store, 3)

    # The one that was silent longest comes first, and of two calls at once the older one.
    assert [row.summary.name for row in rows] == ["4/s%2F1/0", "4/s%2F1/1", "4/s%2F1/2"]
    assert [[(call.kind, call.name) for call in row.doing] for row in rows] == [
        [("tool", "search"), ("tool", "search")],
        [("llm", "think")],
        [("trajectory", "trajectory")],
    ]
    assert [call.inputs for call in rows[0].doing] == [{"query": "a"}, {"query": "b"}]
    assert [row.summary.turns for row in rows] == [2, 2, 2]
    assert [row.summary.policy_version for row in rows] == [9, 9, 9]
    assert {(row.pid, row.writer) for row in rows} == {(worker.pid, rows[0].writer)}
    for row in rows[:2]:
        assert row.last_sign_ns == row.doing[-1].start_ns
    # No call is open in it, so that the end of its last one is what was seen last.
    (generation,) = [span for span in store.load("4/s%2F1/2").spans if span.kind == "llm"]
    assert rows[2].last_sign_ns == generation.end_ns

    state = store.status()
    assert (state.in_flight, state.died, state.writers_alive) == (3, 0, 1)
    (writer,) = state.writers
    assert (writer.name, writer.pid, writer.alive, writer.running) == (rows[0].writer, worker.pid, True, 3)

    shown = cli("ls", "--in-flight", "--store", path)
    lines = shown.out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["4/s%2F1/0", "4/s%2F1/1", "4/s%2F1/2"]
    assert "tool search (+1)" in lines[2]
    assert "generation think" in lines[3]
    assert "between calls" in lines[4]
    assert all(f"{worker.pid}@" in line for line in lines[2:5])
    assert lines[5:] == ["3 rollouts run"]
    found = json.loads(cli("ls", "--in-flight", "--json", "--rollout", "1", "--store", path).out)
    assert [(row["key"], row["pid"], row["status"]) for row in found] == [
        ("4/s%2F1/1", worker.pid, "running")
    ]
    assert [(call["kind"], call["name"]) for call in found[0]["doing"]] == [("llm", "think")]
    assert found[0]["silent_s"] >= found[0]["doing"][0]["for_s"] > 0

    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert store.in_flight() == []
    result = cli("ls", "--in-flight", "--store", path)
    assert (result.code, result.out) == (0, "")
    assert result.err == "no rollout runs; 3 died with their process: trackway ls --status died\n"
    for args in (["ls"], ["ls", "--status", "died"]):
        assert cli(*args, "--store", path).out.count(" DIED ") == 3
    # When it ended nobody knows.
    assert [row["duration_s"] for row in json.loads(cli("ls", "--json", "--store", path).out)] == [None] * 3
    assert json.loads(cli("show", "4/s%2F1/0", "--json", "--store", path).out)["duration_s"] is None
    state = store.status()
    assert (state.in_flight, state.died, state.writers_alive, state.writers_dead) == (0, 3, 0, 1)
    store.close()


@pytest.mark.slow
def test_a_hung_attempt_is_listed_beside_the_one_that_replaced_it(
    tmp_path: Path, processes: list[subprocess.Popen[Any]], cli: Cli
) -> None:
    code = """
        import time, trackway
        trackway.configure(store="store", sync="off")
        @trackway.tool_trace
        def quick(): pass
        @trackway.rollout_trace
        def hang():
            quick()
            print("inside", flush=True)
            time.sleep(600)
        with trackway.trajectory(step=1, sample_index=1):
            hang()
    """
    for worker in [start(processes, textwrap.dedent(code), tmp_path) for _ in range(2)]:
        assert worker.stdout
        assert worker.stdout.readline() == "inside\n"
    store = open_store(tmp_path / "store")
    all_doing(store, 2)
    assert [row.summary.name for row in store.in_flight()] == ["1/1/0", "1/1/0@1"]
    processes[0].kill()
    processes[0].wait()
    assert [row.pid for row in store.in_flight(step=1)] == [processes[1].pid]
    assert store.in_flight(step=2) == []
    shown = cli("ls", "--in-flight", "--store", str(store.path)).out
    assert shown.endswith("\n1 rollout runs; 1 died with its process: trackway ls --status died\n")
    store.close()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["ls", "--in-flight", "--status", "died"], "--status does not go with --in-flight"),
        (["ls", "--in-flight", "--newest"], "--newest does not go with --in-flight"),
        (["ls", "--in-flight", "--all-attempts"], "--all-attempts does not go with --in-flight"),
        (["ls", "--in-flight", "--min-reward", "0"], "--min-reward does not go with --in-flight"),
        (["status", "--interval", "2"], "--interval says how often --watch looks"),
        (["status", "--watch", "--interval", "0"], "'--interval': 0 seconds: it is 0.1 or more"),
        (["status", "--watch", "--interval", "often"], "'--interval': 'often' is not a number"),
        (["status", "--watch", "--json"], "does not go with --watch"),
    ],
)
def test_what_does_not_go_together_is_wrong_use(cli: Cli, args: list[str], sentence: str) -> None:
    result = cli(*args)
    assert (result.code, result.out) == (2, "")
    assert sentence in result.err


# --- how far destinations are -------------------------------------------------------------------------------


def recorded(path: Path, samples: int, backend: str | None = "mlflow") -> Store:
    trackway.configure(store=path, backend=backend, sync="off")
    for sample in range(samples):
        with named(step=1, sample_index=sample):
            time.sleep(0.001)
    trackway.shutdown()
    return open_store(path)


def deliver(store: Store, *keys: str) -> None:
    """Note that MLflow has some trajectories."""
    cursors = Cursors(store.path)
    due = dict(store.due({}))
    sent = [(trace_id, due[trace_id]) for trace_id in (store.load(key).trace_id for key in keys)]
    cursors.store("mlflow", sent, {})
    cursors.close()


def lag(store: Store) -> tuple[float, float, float]:
    """Give the time before, the moment since which MLflow lacks something, and the time after."""
    before = time.time()
    behind = store.status().destinations["mlflow"].lag
    after = time.time()
    return before, behind, after


def assert_lacks_since(store: Store, end_ns: int | None) -> None:
    assert end_ns is not None
    before, behind, after = lag(store)
    assert before - end_ns / 1e9 <= behind <= after - end_ns / 1e9


def test_lag_counts_from_the_end_of_the_first_trajectory_that_is_lacking(tmp_path: Path) -> None:
    store = recorded(tmp_path / "store", 4)
    ends = [store.load(f"1/{sample}/0").end_ns for sample in range(4)]
    assert_lacks_since(store, ends[0])
    deliver(store, "1/0/0", "1/2/0", "1/3/0")
    assert_lacks_since(store, ends[1])
    place = store.status().destinations["mlflow"]
    assert (place.exported, place.pending, place.refused) == (3, 1, 0)
    deliver(store, "1/1/0")
    place = store.status().destinations["mlflow"]
    assert (place.exported, place.pending, place.lag) == (4, 0, 0.0)
    store.close()


def test_what_runs_is_not_late_and_what_died_is(
    tmp_path: Path, processes: list[subprocess.Popen[Any]]
) -> None:
    code = STUCK.replace('sync="off"', 'sync="off", backend="mlflow"')
    worker = start(processes, code, tmp_path)
    assert worker.stdout
    assert worker.stdout.readline() == "stuck\n"
    store = open_store(tmp_path / "store")
    all_doing(store, 3)
    place = store.status().destinations["mlflow"]
    assert (place.pending, place.lag) == (3, 0.0)  # what has ended inside of them
    (writer,) = store.status().writers
    worker.kill()
    worker.wait()
    # Nobody knows when it died, but when it last wrote is known.
    assert_lacks_since(store, writer.last_wrote_ns)
    deliver(store, "4/s%2F1/0", "4/s%2F1/1", "4/s%2F1/2")
    place = store.status().destinations["mlflow"]
    assert (place.pending, place.lag) == (0, 0.0)
    store.close()


def test_lag_looks_at_what_is_lacking_and_not_at_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = recorded(tmp_path / "store", 200)
    deliver(store, *(f"1/{sample}/0" for sample in range(197)))
    asked: list[str] = []
    states = Cursors.states

    def counted(cursors: Cursors, destination: str, among: list[str]) -> dict[str, int]:
        asked.extend(among)
        return states(cursors, destination, among)

    monkeypatch.setattr(Cursors, "states", counted)
    monkeypatch.setattr(status, "_PORTION", 10)
    assert_lacks_since(store, store.load("1/197/0").end_ns)
    assert len(asked) == 10
    deliver(store, "1/197/0", "1/198/0", "1/199/0")
    asked.clear()
    assert store.status().destinations["mlflow"].lag == 0.0
    assert asked == []
    store.close()


def test_what_was_left_out_is_neither_pending_nor_late(tmp_path: Path, cli: Cli) -> None:
    store = recorded(tmp_path / "store", 4)
    due = dict(store.due({}))
    out = [(trace_id, due[trace_id]) for trace_id in (store.load(f"1/{n}/0").trace_id for n in (0, 2))]
    cursors = Cursors(store.path)
    cursors.leave_out("mlflow", out)
    cursors.store("mlflow", [], {}, 1_500_000)
    cursors.close()
    assert_lacks_since(store, store.load("1/1/0").end_ns)
    deliver(store, "1/1/0", "1/3/0")
    state = store.status()
    place = state.destinations["mlflow"]
    assert (place.exported, place.pending, place.left_out, place.trajectories_left_out) == (2, 0, 2, 2)
    assert (place.lag, place.sent_bytes) == (0.0, 1_500_000)
    assert (state.recorded, state.exported, state.pending, state.left_out) == (4, 2, 0, 2)
    shown = cli("status", "--store", str(store.path)).out
    assert "\nspans      4 recorded = 2 exported + 0 pending + 2 left out + 0 dropped\n" in shown
    assert "\nsent to  exported  pending  left out  refused    sent  behind\n" in shown
    assert "\nmlflow          2        0         2        0  1.5 MB       -\n" in shown
    facts = json.loads(cli("status", "--json", "--store", str(store.path)).out)
    assert facts["left_out"] == facts["destinations"]["mlflow"]["left_out"] == 2
    assert facts["destinations"]["mlflow"]["sent_bytes"] == 1_500_000
    store.close()


@pytest.mark.parametrize("name", ["100% #1?mode=rwc&x", "a b"])
def test_the_cursors_are_found_under_any_path(tmp_path: Path, name: str) -> None:
    store = recorded(tmp_path / name / "store", 2)
    deliver(store, "1/0/0")
    place = store.status().destinations["mlflow"]
    assert (place.exported, place.pending) == (1, 1)
    store.close()


def test_what_a_killed_follower_left_half_written_is_undone(tmp_path: Path) -> None:
    store = recorded(tmp_path / "store", 2)
    deliver(store, "1/0/0")
    killed = run(
        tmp_path,
        """
        import sqlite3
        db = sqlite3.connect("store/sync.sqlite", isolation_level=None)
        db.execute("PRAGMA cache_size = 1")  # so that pages reach the file before the end
        db.execute("BEGIN IMMEDIATE")
        for number in range(5000):
            db.execute("INSERT INTO exported VALUES ('mlflow', ?, 1, NULL)", (f"{number:032x}",))
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert killed.returncode == -signal.SIGKILL
    assert (store.path / "sync.sqlite-journal").stat().st_size
    place = store.status().destinations["mlflow"]
    assert (place.exported, place.pending) == (1, 1)


# --- who writes and who delivers ----------------------------------------------------------------------------


def test_each_writer_is_described(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "store"
    code = textwrap.dedent("""
        import trackway
        trackway.configure(store="store", sync="off")
        for sample in range(3):
            with trackway.trajectory(step=1, sample_index=sample): pass
        trackway.shutdown()
    """)
    before = time.time_ns()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path)
    assert done.returncode == 0
    trackway.configure(store=path, sync="off")
    with named(step=2, sample_index=0):
        trackway.flush()
        store = open_store(path)
        wait_until(store.in_flight)
        # One that nothing has ended in yet is a trajectory as well.
        assert (store.status().trajectories, store.status().in_flight) == (4, 1)
        store.close()
        facts = json.loads(cli("status", "--json", "--store", str(path)).out)
    ended, alive = sorted(facts["writers"], key=lambda each: each["alive"])
    assert (ended["alive"], ended["recorded"], ended["dropped"], ended["running"]) == (False, 3, 0, 0)
    assert (alive["alive"], alive["recorded"], alive["running"]) == (True, 0, 1)
    assert alive["pid"] == os.getpid()
    assert ended["program"] == "-c"
    assert alive["host"] == ended["host"] == os.uname().nodename
    trackway.shutdown()
    facts = json.loads(cli("status", "--json", "--store", str(path)).out)
    assert {each["name"]: each["recorded"] for each in facts["writers"]} == {
        ended["name"]: 3,
        alive["name"]: 1,
    }
    store = open_store(path)
    wrote = {each.name: each.last_wrote_ns or 0 for each in store.status().writers}
    store.close()
    # A file system's clock may be a tick behind.
    assert before - 10**8 < wrote[ended["name"]] <= wrote[alive["name"]] <= time.time_ns()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "died"),
    [
        ("", [False]),
        ("sys.exit(3)", [False]),
        ("raise ValueError", [False]),
        ("trackway.shutdown(); os.kill(os.getpid(), signal.SIGKILL)", [False]),
        ("os.kill(os.getpid(), signal.SIGKILL)", [True]),
        ("os.kill(os.getpid(), signal.SIGTERM)", [True]),
        ("os._exit(0)", [True]),
        # A child that records nothing is no writer, one that does is one of its own.
        ("os.fork() or os._exit(0); os.wait()", [False]),
        ("os.fork() or (call(2), trackway.flush(), os._exit(0)); os.wait()", [False, True]),
        ("os.fork() or (call(2), sys.exit()); os.wait()", [False, False]),
        (
            "import multiprocessing as many\n"
            "child = many.get_context('fork').Process(target=call, args=(2,)); child.start(); child.join()",
            [False, False],
        ),
    ],
)
def test_a_process_that_died_is_told_from_one_that_ended(
    tmp_path: Path, cli: Cli, ending: str, died: list[bool]
) -> None:
    begin = 'trackway.configure(store="store", sync="off")\ncall(1)\ntrackway.flush()\n'
    run(tmp_path, begin + ending)
    path = str(tmp_path / "store")
    facts = json.loads(cli("status", "--json", "--store", path).out)
    assert sorted(each["died"] for each in facts["writers"]) == died
    assert (facts["writers_dead"], facts["writers_died"]) == (len(died), sum(died))
    shown = cli("status", "--store", path).out
    assert f"\nprocesses  0 recording now, {died.count(False)} ended" in shown
    assert (", 1 DIED\n" in shown) == any(died)
    assert [len(re.findall(rf" {word} ", shown)) for word in ("DIED ", "ended ")] == [
        sum(died),
        died.count(False),
    ]


@pytest.mark.parametrize("counters", ["without the word", "none", "damaged"])
def test_a_process_of_which_it_is_not_known_is_not_said_to_have_died(tmp_path: Path, counters: str) -> None:
    code = 'trackway.configure(store="store", sync="off"); call(1); trackway.flush(); os._exit(0)'
    run(tmp_path, code)
    (path,) = (tmp_path / "store" / journal.FOLDER).glob("*.json")
    facts = json.loads(path.read_text())
    del facts["closed"]  # as an older version wrote it
    if counters == "none":
        path.unlink()
    else:
        path.write_text(json.dumps(facts if counters == "without the word" else {"closed": "no"}))
    store = open_store(tmp_path / "store")
    state = store.status()
    assert [(each.alive, each.died) for each in state.writers] == [(False, False)]
    assert (state.writers_dead, state.writers_died) == (1, 0)
    store.close()


def assert_adds_up(store: Store, cli: Cli) -> dict[int | None, int]:
    """Compare the table of processes with the line above it; give what each process recorded, by its pid."""
    state = store.status()
    assert state.recorded == state.exported + state.pending + state.dropped
    shown = cli("status", "--store", str(store.path)).out
    assert f"\nspans      {state.recorded:,} recorded = " in shown
    rows = re.findall(r"^\d+@.* (?:recording|ended|DIED) +(\d+) +(\d+) +(\d+) ", shown, re.MULTILINE)
    assert len(rows) == len(state.writers)
    assert [sum(map(int, column)) for column in zip(*rows, strict=True)] == [
        state.recorded,
        state.dropped,
        state.in_flight,
    ]
    return {each.pid: each.recorded for each in state.writers}


def test_the_table_of_processes_adds_up_to_the_line_above_it(tmp_path: Path, cli: Cli) -> None:
    died = """
        from pathlib import Path
        trackway.configure(store="store", sync="off")

        @trackway.tool_trace
        def inner():  # ends after it was written down as open, and before that is written anew
            while not any(b'"inner"' in path.read_bytes() for path in Path("store/journal").glob("*.open.*")):
                time.sleep(0.02)

        @trackway.rollout_trace
        def outer():
            call(1)
            inner()
            trackway.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        with trajectory(step=1, sample_index=0):
            outer()
    """
    with start_program(tmp_path, died) as worker:
        worker.communicate()
    store = open_store(tmp_path / "store")
    # call and inner have ended, outer and the trajectory died.
    assert assert_adds_up(store, cli) == {worker.pid: 4}

    told = """
        trackway.configure(store="store", sync="off")
        trackway.attach("1/0/0", trained_step=2)
        trackway.attach("7/7/0", trained_step=2)
        trackway.attach("7/7/1", trained_step=2)
    """
    with start_program(tmp_path, told) as trainer:
        trainer.communicate()
    assert assert_adds_up(store, cli) == {worker.pid: 4, trainer.pid: 1}
    assert store.status().unmatched == 2

    trackway.configure(store=store.path, sync="off", max_open_spans=1)

    @tool_trace
    def open_call() -> None:
        trackway.flush()
        # The trajectory around it was given up, and nothing has ended yet.
        assert assert_adds_up(store, cli)[os.getpid()] == 1

    with named(step=7, sample_index=7):
        open_call()
    trackway.flush()
    assert assert_adds_up(store, cli) == {worker.pid: 4, trainer.pid: 2, os.getpid(): 2}
    assert store.status().unmatched == 1
    store.close()


def test_a_process_that_records_has_not_died(tmp_path: Path, cli: Cli) -> None:
    path = str(tmp_path / "store")
    trackway.configure(store=path, sync="off")
    assert re.search(rf"\n{os.getpid()}@\S+ .* recording +0 ", cli("status", "--store", path).out)
    assert json.loads(cli("status", "--json", "--store", path).out)["writers_died"] == 0


def test_status_says_whether_a_follower_is_at_work(tmp_path: Path, cli: Cli) -> None:
    store = recorded(tmp_path / "store", 1)
    path = str(store.path)
    assert (
        "\nfollower   none at work; trackway sync sends what is complete\n"
        in cli("status", "--store", path).out
    )
    with (store.path / "sync.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "\nfollower   at work\n" in cli("status", "--store", path).out
        assert json.loads(cli("status", "--json", "--store", path).out)["followed"] is True
    deliver(store, "1/0/0")
    assert "\nfollower   none at work\n" in cli("status", "--store", path).out
    assert json.loads(cli("status", "--json", "--store", path).out)["followed"] is False
    store.close()


def test_facts_about_rollouts_that_are_not_here_are_counted(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "store"
    trackway.configure(store=path, sync="off")
    trackway.attach("7/7/0", trained_step=8)
    trackway.shutdown()
    assert "\nattached   1 time to a rollout that is not here\n" in cli("status", "--store", str(path)).out


# --- watching -----------------------------------------------------------------------------------------------


def plain(shown: str) -> str:
    """What a terminal shows, without escapes, each picture of it on lines of its own."""
    return _ESCAPE.sub("", shown.replace("\x1b[H", "\n"))


class Terminal:
    """The command on a terminal of its own, as a person has it."""

    def __init__(self, *args: str, cwd: Path, rows: int = 30, columns: int = 80, **env: str) -> None:
        import pty

        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.modes = termios.tcgetattr(theirs)
        unset = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
        environ = {name: value for name, value in os.environ.items() if name not in unset}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "trackway", *args],
            cwd=cwd,
            env={**environ, "TERM": "xterm-256color", **env},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )
        self._theirs = theirs
        self.shown = ""

    def wait_for(self, pattern: str) -> str:
        """Read until a pattern is shown, each space of it as any number of spaces and ends of lines.

        Returns:
            What was shown meanwhile, without escapes.
        """
        begin = len(self.shown)
        pattern = pattern.replace(" ", r"\s+")
        patience = time.monotonic() + 60
        while not re.search(pattern, seen := plain(self.shown[begin:]), re.DOTALL):
            assert self._read(), f"{pattern!r} never came:\n{seen[-3000:]}"
            assert time.monotonic() < patience, f"{pattern!r} never came:\n{seen[-3000:]}"
        return seen

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], 60)[0]:
            return False
        self.shown += os.read(self._ours, 65536).decode(errors="replace")
        return True

    def press(self, key: bytes) -> int:
        """Press a key and wait for the end; give the exit code."""
        os.write(self._ours, key)
        while self.child.poll() is None:
            if select.select([self._ours], [], [], 0.1)[0]:
                self._read()
        while select.select([self._ours], [], [], 0)[0]:
            self._read()
        return self.child.returncode

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(*args: str, **more: Any) -> Terminal:
        opened.append(Terminal(*args, cwd=tmp_path, **more))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def assert_left_clean(terminal: Terminal) -> None:
    shown = terminal.shown
    assert "Traceback" not in shown
    for on, off in ("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h"):
        assert shown.rfind(off) > shown.rfind(on) >= 0
    assert termios.tcgetattr(terminal._theirs) == terminal.modes


@pytest.mark.slow
def test_watching_a_store_come_grow_vanish_and_come_back(
    tmp_path: Path, terminal: Callable[..., Terminal], processes: list[subprocess.Popen[Any]]
) -> None:
    screen = terminal("status", "--watch", "--interval", "0.1", "--store", "store")
    screen.wait_for("waiting for a store at .*store: nothing was recorded there yet")
    first = start(processes, BUSY, tmp_path)
    seen = screen.wait_for(r"each second [1-9][\d,]* spans, [1-9][\d.,]* [kM]B")
    assert "1 recording now, 0 ended" in seen
    counts = re.findall(r"spans +([\d,]+) recorded", seen)
    assert int(counts[-1].replace(",", "")) > int(counts[0].replace(",", ""))
    assert max(len(line) for line in seen.splitlines()) <= 80

    second = start(processes, BUSY, tmp_path)
    screen.wait_for(rf"{second.pid}@\S+ began to record")
    second.kill()
    seen = screen.wait_for(rf"{second.pid}@\S+ DIED")
    assert "1 recording now, 0 ended, 1 DIED" in seen
    first.kill()
    screen.wait_for("0 recording now, 0 ended, 2 DIED")

    recorded(tmp_path / "another", 3).close()
    (tmp_path / "store").rename(tmp_path / "former")
    (tmp_path / "another").rename(tmp_path / "store")
    screen.wait_for("holds 3 trajectories, .* 0 recording now, 1 ended")
    shutil.rmtree(tmp_path / "store")
    screen.wait_for("the store .*store is gone; waiting for another one there")
    start(processes, BUSY, tmp_path)
    # Nothing of the store that vanished is counted.
    screen.wait_for("1 recording now, 0 ended")

    assert screen.press(b"\x03") == 0
    assert_left_clean(screen)
    # The last view stays on the screen that one returns to.
    assert "1 recording now, 0 ended" in screen.shown.rpartition("\x1b[?1049l")[2]


def test_a_small_terminal_without_colour_shows_what_fits(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    recorded(tmp_path / "store", 2).close()
    screen = terminal("status", "--watch", "--store", "store", rows=6, columns=50, NO_COLOR="1")
    screen.wait_for("the window is too small for the rest")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", screen.shown)
    frame = screen.shown.rpartition("\x1b[H")[2]
    assert frame.count("\n") < 6
    screen.child.send_signal(signal.SIGTERM)
    assert screen.press(b"") == 0
    assert_left_clean(screen)


def test_without_a_terminal_blocks_are_printed_and_nothing_steers(tmp_path: Path) -> None:
    store = recorded(tmp_path / "store", 2)
    (counters,) = (store.path / journal.FOLDER).glob("*.json")
    facts = json.loads(counters.read_text())
    counters.write_text(json.dumps({**facts, "host": HOSTILE, "program": f"/bin/{HOSTILE}"}))
    cursors = Cursors(store.path)
    cursors.fail("mlflow", f"ConnectionError: {HOSTILE}")
    cursors.close()
    store.close()
    command = [sys.executable, "-m", "trackway", "status", "--watch", "--interval", "0.1"]
    environ = {**os.environ, "TRACKWAY_STORE": str(store.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as child:
        assert child.stdout
        assert child.stderr
        text = ""
        while text.count("2 recorded = ") < 3:
            text += child.stdout.readline().decode()
        child.send_signal(signal.SIGINT)
        assert child.stderr.read() == b""
        child.stdout.read()
    assert child.returncode == 0
    assert len(re.findall(r"^\d\d:\d\d:\d\d$", text, re.MULTILINE)) == 3
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    for shown in (rf"{facts['pid']}@[red]x[/]\x1b[2J\x9b\rEVIL\u202e", r"ConnectionError: [red]x[/]\x1b[2J"):
        assert shown in text


def test_a_file_in_place_of_a_store_is_not_waited_for(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "store").write_text("")
    result = cli("status", "--watch", "--store", str(tmp_path / "store"))
    assert (result.code, result.out) == (1, "")
    assert "is a file; a store is a directory" in result.err


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="how much a process reads is told by Linux")
def test_watching_reads_what_is_new_and_not_the_whole_journal(tmp_path: Path) -> None:
    trackway.configure(store=tmp_path / "store", sync="off")

    @tool_trace
    def tool() -> str:
        return "x" * 90_000

    for sample in range(40):
        with named(step=1, sample_index=sample):
            tool()
    trackway.flush()
    size = open_store(tmp_path / "store").status().bytes
    assert size > 3_600_000
    command = [sys.executable, "-m", "trackway", "status", "--watch", "--interval", "0.1"]
    environ = {**os.environ, "TRACKWAY_STORE": str(tmp_path / "store")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as child:
        assert child.stdout

        def looks(number: int) -> None:
            while number:
                line = child.stdout.readline()  # type: ignore[union-attr]
                assert line
                number -= line.startswith("holds")

        def read_so_far() -> int:
            facts = Path(f"/proc/{child.pid}/io").read_text()
            return int(re.search(r"rchar: (\d+)", facts)[1])  # type: ignore[index]

        looks(3)
        before = read_so_far()
        for sample in range(10):
            with named(step=2, sample_index=sample):
                pass
            looks(1)
        assert read_so_far() - before < size
        child.send_signal(signal.SIGINT)
    assert child.returncode == 0


def test_a_store_that_is_not_there_is_still_an_error_without_watching(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        open_store(tmp_path / "store").in_flight()


def test_what_is_flushed_is_counted_also_where_nothing_was_recorded(swallowing: None) -> None:
    with recording() as recorded:
        for number in range(1, 30):
            trackway.attach(None, advantages=1.0)
            assert recorded.status().troubles == number
