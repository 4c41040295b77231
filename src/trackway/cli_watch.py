"""``trackway status --watch``: the state of a store again and again, with rates, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import SegmentLines
from rich.text import Text

from trackway.trace.exporters.sync import is_followed
from trackway.trace.printable import visible
from trackway.trace.store import Store, StoreError, StoreStatus, WriterStatus, journal, open_store
from trackway.viewers.state import Rates, status_view
from trackway.viewers.words import DIM, encodable, process

from .cli_output import print_view, write

_LOOKS = 5
"""Looks that a rate is taken over: what is delivered comes in batches."""
_NEWS = 3
"""How many of the processes that came and went are named."""


def followed(store: Path) -> bool | None:
    """Say whether somebody delivers what is recorded; None where one may not look."""
    try:
        return is_followed(store)
    except OSError:
        return None


def watch(path: Path, interval: float) -> None:
    """Show the state of a store until Ctrl-C or SIGTERM, in place on a terminal, else block after block.

    Args:
        path: the store; where there is none, one is waited for.
        interval: seconds between two looks.

    Raises:
        StoreError: there is something else under that path.
    """
    if path.exists() and not path.is_dir():
        open_store(path)  # which says what is wrong
    console = Console()
    in_place = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal

    def stop(_number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    watched = _Watched(path, interval)
    try:
        (_show_in_place if in_place else _print_blocks)(watched, interval)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
        watched.close()


def _show_in_place(watched: _Watched, interval: float) -> None:
    console = Console()
    last: RenderableType = ""
    try:
        # On the other screen, as a terminal that is made narrower would leave pieces of a view behind.
        with Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        ) as live:
            while True:
                last = watched.look()
                clock = f"{time.strftime('%H:%M:%S')}  every {interval:g} s, Ctrl-C ends"
                live.update(_cropped(console, Group(last, Text(""), Text(clock, DIM))), refresh=True)
                time.sleep(interval)
    finally:
        console.print(last)


def _cropped(console: Console, view: RenderableType) -> RenderableType:
    lines = console.render_lines(view, pad=False)
    if len(lines) <= console.height:
        return view
    said = encodable("… the window is too small for the rest", console.encoding)
    mark = console.render_lines(Text(said, DIM), pad=False)
    return SegmentLines([*lines[: console.height - 1], *mark], new_lines=True)


def _print_blocks(watched: _Watched, interval: float) -> None:
    said = ""
    while True:
        view = watched.look()
        watched.news.clear()
        if isinstance(view, Text):
            if view.plain != said:
                print_view(view)
            said = view.plain
        else:
            write(f"{time.strftime('%H:%M:%S')}\n")
            print_view(Group(view, Text("")), whole_lines=True)
            said = ""
        time.sleep(interval)


class _Watched:
    """A store that may not be there yet, may vanish, and may come back.

    Args:
        path: where it is, or will be.
        patience: seconds that a look may spend on what was recorded meanwhile; the rest counts as pending.

    Attributes:
        news: which processes came and went, and when.
    """

    def __init__(self, path: Path, patience: float) -> None:
        self._path = path
        self._patience = patience
        self._store: Store | None = None
        self._folder = -1
        self._seen = False
        self._looks: deque[tuple[float, StoreStatus]] = deque(maxlen=_LOOKS + 1)
        self.news: deque[tuple[str, str]] = deque(maxlen=_NEWS)

    def close(self) -> None:
        """Let go of the store."""
        if self._store is not None:
            self._store.close()
            os.close(self._folder)
            self._store = None
        self._looks.clear()

    def look(self) -> RenderableType:
        """Give the view of this moment, or as ``Text`` why there is none."""
        try:
            status = self._status()
        except (OSError, sqlite3.Error, StoreError) as error:
            there = self._is_there()
            self.close()
            if there:
                return Text(visible(f"the store {self._path} cannot be read: {error}; trying again"), "red")
            status = None
        if status is None:
            self.close()
            if self._seen:
                return Text(visible(f"the store {self._path} is gone; waiting for another one there"))
            return Text(visible(f"waiting for a store at {self._path}: nothing was recorded there yet"))
        self._seen = True
        if self._looks:
            self._note_news(self._looks[-1][1].writers, status.writers)
        self._looks.append((time.monotonic(), status))
        return status_view(
            status, str(self._path), followed=followed(self._path), rates=self._rates(), news=tuple(self.news)
        )

    def _status(self) -> StoreStatus | None:
        if self._store is not None and not self._is_there():
            self.close()
        if self._store is None:
            if not self._is_there():
                return None
            store = open_store(self._path)
            # As long as this is open, no other folder can be taken for it.
            self._folder = os.open(self._path / journal.FOLDER, os.O_RDONLY)
            self._store = store
        status = self._store.status(time.monotonic() + self._patience)
        return status if self._is_there() else None

    def _is_there(self) -> bool:
        """Whether there is a store; where one is open, whether it is that one."""
        try:
            found = (self._path / journal.FOLDER).stat()
        except OSError:
            return False
        return self._store is None or os.path.samestat(found, os.fstat(self._folder))

    def _rates(self) -> Rates | None:
        (begin, first), (end, last) = self._looks[0], self._looks[-1]
        if end == begin:
            return None
        seconds = end - begin
        before = first.destinations
        return Rates(
            recorded=max(0, last.recorded - first.recorded) / seconds,
            bytes=max(0, last.bytes - first.bytes) / seconds,
            exported={
                name: max(0, place.exported - before[name].exported) / seconds
                for name, place in last.destinations.items()
                if name in before
            },
        )

    def _note_news(self, before: Iterable[WriterStatus], now: Iterable[WriterStatus]) -> None:
        known = {each.name for each in before if each.alive}
        clock = time.strftime("%H:%M:%S")
        for each in now:
            if each.alive and each.name not in known:
                self.news.append((clock, f"{process(each.pid, each.host, each.name)} began to record"))
            elif not each.alive and each.name in known:
                end = "DIED" if each.died else "ended"
                self.news.append((clock, f"{process(each.pid, each.host, each.name)} {end}"))
