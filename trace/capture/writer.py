"""The thread that turns finished scopes into journal lines."""

from __future__ import annotations

import multiprocessing.util
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..store.journal import PartlyWritten, SegmentWriter
from ..store.otlp import LineEncoder
from .encode import SpanEncoder
from .scope import Scope

if TYPE_CHECKING:
    from .recorder import Recorder

INTERVAL = 0.05
"""Seconds between two looks at the queue: what a ``kill -9`` may cost."""
HOUSEKEEPING = 1.0
"""Seconds between two updates of counters and open spans; also how long a span is open before it is shown."""
CHILD_PATIENCE = 10.0
"""Seconds that the end of a child of multiprocessing may wait for its writer."""
_BATCH = 64
_OpenLine = tuple[Scope, tuple[int, int], bytes]
"""An open span, how many rewards and facts it had when it was encoded, and its line."""
_SPAN_BYTES = 1024  # a guess at what a queued scope weighs beside its payload


class Writer:
    """A bounded queue and the daemon thread that empties it into the journal.

    Args:
        recorder: whose scopes it writes.
        resource: attributes of the process, put on every line.
        every_second: called now and then from the thread.

    Raises:
        OSError: the store cannot be written.

    Attributes:
        abandoned: whether this is a forked child's copy, which writes nothing.
    """

    def __init__(
        self, recorder: Recorder, resource: Mapping[str, Any], every_second: Callable[[], None]
    ) -> None:
        config = recorder.config
        self._recorder = recorder
        self._every_second = every_second
        self._encoder = SpanEncoder(config, recorder.token_fields)
        self._lines = LineEncoder(resource)
        self._journal = SegmentWriter(config.store, config.max_segment_bytes)
        self._queue: deque[tuple[Scope, int]] = deque()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._written = threading.Condition()
        self._queued_bytes = 0
        self._max_bytes = config.max_queue_bytes
        self._patience = config.queue_timeout if config.queue_policy == "block" else 0.0
        self.recorded = 0
        self.written = 0
        self.dropped: dict[str, int] = {}
        self._asked = False
        self._closing = False
        self._closed = False
        self.abandoned = False
        self._open_lines: dict[int, _OpenLine] = {}
        self._counters: tuple[Any, ...] = ()
        self._thread = threading.Thread(target=self._run, name="trackway-writer", daemon=True)
        self._save_counters()
        self._thread.start()
        if multiprocessing.parent_process() is not None:
            # The children of multiprocessing end without atexit.
            multiprocessing.util.Finalize(None, self.close, (CHILD_PATIENCE,), exitpriority=-1)

    @property
    def name(self) -> str:
        """Name of this writer's segments."""
        return self._journal.name

    @property
    def closed(self) -> bool:
        """Whether it takes nothing any more."""
        return self._closed

    def put(self, scope: Scope) -> bool:
        """Take a finished scope; when the queue is full, wait as configured, then count it as dropped.

        Returns:
            Whether this writer was still there to take it.
        """
        size = _SPAN_BYTES + _weight(scope)
        with self._lock:
            if self._closed:
                return False
            self.recorded += 1
            # A root span always finds room: without it the rollout would seem to run for ever.
            if scope.parent is not None and not self._has_room(size):
                self._drop("queue full")
                scope.rollout.dropped += 1
                return True
            self._queued_bytes += size
            self._queue.append((scope, size))
            return True

    def lose(self) -> None:
        """Count a scope that came after the end."""
        with self._lock:
            self.recorded += 1
            self._drop("after shutdown")
            self._save_counters()

    def _has_room(self, size: int) -> bool:
        if not self._queued_bytes or self._queued_bytes + size <= self._max_bytes:
            return True
        self._wake.set()
        return self._room.wait_for(lambda: self._queued_bytes + size <= self._max_bytes, self._patience)

    def _drop(self, reason: str, count: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def flush(self, timeout: float) -> bool:
        """Wait until everything that was queued when this was called is with the operating system."""
        with self._lock:
            goal = self.recorded
            self._asked = True
        self._wake.set()
        with self._written:
            return self._written.wait_for(lambda: self._settled() >= goal or self._closed, timeout)

    def _settled(self) -> int:
        return self.written + sum(self.dropped.values())

    def close(self, timeout: float) -> bool:
        """Write what is queued and end the thread.

        Returns:
            Whether all of it was written in time.
        """
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return True
        with self._lock:
            self._closed = True
            if self._queue:
                self._drop("not written in time at the end", len(self._queue))
                self._queue.clear()
        self._save_counters()
        return False

    def abandon(self) -> None:
        """Forget everything in a forked child: the parent will write it."""
        self._closed = self.abandoned = True
        # Another thread of the parent may have held the lock when it forked.
        self._lock = threading.Lock()
        self._queue.clear()
        self._journal.close()

    def _run(self) -> None:
        next_look = time.monotonic() + HOUSEKEEPING
        while True:
            self._wake.wait(INTERVAL)
            self._wake.clear()
            closing = self._closing
            try:
                while self._queue:
                    self._write_batch()
                if self._asked:
                    self._asked = False
                    self._save_counters()
                if closing or time.monotonic() >= next_look:
                    next_look = time.monotonic() + HOUSEKEEPING
                    self._show_open(0.0 if closing else HOUSEKEEPING)
                    self._save_counters()
                    if not closing:
                        self._every_second()
            except Exception as error:
                self._recorder.trouble("the writer failed", error)
            with self._written:
                self._written.notify_all()
            if closing:
                break
        with self._lock:
            self._closed = True
            if self._queue:
                self._drop("after shutdown", len(self._queue))
                self._queue.clear()
        self._save_counters()
        self._journal.close()

    def _write_batch(self) -> None:
        groups: dict[str, list[bytes]] = {}
        count = size = 0
        while self._queue and count < _BATCH:
            scope, weight = self._queue.popleft()
            count += 1
            size += weight
            try:
                encoded = self._encoder.encode(scope)
            except Exception as error:
                self._recorder.trouble("could not encode a span", error)
                with self._lock:
                    self._drop("not encodable")
                continue
            groups.setdefault(scope.rollout.trace_id, []).append(encoded)
            # A long turn of this thread would keep the interpreter's lock from the training.
            time.sleep(0)
        spans = sum(map(len, groups.values()))
        try:
            self._journal.append(b"".join(map(self._lines.line, groups.values())))
            self.written += spans
        except PartlyWritten as error:
            kept = sum(map(len, list(groups.values())[: error.lines]))
            self.written += kept
            with self._lock:
                self._drop(f"journal: {error.strerror or error}", spans - kept)
            self._recorder.trouble(f"could not write to the store {self._recorder.config.store}", error)
        with self._room:
            self._queued_bytes -= size
            self._room.notify_all()

    def _show_open(self, age: float) -> None:
        horizon = time.time_ns() - int(age * 1e9)
        shown: dict[int, _OpenLine] = {}
        for scope in self._recorder.open_scopes():
            if scope.span.start_time > horizon:  # type: ignore[attr-defined]
                continue
            said = len(scope.rewards or ()), len(scope.annotations or ())
            known = self._open_lines.get(id(scope))
            if known is None or known[:2] != (scope, said):
                known = (scope, said, self._lines.line([self._encoder.encode_open(scope)]))
                time.sleep(0)
                if self._queue:
                    self._write_batch()
            shown[id(scope)] = known
        if shown != self._open_lines:
            self._journal.set_open_spans(b"".join(line for _, _, line in shown.values()))
            self._open_lines = shown

    def _save_counters(self) -> None:
        counters = (self.recorded, self.written, tuple(self.dropped.items()), self._recorder.troubles)
        if counters != self._counters:
            self._counters = counters
            self._journal.set_counters(
                {
                    "recorded": self.recorded,
                    "written": self.written,
                    "dropped": self.dropped,
                    "troubles": self._recorder.troubles,
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "program": sys.argv[0] if sys.argv else "",
                }
            )


def _weight(scope: Scope) -> int:
    size = 0
    for part in (scope.inputs, scope.output):
        if isinstance(part, (bytes, str)):
            size += len(part)
    for tokens in (scope.prompt, scope.response):
        if tokens:
            size += 8 * sum(map(len, tokens.values()))
    if scope.items:
        size += sum(len(item) for item in scope.items if isinstance(item, (bytes, str)))
    return size
