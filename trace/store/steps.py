"""Which steps are meant: one, some, or all from here to there."""

from __future__ import annotations

import re
from dataclasses import dataclass

EXAMPLES = "7, 1,5,9, 100..200, >=100 or <50"
_NUMBER = r"\s*([+-]?[0-9]+)\s*"
_SPAN = re.compile(rf"(?:{_NUMBER})?\.\.(?:{_NUMBER})?")
_BOUND = re.compile(rf"\s*(>=|<=|>|<|=){_NUMBER}")
_ONE = re.compile(_NUMBER)


@dataclass(frozen=True, slots=True)
class Steps:
    """A choice of steps.

    Attributes:
        ranges: pairs of the first and the last step, both included; None where there is no bound.
    """

    ranges: tuple[tuple[int | None, int | None], ...]

    @classmethod
    def parse(cls, text: str) -> Steps:
        """Read ``7``, ``1,5,9``, ``100..200``, ``100..``, ``>=100``, or several of them with commas.

        Raises:
            ValueError: the text is none of these, or a range ends before it begins.
        """
        return cls(tuple(_range(part, text) for part in text.split(",")))

    @property
    def only(self) -> int | None:
        """The step, when it is one; else None."""
        if len(self.ranges) != 1:
            return None
        first, last = self.ranges[0]
        return first if first == last else None

    def __contains__(self, step: int | None) -> bool:
        return step is not None and any(
            (first is None or step >= first) and (last is None or step <= last) for first, last in self.ranges
        )

    def sql(self) -> str:
        """Give the condition on a column named ``step``."""
        return " OR ".join(f"({_condition(first, last)})" for first, last in self.ranges)


def _condition(first: int | None, last: int | None) -> str:
    if first == last and first is not None:
        return f"step = {first:d}"
    bounds = [] if first is None else [f"step >= {first:d}"]
    bounds += [] if last is None else [f"step <= {last:d}"]
    return " AND ".join(bounds)


def _range(part: str, text: str) -> tuple[int | None, int | None]:
    if match := _ONE.fullmatch(part):
        return int(match[1]), int(match[1])
    if match := _BOUND.fullmatch(part):
        number = int(match[2])
        return {
            ">=": (number, None),
            ">": (number + 1, None),
            "<=": (None, number),
            "<": (None, number - 1),
            "=": (number, number),
        }[match[1]]
    if (match := _SPAN.fullmatch(part)) and (match[1] or match[2]):
        first, last = (None if bound is None else int(bound) for bound in match.groups())
        if first is not None and last is not None and last < first:
            raise ValueError(f"{part.strip()!r} ends before it begins; write {last}..{first}")
        return first, last
    where = "" if part == text else f" in {text!r}"
    raise ValueError(f"{part!r}{where} names no steps; write {EXAMPLES}")
