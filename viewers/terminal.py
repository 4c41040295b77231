"""A trajectory in a terminal, turn by turn.

What comes from a trace is only ever put into plain ``rich.text.Text``, never into markup, and only after
``visible``; so model output can neither style nor steer the terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from trackway.trace import semconv
from trackway.trace.model import Span, ToolCall, Trajectory, Turn
from trackway.trace.printable import visible

from .text import cut, fold
from .words import DIM, STATUS, count, duration, encodable, error_text, number, when

MAX_CHARS = 2000
_MAX_TURNS = 200
_MAX_CALLS = 50
_MAX_NAME = 200
_LABEL = 12
_ROLE = 9
_MEANS = {
    "advantages": "mean advantage",
    "returns": "mean return",
    "trainer_logprobs": "mean trainer logprob",
}
_FRAME = re.compile(r'^[ |]*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)

_ROLE_STYLE = {"system": DIM, "user": "blue", "assistant": "green", "tool": "magenta"}

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


@dataclass(frozen=True)
class _Replay:
    trajectory: Trajectory
    turns: tuple[Turn, ...]
    max_chars: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = _Page(self.trajectory, options.max_width, options.encoding, self.max_chars)
        for line in page.replay(self.turns):
            line.no_wrap = True
            line.overflow = "ignore"
            yield line


class _Page:
    """Lays a trajectory out as lines for one width and one encoding; ``max_chars`` None cuts nothing."""

    def __init__(self, trajectory: Trajectory, width: int, encoding: str, max_chars: int | None) -> None:
        self.trajectory = trajectory
        self.spans = {span.span_id: span for span in trajectory.spans}
        self.agents = _agents(trajectory.spans)
        self.answers = _answers(trajectory.turns)
        self.decoded = any(
            text is not None for span in trajectory.spans for text in (span.prompt_text, span.response_text)
        )
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
        return encodable(visible(text), self.encoding)

    def name(self, name: str) -> str:
        """A name from a trace on one line, short enough to be one."""
        short = name if len(name) <= _MAX_NAME else name[:_MAX_NAME] + self.more
        return encodable(visible(short, newlines=False), self.encoding)

    def replay(self, turns: tuple[Turn, ...]) -> Iterator[Text]:
        trajectory = self.trajectory
        yield from self.header(trajectory)
        if not trajectory.generations:
            yield Text("")
            yield Text("no generation was recorded inside this rollout", "yellow")
        if not trajectory.turns and trajectory.root:
            for label, value in (("inputs", trajectory.root.inputs), ("outputs", trajectory.root.outputs)):
                if value is None:
                    continue
                yield Text("")
                label = f"{label:<{_ROLE + 2}} "
                lines = self.body(_plain(value), "", self.width - len(label) - 2)
                yield from self.gutter(label, DIM, ((self.said, line) for line in lines))
        digits = len(str(max((abs(turn.index) for turn in trajectory.turns), default=0)))
        versions = _new_versions(trajectory.turns)
        for turn in self.some(turns, _MAX_TURNS):
            yield Text("")
            if isinstance(turn, int):
                yield Text(f"{self.more} {turn:,} more turns (--full shows all, --turn N shows one)", DIM)
                continue
            yield from self.turn(turn, digits, versions.get(turn.index))
        if turns == trajectory.turns:
            yield from self.other_errors(trajectory)

    def header(self, trajectory: Trajectory) -> Iterator[Text]:
        word, style = STATUS[trajectory.status]
        *lines, last = self.body(trajectory.name, "bold", self.width - 30)
        yield from lines
        left = Text.assemble(last, "  ", (word, style))
        if trajectory.reward is not None:
            reward = f"reward {number(trajectory.reward)}"
            gap = self.width - left.cell_len - len(reward)
            left.append(" " * max(2, gap) + reward, "bold")
        yield left
        yield Text(self.rule * self.width, DIM)
        if trajectory.error:
            label = "died" if trajectory.status == "died" else "error"
            yield from self.field(label, error_text(trajectory.error), "red")
            for line in self.where(trajectory.root, self.width - _LABEL):
                yield Text.assemble(" " * _LABEL, line)
        key = trajectory.key
        if key is None:
            yield from self.field("rollout", "no trajectory(...) named it")
        else:
            step = "unknown" if key.step is None else key.step
            sample = "unknown" if key.sample_index is None else key.sample_index
            parts = [f"step {step}", f"sample {sample}", f"rollout {key.rollout_n}"]
            if key.attempt:
                parts.append(f"attempt @{key.attempt}")
            parts.append("validation" if key.validate else "training")
            yield from self.field("rollout", self.dot.join(parts))
        if trajectory.policy_versions:
            yield from self.field("policy", f" {self.arrow} ".join(map(str, trajectory.policy_versions)))
        if trajectory.rewards:
            rewards = (f"{self.name(name)} {number(value)}" for name, value in trajectory.rewards.items())
            yield from self.field("rewards", self.dot.join(rewards))
        if trajectory.trained_step is not None:
            yield from self.field("trained", f"step {trajectory.trained_step}")
        parts = [f"{_MEANS[name]} {number(mean)}" for name, mean in trajectory.attached.items()]
        if parts:
            yield from self.field("attached", self.dot.join(parts))
        if trajectory.discarded:
            yield from self.field("discarded", trajectory.discarded, "yellow")
        yield from self.field(
            "time",
            f"{when(trajectory.start_ns, '%Y-%m-%d %H:%M:%S %Z')}{self.dot}{_lasted(trajectory)}",
        )
        parts = [
            count(len(trajectory.turns), "turn"),
            count(trajectory.generations, "generation"),
            count(len(trajectory.tool_calls), "tool call"),
            count(trajectory.errors, "error"),
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
            yield from self.field("MLflow run", trajectory.run_id)
        if trajectory.run:
            yield from self.field("run", trajectory.run)
        yield from self.field("trace", trajectory.trace_id)
        for name, value in trajectory.annotations.items():
            yield from self.field("noted", f"{self.name(name)} = {_plain(value)}")
        for note in self.some(tuple(dict.fromkeys(trajectory.notes)), _MAX_CALLS):
            text = f"{self.more} {note:,} more (--full shows all)" if isinstance(note, int) else note
            yield from self.field("warning", text, "yellow")
        if any(span.incomplete for span in trajectory.spans):
            text = "spans that others build on are missing; some turns lack token ids at their start"
            yield from self.field("warning", text, "yellow")
        yield Text(self.rule * self.width, DIM)

    def field(self, label: str, value: str, style: str = "") -> Iterator[Text]:
        for line in self.body(value, style, self.width - _LABEL):
            yield Text.assemble((f"{label:<{_LABEL}}", DIM), line)
            label = ""

    def turn(self, turn: Turn, digits: int, version: int | str | None) -> Iterator[Text]:
        role = self.name(turn.role)
        style = "red" if turn.error else _ROLE_STYLE.get(turn.role, "")
        label = f"{turn.index:>{digits}} {set_cell_size(role, _ROLE)} "
        width = self.width - len(label) - 2
        rows: list[tuple[str, Text]] = []
        # A tool that no generation asked for has its call in its own turn, with its result and its error.
        same = [call for call in turn.tool_calls if call.span_id is not None and call.span_id == turn.span_id]
        own = turn.role == "tool" and bool(same)
        if turn.text and not (own and same[0].result == turn.text):
            said = self.body(turn.text, DIM if turn.role == "system" else "", width)
            rows.extend((self.said, line) for line in said)
        for call in self.some(turn.tool_calls, _MAX_CALLS):
            if isinstance(call, int):
                more = f"{self.more} {call:,} more tool calls (--full shows all)"
                rows.append((self.did, Text(more, DIM)))
            else:
                rows.extend(self.block(self.tool_call(call, width)))
        if turn.error and not own:
            rows.extend(self.block(self.error(turn.error, width, turn.span_id)))
        facts = self.dot.join(self.facts(turn, version))
        if facts:
            rows.extend((self.known, line) for line in self.body(facts, DIM, width))
        yield from self.gutter(label, style, rows)

    def silence(self, turn: Turn) -> str:
        """Why a turn has no text."""
        span = self.spans.get(turn.span_id or "")
        if turn.role == "tool":
            return "(no result)" if span is not None and span.outputs is None else "(empty)"
        if span is not None and "" in (span.outputs, span.response_text):
            return "(empty)"
        if turn.token_ids and not self.decoded:
            return f"no text: set token2text=True and tokenizer={self.more}"
        return "no text was recorded"

    def block(self, lines: Iterable[Text]) -> Iterator[tuple[str, Text]]:
        bar = self.did
        for line in lines:
            yield bar, line
            bar = self.said

    def facts(self, turn: Turn, version: int | str | None) -> Iterator[str]:
        if not (turn.text or turn.tool_calls or turn.error):
            yield self.silence(turn)
        if turn.name:
            yield self.name(turn.name)
        if turn.start_ns is not None and turn.end_ns is not None:
            yield duration(turn.start_ns, turn.end_ns)
        if turn.token_ids:
            tokens = count(len(turn.token_ids), "token")
            trained = sum(turn.mask)
            expected = len(turn.token_ids) if turn.role == "assistant" else 0
            yield f"{tokens} ({trained:,} trained)" if turn.mask and trained != expected else tokens
        if turn.finish_reason:
            yield turn.finish_reason
        if version is not None:
            yield f"policy {version}"
        if turn.span_id in self.agents:
            yield f"in {self.name(self.agents[turn.span_id])}"

    def tool_call(self, call: ToolCall, width: int) -> Iterator[Text]:
        name = self.name(call.name)
        inline = self.inline_arguments(call.arguments)
        took = "" if call.start_ns is None or call.end_ns is None else duration(call.start_ns, call.end_ns)
        tail = f"  {took}" if took else ""
        head = Text(name, "bold magenta")
        if inline is not None and head.cell_len + cell_len(inline) + len(tail) <= width:
            yield Text.assemble(head, inline, (tail, DIM))
        else:
            *lines, last = (Text(line, "bold magenta") for line in fold(name, width - len(tail)))
            yield from lines
            yield Text.assemble(last, (tail, DIM))
            yield from self.argument_lines(call.arguments, width)
        answer = self.answers.get(id(call))
        if answer is not None:
            word = ("ERROR, ", "bold red") if call.error else ""
            yield Text.assemble((f"  {self.arrow} ", DIM), word, (f"turn {answer}", DIM))
            return
        if call.result == "":
            yield Text(f"  {self.arrow} (empty)", DIM)
        elif call.result is not None:
            mark = f"  {self.arrow} "
            for line in self.body(call.result, "", width - len(mark)):
                yield Text.assemble((mark, DIM), line)
                mark = " " * len(mark)
        elif not call.error:
            yield Text("  (no result)", DIM)
        if call.error:
            yield from (Text.assemble("  ", line) for line in self.error(call.error, width - 2, call.span_id))

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
                yield from (Text.assemble("  ", (line, DIM)) for line in fold(name, width - 2))
            for line in self.body(_plain(value), "", width - 2 - column):
                yield Text.assemble("  ", (set_cell_size(label, column), DIM), line)
                label = ""

    def other_errors(self, trajectory: Trajectory) -> Iterator[Text]:
        """Errors of spans that no turn shows, so that each error that the header counts can be read."""
        shown = {turn.span_id for turn in trajectory.turns if turn.error}
        shown.update(call.span_id for call in trajectory.tool_calls if call.error)
        if trajectory.error and trajectory.root:
            shown.add(trajectory.root.span_id)
        failed = [span for span in trajectory.spans if span.status in ("error", "died")]
        others = [span for span in failed if span.span_id not in shown]
        # Why those died that were open when their rollout did stands at the top.
        fallen = trajectory.error if trajectory.status == "died" else None
        spans = [span for span in others if span.status != "died" or span.error != fallen]
        if len(spans) < len(others):
            names = (self.name(span.name) for span in others if span not in spans)
            yield Text("")
            yield from self.field("open then", ", ".join(names))
        if not spans:
            return
        yield Text("")
        yield Text("errors of other calls", "bold")
        for span in self.some(spans, _MAX_CALLS):
            if isinstance(span, int):
                yield Text(f"{self.more} {span:,} more errors (--full shows all)", DIM)
                continue
            message = span.error or "no message was recorded"
            message = f"{self.name(span.name)}: {error_text(message)}"
            yield from self.error(message, self.width, span.span_id)

    def error(self, message: str, width: int, span_id: str | None) -> Iterator[Text]:
        mark = "ERROR "
        for line in self.body(error_text(message), "red", width - len(mark)):
            yield Text.assemble((mark, "bold red"), line)
            mark = " " * len(mark)
        for line in self.where(self.spans.get(span_id or ""), width - len(mark)):
            yield Text.assemble(mark, line)

    def where(self, span: Span | None, width: int) -> Iterator[Text]:
        """Where the exception of a span was raised; in a full replay its whole stack."""
        for event in span.events if span else ():
            stack = event.attributes.get(semconv.EXCEPTION_STACKTRACE)
            if event.name != semconv.EXCEPTION_EVENT or not isinstance(stack, str) or not stack.strip():
                continue
            if self.max_chars is None:
                yield from self.body(stack.strip("\n"), DIM, width)
            elif frames := _FRAME.findall(stack):
                file, line, function = frames[-1]
                yield from self.body(f"{file}:{line} in {function}", DIM, width)

    def body(self, text: str, style: str, width: int) -> Iterator[Text]:
        """A text as lines of at most ``width`` cells, its middle cut out when it is long."""
        head, hidden, tail = (text, 0, "") if self.max_chars is None else cut(text, self.max_chars)
        yield from (Text(line, style) for line in fold(self.text(head), width))
        if hidden:
            message = f"{self.more} {count(hidden, 'more character')} (--full shows all)"
            yield Text(message, f"italic {DIM}")
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


def _agents(spans: Sequence[Span]) -> dict[str, str]:
    """For each span (by id) that ran in a rollout inside the outermost one, the name of that rollout.

    Several of the same name are numbered in order of their start.
    """
    by_id = {span.span_id: span for span in spans}
    nearest: dict[str, Span | None] = {}

    def rollout_of(span: Span) -> Span | None:
        path: list[str] = []
        at: Span | None = span
        found = None
        while at is not None and at.span_id not in path:
            if at.span_id in nearest:
                found = nearest[at.span_id]
                break
            path.append(at.span_id)
            if at.kind == "rollout":
                found = at
                break
            at = by_id.get(at.parent_id or "")
        nearest.update(dict.fromkeys(path, found))
        return found

    rollouts = [span for span in spans if span.kind == "rollout"]
    outer = [
        span for span in rollouts if (up := by_id.get(span.parent_id or "")) is None or not rollout_of(up)
    ]
    # Of several side by side none is the outermost.
    inner = [span for span in rollouts if outer != [span]]
    names: dict[str, str] = {}
    for span in sorted(inner, key=lambda span: span.start_ns):
        same = [each.span_id for each in inner if each.name == span.name]
        names[span.span_id] = span.name
        if len(same) > 1:
            names[span.span_id] += f" #{sum(each in names for each in same)}"
    return {
        span.span_id: names[home.span_id]
        for span in spans
        if (home := rollout_of(span)) is not None and home.span_id in names
    }


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


def _lasted(trajectory: Trajectory) -> str:
    """How long it took; of one that died it is known only when the last of its calls ended."""
    if trajectory.status != "died":
        return duration(trajectory.start_ns, trajectory.end_ns, "still open")
    if trajectory.end_ns is None:
        return "end unknown"
    return f"last call ended after {duration(trajectory.start_ns, trajectory.end_ns)}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value, indent=2)


def _json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent, default=_typed)
    except (TypeError, ValueError, RecursionError):
        return _typed(value)


def _typed(value: Any) -> str:
    return f"<{type(value).__name__}>"
