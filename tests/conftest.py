"""Every test starts with nothing configured, in an environment that steers nothing, and with failures of
Trackway's own raised instead of swallowed."""

import os
import signal
import sys

import hypothesis
import pytest

import trackway
from trackway.trace.capture import runtime

from .loggers_for_tests import fakes as fakes
from .programs import Result


def _forget_settings():
    for name in list(os.environ):
        if name.startswith(("TRACKWAY_", "MLFLOW_", "OTEL_")) or name == "COLUMNS":
            del os.environ[name]


_forget_settings()  # also for fixtures of a whole module
# How long an example takes says something about the machine only.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
# A shell lets what it starts in the background ignore Ctrl-C, and so do programs that tests start in turn.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch):
    monkeypatch.setenv("TRACKWAY_STRICT", "1")
    assert runtime.get() is None, "an earlier test left the recording on"
    yield
    trackway.shutdown()
    # Some packages leave a variable behind: mlflow.set_tracking_uri does.
    _forget_settings()


@pytest.fixture
def swallowing(monkeypatch):
    """Let failures inside Trackway be swallowed, as outside of tests."""
    monkeypatch.delenv("TRACKWAY_STRICT")


@pytest.fixture(scope="session")
def blank_mlflow(tmp_path_factory):
    """Give a database of MLflow without traces, to be copied: making one takes seconds."""
    from mlflow.tracing.client import TracingClient

    path = tmp_path_factory.mktemp("blank") / "mlflow.db"
    TracingClient(tracking_uri=f"sqlite:///{path}").store.engine.dispose()
    return path


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run the ``trackway`` command in this process."""
    from trackway.cli import main

    def run(*args: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["trackway", *args])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        code = stop.value.code
        return Result(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run
