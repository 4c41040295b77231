"""Joining the bytes of many tokens without a loop in Python."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

_BLOCK = 1 << 14  # tokens joined at once; keeps the working arrays of a long sequence small


class Gather:
    """All tokens' bytes in one array, from which those of a sequence are picked by NumPy.

    Compared with joining ``bytes`` objects, this spares the processor a walk through a vocabulary's worth of
    scattered objects.
    """

    def __init__(self, chunks: list[bytes | None]) -> None:
        import numpy

        self._numpy = numpy
        self._bytes = numpy.frombuffer(b"".join(chunk or b"" for chunk in chunks), numpy.uint8)
        lengths = numpy.array([len(chunk or b"") for chunk in chunks], numpy.intp)
        self._starts = lengths.cumsum() - lengths
        self._lengths = numpy.array([-1 if chunk is None else len(chunk) for chunk in chunks], numpy.intp)

    def join(self, ids: Sequence[Any]) -> bytes | None:
        """Give the joined bytes; None when any of the ids is not an integer with a token."""
        try:
            # The array refuses what is not an integer and what is negative, but takes booleans for 0 and 1.
            indices = self._numpy.frombuffer(array("I", ids), "I").astype(self._numpy.intp)
            if any(type(ids[n]) is not int for n in (indices < 2).nonzero()[0]):
                return None
            return b"".join(self._join(indices[n : n + _BLOCK]) for n in range(0, len(indices), _BLOCK))
        except (TypeError, ValueError, OverflowError, IndexError):
            return None

    def _join(self, indices: Any) -> bytes:
        lengths = self._lengths.take(indices)
        if (least := lengths.min()) < 1:
            if least < 0:
                raise IndexError("an id without a token")
            indices = indices[lengths > 0]
            if not len(indices):
                return b""
            lengths = self._lengths.take(indices)
        starts, ends = self._starts.take(indices), lengths.cumsum()
        # Positions go on by one within a token; at the first byte of each token they jump.
        positions = self._numpy.ones(ends[-1], self._numpy.intp)
        positions[0] = starts[0]
        positions[ends[:-1]] = starts[1:] - starts[:-1] - lengths[:-1] + 1
        joined: bytes = self._bytes.take(positions.cumsum()).tobytes()
        return joined
