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
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..store.journal import PartlyWritten, SegmentWriter
from ..store.otlp import LineEncoder
from .encode import SpanEncoder
from .scope import Rollout, Scope

if TYPE_CHECKING:
    from .recorder import Recorder

INTERVAL = 0.05
"""Seconds between two looks at the queue: what a ``kill -9`` may cost."""
HOUSEKEEPING = 1.0
"""Seconds between two updates of counters and open spans; also how long a span is open before it is shown."""
CHILD_PATIENCE = 10.0
"""Seconds that the end of a child of multiprocessing may wait for its writer."""
_LAST_SAVE = 0.5
"""Seconds that the last counters may take when the disk was too slow for the rest."""
_BATCH, _BATCH_BYTES = 64, 2**18
"""Spans, and bytes of them, that are joined at most: joining holds the interpreter's lock."""
_SLICE, _BREATH = 0.0005, 0.00005
"""Seconds of work after which this thread sleeps, and for how long. A thread that only offers the
interpreter's lock mostly takes it back before another one, an event loop's for instance, has woken up."""
_OpenLine = tuple[tuple[int, int], bytes]
"""Of an open span, how many rewards and facts it had when it was encoded, and its line."""
_SPAN_BYTES = 1_536
"""Memory of a queued span beside its payload, as measured."""
_NUMBER_BYTES = 40
"""Memory of a token id or log probability, and of its place in a tuple, when nobody else keeps it."""


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
        self._encoder = SpanEncoder(config, recorder.token_fields, self._breathe)
        self._lines = LineEncoder(resource)
        self._journal = SegmentWriter(config.store, config.max_segment_bytes)
        self._queue: deque[tuple[Scope, int]] = deque()
        # A collected generator, or a signal handler, may record in the middle of recording: hence reentrant.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        # Held while there is nothing to do at once. A bare lock, since an Event is not reentrant: a collected
        # generator that records while somebody is inside of its set() would wait for itself.
        self._nothing_urgent = threading.Lock()
        self._nothing_urgent.acquire()
        self._written = threading.Condition()
        self._expired: deque[tuple[Scope, str]] = deque()
        self._given_up = self._given_up_written = 0
        # The second is the writer's alone, and changed without the lock: a signal handler may wait in flush()
        # for what it has interrupted, lock and all.
        self._taken_bytes = self._freed_bytes = 0
        self._waiting = 0
        self._max_bytes = config.max_queue_bytes
        self._open_timeout = config.open_timeout
        self._patience = config.queue_timeout if config.queue_policy == "block" else 0.0
        self.recorded = 0
        self.written = 0
        self.dropped: dict[str, int] = {}
        self.expired = 0
        self._was_full = False
        # Whether somebody waited for room in vain: nobody waits again until there is some.
        self._stuck = False
        self._slice_end = 0.0
        self._asked = self._answered = 0
        self._goal = 0
        self._closing = False
        self._closed = False
        self._ended = False
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

    @property
    def _queued_bytes(self) -> int:
        return self._taken_bytes - self._freed_bytes

    def put(self, scope: Scope) -> bool:
        """Take a finished scope; when the queue is full, wait as configured, then count it as dropped.

        The spans of a rollout that come after a dropped one are dropped as well, up to its root: a few
        rollouts with gaps are worth more than gaps in all of them.

        Returns:
            Whether this writer was still there to take it.
        """
        size = _SPAN_BYTES + _weight(scope)
        queued = scope, size
        # A root span always finds room: without it the rollout would seem to run for ever.
        is_root = scope.parent is None and scope.kind != "attach"
        with self._lock:
            fits = is_root or (not scope.rollout.dropped and self._has_room(size))
            if self._closed:
                return False
            if not fits:
                self._drop("queue full")
                scope.rollout.dropped += 1
                self.recorded += 1
                return True
            self._taken_bytes += size
            self._queue.append(queued)
            self.recorded += 1
        if self._queued_bytes > self._max_bytes // 2:
            self._wake()
        return True

    def expire(self, scope: Scope, reason: str) -> None:
        """Take a scope that is open and will not be waited for."""
        with self._lock:
            self._given_up += 1
            self._expired.append((scope, reason))

    def lose(self) -> None:
        """Count a scope that came after the end."""
        with self._lock:
            self.recorded += 1
            self._drop("after shutdown")
            self._save_counters()

    def _has_room(self, size: int) -> bool:

        def fits() -> bool:
            return not self._queued_bytes or self._queued_bytes + size <= self._max_bytes or self._closed

        if fits():
            self._stuck = False
            return True
        if threading.current_thread() is self._thread:
            return True  # something that was collected here: nobody else makes room
        self._wake()
        self._was_full = True
        if not self._stuck:
            self._waiting += 1
            try:
                self._stuck = not self._room.wait_for(fits, self._patience)
            finally:
                self._waiting -= 1
        return not self._stuck

    def hurry(self) -> None:
        """Have what is queued written at once, without waiting for it: this process may be killed soon."""
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it is awake
            self._nothing_urgent.release()

    def _drop(self, reason: str, count: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def flush(self, timeout: float) -> bool:
        """Wait until everything that was queued when this was called is with the system, and counted."""
        with self._lock:
            self._goal = self.recorded  # before it is asked for, since the writer looks without the lock
            self._asked += 1
            asked, given_up = self._asked, self._given_up
        self._wake()

        def done() -> bool:
            return self._closed or (self._answered >= asked and self._given_up_written >= given_up)

        with self._written:
            return self._written.wait_for(done, timeout)

    def _settled(self) -> int:
        return self.written + sum(self.dropped.values())

    def _is_awaited(self) -> bool:
        """Say whether somebody waits in ``flush`` for no more than is written."""
        return self._asked > self._answered and self._settled() >= self._goal

    def close(self, timeout: float) -> bool:
        """Take nothing more, write what is queued and end the thread.

        Returns:
            Whether all of it was written in time.
        """
        with self._room:
            # Daemon threads that go on recording would keep it from ever being done.
            self._closed = True
            self._room.notify_all()
        self._closing = True
        self._wake()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return True
        with self._lock:
            if self._queue:
                self._drop("not written in time at the end", len(self._queue))
                self._queue.clear()
        self._ended = True
        # A disk that hangs would keep the end of the process as well.
        saver = threading.Thread(target=self._save_counters, daemon=True)
        with suppress(RuntimeError):  # too late for new threads
            saver.start()
            saver.join(_LAST_SAVE)
        return False

    def abandon(self) -> None:
        """Forget everything in a forked child: the parent will write it."""
        self._closed = self.abandoned = True
        # Another thread of the parent may have held the lock when it forked.
        self._lock = threading.RLock()
        self._queue.clear()
        self._journal.close()

    def _run(self) -> None:
        next_look = time.monotonic() + HOUSEKEEPING
        while True:
            self._nothing_urgent.acquire(timeout=0 if self._queue else INTERVAL)
            closing = self._closing
            try:
                # A queue that is never empty must not keep it from what else there is to do.
                while self._queue and (closing or not (self._is_awaited() or time.monotonic() >= next_look)):
                    self._write_batch()
                while self._expired:
                    self._write_expired()
                asked = self._asked
                if self._is_awaited():
                    try:
                        self._save_counters()
                    finally:
                        self._answered = asked
                if self._was_full:
                    self._recorder.warn_once("queue full", self._full())
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
        self._ended = True
        with suppress(OSError):
            self._save_counters()
        self._journal.close()

    def _breathe(self) -> None:
        """Let other threads have the interpreter's lock when this one has had it for a while."""
        if time.perf_counter() > self._slice_end:
            time.sleep(_BREATH)
            self._slice_end = time.perf_counter() + _SLICE

    def _write_batch(self) -> None:
        groups: dict[str, list[bytes]] = {}
        rollouts: list[Rollout] = []
        failures: list[Exception] = []
        count = size = written = 0
        while self._queue and count < _BATCH and written < _BATCH_BYTES:
            scope, weight = self._queue.popleft()
            count += 1
            size += weight
            try:
                encoded = self._encoder.encode(scope)
            except Exception as error:
                failures.append(error)
                continue
            written += len(encoded)
            groups.setdefault(scope.rollout.trace_id, []).append(encoded)
            rollouts.append(scope.rollout)
            self._breathe()
        try:
            if failures:
                with self._lock:
                    self._drop("not encodable", len(failures))
            self._append(list(groups.values()), rollouts)
        finally:
            self._freed_bytes += size
            if self._waiting:
                with self._room:
                    self._room.notify_all()
        # Said when all is counted: under TRACKWAY_STRICT it raises.
        for failure in failures:
            self._recorder.trouble("could not encode a span", failure)

    def _append(self, groups: list[list[bytes]], rollouts: list[Rollout]) -> None:
        spans = sum(map(len, groups))
        try:
            self._journal.append(b"".join(map(self._lines.line, groups)))
            self.written += spans
        except Exception as error:  # of the disk, or no memory to join them
            kept, reason = 0, f"{type(error).__name__}: {error}"
            if isinstance(error, PartlyWritten):
                kept, reason = sum(map(len, groups[: error.lines])), str(error.strerror)
            self.written += kept
            with self._lock:
                self._drop(f"journal: {reason}", spans - kept)
            for rollout in rollouts:
                rollout.forget()
            self._recorder.trouble(f"could not write to the store {self._recorder.config.store}", error)

    def _write_expired(self) -> None:
        scope, reason = self._expired.popleft()
        line = self._lines.line([self._encoder.encode_open(scope, reason)])
        try:
            self._journal.append(line)
        except PartlyWritten as error:
            self._recorder.trouble(f"could not write to the store {self._recorder.config.store}", error)
        else:
            self.expired += 1
        self._given_up_written += 1

    def _show_open(self, age: float) -> None:
        now = time.time_ns()
        horizon = now - int(age * 1e9)
        shown: dict[int, _OpenLine] = {}
        scopes = self._recorder.open_scopes()
        scopes.reverse()
        while scopes:
            # What ended meanwhile is let go of one by one: to free many long prompts at once takes a while.
            scope = scopes.pop()
            if scope.start_ns > horizon:
                continue
            if self._open_timeout is not None and scope.start_ns < now - self._open_timeout * 1e9:
                self._recorder.expire(scope, f"open for more than {self._open_timeout:g} s")
                continue
            said = len(scope.rewards or ()), len(scope.annotations or ())
            known = self._open_lines.get(scope.span_id)
            if known is None or known[0] != said:
                known = (said, self._lines.line([self._encoder.encode_open(scope)]))
                self._breathe()
                if self._queue:
                    self._write_batch()
            shown[scope.span_id] = known
        if shown != self._open_lines:
            self._journal.set_open_spans(b"".join(line for _, line in shown.values()))
            self._open_lines = shown

    def _full(self) -> str:
        return (
            f"spans came faster than they can be written to {self._recorder.config.store}: "
            f"{'their callers waited' if self._patience else 'some were dropped'}. `trackway status` counts "
            "what is lost; max_queue_bytes, queue_policy and queue_timeout steer it"
        )

    def _save_counters(self) -> None:
        dropped = tuple(self.dropped.items())
        counters = (self.recorded, self.written, dropped, self.expired, self._recorder.troubles, self._ended)
        if counters != self._counters:
            self._journal.set_counters(
                {
                    "recorded": self.recorded,
                    "written": self.written,
                    "dropped": self.dropped,
                    "expired": self.expired,
                    "troubles": self._recorder.troubles,
                    "closed": self._ended,
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "program": sys.argv[0] if sys.argv else "",
                }
            )
            self._counters = counters


def _weight(scope: Scope) -> int:
    size = 0
    for part in (scope.inputs, scope.output):
        if isinstance(part, (bytes, str)):
            size += len(part)
    size += _NUMBER_BYTES * len(scope.prompt or ())
    for tokens in (scope.given, scope.made):
        if tokens:
            size += _NUMBER_BYTES * sum(map(len, tokens.values()))
    attributes = scope.attributes and scope.attributes.values()
    for parts in (scope.items, scope.extra and scope.extra.values(), attributes):
        if parts:
            size += sum(len(part) for part in parts if isinstance(part, (bytes, str)))
    return size
