"""Trajectories to Weave, each span one call that keeps its OpenTelemetry ids and times."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ..capture.snapshot import clean
from ..log import logger
from ..model import Trajectory
from .arriving import WholeTraceExporter
from .weave_calls import Call, TraceCalls, calls_of
from .weave_client import BusyError, Connection, RefusedError
from .weave_feedback import replace_feedback

if TYPE_CHECKING:
    from ..config import TraceConfig

_log = logger(__name__)

BATCH_CALLS: Final = 1000
"""Most calls in one request."""
BATCH_BYTES: Final = 8 * 2**20
"""Most bytes in one request. Weave's servers take 32 MiB; a slow line takes less in the time there is."""
_ALL = 3
"""Trajectories refused at once, and not a call taken, until it must be more than the trajectories."""

_ANYBODY = "x" * 64
"""As long as the name of whoever owns a project may be."""


class WeaveExporter(WholeTraceExporter):
    """Writes trajectories to Weave, at the servers that ``WANDB_BASE_URL`` and ``WF_TRACE_SERVER_URL`` name.

    Args:
        config: gives ``project``, as ``project`` or ``entity/project``, and ``experiment``.

    Attributes:
        sent_bytes: the calls of trajectories that Weave has taken whole, in bytes.

    Raises:
        ImportError: Weave is not installed.
    """

    destination = "Weave"

    def __init__(self, config: TraceConfig) -> None:
        super().__init__()
        if importlib.util.find_spec("weave") is None:
            raise ImportError("Weave is not installed; pip install 'trackway[weave]'")
        self._config = config
        self._connection: Connection | None = None
        self._not_before = 0.0
        self._no_feedback = False
        self._trusted = False
        self.sent_bytes = 0

    def export_trajectories(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        """Write trajectories; one that was written before is replaced.

        Returns:
            trace id -> reason, of those that Weave will never take.

        Raises:
            ConnectionError: Weave cannot be reached, or asks to wait. Send all of them again later.
            RuntimeError: a person has to act first, for instance log in. Likewise.
        """
        wait = self._not_before - time.monotonic()
        if wait > 0:
            raise ConnectionError(f"Weave asked to be left alone, for {wait:.0f} s more")
        try:
            return self._export(trajectories)
        except BusyError as error:
            self._not_before = time.monotonic() + error.seconds
            raise
        except RuntimeError:
            self._disconnect()  # the next time with the login that there is by then
            raise

    def _export(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        refused: dict[str, str] = {}
        places: dict[str, list[TraceCalls]] = {}
        if not trajectories:
            return refused
        self._connection = connection = self._connection or Connection()
        for trajectory in trajectories:
            place = connection.place(clean(trajectory.project or self._config.project))
            try:
                places.setdefault(place, []).append(calls_of(trajectory, place, self._config.experiment))
            except Exception as error:
                refused[trajectory.trace_id] = f"{type(error).__name__}: {error}"
        for place, traces in places.items():
            sending = _Sending(connection, place)
            for batch in _batches([call for trace in traces for call in trace.calls]):
                sending.send(batch)
            self._trusted = self._trusted or sending.taken
            if sending.refused and not self._trusted:
                # Rollouts mostly come one by one: it may be about them, but then another one will be taken.
                raise sending.trouble(next(iter(sending.refused.values())))
            refused |= sending.refused
            self.sent_bytes += sum(_size(trace) for trace in traces if trace.trace_id not in sending.refused)
            self._give_feedback(connection, place, [t for t in traces if t.trace_id not in sending.refused])
        return refused

    def size_of(self, trajectory: Trajectory) -> int:
        """Give the bytes of the calls that Weave would get, or a few more: nobody is asked for the entity."""
        place = f"{_ANYBODY}/{clean(trajectory.project or self._config.project)}"
        return _size(calls_of(trajectory, place, self._config.experiment))

    def _give_feedback(self, connection: Connection, place: str, traces: Sequence[TraceCalls]) -> None:
        if self._no_feedback or not traces:
            return
        try:
            replace_feedback(connection, place, [(trace.root_id, trace.rewards) for trace in traces])
        except RefusedError as error:
            # They stand on the calls as well.
            self._no_feedback = True
            _log.warning("rewards do not become feedback in Weave, which refuses them (%s)", error)

    def shutdown(self) -> None:
        """Send the traces of ``export`` whose root never came, and close the connection."""
        super().shutdown()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Sending:
    """Calls on their way to one project, and the trajectories of which some were refused."""

    def __init__(self, connection: Connection, place: str) -> None:
        self._connection = connection
        self._place = place
        self.taken = False
        self.refused: dict[str, str] = {}

    def send(self, batch: Sequence[Call]) -> None:
        """Send calls; where the server refuses them, find those that it means by halving."""
        error = self._try(batch)
        if error is None:
            return
        if error.status == 404:
            raise RuntimeError(
                f"the server at {self._connection.url} has no project {self._place}, or is too old to take "
                f"complete calls ({error}); look whether the project is there, or update the server"
            )
        if len(batch) > 1:
            middle = len(batch) // 2
            self.send(batch[:middle])
            self.send(batch[middle:])
            return
        if error.status == 413 and self._try([batch[0].shorter()]) is None:
            return
        self.refused[batch[0].trace_id] = str(error)
        if not self.taken and len(self.refused) >= _ALL:
            raise self.trouble(str(error))

    def trouble(self, reason: str) -> RuntimeError:
        """Make the error that says that the server and not the calls must be the reason."""
        return RuntimeError(f"the server at {self._connection.url} refuses every call ({reason})")

    def _try(self, batch: Sequence[Call]) -> RefusedError | None:
        body = b'{"batch":[' + b",".join(call.data for call in batch) + b"]}"
        try:
            self._connection.send_calls(self._place, body)
        except RefusedError as error:
            return error
        self.taken = True
        return None


def _size(trace: TraceCalls) -> int:
    return sum(len(call.data) for call in trace.calls)


def _batches(calls: Sequence[Call]) -> Iterator[list[Call]]:
    batch: list[Call] = []
    size = 0
    for call in calls:
        if batch and (len(batch) == BATCH_CALLS or size + len(call.data) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(call)
        size += len(call.data)
    if batch:
        yield batch
