"""The journal: append-only files of spans, one writer each, and what each writer says of itself.

``journal/<writer>.<n>.jsonl``   segments: OTLP JSON lines, written once and never changed
``journal/<writer>.open.jsonl``  spans that have been open for a while; rewritten as they come and go
``journal/<writer>.json``        counters: spans recorded and dropped, process, host, whether it was closed

The writer holds a lock on its last segment, so anyone can see at once whether it still lives.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from ..log import logger
from . import locks

log = logger()

FOLDER = "journal"
_SEGMENT = re.compile(r"(?P<writer>.+)\.(?P<number>\d{4,})\.jsonl")


class PartlyWritten(OSError):  # noqa: N818 - says what happened
    """Lines could not be written to the journal; ``lines`` says how many of them were."""

    def __init__(self, error: Exception, lines: int) -> None:
        strerror = error.strerror if isinstance(error, OSError) else None
        super().__init__(getattr(error, "errno", None), strerror or f"{type(error).__name__}: {error}")
        self.lines = lines


class SegmentWriter:
    """Appends lines to a segment of its own, and starts the next one when it is full.

    When the store is moved or deleted meanwhile, it goes on in a new segment where the store was.

    Args:
        store: folder of the store; it is made where there is none.
        max_bytes: size at which a new segment begins.

    Raises:
        OSError: the store cannot be written.
    """

    def __init__(self, store: Path, max_bytes: int) -> None:
        self._folder = store / FOLDER
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40] or "host"
        moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self.name = f"{moment}-{host}-{os.getpid()}-{secrets.token_hex(3)}"
        self._max_bytes = max_bytes
        self._said = False
        self._file = -1
        self._begin(0)

    def _segment(self, number: int) -> Path:
        return self._folder / _name(self.name, number)

    def _begin(self, number: int) -> None:
        """Begin a segment in place of the present one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while self._segment(number).exists():  # of a copy of the store
            number += 1
        path = self._segment(number)
        # It gets its name when it is locked: without a lock, its writer would be taken for dead.
        draft = path.with_suffix(".new")
        file = locks.take(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        assert file is not None, "nobody else knows of this file yet"
        try:
            draft.rename(path)
        except OSError:
            locks.release(file)
            raise
        locks.release(self._file)
        stat = os.fstat(file)
        self._file, self._place, self._number = file, (stat.st_dev, stat.st_ino), number
        self._size, self._torn = 0, False

    def _stay(self) -> None:
        """Begin anew where the store was, when it is there no more."""
        try:
            stat = self._segment(self._number).stat()
            if (stat.st_dev, stat.st_ino) == self._place:
                return
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return  # it may well be there: the file is open, and writing to it will tell
        self._begin(self._number + 1)
        if not self._said:
            self._said = True
            log.warning(
                "the store %s was moved or deleted while this process recorded into it; "
                "what follows goes into a new one there",
                self._folder.parent,
            )

    def append(self, lines: bytes) -> None:
        """Hand whole lines to the operating system.

        Raises:
            PartlyWritten: not all of them could be written; a torn line is never continued.
        """
        written = before = 0
        try:
            self._stay()
            if self._size >= self._max_bytes:
                with suppress(OSError):  # rather a segment that is too long than nothing
                    self._begin(self._number + 1)
            if self._torn:
                lines, before = b"\n" + lines, 1
            while written < len(lines):
                written += os.write(self._file, lines[written:])
        except Exception as error:  # also a MemoryError: whoever waits for room must hear of it
            self._torn = self._torn or written > 0
            raise PartlyWritten(error, lines[before:written].count(b"\n")) from error
        finally:
            self._size += written
        self._torn = False

    def set_open_spans(self, line: bytes) -> None:
        """Replace the list of open spans; an empty line removes it."""
        path = self._folder / f"{self.name}.open.jsonl"
        if line:
            self._stay()
            _replace(path, line)
        else:
            path.unlink(missing_ok=True)

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Replace the counters, also on a full disk."""
        self._stay()
        path, data = self._folder / f"{self.name}.json", orjson.dumps(counters)
        try:
            _replace(path, data)
        except OSError:
            # There is no room for a second file, but the first one may keep the room that it has.
            with path.open("r+b") as file:
                file.write(data.ljust(path.stat().st_size))

    def close(self) -> None:
        """Let go of the file: the writer counts as gone, unless this is a forked child of it."""
        locks.release(self._file)


def _name(writer: str, number: int) -> str:
    return f"{writer}.{number:04d}.jsonl"


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment file."""

    path: Path
    writer: str
    number: int

    def read(self, offset: int) -> Iterator[tuple[int, bytes]]:
        """Give the whole lines from an offset on, each with the offset it stands at.

        A last line without a newline is still being written, or torn: it is not given.
        """
        with self.path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield offset, line
                offset += len(line)


@dataclass(frozen=True, slots=True)
class Writer:
    """What is known of one process that wrote, or writes, into the store."""

    name: str
    alive: bool
    counters: Mapping[str, Any]
    open_spans: bytes

    @property
    def died(self) -> bool:
        """Whether it is gone without having closed its journal.

        One that left no word of itself is not said to have died, nor is one of a version that noted nothing.
        """
        return not self.alive and self.counters.get("closed") is False

    @property
    def recorded(self) -> int:
        """Spans that ended in that process, dropped ones included."""
        return _count(self.counters.get("recorded"))

    @property
    def written(self) -> int:
        """Spans that it says it has written."""
        return _count(self.counters.get("written"))

    @property
    def troubles(self) -> int:
        """How often something went wrong inside Trackway there."""
        return _count(self.counters.get("troubles"))

    def waiting(self, stored: int) -> int:
        """Count the spans that it had recorded and not written, given how many the journal has by now."""
        return max(0, self.recorded - sum(self.dropped.values()) - max(self.written, stored))

    @property
    def dropped(self) -> Mapping[str, int]:
        """Spans that never reached the journal, by reason."""
        dropped = self.counters.get("dropped")
        return {why: _count(many) for why, many in dropped.items()} if isinstance(dropped, dict) else {}


def _count(value: Any) -> int:
    # The file may have been damaged by somebody else, which must not take the rest of the store with it.
    return value if isinstance(value, int) else 0


@lru_cache(maxsize=1024)
def knows(store: Path, writer: str) -> bool:
    """Say whether a writer writes, or wrote, into this store."""
    return Path(writer).name == writer and any(
        (store / FOLDER / name).exists() for name in (f"{writer}.json", _name(writer, 0))
    )


def segments(store: Path) -> list[Segment]:
    """List the segments of a store, those of one writer in order."""
    found = []
    for path in (store / FOLDER).glob("*.jsonl"):
        match = _SEGMENT.fullmatch(path.name)
        if match:
            found.append(Segment(path, match["writer"], int(match["number"])))
    return sorted(found, key=lambda segment: (segment.writer, segment.number))


def writers(store: Path, among: list[Segment] | None = None) -> list[Writer]:
    """List the writers of a store, also those whose segments are gone."""
    last: dict[str, Path] = {}
    for path in sorted((store / FOLDER).glob("*.json")):
        last[path.stem] = store / FOLDER / _name(path.stem, 0)
    for segment in segments(store) if among is None else among:
        last[segment.writer] = segment.path
    return [_writer(store, name, path) for name, path in last.items()]


def _writer(store: Path, name: str, segment: Path) -> Writer:
    # Whether it lives is asked first: what a dead writer left behind does not change any more.
    alive = _lives(segment)
    folder = store / FOLDER
    try:
        counters = orjson.loads((folder / f"{name}.json").read_bytes())
    except (OSError, ValueError):
        counters = {}
    try:
        open_spans = (folder / f"{name}.open.jsonl").read_bytes()
    except OSError:
        open_spans = b""
    return Writer(name, alive, counters if isinstance(counters, dict) else {}, open_spans)


def _lives(segment: Path) -> bool:
    """Say whether a writer holds its last segment; it may have begun another one since that was listed."""
    while not _is_locked(segment):
        match = _SEGMENT.fullmatch(segment.name)
        assert match is not None, segment
        segment = segment.with_name(_name(match["writer"], int(match["number"]) + 1))
        if not segment.exists():
            return False
    return True


def _is_locked(path: Path) -> bool:
    try:
        return locks.is_held(path)
    except OSError:
        return False
