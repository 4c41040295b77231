"""Which rollout one of verl's workers is about to run: its step, its sample, its number in the group."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

from ...capture.snapshot import take
from .dealing import place_of

_MAX_ITEMS = 64  # of an array inside a prompt

_of_several: WeakKeyDictionary[Any, dict[bool, bool]] = WeakKeyDictionary()
"""Whether the samples of a worker come from several files, in training and in validation."""


def true_name(
    worker: Any, sampling: Mapping[str, Any], given: Mapping[str, Any], row: Mapping[str, Any]
) -> dict[str, Any]:
    """Correct what verl's worker calls a rollout, from what it knows of its row of the batch.

    Args:
        worker: an ``AgentLoopWorker``.
        sampling: the sampling parameters of this rollout.
        given: the worker's ``trajectory``: ``step``, ``sample_index``, ``rollout_n``, ``validate``.
        row: the columns of the batch in this row.

    Returns:
        The same four, and whatever else was given.
    """
    name = dict(given)
    if name["step"] == -1:
        name["step"] = None  # verl's word for a step that nobody told, as in fully asynchronous training
    named = _is_named(row)
    name["sample_index"] = _sample(worker, given, row) if named else _prompt(given, row)
    if has_sessions(worker):
        # The default trainer gives all sessions of a prompt the same trajectory.
        name["step"] = row.get("global_steps", name["step"])
        name["rollout_n"] = row["session_id"]
    else:
        name["rollout_n"] = _number(worker, sampling, given, row, named)
    return name


def has_sessions(worker: Any) -> bool:
    """Say whether it is a worker of the default trainer; a data set may have a ``session_id`` as well."""
    return hasattr(worker, "_run_prompt")


def _is_named(row: Mapping[str, Any]) -> bool:
    """Say whether the samples have ids; verl else calls all of them 0, or counts anew in each worker."""
    extra = row.get("extra_info")
    return "index" in row and not (isinstance(extra, Mapping) and "index" not in extra and row["index"] == 0)


def _prompt(given: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    """Name a sample by its prompt, alike in every worker and step."""
    prompt = row.get("raw_prompt")
    if prompt is None:
        return given["sample_index"]
    copy = take(list(prompt), _MAX_ITEMS)
    data = copy if isinstance(copy, bytes) else str(copy).encode()
    return f"prompt-{blake2b(data, digest_size=6).hexdigest()}"


def _sample(worker: Any, given: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    index = row["index"]
    if _several_files(worker, bool(given["validate"])) and row.get("data_source") is not None:
        return f"{row['data_source']}:{index}"  # each file may count from 0
    return index


def _several_files(worker: Any, validate: bool) -> bool:
    known = _of_several.setdefault(worker, {})
    if validate not in known:  # reading verl's settings takes longer than all else here
        files = worker.config.data.get("val_files" if validate else "train_files")
        known[validate] = files is not None and not isinstance(files, str) and len(files) > 1
    return known[validate]


def _number(
    worker: Any, sampling: Mapping[str, Any], given: Mapping[str, Any], row: Mapping[str, Any], named: bool
) -> Any:
    rollout = worker.rollout_config
    n = rollout.val_kwargs.n if given["validate"] else rollout.n
    if not given["validate"] and sampling.get("temperature") == 0 and rollout.temperature != 0:
        return n  # the greedy baseline of REMAX stands beside the n samples of its prompt
    found = place_of(row)
    if found is None:
        return given["rollout_n"]
    part, place = found
    if not named:
        return place % n
    # verl counts the rollouts of a sample that stand side by side, anew in each worker: of a group that was
    # cut in two, the second half goes on where the first one ended.
    cut = place - part.start < part.run
    return given["rollout_n"] + part.start % n if cut else given["rollout_n"]
