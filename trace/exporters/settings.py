"""The settings that a recording process leaves in the store, for the one that exports."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from ..config import TraceConfig, from_dict, to_dict, value_for
from ..config_values import PER_BACKEND
from ..log import logger
from ..printable import without_password
from ..store import CONFIG, StoreError, journal, locks

log = logger()

_PATIENCE = 10.0
"""Seconds to wait for another process that saves its settings."""


def save_settings(config: TraceConfig) -> None:
    """Leave the settings in the store for the follower.

    While others record into the same store, their destinations stay. A process that calls this records
    already, so that of several which begin at once each sees the others.

    Raises:
        OSError: the store cannot be written.
    """
    lock = locks.wait(config.store / "config.lock", _PATIENCE)
    try:
        with suppress(StoreError):
            config = _join(config, load_settings(config.store))
        path = config.store / CONFIG
        draft = path.with_name(f"{CONFIG}.{os.getpid()}.new")
        # A tracking URI may hold credentials, so nobody else may read it.
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(file, "wb") as output:
            output.write(orjson.dumps(to_dict(config), option=orjson.OPT_INDENT_2))
        draft.replace(path)
    finally:
        if lock is not None:
            locks.release(lock)


def _join(config: TraceConfig, left: TraceConfig) -> TraceConfig:
    if not left.backend or not _others_record(config.store):
        return config
    if config.tracking_uri not in (None, left.tracking_uri):
        log.warning(
            "another process records into %s and has it exported to %s: tracking_uri=%r is ignored",
            config.store,
            without_password(left.tracking_uri or "the database in the store"),
            without_password(config.tracking_uri),
        )
    backends = tuple(dict.fromkeys([*left.backend, *config.backend]))
    volume: dict[str, Any] = {name: _volume(name, config, left) for name in PER_BACKEND}
    return replace(config, backend=backends, tracking_uri=left.tracking_uri, **volume)


def _volume(name: str, config: TraceConfig, left: TraceConfig) -> dict[str, Any] | None:
    """Join what two processes say of how much goes to each destination; who named it first decides."""
    found = {}
    for backend in dict.fromkeys([*left.backend, *config.backend]):
        wanted = value_for(backend, getattr(config, name))
        value = value_for(backend, getattr(left, name)) if backend in left.backend else wanted
        if wanted not in (None, value) and backend in config.backend:
            log.warning(
                "another process records into %s, with %s=%s for %s: %s is ignored",
                config.store,
                name,
                value,
                backend,
                wanted,
            )
        if value is not None:
            found[backend] = value
    return found or None


def _others_record(store: Path) -> bool:
    me = os.getpid(), socket.gethostname()
    return any(
        writer.alive and (writer.counters.get("pid"), writer.counters.get("host")) != me
        for writer in journal.writers(store)
    )


def load_settings(store: Path) -> TraceConfig:
    """Read the settings that were left in a store.

    Raises:
        StoreError: there are none, or they cannot be read.
    """
    try:
        settings: Mapping[str, Any] = orjson.loads((store / CONFIG).read_bytes())
        return from_dict({**settings, "store": str(store)})
    except FileNotFoundError:
        raise StoreError(f"{store} holds no settings: nothing was configured to record there yet") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"the settings in {store / CONFIG} cannot be read: {error}") from None
