"""Alerts by e-mail."""

from __future__ import annotations

import os
import re
import smtplib
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from email.header import Header
from email.mime.text import MIMEText
from email.utils import formatdate, make_msgid
from typing import Any

from ..config_values import ConfigError, wrong
from ..log import logger as program_log
from ..printable import visible
from .base import Run, Unavailable
from .notify import TIMEOUT, Notifier, cut

log = program_log()

PASSWORD = "TRACKWAY_EMAIL_PASSWORD"
_PORTS = {"off": 25, "starttls": 587, "ssl": 465}
_TEXT = 20_000
"""Characters of a text."""
_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9.-]+")
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")


class EmailLogger(Notifier):
    """Sends each alert as a mail, and nothing else.

    The password is not kept. Whoever goes on with the run, ``trackway sync`` too, takes it from
    ``TRACKWAY_EMAIL_PASSWORD``. With ``tls`` the server's certificate is checked.
    """

    settings = frozenset({"host", "port", "sender", "to", "user", "password", "tls"})
    secrets = frozenset({"password"})

    def __init__(
        self,
        run: Run,
        *,
        host: str,
        sender: str,
        to: Iterable[str],
        port: int | None = None,
        user: str | None = None,
        password: str | None = None,
        tls: str = "off",
    ) -> None:
        """Remember how to send; nothing is sent yet.

        Args:
            run: which one.
            host: of the mail server.
            sender: the address that mails come from.
            to: addresses that they go to; in settings also one text with commas.
            port: of the server. Default: 587, with ``tls="ssl"`` 465, with ``tls="off"`` 25.
            user: to log in with. Default: no login.
            password: of the user. Default: ``TRACKWAY_EMAIL_PASSWORD``.
            tls: ``starttls``, ``ssl`` or ``off``. Default: ``starttls`` where there is a user (``ssl`` at
                port 465), else ``off``.
        """
        super().__init__(run)
        self._host, self._port = host, port or _PORTS[tls]
        self._sender, self._to = sender, tuple(to)
        self._user, self._password, self._tls = user, password, tls
        self._told_refused = False

    @classmethod
    def check(cls, settings: Mapping[str, Any], *, offline: bool) -> dict[str, Any]:
        """See ``ExperimentLogger.check``."""
        host, port, user = settings.get("host"), settings.get("port"), settings.get("user")
        if not isinstance(host, str) or not _HOST.fullmatch(host):
            raise wrong("email.host", host, "the name of a mail server, without its port")
        if port is not None and (type(port) is not int or not 0 < port < 65536):
            raise wrong("email.port", port, "a port from 1 to 65535")
        if user is not None and not (isinstance(user, str) and user.strip()):
            raise wrong("email.user", user, "a text that is not empty")
        password = settings.get("password")
        if password is not None and (user is None or not isinstance(password, str)):
            raise ConfigError("email.password is no text, or there is no email.user that it belongs to")
        if user is not None and not password:
            password = os.environ.get(PASSWORD)
            if not password:
                raise Unavailable(f"email: the password of {user} is missing: set {PASSWORD}")
        if not f"{user}{password}".isascii():
            raise ConfigError("email.user and its password must be ASCII: Python's SMTP knows no others")
        return {
            "host": host,
            "port": port,
            "sender": _address("email.sender", settings.get("sender")),
            "to": _addresses(settings.get("to")),
            "user": user,
            "password": password,
            "tls": _tls(settings.get("tls"), user, port),
        }

    def send(self, title: str, text: str, level: str, step: int | None) -> None:
        """Send one alert, see ``Notifier.send``."""
        message = self._message(title, text, level, step)
        where = f"the mail server {self._host}:{self._port}"
        try:
            refused = self._deliver(message)
        except smtplib.SMTPResponseException as error:
            said = f"{where} answered {error.smtp_code} {_said(error.smtp_error)}"
            if isinstance(error, smtplib.SMTPDataError) and error.smtp_code >= 500:
                raise ValueError(said) from None
            raise ConnectionError(said) from None
        except smtplib.SMTPRecipientsRefused as error:
            raise ConnectionError(f"{where} takes no mail for {_each(error.recipients)}") from None
        except smtplib.SMTPNotSupportedError as error:
            hint = "; to send without encryption set email.tls to 'off'" if self._tls == "starttls" else ""
            raise ConnectionError(f"{where}: {_said(str(error))}{hint}") from None
        except OSError as error:
            raise ConnectionError(f"{where}: {_said(str(error))}") from None
        if refused and not self._told_refused:
            self._told_refused = True
            log.warning("%s takes no mail for %s; the others get it", where, _each(refused))

    def _message(self, title: str, text: str, level: str, step: int | None) -> MIMEText:
        run = self.run
        facts = {
            "level": level,
            "step": step,
            "run": run.id,
            "experiment": self.name(run.experiment),
            "project": self.name(run.project),
        }
        lines = [f"{name}: {fact}" for name, fact in facts.items() if fact is not None]
        body = "\n".join([title, *([cut(text, _TEXT)] if text else []), "", *lines, ""])
        message = MIMEText(body, "plain", "utf-8")
        # Encoded whole: EmailMessage loses spaces where it folds, and reads =?…?= in a title as its code.
        message["Subject"] = Header(
            self.headline(title, level, step), "utf-8", header_name="Subject"
        ).encode()
        message["From"] = self._sender
        message["To"] = ", ".join(self._to)
        message["Date"] = formatdate(self.time, localtime=True)
        message["Message-ID"] = make_msgid("trackway", domain=self._sender.rpartition("@")[2])
        message["Auto-Submitted"] = "auto-generated"  # so that no "I am on holiday" comes back
        return message

    def _deliver(self, message: MIMEText) -> dict[str, tuple[int, bytes]]:
        """Hand the mail over; give those of the recipients that were refused, with the server's words."""
        if self._tls == "ssl":
            context = ssl.create_default_context()
            server: smtplib.SMTP = smtplib.SMTP_SSL(self._host, self._port, timeout=TIMEOUT, context=context)
        else:
            server = smtplib.SMTP(self._host, self._port, timeout=TIMEOUT)
        try:
            if self._tls == "starttls":
                server.starttls(context=ssl.create_default_context())
            if self._user is not None:
                server.login(self._user, self._password or "")
            refused = server.send_message(message, self._sender, self._to)
            with suppress(OSError):  # the mail is on its way, a bad farewell must not send it again
                server.quit()
            return refused
        finally:
            server.close()


def _said(words: bytes | str) -> str:
    text = words.decode("utf-8", "replace") if isinstance(words, bytes) else words
    return cut(visible(text.strip().partition("\n")[0], newlines=False), 200)


def _each(refused: Mapping[str, tuple[int, bytes]]) -> str:
    return ", ".join(f"{address} ({code} {_said(words)})" for address, (code, words) in refused.items())


def _address(written: str, value: Any) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not _ADDRESS.fullmatch(text):
        raise wrong(written, value, "an address such as you@example.org")
    return text


def _addresses(value: Any) -> list[str]:
    items = value.split(",") if isinstance(value, str) else value
    if isinstance(items, (bytes, Mapping)) or not isinstance(items, Iterable):
        raise wrong("email.to", value, "a list of addresses")
    found = list(dict.fromkeys(_address("email.to", item) for item in items))
    if not found:
        raise wrong("email.to", value, "at least one address")
    return found


def _tls(value: Any, user: str | None, port: int | None) -> str:
    if value is None:
        return "off" if user is None and port != 465 else "ssl" if port == 465 else "starttls"
    if value is False:  # as YAML reads a bare off
        return "off"
    if not isinstance(value, str) or value not in _PORTS:
        raise wrong("email.tls", value, f"one of {', '.join(_PORTS)}")
    return value
