"""Which loggers a run is given: names from anywhere, and the classes behind them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..config_values import ConfigError, nearest, show
from .base import ExperimentLogger, Run, Unavailable
from .resolving import resolved

GROUP = "trackway.loggers"


def known() -> dict[str, EntryPoint]:
    """Give the loggers that are installed: the entry points of the group ``trackway.loggers``, by name."""
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def names(value: Any, written: str = "loggers") -> tuple[str, ...]:
    """Read which loggers are wanted.

    Args:
        value: a name, names joined by commas, or a list, tuple or OmegaConf list of names. A name given
            twice counts once.
        written: what the user wrote before the value, for the message.

    Returns:
        Names of ``known()``, in the order given.

    Raises:
        ConfigError: a name is unknown, or there is none.
    """
    installed = known()
    expected = f"one or several of {', '.join(installed)}"
    if isinstance(value, str):
        text = value.strip()
        if text[:1] in "[(" and text[-1:] in "])":
            text = text[1:-1]
        value = [part.strip().strip("'\"") for part in text.split(",")]
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(f"{written}={show(value)} is not allowed; expected {expected}")
    items = list(value)
    allowed = {name.casefold(): name for name in installed}
    found: dict[str, None] = {}
    for item in items:
        if not isinstance(item, str) or item.strip().casefold() not in allowed:
            if isinstance(item, str) and not item.strip():
                continue
            hint = nearest(item, allowed) if isinstance(item, str) else ""
            raise ConfigError(f"{written}: there is no logger {show(item)}{hint}; expected {expected}")
        found[allowed[item.strip().casefold()]] = None
    if not found:
        raise ConfigError(f"{written}={show(items)} names no logger; expected {expected}")
    return tuple(found)


def load(name: str) -> type[ExperimentLogger]:
    """Import a logger with what it needs.

    Args:
        name: one of ``known()``.

    Raises:
        Unavailable: a package is missing.
        ConfigError: the entry point is no logger.
    """
    point = known()[name]
    try:
        logger = point.load()
        if not (isinstance(logger, type) and issubclass(logger, ExperimentLogger)):
            raise ConfigError(f"the entry point {name} = {point.value} is no ExperimentLogger")
        if logger.package is not None:
            importlib.import_module(logger.package)
    except ImportError as error:
        own = point.value.startswith("trackway.")
        hint = f"pip install 'trackway[{name}]'" if own else f"see what {point.value} needs"
        raise Unavailable(f"logger {name} cannot be used: {error}; {hint}") from error
    return logger


def prepare(
    name: str, given: Mapping[str, Any] | None, *, offline: bool
) -> tuple[Callable[[Run], ExperimentLogger], dict[str, Any]]:
    """Check a logger and its settings.

    Args:
        name: one of ``known()``.
        given: what the user set; None for nothing.
        offline: see ``ExperimentLogger.check``.

    Returns:
        What opens it, given a run; and those of the checked settings that may be kept on a disk, for
        whoever goes on with the run somewhere else.

    Raises:
        ConfigError: a setting is unknown or wrong.
        Unavailable: see ``load`` and ``ExperimentLogger.check``.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{name}={show(given)} is not allowed; expected a mapping of settings")
    logger = load(name)
    settings = dict(given or {})
    for key in settings:
        if key not in logger.settings:
            raise ConfigError(
                f"{name}: there is no setting {show(key)}{nearest(str(key), logger.settings)}; "
                f"{_listed(logger.settings)}"
            )
    checked = logger.check(settings, offline=offline)
    kept = {key: value for key, value in checked.items() if key not in logger.secrets}
    return partial(logger, **checked), resolved(kept)


def _listed(settings: Collection[str]) -> str:
    return f"settings are {', '.join(sorted(settings))}" if settings else "it has no settings"
