"""Where the lines of each trace stand in the journal."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from . import journal

SCHEMA = """
CREATE TABLE segments (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, writer TEXT NOT NULL,
    read_to INTEGER NOT NULL, torn INTEGER NOT NULL, spans INTEGER NOT NULL
);
CREATE TABLE lines (
    trace_id TEXT NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL
);
CREATE INDEX lines_by_trace ON lines (trace_id);
"""

PORTION = 2_000
"""Lines taken in at once."""
LEFT = ".open.jsonl"
"""Ends the name of the file in which a writer keeps its open spans: what a dead one leaves behind."""
_TRACE_ID = re.compile(rb'"traceId":"([0-9a-f]{32})"')
_SPAN, _OPEN = b'"spanId":"', b'"endTimeUnixNano":"0"'
"""Stand once in each span, and in each that has not ended; inside a text their quotes would be escaped."""

Place = tuple[str, int, int, int]
"""Trace id, offset, length, and how many of the spans have ended."""


class Lines:
    """The places of all lines that the index has taken in.

    Args:
        db: the index's database.
        store: folder of the store.
    """

    def __init__(self, db: sqlite3.Connection, store: Path) -> None:
        self._db = db
        self._store = store

    def take_in(self) -> tuple[list[str], bool]:
        """Note where the next lines stand; give the traces they belong to, and whether there are no more."""
        known = self._known()
        touched: dict[str, None] = {}
        room = PORTION
        segments = journal.segments(self._store)
        # Asked before the segments are read: what a dead writer wrote last is then among their lines.
        left = self._left_behind(known, segments)
        for segment in segments:
            read_to, torn = known.get(segment.path.name, (0, 0))
            if segment.path.stat().st_size <= read_to:
                continue
            places: list[Place] = []
            for offset, line in islice(segment.read(read_to), room):
                room -= 1
                match = _TRACE_ID.search(line)
                if match is None or not line.endswith(b"]}]}]}\n"):
                    torn += bool(line.strip())
                else:
                    ended = line.count(_SPAN) - line.count(_OPEN)
                    places.append((match[1].decode(), offset, len(line), ended))
                read_to = offset + len(line)
            self._note(segment.path.name, segment.writer, read_to, torn, places)
            touched.update(dict.fromkeys(place[0] for place in places))
            if not room:
                return list(touched), False
        for path, changed in left.items():
            places = _places(path.read_bytes())
            # Such a file is replaced, never continued: were its writer alive after all, it is read again.
            self._db.execute(
                "DELETE FROM lines WHERE segment = (SELECT id FROM segments WHERE name = ?)", (path.name,)
            )
            self._note(path.name, path.name.removesuffix(LEFT), changed, 0, places)
            touched.update(dict.fromkeys(place[0] for place in places))
        return list(touched), True

    def _known(self) -> dict[str, tuple[int, int]]:
        rows = self._db.execute("SELECT name, read_to, torn FROM segments")
        return {name: (read_to, torn) for name, read_to, torn in rows}

    def _note(self, name: str, writer: str, read_to: int, torn: int, places: Sequence[Place]) -> None:
        self._db.execute(
            "INSERT INTO segments (name, writer, read_to, torn, spans) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE "
            "SET read_to = excluded.read_to, torn = excluded.torn, spans = spans + excluded.spans",
            (name, writer, read_to, torn, sum(spans for *_, spans in places)),
        )
        (number,) = self._db.execute("SELECT id FROM segments WHERE name = ?", (name,)).fetchone()
        self._db.executemany(
            "INSERT INTO lines (trace_id, segment, offset, length) VALUES (?, ?, ?, ?)",
            [(trace_id, number, offset, length) for trace_id, offset, length, _ in places],
        )

    def _left_behind(
        self, known: Mapping[str, tuple[int, int]], segments: list[journal.Segment]
    ) -> dict[Path, int]:
        """Give the files with the open spans of writers that have died, where they are news.

        Returns:
            Each with the time when it was last changed, in nanoseconds since 1970.
        """
        found: dict[Path, int] = {}
        for path in (self._store / journal.FOLDER).glob(f"*{LEFT}"):
            with suppress(OSError):  # removed by its writer meanwhile
                changed = path.stat().st_mtime_ns
                if known.get(path.name, (0, 0))[0] != changed:
                    found[path] = changed
        if not found:
            return {}
        living = {writer.name for writer in journal.writers(self._store, segments) if writer.alive}
        return {
            path: changed for path, changed in found.items() if path.name.removesuffix(LEFT) not in living
        }

    def of(self, trace_id: str) -> Iterator[tuple[bytes, str, bool]]:
        """Give the lines of a trace that are still there.

        Each comes with its writer, and with whether that one is dead and left it behind.
        """
        rows = self._db.execute(
            "SELECT name, writer, offset, length FROM lines JOIN segments ON segments.id = segment "
            "WHERE trace_id = ? ORDER BY segment, offset",
            (trace_id,),
        ).fetchall()
        for name, writer, offset, length in rows:
            with suppress(OSError), (self._store / journal.FOLDER / name).open("rb") as file:
                file.seek(offset)
                yield file.read(length), writer, name.endswith(LEFT)

    def writers_of(self, trace_id: str) -> set[str]:
        """Name the writers that have written to a trace."""
        rows = self._db.execute(
            "SELECT DISTINCT writer FROM lines JOIN segments ON segments.id = segment WHERE trace_id = ?",
            (trace_id,),
        )
        return {writer for (writer,) in rows}

    def written(self) -> dict[str, int]:
        """Count the spans that ended and stand in the journal, by writer."""
        rows = self._db.execute("SELECT writer, sum(spans) FROM segments GROUP BY writer")
        return dict(rows.fetchall())

    def torn(self, ended: Container[str]) -> int:
        """Count the lines that cannot be read, the last ones of writers that have ended among them."""
        count = 0
        rows = self._db.execute("SELECT name, writer, read_to, torn FROM segments").fetchall()
        for name, writer, read_to, torn in rows:
            path = self._store / journal.FOLDER / name
            rest = writer in ended and path.exists() and path.stat().st_size > read_to
            count += torn + rest
        return count

    def unread(self) -> bool:
        """Say whether the journal holds whole lines, or a dead writer's open spans, that are not here."""
        known = self._known()
        segments = journal.segments(self._store)
        for segment in segments:
            read_to, _ = known.get(segment.path.name, (0, 0))
            if segment.path.stat().st_size > read_to and next(segment.read(read_to), None) is not None:
                return True
        return bool(self._left_behind(known, segments))


def _places(data: bytes) -> list[Place]:
    found = []
    offset = 0
    for line in data.splitlines(keepends=True):
        if match := _TRACE_ID.search(line):
            found.append((match[1].decode(), offset, len(line), 0))
        offset += len(line)
    return found
