"""What Trackway says in the program's log: on one line, and with nothing in it that steers a terminal."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .printable import visible

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class _Log(_Adapter):
    """A logger that disturbs nobody: filters and handlers of the program may raise."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        with suppress(Exception):
            super().log(level, msg, *args, **{"stacklevel": 2, **kwargs})


def logger(name: str = "trackway") -> logging.LoggerAdapter[logging.Logger]:
    """Give a logger whose messages may name keys, errors and other texts that come from a rollout."""
    found = logging.getLogger(name)
    found.addFilter(_make_safe)  # added once only, however often it is asked for
    return _Log(found, {})


def _make_safe(record: logging.LogRecord) -> bool:
    record.msg, record.args = visible(record.getMessage(), newlines=False), None
    if record.exc_info:
        record.exc_text = visible(logging.Formatter().formatException(record.exc_info))
    return True
