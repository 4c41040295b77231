"""Many processes record into one store and one of them exports: everything arrives, once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trackway import open_store
from trackway.trace.exporters import sync

from .programs import calls, followers, install_exporter, line, run, start, wait_until

WORKERS, SAMPLES = 8, 20

WORKER = f"""
base = int(os.environ["RANK"]) * {SAMPLES}
sys.stdin.readline()  # all of them begin at the same moment
trackway.configure(store="deep/down/store", backend="mlflow", project="p", experiment="e")
for number in range(base, base + {SAMPLES}):
    with trajectory(step=number % 5, sample_index=number):
        call(number)
        trackway.reward("reward", number)
"""


def notes_of_starts(folder: Path) -> dict[str, str]:
    """Give an environment in which every start of Python is written down in ``starts``."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"with open({os.fspath(folder / 'starts')!r}, 'a') as file:\n"
        "    file.write(' '.join(sys.orig_argv).replace('\\n', ' ') + '\\n')\n"
    )
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path}


def started_followers(folder: Path) -> int:
    return sum(" sync --follow " in start for start in (folder / "starts").read_text().splitlines())


def wait_until_delivered(store: Path) -> Any:
    """Wait until nothing is pending and the follower has left by itself; give the status."""
    for _ in range(1200):
        opened = open_store(store)
        status = opened.status()
        opened.close()
        if not status.pending and not sync.is_followed(store):
            return status
        time.sleep(0.1)
    raise AssertionError(f"{status}\n{(store / 'sync.log').read_text()}")


def client(database: Path) -> Any:
    import mlflow

    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{database}")


def traces(database: Path, project: str = "p") -> list[Any]:
    there = client(database)
    experiment = there.get_experiment_by_name(project)
    found: list[Any] = []
    token = None
    while True:
        page = there.search_traces([experiment.experiment_id], max_results=100, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def spans_of(trace: Any) -> list[str]:
    return [span.span_id for span in trace.data.spans]


def every_span_is_there_once(found: list[Any], store: Path) -> None:
    opened = open_store(store)
    recorded = Counter(
        span.span_id
        for summary in opened.query(all_attempts=True)
        for span in opened.load(summary.trace_id).spans
    )
    assert Counter(span for trace in found for span in spans_of(trace)) == recorded
    assert set(recorded.values()) == {1}
    assert len({trace.info.trace_id for trace in found}) == len(found)


@pytest.mark.slow
def test_workers_that_start_at_once_on_nothing_are_exported_by_one_follower(tmp_path: Path) -> None:
    store = tmp_path / "deep" / "down" / "store"
    environment = notes_of_starts(tmp_path)
    workers = [start(tmp_path, WORKER, RANK=str(rank), **environment) for rank in range(WORKERS)]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    seen = []
    while any(worker.poll() is None for worker in workers):
        if (store / "journal").is_dir():  # a reader that polls, meanwhile
            opened = open_store(store)
            status = opened.status()
            assert status.recorded == status.exported + status.pending + status.dropped
            seen.append(sum(1 for _ in opened.query()))
            opened.close()
        time.sleep(0.05)
    assert seen == sorted(seen)
    said = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * WORKERS, said
    assert said == [("", "")] * WORKERS
    status = wait_until_delivered(store)
    total = WORKERS * SAMPLES
    assert (status.recorded, status.exported, status.dropped) == (2 * total, 2 * total, 0)
    log = (store / "sync.log").read_text()
    assert "locked" not in log and "Traceback" not in log and "WARNING trackway" not in log
    found = traces(store / "mlflow.db")
    assert sorted(int(trace.info.tags["sample_index"]) for trace in found) == list(range(total))
    every_span_is_there_once(found, store)
    experiments = client(store / "mlflow.db").search_experiments()
    assert Counter(item.name for item in experiments) == Counter(["p", "Default"])
    (default,) = [item.experiment_id for item in experiments if item.name == "Default"]
    assert not client(store / "mlflow.db").search_traces([default])
    # The last of the workers may have come when the follower had left already; two never start at once.
    assert 1 <= started_followers(tmp_path) <= 2


LONG = """
number = 0
trackway.configure(store="store", backend="mlflow", project="p", experiment="e")
while not os.path.exists("enough"):
    with trajectory(step=1, sample_index=number):
        for _ in range(4): call(number)
        trackway.reward("reward", number)
    number += 1
    time.sleep(0.02)
print(number)
"""


@pytest.mark.slow
def test_a_follower_that_is_killed_in_the_middle_is_followed_by_one_that_sends_nothing_twice(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    worker = start(tmp_path, LONG)
    chance = random.Random(1)
    killed: set[int] = set()
    arrived = 0
    for _ in range(1000):
        if len(killed) >= 3:
            break
        time.sleep(chance.uniform(0.05, 0.3))
        if not (store / "sync.sqlite").exists():
            continue
        opened = open_store(store)
        exported = opened.status().exported
        opened.close()
        # One that has delivered something, and is at work on the rest.
        if exported > arrived:
            arrived = exported
            for pid in set(followers(store)) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
    (tmp_path / "enough").touch()
    assert len(killed) >= 3
    output, errors = worker.communicate(timeout=60)
    assert (worker.returncode, errors) == (0, "")
    status = wait_until_delivered(store)
    number = int(output)
    assert (status.recorded, status.exported, status.dropped) == (5 * number, 5 * number, 0)
    found = traces(store / "mlflow.db")
    assert sorted(int(trace.info.tags["sample_index"]) for trace in found) == list(range(number))
    every_span_is_there_once(found, store)
    for trace in found:
        values = [item.value for item in trace.info.assessments if item.name == "reward"]
        assert values == [float(trace.info.tags["sample_index"])]


@pytest.mark.slow
@pytest.mark.parametrize("ends", [0, 1, 2])
def test_start_spans_and_end_of_one_trace_from_three_processes_in_any_order(
    tmp_path: Path, ends: int
) -> None:
    code = """
    import json
    trackway.configure(store="store", sync="off", backend="mlflow", project="p", experiment="e")
    if os.environ["PART"] == "root":
        with trajectory(step=1, sample_index=7) as rollout:
            print(json.dumps(trackway.inject()), flush=True)
            call(0)
            sys.stdin.readline()
    else:
        base = int(os.environ["PART"])
        with trackway.extract(json.loads(sys.stdin.readline())):
            for number in range(base, base + 10): call(number)
            trackway.flush()
            say(base)
            sys.stdin.readline()
    """
    store = tmp_path / "store"
    root = start(tmp_path, code, PART="root")
    carrier = line(root)
    parts = [start(tmp_path, code, PART=part) for part in ("100", "200")]
    actions = [(part, carrier) for part in parts]
    actions.insert(ends, (root, ""))
    for process, text in actions:
        assert process.stdin is not None
        process.stdin.write(text + "\n")
        process.stdin.flush()
        if process is root:
            process.wait()
        else:
            line(process)
        assert sync.run(store, say=print) == 0
    for process in parts:
        process.communicate("\n", timeout=60)
    root.communicate()
    for _ in range(2):
        assert sync.run(store, say=print) == 0
        (trace,) = traces(store / "mlflow.db")
        assert len(set(spans_of(trace))) == len(spans_of(trace)) == 22
        assert trace.info.tags["sample_index"] == "7"
        assert trace.info.state.value == "OK"
        (store / "sync.sqlite").unlink()  # and everything again, from the beginning
    assert calls(store) == Counter([0, *range(100, 110), *range(200, 210)])


# Who exports


COUNTING = """
import os, warnings
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
class Exporter(SpanExporter):
    def export(self, spans):
        warnings.warn("this package is old")
        with open(os.environ["ARRIVED"], "a") as file:
            file.writelines(f"{os.getpid()} {os.nice(0)} {span.context.span_id:016x}\\n" for span in spans)
        return SpanExportResult.SUCCESS
"""

IDLE = """
trackway.configure(store="store", backend="elsewhere", sync="process")
with trajectory(step=1, sample_index=int(os.environ["RANK"])):
    call(int(os.environ["RANK"]))
say(1)
sys.stdin.readline()
"""


def test_one_of_many_starts_the_follower_which_stays_behind_the_training_and_leaves_last(
    tmp_path: Path,
) -> None:
    arrived = tmp_path / "arrived"
    environment = {"ARRIVED": str(arrived), **install_exporter(tmp_path, COUNTING)}
    notes = notes_of_starts(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([notes["PYTHONPATH"], environment["PYTHONPATH"]])
    environment["PYTHONWARNINGS"] = "error"  # of the training, not of the exporter's package
    workers = [start(tmp_path, IDLE, RANK=str(rank), **environment) for rank in range(4)]
    for worker in workers:
        assert line(worker) == "1"
    wait_until(lambda: arrived.exists() and arrived.read_text().count("\n") == 8)
    assert started_followers(tmp_path) == 1
    words = [text.split() for text in arrived.read_text().splitlines()]
    assert len({span for _, _, span in words}) == len(words) == 8
    (process,) = {int(pid) for pid, _, _ in words}
    assert {int(nice) for _, nice, _ in words} == {min(19, os.nice(0) + 10)}
    # It is told nothing: it sees its owners go, and it goes when the last of them has.
    for worker in workers[:3]:
        worker.communicate("\n", timeout=60)
    assert sync.is_followed(tmp_path / "store")
    assert followers(tmp_path / "store") == [process]
    workers[3].communicate("\n", timeout=60)
    assert wait_until_delivered(tmp_path / "store").exported == 8
    wait_until(lambda: not followers(tmp_path / "store"))
    assert started_followers(tmp_path) == 1
    assert arrived.read_text().count("\n") == 8


def test_a_lock_that_a_forked_child_inherits_does_not_outlive_its_owner(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        trackway.configure(store="store", backend="elsewhere", sync="inline")
        from trackway.trace.exporters.sync import is_followed
        from pathlib import Path
        with trajectory(step=1, sample_index=1): call(1)
        while not is_followed(Path("store")): time.sleep(0.01)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(1); os.close(2)
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        os._exit(0)
        """,
        ARRIVED=str(tmp_path / "arrived"),
        **install_exporter(tmp_path, COUNTING),
    )
    child = int(done.stdout)
    try:
        assert not sync.is_followed(tmp_path / "store")
        assert open_store(tmp_path / "store").status().writers_alive == 0
    finally:
        os.kill(child, signal.SIGKILL)


# Where things are


def test_relative_places_count_from_where_they_were_configured_and_are_told_once(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        done = run(
            folder,
            """
            import logging
            logging.basicConfig(level=logging.INFO, format="%(message)s")
            os.chdir("/")
            os.chdir(sys.path[0])
            trackway.configure(store="store", backend="mlflow", sync="off", tracking_uri="sqlite:///x/y.db")
            os.chdir("/")
            trackway.configure(store=os.path.join(sys.path[0], "store"), backend="mlflow", sync="off",
                tracking_uri=f"sqlite:///{sys.path[0]}/x/y.db", experiment="second")
            with trajectory(step=1, sample_index=1): call(1)
            """,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines() == [
            f"MLflow traces are at sqlite:///{folder}/x/y.db",
            f"recording into {folder}/store",
        ]
        assert open_store(folder / "store").status().recorded == 2
        assert sync.load_settings(folder / "store").tracking_uri == f"sqlite:///{folder}/x/y.db"
        assert sorted(path.name for path in folder.iterdir() if path.suffix != ".py") == ["store"]


@pytest.mark.parametrize(("named", "rank", "warnings"), [(False, "0", 1), (False, "1", 0), (True, "0", 0)])
def test_a_run_of_many_processes_is_warned_when_each_may_have_a_store_of_its_own(
    tmp_path: Path, named: bool, rank: str, warnings: int
) -> None:
    environment = {"WORLD_SIZE": "16", "RANK": rank, **({"TRACKWAY_STORE": "mine"} if named else {})}
    done = run(tmp_path, "trackway.configure(sync='off')\nwith trajectory(step=1): call(1)", **environment)
    assert done.returncode == 0
    assert done.stderr.count("this run has 16 processes and its store has no name") == warnings
    assert done.stderr.count(str(tmp_path)) == warnings


@pytest.mark.slow
def test_a_follower_that_cannot_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        sys.executable = "/nonexistent/python"
        trackway.configure(store="store", backend="mlflow")
        with trajectory(step=1, sample_index=1): call(1)
        trackway.flush(4)
        """,
    )
    assert done.returncode == 0
    assert done.stderr.count("ended at once") == 1
    assert "/nonexistent/python" in done.stderr
    status = open_store(tmp_path / "store").status()
    assert (status.recorded, status.exported, status.pending) == (2, 0, 2)
