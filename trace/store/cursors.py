"""How far each destination is: which trajectories it has, with how many spans, which it refused, and which
were left out there, with what decides that."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..printable import without_password

FILE = "sync.sqlite"
_TIMEOUT = 30.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS exported (
    destination TEXT NOT NULL, trace_id TEXT NOT NULL, spans INTEGER NOT NULL, refused TEXT,
    PRIMARY KEY (destination, trace_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS destinations (name TEXT PRIMARY KEY, last_error TEXT);
"""
_VOLUME = """
CREATE TABLE IF NOT EXISTS sent (destination TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS chosen (
    destination TEXT NOT NULL, trace_id TEXT NOT NULL, step TEXT NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (destination, trace_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS chosen_by_step ON chosen (destination, step);
CREATE TABLE IF NOT EXISTS left_out (
    destination TEXT NOT NULL, trace_id TEXT NOT NULL, spans INTEGER NOT NULL,
    PRIMARY KEY (destination, trace_id)
) WITHOUT ROWID;
"""
"""``spans`` is the state of a trajectory, see ``Store.due``; ``step`` names a step of an experiment."""

_COUNT = 2**32 - 1
"""The part of a trajectory's state that is its number of spans, see ``Store.due``."""
_SPANS = f"(spans & {_COUNT})"


def cursor_name(backend: str, tracking_uri: str | None) -> str:
    """Name the cursor of a backend: where MLflow is moved to another place, everything is sent there again.

    The password of an address is no part of it: names are printed and logged, and a new password is no move.
    """
    if tracking_uri is None or backend != "mlflow":
        return backend
    return without_password(f"{backend} at {tracking_uri}")


def spans_in(state: int) -> int:
    """Give the number of spans in the state of a trajectory."""
    return state & _COUNT


@dataclass(frozen=True, slots=True)
class Progress:
    """What a destination has received.

    Attributes:
        exported: spans it accepted.
        refused: spans of trajectories that it will not take.
        last_error: why the last attempt failed; None when it did not.
        left_out: spans of trajectories that were chosen not to be sent.
        trajectories_left_out: how many these are.
        bytes: what it accepted.
    """

    exported: int
    refused: int
    last_error: str | None
    left_out: int = 0
    trajectories_left_out: int = 0
    bytes: int = 0


class Cursors:
    """The cursors of one store's destinations.

    Args:
        store: folder of the store.
        read_only: never create or change the file.
    """

    def __init__(self, store: Path, *, read_only: bool = False) -> None:
        path = store / FILE
        self._db: sqlite3.Connection | None = None
        if read_only:
            if path.exists():
                self._db, tables = _open_to_read(path)
                if "destinations" not in tables:  # the follower may be about to make them
                    self.close()
                elif "left_out" not in tables:  # made before there was this table: nothing was left out
                    self._db.executescript(_VOLUME.replace("CREATE TABLE", "CREATE TEMP TABLE"))
        else:
            self._db = sqlite3.connect(path, timeout=_TIMEOUT, check_same_thread=False)
            self._db.executescript(f"BEGIN; {_SCHEMA} {_VOLUME} COMMIT")

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def delivered(self, destination: str) -> dict[str, int]:
        """Give the trajectories of which nothing is due: a destination has or refused them, or does without.

        Returns:
            Trace id -> the state that was sent, or left out.
        """
        return self._states(destination, "")

    def states(self, destination: str, among: Sequence[str]) -> dict[str, int]:
        """Give those of ``delivered`` that are among some trace ids, at most some hundreds."""
        places = ", ".join("?" for _ in among)
        return self._states(destination, f"AND trace_id IN ({places})", among)

    def _states(self, destination: str, condition: str, values: Sequence[str] = ()) -> dict[str, int]:
        if self._db is None:
            return {}
        tables = (
            f"SELECT trace_id, spans FROM {table} WHERE destination = ? {condition}"
            for table in ("left_out", "exported")
        )
        rows = self._db.execute(" UNION ALL ".join(tables), (destination, *values) * 2)
        return dict(rows.fetchall())

    def chosen(self, destination: str) -> set[str]:
        """Give the trace ids that were chosen for a destination and are not there yet."""
        assert self._db is not None
        rows = self._db.execute(
            "SELECT trace_id FROM chosen AS c WHERE destination = ? AND NOT EXISTS "
            "(SELECT 1 FROM exported AS e WHERE e.destination = c.destination AND e.trace_id = c.trace_id)",
            (destination,),
        )
        return {trace_id for (trace_id,) in rows}

    def left_out(self, destination: str) -> set[str]:
        """Give the trace ids that a destination does without."""
        assert self._db is not None
        rows = self._db.execute("SELECT trace_id FROM left_out WHERE destination = ?", (destination,))
        return {trace_id for (trace_id,) in rows}

    def used(self, destination: str, step: str) -> int:
        """Give the bytes of what was chosen of a step."""
        assert self._db is not None
        query = "SELECT coalesce(sum(bytes), 0) FROM chosen WHERE destination = ? AND step = ?"
        (used,) = self._db.execute(query, (destination, step)).fetchone()
        return int(used)

    def progress(self) -> dict[str, Progress]:
        """Give the progress of every destination that was ever tried."""
        if self._db is None:
            return {}
        rows = self._db.execute(
            f"SELECT name, coalesce(sum({_SPANS}) FILTER (WHERE refused IS NULL), 0), "
            f"coalesce(sum({_SPANS}) FILTER (WHERE refused IS NOT NULL), 0), last_error, "
            f"(SELECT coalesce(sum({_SPANS}), 0) FROM left_out WHERE destination = name), "
            "(SELECT count(*) FROM left_out WHERE destination = name), "
            "coalesce((SELECT bytes FROM sent WHERE destination = name), 0) "
            "FROM destinations LEFT JOIN exported ON destination = name GROUP BY name"
        )
        return {name: Progress(*progress) for name, *progress in rows.fetchall()}

    def errors(self) -> dict[str, str]:
        """Give why the last delivery failed, for each destination where it did."""
        if self._db is None:
            return {}
        rows = self._db.execute("SELECT name, last_error FROM destinations WHERE last_error IS NOT NULL")
        return dict(rows.fetchall())

    def store(
        self,
        destination: str,
        spans: Iterable[tuple[str, int]],
        refused: Mapping[str, str],
        sent_bytes: int = 0,
    ) -> None:
        """Note a delivery: trace ids with their states, the reasons of those refused, and what was sent."""
        assert self._db is not None
        with self._db:
            self._db.executemany(
                "INSERT OR REPLACE INTO exported VALUES (?, ?, ?, ?)",
                [(destination, trace_id, count, refused.get(trace_id)) for trace_id, count in spans],
            )
            self._db.execute("INSERT OR REPLACE INTO destinations VALUES (?, NULL)", (destination,))
            self._db.execute(
                "INSERT INTO sent VALUES (?, ?) ON CONFLICT (destination) "
                "DO UPDATE SET bytes = bytes + excluded.bytes",
                (destination, sent_bytes),
            )

    def decide(
        self, destination: str, step: str, chosen: Mapping[str, int], left_out: Iterable[tuple[str, int]]
    ) -> None:
        """Note what of a step is sent, each with its bytes, and what is not, each with its state."""
        assert self._db is not None
        with self._db:
            self._db.executemany(
                "INSERT OR IGNORE INTO chosen VALUES (?, ?, ?, ?)",
                [(destination, trace_id, step, size) for trace_id, size in chosen.items()],
            )
            self._leave_out(destination, left_out)

    def leave_out(self, destination: str, spans: Iterable[tuple[str, int]]) -> None:
        """Note the states of trajectories that are left out."""
        assert self._db is not None
        with self._db:
            self._leave_out(destination, spans)

    def _leave_out(self, destination: str, spans: Iterable[tuple[str, int]]) -> None:
        assert self._db is not None
        self._db.executemany(
            "INSERT OR REPLACE INTO left_out VALUES (?, ?, ?)",
            [(destination, trace_id, count) for trace_id, count in spans],
        )

    def fail(self, destination: str, error: str | None) -> None:
        """Note why a delivery failed; None notes that the destination is there."""
        assert self._db is not None
        with self._db:
            self._db.execute(
                "INSERT INTO destinations VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET last_error = excluded.last_error",
                (destination, error),
            )


def _open_to_read(path: Path) -> tuple[sqlite3.Connection, set[str]]:
    """Open the file without changing it, but for what a killed follower left half written; that is undone.

    Returns:
        The connection, and the names of the tables that are there.

    Raises:
        PermissionError: something is half written, and the file may not be written.
    """
    for mode in ("ro", "rw"):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=_TIMEOUT)
        try:
            return db, {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        except sqlite3.OperationalError as error:
            db.close()
            if "readonly" not in str(error):  # what SQLite says of a journal that it would have to roll back
                raise
    raise PermissionError(
        f"{path} was left half written by an exporting process that was killed, and may not be mended from "
        "here; run `trackway status` as somebody who may write into the store"
    )
