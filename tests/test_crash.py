"""However a process ends, what it recorded is there: counted against what it said itself before it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from trackway import open_store
from trackway.trace.store import journal

from .programs import WINDOW, calls, line, run, said, start, wait_until, write

TICKING = """
trackway.configure(store="store", sync="off")
def rollout(end=None):
    with trajectory(step=1, sample_index=0):
        for number in range(100_000):
            call(number)
            say(number)
            if number == 80 and end is not None:
                end()
            time.sleep(0.01)
"""
"""A call every 10 ms, inside a rollout that does not end by itself."""


def at_most_the_last_ones_are_missing(ended: list[int], found: Counter[int]) -> None:
    assert set(found.values()) == {1}
    missing = [number for number in ended if number not in found]
    assert len(missing) <= WINDOW
    assert missing == ended[len(ended) - len(missing) :]


# Sudden ends


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
def test_a_signal_that_nobody_handles_costs_at_most_the_last_moment(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = start(tmp_path, TICKING + "rollout()")
    ended = [int(line(process)) for _ in range(80)]
    store = open_store(tmp_path / "store")
    (running,) = store.query()
    assert (running.status, running.name) == ("running", "1/0/0")
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (-number, "")
    ended += said(output)
    at_most_the_last_ones_are_missing(ended, calls(store))
    assert [item.name for item in store.query(status="died")] == ["1/0/0"]
    status = store.status()
    assert (status.in_flight, status.writers_alive, status.writers_dead) == (0, 0, 1)
    assert status.recorded == status.exported + status.dropped


SUDDEN = {
    "os._exit": ("os._exit(5)", 5),
    # How the worker of a Ray actor that is killed ends: without atexit, without Python.
    "quick_exit": ("__import__('ctypes').CDLL(None).quick_exit(1)", 1),
    # The program is replaced by another one, which inherits whatever is not closed.
    "exec": ("os.execv(sys.executable, [sys.executable, '-c', 'pass'])", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", SUDDEN)
def test_an_end_without_python_costs_at_most_the_last_moment(tmp_path: Path, end: str) -> None:
    how, code = SUDDEN[end]
    done = run(tmp_path, TICKING + f"rollout(lambda: {how})")
    assert (done.returncode, done.stderr) == (code, "")
    ended = said(done.stdout)
    assert len(ended) == 81
    at_most_the_last_ones_are_missing(ended, calls(tmp_path / "store"))
    assert [item.status for item in open_store(tmp_path / "store").query()] == ["died"]


# Ends in Python


def test_a_handler_of_the_program_runs_and_nothing_is_lost(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        def handler(number, frame):
            os.write(2, b"handled\\n")
            sys.exit(128 + number)
        signal.signal(signal.SIGTERM, handler)
        trackway.configure(store="store", sync="off")
        assert signal.getsignal(signal.SIGTERM) is handler
        with trajectory(step=1, sample_index=0):
            for number in range(10**9):
                call(number)
                say(number)
        """,
    )
    ended = [int(line(process)) for _ in range(200)]
    process.terminate()
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (143, "handled\n")
    ended += said(output)
    found = calls(tmp_path / "store")
    assert found >= Counter(ended)
    assert set(found.values()) == {1}
    (cancelled,) = open_store(tmp_path / "store").query()
    assert cancelled.status == "cancelled"


def test_a_handler_that_records_never_waits_for_what_it_interrupted(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import gc
        def handler(number, frame):
            global handled
            handled += 1
            call(-handled)
            if handled == 50:
                trackway.flush(1)
            if handled < 100:
                signal.setitimer(signal.ITIMER_REAL, 0.001)
        handled = 0
        signal.signal(signal.SIGALRM, handler)
        trackway.configure(store="store", sync="off")
        gc.set_threshold(20)
        with trajectory(step=1, sample_index=0):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            number = 0
            while handled < 100:
                call(number)
                number += 1
        print(number, handled)
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    number, handled = said(done.stdout)
    assert calls(tmp_path / "store") == Counter(range(-handled, 0)) + Counter(range(number))


ENDS = {
    "return": ("pass", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "exception": ("raise ValueError('my own')", 1, "ValueError: my own"),
    "interrupt": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
    "thread": ("t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()", 0, "ZeroDivisionError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_an_end_that_python_sees_loses_nothing_and_stays_what_it_was(tmp_path: Path, end: str) -> None:
    how, code, complaint = ENDS[end]
    done = run(
        tmp_path,
        f"""
        trackway.configure(store="store", sync="off")
        for sample in range(20):
            with trajectory(step=1, sample_index=sample):
                for number in range(50):
                    call(50 * sample + number)
                if sample == 19:
                    {how}
        """,
    )
    assert done.returncode == code
    last = done.stderr.strip().rpartition("\n")[2]
    assert last.startswith(complaint) if complaint else not done.stderr
    assert calls(tmp_path / "store") == Counter(range(1000))
    status = open_store(tmp_path / "store").status()
    assert (status.recorded, status.dropped) == (1020, 0)


@pytest.mark.slow
def test_an_interrupt_during_a_walk_of_the_garbage_collector_reaches_the_program(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import gc
        trackway.configure(store="store", sync="off")
        with trajectory(step=1, sample_index=0):
            call(1)
        held = [[0] * 1_000_000 for _ in range(20)]
        caught = 0
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        for _ in range(20):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                gc.collect()
                time.sleep(1)
            except KeyboardInterrupt:
                caught += 1
        say(caught)
        """,
    )
    assert (done.returncode, done.stderr, said(done.stdout)) == (0, "", [20])


def test_rollouts_that_shutdown_finds_running_are_kept_as_far_as_they_came(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        trackway.configure(store="store", sync="off")
        def rollout(sample):
            with trajectory(step=1, sample_index=sample):
                call(sample)
                ready.wait()
                ended.wait()
        ready, ended = threading.Barrier(3), threading.Event()
        threads = [threading.Thread(target=rollout, args=(sample,)) for sample in range(2)]
        for thread in threads: thread.start()
        ready.wait()
        trackway.shutdown()
        ended.set()
        """,
    )
    assert done.returncode == 0
    store = open_store(tmp_path / "store")
    found = [store.load(item.trace_id) for item in store.query()]
    assert [(item.status, item.generations) for item in found] == [("died", 1)] * 2
    assert all(item.start_ns and item.spans[0].name == "trajectory" for item in found)
    status = store.status()
    assert status.dropped_by_reason == {"after shutdown": 2}  # their ends came too late


# The end of the interpreter


SHUTDOWN = """
import atexit, gc

def late(number):
    with trajectory(step=2, sample_index=number):
        call(number)

atexit.register(late, 1_000_001)  # runs after everything that is registered later
import trackway.trace.lifecycle
trackway.configure(store="store", sync="off")
atexit.register(late, 1_000_002)

@llm_trace
def stream(number):
    yield number
    yield number

class Cycle:
    pass

with trajectory(step=3, sample_index=0):
    paused = stream(1)  # collected with the module
    next(paused)
    cycle = Cycle()
    cycle.itself, cycle.stream = cycle, stream(2)  # collected by the garbage collector, or never
    next(cycle.stream)
    del cycle

def work(base):
    number = base
    while True:
        with trajectory(step=1, sample_index=number):
            call(number)
        say(number)
        number += 1

for base in range(4):
    threading.Thread(target=work, args=(100_000 * base,), daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(7)", 7)], ids=["end", "exit"])
def test_work_in_flight_when_the_interpreter_ends_is_written_or_counted(
    tmp_path: Path, end: str, code: int
) -> None:
    done = run(tmp_path, SHUTDOWN + end)
    assert (done.returncode, done.stderr) == (code, "")
    store = open_store(tmp_path / "store")
    found, ended = calls(store), Counter(said(done.stdout))
    ended.update([1_000_001, 1_000_002])
    status = store.status()
    assert set(found.values()) == {1}
    assert found[1_000_002] == 1
    lost = ended - found
    assert lost.total() <= status.dropped
    assert set(status.dropped_by_reason) <= {"after shutdown"}
    assert status.recorded == status.exported + status.dropped
    assert status.troubles == 0


# Forks


@pytest.mark.slow
def test_a_fork_in_the_middle_of_everything_neither_hangs_nor_writes_twice(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about any fork with threads
        trackway.configure(store="store", sync="off")
        stop, large = False, ["x" * 30] * 2_000  # so that the writer is never at rest
        @llm_trace(name="call")
        def busy(number, given):
            return given
        def work(base):
            number = base
            while not stop:
                with trajectory(step=0, sample_index=number):
                    busy(number, large)
                number += 1
                time.sleep(0.01)
            say(number)
        threads = [threading.Thread(target=work, args=(10**6 * (1 + n),)) for n in range(3)]
        for thread in threads: thread.start()
        children = []
        for child in range(30):
            pid = os.fork()
            if pid == 0:
                for number in range(20):
                    with trajectory(step=1, sample_index=20 * child + number):
                        call(20 * child + number)
                sys.exit()
            children.append(pid)
            time.sleep(0.005)
        codes = {os.waitpid(pid, 0)[1] for pid in children}
        stop = True
        for thread in threads: thread.join()
        assert codes == {0}, codes
        """,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    expected = Counter(range(600))
    for end in said(done.stdout):
        expected.update(range(end - end % 10**6, end))
    assert calls(tmp_path / "store") == expected
    status = open_store(tmp_path / "store").status()
    assert (status.dropped, status.writers_alive, status.writers_dead) == (0, 0, 31)


@pytest.mark.parametrize(
    "child",
    [
        "if os.fork() == 0: time.sleep(60); os._exit(0)",
        "__import__('subprocess').Popen(['sleep', '60'], close_fds=False)",
    ],
    ids=["fork", "exec"],
)
def test_a_child_that_outlives_its_parent_does_not_keep_it_alive(tmp_path: Path, child: str) -> None:
    process = start(
        tmp_path,
        f"""
        trackway.configure(store="store", sync="off")
        with trajectory(step=1, sample_index=0):
            call(1)
            trackway.flush()
            os.setpgid(0, 0)
            {child}
            say(1)
            time.sleep(60)
        """,
    )
    try:
        assert line(process) == "1"
        store = open_store(tmp_path / "store")
        assert [item.status for item in store.query()] == ["running"]
        process.kill()
        process.wait()
        wait_until(lambda: not store.status().writers_alive)  # a child that has hardly begun lets go soon
        assert [item.status for item in store.query()] == ["died"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


MULTIPROCESSING = """
import multiprocessing

def child(base, end):
    for number in range(20):
        with trajectory(step=1, sample_index=base + number):
            call(base + number)
    exec(end)

def slow(number):
    with trajectory(step=1, sample_index=number):
        call(number)
    say(number)
    time.sleep(0.01)

if __name__ == "__main__":
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    context = multiprocessing.get_context(sys.argv[1])
    os.environ.update(TRACKWAY_STORE="store", TRACKWAY_SYNC="off")
    with trajectory(step=0, sample_index=0):
        call(-1)
"""


def run_multiprocessing(folder: Path, method: str, code: str) -> str:
    path = write(folder, MULTIPROCESSING + code)
    done = subprocess.run(
        [sys.executable, str(path), method],
        cwd=folder,
        env={**os.environ, "TRACKWAY_STRICT": "0"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "rackway" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_children_of_multiprocessing_lose_nothing_when_they_return_or_exit(
    tmp_path: Path, method: str
) -> None:
    run_multiprocessing(
        tmp_path,
        method,
        """
    ends = ["pass", "sys.exit(4)", "raise ValueError('my own')"]
    children = [context.Process(target=child, args=(20 * n, end)) for n, end in enumerate(ends)]
    for each in children: each.start()
    for each in children: each.join()
    assert [each.exitcode for each in children] == [0, 4, 1]
        """,
    )
    assert calls(tmp_path / "store") == Counter(range(-1, 60))
    assert open_store(tmp_path / "store").status().dropped == 0


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_pool_that_is_terminated_costs_at_most_the_last_moment_of_each_worker(
    tmp_path: Path, method: str
) -> None:
    output = run_multiprocessing(
        tmp_path,
        method,
        """
    pool = context.Pool(2)
    work = pool.imap_unordered(slow, range(100_000))
    for _ in range(100): next(work)
    pool.terminate()
    pool.join()
        """,
    )
    found = calls(tmp_path / "store")
    assert set(found.values()) == {1}
    ended = said(output)
    assert len(ended) >= 100
    assert len(set(ended) - set(found)) <= 2 * WINDOW


# Several processes, one store


def test_of_two_processes_in_one_store_the_death_of_one_costs_the_other_nothing(tmp_path: Path) -> None:
    code = """
    trackway.configure(store="store", sync="off")
    base = int(os.environ["BASE"])
    for number in range(base, base + 100):
        with trajectory(step=base, sample_index=number):
            call(number)
        say(number)
        time.sleep(0.01)
    """
    first, second = (start(tmp_path, code, BASE=base) for base in ("0", "1000"))
    ended = [int(line(first)) for _ in range(40)]
    first.kill()
    output, _ = first.communicate()
    ended += said(output)
    _, errors = second.communicate(timeout=60)
    assert (second.returncode, errors) == (0, "")
    found = calls(tmp_path / "store")
    assert [number for number in found if number >= 1000] == list(range(1000, 1100))
    at_most_the_last_ones_are_missing(ended, Counter({n: c for n, c in found.items() if n < 1000}))


def test_a_writer_that_begins_one_segment_after_another_is_never_taken_for_dead(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        from pathlib import Path
        from trackway.trace.store.journal import SegmentWriter
        writer = SegmentWriter(Path("store"), max_bytes=1)
        say(0)
        for number in range(2000): writer.append(b"{}\\n")
        """,
    )
    line(process)
    looks = 0
    while process.poll() is None:
        (writer,) = journal.writers(tmp_path / "store")
        assert writer.alive or process.wait() == 0
        looks += 1
    assert looks > 10
    assert process.communicate()[1] == ""
    assert len(journal.segments(tmp_path / "store")) == 2000


@pytest.mark.slow
def test_large_records_of_many_processes_and_threads_do_not_mix(tmp_path: Path) -> None:
    processes = [
        start(
            tmp_path,
            f"""
            trackway.configure(store="store", sync="off")
            @llm_trace(name="call")
            def large(number, text): return text
            def work(base):
                for number in range(base, base + 5):
                    with trajectory(step=1, sample_index=number):
                        large(number, chr(97 + number % 26) * 300_000)
            threads = [threading.Thread(target=work, args=({100 * process} + 5 * n,)) for n in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            """,
            TRACKWAY_MAX_TEXT_LENGTH="1000000",
        )
        for process in range(6)
    ]
    assert [process.communicate(timeout=100)[1] for process in processes] == [""] * 6
    store = open_store(tmp_path / "store")
    assert calls(store) == Counter(100 * process + number for process in range(6) for number in range(20))
    for item in store.query(limit=120):
        (large,) = store.load(item.trace_id).spans[1:]
        number = large.inputs["number"]
        assert large.outputs == large.inputs["text"] == chr(97 + number % 26) * 300_000
    assert store.status().torn_lines == 0


@pytest.mark.parametrize(
    "moment", ["CREATE TABLE trajectories", "CREATE TABLE lines", "PRAGMA user_version = "]
)
def test_a_reader_that_dies_while_it_makes_the_index_is_in_nobodys_way(tmp_path: Path, moment: str) -> None:
    done = run(
        tmp_path,
        f"""
        import sqlite3
        trackway.configure(store="store", sync="off")
        with trajectory(step=1, sample_index=0):
            call(1)
        trackway.shutdown()
        connect = sqlite3.connect
        def watched(*args, **options):
            found = connect(*args, **options)
            found.set_trace_callback(lambda said: os._exit(7) if {moment!r} in said else None)
            return found
        sqlite3.connect = watched
        trackway.open_store("store")
        """,
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert [item.name for item in open_store(tmp_path / "store").query()] == ["1/0/0"]
