"""Lists of trajectories: those that were recorded, and those that run now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from trackway.trace.model import Kind, Summary
from trackway.trace.printable import visible

from .columns import Column, Columns, one_line
from .words import DIM, STATUS, age, aligned, count, duration, process, when

if TYPE_CHECKING:
    from trackway.trace.store import InFlight

_MAX_CELL = 200
_MAX_KINDS = 5
_SHORT_ID = 12
_KINDS: dict[Kind, str] = {"llm": "generation", "trajectory": "between calls"}


def table(summaries: Iterable[Summary], *, more: bool = False) -> RenderableType:
    """One row for each trajectory, and below how many there are, how they fared and what went wrong.

    Where the terminal is narrow, columns that tell less are left out. A key is never cut.

    Args:
        more: there are more trajectories than these, which the line below then says.
    """
    rows = list(summaries)
    return Columns(_listing(rows), tuple(_footer(rows, more)))


def in_flight_table(
    rows: Sequence[InFlight], now_ns: int, *, died: int = 0, more: bool = False
) -> RenderableType:
    """One row for each rollout that runs: what it does, for how long, and when it last gave a sign.

    Args:
        now_ns: the time to count from, nanoseconds since 1970.
        died: how many others ended with their process, for the line below.
        more: there are more rollouts than these.
    """
    lasts = [_since(row.doing[0].start_ns if row.doing else None, now_ns) for row in rows]
    processes = [Text(process(row.pid, row.host, row.writer), DIM) for row in rows]
    columns = [
        Column("key", [Text(_name(row.summary)) for row in rows], folded=True),
        Column("doing", [_doing(row) for row in rows], cut=True),
        Column("for", [Text(each) for each in lasts], right=True),
        Column("last sign", [Text(f"{_since(row.last_sign_ns, now_ns)} ago") for row in rows], right=True),
        Column("turns", [Text(str(row.summary.turns)) for row in rows], right=True, spare=2),
        Column("version", [Text(_version(row.summary)) for row in rows], right=True, spare=3),
        Column("process", processes, cut=True, spare=1),
    ]
    shown = count(len(rows), "rollout runs", "rollouts run")
    if more:
        shown = f"{len(rows):,} rollouts shown (there are more)"
    return Columns(columns, (shown + died_with(died),))


def died_with(number: int) -> str:
    """How many rollouts died with their process, as the end of a line; nothing where none did."""
    whose = "its" if number == 1 else "their"
    return f"; {number:,} died with {whose} process: trackway ls --status died" if number else ""


def _doing(row: InFlight) -> Text:
    if not row.doing:
        return Text("-", DIM)
    call, *others = row.doing
    kind = _KINDS.get(call.kind, call.kind)
    text = kind if call.kind == "trajectory" else f"{kind} {one_line(call.name, _MAX_CELL)}"
    return Text(f"{text} (+{len(others)})" if others else text)


def _since(moment_ns: int | None, now_ns: int) -> str:
    return "-" if moment_ns is None else age((now_ns - moment_ns) / 1e9)


def _version(row: Summary) -> str:
    return "-" if row.policy_version is None else one_line(str(row.policy_version), 20)


def _listing(rows: Sequence[Summary]) -> list[Column]:
    columns = [
        Column("key", [Text(_name(row)) for row in rows], folded=True),
        Column("status", [Text(*STATUS[row.status]) for row in rows]),
    ]
    if len({row.experiment for row in rows}) > 1:
        names = [Text(visible(row.experiment or "-", newlines=False)) for row in rows]
        columns.append(Column("experiment", names, spare=1))
    rewards = [Text("-", DIM) if row.reward is None else Text(aligned(row.reward)) for row in rows]
    errors = [Text(str(row.errors), "red" if row.errors else DIM) for row in rows]
    started = [Text(when(row.start_ns, "%m-%d %H:%M"), DIM) for row in rows]
    columns += [
        Column("reward", rewards, right=True),
        Column("turns", [Text(str(row.turns)) for row in rows], right=True, spare=6),
        Column("tools", [Text(str(row.tool_calls)) for row in rows], right=True, spare=4),
        Column("tokens", [Text(f"{row.tokens:,}") for row in rows], right=True, spare=5),
        Column("errors", errors, right=True, spare=2),
        Column("time", [Text(_lasted(row)) for row in rows], right=True, spare=3),
        Column("started", started, right=True, spare=7),
    ]
    if any(row.error for row in rows):
        reasons = [Text(one_line(row.error or "", _MAX_CELL), "red") for row in rows]
        columns.append(Column("error", reasons, cut=True))
    return columns


def _lasted(row: Summary) -> str:
    """How long it took; of one that died only the end of its last call is known, which says little."""
    return "-" if row.status == "died" else duration(row.start_ns, row.end_ns)


def _name(row: Summary) -> str:
    """The key; what nobody named is known by the beginning of its trace id, which ``show`` takes too."""
    return row.trace_id[:_SHORT_ID] if row.key is None else visible(row.name, newlines=False)


def _footer(rows: Sequence[Summary], more: bool) -> Iterator[str]:
    failed = sum(row.status in ("error", "died") for row in rows)
    shown = count(len(rows), "trajectory", "trajectories")
    parts = [f"{shown} shown (there are more)" if more else shown]
    if failed:
        parts.append(f"{failed} failed")
    given = [row.reward for row in rows if row.reward is not None]
    rewards = [reward for reward in given if math.isfinite(reward)]
    if rewards:
        mean = f"mean reward {_short(math.fsum(rewards) / len(rewards))}"
        word = "reward" if len(rewards) == len(given) else "finite reward"
        of = f" ({len(rewards):,} of {len(rows):,} with a {word})" if len(rewards) < len(rows) else ""
        parts.append(mean + of)
    yield ", ".join(parts)
    kinds = Counter(_kind(row.error) for row in rows if row.error)
    if kinds:
        named = [f"{number:,} {kind}" for kind, number in kinds.most_common(_MAX_KINDS)]
        if len(kinds) > _MAX_KINDS:
            named.append(f"{sum(kinds.values()) - sum(n for _, n in kinds.most_common(_MAX_KINDS)):,} others")
        yield f"errors: {', '.join(named)}"


def _kind(error: str) -> str:
    return one_line(error.partition(":")[0], 60)


def _short(value: float) -> str:
    text = aligned(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
