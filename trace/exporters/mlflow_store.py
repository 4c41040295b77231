"""Where MLflow is, and how its store is opened and written to."""

from __future__ import annotations

import copy
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ..log import logger
from ..printable import without_password
from ..store import locks

_log = logger(__name__)

_announced: set[str] = set()


def tracking_uri(store: Path, configured: str | None = None) -> str:
    """Say where MLflow keeps the traces of a store.

    That is what is configured, else ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` inside the store. A
    relative path counts from the current directory and comes back absolute.

    Raises:
        ValueError: a database in memory, which would be gone with the process that writes it.
    """
    uri = _absolute(configured or os.environ.get("MLFLOW_TRACKING_URI") or embedded_uri(store))
    if uri not in _announced:
        _announced.add(uri)
        _log.info("MLflow traces are at %s", without_password(uri))
    return uri


def embedded_uri(store: Path) -> str:
    """Name the database inside a store."""
    return f"sqlite:///{store.absolute() / 'mlflow.db'}"


def _absolute(uri: str) -> str:
    scheme, colon, rest = uri.partition(":")
    if scheme.startswith("sqlite"):
        path, question, query = rest.removeprefix("///").partition("?")
        if path in ("", "//", ":memory:"):
            raise ValueError(
                f"tracking_uri {uri!r} is a database in memory, gone when the exporting process ends; "
                "name a file, for instance sqlite:////data/mlflow.db"
            )
        return uri if path.startswith("file:") else f"{scheme}:///{Path(path).absolute()}{question}{query}"
    if scheme == "file" and not rest.startswith("/"):
        return Path(rest).absolute().as_uri()
    if not colon and uri not in ("databricks", "databricks-uc", "uc"):
        return Path(uri).absolute().as_uri()
    return uri


def check_server(uri: str) -> None:
    """Raise ConnectionError when a server does not answer at all; MLflow itself would try for minutes."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}/health"
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except urllib.error.HTTPError as error:
        if error.code in (502, 503, 504):
            raise ConnectionError(
                f"no MLflow server behind {without_password(uri)}: HTTP {error.code}"
            ) from error
    except (OSError, HTTPException) as error:
        # Which certificates are good enough is MLflow's business; it has settings for that.
        if not isinstance(getattr(error, "reason", None), ssl.SSLError):
            raise ConnectionError(
                f"the MLflow server at {without_password(uri)} does not answer: {error}"
            ) from error


def open_store(uri: str) -> Any:
    """Give MLflow's store for a tracking URI; an SQLite database is created where there is none."""
    from mlflow.tracing.client import TracingClient

    with _first_use(uri):
        return TracingClient(tracking_uri=uri).store


@contextmanager
def _first_use(uri: str) -> Iterator[None]:
    """Let one process at a time open an SQLite database: the first of them creates its tables.

    Of four processes that did so at once, three failed; of eight all did, and the file stayed broken.
    """
    scheme, _, rest = uri.partition(":///")
    if not scheme.startswith("sqlite") or rest.startswith("file:"):
        yield
        return
    database = Path(rest.partition("?")[0])
    database.parent.mkdir(parents=True, exist_ok=True)
    lock = locks.wait(database.with_name(f"{database.name}.lock"))
    try:
        yield
    finally:
        if lock is not None:
            locks.release(lock)


def experiment_id(store: Any, name: str, uri: str, folder: Path) -> str:
    """Give the id of the experiment that has this name now, made when there is none.

    Args:
        store: MLflow's, or its client.
        name: of the experiment.
        uri: where that store is.
        folder: of the Trackway store. An embedded database's files are kept beside it; MLflow's default is
            the directory one happens to be in.

    Raises:
        RuntimeError: the experiment is deleted.
    """
    from mlflow.exceptions import MlflowException

    experiment = store.get_experiment_by_name(name)
    if experiment is None:
        embedded = uri == embedded_uri(folder)
        place = str(folder.absolute() / "mlartifacts" / quote(name, safe=" ")) if embedded else None
        try:
            store.create_experiment(name, artifact_location=place)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process was first
                raise
        experiment = store.get_experiment_by_name(name)
    if not experiment.experiment_id:
        raise NotImplementedError("the answer holds no experiment")
    if experiment.lifecycle_stage != "active":
        raise RuntimeError(
            f"the MLflow experiment {name!r} is deleted at {without_password(uri)}; restore it with "
            f"`mlflow experiments restore --experiment-id {experiment.experiment_id}`, "
            "delete it for good with `mlflow gc`, or choose another project"
        )
    return str(experiment.experiment_id)


@contextmanager
def one_transaction(store: Any) -> Iterator[Any]:
    """Give a store whose writes are committed together when the block ends, or not at all.

    MLflow commits every call by itself, and on SQLite waits for the disk each time: 51 times for 50
    traces. Its database store gets all its sessions from ``ManagedSessionMaker``; a copy of the store
    that gets them from one open transaction, where each commit is a savepoint, waits once. Any other
    store, of a server for instance, is given as it is.
    """
    engine = getattr(store, "engine", None)
    if engine is None or not hasattr(store, "ManagedSessionMaker"):
        yield store
        return
    from mlflow.store.db.utils import _get_managed_session_maker
    from sqlalchemy.orm import sessionmaker

    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            # Its driver begins a transaction only at the first write, too late for a savepoint; and
            # foreign keys can be switched on only before.
            connection.exec_driver_sql("PRAGMA foreign_keys = ON")
            connection.exec_driver_sql("PRAGMA busy_timeout = 20000")
            connection.rollback()
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        sessions = sessionmaker(bind=connection, join_transaction_mode="create_savepoint")
        together = copy.copy(store)
        together.ManagedSessionMaker = _get_managed_session_maker(sessions, store.db_type)
        # Each start_trace reads its experiment again, a fifth of all the time.
        together.get_experiment = cache(together.get_experiment)
        yield together
        connection.commit()
