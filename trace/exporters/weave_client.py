"""The connection to Weave's servers, through Weave's own client: login, project, requests, what went wrong.

``weave.init`` is not used: it prints, asks for a key on the terminal, changes libraries that it finds, and
its own queue drops calls when the server is away. What carries the requests is the client that it uses.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from ..capture.snapshot import clean
from ..log import logger

_log = logger(__name__)

HOW_TO_LOG_IN: Final = "set WANDB_API_KEY (from https://wandb.ai/authorize) or run `wandb login`"
_BASE: Final = "https://api.wandb.ai"
_TIMEOUT, _CONNECT = 60.0, 5.0
"""Seconds for one request, and for reaching the server."""
_LONGEST_WAIT = 3600.0
"""Seconds that a server may ask to be left alone at once."""


class RefusedError(RuntimeError):
    """A server does not take what it was sent, with an HTTP status that blames the request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class BusyError(ConnectionError):
    """A server asks to be left alone for some seconds."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


def has_login() -> bool:
    """Say whether an API key can be found, where Weave's client looks for it; without importing Weave."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb") / "settings"
    if "WANDB_BASE_URL" not in os.environ and (settings.exists() or Path("wandb/settings").exists()):
        return True  # they may name another server; the client will see
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or _BASE).netloc
    for path in (Path.home() / ".netrc", Path.home() / "_netrc"):
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(path).authenticators(host):
                return True
    return False


def warn_without_login() -> None:
    """Say at once that nothing will reach Weave for want of an API key."""
    if not has_login():
        _log.warning(
            "there is no login for Weave: %s. Until then everything stays in the store, and is sent later",
            HOW_TO_LOG_IN,
        )


class Connection:
    """A login at Weave's servers.

    Raises:
        RuntimeError: there is no API key, or two.
    """

    def __init__(self) -> None:
        with _no_error_reports():
            import weave  # noqa: F401 - whatever is imported of it first
        from weave.compat.wandb import AuthenticationError
        from weave.trace import env
        from weave.vendor.weave_server_sdk import Client, DefaultHttpxClient, Timeout
        from weave.wandb_interface.auth import get_wandb_credentials

        try:
            credentials = get_wandb_credentials()
        except (AuthenticationError, netrc.NetrcParseError) as error:
            raise RuntimeError(f"the login at Weave cannot be read: {clean(str(error))}") from None
        self.url = env.weave_trace_server_url().rstrip("/")
        self._wandb = env.wandb_base_url()
        if credentials is None:
            raise RuntimeError(f"there is no login for Weave at {self._wandb}: {HOW_TO_LOG_IN}")
        self._credentials = credentials
        self._client = Client(
            base_url=self.url,
            username="",
            password="",
            max_retries=0,
            timeout=Timeout(_TIMEOUT, connect=_CONNECT),
            http_client=DefaultHttpxClient(verify=env.ssl_verify()),
        )
        self._places: dict[str, str] = {}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def place(self, project: str) -> str:
        """Give ``entity/project``, made when it is not there yet.

        Args:
            project: a project, with the entity before it or without; then it is that of ``WANDB_ENTITY``,
                else the key's default one.

        Raises:
            ConnectionError: nobody answers, or not now.
            RuntimeError: a person has to act first.
        """
        if project not in self._places:
            with _told(self._wandb):
                self._places[project] = self._find(project)
        return self._places[project]

    def _find(self, project: str) -> str:
        from weave.compat.wandb import Api

        api = Api()
        entity, _, name = project.rpartition("/")
        if "/" in entity or not name:
            raise RuntimeError(f"{project!r} is no project of Weave: expected a name, or entity/name")
        entity = entity or os.environ.get("WANDB_ENTITY") or api.default_entity_name() or ""
        if not entity:
            raise RuntimeError(
                f"the API key has no default entity at {self._wandb}, or is not known there: set "
                f"WANDB_ENTITY, or the project as entity/{name}, or log in again: {HOW_TO_LOG_IN}"
            )
        found = api.project(entity, name)["project"]
        found = found or api.upsert_project(project=name, entity=entity)["upsertModel"]["model"]
        return f"{entity}/{found['name']}"

    def send_calls(self, project_id: str, body: bytes) -> None:
        """Write complete calls; one that is there already is replaced. Raises like ``post``."""
        entity, name = project_id.split("/")
        self.post(f"/v2/{quote(entity, safe='')}/{quote(name, safe='')}/calls/complete", body)

    def post(self, path: str, body: bytes) -> Any:
        """Send JSON and give the answer.

        Raises:
            RefusedError: the server blames the request.
            ConnectionError: nobody answers, or not now.
            RuntimeError: a person has to act first.
        """
        headers = {
            "Authorization": self._credentials.authorization_header(),
            "Content-Type": "application/json",
        }
        with _told(self.url):
            answer = self._client.post(path, content=body, cast_to=object, options={"headers": headers})
        if not isinstance(answer, dict):
            raise RuntimeError(
                f"what answers at {self.url} is no server of Weave: it gives no JSON; look at "
                "WF_TRACE_SERVER_URL, and whether a proxy keeps you from it"
            )
        return answer


@contextmanager
def _no_error_reports() -> Iterator[None]:
    """Keep Weave from reporting to its maker's Sentry that it was imported, and when it ends."""
    name = "WANDB_ERROR_REPORTING"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Turn what Weave's client raises into what the follower understands."""
    from gql.transport.exceptions import TransportError, TransportQueryError
    from httpx import HTTPError
    from weave.vendor.weave_server_sdk import APIError

    try:
        yield
    except TransportQueryError as error:
        reasons = [str(one.get("message", one)) for one in error.errors or [{"message": str(error)}]]
        raise RuntimeError(f"{url} refuses: {_short('; '.join(reasons))}") from None
    except (APIError, TransportError, HTTPError, OSError) as error:
        raise _trouble(url, error) from error


def _trouble(url: str, error: Exception) -> Exception:
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    if status is None:
        cause = error.__cause__ or error
        reason = _short(str(cause) or type(cause).__name__)
        return ConnectionError(f"Weave at {url} cannot be reached: {reason}")
    said = f"HTTP {status}: {_short(str(error))}"
    if status == 401:
        return RuntimeError(
            f"{url} does not accept the API key, which has expired or is of another server ({said}): "
            f"{HOW_TO_LOG_IN}"
        )
    if status in (402, 403):
        return RuntimeError(f"{url} does not let this API key write there ({said})")
    if status in (408, 425, 429) or status >= 500:
        seconds = _wait(error)
        message = f"{url} does not take calls now ({said})"
        return (
            BusyError(f"{message}; it asks for {seconds:.0f} s", seconds)
            if seconds
            else ConnectionError(message)
        )
    return RefusedError(said, status)


def _wait(error: Exception) -> float:
    """Read ``Retry-After``: seconds, or a date; 0 without one."""
    value = str(getattr(getattr(error, "response", None), "headers", {}).get("retry-after", ""))
    seconds = 0.0
    with suppress(ValueError):
        seconds = float(value)
        return min(max(0.0, seconds), _LONGEST_WAIT) if seconds == seconds else 0.0
    with suppress(ValueError, TypeError):
        seconds = (parsedate_to_datetime(value) - datetime.now(timezone.utc)).total_seconds()
    return min(max(0.0, seconds), _LONGEST_WAIT)


def _short(text: str) -> str:
    text = " ".join(clean(text).split())
    return text if len(text) <= 300 else f"{text[:299]}…"
