"""Choices by hash: the same in every process, and drawn from no random generator."""

from __future__ import annotations

import operator
from hashlib import blake2b
from typing import Any


def unit_interval(seed: int, *parts: Any) -> float:
    """Give the place of a name in [0, 1), evenly spread over names.

    Args:
        parts: the name: integers, texts, None, or tuples of these. ``1`` and ``"1"`` are two names.

    Raises:
        TypeError: a part is of another kind.
    """
    digest = blake2b(_encode((seed, *parts)), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def _encode(part: Any) -> bytes:
    # Kind and length come first, so that no two names share an encoding.
    if isinstance(part, str):
        kind, body = b"s", part.encode("utf-8", "surrogatepass")
    elif isinstance(part, tuple):
        kind, body = b"t", b"".join(map(_encode, part))
    elif part is None:
        kind, body = b"n", b""
    else:
        kind, body = b"i", b"%d" % operator.index(part)
    return b"%b%d:%b" % (kind, len(body), body)
