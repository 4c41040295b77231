"""What verl loads at the end of ``import verl``, by the entry-point group ``verl.plugins``.

It does nothing unless ``TRACKWAY_VERL`` is 1. verl tells nobody when a plugin fails, so we do.
"""

from __future__ import annotations

import os


def _activate(asked: str) -> None:
    from ...log import logger

    if asked != "1":
        logger().warning(
            "TRACKWAY_VERL=%r is neither 0 nor 1: verl is not traced. Set it to 1 to trace verl's rollouts",
            asked,
        )
        return
    try:
        from .installing import install

        install()
    except Exception as error:
        logger().error("verl is not traced in process %d: %s", os.getpid(), error)


if os.environ.get("TRACKWAY_VERL", "0") not in ("0", ""):
    _activate(os.environ["TRACKWAY_VERL"])
