"""What reports consist of; all texts are plain, and each way of writing them down escapes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heading:
    """The name of what follows."""

    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Names, and the text that belongs to each.

    Attributes:
        links: the texts are addresses that may be followed; others never are, whatever they look like.
    """

    rows: Sequence[tuple[str, str]]
    links: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under their heads.

    Attributes:
        right: columns that hold numbers.
        folded: what it is called where it is folded away until somebody asks; None where it stands open.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()
    folded: str | None = None


@dataclass(frozen=True, slots=True)
class Plots:
    """Curves: name -> step -> value."""

    curves: Mapping[str, Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class Text:
    """A sentence of ours."""

    text: str


@dataclass(frozen=True, slots=True)
class Code:
    """A text as it is, under what it is called, folded away until somebody asks."""

    title: str
    text: str


Block = Heading | Facts | Table | Plots | Text | Code


@dataclass(frozen=True, slots=True)
class Report:
    """A report: what it is about, and its blocks from top to bottom."""

    title: str
    blocks: Sequence[Block]
