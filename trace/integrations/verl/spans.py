"""Spans for calls whose name or arguments are not those of a decorated function."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ...capture import runtime
from ...capture.calls import Call, Target
from ...capture.scope import NotSampled
from ...model import Kind


def begin(kind: Kind, name: str, arguments: Mapping[str, Any]) -> Call | NotSampled | None:
    """Open a span as the innermost one; whoever does so enters, leaves and ends it.

    Returns:
        None when the call is not recorded.
    """
    recorder = runtime.get()
    if recorder is None:
        return None
    try:
        return recorder.begin(_target(kind, name), (), dict(arguments))
    except Exception as error:
        recorder.trouble("could not record a call", error)
        return None


@lru_cache(maxsize=256)  # names of tools may be a model's inventions
def _target(kind: Kind, name: str) -> Target:
    return Target(_call, kind, name)


def _call(**arguments: Any) -> None:
    """Give a target its signature."""
