"""Which run of MLflow a tracker writes to, for the traces that were recorded meanwhile."""

from __future__ import annotations

import re
import time
from pathlib import Path

from ..printable import without_password
from . import runlog, runs
from .delivery import load

PATIENCE = 30.0
"""Seconds to wait until a tracker that has just begun has its run."""
_LOOK = 0.1


def mlflow_run(directory: Path, patience: float = PATIENCE) -> tuple[str, str] | None:
    """Find the run of MLflow that stands for a tracker's run.

    A tracker's loggers begin on threads of their own, and the first rollouts may end before; so this waits
    until that one has its run.

    Args:
        directory: of the tracker's run, which may be missing.
        patience: seconds to wait at most.

    Returns:
        Its id, and the URI of that MLflow without a password; None when that tracker does not log to MLflow.
    """
    until = time.monotonic() + patience
    while True:
        # Asked for first, so that what a tracker leaves behind when it ends is seen.
        begins = runlog.is_written(directory) and "mlflow" in runs.summary(directory).loggers
        state = load(directory / "mlflow.json").get("state", {})
        if "run_id" in state:
            return str(state["run_id"]), str(state["tracking_uri"])
        if not begins or time.monotonic() > until:
            return None
        time.sleep(_LOOK)


def run_at(store: Path, run: str, uri: str) -> str | None:
    """Give the run of one MLflow that stands for a tracker's run; None when it does not log there.

    Args:
        store: the directory that holds the tracker's run.
        run: its id, as a trace has it.
        uri: of the MLflow.
    """
    if not re.fullmatch(r"[\w-]+", run):  # a trace may come from anywhere
        return None
    found = mlflow_run(store / runlog.FOLDER / run)
    return found[0] if found is not None and found[1] == without_password(uri) else None
