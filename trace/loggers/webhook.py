"""Alerts for a webhook: Slack, Discord, Feishu, Mattermost, or a program of one's own."""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ..config_values import ConfigError, show
from ..printable import visible
from .base import Run, Unavailable
from .notify import TIMEOUT, Notifier, cut

URL = "TRACKWAY_WEBHOOK_URL"
HEADERS = "TRACKWAY_WEBHOOK_HEADERS"

_TEXT = 1500
"""Characters of a text; with all that stands around it, Discord takes 2,000."""
_MOST_READ = 65_536
_REFUSED = (400, 413, 415, 422)
"""Answers that mean this very message, which would be the same next time."""
_ADDRESS = re.compile(r"[!-~]+")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t -~\xa0-\xff]*")


class WebhookLogger(Notifier):
    """Sends each alert as JSON by POST, and nothing else.

    The address is a secret, as are the headers: no message has more of it than the host, and neither is
    kept. Whoever goes on with the run, ``trackway sync`` too, takes them from the environment. Redirections
    are not followed, proxies of the environment are used.
    """

    settings = frozenset({"url", "headers"})
    secrets = frozenset({"url", "headers"})

    def __init__(self, run: Run, *, url: str, headers: Mapping[str, str] | None = None) -> None:
        """Remember where to send to; nothing is sent yet.

        Args:
            run: which one.
            url: an ``http`` or ``https`` address. Default: ``TRACKWAY_WEBHOOK_URL``.
            headers: HTTP headers by name. Default: ``TRACKWAY_WEBHOOK_HEADERS``, a JSON object.
        """
        super().__init__(run)
        self._url = url
        self._headers = {"Content-Type": "application/json", "User-Agent": "trackway", **(headers or {})}
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._where = f"the webhook at {parts.scheme}://{parts.netloc}"
        self._open = urllib.request.build_opener(_Stay).open

    @classmethod
    def check(cls, settings: Mapping[str, Any], *, offline: bool) -> dict[str, Any]:
        """See ``ExperimentLogger.check``; what is not given comes from the environment."""
        url = settings.get("url") or os.environ.get(URL)
        if not url:
            raise Unavailable(f"webhook: it has no address: give webhook={{'url': 'https://…'}} or set {URL}")
        headers = settings.get("headers")
        if headers is None:
            headers = _from_environment()
        return {"url": _checked_url(url), "headers": _checked_headers(headers)}

    def send(self, title: str, text: str, level: str, step: int | None) -> None:
        """Send one alert, see ``Notifier.send``."""
        headline = self.headline(title, level, step)
        words = f"{headline}\n{cut(text, _TEXT)}" if text else headline
        message = {
            "text": words,
            "title": title,
            "level": level,
            "run": self.run.id,
            "experiment": self.name(self.run.experiment),
            "project": self.name(self.run.project),
            "step": step,
            "time": self.time,
            **_as_read_by(self._host, words),
        }
        status, answer = self._post(json.dumps(message).encode())
        if 200 <= status < 300:
            if _is_feishu(self._host):
                self._expect_no_code(answer)
            return
        said = f"{self._where} answered {status} {http.client.responses.get(status, '')}".rstrip()
        if status in _REFUSED:
            raise ValueError(f"{said}: it does not take this alert; is it made for messages with a 'text'?")
        if 300 <= status < 400:
            raise ConnectionError(f"{said}: it has moved; give the new address")
        if status in (401, 403, 404, 410):
            said += f": check the address and the headers ({URL}, {HEADERS})"
        raise ConnectionError(said)

    def _post(self, body: bytes) -> tuple[int, bytes]:
        """Give status and beginning of the answer."""
        request = urllib.request.Request(self._url, body, self._headers, method="POST")
        try:
            with self._open(request, timeout=TIMEOUT) as answer:
                said = b""
                with suppress(OSError, http.client.HTTPException):  # by then the alert is there
                    said = answer.read(_MOST_READ)
                return answer.status, said
        except urllib.error.HTTPError as error:
            error.close()
            return error.code, b""
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            # The words of the others quote what a stranger has answered, or the address.
            words = str(reason) if isinstance(reason, (OSError, str)) else type(reason).__name__
            raise ConnectionError(
                f"{self._where} does not answer: {cut(visible(words, newlines=False), 200)}"
            ) from None

    def _expect_no_code(self, answer: bytes) -> None:
        """Look into an answer of Feishu, which says 200 to everything."""
        try:
            code = json.loads(answer).get("code", 0)
        except (ValueError, AttributeError):
            return
        if code != 0:
            raise ConnectionError(f"{self._where} answered code {show(code)}, see Feishu's documentation")


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: it would arrive without the message, or at a place that nobody chose."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _is_feishu(host: str) -> bool:
    return host in ("open.feishu.cn", "open.larksuite.com")


def _as_read_by(host: str, words: str) -> dict[str, Any]:
    """Give what some receivers need besides or in place of ``text``, so that they show it as it is."""
    if host == "slack.com" or host.endswith(".slack.com"):
        words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return {"text": words, "mrkdwn": False}
    if host in ("discord.com", "discordapp.com") or host.endswith((".discord.com", ".discordapp.com")):
        block = "```\n" + words.replace("`", "'") + "\n```"
        return {"content": block, "allowed_mentions": {"parse": []}}
    if _is_feishu(host):
        # <at user_id="all"> would call everybody.
        return {"msg_type": "text", "content": {"text": words.replace("<at", "< at")}}
    return {}


def _checked_url(url: Any) -> str:
    """Check an address without ever showing it."""
    expected = "expected one such as https://hooks.example.org/…"
    if not isinstance(url, str) or not _ADDRESS.fullmatch(url):
        raise ConfigError(f"webhook.url is no text of ASCII characters without spaces; {expected}")
    try:
        parts = urlsplit(url)
        scheme, host, _ = parts.scheme, parts.hostname, parts.port
        (host or "").encode("idna")
    except ValueError:
        raise ConfigError(f"webhook.url has a host or port that is none; {expected}") from None
    if scheme not in ("http", "https"):
        raise ConfigError(f"webhook.url begins with {show(scheme)}; only http and https are allowed")
    if not host:
        raise ConfigError(f"webhook.url has no host; {expected}")
    if "@" in parts.netloc:
        raise ConfigError("webhook.url has a user in it; give webhook.headers an Authorization instead")
    return url


def _from_environment() -> Any:
    text = os.environ.get(HEADERS)
    if not text:
        return {}
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f'{HEADERS} is no JSON; expected {{"name": "value"}}') from None


def _checked_headers(headers: Any) -> dict[str, str]:
    """Check headers without ever showing a value."""
    if not isinstance(headers, Mapping):
        raise ConfigError("webhook.headers is no mapping from names to texts")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ConfigError(f"webhook.headers: {show(name)} cannot be the name of a header")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(f"webhook.headers: the value of {name} is no text of one line, in Latin-1")
    return dict(headers)
