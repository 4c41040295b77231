"""Options that several commands share, and how values are read: a wrong one is named in plain words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trackway.trace.formats.mlflow import MlflowTraces
    from trackway.trace.store import Store

_SHORTEST = 0.1
"""Seconds between two looks at a store, at least."""

StorePath = Annotated[
    Path | None,
    typer.Option("--store", metavar="PATH", help="The store; else $TRACKWAY_STORE or ./trackway-store."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
From = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="mlflow:URI", help="Read MLflow, and not the store; mlflow: is where it exports to."
    ),
]
Project = Annotated[
    str | None, typer.Option("--project", metavar="NAME", help="Experiment of MLflow, with --from.")
]


def integer(least: int | None = None, most: int | None = None) -> Callable[[Any], int]:
    """Read the integer of an option, in words of its own where it is none."""

    def parse(text: Any) -> int:
        try:
            value = int(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not an integer") from None
        if least is not None and value < least:
            raise typer.BadParameter(f"{value} is less than {least}")
        if most is not None and value > most:
            raise typer.BadParameter(f"{value} is more than {most}")
        return value

    return parse


def number(text: Any) -> float:
    """Read the number of an option."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def step_range(text: Any) -> Any:
    """Read which steps are meant: ``7``, ``1,5,9``, ``100..200``, ``>=100``."""
    from trackway.trace.store import Steps

    try:
        return Steps.parse(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def interval_value(text: Any) -> float:
    """Read the seconds between two looks at a store."""
    value = number(text)
    if not _SHORTEST <= value < float("inf"):
        raise typer.BadParameter(f"{text} seconds: it is {_SHORTEST} or more")
    return value


def temperature_value(text: Any) -> float:
    """Read a sampling temperature."""
    value = number(text)
    if not 0 <= value < float("inf"):
        raise typer.BadParameter(f"{text} is no temperature: it is 0 or more")
    return value


def status_word(text: str | None) -> str | None:
    """Read a status, in capitals as the tables have it too."""
    if text is None:
        return None
    from typing import get_args

    from trackway.trace.model import Status

    allowed = get_args(Status)
    if text.lower() not in allowed:
        raise typer.BadParameter(f"{text!r} is not a status; use one of {', '.join(allowed)}")
    return text.lower()


def sample_id(text: str | None) -> int | str | None:
    """Read a sample's id, as a key has it or as the data set has it."""
    if text is None:
        return None
    from trackway.trace.model import TrajectoryKey

    try:
        return TrajectoryKey.parse(f"0/{text}/0").sample_index
    except ValueError:  # it has a slash in it
        return text


def source(store: Path | None, place: str | None, project: str | None) -> Store | MlflowTraces:
    """Open what ``--from`` names, else the store."""
    if place is None:
        if project is not None:
            raise typer.BadParameter("--project names an experiment of MLflow, and goes with --from only")
        from trackway.trace.store import open_store

        return open_store(store)
    return mlflow_traces(store, place, project)


def mlflow_traces(store: Path | None, place: str, project: str | None) -> MlflowTraces:
    """Open the MLflow that ``--from`` names."""
    from trackway.trace.formats.mlflow import MlflowTraces
    from trackway.trace.formats.mlflow_open import where

    try:
        uri, own = where(place, store)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return MlflowTraces(uri, project or own)
