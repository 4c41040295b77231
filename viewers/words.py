"""Counts, times, states and errors in words, as every view says them."""

from __future__ import annotations

import re
from datetime import datetime

from trackway.trace.model import Status
from trackway.trace.printable import visible

DIM = "dim"
STATUS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "error": ("ERROR", "bold red"),
    "died": ("DIED", "bold red"),
    "cancelled": ("cancelled", "yellow"),
    "running": ("running", "cyan"),
}
_ONLY_A_TYPE = re.compile(r"([\w.]+):\s*")


def encodable(text: str, encoding: str) -> str:
    """What the encoding has no character for becomes an escape."""
    if encoding.startswith("utf"):
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)


def count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def aligned(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e5 else f"{value:.4g}"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 or not value else f"{value:.1f}"


def error_text(text: str) -> str:
    """The text of an error; one without a message is its type alone, not ``TimeoutError:``."""
    only = _ONLY_A_TYPE.fullmatch(text)
    return only[1] if only else text


def duration(start_ns: int, end_ns: int | None, unknown: str = "-") -> str:
    if end_ns is None:
        return unknown
    seconds = (end_ns - start_ns) / 1e9
    if abs(seconds) < 1:
        digits = 2 if abs(seconds) < 0.001 else 1 if abs(seconds) < 0.01 else 0
        return f"{seconds * 1e3:.{digits}f} ms"
    if abs(seconds) < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def age(seconds: float) -> str:
    """How long something has lasted, in two figures at most."""
    seconds = max(0.0, seconds)
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours < 24 else f"{hours // 24:,}d {hours % 24:02}h"


def process(pid: int | None, host: str | None, name: str) -> str:
    """Say which process that is: ``4711@node-3``; where it left no word of itself, the name of its files."""
    short = (host or "?").partition(".")[0]
    text = name if pid is None else f"{pid}@{host if short.isdigit() else short}"
    return visible(text, newlines=False)


def when(time_ns: int, layout: str) -> str:
    try:
        return datetime.fromtimestamp(time_ns / 1e9).astimezone().strftime(layout)
    except (ValueError, OverflowError, OSError):
        return f"{time_ns} ns"


def size(number_of_bytes: int) -> str:
    size = float(number_of_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
