"""A disk or a destination that fails costs the training nothing, and the record what is counted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import trackway
from trackway import llm_trace, open_store, trajectory
from trackway.trace.config import load_config
from trackway.trace.exporters import destinations, sync
from trackway.trace.testing import recording

from .programs import calls, install_exporter, order, run, said, start, stop_followers

RECORD = """
def record(first, end):
    for number in range(first, end):
        with trajectory(step=1, sample_index=number):
            call(number)
"""


@llm_trace
def call(number: int) -> int:
    return number


def record(first: int, end: int) -> None:
    for number in range(first, end):
        with trajectory(step=1, sample_index=number):
            call(number)


# A full disk


def may_mount() -> bool:
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(shutil.which("unshare")) and not subprocess.run(command, capture_output=True).returncode


needs_mount = pytest.mark.skipif(not may_mount(), reason="this user may not mount a file system of its own")

ON_DISK = 'mount -t tmpfs -o size=2m none disk; cd disk; "$@"; cp -r store ..'
DISK = ("unshare", "-rm", "sh", "-c", ON_DISK, "sh")
"""Runs a program on a disk of 2 MB, and keeps what it leaves there."""

BALLAST = """
def fill():
    with open("ballast", "wb", buffering=0) as file:
        for size in (2**16, 1):
            try:
                while file.write(bytes(size)): pass
            except OSError: pass
def free(): os.unlink("ballast")
"""
LIMIT = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def limit(bytes): resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, resource.RLIM_INFINITY))
def fill():
    (segment,) = __import__("pathlib").Path("store/journal").glob("*.0000.jsonl")
    limit(segment.stat().st_size + 100)
def free(): limit(resource.RLIM_INFINITY)
"""


@pytest.mark.slow
@pytest.mark.parametrize("disk", [pytest.param("disk", marks=needs_mount), "limit"])
@pytest.mark.parametrize("end", ["room", "killed"])
def test_a_full_disk_costs_what_is_counted_and_recording_goes_on_when_there_is_room(
    tmp_path: Path, disk: str, end: str
) -> None:
    (tmp_path / "disk").mkdir()
    done = run(
        tmp_path,
        RECORD
        + (BALLAST if disk == "disk" else LIMIT)
        + """
trackway.configure(store="store", sync="off")
record(0, 50)
trackway.flush()
fill()
record(50, 250)
trackway.flush(2)
"""
        + ("free(); record(250, 300)" if end == "room" else "os.kill(os.getpid(), signal.SIGKILL)"),
        before=DISK if disk == "disk" else (),
    )
    why = "No space left on device" if disk == "disk" else "File too large"
    assert len(re.findall(rf"could not write to the store /\S+/store: {why}\n", done.stderr)) == 1
    store = open_store(tmp_path / "store")
    found, status = calls(store), store.status()
    recorded = 300 if end == "room" else 250
    assert set(found.values()) == {1}
    assert set(range(50)) <= set(found)
    assert (set(range(250, recorded))) <= set(found)
    stored = sum(item.spans for item in store.query(all_attempts=True))
    assert status.recorded == 2 * recorded == stored + status.dropped
    assert 0 < status.dropped <= 400
    (reason,) = status.dropped_by_reason
    assert reason == f"journal: {why}"
    if end == "room":
        assert f"{status.dropped} of 600 spans of this process are not in the store" in done.stderr


@needs_mount
@pytest.mark.parametrize("indexed", [0, 40], ids=["from the start", "later"])
def test_a_store_on_a_full_disk_is_read(tmp_path: Path, indexed: int) -> None:
    (tmp_path / "disk").mkdir()
    done = run(
        tmp_path,
        RECORD
        + BALLAST
        + f"""
trackway.configure(store="store", sync="off")
record(0, {indexed})
store = trackway.open_store("store") if {indexed} else None
list(store.query()) if store else None
record({indexed}, 100)
trackway.flush() if store else trackway.trace.capture.runtime.get().writer.flush(10)
fill()
store = store or trackway.open_store("store")
print(len([store.load(item.trace_id) for item in store.query()]))
""",
        before=DISK,
    )
    assert done.stdout.splitlines()[-1] == "100", done.stderr


@needs_mount
def test_a_store_that_may_only_be_read_is_read_and_not_recorded_into(tmp_path: Path) -> None:
    record_there = RECORD + "trackway.configure(store='store', sync='off'); record(0, 5)"
    assert run(tmp_path, record_there).returncode == 0
    mount = 'mount --bind store store && mount -o remount,bind,ro store && exec "$@"'
    only_read = ("unshare", "-rm", "sh", "-c", mount, "sh")
    done = run(
        tmp_path,
        """
        store = trackway.open_store("store")
        print(store.status().recorded, len([store.load(item.trace_id) for item in store.query()]))
        """,
        before=only_read,
    )
    assert (done.stdout, done.stderr) == ("10 5\n", "")
    done = run(tmp_path, record_there, before=only_read)
    assert done.returncode == 1
    complaint = done.stderr.splitlines()[-1]
    assert complaint.startswith("trackway.trace.config_values.ConfigError: store=")
    assert "cannot be written: Read-only file system" in complaint
    # A worker that nobody configured in code goes on without.
    done = run(tmp_path, RECORD + "record(0, 5); print('trained')", before=only_read, TRACKWAY_STORE="store")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("nothing is recorded in this process") == 1
    assert calls(tmp_path / "store") == Counter(range(5))


# A store that goes away

STEPS = (
    RECORD
    + """
trackway.configure(store="here/store", sync="off")
for order in sys.stdin:
    first, end = map(int, order.split())
    record(first, end)
    trackway.flush(2)
    say(end)
"""
)


def moved(store: Path) -> None:
    store.parent.rename(store.parent.with_name("there"))


def deleted(store: Path) -> None:
    shutil.rmtree(store.parent)


def replaced_by_a_copy(store: Path) -> None:
    shutil.copytree(store, store.with_name("copy"))
    store.rename(store.with_name("original"))
    store.with_name("copy").rename(store)


@pytest.mark.parametrize("goes", [moved, deleted, replaced_by_a_copy], ids=lambda goes: goes.__name__)
def test_a_store_that_goes_away_is_made_again_for_what_comes_later(tmp_path: Path, goes: Any) -> None:
    store = tmp_path / "here" / "store"
    process = start(tmp_path, STEPS)
    order(process, "0 20")
    goes(store)
    order(process, "20 40")
    opened = open_store(store)
    assert opened.status().writers_alive == 1
    order(process, "40 60")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.count("was moved or deleted while this process recorded into it") == 1
    assert errors.count("\n") == 1
    copied = goes is replaced_by_a_copy
    assert calls(open_store(store)) == Counter(range(0 if copied else 20, 60))
    status = open_store(store).status()
    assert status.dropped_by_reason == ({} if copied else {"missing from the journal": 40})
    assert status.recorded == 120
    if goes is moved:
        elsewhere = open_store(tmp_path / "there" / "store")
        assert calls(elsewhere) == Counter(range(20))
        assert elsewhere.status().writers_alive == 0


@pytest.mark.slow
def test_what_comes_after_a_store_was_deleted_is_exported_as_well(tmp_path: Path) -> None:
    back = tmp_path / "back"
    back.touch()
    process = start(
        tmp_path,
        STEPS.replace('sync="off"', 'backend="elsewhere"').replace("flush(2)", "flush(30)"),
        BACK=str(back),
        **install_exporter(tmp_path, AWAY),
    )
    order(process, "0 20")
    assert back.read_text().count("\n") == 40
    shutil.rmtree(tmp_path / "here")
    order(process, "20 40")
    assert back.read_text().count("\n") == 80
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.count("\n") == 1, errors
    assert len(set(back.read_text().split())) == 80


def test_a_store_that_cannot_be_made_again_is_waited_for(tmp_path: Path) -> None:
    store = tmp_path / "here" / "store"
    process = start(tmp_path, STEPS)
    order(process, "0 20")
    shutil.rmtree(tmp_path / "here")
    (tmp_path / "here").write_text("a file")
    order(process, "20 40")
    order(process, "40 60")
    (tmp_path / "here").unlink()
    order(process, "60 80")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert calls(store) == Counter(range(60, 80))
    status = open_store(store).status()
    assert status.dropped_by_reason == {"journal: Not a directory": 80, "missing from the journal": 40}
    assert status.recorded == 160
    assert errors.count("could not write to the store") == 1
    assert errors.count("80 of 160 spans of this process are not in the store") == 1


# What hangs

STUCK = {
    "disk": "trackway.trace.capture.runtime.get().writer._journal.append = lambda lines: time.sleep(1000)",
    "tokenizer": "tokenizer.wait = 1000",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", STUCK)
@pytest.mark.parametrize(
    "end", ["trackway.shutdown(0.5)", "now = trackway.flush(0.3); trackway.shutdown(0.2)"]
)
def test_a_writer_that_hangs_does_not_keep_the_process_from_ending(
    tmp_path: Path, what: str, end: str
) -> None:
    done = run(
        tmp_path,
        f"""
        class Tokenizer:
            wait = 0
            def decode(self, ids, **options):
                time.sleep(self.wait)
                return "text"
            def convert_ids_to_tokens(self, ids): return [str(i) for i in ids]
            def __len__(self): return 1000
        tokenizer = Tokenizer()
        trackway.configure(store="store", sync="off", tokenizer=tokenizer, token2text=True)
        @llm_trace
        def generate(prompt_ids): return dict(response_ids=[1, 2, 3])
        with trajectory(step=1, sample_index=1): generate([1])
        trackway.flush()
        {STUCK[what]}
        for sample in range(10):
            with trajectory(step=2, sample_index=sample): generate([1])
        {end}
        if "now" in globals(): print(now.recorded, now.pending, now.dropped)
        sys.exit(9)
        """,
    )
    assert done.returncode == 9
    if "flush" in end:
        assert said(done.stdout) == [22, 22, 0]
        assert done.stderr.count("after 0.3 s not all is in the store") == 1
    status = open_store(tmp_path / "store").status()
    assert (status.recorded, status.exported) == (22, 2)
    assert status.dropped == 20
    assert "spans of this process are not in the store" in done.stderr


def test_flush_delivers_what_has_ended_and_leaves_alone_what_is_open() -> None:
    with recording() as recorded:
        with trajectory(step=1, sample_index=0):
            call(0)
            first, second = trackway.flush(1), trackway.flush(1)
            assert (first.exported, first.in_flight) == (second.exported, second.in_flight) == (1, 1)
            call(1)
            assert trackway.flush(1).exported == 2
            assert [item.status for item in recorded.trajectories()] == ["running"]
        status = trackway.flush(1)
        assert (status.exported, status.in_flight) == (3, 0)
        assert [(item.status, item.generations) for item in recorded.trajectories()] == [("ok", 2)]


@pytest.mark.slow
def test_flush_keeps_its_time_while_others_never_stop(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        trackway.configure(store="store", sync="off")
        def work(base):
            number = base
            while not stop:
                with trajectory(step=base, sample_index=number):
                    call(number)
                number += 1
        stop = False
        threads = [threading.Thread(target=work, args=(10**6 * n,)) for n in range(4)]
        for thread in threads: thread.start()
        taken = []
        for timeout in (0.4, 0.4):
            time.sleep(0.1)
            begun = time.monotonic()
            status = trackway.flush(timeout)
            taken.append((time.monotonic() - begun) / timeout)
            assert status.recorded == status.exported + status.pending + status.dropped
        stop = True
        print(*taken)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert all(float(ratio) < 3 for ratio in done.stdout.split()), done.stdout


# Destinations


class Place(SpanExporter):
    """A third-party exporter; ``answers`` says what its next calls do: True is success."""

    def __init__(self) -> None:
        self.answers: list[bool] = []
        self.calls = 0
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.calls += 1
        if self.answers and not self.answers.pop(0):
            raise ConnectionError("nobody there")
        self.spans += spans
        return SpanExportResult.SUCCESS

    def numbers(self) -> Counter[int]:
        return Counter(
            span.attributes["trackway.sample_index"]  # type: ignore[misc, index]
            for span in self.spans
            if span.name == "call"
        )


def follower(path: Path, **exporters: SpanExporter) -> sync.Follower:
    """Give a follower whose destinations are these exporters."""
    config = load_config(store=path, sync="off")
    object.__setattr__(config, "backend", tuple(exporters))
    made = sync.Follower(path, config)
    for name, exporter in exporters.items():
        made._destinations[name] = destinations.Destination(name, name, config, exporter)
    return made


def test_a_destination_that_is_away_is_asked_less_and_less_often_and_gets_everything_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    with recording() as recorded:
        place = Place()
        place.answers = [True] * 10 + [False] * 50
        work = follower(recorded.path, place=place)
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        for number in range(10):
            record(number, number + 1)
            trackway.flush()
            assert work.step()
            now[0] += 0.5
        assert place.calls == 10
        looks = 0
        while place.answers:
            if looks % 10 == 0:
                record(10 + looks // 10, 11 + looks // 10)
                trackway.flush()
            work.step()
            looks += 1
            now[0] += 0.5
        assert looks > 10 * place.calls  # a look every half a second, a try every minute in the end
        now[0] += 60
        assert work.step()
        expected = recorded.status().trajectories
        assert place.numbers() == Counter(range(expected))
        ids = [span.get_span_context().span_id for span in place.spans]  # type: ignore[union-attr]
        assert len(set(ids)) == len(ids) == 2 * expected
        assert work.errors() == {}


@pytest.mark.parametrize(
    "words",
    [
        "return character(s) in header value: 'Bearer 0a1b2c3d4e5f\\n'",
        "Max retries exceeded with url: /v1/traces?token=0a1b2c3d4e5f (Caused by …)",
        "cannot reach https://me:0a1b2c3d4e5f@host/v1/traces",
    ],
)
def test_credentials_in_the_words_of_an_exporter_are_shown_nowhere(
    words: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Telling(Place):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            raise ConnectionError(words)

    with recording() as recorded:
        work = follower(recorded.path, place=Telling())
        record(0, 1)
        trackway.flush()
        assert not work.step(patient=False)
        (shown,) = work.errors().values()
        assert shown.startswith(f"ConnectionError: {words[:10]}")
        assert "0a1b2c3d4e5f" not in shown + caplog.text


def test_one_trajectory_that_an_exporter_trips_over_keeps_no_other() -> None:
    class Picky(Place):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            if any(span.attributes["trackway.sample_index"] == 3 for span in spans):  # type: ignore[index]
                raise TypeError("cannot encode this")
            return super().export(spans)

    with recording() as recorded:
        place = Picky()
        work = follower(recorded.path, place=place)
        for first in range(0, 120, 60):
            record(first, first + 60)
            trackway.flush()
            assert not work.step(patient=False)
            everything = Counter(range(first + 60))
            assert place.numbers() == everything - Counter([3])
        assert work.errors() == {"place": "TypeError: cannot encode this"}
        status = open_store(recorded.path)
        assert status.status().dropped == 0


class Slow(Place):
    """Takes a batch each time that it is let to."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Semaphore(0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert threading.current_thread() is not threading.main_thread()
        self.may.acquire()
        return super().export(spans)


def test_an_exporter_that_never_answers_keeps_no_other_and_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sync, "ANSWER", 0.3)
    with recording() as recorded:
        slow, quick = Slow(), Place()
        work = follower(recorded.path, slow=slow, quick=quick)
        record(0, 3)
        trackway.flush()
        for step in range(3):
            assert not work.step(patient=False)
            assert (len(slow.spans), len(quick.spans)) == (0, 6 + 2 * step)
            record(3 + step, 4 + step)
            trackway.flush()
        assert list(work.errors()) == ["slow"]
        assert "no answer" in work.errors()["slow"]
        slow.may.release(10)
        while not work.step(patient=False):
            time.sleep(0.01)
        assert slow.numbers() == quick.numbers() == Counter(range(6))  # nothing was sent twice
        assert work.errors() == {}
        work.close()


def test_a_destination_that_is_slow_keeps_no_other_from_what_comes_meanwhile() -> None:
    with recording() as recorded:
        slow, quick = Slow(), Place()
        work = follower(recorded.path, slow=slow, quick=quick)
        record(0, 120)
        trackway.flush()
        for batches in range(3):
            assert not work.step()
            assert work.waits
            assert quick.numbers() == Counter(range(120 + batches))
            assert len(slow.numbers()) <= 50 * batches
            slow.may.release()
            record(120 + batches, 121 + batches)
            trackway.flush()
        slow.may.release(10)
        while not work.step():
            assert work.errors() == {}
        assert slow.numbers() == quick.numbers() == Counter(range(123))
        assert not work.waits
        work.close()


def test_a_destination_that_is_slow_gets_everything_also_after_the_last_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sync, "PATIENCE", -1.0)
    monkeypatch.setattr(sync, "INTERVAL", 0.0)
    monkeypatch.setattr(sync.Follower, "owners", lambda self: False)
    with recording() as recorded:
        slow, quick = Slow(), Place()
        made = {"slow": slow, "quick": quick}
        monkeypatch.setattr(destinations, "build", lambda backend, config: made[backend])
        config = load_config(store=recorded.path, sync="off")
        object.__setattr__(config, "backend", tuple(made))
        record(0, 120)
        trackway.flush()
        work = threading.Thread(target=sync.follow_store, args=(recorded.path, config))
        work.start()
        while len(quick.numbers()) < 120:
            work.join(0.01)
        for _ in range(3):
            work.join(0.1)
            assert work.is_alive()
            slow.may.release()
        work.join()
        assert slow.numbers() == quick.numbers() == Counter(range(120))


HANGING = """
import time
from opentelemetry.sdk.trace.export import SpanExporter
from trackway.trace.exporters import sync
sync.ANSWER = 1.0
class Exporter(SpanExporter):
    def export(self, spans):
        time.sleep(10_000)
    def shutdown(self):
        time.sleep(10_000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["process", "inline"])
@pytest.mark.parametrize("end", ["trackway.shutdown(2)", ""], ids=["shutdown", "exit"])
def test_a_process_ends_in_time_whatever_its_exporter_does(tmp_path: Path, mode: str, end: str) -> None:
    environment = install_exporter(tmp_path, HANGING)
    done = run(
        tmp_path,
        RECORD
        + f"""
trackway.configure(store="store", backend="elsewhere", sync="{mode}")
record(0, 20)
trackway.flush(4)
{end}
sys.exit(9)
""",
        **environment,
    )
    assert done.returncode == 9
    *_, at_flush, at_end = done.stderr.splitlines()
    assert at_flush.startswith(
        "elsewhere is not reached, the store keeps everything: TimeoutError: no answer"
    )
    assert at_end.startswith("elsewhere lacks 40 of 40 spans (TimeoutError: no answer for")
    assert f"trackway sync --store {tmp_path}/store" in at_end
    stop_followers(tmp_path / "store")


ASKING = """
from opentelemetry.sdk.trace.export import SpanExporter
class Exporter(SpanExporter):
    def __init__(self):
        self.key = input("API key: ")
"""


@pytest.mark.slow
def test_an_exporter_that_asks_for_a_key_is_told_that_nobody_is_there(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        RECORD
        + """
trackway.configure(store="store", backend="elsewhere", sync="process")
record(0, 5)
print(trackway.flush(3).pending)
""",
        **install_exporter(tmp_path, ASKING),
    )
    assert (done.returncode, done.stdout) == (0, "10\n")
    assert done.stderr.startswith("elsewhere is not reached, the store keeps everything: EOFError")
    stop_followers(tmp_path / "store")


AWAY = """
import os
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
class Exporter(SpanExporter):
    def export(self, spans):
        if not os.path.exists(os.environ["BACK"]):
            raise ConnectionError("nobody there")
        with open(os.environ["BACK"], "a") as file:
            file.writelines(f"{span.context.span_id:016x}\\n" for span in spans)
        return SpanExportResult.SUCCESS
"""


@pytest.mark.slow
def test_a_destination_that_is_away_for_the_whole_run_costs_disk_and_nothing_else(tmp_path: Path) -> None:
    back = tmp_path / "back"
    environment = {"BACK": str(back), **install_exporter(tmp_path, AWAY)}
    code = (
        RECORD
        + """
import resource
trackway.configure(store=sys.argv[1] if len(sys.argv) > 1 else "store", sync="process")
def cost():
    trackway.trace.capture.runtime.get().writer.flush(20)
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    return files, threads, len(sys.modules), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
record(0, 300)
before = cost()
for first in range(300, 3000, 300):
    record(first, first + 300)
    time.sleep(0.3)
print(*before, *cost())
"""
    )
    grown = {}
    for backend in ("", "elsewhere"):
        folder = tmp_path / (backend or "none")
        folder.mkdir()
        done = run(folder, code, TRACKWAY_BACKEND=backend, **environment)
        assert done.returncode == 0, done.stderr
        files, threads, modules, memory, *later = said(done.stdout)
        assert later[:3] == [files, threads, modules]  # nothing piles up, nothing of the exporter is loaded
        grown[backend] = later[3] - memory
    assert grown["elsewhere"] < 2 * grown[""] + 2_000  # kilobytes
    store = tmp_path / "elsewhere" / "store"
    assert open_store(store).status().pending == 6000
    back.touch()
    sent = [sys.executable, "-m", "trackway", "sync", "--store", str(store)]
    stop_followers(store)
    subprocess.run(sent, env={**os.environ, **environment}, check=True)
    ids = back.read_text().split()
    assert len(ids) == len(set(ids)) == 6000
    assert open_store(store).status().pending == 0
