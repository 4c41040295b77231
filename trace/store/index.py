"""The index: where each trajectory's lines stand, and one row about each. Safe to delete: it is derived."""

from __future__ import annotations

import os
import sqlite3
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..model import Span, Summary, Trajectory
from . import joining, lines, locks, otlp
from .assemble import assemble, dead, decode_span, unreadable
from .joining import Joins
from .lines import Lines
from .members import Members
from .rows import COLUMNS, row_of, summary_from

FILE = "index.sqlite"
VERSION = 6
_TIMEOUT = 30.0

_SCHEMA = """
CREATE TABLE trajectories (
    trace_id TEXT PRIMARY KEY, named INTEGER NOT NULL, step INTEGER, sample_index BLOB,
    rollout_n INTEGER NOT NULL, attempt INTEGER NOT NULL, validate INTEGER NOT NULL,
    status TEXT NOT NULL, error TEXT, reward REAL, rewards TEXT NOT NULL,
    turns INTEGER NOT NULL, generations INTEGER NOT NULL, tool_calls INTEGER NOT NULL,
    tokens INTEGER NOT NULL, errors INTEGER NOT NULL, spans INTEGER NOT NULL,
    start_ns INTEGER NOT NULL, end_ns INTEGER, policy_version BLOB,
    project TEXT, experiment TEXT, trained_step INTEGER, discarded TEXT,
    truncated INTEGER NOT NULL, ended INTEGER NOT NULL, state INTEGER NOT NULL
);
CREATE INDEX trajectories_by_key ON trajectories (step, sample_index, rollout_n);
CREATE TABLE given_up (trace_id TEXT NOT NULL, writer TEXT NOT NULL, spans INTEGER NOT NULL);
CREATE INDEX given_up_by_trace ON given_up (trace_id);
"""

# Attempts are numbered by their start among those of the same key and experiment, but never below the number
# that the caller gave.
_KEY = ("named", "step", "sample_index", "rollout_n", "validate", "project", "experiment")
_SAME = f"PARTITION BY {', '.join(_KEY)}, iif(named, '', trace_id)"
_ORDER = "ORDER BY attempt, start_ns, trace_id"
_NUMBERED = f"""
SELECT *, nth + max(0, max(attempt - nth) OVER (PARTITION BY same ORDER BY nth)) AS effective
FROM (
    SELECT {COLUMNS},
        row_number() OVER ({_SAME} {_ORDER}) - 1 AS nth,
        row_number() OVER ({_SAME} ORDER BY attempt DESC, start_ns DESC, trace_id DESC) = 1 AS latest,
        first_value(trace_id) OVER ({_SAME} {_ORDER}) AS same
    FROM trajectories WHERE %s
)
"""
_SAME_STEP = "step IS NULL OR step IN (SELECT step FROM trajectories WHERE %s)"


class Index:
    """The index of one store.

    Args:
        store: folder of the store. Where it cannot be written, the index lives in memory.

    Attributes:
        members: what belongs to one step.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._use(self._connect(store / FILE) if os.access(store, os.W_OK) else self._in_memory())

    def _use(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._lines = Lines(db, self._store)
        self._joins = Joins(db)
        self.members = Members(db)

    def _in_memory(self) -> sqlite3.Connection:
        return self._prepare(sqlite3.connect(":memory:", check_same_thread=False))

    def _connect(self, path: Path) -> sqlite3.Connection:
        try:
            return self._prepare(sqlite3.connect(path, timeout=_TIMEOUT, check_same_thread=False))
        except sqlite3.DatabaseError as error:
            if _is_full(error):
                return self._in_memory()
            if type(error) is not sqlite3.DatabaseError:
                raise  # busy: nothing is wrong with the file
        # Not a database, or of another version: it holds nothing that the journal does not.
        for name in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
            name.unlink(missing_ok=True)
        return self._prepare(sqlite3.connect(path, timeout=_TIMEOUT, check_same_thread=False))

    def _prepare(self, db: sqlite3.Connection) -> sqlite3.Connection:
        db.isolation_level = None
        with self._building():
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = OFF")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                # At once: a process may die at any moment, and half of it would be in everybody's way.
                tables = _SCHEMA + lines.SCHEMA + joining.SCHEMA
                db.executescript(f"BEGIN; {tables} PRAGMA user_version = {VERSION}; COMMIT")
            elif version != VERSION:
                db.close()
                raise sqlite3.DatabaseError("another version")
        return db

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Let one process at a time add to the index."""
        lock = None
        with suppress(OSError):  # where the store cannot be written, the index is in memory, of this process
            lock = locks.wait(self._store / "index.lock")
        try:
            yield
        finally:
            if lock is not None:
                locks.release(lock)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def refresh(self, deadline: float | None = None) -> bool:
        """Take in what was appended to the journal since the last time.

        Args:
            deadline: a time of ``time.monotonic`` after which to stop; at least one portion is taken in.

        Returns:
            Whether nothing is left.
        """
        try:
            return self._take_in(deadline)
        except sqlite3.DatabaseError as error:
            if not _is_full(error):
                raise
        self._db.close()
        self._use(self._in_memory())  # what was recorded can be read all the same
        return self._take_in(deadline)

    def _take_in(self, deadline: float | None) -> bool:
        while True:
            with self._building():
                self._db.execute("BEGIN")
                try:
                    touched, done = self._lines.take_in()
                    self._update(touched)
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            if done or (deadline is not None and time.monotonic() > deadline):
                return done

    def _update(self, trace_ids: Iterable[str]) -> None:
        """Bring the rows of traces up to date, and of those that get or lose what was attached to them."""
        facts, trajectories = [], []
        for trace_id in trace_ids:
            told = self._told(trace_id)
            if all(span.kind == "attach" for span, _ in told):
                for span, _ in told:
                    self._joins.note(span)
                    facts.append(trace_id)
            else:
                self._summarise(trace_id, told)
                trajectories.append(trace_id)
        for trace_id in self._joins.update(facts, trajectories):
            self._summarise(trace_id, self._told(trace_id))

    def _summarise(self, trace_id: str, told: list[tuple[Span, str]]) -> None:
        if not told:
            return  # the files that held them are gone
        spans = [span for span, _ in told] + self._facts(trace_id)
        places = ", ".join("?" for _ in COLUMNS.split(","))
        # One trace that cannot be understood must not keep anybody from all the others.
        try:
            trajectory = assemble(spans, alive=True)
            row = row_of(trajectory)
            self._db.execute(f"SELECT {places}", row)
        except Exception as error:
            trajectory = unreadable(spans, error)
            row = row_of(trajectory)
        self._db.execute(f"INSERT OR REPLACE INTO trajectories ({COLUMNS}) VALUES ({places})", row)
        self._note_given_up(trajectory, told)

    def _note_given_up(self, trajectory: Trajectory, told: list[tuple[Span, str]]) -> None:
        """Note which writers opened spans that have not ended: those that died with them, or gave them up."""
        self._db.execute("DELETE FROM given_up WHERE trace_id = ?", (trajectory.trace_id,))
        unended = [span.span_id for span in trajectory.spans if span.end_ns is None]
        if unended:
            writers = {span.span_id: writer for span, writer in told}
            counts = Counter(writers[span_id] for span_id in unended)
            rows = [(trajectory.trace_id, writer, count) for writer, count in counts.items()]
            self._db.executemany("INSERT INTO given_up VALUES (?, ?, ?)", rows)

    def spans(self, trace_id: str) -> list[Span]:
        """Read the spans of one trace from the journal, and after them what was attached to it.

        Lines that cannot be read are left out.
        """
        return self._own_spans(trace_id) + self._facts(trace_id)

    def _own_spans(self, trace_id: str) -> list[Span]:
        return [span for span, _ in self._told(trace_id)]

    def _told(self, trace_id: str) -> list[tuple[Span, str]]:
        """Give the spans of a trace, each with the writer that tells of it."""
        told: list[tuple[Span, str]] = []
        for line, writer, left_behind in self._lines.of(trace_id):
            with suppress(ValueError):
                found = [decode_span(raw, resource) for raw, resource in otlp.spans_of(line)]
                told += ((dead(span) if left_behind else span, writer) for span in found)
        return told

    def _facts(self, trace_id: str) -> list[Span]:
        return [span for fact in self._joins.facts_of(trace_id) for span in self._own_spans(fact)]

    def ends(self, trace_id: str) -> dict[str, int]:
        """Give the spans of one trace that have ended, each with that moment in nanoseconds since 1970."""
        found: dict[str, int] = {}
        for line, *_ in self._lines.of(trace_id):
            with suppress(ValueError, KeyError, TypeError):
                found.update((raw["spanId"], int(raw["endTimeUnixNano"])) for raw, _ in otlp.spans_of(line))
        return {span_id: end_ns for span_id, end_ns in found.items() if end_ns}

    def writers_of(self, trace_id: str) -> set[str]:
        """Name the writers that have written to a trace; who attached to it is not among them."""
        return self._lines.writers_of(trace_id)

    def rows(
        self, where: str = "", values: Iterable[Any] = (), order: str = "", *, among: str = ""
    ) -> list[tuple[Summary, bool, bool]]:
        """Give summaries, each with whether its root span has ended and whether it is the latest attempt.

        Args:
            where, values, order: which ones, in which order.
            among: a condition that all of them meet, so that attempts need not be counted in every step.
        """
        numbered = _NUMBERED % (_SAME_STEP % among if among else "1")
        sql = f"SELECT {COLUMNS}, effective, latest, ended FROM ({numbered}) {where} {order}"
        return [
            (summary_from(tuple(row), effective), bool(ended), bool(latest))
            for *row, effective, latest, ended in self._db.execute(sql, tuple(values))
        ]

    def attempt(self, trace_id: str) -> int | None:
        """Give the number of the attempt that a trajectory is; None when it has no key or is not known."""
        same = " AND ".join(f"other.{name} IS this.{name}" for name in _KEY)
        rows = self._db.execute(
            "SELECT other.trace_id, other.attempt FROM trajectories AS other, trajectories AS this "
            f"WHERE this.trace_id = ? AND this.named AND {same} "
            "ORDER BY other.attempt, other.start_ns, other.trace_id",
            (trace_id,),
        )
        number = -1
        for other, given in rows:
            number = max(int(given), number + 1)
            if other == trace_id:
                return number
        return None

    def totals(self) -> tuple[int, int, int]:
        """Count trajectories, their spans (those attached to them included), and trajectories that died."""
        query = "SELECT count(*), coalesce(sum(spans), 0), count(*) FILTER (WHERE status = 'died') "
        trajectories, spans, died = self._db.execute(query + "FROM trajectories").fetchone()
        return trajectories, spans, died

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let several questions be answered by the same state, whatever others take in meanwhile."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("COMMIT")

    def written(self) -> dict[str, int]:
        """Count the spans that ended and stand in the journal, by writer."""
        return self._lines.written()

    def given_up(self) -> dict[str, int]:
        """Count the spans of trajectories that have not ended and will not, as far as is known, by writer."""
        return dict(self._db.execute("SELECT writer, sum(spans) FROM given_up GROUP BY writer").fetchall())

    def torn(self, ended: Container[str]) -> int:
        """Count the lines that cannot be read, the last ones of writers that have ended among them."""
        return self._lines.torn(ended)

    def sizes(self) -> list[tuple[str, int, bool]]:
        """Give every trace id with its state and whether its root has ended or was given up, oldest first.

        The state is a number that changes with what a trajectory consists of.
        """
        rows = self._db.execute("SELECT trace_id, state, ended FROM trajectories ORDER BY start_ns")
        return [(trace_id, state, bool(ended)) for trace_id, state, ended in rows]

    def unfinished(self) -> list[tuple[str, int, bool]]:
        """Give the trace ids whose root has not ended, with their states and whether the root has died."""
        rows = self._db.execute("SELECT trace_id, state, status = 'died' FROM trajectories WHERE NOT ended")
        return [(trace_id, state, bool(died)) for trace_id, state, died in rows]

    def latest_ends(self) -> Iterator[tuple[str, int, int | None]]:
        """Give the trace ids whose root has ended or was given up, what changed last first.

        Each comes with its state, and when its root ended, in nanoseconds since 1970.
        """
        # A row that changes is written anew, behind all others.
        return self._db.execute(
            "SELECT trace_id, state, end_ns FROM trajectories WHERE ended ORDER BY rowid DESC"
        )

    def unmatched(self) -> int:
        """Count what was attached to trajectories that are not here."""
        return self._joins.unmatched()

    def unmatched_by_writer(self) -> dict[str, int]:
        """Count what was attached to trajectories that are not here, by writer."""
        rows = self._db.execute(
            "SELECT writer, count(DISTINCT trace_id) FROM attached JOIN lines USING (trace_id) "
            "JOIN segments ON segments.id = segment WHERE joined IS NULL GROUP BY writer"
        )
        return dict(rows.fetchall())

    def trace_ids(self, among: Iterable[str]) -> set[str]:
        """Give those of some trace ids that the index knows."""
        query = "SELECT 1 FROM trajectories WHERE trace_id = ?"
        return {item for item in among if self._db.execute(query, (item,)).fetchone()}

    def trace_ids_like(self, beginning: str) -> set[str]:
        """Give the trace ids that begin with some hexadecimal digits."""
        rows = self._db.execute("SELECT trace_id FROM trajectories WHERE trace_id GLOB ?", (beginning + "*",))
        return {trace_id for (trace_id,) in rows}

    def unread(self) -> bool:
        """Say whether the journal holds whole lines, or a dead writer's open spans, that the index lacks."""
        return self._lines.unread()


def _is_full(error: sqlite3.Error) -> bool:
    return "disk is full" in str(error)
