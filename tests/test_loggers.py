"""What holds for every logger that an entry point names, whatever it writes to: the contract of them all."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from trackway import ExperimentLogger
from trackway.trace.loggers import choosing

from .programs import run
from .test_logger_notify import Hook, Mailbox, mail_server

NAMES = sorted(point.name for point in entry_points(group=choosing.GROUP))
LIVES = """
    import json, math, sys, threading
    import numpy as np
    import torch
    from contextlib import nullcontext, redirect_stdout
    from pathlib import Path
    from trackway import Tracker

    name, settings = {name!r}, {settings!r}
    odd = "[red]x[/]\\x1b[2J\\u202e<script>\\udc80\\n奖励"
    row = {{"sample_index": 7, "rollout_n": 0, "prompt": odd, "completion": odd, "score": math.nan}}
    Path("folder/below").mkdir(parents=True)
    Path("folder/below/a.txt").write_text("a")

    def everything(tracker, step):
        tracker.log_config({{"lr": 1e-6, odd: [odd, None, {{"a": math.inf}}], "step": step}})
        bfloat16 = torch.tensor(0.5, dtype=torch.bfloat16)
        tracker.log_metrics({{"loss": bfloat16, "n": np.int8(3), "on": True}}, step)
        infinite = {{"nan": math.nan, "up": math.inf, "down": -math.inf, "big": 10**400}}
        tracker.log_metrics({{**infinite, "loss": 0.25}}, step)
        names = odd, "step", "_step", "a//b", "a/b", "KL", "kl", "x" * 400
        tracker.log_metrics({{name: n for n, name in enumerate(names)}}, step)
        tracker.log_metrics({{"lengths": np.arange(100.0), "nothing": np.full(8, math.nan)}}, step)
        tracker.log_metrics({{"loss": 0.1, "val/acc": 1}}, step + 5)
        tracker.log_metrics({{"loss": 0.2}}, step + 2)
        tracker.log_generations([row, {{**row, "rollout_n": 1, "judge": odd}}], step + 5)
        messages = [{{"role": "user", "content": odd}}]
        tracker.log_generations([{{**row, "sample_index": 8, "prompt": messages}}], step + 6)
        tracker.log_artifact(b"weights", "final/model.bin")
        tracker.log_artifact("folder", f"final/{{odd}}")
        tracker.alert("halfway " + odd, odd, "error", step + 5)

    def life(step, **more):
        tracker = Tracker([name], project="math", experiment="grpo", **more, **{{name: settings}})
        everything(tracker, step)
        tracker.flush()
        print(json.dumps(tracker.behind), file=sys.__stdout__, flush=True)
        tracker.finish()
        tracker.finish("failed")
        tracker.log_metrics({{"loss": 9.0}}, 99)
        return tracker.run.id

    with redirect_stdout(sys.stderr):
        first = life(1)
        life(4, resume=first)
        # Not from the main thread, and beside another one.
        other = {{"experiment": "beside", "project": "math", name: settings}}
        with nullcontext() if {alone} else Tracker([name], **other) as tracker:
            thread = threading.Thread(target=life, args=(1,))
            thread.start()
            thread.join()
            if tracker is not None:
                everything(tracker, 1)
"""
ALONE = ("swanlab",)
"""Whose package knows one run at a time in a process."""


@pytest.fixture
def settings(tmp_path) -> Iterator[dict[str, Any]]:
    """Give what each logger needs to work here, without anything beyond this machine."""
    with ExitStack() as servers:
        hook = Hook()
        hook.start()
        servers.callback(hook.stop)
        port = servers.enter_context(mail_server(Mailbox()))
        yield {
            "wandb": {"offline": True},
            "swanlab": {"offline": True, "save_dir": "swanlog"},
            "webhook": {"url": hook.address},
            "email": {
                "host": "127.0.0.1",
                "port": port,
                "sender": "t@example.org",
                "to": "me@example.org",
                "tls": "off",
            },
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_logger_takes_whatever_a_run_has(name, settings, tmp_path):
    code = LIVES.format(name=name, settings=settings.get(name, {}), alone=name in ALONE)
    environment = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "TRACKWAY_STRICT": "1"}
    done = run(tmp_path, code, timeout=200, **environment)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[], [], []]
    runs = sorted((tmp_path / "trackway-store" / "runs").iterdir())
    assert len(runs) == (2 if name in ALONE else 3)
    for directory in runs:
        cursor = json.loads((directory / f"{name}.json").read_text())
        assert (cursor["finished"], cursor["refused"], cursor["error"]) == ("finished", 0, None), done.stderr
        assert cursor["offset"] == (directory / "log.jsonl").stat().st_size
        assert cursor["delivered"] > 10
    assert "lacks" not in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_logger_takes_the_settings_that_it_names(name):
    logger = choosing.load(name)
    assert issubclass(logger, ExperimentLogger)
    assert not inspect.isabstract(logger)
    _, run_, *more = inspect.signature(logger.__init__).parameters.values()
    assert run_.name == "run"
    assert {each.kind for each in more} <= {inspect.Parameter.KEYWORD_ONLY}
    assert logger.secrets <= logger.settings
    assert all(each.name in logger.settings or each.default is not each.empty for each in more)
    for method in ("log_metrics", "log_config", "log_artifact", "log_generations", "alert", "finish"):
        theirs = inspect.signature(getattr(logger, method)).parameters
        assert list(theirs) == list(inspect.signature(getattr(ExperimentLogger, method)).parameters)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_the_loggers_names_each_setting(name):
    page = (Path(__file__).parent.parent / "docs" / "loggers.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    assert [each for each in choosing.load(name).settings if f"`{each}`" not in line] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_logger_knows_no_other_settings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(choosing.ConfigError, match="there is no setting 'colour'"):
        choosing.prepare(name, {"colour": 1}, offline=False)
