"""Alerts by webhook and e-mail: to real servers on this machine, read back as these got them."""

from __future__ import annotations

import email
import email.policy
import json
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trackway import Tracker
from trackway.trace.config import load_config
from trackway.trace.config_values import ConfigError
from trackway.trace.loggers import Run, Unavailable, webhook
from trackway.trace.loggers import email as email_logger
from trackway.trace.loggers.email import EmailLogger
from trackway.trace.loggers.webhook import WebhookLogger
from trackway.trace.printable import visible

from .loggers_for_tests import records
from .programs import wait_until
from .servers import free_port
from .test_otlp import certificate

SECRET = "7Zx9-" + "wQ3kT0"
"""Part of every secret. It stands nowhere as it is, since a run keeps what has changed in its repository."""
HOSTILE = (
    "a\r\nBcc: spy@example.org\n\n<script>alert(1)</script>\x1b[2J\u202e <!channel> @all `x` 奖励 🙂\ud83e"
)


FOLDED = '=):.-"¡¡a"a_:\\)@¡<=🙂 "<奖@ ¡:\\x91奖ࠀ¡a.a:b ";@¡;_ࠀࠀ(\\¡'
"""The standard library's own way to write it into a header loses a space."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("20300101-000000-abcdef", "math/1", "grpo\n7b", tmp_path / "run", started=time.time())


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "file:///etc/passwd"}, "webhook.url begins with 'file'; only http and https are allowed"),
        ({"url": "hooks.example.org/" + SECRET}, "webhook.url begins with ''"),
        ({"url": "https:///" + SECRET}, "webhook.url has no host"),
        ({"url": f"https://me:{SECRET}@hooks.example.org/"}, "webhook.url has a user in it"),
        ({"url": "https://me@hooks.example.org/"}, "webhook.url has a user in it"),
        ({"url": "https://hooks..example.org/" + SECRET}, "webhook.url has a host or port that is none"),
        ({"url": "https://a:b/" + SECRET}, "webhook.url has a host or port that is none"),
        ({"url": "https://a/ b" + SECRET}, "webhook.url is no text of ASCII characters"),
        ({"url": "https://a/b\r\nX: y" + SECRET}, "webhook.url is no text of ASCII characters"),
        ({"url": "https://a/ä" + SECRET}, "webhook.url is no text of ASCII characters"),
        ({"url": 5}, "webhook.url is no text"),
        ({"url": "https://a/", "headers": "X: " + SECRET}, "webhook.headers is no mapping"),
        ({"url": "https://a/", "headers": {"X Y": SECRET}}, "'X Y' cannot be the name of a header"),
        ({"url": "https://a/", "headers": {"X": SECRET + "\r\nY: z"}}, "the value of X is no text"),
        ({"url": "https://a/", "headers": {"X": 5}}, "the value of X is no text"),
    ],
)
def test_a_wrong_setting_of_a_webhook_is_an_error_that_does_not_show_the_secret(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        WebhookLogger.check(settings, offline=False)
    assert SECRET not in str(raised.value)


def test_what_a_webhook_is_not_given_comes_from_the_environment(monkeypatch):
    with pytest.raises(Unavailable, match="TRACKWAY_WEBHOOK_URL"):
        WebhookLogger.check({}, offline=False)
    monkeypatch.setenv("TRACKWAY_WEBHOOK_URL", "https://hooks.example.org/" + SECRET)
    monkeypatch.setenv("TRACKWAY_WEBHOOK_HEADERS", '{"X-Token": "a"}')
    assert WebhookLogger.check({}, offline=False) == {
        "url": "https://hooks.example.org/" + SECRET,
        "headers": {"X-Token": "a"},
    }
    assert WebhookLogger.check({"url": "http://a/", "headers": {}}, offline=False) == {
        "url": "http://a/",
        "headers": {},
    }
    monkeypatch.setenv("TRACKWAY_WEBHOOK_HEADERS", "X-Token: " + SECRET)
    with pytest.raises(ConfigError, match="TRACKWAY_WEBHOOK_HEADERS is no JSON") as raised:
        WebhookLogger.check({}, offline=False)
    assert SECRET not in str(raised.value)


def test_the_variables_of_these_loggers_are_no_settings_of_the_recorder(monkeypatch):
    for name in ("TRACKWAY_WEBHOOK_URL", "TRACKWAY_WEBHOOK_HEADERS", "TRACKWAY_EMAIL_PASSWORD"):
        monkeypatch.setenv(name, "x")
    assert load_config().experiment == load_config(environ={}).experiment


MAIL: dict[str, Any] = {"host": "mail.example.org", "sender": "t@example.org", "to": ["me@example.org"]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": None}, "email.host=None is not allowed"),
        ({"host": "mail.example.org:25"}, "without its port"),
        ({"host": "mail\r\nx"}, "email.host="),
        ({"port": 0}, "email.port=0 is not allowed; expected a port from 1 to 65535"),
        ({"port": True}, "email.port=True"),
        ({"sender": None}, "email.sender=None is not allowed; expected an address"),
        ({"sender": "t@example.org\r\nBcc: spy@example.org"}, "email.sender="),
        ({"sender": "Trackway <t@example.org>"}, "email.sender="),
        ({"to": []}, "expected at least one address"),
        ({"to": None}, "expected a list of addresses"),
        ({"to": ["me@example.org", "you"]}, "email.to='you' is not allowed"),
        ({"to": "me@example.org, , you@example.org"}, "email.to=' ' is not allowed"),
        ({"to": ["me@example.org\nBcc: spy@example.org"]}, "email.to="),
        ({"user": " "}, "email.user=' ' is not allowed"),
        ({"password": f"p0{SECRET}"}, "there is no email.user"),
        ({"user": "me", "password": 5}, "email.password is no text"),
        ({"user": "me", "password": f"p0{SECRET}ä"}, "must be ASCII"),
        ({"tls": "yes"}, "email.tls='yes' is not allowed; expected one of off, starttls, ssl"),
        ({"tls": ["ssl"]}, "email.tls=['ssl'] is not allowed"),
    ],
)
def test_a_wrong_setting_of_email_is_an_error_that_does_not_show_the_password(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        EmailLogger.check({**MAIL, **settings}, offline=False)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "tls"),
    [
        ({}, "off"),
        ({"user": "me", "password": "p"}, "starttls"),
        ({"user": "me", "password": "p", "port": 465}, "ssl"),
        ({"user": "me", "password": "p", "tls": False}, "off"),
        ({"user": "me", "password": "p", "tls": "ssl"}, "ssl"),
        ({"tls": "starttls"}, "starttls"),
    ],
)
def test_a_password_is_not_sent_in_the_clear_unless_that_is_wanted(settings, tls):
    assert EmailLogger.check({**MAIL, **settings}, offline=False)["tls"] == tls


def test_the_password_may_come_from_the_environment_and_addresses_as_one_text(monkeypatch):
    with pytest.raises(Unavailable, match="the password of me is missing: set TRACKWAY_EMAIL_PASSWORD"):
        EmailLogger.check({**MAIL, "user": "me"}, offline=False)
    monkeypatch.setenv("TRACKWAY_EMAIL_PASSWORD", "secret")
    checked = EmailLogger.check(
        {**MAIL, "user": "me", "to": "a@example.org, b@example.org,a@example.org"}, offline=False
    )
    assert (checked["password"], checked["to"]) == ("secret", ["a@example.org", "b@example.org"])


# Webhooks


class Hook:
    """A web server that keeps what it is sent and answers as it is told.

    Attributes:
        address: where it is; what follows on the host is a secret.
        requests: method, path, headers and body of each.
        answer: gives status, headers and body, from the number of requests before this one.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answer: Callable[[int], tuple[int, dict[str, str], bytes]] = lambda before: (200, {}, b"ok")
        self.port = free_port()
        self._server: ThreadingHTTPServer | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/services/{SECRET}?key=q0{SECRET}"

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, _, body in self.requests]

    @property
    def titles(self) -> list[str]:
        return [message["title"] for message in self.messages]

    def says(self, *statuses: int) -> None:
        """Answer with these, then with 200; each quotes the address."""
        self.answer = lambda before: (
            statuses[before] if before < len(statuses) else 200,
            {},
            f"cannot POST {self.address}".encode(),
        )

    def start(self) -> None:
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                hook.requests.append((self.command, self.path, headers, body))
                status, more, answer = hook.answer(len(hook.requests) - 1)
                self.send_response(status, f"for {SECRET}")
                for name, value in more.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = handle_any  # noqa: N815 - as http.server names them

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    hook.start()
    yield hook
    hook.stop()


@pytest.fixture
def sent(run: Run, hook: Hook) -> Callable[..., None]:
    """Send one alert to the hook, or another address."""

    def send(*alert: Any, url: str | None = None, **headers: str) -> None:
        checked = WebhookLogger.check({"url": url or hook.address, "headers": headers}, offline=False)
        WebhookLogger(run, **checked).alert(*alert)

    return send


@pytest.mark.slow
def test_a_webhook_gets_all_that_is_known_of_an_alert(run, sent, hook):
    sent("kl > 0.5", "kl is 0.7 at step 12", "error", 12, Authorization="Bearer abc")
    sent("halfway", "", "info", None)
    (method, path, headers, _), _ = hook.requests
    assert (method, path) == ("POST", f"/services/{SECRET}?key=q0{SECRET}")
    assert headers["content-type"] == "application/json"
    assert headers["authorization"] == "Bearer abc"
    assert hook.messages[0] == {
        "text": "[error] kl > 0.5 (grpo\\n7b, step 12)\nkl is 0.7 at step 12",
        "title": "kl > 0.5",
        "level": "error",
        "run": "20300101-000000-abcdef",
        "experiment": "grpo\\n7b",
        "project": "math/1",
        "step": 12,
        "time": run.started,
    }
    assert hook.messages[1]["text"] == "[info] halfway (grpo\\n7b)"
    assert hook.messages[1]["step"] is None


@pytest.mark.slow
def test_an_alert_that_comes_late_says_so(run, hook, mailbox, port):
    old = replace(run, started=1893456000.0)
    for logger in (WebhookLogger(old, url=hook.address), mailer(old, port)):
        logger.time = 1.0
        logger.alert("a", "b")
    late = "This is of 1970-01-01 00:00 UTC and could not be sent before."
    assert hook.messages[0]["text"].splitlines()[1:] == [late, "b"]
    (mail,) = mailbox.read
    assert mail.get_content().splitlines()[1:3] == [late, "b"]
    assert mail["Date"].datetime.timestamp() == 1


@pytest.mark.slow
def test_hostile_and_endless_texts_arrive_harmless_and_cut(sent, hook):
    sent(HOSTILE, HOSTILE + "x" * 100_000, "warning", 1)
    (message,) = hook.messages
    assert message["title"] == visible(HOSTILE, newlines=False)
    assert "\\x1b[2J\\u202e" in message["text"]
    assert "\x1b" not in message["text"]
    assert "\\ud83e" in message["text"]
    assert message["text"].endswith("xx…")
    assert 1500 < len(message["text"]) < 1950


@pytest.mark.slow
@pytest.mark.parametrize("host", ["hooks.slack.com", "discord.com", "open.feishu.cn", "elsewhere.org"])
def test_each_receiver_is_told_in_the_way_that_it_shows_as_it_is(host, sent, hook, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{hook.port}")
    monkeypatch.delenv("no_proxy", raising=False)
    sent("a < b", '<!channel> & `*x*` <at user_id="all">', "warning", 1, url=f"http://{host}/{SECRET}")
    (message,) = hook.messages
    plain = '[warning] a < b (grpo\\n7b, step 1)\n<!channel> & `*x*` <at user_id="all">'
    escaped = '[warning] a &lt; b (grpo\\n7b, step 1)\n&lt;!channel&gt; &amp; `*x*` &lt;at user_id="all"&gt;'
    assert message["text"] == (escaped if host == "hooks.slack.com" else plain)
    assert message.get("mrkdwn") is (False if host == "hooks.slack.com" else None)
    assert message["title"] == "a < b"
    if host == "discord.com":
        assert message["content"] == "```\n" + plain.replace("`", "'") + "\n```"
        assert message["allowed_mentions"] == {"parse": []}
    elif host == "open.feishu.cn":
        assert message["msg_type"] == "text"
        assert message["content"] == {"text": plain.replace("<at", "< at")}
    else:
        assert "content" not in message


@pytest.mark.slow
def test_feishu_says_in_its_answer_that_it_does_not_take_a_message(sent, hook, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{hook.port}")
    monkeypatch.delenv("no_proxy", raising=False)
    url = f"http://open.feishu.cn/{SECRET}"
    hook.answer = lambda before: (200, {}, b'{"code": 19024, "msg": "Key Words Not Found"}')
    with pytest.raises(ConnectionError, match="answered code 19024"):
        sent("a", "b", url=url)
    for body in (b'{"code": 0}', b"{}", b"[]", b"ok", b"\xff"):
        hook.answer = lambda before, body=body: (200, {}, body)
        sent("a", "b", url=url)


@pytest.mark.slow
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("place", ["/elsewhere", "file:///etc/passwd"])
def test_a_redirection_is_not_followed(status, place, sent, hook):
    hook.answer = lambda before: (status, {"Location": place}, b"")
    with pytest.raises(ConnectionError, match=f"answered {status} .*it has moved; give the new address"):
        sent("a", "b")
    assert len(hook.requests) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (400, ValueError, "400 Bad Request: it does not take this alert"),
        (413, ValueError, "413 "),
        (401, ConnectionError, "401 Unauthorized: check the address and the headers"),
        (404, ConnectionError, "404 Not Found: check the address and the headers"),
        (429, ConnectionError, "429 Too Many Requests"),
        (500, ConnectionError, "500 Internal Server Error"),
        (503, ConnectionError, "503 Service Unavailable"),
        (599, ConnectionError, "answered 599"),
    ],
)
def test_an_answer_that_is_none_of_success_is_an_error_without_the_secret(status, kind, message, sent, hook):
    hook.says(status)
    with pytest.raises(kind, match=message) as raised:
        sent("a", "b", **{"X-Key": f"h0{SECRET}"})
    told: BaseException | None = raised.value
    assert f"the webhook at http://127.0.0.1:{hook.port} answered" in str(told)
    while told is not None:
        assert SECRET not in f"{told} {told!r}"
        told = told.__cause__ or (None if told.__suppress_context__ else told.__context__)


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["nobody", "silent", "rude", "slow"])
def test_a_server_that_does_not_answer_is_an_error_without_the_secret(behaviour, sent, hook, monkeypatch):
    monkeypatch.setattr(webhook, "TIMEOUT", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}/{SECRET}"
        if behaviour != "nobody":
            server.listen()
        if behaviour in ("rude", "silent"):
            answer = f"what is {SECRET}\r\n\r\n".encode() if behaviour == "rude" else b""

            def serve() -> None:
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

            threading.Thread(target=serve).start()
        with pytest.raises(ConnectionError, match=r"does not answer: \S") as raised:
            sent("a", "b", url=url)
    assert SECRET not in str(raised.value)
    assert raised.value.__suppress_context__


def tracker(store: Path, hook: Hook, **more: Any) -> Tracker:
    return Tracker("webhook", store=store, webhook={"url": hook.address}, **more)


def leave(tracked: Tracker, alerts: int) -> None:
    """End a run whose destination is away, once so many alerts are in its log."""
    wait_until(lambda: len(records(tracked.run.directory, "alert")) == alerts)
    tracked.finish(timeout=1)
    threads = {"trackway-webhook", "trackway-email"}
    wait_until(lambda: not threads & {thread.name for thread in threading.enumerate()})


@pytest.mark.slow
def test_alerts_wait_while_the_webhook_is_away_and_come_all_once_in_order(hook, tmp_path):
    hook.says(*[503] * 7)
    with tracker(tmp_path, hook, alerts=["kl > 1"]) as tracked:
        for step in range(6):
            tracked.log_metrics({"kl": 2.0, "loss": 1.0}, step=step)
            tracked.alert(f"alert {step}", "text", step=step)
    taken = hook.titles[7:]
    assert hook.titles[:7] == ["kl > 1"] * 7
    assert taken == ["kl > 1", *(f"alert {step}" for step in range(6))]


@pytest.mark.slow
def test_nothing_else_is_sent(hook, tmp_path):
    with tracker(tmp_path, hook, config={"lr": 1}) as tracked:
        tracked.log_metrics({"a": 1}, step=1)
        tracked.log_artifact(b"x", "x")
        tracked.log_generations([{"prompt": "p", "completion": "c", "sample_index": 1}], step=1)
    assert hook.requests == []


@pytest.mark.slow
def test_equal_alerts_arrive_both_and_none_again_when_the_run_is_resumed(hook, tmp_path):
    with tracker(tmp_path, hook) as tracked:
        tracked.alert("same", "text", step=1)
        tracked.alert("same", "text", step=1)
    assert hook.titles == ["same", "same"]
    with tracker(tmp_path, hook, resume=tracked.run.id) as resumed:
        resumed.log_metrics({"a": 1}, step=1)
        resumed.alert("later", "text", step=2)
    assert hook.titles == ["same", "same", "later"]


@pytest.mark.slow
def test_a_refused_alert_costs_only_itself(hook, tmp_path, caplog):
    hook.answer = lambda before: (400 if hook.titles[before] == "bad" else 200, {}, b"")
    with tracker(tmp_path, hook) as tracked:
        for title in ("first", "bad", "last", "bad"):
            tracked.alert(title, "text")
            tracked.log_metrics({"a": 1}, step=1)
    assert [title for title in hook.titles if title != "bad"] == ["first", "last"]
    assert caplog.text.count("webhook does not take one alert: ValueError: the webhook at http") == 1
    assert "lacks" not in caplog.text


@pytest.mark.slow
def test_an_alert_that_is_the_last_thing_logged_is_not_given_up(hook, tmp_path, cli, caplog, monkeypatch):
    hook.stop()
    with tracker(tmp_path, hook) as tracked:
        tracked.alert("only", "text")
        leave(tracked, 1)
    assert "webhook lacks 1 of 1 records" in caplog.text
    hook.start()
    monkeypatch.setenv("TRACKWAY_WEBHOOK_URL", hook.address)
    cli("sync", "--store", str(tmp_path))
    assert hook.titles == ["only"]


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_what_a_webhook_missed_sync_brings_with_the_address_of_the_environment(
    hook, tmp_path, cli, caplog, monkeypatch
):
    hook.stop()
    with tracker(tmp_path, hook) as tracked:
        tracked.alert("first", "text", step=1)
        tracked.log_metrics({"a": 1}, step=1)
        tracked.alert("last", "text", step=2)
        leave(tracked, 2)
    assert "webhook lacks" in caplog.text
    hook.start()
    told = cli("sync", "--store", str(tmp_path))
    assert "webhook is left as it is: webhook: it has no address" in told.out + told.err
    assert hook.requests == []
    monkeypatch.setenv("TRACKWAY_WEBHOOK_URL", hook.address)
    told = cli("sync", "--store", str(tmp_path))
    assert hook.titles == ["first", "last"]
    cli("sync", "--store", str(tmp_path))
    assert hook.titles == ["first", "last"]
    with Tracker("webhook", store=tmp_path) as other:  # its environment is recorded
        other.alert("other", "text")
    assert b"other" in everything_in(tmp_path)
    assert SECRET.encode() not in everything_in(tmp_path)
    assert SECRET not in caplog.text + told.out + told.err


# E-mail


class Mailbox:
    """What a real mail server takes.

    Attributes:
        mails: sender, recipients and content of each.
        answers: to the end of data, one for each mail; then 250.
        refused: recipients that there are none of.
        logins: users and passwords that were tried.
    """

    def __init__(self) -> None:
        self.mails: list[tuple[str, list[str], bytes]] = []
        self.answers: list[str] = []
        self.refused: set[str] = set()
        self.logins: list[tuple[bytes, bytes]] = []
        self.farewell = "221 Bye"

    # The names are those that the server calls.

    async def handle_RCPT(  # noqa: N802
        self, server: Any, session: Any, envelope: Any, address: str, options: Any
    ) -> str:
        if address in self.refused:
            return "550 no such \x1b[31muser"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        answer = self.answers.pop(0) if self.answers else "250 OK"
        if answer.startswith("250"):
            self.mails.append((envelope.mail_from, envelope.rcpt_tos, envelope.content))
        return answer

    async def handle_QUIT(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        return self.farewell

    def login(self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> Any:
        from aiosmtpd.smtp import AuthResult

        self.logins.append((data.login, data.password))
        return AuthResult(
            success=(data.login, data.password) == (b"me", f"p0{SECRET}".encode()), handled=False
        )

    @property
    def read(self) -> list[Any]:
        return [email.message_from_bytes(content, policy=email.policy.default) for *_, content in self.mails]


@contextmanager
def mail_server(mailbox: Mailbox, **more: Any) -> Iterator[int]:
    """Run a mail server; gives its port."""
    from aiosmtpd.controller import Controller

    controller = Controller(mailbox, hostname="127.0.0.1", port=free_port(), **more)
    controller.start()
    try:
        yield controller.port
    finally:
        controller.stop()


def mailer(run: Run, port: int, **more: Any) -> EmailLogger:
    given_ = {"host": "127.0.0.1", "port": port, "sender": "t@example.org", "to": "me@example.org", **more}
    return EmailLogger(run, **EmailLogger.check(given_, offline=False))


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox()


@pytest.fixture
def port(mailbox: Mailbox) -> Iterator[int]:
    with mail_server(mailbox) as port:
        yield port


@pytest.mark.slow
def test_a_mail_says_all_that_is_known_of_an_alert(run, mailbox, port):
    mailer(run, port, to=["me@example.org", "you@example.org"]).alert(
        "奖励 < 0.5", "it is 0.1 🙂\n.\n..x", "error", 12
    )
    ((sender, recipients, _),) = mailbox.mails
    assert (sender, recipients) == ("t@example.org", ["me@example.org", "you@example.org"])
    (mail,) = mailbox.read
    assert mail["Subject"] == "[error] 奖励 < 0.5 (grpo\\n7b, step 12)"
    assert (mail["From"], mail["To"]) == ("t@example.org", "me@example.org, you@example.org")
    assert mail["Auto-Submitted"] == "auto-generated"
    assert mail["Date"].datetime.timestamp() == int(run.started)
    assert mail.get_content_type() == "text/plain"
    assert mail.get_content().splitlines() == [
        *("奖励 < 0.5", "it is 0.1 🙂", ".", "..x", ""),
        *(
            "level: error",
            "step: 12",
            "run: 20300101-000000-abcdef",
            "experiment: grpo\\n7b",
            "project: math/1",
        ),
    ]


@pytest.mark.slow
def test_equal_alerts_are_two_mails(run, mailbox, port):
    logger = mailer(run, port)
    logger.alert("same", "text")
    logger.alert("same", "text")
    assert len({mail["Message-ID"] for mail in mailbox.read}) == 2


@pytest.mark.slow
def test_no_alert_can_add_a_header_or_a_recipient(run):
    mailbox = Mailbox()
    with mail_server(mailbox) as port:
        logger = mailer(run, port)

        @given(
            st.one_of(st.sampled_from([HOSTILE, FOLDED, "=?utf-8?q?=0ABcc=3A_a?="]), st.text(max_size=80)),
            st.one_of(st.just(HOSTILE), st.text(max_size=300)),
        )
        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        def send(title: str, text: str) -> None:
            mailbox.mails.clear()
            logger.alert(title, text, "warning", 1)
            ((_, recipients, _),) = mailbox.mails
            (mail,) = mailbox.read
            assert recipients == ["me@example.org"]
            assert {name.lower() for name in mail} == {
                *("subject", "from", "to", "date", "message-id", "auto-submitted"),
                *("content-type", "content-transfer-encoding", "mime-version"),
            }
            shown = visible(title, newlines=False)
            subject = f"[warning] {shown} (grpo\\n7b, step 1)"
            assert mail["Subject"] == subject
            body = mail.get_content().replace("\r\n", "\n")
            assert body.startswith(f"{shown}\n{visible(text)}" if text else shown)

        send()


@pytest.mark.slow
def test_endless_texts_are_cut(run, mailbox, port):
    mailer(run, port).alert("t" * 5000, "x" * 10**6)
    (mail,) = mailbox.read
    assert len(mail["Subject"]) < 300
    assert 20_000 < len(mail.get_content()) < 21_000


def tls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Make a server's certificate, which this machine trusts from now on."""
    files = certificate(folder)
    monkeypatch.setenv("SSL_CERT_FILE", files[0])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*files)
    return context


@pytest.mark.slow
@pytest.mark.parametrize("way", ["starttls", "ssl"])
def test_a_password_goes_through_tls_with_a_certificate_that_is_checked(
    way, run, mailbox, tmp_path, monkeypatch
):
    context = tls(tmp_path, monkeypatch)
    options = {"ssl_context": context} if way == "ssl" else {"tls_context": context, "auth_required": True}
    options |= {"authenticator": mailbox.login, "auth_require_tls": way == "starttls"}
    with mail_server(mailbox, **options) as port:
        mailer(run, port, tls=way, user="me", password=f"p0{SECRET}").alert("a", "b")
        assert len(mailbox.mails) == 1
        with pytest.raises(ConnectionError, match=f"the mail server 127.0.0.1:{port} answered 535") as raised:
            mailer(run, port, tls=way, user="me", password=f"w0{SECRET}").alert("a", "b")
        assert SECRET not in f"{raised.value}"
        tried = len(mailbox.logins)
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(ConnectionError, match="certificate"):
            mailer(run, port, tls=way, user="me", password=f"p0{SECRET}").alert("a", "b")
    assert len(mailbox.logins) == tried
    assert len(mailbox.mails) == 1


@pytest.mark.slow
def test_a_server_without_encryption_is_not_told_the_password(run, mailbox):
    options = {"authenticator": mailbox.login, "auth_require_tls": False}
    with mail_server(mailbox, **options) as port:
        with pytest.raises(ConnectionError, match=r"STARTTLS.*set email\.tls to 'off'"):
            mailer(run, port, user="me", password=f"p0{SECRET}").alert("a", "b")
        assert mailbox.logins == []
        mailer(run, port, user="me", password=f"p0{SECRET}", tls="off").alert("a", "b")
    assert (len(mailbox.logins), len(mailbox.mails)) == (1, 1)


@pytest.mark.slow
def test_what_a_mail_server_refuses_is_said_in_its_words(run, mailbox, port, caplog):
    where = f"the mail server 127.0.0.1:{port}"
    mailbox.answers = ["554 too \x1b[31mrude", "451 later"]
    logger = mailer(run, port, to=["me@example.org", "gone@example.org"])
    with pytest.raises(ValueError, match=re.escape(rf"{where} answered 554 too \x1b[31mrude")):
        logger.alert("a", "b")
    with pytest.raises(ConnectionError, match=f"{where} answered 451 later"):
        logger.alert("a", "b")
    mailbox.refused = {"gone@example.org"}
    for _ in range(2):
        logger.alert("a", "b")
    assert [recipients for _, recipients, _ in mailbox.mails] == [["me@example.org"]] * 2
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert (
        said == rf"{where} takes no mail for gone@example.org (550 no such \x1b[31muser); the others get it"
    )
    mailbox.refused = {"me@example.org", "gone@example.org"}
    with pytest.raises(ConnectionError, match=rf"{where} takes no mail for me@example.org \(550 no such"):
        logger.alert("a", "b")


@pytest.mark.slow
def test_a_mail_that_was_taken_is_not_sent_again_for_a_bad_farewell(run, mailbox, port):
    mailbox.farewell = "500 what?"
    mailer(run, port).alert("a", "b")
    assert len(mailbox.mails) == 1


@pytest.mark.slow
def test_a_mail_server_that_is_not_there_or_says_nothing_is_an_error(run, monkeypatch):
    monkeypatch.setattr(email_logger, "TIMEOUT", 0.2)
    with pytest.raises(ConnectionError, match="Connection refused"):
        mailer(run, free_port()).alert("a", "b")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with pytest.raises(ConnectionError, match="timed out"):
            mailer(run, server.getsockname()[1]).alert("a", "b")


@pytest.mark.slow
def test_a_run_sends_mails_and_sync_those_it_missed(mailbox, tmp_path, cli, caplog, monkeypatch):
    context = tls(tmp_path, monkeypatch)
    options = {"tls_context": context, "authenticator": mailbox.login, "auth_required": True}
    port = free_port()
    settings_ = {"host": "127.0.0.1", "port": port, "sender": "t@example.org", "to": ["me@example.org"]}
    secret = {"user": "me", "password": f"p0{SECRET}"}
    store = tmp_path / "store"
    with Tracker("email", store=store, alerts=["kl > 1"], email={**settings_, **secret}) as tracked:
        tracked.log_metrics({"kl": 2.0}, step=1)
        tracked.log_metrics({"kl": 2.0}, step=2)
        leave(tracked, 1)
    assert "email lacks" in caplog.text
    monkeypatch.setenv("TRACKWAY_EMAIL_PASSWORD", f"p0{SECRET}")
    from aiosmtpd.controller import Controller

    controller = Controller(mailbox, hostname="127.0.0.1", port=port, **options)
    controller.start()
    try:
        cli("sync", "--store", str(store))
        cli("sync", "--store", str(store))
    finally:
        controller.stop()
    (mail,) = mailbox.read
    assert mail["Subject"] == "[warning] kl > 1 (default, step 1)"
    assert SECRET.encode() not in everything_in(store)
    assert SECRET not in caplog.text
