"""Trajectories in a terminal: a replay, a table, the state of a store.

What comes from a trace is only ever put into plain ``rich.text.Text``, never into markup, and only after
``visible``; so model output can neither style nor steer the terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from trackway.trace.model import Status, Summary, ToolCall, Trajectory, Turn

from .text import cut, fold, visible

if TYPE_CHECKING:
    from trackway.trace.store import StoreStatus

MAX_CHARS = 2000
_MAX_TURNS = 200
_MAX_CALLS = 50
_MAX_NAME = 200
_LABEL = 12
_ROLE = 9

_DIM = "dim"
_STATUS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "error": ("ERROR", "bold red"),
    "died": ("DIED", "bold red"),
    "cancelled": ("cancelled", "yellow"),
    "running": ("running", "cyan"),
}
_ROLE_STYLE = {"system": _DIM, "user": "blue", "assistant": "green", "tool": "magenta"}

_Item = TypeVar("_Item")


def replay(
    trajectory: Trajectory, *, full: bool = False, max_chars: int = MAX_CHARS, turn: int | None = None
) -> RenderableType:
    """Show what happened in a rollout, turn by turn.

    Args:
        full: show every text, turn and tool call whole, however long.
        max_chars: how many characters of one text are shown otherwise; its beginning and end.
        turn: show only the turn with this index.

    Raises:
        LookupError: there is no such turn; the message says which there are.
    """
    turns = trajectory.turns
    if turn is not None:
        turns = tuple(each for each in turns if each.index == turn)
        if not turns:
            raise LookupError(f"{trajectory.name} has no turn {turn}; {_turn_range(trajectory.turns)}")
    return _Replay(trajectory, turns, None if full else max_chars)


def _turn_range(turns: Sequence[Turn]) -> str:
    if not turns:
        return "it has no turns"
    return f"its turns are {turns[0].index} to {turns[-1].index}"


def table(summaries: Iterable[Summary]) -> Table:
    """One row for each trajectory, for 80 columns and more; a line below counts them."""
    rows = list(summaries)
    view = _plain_table(caption=Text(_caption(rows)), caption_style=_DIM, caption_justify="left")
    view.add_column("key", overflow="fold", min_width=8)
    view.add_column("status", no_wrap=True)
    for name in ("reward", "turns", "tools", "tokens", "errors", "time"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("started", justify="right", no_wrap=True)
    for row in rows:
        word, style = _STATUS[row.status]
        view.add_row(
            Text(visible(row.name, newlines=False)),
            Text(word, style),
            Text("-" if row.reward is None else _aligned(row.reward), "" if row.reward is not None else _DIM),
            Text(str(row.turns)),
            Text(str(row.tool_calls)),
            Text(f"{row.tokens:,}"),
            Text(str(row.errors), "red" if row.errors else _DIM),
            Text(_duration(row.start_ns, row.end_ns)),
            Text(_when(row.start_ns, "%m-%d %H:%M"), _DIM),
        )
    return view


def _plain_table(**more: Any) -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        border_style=_DIM,
        header_style="bold",
        **more,
    )


def _caption(rows: Sequence[Summary]) -> str:
    failed = sum(row.status in ("error", "died") for row in rows)
    parts = [_count(len(rows), "trajectory", "trajectories")]
    if failed:
        parts.append(f"{failed} failed")
    rewards = [row.reward for row in rows if row.reward is not None and math.isfinite(row.reward)]
    if rewards:
        parts.append(f"mean reward {_number(math.fsum(rewards) / len(rewards))}")
    return ", ".join(parts)


def status_view(status: StoreStatus, path: str = "") -> RenderableType:
    """What a store holds, and where each recorded span is: exported, pending or dropped.

    Args:
        path: where the store is, for the first line.
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=_DIM, no_wrap=True)
    grid.add_column(overflow="fold")
    if path:
        grid.add_row(Text("store"), Text(visible(path, newlines=False)))
    held = _count(status.trajectories, "trajectory", "trajectories")
    grid.add_row(Text("holds"), Text(f"{held}, {status.in_flight:,} running, {_bytes(status.bytes)}"))
    writers = f"{status.writers_alive:,} recording now, {status.writers_dead:,} ended"
    grid.add_row(Text("processes"), Text(writers))
    grid.add_row(Text("spans"), *_balance(status))
    for reason, number in status.dropped_by_reason.items():
        grid.add_row(Text("dropped"), Text(f"{number:,} {visible(reason, newlines=False)}", "yellow"))
    if status.torn_lines:
        torn = f"{_count(status.torn_lines, 'line')} that a crash left unreadable"
        grid.add_row(Text("torn"), Text(torn, "yellow"))
    if status.troubles:
        troubles = f"{_count(status.troubles, 'failure')} while recording; the log of the training tells more"
        grid.add_row(Text("trouble"), Text(troubles, "yellow"))
    if not status.destinations:
        grid.add_row(Text("sent to"), Text("nowhere yet", _DIM))
        return grid

    view = _plain_table()
    view.add_column("sent to", overflow="fold")
    for name in ("exported", "pending", "refused"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("last error", overflow="fold")
    for name, destination in status.destinations.items():
        error = destination.last_error
        view.add_row(
            Text(visible(name, newlines=False)),
            Text(f"{destination.exported:,}"),
            Text(f"{destination.pending:,}"),
            Text(f"{destination.refused:,}", "red" if destination.refused else ""),
            Text(visible(error or "-"), "red" if error else _DIM),
        )
    return Group(grid, Text(""), view)


def _balance(status: StoreStatus) -> Iterator[Text]:
    """recorded = exported + pending + dropped, in words."""
    where = f"{status.exported:,} {'exported' if status.destinations else 'in the journal'}"
    text = f"{status.recorded:,} recorded = {where} + {status.pending:,} pending + {status.dropped:,} dropped"
    missing = status.recorded - status.exported - status.pending - status.dropped
    if missing:
        yield Text(f"{text}\nERROR {missing:,} are not accounted for", "red")
    else:
        yield Text(text, "yellow" if status.dropped else "")


@dataclass(frozen=True)
class _Replay:
    trajectory: Trajectory
    turns: tuple[Turn, ...]
    max_chars: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = _Page(options.max_width, options.encoding, self.max_chars)
        for line in page.replay(self.trajectory, self.turns):
            line.no_wrap = True
            line.overflow = "ignore"
            yield line


class _Page:
    """Lays a replay out as lines for one width and one encoding; ``max_chars`` None cuts nothing."""

    def __init__(self, width: int, encoding: str, max_chars: int | None) -> None:
        self.width = max(40, width)
        self.encoding = encoding
        self.max_chars = max_chars
        narrow = not encoding.startswith("utf")
        self.rule, self.dot = ("-", ", ") if narrow else ("─", " · ")
        self.arrow, self.more = ("->", "...") if narrow else ("→", "…")
        # What a turn said, what came of it, and what is known about it stand behind different bars, so
        # that a text that imitates a tool call is not taken for one, also without colour.
        self.said, self.did, self.known = ("|", "+", "\\") if narrow else ("│", "├", "╰")

    def text(self, text: str) -> str:
        """Text of a trace as this page can show it."""
        return self.encodable(visible(text))

    def name(self, name: str) -> str:
        """A name from a trace on one line, short enough to be one."""
        short = name if len(name) <= _MAX_NAME else name[:_MAX_NAME] + self.more
        return self.encodable(visible(short, newlines=False))

    def encodable(self, text: str) -> str:
        if self.encoding.startswith("utf"):
            return text
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)

    def replay(self, trajectory: Trajectory, turns: tuple[Turn, ...]) -> Iterator[Text]:
        yield from self.header(trajectory)
        if not trajectory.generations:
            yield Text("")
            yield Text("no generation was recorded inside this rollout", "yellow")
        if not trajectory.turns and trajectory.root:
            for label, value in (("inputs", trajectory.root.inputs), ("outputs", trajectory.root.outputs)):
                yield Text("")
                label = f"{label:<{_ROLE + 2}} "
                lines = self.body(_plain(value), "", self.width - len(label) - 2)
                yield from self.gutter(label, _DIM, ((self.said, line) for line in lines))
        digits = len(str(max((abs(turn.index) for turn in trajectory.turns), default=0)))
        versions = _new_versions(trajectory.turns)
        answers = _answers(trajectory.turns)
        for turn in self.some(turns, _MAX_TURNS):
            yield Text("")
            if isinstance(turn, int):
                yield Text(f"{self.more} {turn:,} more turns (--full shows all, --turn N shows one)", _DIM)
                continue
            yield from self.turn(turn, digits, versions.get(turn.index), answers)
        if turns == trajectory.turns:
            yield from self.other_errors(trajectory)

    def header(self, trajectory: Trajectory) -> Iterator[Text]:
        word, style = _STATUS[trajectory.status]
        *lines, last = self.body(trajectory.name, "bold", self.width - 30)
        yield from lines
        left = Text.assemble(last, "  ", (word, style))
        if trajectory.reward is not None:
            reward = f"reward {_number(trajectory.reward)}"
            gap = self.width - left.cell_len - len(reward)
            left.append(" " * max(2, gap) + reward, "bold")
        yield left
        yield Text(self.rule * self.width, _DIM)
        if trajectory.error:
            label = "died" if trajectory.status == "died" else "error"
            yield from self.field(label, trajectory.error, "red")
        key = trajectory.key
        if key is None:
            yield from self.field("rollout", "no trajectory(...) named it")
        else:
            step = "unknown" if key.step is None else key.step
            sample = "unknown" if key.sample_index is None else key.sample_index
            parts = [f"step {step}", f"sample {sample}", f"rollout {key.rollout_n}"]
            if key.attempt:
                parts.append(f"attempt {key.attempt}")
            parts.append("validation" if key.validate else "training")
            yield from self.field("rollout", self.dot.join(parts))
        if trajectory.policy_versions:
            yield from self.field("policy", f" {self.arrow} ".join(map(str, trajectory.policy_versions)))
        if trajectory.rewards:
            rewards = (f"{self.name(name)} {_number(value)}" for name, value in trajectory.rewards.items())
            yield from self.field("rewards", self.dot.join(rewards))
        yield from self.field(
            "time",
            f"{_when(trajectory.start_ns, '%Y-%m-%d %H:%M:%S %Z')}{self.dot}"
            f"{_duration(trajectory.start_ns, trajectory.end_ns, 'still open')}",
        )
        parts = [
            _count(len(trajectory.turns), "turn"),
            _count(trajectory.generations, "generation"),
            _count(len(trajectory.tool_calls), "tool call"),
            _count(trajectory.errors, "error"),
        ]
        yield from self.field("turns", self.dot.join(parts))
        prompt = trajectory.prompt_tokens
        generated = sum(len(turn.token_ids) for turn in trajectory.turns if turn.role == "assistant")
        parts = [
            f"{prompt:,} prompt",
            f"{trajectory.tokens - prompt:,} response ({generated:,} generated)",
        ]
        yield from self.field("tokens", self.dot.join(parts))
        names = [name for name in (trajectory.project, trajectory.experiment) if name]
        if names:
            yield from self.field("experiment", " / ".join(names))
        if trajectory.run_id:
            yield from self.field("run", trajectory.run_id)
        yield from self.field("trace", trajectory.trace_id)
        for name, value in trajectory.annotations.items():
            yield from self.field("noted", f"{self.name(name)} = {_plain(value)}")
        for note in self.some(tuple(dict.fromkeys(trajectory.notes)), _MAX_CALLS):
            text = f"{self.more} {note:,} more (--full shows all)" if isinstance(note, int) else note
            yield from self.field("warning", text, "yellow")
        if any(span.incomplete for span in trajectory.spans):
            text = "spans that others build on are missing; some turns lack token ids at their start"
            yield from self.field("warning", text, "yellow")
        yield Text(self.rule * self.width, _DIM)

    def field(self, label: str, value: str, style: str = "") -> Iterator[Text]:
        for line in self.body(value, style, self.width - _LABEL):
            yield Text.assemble((f"{label:<{_LABEL}}", _DIM), line)
            label = ""

    def turn(
        self, turn: Turn, digits: int, version: int | str | None, answers: Mapping[int, int]
    ) -> Iterator[Text]:
        role = self.name(turn.role)
        style = "red" if turn.error else _ROLE_STYLE.get(turn.role, "")
        label = f"{turn.index:>{digits}} {set_cell_size(role, _ROLE)} "
        width = self.width - len(label) - 2
        rows: list[tuple[str, Text]] = []
        # A tool that no generation asked for has its call in its own turn, with its result and its error.
        own = turn.role == "tool" and turn.span_id in {call.span_id for call in turn.tool_calls} - {None}
        if turn.text and not own:
            said = self.body(turn.text, _DIM if turn.role == "system" else "", width)
            rows.extend((self.said, line) for line in said)
        elif not turn.tool_calls and not turn.error:
            rows.append((self.known, Text("no text was recorded", _DIM)))
        for call in self.some(turn.tool_calls, _MAX_CALLS):
            if isinstance(call, int):
                more = f"{self.more} {call:,} more tool calls (--full shows all)"
                rows.append((self.did, Text(more, _DIM)))
            else:
                rows.extend(self.block(self.tool_call(call, width, answers.get(id(call)))))
        if turn.error and not own:
            rows.extend(self.block(self.error(turn.error, width)))
        facts = self.dot.join(self.facts(turn, version))
        if facts:
            rows.extend((self.known, line) for line in self.body(facts, _DIM, width))
        yield from self.gutter(label, style, rows)

    def block(self, lines: Iterable[Text]) -> Iterator[tuple[str, Text]]:
        bar = self.did
        for line in lines:
            yield bar, line
            bar = self.said

    def facts(self, turn: Turn, version: int | str | None) -> Iterator[str]:
        if turn.name:
            yield self.name(turn.name)
        if turn.start_ns is not None and turn.end_ns is not None:
            yield _duration(turn.start_ns, turn.end_ns)
        if turn.token_ids:
            tokens = _count(len(turn.token_ids), "token")
            trained = sum(turn.mask)
            expected = len(turn.token_ids) if turn.role == "assistant" else 0
            yield f"{tokens} ({trained:,} trained)" if turn.mask and trained != expected else tokens
        if turn.finish_reason:
            yield turn.finish_reason
        if version is not None:
            yield f"policy {version}"

    def tool_call(self, call: ToolCall, width: int, answer: int | None) -> Iterator[Text]:
        name = self.name(call.name)
        inline = self.inline_arguments(call.arguments)
        took = "" if call.start_ns is None or call.end_ns is None else _duration(call.start_ns, call.end_ns)
        tail = f"  {took}" if took else ""
        head = Text(name, "bold magenta")
        if inline is not None and head.cell_len + cell_len(inline) + len(tail) <= width:
            yield Text.assemble(head, inline, (tail, _DIM))
        else:
            *lines, last = (Text(line, "bold magenta") for line in fold(name, width - len(tail)))
            yield from lines
            yield Text.assemble(last, (tail, _DIM))
            yield from self.argument_lines(call.arguments, width)
        if answer is not None:
            word = ("ERROR, ", "bold red") if call.error else ""
            yield Text.assemble((f"  {self.arrow} ", _DIM), word, (f"turn {answer}", _DIM))
            return
        if call.result is not None:
            mark = f"  {self.arrow} "
            for line in self.body(call.result, "", width - len(mark)):
                yield Text.assemble((mark, _DIM), line)
                mark = " " * len(mark)
        elif not call.error:
            yield Text("  (no result)", _DIM)
        if call.error:
            yield from (Text.assemble("  ", line) for line in self.error(call.error, width - 2))

    def inline_arguments(self, arguments: Any) -> str | None:
        """Arguments as in a call, ``(expression="2+2")``; None when they need several lines."""
        if arguments is None:
            return "()"
        if isinstance(arguments, str):
            shown = arguments
        elif isinstance(arguments, Mapping):
            if any(isinstance(value, str) and "\n" in value for value in arguments.values()):
                return None
            shown = ", ".join(f"{name}={_json(value)}" for name, value in arguments.items())
        else:
            shown = _json(arguments)
        return None if len(shown) > self.width or "\n" in shown else self.text(f"({shown})")

    def argument_lines(self, arguments: Any, width: int) -> Iterator[Text]:
        if not isinstance(arguments, Mapping):
            yield from (Text.assemble("  ", line) for line in self.body(_plain(arguments), "", width - 2))
            return
        names = [self.name(str(name)) for name in arguments]
        column = min(16, max(map(cell_len, names), default=0)) + 2
        for name, value in zip(names, arguments.values(), strict=True):
            label = name if cell_len(name) <= column - 2 else ""
            if not label:
                yield from (Text.assemble("  ", (line, _DIM)) for line in fold(name, width - 2))
            for line in self.body(_plain(value), "", width - 2 - column):
                yield Text.assemble("  ", (set_cell_size(label, column), _DIM), line)
                label = ""

    def other_errors(self, trajectory: Trajectory) -> Iterator[Text]:
        """Errors of spans that no turn shows, so that each error that the header counts can be read."""
        shown = {turn.span_id for turn in trajectory.turns if turn.error}
        shown.update(call.span_id for call in trajectory.tool_calls if call.error)
        if trajectory.error and trajectory.root:
            shown.add(trajectory.root.span_id)
        failed = [span for span in trajectory.spans if span.status in ("error", "died")]
        spans = [span for span in failed if span.span_id not in shown]
        if not spans:
            return
        yield Text("")
        yield Text("errors of other calls", "bold")
        for span in self.some(spans, _MAX_CALLS):
            if isinstance(span, int):
                yield Text(f"{self.more} {span:,} more errors (--full shows all)", _DIM)
                continue
            message = span.error or "no message was recorded"
            yield from self.error(f"{self.name(span.name)}: {message}", self.width)

    def error(self, message: str, width: int) -> Iterator[Text]:
        mark = "ERROR "
        for line in self.body(message, "red", width - len(mark)):
            yield Text.assemble((mark, "bold red"), line)
            mark = " " * len(mark)

    def body(self, text: str, style: str, width: int) -> Iterator[Text]:
        """A text as lines of at most ``width`` cells, its middle cut out when it is long."""
        head, hidden, tail = (text, 0, "") if self.max_chars is None else cut(text, self.max_chars)
        yield from (Text(line, style) for line in fold(self.text(head), width))
        if hidden:
            message = f"{self.more} {_count(hidden, 'more character')} (--full shows all)"
            yield Text(message, f"italic {_DIM}")
            yield from (Text(line, style) for line in fold(self.text(tail), width))

    def gutter(self, label: str, style: str, rows: Iterable[tuple[str, Text]]) -> Iterator[Text]:
        for bar, line in rows:
            yield Text.assemble((label, f"bold {style}".strip()), (f"{bar} ", style), line)
            label = " " * len(label)

    def some(self, items: Sequence[_Item], limit: int) -> Iterator[_Item | int]:
        """All items, or when there are too many the first and the last, with the number left out between."""
        if self.max_chars is None or len(items) <= limit:
            yield from items
            return
        head = limit * 2 // 3
        tail = len(items) - (limit - head)
        yield from items[:head]
        yield tail - head
        yield from items[tail:]


def _answers(turns: Sequence[Turn]) -> dict[int, int]:
    """For each tool call (by ``id``) whose outcome a later tool turn shows, the index of that turn."""
    found: dict[int, int] = {}
    waiting: list[ToolCall] = []
    for turn in turns:
        if turn.role == "assistant":
            waiting = []
        elif turn.role == "tool":
            for call in waiting:
                same = call.span_id is not None and call.span_id == turn.span_id
                told = same or (call.result is not None and _holds(turn.text, call.result.strip()))
                if told and (turn.error or not call.error):
                    found[id(call)] = turn.index
            waiting = [call for call in waiting if id(call) not in found]
        waiting.extend(turn.tool_calls)
    return found


def _holds(text: str, part: str) -> bool:
    """Whether ``part`` stands in ``text`` as whole words."""
    start = text.find(part) if part else -1
    while start >= 0:
        before, after = text[start - 1 : start], text[start + len(part) : start + len(part) + 1]
        inside_a_word = (before.isalnum() and part[0].isalnum()) or (after.isalnum() and part[-1].isalnum())
        if not inside_a_word:
            return True
        start = text.find(part, start + len(part))
    return False


def _new_versions(turns: Sequence[Turn]) -> dict[int, int | str]:
    """The policy version of each turn (by index) where it differs from the one before."""
    found: dict[int, int | str] = {}
    current: int | str | None = None
    for turn in turns:
        if turn.policy_version is not None and turn.policy_version != current:
            found[turn.index] = current = turn.policy_version
    return found


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value, indent=2)


def _json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent, default=_typed)
    except (TypeError, ValueError, RecursionError):
        return _typed(value)


def _typed(value: Any) -> str:
    return f"<{type(value).__name__}>"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _aligned(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e5 else f"{value:.4g}"


def _duration(start_ns: int, end_ns: int | None, unknown: str = "-") -> str:
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


def _when(time_ns: int, layout: str) -> str:
    try:
        return datetime.fromtimestamp(time_ns / 1e9).astimezone().strftime(layout)
    except (ValueError, OverflowError, OSError):
        return f"{time_ns} ns"


def _bytes(number: int) -> str:
    size = float(number)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
