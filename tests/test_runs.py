"""A run can be understood and repeated: what it was made of is kept, and two runs can be compared."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import math
import os
import random
import re
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orjson
import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import trackway
from trackway.trace.capture.redact import MASK, Redactor
from trackway.trace.loggers import Tracker, gitstate, runlog
from trackway.trace.loggers.environment import facts
from trackway.trace.loggers.reading import read_run
from trackway.trace.loggers.resolving import resolved

from .loggers_for_tests import fakes  # noqa: F401
from .programs import installed, wait_until

HOSTILE = "[red]x[/]\x1b[2J\u202e<script>"


class Color(enum.Enum):
    RED = object()


class Kind(str, enum.Enum):
    GRPO = "grpo"


@dataclasses.dataclass
class Optim:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    where: Path = Path("/data/x")


class Model(pydantic.BaseModel):
    name: str
    key: pydantic.SecretStr
    optim: dict[str, float]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (2**70, str(2**70)),
        (0.5, 0.5),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        ("text", "text"),
        ("\ud83e\x00", "\\ud83e␀"),
        (Color.RED, "RED"),
        (Kind.GRPO, "grpo"),
        (Path("a/b"), "a/b"),
        ((1, [2]), [1, [2]]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", "a"}), ["a", "b"]),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array([1, 2]), [1, 2]),
        (np.zeros((100, 3)), "⟨array float64 [100, 3]⟩"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), "⟨tensor bfloat16 [2, 3] on cpu⟩"),
        (torch.bfloat16, "torch.bfloat16"),
        (range(3), "range(0, 3)"),
        (dict, "builtins.dict"),
        (os.path.join, "posixpath.join"),
        (Optim(), {"lr": 1e-6, "betas": [0.9, 0.95], "where": "/data/x"}),
        (argparse.Namespace(a=1, b="x"), {"a": 1, "b": "x"}),
        (SimpleNamespace(a={"b": None}), {"a": {"b": None}}),
        (
            Model(name="q", key="hidden-away", optim={"lr": 1}),
            {"name": "q", "key": "⟨pydantic.types.SecretStr⟩", "optim": {"lr": 1.0}},
        ),
        ({1: "int", "1": "text", None: 0, Color.RED: 1}, {"1": "int", "1~str": "text", "None": 0, "RED": 1}),
        (object(), "⟨builtins.object⟩"),
    ],
)
def test_a_configuration_of_any_kind_becomes_plain(value, plain):
    assert resolved({"value": value}) == {"value": plain}
    orjson.dumps(resolved({"value": value}))


@given(
    st.dictionaries(
        st.text("abc_", min_size=1),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**63), 2**63)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text("abc ", max_size=9),
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(st.text("xyz", min_size=1), inner, max_size=4)
            ),
            max_leaves=20,
        ),
    )
)
def test_plain_json_stays_what_it_is(config):
    assert resolved(config) == config


def test_interpolations_are_resolved_and_others_stay_as_written(monkeypatch):
    monkeypatch.setenv("SIZE", "7b")
    config = OmegaConf.create(
        {
            "model": {"name": "qwen-${oc.env:SIZE}", "path": "${nowhere.at.all}", "dim": "${oc.env:NOT_SET}"},
            "actor": {"model": "${model}", "steps": [1, "${..model.name}", "${nope}"], "lr": "???"},
            "self": "${self}",
            "maybe": None,
        }
    )
    plain = resolved(config)
    assert plain["model"] == {"name": "qwen-7b", "path": "${nowhere.at.all}", "dim": "${oc.env:NOT_SET}"}
    assert plain["actor"]["model"]["name"] == "qwen-7b"
    assert plain["actor"]["steps"][0] == 1
    assert plain["actor"]["steps"][2] == "${nope}"
    assert plain["actor"]["lr"] == "???"
    assert plain["self"] == "${self}"
    assert plain["maybe"] is None
    assert resolved(OmegaConf.structured(Optim))["betas"] == [0.9, 0.95]


def test_secrets_of_a_configuration_are_redacted(tmp_path):
    trackway.configure(store=tmp_path / "s", sync="off", redact=["license_plate"])
    plain = resolved(
        {
            "api_key": "abc",
            "nested": [{"WANDB_API_KEY": "xyz", "license_plate": "B-XX 1"}],
            "url": "postgresql://me:hunter2@host/db",
            "note": "use sk-abc123def456 for it",
            "max_tokens": 512,
            "eos_token": "</s>",
        }
    )
    text = json.dumps(plain)
    for secret in ('abc"', "xyz", "B-XX", "hunter2", "sk-abc123def456"):
        assert secret not in text
    assert plain["api_key"] == MASK
    assert plain["max_tokens"] == 512
    assert plain["eos_token"] == "</s>"


class Trap(dict):
    def items(self):
        raise RuntimeError("no")


class Slots:
    __slots__ = ("x",)

    @property
    def __class__(self):
        raise RuntimeError("no")


@dataclasses.dataclass
class Half:
    a: int = 1
    b: int = dataclasses.field(init=False)


def test_nothing_in_a_configuration_makes_it_fail():
    circle = {"name": "a"}
    circle["again"] = [circle]
    deep = leaf = {}
    for _ in range(5000):
        leaf["x"] = leaf = {}
    wide = {"x": 1}
    for _ in range(30):
        wide = {"a": wide, "b": wide}  # a thousand million values, written out
    plain = resolved(
        {"circle": circle, "deep": deep, "trap": Trap(a=1), "slots": Slots(), "half": Half(), "ok": 1}
    )
    assert plain["circle"] == {"name": "a", "again": ["⟨itself⟩"]}
    assert "nested too deep" in json.dumps(plain["deep"], ensure_ascii=False)
    assert plain["trap"] == "⟨cannot be read: RuntimeError⟩"
    assert plain["half"] == {"a": 1, "b": "⟨cannot be read: AttributeError⟩"}
    assert plain["ok"] == 1
    assert "too much of it" in json.dumps(resolved(wide), ensure_ascii=False)
    assert resolved(["no", "names"]) == {"config": ["no", "names"]}
    assert resolved(Slots())["config"].startswith("⟨")


def test_what_is_kept_of_a_configuration_does_not_change_with_it():
    config = {"lr": 1, "inner": {"list": [1]}}
    plain = resolved(config)
    config["inner"]["list"].append(2)
    assert plain == {"lr": 1, "inner": {"list": [1]}}


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        [installed("git"), *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=work/a-b")
    (folder / "train.py").write_text("lr = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def test_the_commit_and_what_was_changed_since(repository):
    clean = gitstate.git(repository, Redactor())
    assert clean["commit"] == git(repository, "rev-parse", "HEAD")
    assert (clean["branch"], clean["dirty"], clean["diff"], clean["untracked"]) == ("work/a-b", False, "", [])
    (repository / "train.py").write_text("lr = 2\n")
    (repository / "new").mkdir()
    (repository / "new" / "é.py").write_text("")
    (repository / "new" / "b.py").write_text("")
    inner = repository / "inner"
    inner.mkdir()
    for folder in (repository, inner):
        state = gitstate.git(folder, Redactor())
        assert state["dirty"] is True
        assert "-lr = 1\n+lr = 2\n" in state["diff"]
        assert state["untracked"] == ["new/"]
        assert state["untracked_files"] == 1
    git(repository, "checkout", "--quiet", "--detach")
    assert gitstate.git(repository, Redactor())["branch"] is None


def test_a_diff_has_no_secrets_and_an_end(repository):
    secrets = ['API_KEY = "correct horse battery"', "password: hunter2hunter2", "x = 'sk-abc123def456ghi'"]
    kept = ['api_key = os.environ["X"]', "max_tokens = 512", "password = ask()"]
    (repository / "train.py").write_text("\n".join([*secrets, *kept, ""]))
    diff = gitstate.git(repository, Redactor())["diff"]
    assert "horse" not in diff
    assert "hunter2" not in diff
    assert "sk-abc" not in diff
    assert diff.count(MASK) == 3
    for line in kept:
        assert f"+{line}\n" in diff
    (repository / "train.py").write_text("".join(f"line {n} {'x' * 90}\n" for n in range(20_000)))
    state = gitstate.git(repository, Redactor())
    assert len(state["diff"]) <= gitstate.MOST_DIFF
    whole = len(git(repository, "diff", "HEAD").encode()) + 1  # git() strips the last line break
    assert state["diff_bytes_left_out"] == whole - len(state["diff"])
    assert state["diff"].endswith("\n")


def test_a_line_of_a_megabyte_costs_no_more_than_its_characters(repository):
    (repository / "train.py").write_text(("a=" * 200_000 + "\n") + "a" * 300_000 + "\n" + "key.x:" * 50_000)
    assert gitstate.git(repository, Redactor())["dirty"] is True


def test_programs_that_a_repository_names_are_not_started(repository):
    told = repository.parent / "told"
    script = repository.parent / "script"
    script.write_text(f"#!/bin/sh\ntouch {told}\n")
    script.chmod(0o755)
    for name in ("diff.external", "core.fsmonitor", "core.pager", "diff.x.textconv", "diff.x.command"):
        git(repository, "config", name, str(script))
    (repository / ".gitattributes").write_text("*.py diff=x\n")
    (repository / "train.py").write_text("lr = 2\n")
    told.unlink(missing_ok=True)
    assert "+lr = 2" in gitstate.git(repository, Redactor())["diff"]
    assert not told.exists()


def test_without_a_repository_or_git_there_is_nothing_to_say(tmp_path, repository, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert gitstate.git(empty, Redactor()) is None
    git(empty, "init", "--quiet")
    assert gitstate.git(empty, Redactor()) is None  # not a single commit
    assert gitstate.git(tmp_path / "nowhere", Redactor()) is None
    monkeypatch.setenv("PATH", str(empty))
    assert gitstate.git(repository, Redactor()) is None


def program(folder: Path, code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(path), *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_looking_around_changes_nothing_and_imports_nothing_heavy(tmp_path):
    code = """
        import os, random, signal, sys, threading
        from trackway.trace.loggers import environment
        random.seed(1)
        def state():
            return (random.getstate(), dict(os.environ), os.getcwd(), signal.getsignal(signal.SIGCHLD),
                    threading.active_count(), sys.path[:], os.umask(os.umask(0o22) or 0o22) and None)
        before = state()
        thread = threading.Thread(target=environment.facts, daemon=True)
        thread.start(); thread.join()
        assert state() == before
        print(*sorted({name.partition('.')[0] for name in sys.modules}))
    """
    done = program(tmp_path, code)
    assert done.returncode == 0, done.stderr
    heavy = {"torch", "numpy", "mlflow", "wandb", "omegaconf", "pydantic", "pandas", "importlib.metadata"}
    assert set(done.stdout.split()) & heavy == set()


def test_a_run_records_what_it_runs_in(tmp_path):
    code = """
        from trackway.trace.loggers import Tracker
        with Tracker(["file"], store="s", config={"lr": 1}): pass
    """
    words = (
        "--api-key",
        "secret1",
        "trainer.wandb_key=secret2",
        "+a.password=secret3",
        "--token=hf_abcdefghijklmn",
    )
    variables = {
        "NCCL_DEBUG": "INFO",
        "VLLM_API_KEY": "secret4",
        "MLFLOW_TRACKING_URI": "http://me:secret5@host:1",
        "AWS_SECRET_ACCESS_KEY": "secret6",
        "SOMETHING_ELSE": "x",
        "PYTHONHASHSEED": "3",
        "HOME": str(tmp_path.parent),
    }
    done = program(tmp_path, code, *words, "lr=2", **variables)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "s" / "runs").iterdir()
    found = read_run(run).environment
    assert "secret" not in json.dumps(found)
    assert "hf_abc" not in json.dumps(found)
    assert found["argv"][1:] == [
        *("--api-key", MASK, f"trainer.wandb_key={MASK}", f"+a.password={MASK}"),
        *(f"--token={MASK}", "lr=2"),
    ]
    assert found["variables"] == {
        "MLFLOW_TRACKING_URI": f"http://{MASK}@host:1",
        "NCCL_DEBUG": "INFO",
        "PYTHONHASHSEED": "3",
        "TRACKWAY_STRICT": "1",
        "VLLM_API_KEY": MASK,
    }
    assert found["cwd"] == f"~/{tmp_path.name}"
    assert found["seeds"] == {"PYTHONHASHSEED": "3"}
    assert found["python"] == sys.version.split()[0]
    assert found["git"] is None
    assert found["host"]


def test_versions_are_those_of_what_is_installed():
    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    known: dict[str, str] = {}
    for each in metadata.distributions():
        known.setdefault(plain(each.name), each.version)
    found = facts()["packages"]
    assert {name: version.partition(" ")[0] for name, version in found.items()} == known


def test_a_package_of_a_commit_says_so(tmp_path, monkeypatch):
    for name, told in {
        "Some.Thing-1.0.dist-info": {"url": "https://me:pw@host/x", "vcs_info": {"commit_id": "abc123"}},
        "other_one-2.0.dist-info": {"url": "file:///x", "dir_info": {"editable": True}},
        "odd-3.dist-info": [],
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "direct_url.json").write_text(json.dumps(told))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = facts()["packages"]
    assert found["some-thing"] == "1.0 (commit abc123)"
    assert found["other-one"] == "2.0 (editable)"
    assert found["odd"] == "3"


def test_the_seed_of_torch_is_known_and_no_device_is_touched():
    torch.manual_seed(7)
    state, numbers = torch.get_rng_state(), random.getstate()
    found = facts()
    assert found["seeds"]["torch"] == 7
    assert found["cuda"]["torch"] == torch.version.cuda
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == numbers
    assert not torch.cuda.is_initialized()


def test_an_odd_machine_costs_only_what_is_odd(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.delattr(sys, "argv")
    found = facts()
    assert found["cwd"] is None
    assert found["argv"] == []
    assert found["packages"]


# The commands.


def track(store: Path, steps: int = 3, **more) -> str:
    """Log a run of a few steps, and give its id."""
    settings = {"loggers": ["file"], "project": "p", "experiment": "e", **more}
    gain = settings.pop("gain", 1.0)
    with Tracker(store=store, **settings) as tracker:
        for step in range(1, steps + 1):
            tracker.log_metrics({"reward/mean": gain * step, "loss": 1 / step, "other": 5}, step=step)
    return tracker.run.id


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "store"


def test_runs_are_listed_without_a_journal(store, cli):
    first = track(store, group="g")
    second = track(store, steps=7, experiment=HOSTILE, gain=0.5)
    assert not (store / "journal").exists()
    done = cli("runs", "--store", str(store))
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines() if line.startswith("20")]
    assert [row[0] for row in rows] == [second, first]
    assert rows[1][1:7] == ["e", "finished", "3", "3", "0.3333", "file"]
    assert rows[0][2:6] == ["finished", "7", "3.5", "0.1429"]
    assert "\x1b" not in done.out
    assert "\u202e" not in done.out
    assert "[red]x[/]" in done.out
    assert done.out.splitlines()[-1] == "2 runs"


def test_the_json_of_runs_has_everything(store, cli):
    run = track(store, group="g", gain=math.nan)
    (row,) = json.loads(cli("runs", "--store", str(store), "--json").out)
    assert row["run"] == run
    assert (row["project"], row["experiment"], row["group"], row["status"]) == ("p", "e", "g", "finished")
    assert (row["steps"], row["last_step"]) == (3, 3)
    assert row["results"] == {"reward/mean": "nan", "loss": pytest.approx(1 / 3)}
    assert row["loggers"] == {
        "file": {"delivered": 3, "pending": 0, "refused": 0, "finished": "finished", "error": None}
    }


def test_a_logger_that_lacks_something_says_how_much(store, cli, fakes, swallowing):  # noqa: F811
    fakes.down().touch()
    with Tracker(["fake", "file"], store=store) as tracker:
        for step in range(5):
            tracker.log_metrics({"loss": 1}, step=step)
        tracker.finish(timeout=1)
    (row,) = json.loads(cli("runs", "--store", str(store), "--json").out)
    assert (row["loggers"]["fake"]["pending"], row["loggers"]["file"]["pending"]) == (5, 0)
    assert "nobody answers" in row["loggers"]["fake"]["error"]
    shown = cli("runs", "--store", str(store)).out
    assert "fake (lacks 5), file" in shown
    assert "trackway sync" in shown


def test_a_run_that_was_killed_is_listed_as_died(store, cli):
    code = """
        import os, signal
        from trackway.trace.loggers import Tracker
        tracker = Tracker(["file"], store="store", experiment="gone")
        tracker.log_metrics({"loss": 1.0}, step=4)
        tracker.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert program(store.parent, code).returncode == -9
    (row,) = json.loads(cli("runs", "--store", str(store), "--json").out)
    assert (row["status"], row["last_step"], row["experiment"]) == ("died", 4, "gone")
    assert "DIED" in cli("runs", "--store", str(store)).out


def test_a_run_that_goes_on_is_listed_as_running(store, cli):
    with Tracker(["file"], store=store) as tracker:
        tracker.log_metrics({"loss": 1.0}, step=1)
        tracker.flush()
        (row,) = json.loads(cli("runs", "--store", str(store), "--json").out)
        assert (row["status"], row["last_step"], row["ended"]) == ("running", 1, None)


def test_where_nothing_was_logged_is_said(store, cli):
    done = cli("runs", "--store", str(store))
    assert done.code == 1
    assert "there is no store" in done.err
    store.mkdir()
    done = cli("runs", "--store", str(store))
    assert (done.code, done.out) == (0, "")
    assert "there is no run" in done.err
    assert json.loads(cli("runs", "--store", str(store), "--json").out) == []
    done = cli("report", "last", "--store", str(store))
    assert done.code == 1
    assert "there is no run yet" in done.err


def test_equal_runs_are_said_to_be_equal(store, cli):
    config = {"lr": 1, "x": [1, {"y": None}]}
    first, second = track(store, config=config, gain=math.nan), track(store, config=config, gain=math.nan)
    done = cli("runs", "diff", first, second, "--store", str(store))
    assert done.code == 0, done.err
    assert done.out.strip().endswith("are equal: configuration, environment and results")
    found = json.loads(cli("runs", "diff", first, second, "--store", str(store), "--json").out)
    assert found == {"a": first, "b": second, "equal": True, "differences": {}, "uncommitted_changes": []}


def test_what_differs_between_two_runs(store, cli, monkeypatch, repository):
    monkeypatch.chdir(repository)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setattr(sys, "argv", ["train.py", "lr=1", "same"])
    torch.manual_seed(1)
    first = track(store, config={"optim": {"lr": 1, "wd": 0.1}, "flag": True, "gone": None, "same": 1})
    (repository / "train.py").write_text("lr = 2\n")
    monkeypatch.delenv("NCCL_DEBUG")
    monkeypatch.setattr(sys, "argv", ["train.py", "lr=2", "same"])
    torch.manual_seed(2)
    second = track(
        store,
        5,
        gain=2,
        experiment="f",
        config={"optim": {"lr": 2, "wd": 0.1}, "flag": 1, "more": {}, "same": 1},
    )
    found = json.loads(cli("runs", "diff", first, "f", "--store", str(store), "--json").out)
    parts = found["differences"]
    assert (found["a"], found["b"], found["equal"]) == (first, second, False)
    assert parts["run"] == [{"name": "experiment", "a": "e", "b": "f"}, {"name": "last step", "a": 3, "b": 5}]
    assert parts["config"] == [
        {"name": "optim.lr", "a": 1, "b": 2},
        {"name": "flag", "a": True, "b": 1},
        {"name": "gone", "a": None},
        {"name": "more", "b": {}},
    ]
    assert parts["variables"] == [{"name": "NCCL_DEBUG", "a": "INFO"}]
    assert parts["seeds"] == [{"name": "torch", "a": 1, "b": 2}]
    assert parts["command"][0]["name"] == "argv"
    assert [row["name"] for row in parts["git"]] == ["uncommitted changes"]
    assert found["uncommitted_changes"][-2:] == ["+-lr = 1", "++lr = 2"]
    assert [row["name"] for row in parts["results"]] == ["reward/mean", "loss"]
    assert parts["results"][0] == {"name": "reward/mean", "a": 3.0, "b": 10}
    assert "packages" not in parts

    shown = cli("runs", "diff", first, second, "--store", str(store)).out
    rows = [line.split() for line in shown.splitlines()]
    assert ["optim.lr", "1", "2"] in rows
    assert ["flag", "true", "1"] in rows
    assert ["gone", "null", "-"] in rows
    assert ["argv", "…", "lr=1", "…", "lr=2"] in rows
    assert ["reward/mean", "3", "10", "+7"] in rows
    assert "  ++lr = 2" in shown.splitlines()


def test_packages_that_differ_are_named(store, cli, tmp_path, monkeypatch):
    first = track(store)
    (tmp_path / "site" / "newcomer-1.5.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    second = track(store)
    found = json.loads(cli("runs", "diff", first, second, "--store", str(store), "--json").out)
    assert found["differences"] == {"packages": [{"name": "newcomer", "b": "1.5"}]}


def test_a_run_is_found_by_how_its_id_begins(store, cli):
    run = track(store)
    done = cli("runs", "diff", run[:-1], "last", "--store", str(store))
    assert "are equal" in done.out
    done = cli("runs", "diff", run, run[:-1] + "zz", "--store", str(store))
    assert done.code == 1
    assert f"did you mean '{run}'" in done.err
    track(store)
    done = cli("runs", "diff", "2", run, "--store", str(store))
    assert done.code == 1
    assert "2 runs begin with '2'" in done.err


def test_what_a_resumed_run_replaced_does_not_count(store, cli):
    run = track(store, 6)
    with Tracker(["file"], store=store, resume=run, project="p", experiment="e") as tracker:
        tracker.log_metrics({"reward/mean": 9, "loss": 1}, step=4)
    assert wait_until(lambda: (store / "runs" / run / "environment-2.json").exists())
    (row,) = json.loads(cli("runs", "--store", str(store), "--json").out)
    assert (row["last_step"], row["results"]["reward/mean"]) == (4, 9)
    record = read_run(store / "runs" / run)
    assert len(record.environments) == 2
    assert record.metrics == runlog.history(store / "runs" / run / runlog.LOG)
    assert list(record.steps) == [1, 2, 3, 4]
    less = read_run(store / "runs" / run, keys_only=True)
    assert dict(less.metrics) == {name: record.metrics[name] for name in ("reward/mean", "loss")}
    assert (list(less.keys), list(less.steps)) == (list(record.keys), list(record.steps))


def test_an_option_of_the_list_stands_before_diff_as_well(store, cli):
    run = track(store)
    assert "are equal" in cli("runs", "--store", str(store), "diff", run, run).out
