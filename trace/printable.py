"""Any text, made safe to print."""

from __future__ import annotations

import re

# Control characters, bidirectional marks and overrides, invisible characters, lone surrogates and
# Unicode's own line separators. Joiners (U+200C, U+200D) stay: scripts and emoji need them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
# A slash in a password should have been quoted, but one that was not is no reason to show it.
_PASSWORD = re.compile(r"(://[^/\s:@]*):(?!\d{1,5}/)(?:[^\s:]|:(?!//))*@")
_HIDDEN_OR_BREAK = re.compile(_HIDDEN.pattern[:-1] + "\t\n]")


def visible(text: str, *, newlines: bool = True) -> str:
    r"""Make any text safe to print.

    What would steer a terminal, reorder or hide text becomes an escape in the notation of Python's
    string literals (``\x1b``, ``\r``, ``\u202e``, ``\ud83e``); everything else stays as it is, a
    backslash too.

    Args:
        newlines: keep tabs and line breaks; False escapes them as well, for text that must stay on one line.
    """
    return (_HIDDEN if newlines else _HIDDEN_OR_BREAK).sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")


def without_password(text: str) -> str:
    """Replace the passwords of all addresses in a text, such as ``http://user:password@host``, by ``***``."""
    return _PASSWORD.sub(r"\1:***@", text)
