"""What differs between two runs: configuration, environment, results."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .reading import RunRecord

_MOST_LINES = 2000
"""Lines of uncommitted changes that are compared."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs.

    Attributes:
        name: of a setting, package, variable or metric.
        a, b: its values, plain JSON; None where there is none.
        only: ``a`` or ``b`` when the other run has nothing of that name.
    """

    name: str
    a: Any
    b: Any
    only: str | None = None


def differences(a: RunRecord, b: RunRecord) -> dict[str, list[Difference]]:
    """Compare two runs.

    Args:
        a, b: the runs.

    Returns:
        By part, the differences in it: ``run``, ``config``, ``git``, ``command``, ``packages``, ``machine``,
        ``seeds``, ``variables``, ``results``. Parts without any are left out; of equal runs all are. When and
        under which id they ran does not count.
    """
    found = {
        "run": list(_compare(_run(a), _run(b))),
        "config": list(_compare(_flat(a.config), _flat(b.config))),
        **environment_differences(a.environment, b.environment),
        "results": list(_compare(a.results, b.results)),
    }
    return {part: rows for part, rows in found.items() if rows}


def environment_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Difference]]:
    """Compare what ``environment.facts`` found twice; see ``differences``."""
    one, other = _parts(a), _parts(b)
    found = {part: list(_compare(one[part], other[part])) for part in one}
    return {part: rows for part, rows in found.items() if rows}


def changes(a: RunRecord, b: RunRecord) -> list[str]:
    """Give the lines in which the uncommitted changes of two runs differ: a diff without its head."""
    before, after = (
        str((each.environment.get("git") or {}).get("diff") or "").splitlines()[:_MOST_LINES]
        for each in (a, b)
    )
    return list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]


def _compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys([*a, *b]):
        if name not in b:
            yield Difference(name, a[name], None, "a")
        elif name not in a:
            yield Difference(name, None, b[name], "b")
        elif not _same(a[name], b[name]):
            yield Difference(name, a[name], b[name])


def _same(a: Any, b: Any) -> bool:
    """Say whether two values are equal; NaN is what it is, and true is not 1."""
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    return bool(a == b) or (a != a and b != b)


def _run(record: RunRecord) -> dict[str, Any]:
    run, steps = record.run, record.steps
    return {
        "project": run.project,
        "experiment": run.experiment,
        "status": run.status,
        "last step": steps[-1] if steps else None,
    }


def _flat(config: Any, above: str = "") -> dict[str, Any]:
    """Give the settings by their names as on a command line: ``actor.optim.lr``."""
    if not isinstance(config, dict) or (not config and above):
        return {above: config}
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= _flat(value, f"{above}.{name}" if above else str(name))
    return found


def _parts(environment: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    cuda = environment.get("cuda") or {}
    return {
        "git": _git(environment.get("git") or {}),
        "command": {name: environment.get(name) for name in ("argv", "cwd", "python")},
        "packages": environment.get("packages") or {},
        "machine": {
            **{name: environment.get(name) for name in ("host", "platform")},
            **{f"cuda {name}": value for name, value in cuda.items()},
        },
        "seeds": environment.get("seeds") or {},
        "variables": environment.get("variables") or {},
    }


def _git(git: Mapping[str, Any]) -> dict[str, Any]:
    diff = git.get("diff")
    told = diff
    if diff:
        digest = hashlib.sha256(diff.encode()).hexdigest()[:8]
        told = f"{len(diff.splitlines()):,} lines of diff ({digest})"
    return {"commit": git.get("commit"), "branch": git.get("branch"), "uncommitted changes": told}
