"""Brings the loggers of runs what they missed: what ``trackway sync`` does besides sending trajectories."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..config_values import ConfigError
from . import choosing, runs
from .base import Run, Status
from .delivery import Delivery, load
from .runlog import RunLog

PATIENCE = 20.0
"""Seconds for which a destination that does not answer is tried."""


def catch_up(store: Path, say: Callable[[str], None], patience: float = PATIENCE) -> bool:
    """Bring to every logger of every run that has ended what it lacks, and close it there.

    Args:
        store: the directory that holds the runs.
        say: is told, in a line for each, what was brought and what could not be.
        patience: seconds for each logger.

    Returns:
        Whether all loggers of all these runs have everything now.
    """
    done = True
    for run in runs.list_runs(store):
        lacking = list(_lacking(run))
        if not lacking:
            continue
        try:
            log = RunLog(run.directory)
        except BlockingIOError:  # its own process serves them
            continue
        try:
            if run.status == "running":  # it has ended between the two looks
                run = runs.summary(run.directory)
            status: Status = "finished" if run.status == "finished" else "failed"
            if run.status in ("killed", "died"):
                status = "killed"
                runs.end(_run(run), status)
            for name in lacking:
                done &= _bring(run, name, status, say, patience)
        finally:
            log.close()
    return done


def _lacking(run: runs.RunSummary) -> Iterator[str]:
    for name in run.loggers:
        if not load(run.directory / f"{name}.json").get("finished"):
            yield name


def _run(run: runs.RunSummary) -> Run:
    return Run(
        run.id,
        run.project,
        run.experiment,
        run.directory,
        group=run.group,
        rank=run.rank,
        started=run.started,
        resumed=True,
    )


def _bring(
    run: runs.RunSummary, name: str, status: Status, say: Callable[[str], None], patience: float
) -> bool:
    what = f"run {run.id}: {name}"
    try:
        make, _ = choosing.prepare(name, run.loggers[name], offline=False)
    except (ConfigError, KeyError) as error:
        say(f"{what} is left as it is: {error.args[0] if error.args else error}")
        return False
    delivery = Delivery(name, make, _run(run))
    missing = delivery.pending
    delivery.end(status, time.monotonic() + patience)
    if delivery.catch_up():
        delivery.close(status)
    if delivery.finished is None:
        say(f"{what} lacks {delivery.pending:,} records: {delivery.error}")
        return False
    say(f"{what} was brought {missing:,} records and closed")
    return True
