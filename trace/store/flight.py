"""What runs now: the spans that living writers keep in their side files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..model import Span, Summary, Trajectory
from . import journal, otlp
from .assemble import assemble, decode_span
from .index import Index


@dataclass(frozen=True, slots=True)
class InFlight:
    """A rollout that runs now.

    Attributes:
        summary: what is known of it so far: the calls that have ended.
        doing: the innermost calls that are open, the one that is open longest first. What has been open for
            less than a second is not known yet.
        last_sign_ns: when something was last seen to happen in it, nanoseconds since 1970: a call began or
            ended, a reward was given.
        writer: name of the process it runs in, as ``StoreStatus.writers`` has it.
        pid, host: of that process; None when it left no word of itself.
    """

    summary: Summary
    doing: tuple[Span, ...]
    last_sign_ns: int
    writer: str
    pid: int | None = None
    host: str | None = None


class Flight:
    """Spans that are open now; those of writers that have died are in the index.

    Args:
        store: folder of the store.
        writers: what is known of its writers, where somebody has asked already.

    Attributes:
        alive: names of the writers that live.
        traces: trace id -> its open spans.
        writer_of: id of an open span -> its writer.
    """

    def __init__(self, store: Path, writers: Iterable[journal.Writer] | None = None) -> None:
        known = journal.writers(store) if writers is None else writers
        self._living = {writer.name: writer for writer in known if writer.alive}
        self.alive = set(self._living)
        self.traces: dict[str, list[Span]] = {}
        self.writer_of: dict[str, journal.Writer] = {}
        for writer in self._living.values():
            for line in writer.open_spans.splitlines():
                try:
                    spans = [decode_span(raw, resource) for raw, resource in otlp.spans_of(line)]
                except ValueError:
                    continue
                for span in spans:
                    self.traces.setdefault(span.trace_id, []).append(span)
                    self.writer_of[span.span_id] = writer

    def trajectory(self, trace_id: str) -> Trajectory:
        """Give a trajectory of which nothing but open spans is known."""
        return assemble(self.traces[trace_id], alive=True)

    def runs_in(self, trace_id: str, writers: set[str]) -> set[str]:
        """Name the living writers that a trace without an end runs in; there are none when it has died.

        Args:
            writers: those that have written to it.
        """
        holders = {self.writer_of[span.span_id].name for span in self.traces.get(trace_id, ())}
        return holders or writers & self.alive

    def look(self, summary: Summary, index: Index) -> InFlight | None:
        """Say what a rollout that runs is doing; None when its process has ended meanwhile."""
        ended = index.ends(summary.trace_id)
        spans = [span for span in self.traces.get(summary.trace_id, ()) if span.span_id not in ended]
        outer = {span.parent_id for span in spans}
        doing = sorted((span for span in spans if span.span_id not in outer), key=lambda span: span.start_ns)
        begun = [span.start_ns for span in spans]
        told = [event.time_ns for span in spans for event in span.events]
        if doing:
            writer = self.writer_of[doing[0].span_id]
        elif names := self.runs_in(summary.trace_id, index.writers_of(summary.trace_id)):
            writer = self._living[min(names)]
        else:
            return None
        return InFlight(
            summary=summary,
            doing=tuple(doing),
            last_sign_ns=max([summary.start_ns, *ended.values(), *begun, *told]),
            writer=writer.name,
            pid=pid_of(writer),
            host=text_of(writer, "host"),
        )


def pid_of(writer: journal.Writer) -> int | None:
    """Give the process id that a writer says it has."""
    pid = writer.counters.get("pid")
    return pid if isinstance(pid, int) else None


def text_of(writer: journal.Writer, name: str) -> str | None:
    """Give a text that a writer says of itself; whatever else stands there is as if it said nothing."""
    value = writer.counters.get(name)
    return value if isinstance(value, str) and value else None
