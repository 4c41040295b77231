"""``trackway prune``: delete old traces from MLflow, after a question."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_options import StorePath, integer, mlflow_traces, step_range
from .cli_output import fail, say, tell

if TYPE_CHECKING:
    from trackway.trace.formats.mlflow import MlflowTraces
    from trackway.trace.formats.mlflow_prune import Doomed

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")


def age_value(text: Any) -> float:
    """Read an age, in seconds."""
    match = _AGE.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no age; write a number and s, m, h, d or w: 12h, 7d, 2w")
    return float(match[1]) * _UNITS[match[2]]


def prune(
    store: StorePath = None,
    place: Annotated[
        str | None,
        typer.Option("--from", metavar="mlflow:URI", help="Which MLflow; else where the store exports to."),
    ] = None,
    project: Annotated[str | None, typer.Option(metavar="NAME", help="Experiment of MLflow.")] = None,
    before_step: Annotated[
        int | None, typer.Option(metavar="N", parser=integer(), help="Steps below N.")
    ] = None,
    step: Annotated[
        Any, typer.Option(metavar="N", parser=step_range, help="Only these: 7, 1,5,9, 100..200, '<100'.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="AGE", parser=age_value, help="Begun longer ago: 12h, 7d, 2w.")
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="ID", help="Traces of this MLflow run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete old traces from MLflow; the store keeps everything."""
    if all(given is None for given in (before_step, step, older_than, run)):
        raise typer.BadParameter("say which traces: --before-step N, --step N, --older-than 7d or --run ID")
    if before_step is not None and step is not None:
        raise typer.BadParameter("--before-step and --step both name steps; give one of them")
    if not (yes or dry_run or sys.stdin.isatty()):
        fail("nobody can be asked here: give --yes to delete, or --dry-run to see what would go", 2)
    from trackway.trace.formats.mlflow_prune import choose
    from trackway.trace.store import store_path

    steps = step_range(f"<{before_step}") if before_step is not None else step
    before_ms = None if older_than is None else max(0, int((time.time() - older_than) * 1000))
    traces = mlflow_traces(store, place or "mlflow:", project)
    chosen, others = choose(traces, steps=steps, before_ms=before_ms, run=run)
    if others:
        tell(f"{others:,} that match were not written by Trackway, and stay")
    if not chosen:
        tell(f"nothing to delete in {traces.place}")
        return
    validation = sum(each.validate for each in chosen)
    of_them = f", {validation:,} of them validation" if validation else ""
    tell(f"{_amount(chosen)}{of_them}, in {traces.place}")
    if dry_run:
        tell("nothing was deleted")
    elif yes or typer.confirm("Delete them?"):
        _delete(traces, chosen, store_path(store))
    else:
        tell("nothing was deleted")
        raise typer.Exit(1)


def _delete(traces: MlflowTraces, chosen: list[Doomed], store: Path) -> None:
    from trackway.trace.formats.mlflow_prune import database_of, delete, shrink, size_on_disk
    from trackway.trace.store import StoreError
    from trackway.viewers.words import size

    database = database_of(traces.uri)
    before = 0 if database is None else size_on_disk(database)
    gone: list[Doomed] = []
    try:
        for lot in delete(traces, chosen):
            gone += lot
    except (KeyboardInterrupt, StoreError) as error:
        left = len(chosen) - len(gone)
        tell(f"deleted {_amount(gone)}; {left:,} are left, and the same command goes on with them")
        if isinstance(error, StoreError):
            raise
        raise typer.Exit(130) from None
    tell(f"deleted {_amount(gone)}")
    if database is not None:
        why_not = shrink(traces.uri, database, store)
        after = size_on_disk(database)
        if why_not is None:
            tell(f"{database} went from {size(before)} to {size(after)}")
        else:
            tell(f"{database} stays at {size(after)}: {why_not}")
    say("the journal of the store keeps these rollouts: `trackway ls` and `trackway show` still have them")


def _amount(traces: list[Doomed]) -> str:
    from trackway.viewers.words import count, size

    spans, filled = sum(each.spans for each in traces), sum(each.bytes for each in traces)
    return f"{count(len(traces), 'trace')} with {count(spans, 'span')}, about {size(filled)}"
