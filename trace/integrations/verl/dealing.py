"""How verl deals a batch out to its workers, of which each sees a part: where a group was cut in two, and
which rows are copies.

With copies verl fills up a validation batch, so that all workers get equally many, and it throws away what
becomes of them; traced, they would look like second attempts of rollouts that count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple

from ...capture import runtime
from .hooks import replace

_ROWS = "trackway_rows"
"""In a batch's ``meta_info``: how many of its rows, the first ones, are no copies, and how many it has."""


class Part(NamedTuple):
    """The part of a batch that a worker was given.

    Attributes:
        start: place of its first row in the whole batch.
        run: number of its first rows that are of one sample.
        rows: number of rows of the whole batch that are no copies; None where none are.
    """

    start: int
    run: int
    rows: int | None


_part: ContextVar[Part | None] = ContextVar("trackway-verl-part", default=None)


def change_protocol(module: ModuleType) -> None:
    """Let ``pad_dataproto_to_divisor``, which the trainer calls, note how many rows there were."""
    replace(module, "pad_dataproto_to_divisor", _noting)


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    def pad_dataproto_to_divisor(data: Any, *args: Any, **kwargs: Any) -> Any:
        padded, size = original(data, *args, **kwargs)
        if size:
            padded.meta_info = {**padded.meta_info, _ROWS: (len(data), len(padded))}
        return padded, size

    return pad_dataproto_to_divisor


def dealt(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a worker's ``generate_sequences`` remember which part of a batch it was given."""

    async def generate_sequences(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        part = None
        try:
            part = _part_of(self, batch)
        except Exception as error:
            recorder = runtime.started()
            if recorder is not None:
                recorder.trouble("could not tell which part of a batch this is", error)
        token = _part.set(part)
        try:
            return await original(self, batch, *args, **kwargs)
        finally:
            _part.reset(token)

    return generate_sequences


def _part_of(worker: Any, batch: Any) -> Part | None:
    columns = batch.non_tensor_batch
    places, index = columns.get("priority"), columns.get("index")
    # verl numbers all rows of a batch before it deals them out. A column of the user's own holds objects.
    if places is None or places.dtype.kind != "i" or not len(places):
        return None
    run = 0
    if index is not None:
        run = next((place for place, item in enumerate(index) if item != index[0]), len(index))
    rows, size = batch.meta_info.get(_ROWS) or (None, 0)
    # What was said of a batch stays with all that is made of it, such as a longer one.
    is_whole = size == len(batch) * worker.rollout_config.agent.num_workers
    return Part(int(places[0]), run, rows if is_whole else None)


def place_of(row: Mapping[str, Any]) -> tuple[Part, int] | None:
    """Give the part of the batch that a worker works on, and a row's place in the whole batch."""
    part = _part.get()
    return None if part is None else (part, int(row["priority"]))


def is_copy(row: Mapping[str, Any]) -> bool:
    """Say whether a row was only added to fill up its batch."""
    found = place_of(row)
    return found is not None and found[0].rows is not None and found[1] >= found[0].rows
