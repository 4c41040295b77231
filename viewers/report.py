"""A report of one run: what it says, apart from how it is written down."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from trackway.trace.loggers.comparing import environment_differences
from trackway.trace.loggers.reading import RunRecord
from trackway.trace.loggers.rollouts import Rollouts
from trackway.trace.model import Trajectory

from .report_blocks import Block, Code, Facts, Heading, Plots, Report, Table, Text
from .runs import lasted, logger_word, started, value
from .text import cut
from .words import age, count, number

_PLOTS = 24
_OTHERS = 8
"""Metrics that are drawn where none is a key metric."""
_GENERATIONS = 10
_TEXT = 1500
"""Characters of a prompt, a completion or an error."""
_ALERTS = 100


def report_of(record: RunRecord, rollouts: Rollouts | None) -> Report:
    """Say all that is known of a run.

    Args:
        record: the run.
        rollouts: its trajectories; None where the store keeps none.
    """
    parts = (
        _run(record),
        _metrics(record),
        _alerts(record),
        _rollouts(rollouts),
        _generations(record),
        _config(record),
        _environment(record),
        _artifacts(record),
        _loggers(record),
    )
    return Report(f"Run {record.run.id}", [block for part in parts for block in part])


def _run(record: RunRecord) -> Iterator[Block]:
    run, steps = record.run, record.steps
    facts = [
        ("experiment", run.experiment),
        ("project", run.project),
        ("status", run.status),
        ("started", started(run.started)),
        ("lasted", age(lasted(record, time.time()))),
        ("steps", f"{steps[0]:,} to {steps[-1]:,}" if steps else "none"),
    ]
    facts += [("group", run.group)] if run.group else []
    facts += [("rank", str(run.rank))] if run.rank is not None else []
    facts += [("lives", f"{len(record.environments)}, as it was resumed")] if record.environments[1:] else []
    yield Facts(facts)


def _metrics(record: RunRecord) -> Iterator[Block]:
    if not record.metrics:
        yield Heading("Results")
        yield Text("No metrics were logged.")
        return
    keys = list(record.keys) or sorted(record.metrics)[:_OTHERS]
    yield Heading("Results")
    yield _results({name: record.metrics[name] for name in keys}, None)
    yield Plots({name: record.metrics[name] for name in keys[:_PLOTS]})
    others = {name: record.metrics[name] for name in sorted(record.metrics) if name not in keys}
    if others:
        yield _results(others, count(len(others), "other metric"))


def _results(metrics: Mapping[str, Mapping[int, float]], folded: str | None) -> Table:
    rows = []
    for name, values in metrics.items():
        finite = [each for each in values.values() if math.isfinite(each)]
        odd = len(values) - len(finite)
        bounds = [value(min(finite)), value(max(finite))] if finite else ["-", "-"]
        *_, last = values
        cells = [value(values[min(values)]), *bounds, value(values[last]), f"{last:,}", f"{len(values):,}"]
        rows.append([name, *cells, f"{odd:,}" if odd else ""])
    heads = ("metric", "first", "lowest", "highest", "last", "at step", "values", "not finite")
    return Table(heads, rows, frozenset(range(1, len(heads))), folded)


def _alerts(record: RunRecord) -> Iterator[Block]:
    if record.alerts:
        rows = [
            [
                "" if each.get("step") is None else f"{each['step']:,}",
                started(each["time"]),
                str(each.get("level", "")),
                str(each.get("title", "")),
                _cut(str(each.get("text", ""))),
            ]
            for each in record.alerts[-_ALERTS:]
        ]
        yield Heading("Alerts")
        if len(record.alerts) > _ALERTS:
            yield Text(f"The last {_ALERTS} of {len(record.alerts):,}.")
        yield Table(("step", "time", "level", "title", "text"), rows, frozenset((0,)))


def _rollouts(rollouts: Rollouts | None) -> Iterator[Block]:
    if rollouts is None or not rollouts.count:
        return
    yield Heading("Trajectories")
    failed = sum(rollouts.failures.values())
    facts = [
        ("recorded", f"{rollouts.count:,}, {rollouts.validation:,} of them in validations"),
        ("mean reward", "-" if rollouts.mean is None else number(rollouts.mean)),
        ("failed", f"{failed:,}"),
        ("came to their length limit", f"{rollouts.truncated:,}"),
    ]
    yield Facts(facts)
    if rollouts.failures:
        rows = [[kind, f"{times:,}"] for kind, times in rollouts.failures.items()]
        yield Table(("what failed", "rollouts"), rows, frozenset((1,)))
    for title, chosen in (("Best", rollouts.best), ("Worst", rollouts.worst)):
        if chosen:
            yield Heading(f"{title} trajectories")
            heads = ("key", "reward", "rewards", "status", "turns", "tools", "tokens", "error")
            yield Table(heads, [_row(each) for each in chosen], frozenset((1, 4, 5, 6)))
            for each in chosen:
                yield Code(each.name, _excerpt(each))
    yield Text("trackway show KEY replays one, turn by turn.")


def _row(each: Trajectory) -> list[str]:
    return [
        each.name,
        "-" if each.reward is None else number(each.reward),
        ", ".join(f"{name} {number(reward)}" for name, reward in each.rewards.items()),
        each.status,
        f"{len(each.turns):,}",
        f"{len(each.tool_calls):,}",
        f"{each.tokens:,}",
        _cut(each.error or ""),
    ]


def _excerpt(trajectory: Trajectory) -> str:
    """Give how a trajectory begins, and what was said last."""
    asked = next((turn for turn in trajectory.turns if turn.role == "user"), None)
    answers = [turn for turn in trajectory.turns if turn.role == "assistant"]
    chosen = [turn for turn in (asked, answers[-1] if answers else None) if turn is not None]
    if not chosen:
        return "no turns were recorded"
    return "\n\n".join(f"[{turn.index}] {turn.role}: {_cut(turn.text)}" for turn in chosen)


def _generations(record: RunRecord) -> Iterator[Block]:
    if not record.generations:
        return
    step, rows = list(record.generations.items())[-1]
    shown = rows[:_GENERATIONS]
    scores = [
        name
        for name in dict.fromkeys(name for row in shown for name in row)
        if name not in ("sample", "rollout", "trajectory", "prompt", "completion")
    ]
    yield Heading("Validation generations")
    of = f", {len(shown)} of {len(rows):,}" if len(rows) > len(shown) else ""
    yield Text(f"Of the last of {count(len(record.generations), 'validation')}, at step {step:,}{of}.")
    cells = [
        [
            str(row.get("trajectory") or row.get("sample") or ""),
            _cut(str(row.get("prompt", ""))),
            _cut(str(row.get("completion", ""))),
            *("" if row.get(name) is None else _score(row[name]) for name in scores),
        ]
        for row in shown
    ]
    heads = ("sample", "prompt", "completion", *scores)
    yield Table(heads, cells, frozenset(range(3, len(heads))))


def _score(found: Any) -> str:
    return value(found) if isinstance(found, (int, float)) else str(found)


def _config(record: RunRecord) -> Iterator[Block]:
    yield Heading("Configuration")
    if record.config:
        yield Code(count(len(record.config), "setting"), _yaml(record.config))
    else:
        yield Text("None was logged.")


def _environment(record: RunRecord) -> Iterator[Block]:
    yield Heading("Environment")
    found = record.environment
    if not found:
        yield Text("Nothing was recorded of it.")
        return
    git = found.get("git") or {}
    cuda = found.get("cuda") or {}
    changed = {True: "with uncommitted changes", False: "as committed", None: ""}[git.get("dirty")]
    commit = (
        f"{git.get('commit')} {git.get('branch') or '(no branch)'}, {changed}" if git else "no repository"
    )
    facts = {
        "git": commit,
        "command": " ".join(found.get("argv") or []),
        "directory": found.get("cwd"),
        "Python": found.get("python"),
        "platform": found.get("platform"),
        "host": found.get("host"),
        "devices": ", ".join(cuda.get("devices") or []),
        "CUDA": cuda.get("torch"),
        "driver": cuda.get("driver"),
        "seeds": ", ".join(f"{name} {seed}" for name, seed in (found.get("seeds") or {}).items()),
    }
    yield Facts([(name, _cut(str(each))) for name, each in facts.items() if each])
    if variables := found.get("variables"):
        rows = [[name, str(each)] for name, each in variables.items()]
        yield Table(("variable", "value"), rows, folded=count(len(rows), "variable"))
    if packages := found.get("packages"):
        lines = "\n".join(f"{name}=={version}" for name, version in packages.items())
        yield Code(count(len(packages), "package"), lines)
    if git.get("diff"):
        left_out = git.get("diff_bytes_left_out")
        yield Code(
            "uncommitted changes" + (f", without {left_out:,} more bytes" if left_out else ""), git["diff"]
        )
    if git.get("untracked"):
        yield Code(
            count(git.get("untracked_files", 0), "file unknown to git", "files unknown to git"),
            "\n".join(git["untracked"]),
        )
    if len(record.environments) > 1:
        yield from _lives(record.environments)


def _lives(environments: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    rows = [
        [f"{life}", part, row.name, _cut(_plain(row.a)), _cut(_plain(row.b))]
        for life, (before, after) in enumerate(pairwise(environments), 2)
        for part, found in environment_differences(before, after).items()
        for row in found
    ]
    if rows:
        yield Text("It changed when the run was resumed:")
        yield Table(("life", "part", "name", "before", "after"), rows, frozenset((0,)))


def _artifacts(record: RunRecord) -> Iterator[Block]:
    if record.artifacts:
        yield Heading("Artifacts")
        rows = [
            [name, f"{each.get('bytes', 0):,}", str(each.get("hash", "")), str(each.get("path", ""))]
            for name, each in record.artifacts.items()
        ]
        yield Table(("name", "bytes", "content", "kept in the run's directory as"), rows, frozenset((1,)))


def _loggers(record: RunRecord) -> Iterator[Block]:
    yield Heading("Where it is")
    yield Facts([("log of the run", str(record.run.directory))])
    rows, links = [], []
    for each in record.loggers:
        texts = {name: text for name, text in each.state.items() if isinstance(text, str)}
        links += [(each.name, text) for text in texts.values() if text.startswith(("http://", "https://"))]
        places = ", ".join(f"{name} {text}" for name, text in texts.items() if (each.name, text) not in links)
        word = logger_word(each, record.run.status == "running") or "has everything"
        rows.append([each.name, word, _cut(places), _cut(each.error or "")])
    if rows:
        yield Table(("logger", "state", "there", "error"), rows)
    if links:
        yield Facts(links, links=True)


def _yaml(config: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=10**9)


def _plain(found: Any) -> str:
    return found if isinstance(found, str) else "" if found is None else str(found)


def _cut(text: str) -> str:
    first, left_out, last = cut(text, _TEXT)
    return f"{first}⟨{left_out:,} characters⟩{last}" if left_out else first
