"""What Trackway says in the program's log: on one line, and with nothing in it that steers a terminal."""

from __future__ import annotations

import logging

from .printable import visible


def logger(name: str = "trackway") -> logging.Logger:
    """Give a logger whose messages may name keys, errors and other texts that come from a rollout."""
    found = logging.getLogger(name)
    found.addFilter(_make_safe)  # added once only, however often it is asked for
    return found


def _make_safe(record: logging.LogRecord) -> bool:
    record.msg, record.args = visible(record.getMessage(), newlines=False), None
    if record.exc_info:
        record.exc_text = visible(logging.Formatter().formatException(record.exc_info))
    return True
