"""A tool that is a plain function; verl runs this file by its path."""

from __future__ import annotations

from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int) -> str:
    """Add two whole numbers; the sum of 13 always fails.

    Args:
        a: The first number.
        b: The second number.
    """
    if a + b == 13:
        raise ValueError(f"{a} + {b} brings bad luck")
    return str(a + b)
