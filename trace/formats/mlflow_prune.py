"""Deletes traces that Trackway wrote from MLflow, and says what that frees."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..exporters.election import stand
from ..exporters.mlflow_store import embedded_uri
from ..store import Steps, locks
from .mlflow import MlflowTraces
from .mlflow_rows import is_ours, key_of, size_of, summary_of

BATCH: Final = 100
"""Traces deleted by one call; MLflow's servers take no more."""


@dataclass(frozen=True, slots=True)
class Doomed:
    """A trace that is to be deleted.

    Attributes:
        start_ns: when it began, nanoseconds since 1970.
        bytes: an estimate of what its spans fill.
    """

    trace_id: str
    start_ns: int
    spans: int
    bytes: int
    validate: bool


def choose(
    traces: MlflowTraces, *, steps: Steps | None = None, before_ms: int | None = None, run: str | None = None
) -> tuple[list[Doomed], int]:
    """Find the traces that Trackway wrote and that meet all conditions.

    Args:
        steps: their steps; a trace without a step is in none.
        before_ms: begun before this moment, milliseconds since 1970.
        run: id of the MLflow run that they belong to.

    Returns:
        The traces, oldest first, and how many others the same search found that somebody else wrote.
    """
    found = traces.infos(
        None if steps is None or steps.only is None else f"tags.step = '{steps.only}'",
        None if before_ms is None else f"timestamp_ms < {before_ms}",
        "metadata.`mlflow.sourceRun` IS NOT NULL" if run is not None else None,
    )
    chosen, others = [], 0
    for info in found:
        key = key_of(info)
        if steps is not None and (key is None or key.step not in steps):
            continue
        if run is not None and info.trace_metadata.get("mlflow.sourceRun") != run:
            continue
        if is_ours(info):
            line = summary_of(info, traces.project)
            chosen.append(Doomed(info.trace_id, line.start_ns, line.spans, size_of(info), line.validate))
        else:
            others += 1
    return sorted(chosen, key=lambda each: each.start_ns), others


def delete(traces: MlflowTraces, chosen: list[Doomed]) -> Iterator[list[Doomed]]:
    """Delete traces in their order; give each lot once it is gone.

    Raises:
        StoreError: MLflow fails; those given before are gone, the others are there.
    """
    for start in range(0, len(chosen), BATCH):
        lot = chosen[start : start + BATCH]
        ids = [each.trace_id for each in lot]
        traces.ask(lambda ids=ids: _delete(traces.mlflow, traces.experiment_id, ids))  # type: ignore[misc]
        yield lot


def _delete(mlflow: Any, experiment: str, trace_ids: list[str]) -> None:
    mlflow.delete_traces(experiment_id=experiment, trace_ids=trace_ids)


def database_of(uri: str) -> Path | None:
    """Give the file of an SQLite database; None for anything else."""
    scheme, _, rest = uri.partition(":///")
    if not scheme.startswith("sqlite") or rest.startswith("file:"):
        return None
    return Path(rest.partition("?")[0])


def size_on_disk(database: Path) -> int:
    """Give the bytes that a database and what it has not yet taken in fill."""
    files = (database, database.with_name(f"{database.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def shrink(uri: str, database: Path, store: Path) -> str | None:
    """Give the room that deleted traces leave in an SQLite database back to the disk.

    Only the database inside the store is touched, and only while nobody exports into it.

    Returns:
        Why it was not done; None when it was.
    """
    if uri != embedded_uri(store):
        return (
            f"new traces take the room; `sqlite3 {database} VACUUM` gives it back while nobody writes there"
        )
    lock = stand(store)
    if lock is None:
        return "new traces take the room: a follower exports into it now, so that it cannot be made smaller"
    try:
        if shutil.disk_usage(store).free < 2 * database.stat().st_size:
            return "new traces take the room; to make it smaller, the disk must have twice its size free"
        with closing(sqlite3.connect(database, timeout=20.0)) as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        return f"new traces take the room; it could not be made smaller: {error}"
    finally:
        locks.release(lock)
    return None
