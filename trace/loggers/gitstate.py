"""Which commit a program runs from, and what was changed since."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

from ..capture.redact import MASK, Redactor
from ..capture.snapshot import clean

MOST_DIFF = 2**20
"""Bytes of a diff that are kept."""
_MOST_FILES = 200
_PATIENCE = 10.0
"""Seconds for one command of git."""
# What a diff or a command line assigns to a name. Every part is bounded: a line may have megabytes.
_ASSIGNED = re.compile(
    r"""(?<![\w.-])([\w.-]{1,100})(["']?[ \t]{0,9}[:=][ \t]{0,9})"""
    r"""(?:(["'])([^"'\n]{1,1000})|([^\s"'()\[\]{},;]{4,1000}))"""
)


def git(folder: Path, redactor: Redactor) -> dict[str, Any] | None:
    """Describe the working tree that a folder is in.

    Args:
        folder: where the program runs.
        redactor: takes the secrets out of the diff.

    Returns:
        ``commit``, ``branch`` (None when detached), ``diff`` (to the commit; None when it could not be had in
        time), ``diff_bytes_left_out`` of it, ``dirty`` (whether it shows anything), ``untracked`` (the first
        files and folders that git does not know) and ``untracked_files`` (how many there are). None where
        there is no repository, no commit or no git.
    """
    head = _ask(folder, "rev-parse", "--verify", "HEAD")
    if head is None:
        return None
    branch = _ask(folder, "symbolic-ref", "--short", "--quiet", "HEAD")
    diff = _ask(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short", "HEAD")
    others = _ask(
        folder,
        "ls-files",
        "--others",
        "--exclude-standard",
        "--directory",
        "--no-empty-directory",
        "--full-name",
        "-z",
        ":/",
    )
    untracked = [] if others is None else [_text(name) for name in others[0].split(b"\0") if name]
    return {
        "commit": _text(head[0]).strip(),
        "branch": None if branch is None else _text(branch[0]).strip(),
        "dirty": None if diff is None else bool(diff[0]),
        "diff": None if diff is None else _redacted(_text(diff[0]), redactor),
        "diff_bytes_left_out": 0 if diff is None else diff[1],
        "untracked": untracked[:_MOST_FILES],
        "untracked_files": len(untracked),
    }


def _ask(folder: Path, *words: str) -> tuple[bytes, int] | None:
    """Give what a command of git writes, as far as it is kept, and how many bytes are left out.

    It takes no lock of the repository, and starts no program that its settings name.
    """
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", *words]
    try:
        with subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            return _read(process)
    except OSError:
        return None


def _read(process: subprocess.Popen[bytes]) -> tuple[bytes, int] | None:
    assert process.stdout is not None
    alarm = threading.Timer(_PATIENCE, process.kill)
    alarm.daemon = True
    alarm.start()
    try:
        kept = process.stdout.read(MOST_DIFF)
        left_out = 0
        while more := process.stdout.read(2**20):
            left_out += len(more)
        code = process.wait()
    finally:
        alarm.cancel()
        process.kill()
    if code != 0:
        return None
    if left_out:
        whole = kept[: kept.rfind(b"\n") + 1]
        left_out += len(kept) - len(whole)
        kept = whole
    return kept, left_out


def _text(data: bytes) -> str:
    return clean(data.decode("utf-8", "replace"))


def _redacted(diff: str, redactor: Redactor) -> str:
    """Mask credentials by their shape, and what is assigned to a secret name."""

    def mask(match: re.Match[str]) -> str:
        name, between, quote, quoted, bare = match.groups()
        if bare is not None and diff[match.end() : match.end() + 1] in ("(", "["):
            return match.group()  # the call of a function, or a look-up: the value is not here
        if redactor.is_secret_name(name.strip("-").rpartition(".")[2], quoted or bare):
            return f"{name}{between}{quote or ''}{MASK}"
        return match.group()

    return redactor.text(_ASSIGNED.sub(mask, diff))
