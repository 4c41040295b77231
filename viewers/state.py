"""The state of a store in a terminal: what it holds, where each span is, who writes and who delivers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from trackway.trace.printable import visible

from .columns import GAP, Column, Columns, one_line
from .text import fold
from .words import DIM, age, count, encodable, process, rate, size

if TYPE_CHECKING:
    from trackway.trace.store import StoreStatus, WriterStatus

_MAX_ERROR = 500
_MAX_PROGRAM = 40
_MAX_ALIVE, _MAX_DIED, _MAX_ENDED = 12, 5, 3
"""Processes that get a line of their own."""
_RECORDING, _DIED, _ENDED = ("recording", "green"), ("DIED", "bold red"), ("ended", DIM)


@dataclass(frozen=True)
class Rates:
    """What happened each second, between two looks at a store.

    Attributes:
        recorded: spans.
        bytes: bytes that the journal grew by.
        exported: spans that each destination took.
    """

    recorded: float
    bytes: float
    exported: Mapping[str, float] = field(default_factory=dict)


def status_view(
    status: StoreStatus,
    path: str = "",
    *,
    followed: bool | None = None,
    rates: Rates | None = None,
    news: Sequence[tuple[str, str]] = (),
    now_ns: int | None = None,
) -> RenderableType:
    """What a store holds, and where each recorded span is: exported, pending, left out or dropped.

    Args:
        path: where the store is, for the first line.
        followed: whether somebody delivers to the destinations at this moment; None when that is not known.
        rates: what happened each second, for a view that is shown again and again.
        news: what happened while one watched: when, and what.
        now_ns: the time to count from, nanoseconds since 1970; by default this moment.
    """
    parts: list[RenderableType] = [_Facts(list(_facts(status, path, followed, rates, news)))]
    if status.destinations:
        parts += [Text(""), _destinations(status, rates)]
        errors = list(_last_errors(status))
        parts += [Text(""), *errors] if errors else []
    if status.writers:
        parts += [Text(""), _processes(status.writers, time.time_ns() if now_ns is None else now_ns)]
    return Group(*parts)


@dataclass(frozen=True)
class _Facts:
    """Lines of a label and what it is about."""

    rows: list[tuple[str, Text]]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        label = max(cell_len(label) for label, _ in self.rows) + GAP
        wide = label + max(cell_len(line) for _, text in self.rows for line in text.plain.split("\n"))
        return Measurement(min(40, options.max_width), min(wide, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        column = max(cell_len(label) for label, _ in self.rows) + GAP
        for label, text in self.rows:
            for line in fold(encodable(text.plain, options.encoding), options.max_width - column):
                yield Text.assemble((set_cell_size(label, column), DIM), (line.rstrip(), text.style))
                label = ""


def _facts(
    status: StoreStatus,
    path: str,
    followed: bool | None,
    rates: Rates | None,
    news: Sequence[tuple[str, str]],
) -> Iterator[tuple[str, Text]]:
    if path:
        yield "store", Text(visible(path, newlines=False))
    held = [count(status.trajectories, "trajectory", "trajectories"), f"{status.in_flight:,} running"]
    if status.died:
        held.append(f"{status.died:,} died")
    yield "holds", Text(", ".join([*held, size(status.bytes)]))
    ended = status.writers_dead - status.writers_died
    processes = Text(f"{status.writers_alive:,} recording now, {ended:,} ended")
    if status.writers_died:
        processes.append(f", {status.writers_died:,} DIED")
    yield "processes", processes
    yield "spans", _balance(status)
    if rates is not None:
        yield "each second", Text(f"{rate(rates.recorded)} spans, {size(round(rates.bytes))}")
    for reason, number in status.dropped_by_reason.items():
        yield "dropped", Text(f"{number:,} {visible(reason, newlines=False)}", "yellow")
    if status.torn_lines:
        torn = f"{count(status.torn_lines, 'line')} cut short by a crash or a full disk"
        yield "torn", Text(torn, "yellow")
    if status.troubles:
        troubles = f"{count(status.troubles, 'failure')} while recording; the log of the training tells more"
        yield "trouble", Text(troubles, "yellow")
    if status.unmatched:
        unmatched = f"{count(status.unmatched, 'time')} to a rollout that is not here"
        yield "attached", Text(unmatched, "yellow")
    if not status.destinations:
        yield "sent to", Text("nowhere yet", DIM)
    elif followed:
        yield "follower", Text("at work")
    elif followed is not None:
        late = any(place.lag for place in status.destinations.values())
        asleep = "none at work; trackway sync sends what is complete" if late else "none at work"
        yield "follower", Text(asleep, "yellow" if late else "")
    for moment, what in news:
        yield moment, Text(what)


def _balance(status: StoreStatus) -> Text:
    """recorded = exported + pending + left out + dropped, in words."""
    where = f"{status.exported:,} {'exported' if status.destinations else 'in the journal'}"
    left_out = f" + {status.left_out:,} left out" if status.left_out else ""
    refused = any(place.refused for place in status.destinations.values())
    pending = f"{status.pending:,} pending{' or refused' if refused else ''}"
    text = f"{status.recorded:,} recorded = {where} + {pending}{left_out}"
    text += f" + {status.dropped:,} dropped"
    missing = status.recorded - status.exported - status.pending - status.left_out - status.dropped
    if missing:
        return Text(f"{text}\nERROR {missing:,} are not accounted for", "red")
    return Text(text, "yellow" if status.dropped else "")


def _destinations(status: StoreStatus, rates: Rates | None) -> Columns:
    places = status.destinations
    columns = [
        Column("sent to", [Text(visible(name, newlines=False)) for name in places]),
        Column("exported", [Text(f"{each.exported:,}") for each in places.values()], right=True),
    ]
    if rates is not None:
        each_second = [Text(rate(rates.exported.get(name, 0.0))) for name in places]
        columns.append(Column("each second", each_second, right=True))
    refused = [Text(f"{each.refused:,}", "red" if each.refused else "") for each in places.values()]
    columns.append(Column("pending", [Text(f"{each.pending:,}") for each in places.values()], right=True))
    if any(each.left_out for each in places.values()):
        left_out = [Text(f"{each.left_out:,}") for each in places.values()]
        columns.append(Column("left out", left_out, right=True))
    columns += [
        Column("refused", refused, right=True),
        Column("sent", [Text(size(each.sent_bytes)) for each in places.values()], right=True),
        Column("behind", [Text(age(each.lag) if each.lag else "-") for each in places.values()], right=True),
    ]
    return Columns(columns)


def _last_errors(status: StoreStatus) -> Iterator[Text]:
    for name, place in status.destinations.items():
        if place.last_error:
            yield Text.assemble(
                (f"last error of {visible(name, newlines=False)}: ", DIM),
                (one_line(place.last_error, _MAX_ERROR), "red"),
                overflow="fold",
            )


def _processes(writers: Sequence[WriterStatus], now_ns: int) -> Columns:
    """Those that live, the one that was silent longest first; those that died, the last one first; those that
    ended, in one line when many."""
    ordered = sorted(writers, key=lambda each: each.last_wrote_ns or 0)
    alive = [each for each in ordered if each.alive]
    died = [each for each in reversed(ordered) if each.died]
    ended = [each for each in ordered if not each.alive and not each.died]
    rows = [*_first(alive, _MAX_ALIVE, now_ns), *_first(died, _MAX_DIED, now_ns)]
    if len(ended) > _MAX_ENDED:
        rows.append(_together(ended, "ended", now_ns))
    else:
        rows += [_process(each, now_ns) for each in ended]
    names, programs, states, recorded, dropped, running, wrote = (
        list(each) for each in zip(*rows, strict=True)
    )
    return Columns(
        [
            Column("process", names, cut=True),
            Column("program", programs, cut=True, spare=2),
            Column("state", states, spare=1),
            Column("recorded", recorded, right=True),
            Column("dropped", dropped, right=True),
            Column("running", running, right=True),
            Column("last wrote", wrote, right=True),
        ]
    )


def _first(writers: Sequence[WriterStatus], most: int, now_ns: int) -> Iterator[tuple[Text, ...]]:
    """A line for each of the first ones, and one for all others."""
    for each in writers[:most]:
        yield _process(each, now_ns)
    if len(writers) > most:
        yield _together(writers[most:], "more", now_ns)


def _process(writer: WriterStatus, now_ns: int) -> tuple[Text, ...]:
    program = PurePath(writer.program or "-")
    if program.name == "__main__.py":
        program = program.parent
    return (
        Text(process(writer.pid, writer.host, writer.name)),
        Text(one_line(program.name, _MAX_PROGRAM), DIM),
        _state(writer),
        *_numbers([writer], now_ns),
    )


def _together(writers: Sequence[WriterStatus], word: str, now_ns: int) -> tuple[Text, ...]:
    return Text(f"{len(writers):,} {word}", DIM), Text(""), _state(writers[0]), *_numbers(writers, now_ns)


def _state(writer: WriterStatus) -> Text:
    return Text(*(_RECORDING if writer.alive else _DIED if writer.died else _ENDED))


def _numbers(writers: Sequence[WriterStatus], now_ns: int) -> Iterator[Text]:
    yield Text(f"{sum(each.recorded for each in writers):,}")
    dropped = sum(each.dropped for each in writers)
    yield Text(f"{dropped:,}", "yellow" if dropped else "")
    yield Text(f"{sum(each.running for each in writers):,}")
    last = max((each.last_wrote_ns or 0 for each in writers), default=0)
    yield Text(f"{age((now_ns - last) / 1e9)} ago" if last else "-")
