"""How far each destination is: which trajectories it has, with how many spans, and which it refused."""

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

_COUNT = 2**32 - 1
"""The part of a trajectory's state that is its number of spans, see ``Store.due``."""
_SPANS = f"(spans & {_COUNT})"


def cursor_name(backend: str, place: str | None) -> str:
    """Name the cursor of a backend: where it is moved to another place, everything is sent there again.

    The password of an address is no part of it: names are printed and logged, and a new password is no move.
    """
    return backend if place is None else without_password(f"{backend} at {place}")


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
    """

    exported: int
    refused: int
    last_error: str | None


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
                self._db, has_tables = _open_to_read(path)
                if not has_tables:  # the follower may be about to make them
                    self.close()
        else:
            self._db = sqlite3.connect(path, timeout=_TIMEOUT, check_same_thread=False)
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def delivered(self, destination: str) -> dict[str, int]:
        """Give the trajectories that a destination has or refused, with the state that was sent."""
        if self._db is None:
            return {}
        rows = self._db.execute("SELECT trace_id, spans FROM exported WHERE destination = ?", (destination,))
        return dict(rows.fetchall())

    def states(self, destination: str, among: Sequence[str]) -> dict[str, int]:
        """Give those of some trace ids, at most some hundreds, that a destination has or refused."""
        if self._db is None:
            return {}
        places = ", ".join("?" for _ in among)
        rows = self._db.execute(
            f"SELECT trace_id, spans FROM exported WHERE destination = ? AND trace_id IN ({places})",
            (destination, *among),
        )
        return dict(rows.fetchall())

    def progress(self) -> dict[str, Progress]:
        """Give the progress of every destination that was ever tried."""
        if self._db is None:
            return {}
        rows = self._db.execute(
            f"SELECT name, last_error, coalesce(sum({_SPANS}) FILTER (WHERE refused IS NULL), 0), "
            f"coalesce(sum({_SPANS}) FILTER (WHERE refused IS NOT NULL), 0) "
            "FROM destinations LEFT JOIN exported ON destination = name GROUP BY name"
        )
        return {
            name: Progress(exported, refused, error) for name, error, exported, refused in rows.fetchall()
        }

    def errors(self) -> dict[str, str]:
        """Give why the last delivery failed, for each destination where it did."""
        if self._db is None:
            return {}
        rows = self._db.execute("SELECT name, last_error FROM destinations WHERE last_error IS NOT NULL")
        return dict(rows.fetchall())

    def store(self, destination: str, spans: Iterable[tuple[str, int]], refused: Mapping[str, str]) -> None:
        """Note a delivery: trace ids with their states, and the reasons of those refused."""
        assert self._db is not None
        with self._db:
            self._db.executemany(
                "INSERT OR REPLACE INTO exported VALUES (?, ?, ?, ?)",
                [(destination, trace_id, count, refused.get(trace_id)) for trace_id, count in spans],
            )
            self._db.execute("INSERT OR REPLACE INTO destinations VALUES (?, NULL)", (destination,))

    def fail(self, destination: str, error: str | None) -> None:
        """Note why a delivery failed; None notes that the destination is there."""
        assert self._db is not None
        with self._db:
            self._db.execute(
                "INSERT INTO destinations VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET last_error = excluded.last_error",
                (destination, error),
            )


def _open_to_read(path: Path) -> tuple[sqlite3.Connection, bool]:
    """Open the file without changing it, but for what a killed follower left half written; that is undone.

    Returns:
        The connection, and whether the tables are there.

    Raises:
        PermissionError: something is half written, and the file may not be written.
    """
    for mode in ("ro", "rw"):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=_TIMEOUT)
        try:
            found = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'destinations'").fetchone()
            return db, found is not None
        except sqlite3.OperationalError as error:
            db.close()
            if "readonly" not in str(error):  # what SQLite says of a journal that it would have to roll back
                raise
    raise PermissionError(
        f"{path} was left half written by an exporting process that was killed, and may not be mended from "
        "here; run `trackway status` as somebody who may write into the store"
    )
