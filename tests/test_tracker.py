"""One call, several loggers: none waits for another, none is forgotten, and nothing raises."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from trackway.trace.config import ConfigError
from trackway.trace.loggers import Tracker, runlog, runs
from trackway.trace.loggers.catchup import catch_up

from .loggers_for_tests import records
from .programs import wait_until


def program(folder, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has ``Tracker``."""
    path = folder / "program.py"
    path.write_text("import os, sys\nfrom trackway.trace.loggers import Tracker\n" + textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "site"), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_newcomers_tracker_needs_the_core_only(tmp_path):
    code = """
        with Tracker(["console"]) as tracker:
            tracker.log_metrics({"loss": 0.123456, "n": 3}, step=1)
        heavy = {"torch", "numpy", "mlflow", "wandb", "swanlab", "tensorboard", "trackio", "pandas"}
        print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
    """
    done = program(tmp_path, code)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "step:1 - loss:0.1235 - n:3"
    assert lines[-1] == "[]"
    assert (tmp_path / "trackway-store" / "runs").is_dir()


@pytest.mark.parametrize(
    "written",
    [
        "fake,other",
        "fake, other",
        ["fake", "other"],
        ("fake", "other", "fake"),
        "['fake', 'other']",
        {"fake": 1, "other": 2}.keys(),
    ],
)
def test_loggers_are_named_as_people_name_them(fakes, written):
    with Tracker(written) as tracker:
        tracker.log_metrics({"a": 1}, step=0)
    assert fakes.steps("fake") == fakes.steps("other") == [0]


def test_loggers_may_come_from_hydra(fakes):
    from omegaconf import OmegaConf

    config = OmegaConf.create({"trainer": {"logger": ["fake", "other"]}})
    Tracker(config.trainer.logger).finish()
    assert [call[0] for call in fakes.told("other")] == ["open", "finish"]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("consol", "did you mean 'console'"),
        ("", "names no logger"),
        ([], "names no logger"),
        (None, "loggers=None"),
        ([3], "3"),
        ({"console": 1}, "dict"),
    ],
)
def test_a_wrong_logger_is_an_error_that_names_the_right_ones(fakes, written, said):
    with pytest.raises(ConfigError) as caught:
        Tracker(written)
    text = str(caught.value)
    assert said in text
    assert "tensorboard" in text
    assert not Path("trackway-store").exists()


def test_a_wrong_setting_is_an_error(fakes):
    with pytest.raises(ConfigError, match="did you mean 'rules'"):
        Tracker("fake", fake={"rule": 1})
    with pytest.raises(ConfigError, match="expected a mapping"):
        Tracker("fake", fake=3)
    with pytest.raises(ConfigError, match="nobody"):
        Tracker("fake", nobody={})
    with pytest.raises(ConfigError, match="same setting"):
        Tracker("fake", log_frequency=2, log_interval=3)
    with pytest.raises(ConfigError, match="on_error"):
        Tracker("fake", on_error="ignore")


def test_a_missing_package_is_an_error_or_waits(fakes, caplog):
    with pytest.raises(ConfigError, match="no_such_package_anywhere"):
        Tracker(["absent", "fake"])
    assert fakes.told() == []
    with Tracker(["absent", "fake"], on_error="offline") as tracker:
        tracker.log_metrics({"a": 1}, step=1)
        tracker.flush(timeout=0)
    assert fakes.steps() == [1]
    assert "absent is left out of this run" in caplog.text


def test_what_is_logged_arrives_in_order_with_its_steps(fakes):
    with Tracker("fake", config={"lr": 0.1}) as tracker:
        for step in (1, 1, 5, 3, 7):
            tracker.log_metrics({"loss": step / 10}, step=step)
        tracker.alert("look", "here", level="error", step=7)
        Path("notes.txt").write_text("first")
        tracker.log_artifact("notes.txt", "notes/a.txt")
        Path("notes.txt").write_text("later")
    told = fakes.told()
    assert told[0] == ["open", False, 0]
    assert told[1] == ["config", {"lr": 0.1}]
    assert told[2:7] == [["metrics", step, {"loss": step / 10}] for step in (1, 1, 5, 3, 7)]
    assert told[7] == ["alert", "look", "here", "error", 7]
    assert told[8] == ["artifact", "notes/a.txt", "first"]
    assert told[9:] == [["finish", "finished"]]


def test_what_people_log_becomes_numbers(fakes, caplog):
    metrics = {
        "a": 1,
        "b": "gpu",
        "c": None,
        "d": [1, 2],
        "e": np.array(3.0),
        "f": True,
        "g": Decimal("1.5"),
        "h": {"x": 1, "y": {"z": np.float32(0.5)}},
        "i": torch.tensor([[2.5]], dtype=torch.bfloat16, requires_grad=True),
        "j": torch.tensor(4),
        "k": np.int64(3),
        "": 1,
        7: 8,
    }
    with Tracker("fake") as tracker:
        tracker.log_metrics(metrics, step=1)
        tracker.log_metrics(metrics, step=2)
    _, first, second, _ = fakes.told()
    assert first[2] == second[2] == {
        "a": 1, "e": 3.0, "f": 1, "g": 1.5, "h/x": 1, "h/y/z": 0.5, "i": 2.5, "j": 4, "k": 3, "7": 8,
    }  # fmt: skip
    for name in ("'b'", "'c'", "'d'", "''"):
        assert sum(f"metric {name}:" in record.getMessage() for record in caplog.records) == 1


def test_a_value_is_kept_as_it_was_when_it_was_logged(fakes):
    value, metrics = torch.tensor(1.0), {"a": 1}
    metrics["tensor"] = value
    with Tracker("fake") as tracker:
        tracker.log_metrics(metrics, step=1)
        value += 1
        metrics["a"] = 2
    assert fakes.told()[1][2] == {"a": 1, "tensor": 1.0}


def test_hostile_values_cost_only_themselves(fakes, caplog):
    class Odd:
        def __float__(self):
            raise RuntimeError("no")

    class OddArray(np.ndarray):
        def item(self, *args):
            raise RuntimeError("no")

    loop: dict = {"x": 1}
    loop["loop"] = loop
    odd = np.zeros(1).view(OddArray)
    with Tracker("fake") as tracker:
        tracker.log_metrics(
            {"ok": 1, "odd": Odd(), "array": odd, "meta": torch.ones(1, device="meta")}, step=1
        )
        tracker.log_metrics(
            {"h": loop, "huge": 10**400, "big": 2**70, "c": 1j, "n": np.datetime64("NaT")}, step=2
        )
        tracker.log_metrics({"ok": 1}, step="three")
        tracker.log_metrics({"ok": 1}, step=-1)
        tracker.log_metrics({"ok": 1}, step=None)
        tracker.log_metrics({"ok": 4}, step=np.int64(4))
        tracker.log_metrics(None, step=5)
    first, second, last = [call for call in fakes.told() if call[0] == "metrics"]
    assert first[2] == {"ok": 1}
    assert second[2]["h/x"] == 1 and second[2]["big"] == 2.0**70 and second[2]["huge"] == float("inf")
    assert "c" not in second[2] and "n" not in second[2]
    assert last[1:] == [4, {"ok": 4}]


def test_what_is_not_finite_stays_so(fakes):
    values = {"nan": float("nan"), "inf": torch.tensor(float("inf")), "minus": np.float32("-inf"), "ok": 1.0}
    with Tracker("fake") as tracker:
        tracker.log_metrics(values, step=1)
    found = fakes.told()[1][2]
    assert found["ok"] == 1.0 and found["inf"] == float("inf") and found["minus"] == float("-inf")
    assert found["nan"] != found["nan"]


def test_two_names_that_fall_together_stay_two(fakes):
    with Tracker("fake") as tracker:
        tracker.log_metrics({"h/x": 1, "h": {"x": 2}}, step=1)
    assert sorted(fakes.told()[1][2].values()) == [1, 2]


def test_an_array_is_a_histogram_or_what_it_says_of_itself(fakes):
    values = np.array([1.0, 2.0, 3.0, np.nan])
    with Tracker("fake") as tracker:
        tracker.log_metrics({"length": values, "loss": 1}, step=1)
    metrics = [call[2] for call in fakes.told() if call[0] == "metrics"]
    assert metrics[0] == {"loss": 1}
    assert metrics[1] == pytest.approx(
        {"length/mean": 2.0, "length/std": (2 / 3) ** 0.5, "length/min": 1.0, "length/max": 3.0}
    )


def test_a_logger_that_refuses_one_step_gets_all_others(fakes, caplog):
    with Tracker(["fake", "other"], fake={"rules": {"refuses": 2}}) as tracker:
        for step in (1, 2, 3):
            tracker.log_metrics({"a": step}, step=step)
    assert fakes.steps("fake") == [1, 3]
    assert fakes.steps("other") == [1, 2, 3]
    assert sum("does not take" in record.getMessage() for record in caplog.records) == 1


def test_a_logger_that_hangs_holds_up_nobody(fakes):
    tracker = Tracker(["fake", "other"], fake={"rules": {"slow": 3600}})
    for step in range(100):
        tracker.log_metrics({"a": step}, step=step)
    wait_until(lambda: len(fakes.steps("other")) == 100)
    tracker.finish(timeout=1)
    assert fakes.told("fake") == []
    wait_until(lambda: fakes.told("other")[-1] == ["finish", "finished"])


def test_what_a_logger_missed_is_caught_up(fakes, caplog):
    fakes.down().touch()
    with Tracker(["fake", "other"]) as tracker:
        tracker.log_metrics({"a": 1}, step=1)
        tracker.log_metrics({"a": 2}, step=2)
        wait_until(lambda: fakes.steps("other") == [1, 2])
        tracker.finish(timeout=1)
    assert fakes.told() == []
    assert "`trackway sync`" in caplog.text

    said: list[str] = []
    store = Path("trackway-store")
    assert not catch_up(store, said.append, patience=0.5)
    assert "lacks 2 records" in said[0] and "nobody answers" in said[0]
    fakes.down().unlink()
    assert catch_up(store, said.append)
    assert fakes.told() == [
        ["open", True, 0], ["metrics", 1, {"a": 1}], ["metrics", 2, {"a": 2}], ["finish", "finished"],
    ]  # fmt: skip
    before = fakes.told(), fakes.told("other")
    assert catch_up(store, said.append)
    assert (fakes.told(), fakes.told("other")) == before


@pytest.mark.slow
@pytest.mark.parametrize("after", [[], ["alert"], ["config", "alert"]])
def test_nothing_is_given_up_as_refused_while_nobody_answers(fakes, after):
    # `plain` does nothing about alerts, so that it takes one also while it is away.
    with Tracker("plain") as tracker:
        wait_until(lambda: fakes.told("plain"))
        fakes.down("plain").touch()
        tracker.log_metrics({"a": 1}, step=1)
        for kind in after:
            tracker.alert("x") if kind == "alert" else tracker.log_config({"lr": 1})
        tracker.finish(timeout=10)
    fakes.down("plain").unlink()
    assert catch_up(Path("trackway-store"), lambda line: None)
    assert fakes.steps("plain") == [1]


def test_a_configuration_that_is_refused_does_not_keep_the_metrics(fakes):
    with Tracker("fake", config={"no": 1}, fake={"rules": {"refuses_config": True}}) as tracker:
        tracker.log_metrics({"a": 1}, step=1)
        tracker.log_metrics({"a": 2}, step=2)
    assert fakes.steps() == [1, 2]
    assert fakes.told()[-1] == ["finish", "finished"]


def test_a_logger_that_comes_back_while_the_run_goes_on_gets_what_it_missed(fakes):
    with Tracker("fake") as tracker:
        tracker.log_metrics({"a": 1}, step=1)
        wait_until(lambda: fakes.steps() == [1])
        fakes.down().touch()
        tracker.log_metrics({"a": 2}, step=2)
        tracker.log_metrics({"a": 3}, step=3)
        wait_until(lambda: tracker.behind)
        fakes.down().unlink()
        wait_until(lambda: fakes.steps() == [1, 2, 3])
    assert fakes.told()[-1] == ["finish", "finished"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("tracker.finish()", "finished"),
        ("tracker.finish(status='failed')", "failed"),
        ("pass", "finished"),
        ("raise ValueError('x')", "failed"),
        ("sys.exit(3)", "finished"),
        ("os.kill(os.getpid(), 15)", "killed"),
        ("with tracker: raise ValueError('x')", "failed"),
        ("with tracker: sys.exit(0)", "finished"),
        ("with tracker: sys.exit(3)", "failed"),
        ("with tracker: os.kill(os.getpid(), 15)", "killed"),
    ],
)
def test_every_end_of_the_program_ends_the_run_once(fakes, tmp_path, end, status):
    done = program(
        tmp_path, f"tracker = Tracker(['fake', 'other'])\ntracker.log_metrics({{'a': 1}}, step=1)\n{end}\n"
    )
    assert done.returncode == (-15 if "15" in end else 1 if "raise" in end else 3 if "3" in end else 0)
    for name in ("fake", "other"):
        assert fakes.told(name)[1:] == [["metrics", 1, {"a": 1}], ["finish", status]], done.stderr
    (run,) = runs.list_runs(tmp_path / "trackway-store")
    assert run.status == status


def test_a_handler_of_the_programs_own_stays(fakes, tmp_path):
    code = """
        import signal
        signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
        with Tracker("fake") as tracker:
            os.kill(os.getpid(), 15)
            tracker.log_metrics({"a": 1}, step=1)
    """
    done = program(tmp_path, code)
    assert (done.returncode, done.stdout) == (0, "mine\n")
    assert fakes.told()[1:] == [["metrics", 1, {"a": 1}], ["finish", "finished"]]


def test_a_killed_run_is_seen_as_died_and_brought_to_its_end(fakes, tmp_path):
    code = """
        import time
        tracker = Tracker(["fake"])
        tracker.log_metrics({"a": 1}, step=1)
        tracker.flush()
        open("fake.down", "w")
        tracker.log_metrics({"a": 2}, step=2)
        while not tracker.behind: time.sleep(0.01)
        os.kill(os.getpid(), 9)
    """
    assert program(tmp_path, code).returncode == -9
    store = tmp_path / "trackway-store"
    (run,) = runs.list_runs(store)
    assert run.status == "died"
    fakes.down().unlink()
    assert catch_up(store, lambda line: None)
    assert sorted(set(fakes.steps())) == [1, 2]
    assert fakes.told()[-1] == ["finish", "killed"]
    (run,) = runs.list_runs(store)
    assert run.status == "killed"


def test_two_runs_of_the_same_name_stay_two_and_one_is_resumed_on_purpose(fakes):
    ids = []
    for step in (1, 2):
        with Tracker("fake", project="p", experiment="e") as tracker:
            tracker.log_metrics({"a": step}, step=step)
            tracker.save_id(".")
        ids.append(tracker.run.id)
    assert len(set(ids)) == 2
    for resume in (".", ids[1], ids[1][:-1], "last", "e"):
        with Tracker("fake", resume=resume) as again:
            assert again.run.id == ids[1]
            assert (again.run.project, again.run.experiment) == ("p", "e")
    assert [call[1:] for call in fakes.told() if call[0] == "open"] == [
        [False, 0], [False, 0], *([True, life] for life in (1, 2, 3, 4, 5)),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="no run 'nothing'"):
        Tracker("fake", resume="nothing")


def test_a_run_that_is_written_cannot_be_resumed_beside(fakes):
    with Tracker("fake") as tracker, pytest.raises(ConfigError, match="another process"):
        Tracker("fake", resume=tracker.run.id)


def test_a_resumed_run_replaces_what_it_had_logged_from_there_on(fakes):
    with Tracker("fake") as tracker:
        for step in range(151):
            tracker.log_metrics({"loss": step, "old": step}, step=step)
    with Tracker("fake", resume="last") as tracker:
        for step in range(100, 161):
            tracker.log_metrics({"loss": -step}, step=step)
    told = fakes.told()
    assert told.count(["rewind", 100]) == 1
    assert told[told.index(["rewind", 100]) + 1] == ["metrics", 100, {"loss": -100}]
    history = runlog.history(tracker.run.directory / runlog.LOG)
    assert history["loss"] == {step: step if step < 100 else -step for step in range(161)}
    assert history["old"] == {step: step for step in range(100)}


def test_only_the_first_of_a_job_writes(fakes, tmp_path):
    code = """
        import logging
        logging.basicConfig(level="INFO")
        with Tracker("fake", group="job") as tracker:
            tracker.log_metrics({"loss": int(os.environ.get("RANK", 0))}, step=1)
            tracker.log_metrics({"loss": int(os.environ.get("RANK", 0))}, step=2)
    """
    for rank in range(4):
        done = program(tmp_path, code, RANK=str(rank))
        assert done.stderr.count("logs nothing") == (0 if rank == 0 else 1)
    assert [call for call in fakes.told() if call[0] == "metrics"] == [
        ["metrics", 1, {"loss": 0}], ["metrics", 2, {"loss": 0}],
    ]  # fmt: skip
    assert len(list(runs.list_runs(tmp_path / "trackway-store"))) == 1


def test_every_rank_writes_a_run_of_its_own_where_that_is_asked_for(fakes, tmp_path):
    code = """
        with Tracker("fake", experiment="e", group="job", all_ranks=True) as tracker:
            tracker.log_metrics({"loss": int(os.environ["RANK"])}, step=1)
    """
    for rank in range(3):
        program(tmp_path, code, RANK=str(rank))
    found = {run.experiment: run for run in runs.list_runs(tmp_path / "trackway-store")}
    assert sorted(found) == ["e-rank0", "e-rank1", "e-rank2"]
    assert {run.group for run in found.values()} == {"job"}
    for rank in range(3):
        history = runlog.history(found[f"e-rank{rank}"].directory / runlog.LOG)
        assert history == {"loss": {1: rank}}


def test_a_forked_child_logs_nothing_to_its_parents_run(fakes):
    with Tracker("fake") as tracker:
        child = multiprocessing.get_context("fork").Process(
            target=lambda: (tracker.log_metrics({"a": 2}, step=2), tracker.finish())
        )
        child.start()
        child.join()
        assert child.exitcode == 0
        tracker.log_metrics({"a": 1}, step=1)
    assert fakes.told()[1:] == [["metrics", 1, {"a": 1}], ["finish", "finished"]]


def test_after_the_end_nothing_is_logged_and_nothing_raises(fakes):
    tracker = Tracker("fake")
    tracker.finish()
    tracker.log_metrics({"a": 1}, step=1)
    tracker.log_config({})
    tracker.alert("x")
    tracker.flush()
    tracker.finish("failed")
    assert fakes.told()[1:] == [["finish", "finished"]]


def test_an_artifact_is_kept_once_for_each_content(fakes, caplog):
    folder = Path("model")
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "a.bin").write_bytes(b"1")
    with Tracker("fake") as tracker:
        tracker.log_artifact(folder, "model")
        tracker.log_artifact(b"hello", "text/hello.txt")
        tracker.log_artifact(b"hello", "text/hello.txt")
        tracker.log_artifact(b"other", "text/hello.txt")
        tracker.log_artifact("not-there.txt", "x")
        tracker.log_artifact(b"x", "../../escape")
    kept = records(tracker.run.directory, "artifact")
    assert [each["name"] for each in kept] == ["model", *["text/hello.txt"] * 3]
    assert kept[1]["hash"] == kept[2]["hash"] != kept[3]["hash"]
    assert len(list((tracker.run.directory / "artifacts").iterdir())) == 3
    assert [call[1:] for call in fakes.told() if call[0] == "artifact"] == [
        ["model", ["part", "part/a.bin"]], *[["text/hello.txt", "hello"]] * 2, ["text/hello.txt", "other"],
    ]  # fmt: skip
    assert "not-there.txt" in caplog.text and "escape" in caplog.text


def test_a_logger_without_tables_keeps_generations_as_an_artifact(fakes):
    rows = [{"sample_index": i, "prompt": f"p{i}", "completion": f"c{i}", "score": i} for i in range(3)]
    with Tracker("plain") as tracker:
        tracker.log_generations(rows, step=7)
    ((name, text),) = [call[1:] for call in fakes.told("plain") if call[0] == "artifact"]
    assert name == "generations/step_000007.jsonl"
    found = {row["sample"]: row for row in map(json.loads, text.splitlines())}
    assert found["2"] == {
        "sample": "2", "rollout": None, "trajectory": "val/7/2/0",
        "prompt": "p2", "completion": "c2", "score": 2.0,
    }  # fmt: skip


def test_generations_are_chosen_by_sample_and_joined_by_key(fakes):
    def rows(step, order):
        return [
            {"sample_index": i, "rollout_n": n, "input": f"p{i}", "output": f"c{i}-{n}"}
            for i in order
            for n in (0, 1)
        ]

    with Tracker("plain", log_val_generations=3) as tracker:
        for step, order in ((1, range(20)), (2, reversed(range(20))), (3, range(5, 15))):
            scores = {(step, i, n): 100 * i + n for i in range(20) for n in (0, 1)}
            tracker.log_generations(rows(step, order), step=step, scores=scores)
    shown = [each["rows"] for each in records(tracker.run.directory, "generations")]
    assert {row["sample"] for row in shown[0]} == {row["sample"] for row in shown[1]}
    assert all(len({row["sample"] for row in each}) == 3 and len(each) == 6 for each in shown)
    for each in shown:
        for row in each:
            assert row["score"] == 100 * int(row["sample"]) + row["rollout"]


def test_columns_of_scores_have_one_type(fakes):
    scores = [1, 0.5, None, "n/a", np.float32(1), True]
    rows = [
        {"prompt": f"p{i}", "completion": "c", "score": score, "note": i % 2 or None}
        for i, score in enumerate(scores)
    ]
    rows[0]["prompt"] = [{"role": "user", "content": "hi"}]
    with Tracker("plain", log_val_generations=-1) as tracker:
        tracker.log_generations(rows, step=1)
    (logged,) = records(tracker.run.directory, "generations")
    by_prompt = {row["prompt"]: row for row in logged["rows"]}
    assert by_prompt["user: hi"]["score"] == 1.0
    assert [by_prompt[f"p{i}"]["score"] for i in range(1, 6)] == [0.5, None, None, 1.0, 1.0]
    (original,) = logged["originals"]
    assert logged["rows"][original["row"]]["prompt"] == "p3" and original["value"] == "n/a"


def test_less_is_logged_but_never_what_matters(fakes):
    keys = ("critic/rewards/mean", "val-core/gsm8k/acc/mean@1")
    with Tracker("fake", log_frequency={"timing/*": 50, "*": 20}) as tracker:
        for step in range(1, 98):
            tracker.log_metrics({"timing/gen": step, "other": step, "critic/rewards/mean": step}, step=step)
            if step % 30 == 0:
                tracker.log_metrics({keys[1]: 0.5}, step=step)
    found = runlog.history(tracker.run.directory / runlog.LOG)
    assert list(found["critic/rewards/mean"]) == list(range(1, 98))
    assert list(found["other"]) == [1, 20, 30, 40, 60, 80, 90, 97]
    assert list(found["timing/gen"]) == [1, 30, 50, 60, 90, 97]
    assert list(found[keys[1]]) == [30, 60, 90]


def test_a_torn_line_costs_itself_only(fakes):
    with Tracker("fake") as tracker:
        tracker.log_metrics({"a": 1}, step=1)
    log = tracker.run.directory / runlog.LOG
    with log.open("ab") as file:
        file.write(b'{"kind":"metrics","ti')
    with Tracker("fake", resume="last") as tracker:
        tracker.log_metrics({"a": 2}, step=2)
    assert runlog.history(log) == {"a": {1: 1, 2: 2}}
    assert fakes.steps() == [1, 2]


def test_a_disk_that_is_full_costs_records_and_nothing_else(fakes, caplog, monkeypatch):
    tracker = Tracker("fake")
    tracker.log_metrics({"a": 1}, step=1)
    tracker.flush()
    real = os.write

    def full(file, data):
        if b'"metrics"' in bytes(data):
            raise OSError(28, "No space left on device")
        return real(file, data)

    with monkeypatch.context() as patched:
        patched.setattr(runlog.os, "write", full)
        tracker.log_metrics({"a": 2}, step=2)
        tracker.flush()
    tracker.log_metrics({"a": 3}, step=3)
    tracker.finish()
    assert fakes.steps() == [1, 3]
    assert "No space left" in caplog.text
    assert tracker.dropped == 1 and "1 calls were lost" in caplog.text


def test_a_line_that_is_written_in_part_costs_itself_only(fakes, monkeypatch):
    tracker = Tracker("fake")
    tracker.log_metrics({"a": 1}, step=1)
    tracker.flush()
    real, torn = os.write, []

    def half(file, data):
        if torn:
            raise OSError(28, "No space left on device")
        torn.append(real(file, bytes(data)[:20]))
        return 20

    with monkeypatch.context() as patched:
        patched.setattr(runlog.os, "write", half)
        tracker.log_metrics({"a": 2}, step=2)
        wait_until(lambda: tracker.dropped == 1)
    tracker.log_metrics({"a": 3}, step=3)
    tracker.finish()
    assert fakes.steps() == [1, 3]


def test_text_that_is_none_costs_nothing(fakes):
    half = "x\ud83e"
    rows = [{"prompt": half, "completion": half, half: 1}]
    with Tracker("plain", group=half, config={half: half}) as tracker:
        tracker.log_metrics({half: 1, "ok": 2, "h": {half: np.zeros(3)}}, step=1)
        tracker.alert(half, half, level="loud", step=np.int64(3))
        tracker.log_generations(rows, step=1)
        tracker.log_artifact(b"1", half)
    shown = "x\\ud83e"
    assert fakes.told("plain")[1] == ["config", {shown: shown}]
    assert fakes.told("plain")[2] == ["metrics", 1, {shown: 1, "ok": 2}]
    (alert,) = records(tracker.run.directory, "alert")
    assert alert == {"title": shown, "text": shown, "level": "warning", "step": 3}
    (generated,) = records(tracker.run.directory, "generations")
    assert generated["rows"][0]["prompt"] == shown
    assert [each["name"] for each in records(tracker.run.directory, "artifact")] == [shown]
    for name in ("project", "experiment"):
        with pytest.raises(ConfigError, match=name):
            Tracker("plain", **{name: half})


def test_a_run_lies_where_rollouts_are_recorded(fakes, tmp_path):
    import trackway

    trackway.configure(store=tmp_path / "elsewhere")
    with Tracker("fake") as tracker, trackway.trajectory(step=1, sample_index=17):
        pass
    trackway.flush()
    assert tracker.run.directory.is_relative_to(tmp_path / "elsewhere")
    assert trackway.open_store(tmp_path / "elsewhere").load("1/17/0").run == tracker.run.id
    with trackway.trajectory(step=2, sample_index=17):
        pass
    trackway.flush()
    assert trackway.open_store(tmp_path / "elsewhere").load("2/17/0").run is None


def test_a_git_that_hangs_delays_nothing(fakes, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    git = tmp_path / "bin" / "git"
    git.write_text("#!/bin/sh\nexec sleep 3600\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    tracker = Tracker("fake")
    tracker.log_metrics({"a": 1}, step=1)
    wait_until(lambda: fakes.steps() == [1])
    assert not (tracker.run.directory / "environment.json").exists()
    tracker.finish(timeout=1)


def test_the_others_of_a_job_need_not_see_the_run_that_goes_on(fakes, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with Tracker("fake", resume="that-of-another-machine") as tracker:
        tracker.log_metrics({"a": 1}, step=1)
    assert not tracker.writes and fakes.told() == []


def test_an_id_that_cannot_be_left_is_said(fakes, caplog):
    Path("file").touch()
    with Tracker("fake") as tracker:
        tracker.save_id("new/checkpoint")
        tracker.save_id("file/checkpoint")
    assert json.loads(Path("new/checkpoint/trackway-run.json").read_text()) == {"run": tracker.run.id}
    assert "file/checkpoint" in caplog.text


def test_console_lines_have_plain_numbers(capsys, tmp_path):
    values = {"loss": np.float64(0.123456789), "n": np.int64(3), "d": {"x": np.float32(1)}, "bad\x1b[31m": 1}
    with Tracker("console", store=tmp_path) as tracker:
        tracker.log_metrics(values, step=2)
    line = capsys.readouterr().out.splitlines()[0]
    assert line == "step:2 - bad\\x1b[31m:1 - d/x:1 - loss:0.1235 - n:3"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_table_of_the_console_fits_the_terminal(columns, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    names = ["actor/loss", "critic/rewards/mean", "kl", "response_length/mean", "val-core/gsm8k/acc/mean@1"]
    with Tracker("console", store=tmp_path, console={"style": "table"}) as tracker:
        for step in range(45):
            found = {name: -1.234567e-5 * n for n, name in enumerate(names) if step or n % 2}
            tracker.log_metrics({**found, **{f"timing_s/{n}": 1.0 for n in range(20)}}, step + 99_990)
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert max(map(len, lines)) <= columns
    rows = [line for line in lines if line.split()[0] != "step"]
    assert [line.split()[0] for line in rows] == [f"{step + 99_990:,}" for step in range(45)]
    shown = len(rows[-1].split()) - 2
    assert rows[-1].split()[-1] == f"+{25 - shown}"
    assert shown == (5 if columns == 200 else 1 if columns == 40 else 4)


def test_the_console_prints_nothing_that_steers_a_terminal(capsys, tmp_path):
    odd = "\x1b[2Jx\u202e"
    rows = [{"prompt": odd, "completion": "[red]" + odd, odd: 1.0}]
    with Tracker("console", store=tmp_path, alerts=[]) as tracker:
        tracker.log_metrics({odd: 1}, step=1)
        tracker.log_artifact(b"x", odd)
        tracker.log_generations(rows, step=1)
        tracker.alert(odd, odd + "\n" + odd)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\u202e" not in shown
    assert shown.count("\\x1b[2Jx") >= 6 and "[red]" in shown


def test_the_example_of_the_page_runs_as_it_stands(tmp_path):
    page = Path(__file__).parent.parent / "docs" / "loggers.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]
    done = program(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert "step:3 - actor/loss:0.3333 - reward/mean:0.3" in done.stdout
    assert "What is 6 × 7?" in done.stdout and "halfway: reward is rising" in done.stdout
    assert (tmp_path / "math" / "grpo-7b.jsonl").exists()
