"""The index: where each trajectory's lines stand, and one row about each. Safe to delete: it is derived."""

from __future__ import annotations

import fcntl
import math
import os
import re
import sqlite3
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from ..model import Span, Summary, Trajectory, TrajectoryKey
from . import journal, otlp
from .assemble import assemble, decode_span, unreadable

FILE = "index.sqlite"
VERSION = 3
_TRACE_ID = re.compile(rb'"traceId":"([0-9a-f]{32})"')
_SPAN = b'"spanId":"'
"""Stands once in each span; inside a text its quotes would be escaped."""
_PORTION = 2_000
"""Lines taken in at once."""
_TIMEOUT = 30.0

_SCHEMA = """
CREATE TABLE segments (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, writer TEXT NOT NULL,
    read_to INTEGER NOT NULL, torn INTEGER NOT NULL
);
CREATE TABLE lines (
    trace_id TEXT NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    spans INTEGER NOT NULL
);
CREATE INDEX lines_by_trace ON lines (trace_id);
CREATE TABLE trajectories (
    trace_id TEXT PRIMARY KEY, named INTEGER NOT NULL, step INTEGER, sample_index BLOB,
    rollout_n INTEGER NOT NULL, attempt INTEGER NOT NULL, validate INTEGER NOT NULL,
    status TEXT NOT NULL, error TEXT, reward REAL, rewards TEXT NOT NULL,
    turns INTEGER NOT NULL, generations INTEGER NOT NULL, tool_calls INTEGER NOT NULL,
    tokens INTEGER NOT NULL, errors INTEGER NOT NULL, spans INTEGER NOT NULL,
    start_ns INTEGER NOT NULL, end_ns INTEGER, policy_version BLOB,
    project TEXT, experiment TEXT, ended INTEGER NOT NULL
);
CREATE INDEX trajectories_by_key ON trajectories (step, sample_index, rollout_n);
"""

_COLUMNS = (
    "trace_id, named, step, sample_index, rollout_n, attempt, validate, status, error, reward, rewards, "
    "turns, generations, tool_calls, tokens, errors, spans, start_ns, end_ns, policy_version, project, "
    "experiment, ended"
)

# Attempts are numbered by their start among those of the same key and experiment, but never below the number
# that the caller gave.
_KEY = ("named", "step", "sample_index", "rollout_n", "validate", "project", "experiment")
_SAME = f"PARTITION BY {', '.join(_KEY)}, iif(named, '', trace_id)"
_ORDER = "ORDER BY attempt, start_ns, trace_id"
_NUMBERED = f"""
SELECT *, nth + max(0, max(attempt - nth) OVER (PARTITION BY same ORDER BY nth)) AS effective
FROM (
    SELECT {_COLUMNS},
        row_number() OVER ({_SAME} {_ORDER}) - 1 AS nth,
        row_number() OVER ({_SAME} ORDER BY attempt DESC, start_ns DESC, trace_id DESC) = 1 AS latest,
        first_value(trace_id) OVER ({_SAME} {_ORDER}) AS same
    FROM trajectories
)
"""


class Index:
    """The index of one store.

    Args:
        store: folder of the store. Where it cannot be written, the index lives in memory.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._db = self._connect(store / FILE)

    def _connect(self, path: Path) -> sqlite3.Connection:
        if not os.access(self._store, os.W_OK):
            return self._prepare(sqlite3.connect(":memory:", check_same_thread=False))
        try:
            return self._prepare(sqlite3.connect(path, timeout=_TIMEOUT, check_same_thread=False))
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:
                raise  # busy, or a full disk: nothing is wrong with the file
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
                db.executescript(_SCHEMA)
                db.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                db.close()
                raise sqlite3.DatabaseError("another version")
        return db

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Let one process at a time add to the index."""
        try:
            lock = os.open(self._store / "index.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:
            yield  # a store that cannot be written has an index in memory, of this process alone
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

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
        while True:
            with self._building():
                self._db.execute("BEGIN")
                try:
                    touched, done = self._read_tails()
                    self._summarise(touched)
                    self._db.execute("COMMIT")
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
            if done or (deadline is not None and time.monotonic() > deadline):
                return done

    def _read_tails(self) -> tuple[list[str], bool]:
        """Note where the next lines stand; give the traces they belong to, and whether there are no more."""
        rows = self._db.execute("SELECT id, name, read_to, torn FROM segments")
        known = {name: (number, read_to, torn) for number, name, read_to, torn in rows}
        touched: dict[str, None] = {}
        room = _PORTION
        for segment in journal.segments(self._store):
            number, read_to, torn = known.get(segment.path.name, (None, 0, 0))
            if segment.path.stat().st_size <= read_to:
                continue
            if number is None:
                cursor = self._db.execute(
                    "INSERT INTO segments (name, writer, read_to, torn) VALUES (?, ?, 0, 0)",
                    (segment.path.name, segment.writer),
                )
                number = cursor.lastrowid
            places = []
            for offset, line in islice(segment.read(read_to), room):
                room -= 1
                match = _TRACE_ID.search(line)
                if match is None or not line.endswith(b"]}]}]}\n"):
                    torn += bool(line.strip())
                else:
                    places.append((match[1].decode(), number, offset, len(line), line.count(_SPAN)))
                read_to = offset + len(line)
            self._db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?)", places)
            self._db.execute(
                "UPDATE segments SET read_to = ?, torn = ? WHERE id = ?", (read_to, torn, number)
            )
            touched.update(dict.fromkeys(place[0] for place in places))
            if not room:
                return list(touched), False
        return list(touched), True

    def _summarise(self, trace_ids: Iterable[str]) -> None:
        places = ", ".join("?" for _ in _COLUMNS.split(","))
        for trace_id in trace_ids:
            spans = self.spans(trace_id)
            if spans:
                # One trace that cannot be understood must not keep anybody from all the others.
                try:
                    row = _row(assemble(spans, alive=True))
                    self._db.execute(f"SELECT {places}", row)
                except Exception as error:
                    row = _row(unreadable(spans, error))
                self._db.execute(f"INSERT OR REPLACE INTO trajectories ({_COLUMNS}) VALUES ({places})", row)

    def spans(self, trace_id: str) -> list[Span]:
        """Read the spans of one trace from the journal; lines that cannot be read are left out."""
        spans = []
        for data in self._lines(trace_id):
            with suppress(ValueError):
                spans += [decode_span(raw, resource) for raw, resource in otlp.spans_of(data)]
        return spans

    def _lines(self, trace_id: str) -> Iterator[bytes]:
        rows = self._db.execute(
            "SELECT name, offset, length FROM lines JOIN segments ON segments.id = segment "
            "WHERE trace_id = ? ORDER BY segment, offset",
            (trace_id,),
        ).fetchall()
        for name, offset, length in rows:
            with suppress(OSError), (self._store / journal.FOLDER / name).open("rb") as file:
                file.seek(offset)
                yield file.read(length)

    def writers_of(self, trace_id: str) -> set[str]:
        """Name the writers that have written to a trace."""
        return {
            writer
            for (writer,) in self._db.execute(
                "SELECT DISTINCT writer FROM lines JOIN segments ON segments.id = segment WHERE trace_id = ?",
                (trace_id,),
            )
        }

    def rows(
        self, where: str = "", values: Iterable[Any] = (), order: str = ""
    ) -> list[tuple[Summary, bool, bool]]:
        """Give summaries, each with whether its root span has ended and whether it is the latest attempt."""
        sql = f"SELECT {_COLUMNS}, effective, latest FROM ({_NUMBERED}) {where} {order}"
        return [(_summary(row), bool(row[-3]), bool(row[-1])) for row in self._db.execute(sql, tuple(values))]

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

    def totals(self) -> tuple[int, int]:
        """Count trajectories and their spans."""
        query = "SELECT count(*), coalesce(sum(spans), 0) FROM trajectories"
        trajectories, spans = self._db.execute(query).fetchone()
        return trajectories, spans

    def written(self) -> dict[str, int]:
        """Count the spans that stand in the journal, by writer."""
        return dict(
            self._db.execute(
                "SELECT writer, sum(spans) FROM lines JOIN segments ON segments.id = segment GROUP BY writer"
            ).fetchall()
        )

    def torn(self, ended: Container[str]) -> int:
        """Count the lines that cannot be read, the last ones of writers that have ended among them."""
        count = 0
        rows = self._db.execute("SELECT name, writer, read_to, torn FROM segments").fetchall()
        for name, writer, read_to, torn in rows:
            path = self._store / journal.FOLDER / name
            rest = writer in ended and path.exists() and path.stat().st_size > read_to
            count += torn + rest
        return count

    def sizes(self) -> list[tuple[str, int, bool]]:
        """Give every trace id with its number of spans and whether its root span has ended, oldest first."""
        rows = self._db.execute("SELECT trace_id, spans, ended FROM trajectories ORDER BY start_ns")
        return [(trace_id, spans, bool(ended)) for trace_id, spans, ended in rows]

    def trace_ids(self, among: Iterable[str]) -> set[str]:
        """Give those of some trace ids that the index knows."""
        query = "SELECT 1 FROM trajectories WHERE trace_id = ?"
        return {item for item in among if self._db.execute(query, (item,)).fetchone()}

    def trace_ids_like(self, beginning: str) -> set[str]:
        """Give the trace ids that begin with some hexadecimal digits."""
        rows = self._db.execute("SELECT trace_id FROM trajectories WHERE trace_id GLOB ?", (beginning + "*",))
        return {trace_id for (trace_id,) in rows}

    def unread(self) -> bool:
        """Say whether the journal holds whole lines that the index does not know."""
        known = dict(self._db.execute("SELECT name, read_to FROM segments"))
        return any(
            segment.path.stat().st_size > known.get(segment.path.name, 0)
            and next(segment.read(known.get(segment.path.name, 0)), None) is not None
            for segment in journal.segments(self._store)
        )


def summary_of(trajectory: Trajectory) -> Summary:
    """Give the one line about a trajectory."""
    key = trajectory.key
    return Summary(
        key=key,
        trace_id=trajectory.trace_id,
        status=trajectory.status,
        step=key.step if key else None,
        sample_index=key.sample_index if key else None,
        rollout_n=key.rollout_n if key else 0,
        attempt=key.attempt if key else 0,
        validate=bool(key and key.validate),
        reward=trajectory.reward,
        rewards=dict(trajectory.rewards),
        turns=len(trajectory.turns),
        generations=trajectory.generations,
        tool_calls=len(trajectory.tool_calls),
        tokens=trajectory.tokens,
        errors=trajectory.errors,
        spans=len(trajectory.spans),
        start_ns=trajectory.start_ns,
        end_ns=trajectory.end_ns,
        policy_version=trajectory.policy_versions[0] if trajectory.policy_versions else None,
        project=trajectory.project,
        experiment=trajectory.experiment,
        error=trajectory.error,
    )


def _row(trajectory: Trajectory) -> tuple[Any, ...]:
    line = summary_of(trajectory)
    root = trajectory.root
    return (
        line.trace_id,
        line.key is not None,
        line.step,
        line.sample_index,
        line.rollout_n,
        line.attempt,
        line.validate,
        line.status,
        line.error,
        line.reward,
        orjson.dumps({name: _plain(value) for name, value in line.rewards.items()}).decode(),
        line.turns,
        line.generations,
        line.tool_calls,
        line.tokens,
        line.errors,
        line.spans,
        line.start_ns,
        line.end_ns,
        line.policy_version,
        line.project,
        line.experiment,
        bool(root and root.parent_id is None and root.end_ns is not None),
    )


def _plain(value: float | str) -> float | str:
    # JSON has no NaN and no infinities; float() reads these words back.
    return value if isinstance(value, str) or value - value == 0 else f"\x00{value}"


def _number(value: float | str) -> float | str:
    return float(value[1:]) if isinstance(value, str) and value.startswith("\x00") else value


def _summary(row: tuple[Any, ...]) -> Summary:
    (
        trace_id, named, step, sample_index, rollout_n, _, validate, status, error, reward, rewards, turns,
        generations, tool_calls, tokens, errors, spans, start_ns, end_ns, policy_version, project,
        experiment, _, effective, _,
    ) = row  # fmt: skip
    by_name = {name: _number(value) for name, value in orjson.loads(rewards).items()}
    if reward is None and any(isinstance(value, float) for value in by_name.values()):
        reward = math.nan  # SQLite keeps NaN as NULL
    return Summary(
        key=TrajectoryKey(step, sample_index, rollout_n, bool(validate), effective) if named else None,
        trace_id=trace_id,
        status=status,
        step=step,
        sample_index=sample_index,
        rollout_n=rollout_n,
        attempt=effective,
        validate=bool(validate),
        reward=reward,
        rewards=by_name,
        turns=turns,
        generations=generations,
        tool_calls=tool_calls,
        tokens=tokens,
        errors=errors,
        spans=spans,
        start_ns=start_ns,
        end_ns=end_ns,
        policy_version=policy_version,
        project=project,
        experiment=experiment,
        error=error,
    )
