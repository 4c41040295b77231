"""``trackway runs`` and ``trackway report``: the runs of a store, what differs between two, all of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_json import difference_of, dumps, run_of
from .cli_options import AsJson, StorePath
from .cli_output import fail, print_view, say, tell, write

if TYPE_CHECKING:
    from trackway.trace.loggers.reading import RunRecord
    from trackway.trace.store import Store

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Its id or how that begins, an experiment's name, or 'last'.")
]

runs = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@runs.callback()
def list_runs(context: typer.Context, store: StorePath = None, as_json: AsJson = False) -> None:
    """List the runs whose metrics were logged, or compare two."""
    if context.invoked_subcommand is not None:
        context.obj = store
        return
    import time

    from trackway.trace.loggers import runs as stored
    from trackway.trace.loggers.reading import read_run

    folder = _folder(store)
    records = [read_run(run.directory, keys_only=True) for run in stored.list_runs(folder)]
    if as_json:
        write("[" + ",".join(f"\n{dumps(run_of(record))}" for record in records))
        write("\n]\n" if records else "]\n")
        return
    if not records:
        say(f"there is no run in {folder}; a Tracker begins one")
        return
    from trackway.viewers.runs import runs_table

    print_view(runs_table(records, time.time()), whole_lines=True)


@runs.command()
def diff(
    context: typer.Context, a: RunName, b: RunName, store: StorePath = None, as_json: AsJson = False
) -> None:
    """Say what differs: configuration, environment, results."""
    from trackway.trace.loggers.comparing import changes, differences

    folder = _folder(store or context.obj)
    one, other = _read(folder, a), _read(folder, b)
    found, code = differences(one, other), changes(one, other)
    if as_json:
        parts = {part: [difference_of(row) for row in rows] for part, rows in found.items()}
        both = {"a": one.run.id, "b": other.run.id, "equal": not found}
        write(dumps({**both, "differences": parts, "uncommitted_changes": code}) + "\n")
        return
    from trackway.viewers.runs import diff_view

    print_view(diff_view(one, other, found, code), whole_lines=True)


def report(
    run: RunName,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Where to write; else the current directory.")
    ] = Path(),
    store: StorePath = None,
) -> None:
    """Write a report of a run, as Markdown and as HTML."""
    from trackway.viewers.report import report_of
    from trackway.viewers.report_html import html
    from trackway.viewers.report_markdown import markdown

    folder = _folder(store)
    record = _read(folder, run)
    pages = report_of(record, _rollouts(folder, record))
    out.mkdir(parents=True, exist_ok=True)
    for suffix, render in (("md", markdown), ("html", html)):
        path = out / f"{record.run.id}.{suffix}"
        path.write_text(render(pages), encoding="utf-8")
        tell(str(path))


def _folder(path: Path | None) -> Path:
    from trackway.trace.store import StoreError, store_path

    folder = store_path(path)
    if not folder.is_dir():
        raise StoreError(
            f"there is no store at {folder}: nothing was logged there yet. "
            "Name another one with --store PATH or TRACKWAY_STORE"
        )
    return folder


def _read(folder: Path, name: str) -> RunRecord:
    from trackway.trace.config import ConfigError
    from trackway.trace.loggers.reading import read_run
    from trackway.trace.loggers.runs import find

    try:
        return read_run(find(folder, name))
    except ConfigError as error:
        fail(str(error))


def _rollouts(folder: Path, record: RunRecord) -> Any:
    """Give the run's trajectories; None where nothing but runs is kept."""
    from trackway.trace.store import journal, open_store

    if not (folder / journal.FOLDER).is_dir():
        return None
    from trackway.trace.loggers.rollouts import rollouts

    store: Store = open_store(folder)
    try:
        return rollouts(store, record)
    finally:
        store.close()
