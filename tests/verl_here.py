"""Tracing of verl in this process, and what it has left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import trackway
from trackway import open_store
from trackway.trace.model import Trajectory

from . import verl_world


def need_verl() -> None:
    """Skip the test where verl is missing; fail it under CI."""
    if find_spec("verl") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("verl is not installed")


@contextmanager
def tracing(store: Path, backend: str | None = None, *, most: Any = None, **settings: str) -> Iterator[None]:
    """Let verl be traced, as its worker would set it up, until the end of the block."""
    from trackway.trace.integrations.verl import RolloutTraceConfig, install

    install()
    environment = {"TRACKWAY_STORE": str(store)}
    environment |= {f"TRACKWAY_{name.upper()}": value for name, value in settings.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        RolloutTraceConfig.reset()
        RolloutTraceConfig.init("project", "experiment", backend, False, most)
        try:
            yield
        finally:
            trackway.shutdown()
            RolloutTraceConfig.reset()


def recorded(store: Path) -> list[Trajectory]:
    """Give all trajectories of a store, by key."""
    trackway.flush()
    opened = open_store(store)
    return [opened.load(summary.trace_id) for summary in opened.query(all_attempts=True)]


def make_worker(model: Path, *overrides: str) -> Any:
    """Make a worker as ``verl_world.make_worker`` does; the tracing that it sets up is each test's own."""
    with tracing(model / "store"):
        return verl_world.make_worker(model, *overrides)
