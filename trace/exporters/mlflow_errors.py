"""What went wrong at MLflow: whether it passes, and what a person can do about it."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import urlsplit

from ..printable import without_password
from .text import without_secrets

LEAST_SERVER: Final = (3, 4)
"""Version of the first server that takes spans (``RestStore.log_spans``)."""

_PASSING = {
    "TEMPORARILY_UNAVAILABLE",  # also every OperationalError of the database: locked, full, away
    "REQUEST_LIMIT_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "ABORTED",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "CUSTOMER_UNAUTHORIZED",
    "ENDPOINT_NOT_FOUND",
}
"""MLflow's error codes that say nothing about the trace; a person may have to help, but nothing is lost."""
_LOGIN = {"UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"}


def is_passing(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, comes from the network, the file system or a busy database."""
    while error is not None:
        # NotImplementedError: the server is too old. OperationalError: of SQLAlchemy.
        if isinstance(error, (OSError, NotImplementedError)) or type(error).__name__ == "OperationalError":
            return True
        if getattr(error, "error_code", None) in _PASSING:
            return True
        error = error.__cause__ or error.__context__
    return False


def reason(error: BaseException) -> str:
    """Say what an error says, without credentials and at most 1,000 characters of it."""
    text = without_secrets(f"{type(error).__name__}: {error}".strip())
    return text if len(text) <= 1000 else f"{text[:999]}…"


def explained(error: Exception, uri: str, store: Any, failing: str = "does not take traces now") -> Exception:
    """Give the error that tells a person what is wrong at a destination, and what to do.

    Args:
        error: what MLflow raised.
        uri: the tracking URI.
        store: MLflow's store; None when it could not be opened.
        failing: what to say of MLflow where nothing better is known.

    Returns:
        A ConnectionError where it may pass by itself, else a RuntimeError, for what MLflow reports;
        anything else as it is.
    """
    shown = without_password(uri)
    if isinstance(error, ConnectionError) or not (is_passing(error) or hasattr(error, "error_code")):
        return error
    if getattr(error, "error_code", None) in _LOGIN:
        return ConnectionError(
            f"MLflow at {shown} refuses the login: user name and password are missing or wrong. Give them "
            "in the tracking URI, in ~/.mlflow/credentials, or with MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD where the recording process is started"
        )
    if "out-of-date database schema" in str(error):
        return RuntimeError(
            f"the MLflow database at {shown} was made by another version of MLflow: back it up and run "
            f"`mlflow db upgrade {shown}`, or, if a newer one made it, install that one ({reason(error)})"
        )
    if urlsplit(uri).scheme in ("http", "https") and store is not None:
        wrong = _wrong_server(store, shown)
        if wrong is not None:
            return ConnectionError(wrong)
    kind = ConnectionError if is_passing(error) else RuntimeError
    return kind(f"MLflow at {shown} {failing}: {reason(error)}")


def _wrong_server(store: Any, shown: str) -> str | None:
    """Say what is wrong with the server itself; None when it is an MLflow server that is new enough."""
    from mlflow.utils.rest_utils import http_request

    try:
        answer = http_request(store.get_host_creds(), "/version", "GET", max_retries=0, timeout=5)
    except Exception:
        return None  # it is away, or asks for a login: the error itself says more
    found = re.match(r"(\d+)\.(\d+)", answer.text) if answer.status_code == 200 else None
    if found is None:
        kind = answer.headers.get("Content-Type", "no content type")
        return (
            f"what answers at {shown} is no MLflow server: GET /version gives HTTP {answer.status_code}, "
            f"{kind}. Check the address in tracking_uri or MLFLOW_TRACKING_URI"
        )
    if (int(found[1]), int(found[2])) < LEAST_SERVER:
        least = ".".join(map(str, LEAST_SERVER))
        return f"the MLflow server at {shown} is version {answer.text}: for spans, {least} or newer is needed"
    return None
