"""Which trajectory a fact belongs to that ``attach`` recorded: by trace id, else by key and time.

A fact is told in any process, before, while or after its rollout is recorded, and reaches the journal in any
order with it. So what is decided here holds for what the index knows now, and is decided again with every
line that may change it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from .. import semconv
from ..model import Span

SCHEMA = """
CREATE TABLE attached (
    trace_id TEXT PRIMARY KEY, target TEXT, step INTEGER, sample_index BLOB, rollout_n INTEGER,
    validate INTEGER, attempt INTEGER, project TEXT, experiment TEXT, at_ns INTEGER NOT NULL, joined TEXT
);
CREATE INDEX attached_by_key ON attached (step, sample_index, rollout_n);
CREATE INDEX attached_by_target ON attached (target);
CREATE INDEX attached_by_joined ON attached (joined);
"""

_TAGS = (
    semconv.ATTACHED_TO,
    semconv.STEP,
    semconv.SAMPLE_INDEX,
    semconv.ROLLOUT_N,
    semconv.VALIDATE,
    semconv.ATTEMPT,
    semconv.PROJECT,
    semconv.EXPERIMENT,
)
"""The attributes of a fact that stand in its row, in this order."""
_SAME_KEY = "step IS ? AND sample_index IS ? AND rollout_n IS ? AND validate IS ?"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A trajectory that has the key which a fact names.

    Attributes:
        attempt: number of the attempt as its caller gave it.
    """

    trace_id: str
    attempt: int
    start_ns: int
    project: str | None
    experiment: str | None


def choose(
    candidates: Iterable[Candidate], attempt: int | None, place: tuple[str | None, str | None], at_ns: int
) -> str | None:
    """Choose the trajectory that is meant.

    Those of the same project and experiment come before all others; where a rollout still runs, its own are
    not known yet and may be the same. An attempt that is named is the one of that number; else it is the
    latest that had started by then, or where none had, the first.

    Args:
        candidates: in any order.
        attempt: number of the attempt, as ``ls`` shows it; None when none was named.
        place: project and experiment in force where the fact was told.
        at_ns: when the fact was told, nanoseconds since 1970.

    Returns:
        Its trace id; None when no candidate is meant.
    """
    everywhere = sorted(candidates, key=lambda each: (each.attempt, each.start_ns, each.trace_id))
    here = [each for each in everywhere if (each.project, each.experiment) in (place, (None, None))]
    options: list[tuple[bool, int, str]] = []
    for pool in [here] if here else _by_place(everywhere):
        numbered = [each for number, each in _numbered(pool) if attempt in (None, number)]
        started = [each for each in numbered if each.start_ns <= at_ns]
        if started:
            # Of several experiments the one that ran last is meant.
            options.append((True, max(each.start_ns for each in started), started[-1].trace_id))
        elif numbered:
            options.append((False, -numbered[0].start_ns, numbered[0].trace_id))
    return max(options)[2] if options else None


def _by_place(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    pools: dict[tuple[str | None, str | None], list[Candidate]] = {}
    for each in candidates:
        pools.setdefault((each.project, each.experiment), []).append(each)
    return list(pools.values())


def _numbered(pool: Iterable[Candidate]) -> list[tuple[int, Candidate]]:
    """Number attempts in order, but never below the number that the caller gave."""
    number = -1
    found = []
    for each in pool:
        number = max(each.attempt, number + 1)
        found.append((number, each))
    return found


class Joins:
    """The facts of one index, each with the trajectory that it belongs to by what is known so far.

    Args:
        db: the index's database, which also holds the trajectories.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def note(self, fact: Span) -> None:
        """Take in a fact, for whatever trajectory."""
        tags = fact.attributes
        row = [fact.trace_id, *(tags.get(name) for name in _TAGS), fact.start_ns]
        places = ", ".join("?" for _ in row)
        try:
            self._db.execute(f"INSERT OR IGNORE INTO attached VALUES ({places}, NULL)", row)
        except (sqlite3.Error, OverflowError):  # written by somebody else: it names no trajectory of ours
            nothing = [fact.trace_id, *(None for _ in _TAGS), 0]
            self._db.execute(f"INSERT OR IGNORE INTO attached VALUES ({places}, NULL)", nothing)

    def update(self, facts: Iterable[str], trajectories: Iterable[str]) -> set[str]:
        """Decide again where facts belong, after some facts or trajectories came or changed.

        Returns:
            Trace ids of the trajectories that have got or lost a fact.
        """
        changed: set[str] = set()
        for trace_id in {*facts, *self._concerned(trajectories)}:
            target, *key, attempt, project, experiment, at_ns, joined = self._db.execute(
                "SELECT target, step, sample_index, rollout_n, validate, attempt, project, experiment, "
                "at_ns, joined FROM attached WHERE trace_id = ?",
                (trace_id,),
            ).fetchone()
            if target is not None:
                known = self._db.execute(
                    "SELECT 1 FROM trajectories WHERE trace_id = ?", (target,)
                ).fetchone()
                now = target if known else None
            else:
                rows = self._db.execute(
                    "SELECT trace_id, attempt, start_ns, project, experiment FROM trajectories "
                    f"WHERE named AND {_SAME_KEY}",
                    key,
                )
                candidates = [Candidate(*row) for row in rows]
                now = choose(candidates, attempt, (project, experiment), at_ns)
            if now != joined:
                self._db.execute("UPDATE attached SET joined = ? WHERE trace_id = ?", (now, trace_id))
                changed |= {each for each in (now, joined) if each is not None}
        return changed

    def _concerned(self, trajectories: Iterable[str]) -> set[str]:
        """Give the facts that may belong to some trajectories."""
        if self._db.execute("SELECT 1 FROM attached LIMIT 1").fetchone() is None:
            return set()
        found: set[tuple[str]] = set()
        for trace_id in trajectories:
            found |= set(self._db.execute("SELECT trace_id FROM attached WHERE target = ?", (trace_id,)))
            key = self._db.execute(
                "SELECT step, sample_index, rollout_n, validate FROM trajectories "
                "WHERE trace_id = ? AND named",
                (trace_id,),
            ).fetchone()
            if key is not None:
                found |= set(
                    self._db.execute(
                        f"SELECT trace_id FROM attached WHERE target IS NULL AND {_SAME_KEY}", key
                    )
                )
        return {trace_id for (trace_id,) in found}

    def facts_of(self, trajectory: str) -> list[str]:
        """Give the trace ids of the facts that belong to a trajectory."""
        rows = self._db.execute("SELECT trace_id FROM attached WHERE joined = ?", (trajectory,))
        return [trace_id for (trace_id,) in rows.fetchall()]

    def unmatched(self) -> int:
        """Count the facts whose trajectory is not there."""
        (count,) = self._db.execute("SELECT count(*) FROM attached WHERE joined IS NULL").fetchone()
        return int(count)
