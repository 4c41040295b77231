"""MLflow for reading: where it is, whether it is there, and which experiment is meant."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from ..exporters.mlflow_errors import explained, reason
from ..exporters.mlflow_store import check_server, tracking_uri
from ..exporters.settings import load_settings
from ..exporters.text import short_name
from ..printable import without_password
from ..store import StoreError, open_store, store_path

PREFIX: Final = "mlflow:"
_NAMED: Final = 20
"""Most experiments that an error lists."""
T = TypeVar("T")


def where(source: str, store: Path | None) -> tuple[str, str | None]:
    """Say which MLflow ``--from`` means.

    Args:
        source: ``mlflow:`` and a tracking URI or the path of a database; ``mlflow:`` alone is where the store
            is exported to.
        store: folder of the store, else the usual one.

    Returns:
        The tracking URI, and the store's project where it is the store's own MLflow.

    Raises:
        ValueError: it is none of these.
        StoreError: there is no store whose MLflow could be meant.
    """
    place = source.removeprefix(PREFIX).strip()
    if not source.startswith(PREFIX):
        raise ValueError(
            f"{source!r} is no place to read from; write mlflow:URI, for instance mlflow:http://host:5000, "
            "mlflow:sqlite:////data/mlflow.db, or mlflow: alone for where the store is exported to"
        )
    own = _own(store)
    if not place:
        if own is None:
            path = open_store(store).path  # says what is wrong with it
            raise StoreError(f"{path} holds no settings that say where it is exported to; write mlflow:URI")
        return own
    if Path(place).is_file():
        place = f"sqlite:///{Path(place).absolute()}"
    uri = tracking_uri(store_path(store), place)
    return uri, own[1] if own is not None and own[0] == uri else None


def _own(store: Path | None) -> tuple[str, str] | None:
    path = store_path(store)
    try:
        settings = load_settings(path)
    except StoreError:
        return None
    return tracking_uri(path, settings.tracking_uri), settings.project


def open_mlflow(uri: str) -> Any:
    """Give MLflow's client for a tracking URI, which must be there; nothing is made.

    Raises:
        StoreError: it is not there, it is no MLflow, or MLflow is not installed.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise StoreError("reading from MLflow needs the package mlflow: pip install 'trackway[mlflow]'")
    scheme = urlsplit(uri).scheme
    if scheme == "file":
        path = Path(urlsplit(uri).path)
        wrong = "is a folder" if path.exists() else "does not exist"
        raise StoreError(
            f"{path} {wrong}; Trackway reads MLflow's databases and servers, for instance "
            "mlflow:sqlite:////data/mlflow.db"
        )
    if scheme not in ("http", "https"):
        _check_database(uri)
    check_there(uri)
    return asked(uri, None, lambda: _client(uri))


def check_there(uri: str) -> None:
    """Make sure that a server answers.

    Raises:
        StoreError: it does not.
    """
    try:
        check_server(uri)
    except ConnectionError as error:
        raise StoreError(str(error)) from None


def _client(uri: str) -> Any:
    from mlflow.tracing.client import TracingClient

    return TracingClient(tracking_uri=uri)


def _check_database(uri: str) -> None:
    """Make sure that a database is there and MLflow's: MLflow itself would make it."""
    scheme, _, rest = uri.partition(":///")
    if scheme.startswith("sqlite"):
        name, _, options = rest.partition("?")
        path = Path(name.removeprefix("file:") if "uri=true" in options else name)
        if not path.is_file():
            raise StoreError(
                f"there is no database at {path}: nothing was exported there yet"
                f"{'; `trackway sync` does it' if path.name == 'mlflow.db' else ''}"
            )
    import sqlalchemy

    engine = None
    try:
        engine = sqlalchemy.create_engine(uri)
        is_mlflow = sqlalchemy.inspect(engine).has_table("trace_info")
    except (sqlalchemy.exc.SQLAlchemyError, ImportError) as error:
        why = reason(error).splitlines()[0]
        raise StoreError(f"the database {without_password(uri)} cannot be read: {why}") from None
    finally:
        if engine is not None:
            engine.dispose()
    if not is_mlflow:
        raise StoreError(f"{without_password(uri)} is not a database of MLflow that holds traces")


def asked(uri: str, store: Any, question: Callable[[], T]) -> T:
    """Ask MLflow something.

    Args:
        store: MLflow's store; None when it is not open yet.

    Raises:
        StoreError: it fails, or is no MLflow; the message says why, and what to do.
    """
    try:
        return question()
    except StoreError:
        raise
    except Exception as error:
        told = explained(error, uri, store, "fails")
        if told is error and not isinstance(error, OSError):
            raise
        raise StoreError(str(told)) from error


def experiment_of(uri: str, store: Any, project: str | None) -> tuple[str, str]:
    """Give the id and the name of the experiment that a project is.

    Args:
        project: its name; None where nobody said one: there must then be one only.

    Raises:
        StoreError: there is none, or nobody can tell which one; the message lists them.
    """
    if project is not None:
        found = store.get_experiment_by_name(short_name(project))
        if found is not None and found.lifecycle_stage == "active":
            return str(found.experiment_id), str(found.name)
    experiments = list(store.search_experiments(max_results=1000))
    # MLflow makes one called Default by itself.
    used = [item for item in experiments if item.experiment_id != "0"] or experiments
    if project is None and len(used) == 1:
        return str(used[0].experiment_id), str(used[0].name)
    names = _listed([item.name for item in used])
    place = without_password(uri)
    if project is None:
        raise StoreError(f"{place} has several experiments; choose one with --project: {names}")
    deleted = " any more" if found is not None else ""
    raise StoreError(f"there is no experiment {project!r}{deleted} at {place}; there are: {names}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} others" if len(names) > _NAMED else shown or "none"
