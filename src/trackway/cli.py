"""The ``trackway`` command.

Exit codes: 0, 1 when something is not there or did not work, 2 for wrong use. What a command needs is
imported inside it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from .cli_json import dumps, in_flight_of, status_of, summary_of, trajectory_of
from .cli_options import (
    AsJson,
    From,
    Project,
    StorePath,
    integer,
    interval_value,
    number,
    sample_id,
    source,
    status_word,
    step_range,
    temperature_value,
)
from .cli_output import fail, leave_stdout, print_view, say, tell, write
from .cli_prune import prune
from .cli_runs import report, runs

if TYPE_CHECKING:
    from trackway.trace.model import Status
    from trackway.trace.store import Store

app = typer.Typer(
    name="trackway",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ROWS = 1000
"""How many rows ``ls`` prints as a table unless told otherwise."""


def main() -> None:
    """Run the command line; a user's mistake ends in one sentence on stderr, not in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="trackway")
    except Exception as error:
        import sqlite3

        from trackway.trace.config import ConfigError
        from trackway.trace.store import StoreError

        if isinstance(error, ConfigError):
            fail(str(error), 2)
        if isinstance(error, StoreError):
            fail(str(error.args[0]) if error.args else str(error))
        if isinstance(error, sqlite3.Error):
            fail(f"the store's index cannot be used: {error}. It may be deleted; it is made again")
        if isinstance(error, OSError):
            leave_stdout()
            fail(str(error))
        raise


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        write(f"trackway {version('trackway')}\n")
        raise typer.Exit


@app.callback()
def _trackway(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Record, find and replay what an LLM agent does in every reinforcement-learning rollout."""


@app.command()
def demo(
    store: StorePath = None,
    prompts: Annotated[int, typer.Option(metavar="N", parser=integer(1), help="Samples in each step.")] = 4,
    group: Annotated[int, typer.Option(metavar="N", parser=integer(1), help="Rollouts of each sample.")] = 4,
    turns: Annotated[
        int, typer.Option(metavar="N", parser=integer(1), help="Generations in a rollout, at most.")
    ] = 3,
    temperature: Annotated[
        float, typer.Option(metavar="T", parser=temperature_value, help="Sampling temperature.")
    ] = 0.7,
    steps: Annotated[int, typer.Option(metavar="N", parser=integer(1), help="Training steps.")] = 2,
    validation: Annotated[
        int, typer.Option(metavar="N", parser=integer(0), help="Validation rollouts at the end.")
    ] = 2,
    model: Annotated[bool, typer.Option("--model/--no-model", help="A real model, or a script.")] = True,
) -> None:
    """Record tool-calling rollouts of a small model, and show them."""
    from trackway.demo import run
    from trackway.trace.store import store_path

    code = run(
        store=store_path(store),
        prompts=prompts,
        group=group,
        turns=turns,
        temperature=temperature,
        steps=steps,
        model=model,
        validation=validation,
    )
    raise typer.Exit(code)


@app.command("ls")
def list_trajectories(
    store: StorePath = None,
    place: From = None,
    project: Project = None,
    step: Annotated[
        Any, typer.Option(metavar="N", parser=step_range, help="Only these: 7, 1,5,9, 100..200, '>=100'.")
    ] = None,
    sample: Annotated[
        str | None, typer.Option(metavar="ID", help="Only this sample, as in a key: 17 or task%2F3.")
    ] = None,
    rollout: Annotated[
        int | None, typer.Option(metavar="N", parser=integer(), help="Only rollouts with this number.")
    ] = None,
    validate: Annotated[
        bool | None, typer.Option("--validate/--train", help="Only validation, or only training.")
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(callback=status_word, metavar="S", help="Only ok, error, cancelled, running or died."),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(metavar="R", parser=number, help="Only rewards from here.")
    ] = None,
    max_reward: Annotated[
        float | None, typer.Option(metavar="R", parser=number, help="Only rewards up to here.")
    ] = None,
    experiment: Annotated[str | None, typer.Option(metavar="NAME", help="Only this experiment.")] = None,
    in_flight: Annotated[
        bool, typer.Option("--in-flight", help="What runs now and what it does, the longest silent first.")
    ] = False,
    errors: Annotated[
        bool, typer.Option("--errors", help="Only those in which some call failed, as a tool.")
    ] = False,
    newest: Annotated[bool, typer.Option("--newest", help="The latest first.")] = False,
    limit: Annotated[
        int | None, typer.Option(metavar="N", parser=integer(1), help="At most this many.")
    ] = None,
    all_attempts: Annotated[
        bool, typer.Option("--all-attempts", help="Also attempts that a later one replaced.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List trajectories, one line each."""
    if in_flight:
        not_with_it = {
            "--from": place,
            "--status": status,
            "--min-reward": min_reward,
            "--max-reward": max_reward,
            "--newest": newest or None,
            "--all-attempts": all_attempts or None,
        }
        for option, given in not_with_it.items():
            if given is not None:
                raise typer.BadParameter(f"{option} does not go with --in-flight, which lists what runs now")
    rows = limit or (None if as_json else ROWS)
    chosen: dict[str, Any] = {
        "step": step,
        "sample": sample_id(sample),
        "rollout": rollout,
        "validate": validate,
        "experiment": experiment,
    }
    if in_flight:
        _list_in_flight(_open(store), chosen, errors, rows, limit, as_json)
        return
    found = source(store, place, project).query(
        **chosen,
        status=cast("Status | None", status),
        min_reward=min_reward,
        max_reward=max_reward,
        all_attempts=all_attempts,
        newest=newest,
    )
    matching = (summary for summary in found if summary.errors or not errors)
    shown = list(islice(matching, rows))
    if as_json:
        _write_array([summary_of(summary) for summary in shown])
        return
    if not shown:
        say("no trajectory matches" + ("; `trackway status` says what the store holds" if not place else ""))
        return
    from trackway.viewers.tables import table

    more = next(matching, None) is not None
    print_view(table(shown, more=more), whole_lines=True)
    if more and limit is None:
        say(_MORE.format(ROWS))


_MORE = "there are more than these {:,}; narrow the search or give --limit"


def _list_in_flight(
    store: Store, chosen: dict[str, Any], errors: bool, rows: int | None, limit: int | None, as_json: bool
) -> None:
    import time

    found = [each for each in store.in_flight(**chosen) if each.summary.errors or not errors]
    shown = found[:rows]
    now = time.time_ns()
    if as_json:
        _write_array([in_flight_of(each, now) for each in shown])
        return
    died = sum(1 for _ in store.query(**chosen, status="died", all_attempts=True))
    from trackway.viewers.tables import died_with, in_flight_table

    if not shown:
        say(f"no rollout runs{died_with(died)}")
        return

    more = len(found) > len(shown)
    print_view(in_flight_table(shown, now, died=died, more=more), whole_lines=True)
    if more and limit is None:
        say(_MORE.format(ROWS))


def _write_array(rows: Sequence[dict[str, Any]]) -> None:
    write("[" + ",".join(f"\n{dumps(row)}" for row in rows) + ("\n]\n" if rows else "]\n"))


# A key without a step begins with a dash, as in -/17/0, and is no option.
@app.command(context_settings={"ignore_unknown_options": True})
def show(
    name: Annotated[str, typer.Argument(metavar="KEY|ID", help="1/17/0, val/1/17/0, or a trace id.")],
    store: StorePath = None,
    place: From = None,
    project: Project = None,
    full: Annotated[bool, typer.Option("--full", help="Cut nothing.")] = False,
    turn: Annotated[int | None, typer.Option(metavar="N", parser=integer(), help="Only turn N.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trajectory: turns, tool calls, errors, rewards."""
    from trackway.viewers.terminal import replay

    trajectory = source(store, place, project).load(name)
    try:
        view = replay(trajectory, full=full, turn=turn)
    except LookupError as error:
        fail(str(error.args[0]))
    if as_json:
        write(dumps(trajectory_of(trajectory, turn)) + "\n")
    else:
        print_view(view)


@app.command()
def status(
    store: StorePath = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", parser=interval_value, help="How often --watch looks; else each second."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what the store holds and what is still to be sent."""
    if interval is not None and not watch:
        raise typer.BadParameter("--interval says how often --watch looks, and goes with it only")
    if watch:
        if as_json:
            raise typer.BadParameter("--json prints the state once and does not go with --watch")
        from trackway.trace.store import store_path

        from .cli_watch import watch as watch_store

        watch_store(store_path(store), 1.0 if interval is None else interval)
        return
    from .cli_watch import followed

    opened = _open(store)
    state, path = opened.status(), str(opened.path)
    if as_json:
        write(dumps(status_of(state, path, followed(opened.path))) + "\n")
        return
    from trackway.viewers.state import status_view

    print_view(status_view(state, path, followed=followed(opened.path)), whole_lines=True)


@app.command()
def sync(
    store: StorePath = None,
    follow: Annotated[
        bool, typer.Option("--follow/--once", help="Wait for more, or stop when done.")
    ] = False,
) -> None:
    """Send what is pending to destinations, and to the loggers of runs."""
    from trackway.trace.exporters.sync import is_followed, run
    from trackway.trace.store import store_path

    path = store_path(store)
    behind = not follow and not _catch_up(path)
    if not follow and (path / "runs").is_dir() and not (path / "journal").is_dir():
        raise typer.Exit(behind)
    opened = _open(store)
    try:
        code = run(opened.path, follow=follow, say=tell)
    except KeyboardInterrupt:
        code = 0 if follow else 130
    if not follow and code == 0 and is_followed(opened.path):
        # The follower did the work, or failed to; run() knows only that it is there.
        for name, destination in opened.status().destinations.items():
            if destination.last_error:
                tell(f"{name}: {destination.last_error}")
                code = 1
    raise typer.Exit(code or behind)


def _catch_up(path: Path) -> bool:
    """Bring what the loggers of ended runs lack; say whether they have everything now."""
    if not (path / "runs").is_dir():
        return True
    from trackway.trace.loggers.catchup import catch_up

    return catch_up(path, tell)


app.command()(prune)
app.add_typer(runs, name="runs")
app.command()(report)


@app.command()
def ui(
    store: StorePath = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", parser=integer(1, 65535), help="Port to listen on.")
    ] = 5000,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Open the trajectories in the MLflow UI."""
    from importlib.util import find_spec

    path = _open(store).path
    if find_spec("mlflow") is None:
        fail("the MLflow UI needs the package mlflow: pip install 'trackway[mlflow]'")
    from trackway.trace.exporters.mlflow import tracking_uri
    from trackway.trace.exporters.sync import load_settings
    from trackway.trace.exporters.text import short_name

    from .cli_ui import serve, visit

    config = load_settings(path)
    uri, experiment = tracking_uri(path, config.tracking_uri), short_name(config.project)
    if uri.startswith(("http://", "https://")):
        visit(uri, experiment, browser=not no_open)
    else:
        serve(path, uri, experiment, host, port, browser=not no_open)


def _open(path: Path | None) -> Store:
    from trackway.trace.store import open_store

    return open_store(path)
