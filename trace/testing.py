"""For tests of traced code: record into a temporary store and look at the result."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import lifecycle
from .model import Span, Trajectory
from .store import Store, StoreStatus


class Recording:
    """What was recorded so far.

    Attributes:
        path: directory of the store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def trajectories(self) -> list[Trajectory]:
        """Give all trajectories, the running ones too, in order of their start."""
        lifecycle.flush()
        store = Store(self.path)
        try:
            found = [store.load(summary.trace_id) for summary in store.query(all_attempts=True)]
        finally:
            store.close()
        return sorted(found, key=lambda trajectory: trajectory.start_ns)

    def trajectory(self) -> Trajectory:
        """Give the only trajectory.

        Raises:
            AssertionError: there is none, or more than one.
        """
        found = self.trajectories()
        if len(found) != 1:
            names = ", ".join(item.name for item in found)
            raise AssertionError(f"expected one trajectory, found {len(found)}: {names}")
        return found[0]

    def spans(self) -> list[Span]:
        """Give all spans, trajectory by trajectory."""
        return [span for trajectory in self.trajectories() for span in trajectory.spans]

    def status(self) -> StoreStatus:
        """Give the counts of the store."""
        return lifecycle.flush()


@contextmanager
def recording(**settings: Any) -> Iterator[Recording]:
    """Record what runs inside the block into a store of its own, with nothing exported.

    Args:
        **settings: see ``TraceConfig``.
    """
    with tempfile.TemporaryDirectory(prefix="trackway-test-") as folder:
        path = Path(folder) / "store"
        lifecycle.configure(**{"store": path, "sync": "off", **settings})
        try:
            yield Recording(path)
        finally:
            lifecycle.shutdown()
