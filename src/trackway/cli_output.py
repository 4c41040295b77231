"""How the command line writes, to a terminal, a pipe or a full disk: views, plain lines, what went wrong."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_view(view: RenderableType, *, whole_lines: bool = False) -> None:
    """Print a view, without colour when not to a terminal.

    Args:
        whole_lines: in a pipe, be as wide as the view needs, so that a row stays one line for grep.
    """
    from rich.console import Console

    console = Console()
    if whole_lines and not console.is_terminal and "COLUMNS" not in os.environ:
        wide = console.options.update(width=10_000)
        console.width = max(80, console.measure(view, options=wide).maximum)
    with console.capture() as captured:
        console.print(view)
    write(captured.get())


def write(text: str) -> None:
    """Print a text as it is; end quietly when nobody reads it, with a sentence when it cannot be written."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        leave_stdout()
        raise typer.Exit from None
    except OSError as error:
        leave_stdout()
        fail(f"the output cannot be written: {error.strerror or error}")


def leave_stdout() -> None:
    """Drop what standard output did not take: at exit Python would try again, and complain."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(text: str) -> None:
    """Print a line, made safe."""
    from trackway.trace.printable import visible

    write(f"{visible(text)}\n")


def say(text: str) -> None:
    """Print a line on stderr, made safe."""
    from trackway.trace.printable import visible

    print(visible(text), file=sys.stderr)


def fail(text: str, code: int = 1) -> NoReturn:
    """Say what went wrong, and end."""
    say(f"trackway: {text}")
    sys.exit(code)
