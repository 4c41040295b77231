"""Carries complete trajectories from the store to every destination, at least once each, oldest first.

One follower runs per store, elected by a file lock: as a process of its own (``trackway sync --follow``), so
that the training process never imports what a destination needs, or as a thread where that is not wanted.
An outage costs nothing but disk: the journal keeps everything, and a destination that is back catches up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path

from ..config import TraceConfig
from ..log import logger
from ..store import Store, journal, locks, open_store
from ..store.cursors import Cursors, cursor_name
from .destinations import Destination, Sizes, Work, wait_for_any
from .election import is_followed, stand, stand_back, still_elected
from .leave import Leave
from .selection import Rules, Selection, ask, rules_for
from .settings import load_settings, save_settings
from .text import without_secrets

__all__ = [
    "Follower",
    "Leave",
    "follow_store",
    "is_followed",
    "load_settings",
    "run",
    "save_settings",
]

log = logger("trackway.sync")

BATCH = 50
"""Trajectories handed over at once."""
INTERVAL = 0.5
"""Seconds between two looks at the journal."""
PATIENCE = 120.0
"""Seconds that a follower goes on trying after the last writer has gone."""
ANSWER = 30.0
"""Seconds after which a destination that does not answer is left alone, so that it keeps no other."""
_SLICE = 0.1
_AWAY = 3
"""Trajectories in a row that a destination fails to take, each sent alone, until it counts as away."""


class Follower:
    """Does the work of ``sync`` for one store; only one at a time holds the store's lock.

    Args:
        store: folder of the store.
        config: settings; by default those that the recording process left in the store.
        leave: asks it to end.

    Attributes:
        waits: whether the last step has left some destination with an answer to come, and more to be sent.
    """

    def __init__(self, store: Path, config: TraceConfig | None = None, leave: Leave | None = None) -> None:
        self._path = store
        self._store = open_store(store)
        self._config = config
        self._leave = leave or Leave()
        self._cursors = Cursors(store)
        self._destinations: dict[str, Destination] = {}
        self._selections: dict[str, Selection] = {}
        self.waits = False

    def close(self) -> None:
        """Shut the exporters down and close the files."""
        for destination in self._destinations.values():
            destination.close(self._leave.remaining)
        self._cursors.close()
        self._store.close()

    def step(self, *, patient: bool = True) -> bool:
        """Deliver what is due to every destination; one that fails or is slow does not keep the others.

        Args:
            patient: leave a destination alone that failed a moment ago, and a step undecided that goes on.

        Returns:
            Whether every destination has everything that is complete, and was not left out there.
        """
        # Read again each time: a later process may have been configured with other destinations.
        config = self._config or load_settings(self._path)
        backends = config.backend
        places = [(self._destination(backend, config), rules_for(backend, config)) for backend in backends]
        # What an earlier step has begun knows nothing of what came since.
        again = [destination for destination, _ in places if destination.work]
        done, begun = True, time.monotonic()
        while places:
            asked, places = places, []
            for destination, rules in asked:
                destination.work = destination.work or self._serve(destination, rules, patient)
                try:
                    next(destination.work)
                except StopIteration as end:
                    destination.work = None
                    if destination not in again:
                        done = bool(end.value) and done
                        continue
                    again.remove(destination)
                places.append((destination, rules))
            if patient and len(places) < len(backends) and time.monotonic() - begun > INTERVAL:
                break  # for the others there may be something new
            wait_for_any([destination for destination, _ in places], _SLICE)
        self.waits = bool(places)
        return done and not self.waits

    def _destination(self, backend: str, config: TraceConfig) -> Destination:
        name = cursor_name(backend, config.tracking_uri)
        destination = self._destinations.get(name)
        if destination is not None and destination.place != config.tracking_uri:  # a new password
            destination.close(0.0)
            destination = None
        if destination is None:
            destination = self._destinations[name] = Destination(name, backend, config)
        return destination

    def _serve(self, destination: Destination, rules: Rules | None, patient: bool) -> Work:
        """Deliver what is due to one destination; it stops where it would wait for an answer."""
        if destination.hangs or (patient and destination.rests):
            return False
        try:
            self._note_answer(destination)  # one that came late
            if destination.delivered is None:
                destination.delivered = self._cursors.delivered(destination.name)
                self._cursors.fail(destination.name, None)
            done = yield from self._deliver_all(destination, rules, at_once=not patient)
        except Exception as error:
            message = without_secrets(f"{type(error).__name__}: {error}")
            # Said once for an outage; what comes after it is for the follower's own log.
            level = logging.INFO if destination.failing else logging.WARNING
            pause = destination.rest()
            log.log(level, "%s: %s; trying again in %.0f s", destination.name, message, pause)
            self._cursors.fail(destination.name, message)
            return False
        return done

    def _deliver_all(self, destination: Destination, rules: Rules | None, *, at_once: bool) -> Work:
        assert destination.delivered is not None
        if rules is not None:
            at_once = at_once or not self.owners()
        lacking = self._store.due(destination.delivered)
        if lacking and self._leave.sends_nothing:
            return False
        due, waits = self._select(destination, rules, lacking, at_once)
        failure: Exception | None = None
        for start in range(0, len(due), BATCH):
            batch = due[start : start + BATCH]
            if self._leave.sends_nothing:
                return False
            try:
                yield from self._deliver(destination, batch)
            except Exception:
                if len(batch) == 1 or destination.hangs or not destination.trips:
                    raise
                failure = (yield from self._deliver_singly(destination, batch)) or failure
        if failure is not None:
            raise failure
        return not waits

    def _select(
        self, destination: Destination, rules: Rules | None, due: Sizes, at_once: bool
    ) -> tuple[Sizes, bool]:
        """Give what of it is to be sent now, and whether some of it has yet to be decided."""
        assert destination.delivered is not None
        selection = self._selections.get(destination.name)
        if selection is None:
            selection = Selection(destination.name, self._cursors, self._store)
            self._selections[destination.name] = selection
        chosen, left_out = selection.sift(
            rules, due, destination.delivered, partial(self._measure, destination), at_once=at_once
        )
        destination.delivered.update(left_out)
        return chosen, len(chosen) + len(left_out) < len(due)

    def _measure(self, destination: Destination, trace_ids: Sequence[str]) -> list[int]:
        # Nobody is asked over the network, so that this keeps the others for a moment only.
        sizes = destination.measure(self._store.load_all(list(trace_ids)))
        for _ in self._until_answered(destination):
            wait_for_any([destination], _SLICE)
        return sizes.result()

    def _deliver_singly(
        self, destination: Destination, batch: Sizes
    ) -> Generator[None, None, Exception | None]:
        """Send one by one what failed together: one trajectory that an exporter trips over keeps no other.

        Returns:
            Why some of them failed, None when none did.

        Raises:
            Exception: so many failed that the destination must be away.
        """
        failure, in_a_row = None, 0
        for one in batch:
            try:
                yield from self._deliver(destination, [one])
                in_a_row = 0
            except Exception as error:
                failure, in_a_row = error, in_a_row + 1
                if in_a_row == min(_AWAY, len(batch)) or destination.hangs:
                    raise
        return failure

    def _deliver(self, destination: Destination, batch: Sizes) -> Generator[None, None, None]:
        destination.hand(batch, self._store.load_all([trace_id for trace_id, _ in batch]))
        yield from self._until_answered(destination)
        self._note_answer(destination)

    def _until_answered(self, destination: Destination) -> Generator[None, None, None]:
        begun = time.monotonic()
        while not destination.answered:
            if self._leave.over or time.monotonic() - begun > ANSWER:
                raise TimeoutError(f"no answer for {time.monotonic() - begun:.0f} s")
            yield

    def _note_answer(self, destination: Destination) -> None:
        sent, destination.sent = destination.sent, ()
        refused = {name: without_secrets(reason) for name, reason in destination.answer().items()}
        for trace_id, reason in refused.items():
            log.warning("%s refused %s: %s", destination.name, trace_id, reason)
        if sent and destination.delivered is not None:
            self._cursors.store(destination.name, sent, refused, destination.take_count())
            destination.delivered.update(sent)
            destination.recover()

    def errors(self) -> dict[str, str]:
        """Give what went wrong last at each destination, where something did."""
        return self._cursors.errors()

    def owners(self) -> bool:
        """Say whether any process still writes into the store."""
        return any(writer.alive for writer in journal.writers(self._path))

    def unread(self) -> bool:
        """Say whether the journal has grown since the last step."""
        return self._store.unread()


def follow_store(store: Path, config: TraceConfig | None = None, leave: Leave | None = None) -> None:
    """Deliver until no process writes any more and every destination has everything, or one is asked to end.

    A destination that is away when the last writer has gone is tried for a while longer; what it still
    lacks then goes with the next follower, or with ``trackway sync``.

    Args:
        store: folder of the store.
        config: settings; by default those that the recording process left in the store.
        leave: asks it to end.
    """
    leave = leave or Leave()
    while (lock := stand(store)) is not None:
        try:
            follower = Follower(store, config, leave)
            try:
                complete = _follow(follower, leave, store, lock)
            finally:
                follower.close()
        finally:
            locks.release(lock)
        # Somebody may have written, and seen the lock taken, between the last look and its release.
        if not complete or not _has_news(store, config):
            return


def _follow(follower: Follower, leave: Leave, store: Path, lock: int) -> bool:
    """Deliver as long as there is a reason to; say whether that ended because all was delivered."""
    last_owned = time.monotonic()
    while not leave.asked:
        if not still_elected(store, lock):
            log.warning("the store %s is gone from where it was; its follower ends", store)
            return False
        owned = follower.owners()
        if owned:
            last_owned = time.monotonic()
        done = follower.step() and not follower.unread()
        if follower.waits:
            continue  # it has waited itself
        if not owned and (done or time.monotonic() - last_owned > PATIENCE):
            return done
        leave.wait(INTERVAL)
    follower.step(patient=False)
    return False


def _has_news(store: Path, config: TraceConfig | None) -> bool:
    # Not what the index has not read: another reader may have been there first.
    config = config or load_settings(store)
    reader, cursors = Store(store), Cursors(store, read_only=True)
    try:
        names = [cursor_name(backend, config.tracking_uri) for backend in config.backend]
        return any(reader.due(cursors.delivered(name)) for name in names)
    finally:
        cursors.close()
        reader.close()


def run(store: Path, *, follow: bool = False, say: Callable[[str], None] = print) -> int:
    """Do what ``trackway sync`` does.

    Args:
        store: folder of the store.
        follow: go on until nobody writes any more.
        say: is given one line on what happened.

    Returns:
        Exit code: 0, or 1 when a destination still lacks something.

    Raises:
        StoreError, ConfigError: nothing can be delivered.
    """
    store = open_store(store).path
    config = load_settings(store)
    if not config.backend:
        say("no destination is configured: everything stays in the store")
        return 0
    if follow:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request
        stand_back()
        follow_store(store)
        return 0
    lock = stand(store)
    if lock is None:
        ask(store, config)
        say("a follower is at work on this store already; `trackway status` shows how far it is")
        return 0
    try:
        follower = Follower(store)
        try:
            done = follower.step(patient=False)
            for name, error in follower.errors().items():
                say(f"{name}: {error}")
        finally:
            follower.close()
    finally:
        locks.release(lock)
    chosen = any(rules_for(backend, config) for backend in config.backend)
    everything = "everything that was chosen for it" if chosen else "everything"
    say(f"every destination has {everything}" if done else "some of it is still pending; the store keeps it")
    return 0 if done else 1
