"""How a follower is asked to end."""

from __future__ import annotations

import math
import threading
import time


class Leave:
    """Asks a follower to end; without being asked, it ends when there is nothing more to do."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._deadline = math.inf
        self._drain = True

    def ask(self, deadline: float, *, drain: bool) -> None:
        """Ask it.

        Args:
            deadline: a time of ``time.monotonic`` until which it may wait for answers.
            drain: whether it may still begin to send what is due.
        """
        self._deadline, self._drain = deadline, drain
        self._asked.set()

    @property
    def asked(self) -> bool:
        """Whether it was asked to end."""
        return self._asked.is_set()

    @property
    def remaining(self) -> float:
        """Seconds that it may still wait for answers, infinite when nobody asked."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether it may wait no longer."""
        return not self.remaining

    @property
    def sends_nothing(self) -> bool:
        """Whether it may begin nothing more."""
        return self.over or (self.asked and not self._drain)

    def wait(self, timeout: float) -> bool:
        """Wait until it is asked; say whether it was."""
        return self._asked.wait(timeout)
