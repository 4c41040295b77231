"""W&B, offline: real runs of real processes, read back with W&B's own reader."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from trackway.trace.config_values import ConfigError
from trackway.trace.loggers.wandb import WandbLogger

from .programs import run as run_program
from .programs import start, wait_until

BEGIN = """\
import json, math, numpy, wandb
from trackway import Tracker

def tracker(**more):
    settings = {"offline": True, **more.pop("wandb", {})}
    return Tracker("wandb", store="store", project="math/1", experiment="grpo", wandb=settings, **more)

"""


class Logged:
    """What is in the file of one run.

    Attributes:
        rows: what W&B calls the history, in order; without its own columns.
        numbers: W&B's own number of each.
        config, run: of the run.
        alerts, artifacts: records of these.
        exit_code: None when the run was not closed.
        tables: rows of each table.
    """

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", file]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        records = [json.loads(line) for line in output.splitlines()]

        def of(kind: str) -> Iterator[dict[str, Any]]:
            return (record[kind] for record in records if record["type"] == kind)

        self.rows = []
        self.numbers = []
        self.tables: dict[str, list[list[Any]]] = {}
        self.table_bytes = []
        for history in of("history"):
            self.numbers.append(history["step"]["num"])
            row = history["item"]
            self.rows.append({name: value for name, value in row.items() if name[0] != "_"})
            for name in row:
                if row[name] == "incremental-table-file":
                    key = name.removesuffix("._type")
                    table = (file.parent / "files" / row[f"{key}.path"]).read_bytes()
                    self.tables.setdefault(key, []).extend(json.loads(table)["data"])
                    self.table_bytes.append(len(table))
        self.config: dict[str, Any] = {}
        for config in of("config"):
            self.config |= config["update"]
        (self.run,) = of("run")
        self.alerts = list(of("alert"))
        self.artifacts = [each for each in of("artifact") if each["type"] == "file"]
        self.exit_code = next((each.get("exit_code", 0) for each in of("exit")), None)

    def values(self, name: str) -> list[tuple[int, Any]]:
        return [(row["step"], row[name]) for row in self.rows if name in row]


def logged(folder: Path, run_id: str = "") -> list[Logged]:
    """Read the runs below a folder, or what there is of one, the first first."""
    files = folder.glob(f"**/wandb/offline-run-*-{run_id}*/*.wandb")
    return sorted(map(Logged, files), key=lambda found: found.run["start_time"])


def surroundings(folder: Path, **more: str) -> dict[str, str]:
    """Give an environment that has nothing of the user's."""
    return {"HOME": str(folder), "WANDB_SILENT": "true", "TRACKWAY_STRICT": "1", **more}


def program(code: str) -> str:
    return BEGIN + textwrap.dedent(code)


def run(folder: Path, code: str, **more: str) -> str:
    done = run_program(folder, program(code), **surroundings(folder, **more))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_the_user():
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("WANDB_") or name in ("NETRC", "RANK"):
                patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Give what one run has left that logs something of every kind, and what it has printed."""
    folder = tmp_path_factory.mktemp("wandb")
    code = """
        config = {"lr": 1e-6, "actor": {"layers": [1, 2]}, "none": None}
        names = {"project": "math/1", "experiment": "grpo", "group": "job"}
        with Tracker("wandb", store="store", config=config, **names) as tracked:
            tracked.log_metrics({"loss": 0.5, "tokens": 2**53 + 1, "_private": 1, "metric_private": 2}, 10)
            tracked.log_metrics({"step": 7, "val/acc@1": 0.25, "奖励/均值": 2, "x" * 300: 1, "a.b": 3}, 10)
            tracked.log_metrics({"advantages": numpy.arange(10.0)}, 10)
            tracked.log_metrics({"loss": 0.4}, 11)
            tracked.log_metrics({"late/rollout": 9.0, "loss": 0.6}, 9)
            tracked.log_metrics({"loss": 0.3}, 12)
            tracked.log_metrics({"loss": 0.2, "nan": math.nan, "inf": math.inf, "low": -math.inf}, 12)
            tracked.flush()
            print(wandb.run.id == tracked.run.id)
            wandb.log({"of the program": 1}, step=13)
            wandb.log({"of the program": 2}, step=20)
            tracked.log_metrics({"loss": 0.1}, 20)
            row = {"sample_index": 7, "rollout_n": 0, "prompt": "2<3?", "completion": "yes\\n"}
            tracked.log_generations([{**row, "reward": None}, {**row, "reward": 1}], 20)
            tracked.log_generations([{**row, "reward": 0.5}], 30)
            tracked.log_generations([{**row, "reward": 0.5, "judge": "fine"}], 40)
            tracked.log_artifact(b"weights", "final/model")
            tracked.alert("t" * 100, "it fell", "error", 12)
        print(wandb.run is None)
    """
    out = run(folder, code, WANDB_MODE="offline", WANDB_DIR=str(folder / "elsewhere"), WANDB_ENTITY="team")
    (found,) = logged(folder / "elsewhere")
    return found, out.split()


@pytest.mark.slow
def test_no_step_is_lost_and_none_is_given_to_another(once):
    found, _ = once
    assert found.values("loss") == [(10, 0.5), (11, 0.4), (9, 0.6), (12, 0.2), (20, 0.1)]
    assert found.values("late/rollout") == [(9, 9.0)]
    assert found.numbers == sorted(set(found.numbers))
    assert found.numbers[0] == 10


def test_what_is_logged_for_one_step_is_one_row(once):
    found, _ = once
    row = found.rows[0]
    assert {name: row[name] for name in ("loss", "val/acc@1", "奖励/均值", "x" * 300, "a.b", "step")} == {
        "loss": 0.5,
        "val/acc@1": 0.25,
        "奖励/均值": 2,
        "x" * 300: 1,
        "a.b": 3,
        "step": 10,
    }
    assert row["tokens"] == 2**53 + 1
    assert row["advantages._type"] == "histogram"
    assert sum(row["advantages.values"]) == 10
    assert (row["advantages.bins"][0], row["advantages.bins"][-1]) == (0, 9)


def test_names_that_wandb_keeps_for_itself_are_changed_and_told(once):
    found, _ = once
    originals = {
        key.removeprefix("trackway/metrics/"): name
        for key, name in found.config.items()
        if key.startswith("trackway/metrics/")
    }
    assert sorted(originals.values()) == ["_private", "step"]
    given = {name: key for key, name in originals.items()}
    assert found.values(given["_private"]) == [(10, 1)]
    assert found.values("metric_private") == [(10, 2)]
    assert found.values(given["step"]) == [(10, 7)]


def test_what_is_not_finite_stays_so(once):
    found, _ = once
    assert [found.values(name) for name in ("nan", "inf", "low")] == [
        [(12, "NaN")],
        [(12, "Infinity")],
        [(12, "-Infinity")],
    ]


def test_the_program_may_log_to_the_run_too(once):
    found, out = once
    assert out == ["True", "True"]
    assert [row["of the program"] for row in found.rows if "of the program" in row] == [1, 2]
    assert found.values("of the program")[-1] == (20, 2)


def test_a_table_has_the_rows_of_all_rounds_and_another_begins_where_columns_change(once):
    found, _ = once
    row = ["7", 0, "20:val:7:0", "2<3?", "yes\n"]
    first, second = found.tables["val/generations"], found.tables["val/generations-2"]
    assert [(each[0], each[1], each[-1]) for each in first] == [(20, "7", None), (20, "7", 1), (30, "7", 0.5)]
    assert [(each[0], *each[-4:]) for each in second] == [(40, "2<3?", "yes\n", 0.5, "fine")]
    assert all(set(row) & set(each) >= {"7", "2<3?", "yes\n"} for each in [*first, *second])


def test_the_run_is_described(once):
    found, _ = once
    assert found.config["lr"] == 1e-6
    assert found.config["actor"] == {"layers": [1, 2]}
    assert found.config["trackway/run"] == found.run["run_id"]
    assert found.config["trackway/project"] == "math/1"
    names = ("project", "display_name", "run_group", "entity")
    assert [found.run[name] for name in names] == ["math-1", "grpo", "job", "team"]
    assert Path(found.config["trackway/artifacts/final/model"]).read_bytes() == b"weights"
    assert found.artifacts == []
    assert found.exit_code == 0


def test_an_alert_that_is_too_long_is_cut(once):
    found, _ = once
    (alert,) = found.alerts
    assert (alert["level"], alert["title"], alert["text"]) == ("ERROR", "t" * 63, "step 12: it fell")


@pytest.mark.slow
def test_runs_of_one_process_are_not_mixed(tmp_path):
    code = """
        own = wandb.init(project="p", name="own", mode="offline")
        first, second = tracker(), tracker()
        first.log_metrics({"loss": 1}, 1)
        second.log_metrics({"loss": 2}, 1)
        first.flush(), second.flush()
        assert wandb.run is own
        own.log({"loss": 3})
        own.finish()
        first.log_metrics({"loss": 4}, 2)
        first.finish(), second.finish("failed")
        hidden = wandb.init(project="p", name="hidden", mode="offline", reinit="create_new")
        with tracker() as third:
            third.log_metrics({"loss": 5}, 1)
            third.flush()
            print(json.dumps([own.id, first.run.id, second.run.id, hidden.id, third.run.id]))
        hidden.log({"loss": 6})
        hidden.finish()
    """
    ids = json.loads(run(tmp_path, code))
    found = [logged(tmp_path, each)[0] for each in ids]
    losses = [[row["loss"] for row in each.rows if "loss" in row] for each in found]
    assert losses == [[3], [1, 4], [2], [6], [5]]
    assert [each.exit_code for each in found] == [0, 0, 1, 0, 0]


@pytest.mark.slow
def test_a_resumed_run_goes_on_under_its_id(tmp_path):
    code = """
        with tracker({}) as tracked:
            for step in range({}, {}):
                tracked.log_metrics({{"loss": step, "_hidden": step}}, step)
            tracked.log_generations([{{"prompt": "a", "completion": "b"}}], step)
            print(tracked.run.id)
    """
    run_id = run(tmp_path, code.format("", 0, 13)).strip()
    assert run(tmp_path, code.format(f"resume={run_id!r}", 8, 11)).strip() == run_id
    first, second = logged(tmp_path)
    assert [each.run["run_id"] for each in (first, second)] == [run_id, run_id]
    assert first.values("loss") == [(step, step) for step in range(13)]
    assert second.values("loss") == [(step, step) for step in range(8, 11)]
    assert second.values("metric_hidden") == first.values("metric_hidden")[8:11]
    assert second.numbers[0] > first.numbers[-1]  # W&B would drop it otherwise
    assert [list(each.tables) for each in (first, second)] == [["val/generations"], ["val/generations-2"]]


@pytest.mark.slow
def test_a_row_that_a_killed_process_had_not_completed_is_sent_by_the_next_life(tmp_path):
    code = """
        tracked = tracker()
        tracked.log_metrics({"loss": 1, "nan": math.nan, "advantages": numpy.arange(3.0)}, 5)
        tracked.log_generations([{"prompt": "why", "completion": "so"}], 5)
        print(tracked.run.id, flush=True)
        for number in range(10**9):
            tracked.log_metrics({"again": number % 2}, 5)
            tracked.flush()
    """
    with start(tmp_path, program(code), **surroundings(tmp_path)) as process:
        assert process.stdout is not None
        run_id = process.stdout.readline().strip()
        kept = tmp_path / "store" / "runs" / run_id / "wandb.json"
        try:
            wait_until(lambda: kept.exists() and "again" in kept.read_text())
        finally:
            process.kill()
    run(tmp_path, f"tracker(resume={run_id!r}).finish()")
    found = logged(tmp_path)[-1]
    assert found.values("loss") == [(5, 1)]
    assert found.values("nan") == [(5, "NaN")]
    assert found.values("advantages._type") == [(5, "histogram")]
    ((table),) = found.tables.values()
    assert [row[0] for row in table] == [5]
    assert {"why", "so"} <= set(table[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "exit_code"),
    [("", 0), ("raise RuntimeError('out of memory')", 1), ("os.kill(os.getpid(), signal.SIGTERM)", 255)],
)
def test_a_program_that_does_not_finish_its_run_has_logged_everything(tmp_path, end, exit_code):
    code = f"""
        tracked = tracker()
        for step in range(100):
            tracked.log_metrics({{"loss": step}}, step)
        {end}
    """
    done = run_program(tmp_path, program(code), **surroundings(tmp_path))
    assert ("out of memory" in done.stderr) == ("memory" in end)
    (found,) = logged(tmp_path)
    assert found.values("loss") == [(step, step) for step in range(100)]
    assert found.exit_code == exit_code


@pytest.mark.slow
def test_what_is_logged_after_the_program_has_ended_all_runs_arrives(tmp_path):
    code = """
        with tracker() as tracked:
            for step in range(1, 4):
                tracked.log_metrics({"loss": step}, step)
                tracked.flush()
                wandb.finish()
    """
    run(tmp_path, code)
    found = logged(tmp_path)
    assert [value for each in found for value in each.values("loss")] == [(1, 1), (2, 2), (3, 3)]
    assert len({each.run["run_id"] for each in found}) == 1


@pytest.mark.slow
def test_the_bytes_of_a_round_of_generations_do_not_grow(tmp_path):
    rounds = 120
    code = f"""
        with tracker(log_val_generations=-1) as tracked:
            for step in range(100, 100 + {rounds}):
                row = {{"prompt": "p" * 200, "completion": str(step), "score": 1}}
                tracked.log_generations([{{"sample_index": n, **row}} for n in range(10, 30)], step)
    """
    run(tmp_path, code)
    (found,) = logged(tmp_path)
    rows = [(row[0], row[1]) for table in found.tables.values() for row in table]
    assert [step for step, _ in rows] == [step for step in range(100, 100 + rounds) for _ in range(20)]
    assert set(rows) == {(step, str(n)) for step in range(100, 100 + rounds) for n in range(10, 30)}
    assert len(found.table_bytes) == rounds
    assert max(found.table_bytes) == min(found.table_bytes)
    # W&B names all the earlier rounds of a table in each; so tables end.
    named = [len(value) for row in found.rows for name, value in row.items() if "previous_increments" in name]
    assert max(named) < 100 <= rounds


@pytest.mark.slow
def test_artifacts_are_uploaded_when_it_is_asked_for_and_a_proxy_is_used_and_not_written_down(tmp_path):
    code = """
        import pathlib
        pathlib.Path("model").mkdir()
        pathlib.Path("model/a.txt").write_text("a")
        proxy = "http://me:secret@proxy:8080"
        with tracker(wandb={"log_artifact": True, "wandb_proxy": proxy}) as tracked:
            tracked.flush()
            used = wandb.run.settings
            assert (used.https_proxy, used.save_code, used.console) == (proxy, False, "off")
            tracked.log_artifact("model", "final/model")
            tracked.log_artifact("model", "final-model")
            tracked.log_artifact(b"b", "b" * 200)
    """
    run(tmp_path, code)
    (found,) = logged(tmp_path)
    first, second, third = found.artifacts
    assert [json.loads(each["metadata"])["name"] for each in found.artifacts] == [
        "final/model",
        "final-model",
        "b" * 200,
    ]
    assert first["name"] == "final-model" != second["name"]
    assert first["digest"] == second["digest"]
    assert [entry["path"] for entry in first["manifest"]["contents"]] == ["a.txt"]
    assert len(third["name"]) <= 128
    kept = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert not any(b"secret" in text for text in kept)


class Server:
    """Answers wandb-core as W&B's server does, as far as a run without files needs it.

    Attributes:
        rows: of the history, as they came.
        config: of the run; each value stands under ``value``.
        exit_code: None while the run is open.
        numbers: W&B's own numbers of the rows that the run has already.
    """

    def __init__(self, numbers: list[int]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.exit_code = None
        self.numbers = numbers
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    asked = gzip.decompress(asked)
                known = self.path == "/graphql" or self.path.endswith("/file_stream")
                text = json.dumps(server.answer(json.loads(asked)) if known else {}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Server:
        Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *rest: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "query" not in asked:
            lines = asked.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.rows += map(json.loads, lines)
            self.exit_code = asked.get("exitcode", self.exit_code)
            return {}
        given = asked.get("variables", {})
        self.config |= json.loads(given.get("config") or "{}")
        project = {"id": "1", "name": given.get("project"), "entity": {"id": "1", "name": "team"}}
        tail = json.dumps([json.dumps({"_step": number}) for number in self.numbers[-1:]])
        bucket = {
            "id": "1",
            "name": given.get("name"),
            "displayName": "grpo",
            "config": "{}",
            "wandbConfig": json.dumps({"t": {}}),
            "summaryMetrics": "{}",
            "historyTail": tail,
            "eventsTail": "[]",
            "historyLineCount": len(self.numbers),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "project": project,
        }
        return {
            "data": {
                "viewer": {
                    "id": "1",
                    "entity": "team",
                    "username": "user",
                    "flags": "{}",
                    "teams": {"edges": []},
                },
                "model": {**project, "bucket": bucket} if self.numbers else None,
                "upsertBucket": {"bucket": bucket, "inserted": not self.numbers},
                "createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []},
            }
        }


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [[], [0, 1, 20]])
def test_a_run_goes_to_the_server_and_none_of_its_rows_is_refused_there(tmp_path, numbers):
    code = """
        with Tracker("wandb", store="store", config={"lr": 1e-6}) as tracked:
            for step in (5, 6, 4, 7):
                tracked.log_metrics({"loss": step / 2}, step)
    """
    with Server(numbers) as server:
        run(tmp_path, code, WANDB_BASE_URL=server.address, WANDB_API_KEY="0" * 40)
    assert [(row["step"], row["loss"]) for row in server.rows] == [(5, 2.5), (6, 3.0), (4, 2.0), (7, 3.5)]
    got = [row["_step"] for row in server.rows]
    assert got == sorted(set(got)) and got[0] > max(numbers, default=-1)
    assert server.config["lr"]["value"] == 1e-6
    assert server.exit_code == 0


@pytest.mark.slow
def test_nothing_is_done_where_it_is_disabled(tmp_path):
    code = """
        own = wandb.init(project="p", name="own", mode="offline")
        with Tracker("wandb", store="store", config={"a": 1}, wandb={"mode": "disabled"}) as tracked:
            tracked.log_metrics({"loss": 1, "h": numpy.arange(3.0)}, 1)
            tracked.log_generations([{"prompt": "a", "completion": "b"}], 1)
            tracked.log_artifact(b"a", "a")
            tracked.alert("a", "b")
            tracked.flush()
            assert wandb.run is own
    """
    run(tmp_path, code)
    (found,) = logged(tmp_path)
    assert found.run["display_name"] == "own"
    assert found.rows == []


def test_without_credentials_it_is_said_what_to_do(tmp_path):
    code = """
        from trackway.trace.loggers.wandb import WandbLogger

        try:
            Tracker("wandb", store="store")
        except Exception as error:
            print(type(error).__name__, error)
        print(WandbLogger.check({"entity": "team"}, offline=True))
        print(WandbLogger.check({"offline": True}, offline=False))
        for machine in ("elsewhere", "api.wandb.ai"):
            with open("netrc", "w") as file:
                file.write(f"machine {machine} login user password key")
            os.environ["NETRC"] = "netrc"
            print(machine, WandbLogger.check({}, offline=True))
        os.environ["NETRC"] = "nowhere"
        os.environ["WANDB_API_KEY"] = "0" * 40
        print(WandbLogger.check({}, offline=True))
    """
    error, *found = run(tmp_path, code).splitlines()
    assert error.startswith("Unavailable wandb: there are no credentials for https://")
    assert "wandb login" in error and "WANDB_API_KEY" in error and "on_error='offline'" in error
    assert found == [
        "{'entity': 'team', 'mode': 'offline'}",
        "{'mode': 'offline'}",
        "elsewhere {'mode': 'offline'}",
        "api.wandb.ai {}",
        "{}",
    ]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"mode": "cloud"}, "wandb.mode='cloud' is not allowed; expected one of online, offline, disabled"),
        ({"offline": "yes"}, "wandb.offline='yes' is not allowed; expected true or false"),
        ({"save_code": 1}, "wandb.save_code=1 is not allowed; expected true or false"),
        ({"entity": ""}, "wandb.entity='' is not allowed; expected a text that is not empty"),
        ({"wandb_proxy": 8080}, "wandb.wandb_proxy=8080 is not allowed"),
        ({"id": "a/b"}, "wandb.id='a/b' is not allowed; expected"),
        ({"mode": "online", "offline": True}, "wandb.offline=True and wandb.mode='online' contradict"),
    ],
)
def test_a_wrong_setting_is_an_error(setting, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        WandbLogger.check(setting, offline=True)
