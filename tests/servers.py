"""Real servers that tests start, and end whole: MLflow's in its variants, PostgreSQL, a plain web server."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .programs import installed, wait_until

PASSWORD = "a p@ss:word/100% long"
"""Of MLflow's user ``admin``, where a server asks for one; in an address it has to be quoted."""


def free_port() -> int:
    """Give a port of the loopback interface that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class MlflowServer:
    """An MLflow tracking server with one worker.

    Args:
        folder: where it runs, and keeps its log and its artifacts.
        backend: database; by default an SQLite file in the folder.
        *arguments: more of ``mlflow server``, for instance ``--no-serve-artifacts``.
        password: of the user ``admin``; None serves everybody.

    Attributes:
        address: ``http://127.0.0.1:<port>``, the same after a new start.
        backend: the database.
    """

    def __init__(
        self, folder: Path, *arguments: str, backend: str | None = None, password: str | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.backend = backend or f"sqlite:///{folder}/server.db"
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.backend]
        self._command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1", *arguments]
        self._environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self._headers: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        if password is not None:
            self._ask_for(password)

    def _ask_for(self, password: str) -> None:
        settings = self._folder / "auth.ini"
        settings.write_text(
            "[mlflow]\ndefault_permission = READ\nadmin_username = admin\n"
            f"database_uri = sqlite:///{self._folder}/users.db\n"
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        )
        self._command += ["--app-name", "basic-auth"]
        self._environment |= {
            "MLFLOW_AUTH_CONFIG_PATH": str(settings),
            "MLFLOW_AUTH_ADMIN_PASSWORD": password,
            "MLFLOW_FLASK_SERVER_SECRET_KEY": "for tests",
        }
        token = base64.b64encode(f"admin:{password}".encode()).decode()
        self._headers = {"Authorization": f"Basic {token}"}

    @property
    def log(self) -> str:
        """What it has written."""
        return (self._folder / "server.log").read_text(errors="replace")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert self._process is None
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
                env={**os.environ, **self._environment},
            )
        try:
            wait_until(self._answers)
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        request = urllib.request.Request(f"{self.address}/version", headers=self._headers)
        try:
            urllib.request.urlopen(request, timeout=30).close()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"HTTP {error.code}: {self.log}") from error
        except OSError:
            return False
        return True

    def stop(self, by: int = signal.SIGTERM) -> None:
        """End it and every process that it has started."""
        process, self._process = self._process, None
        if process is not None:
            stop_group(process, by)


def stop_group(process: subprocess.Popen[bytes], by: int = signal.SIGTERM) -> None:
    """End a process that leads a session, and all of its group, at the latest by force."""
    for number in (by, signal.SIGKILL):
        for _ in range(200):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                process.wait()
                return
            process.poll()  # a dead leader would count as one of the group
            time.sleep(0.05)
    raise AssertionError(f"the process group {process.pid} cannot be ended")


@contextmanager
def mlflow_server(
    folder: Path, *arguments: str, backend: str | None = None, password: str | None = None
) -> Iterator[MlflowServer]:
    """Run an MLflow tracking server, see ``MlflowServer``."""
    server = MlflowServer(folder, *arguments, backend=backend, password=password)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class Postgres:
    """A PostgreSQL server of its own.

    Attributes:
        port: on the loopback interface.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._count = 0

    def database(self) -> str:
        """Make a new, empty database and give its address for SQLAlchemy."""
        self._count += 1
        name = f"mlflow{self._count}"
        self.sql(f"CREATE DATABASE {name}", "postgres")
        return f"postgresql+psycopg2://trackway@127.0.0.1:{self.port}/{name}"

    def sql(self, statement: str, database: str) -> None:
        """Do something in a database."""
        import psycopg2

        connection = psycopg2.connect(host="127.0.0.1", port=self.port, user="trackway", dbname=database)
        try:
            connection.autocommit = True
            connection.cursor().execute(statement)
        finally:
            connection.close()


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Run a PostgreSQL server; the test skips where there is none, and fails under CI."""
    initdb, server = installed("initdb"), installed("postgres")
    # It refuses to run as root, and its user may not enter the folders of pytest.
    folder = Path(tempfile.mkdtemp(prefix="trackway-postgres-"))
    user: dict[str, Any] = {"user": "nobody", "extra_groups": []} if os.geteuid() == 0 else {}
    if user:
        shutil.chown(folder, "nobody")
    data, port = folder / "data", free_port()
    process = None
    try:
        command = [initdb, "--pgdata", str(data), "--username=trackway", "--auth=trust", "--no-sync"]
        command += ["--encoding=UTF8", "--locale=C"]
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, **user)
        assert made.returncode == 0, made.stderr
        command = [server, "-D", str(data), "-p", str(port), "-k", str(folder), "-c", "fsync=off"]
        command += ["-c", "listen_addresses=127.0.0.1"]
        with (folder / "server.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=log, start_new_session=True, **user
            )
        running = Postgres(port)
        wait_until(lambda: _takes_statements(running, process, folder / "server.log"))
        yield running
    finally:
        if process is not None:
            # Its own processes lead groups of their own; told so, it ends them and then itself.
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
        shutil.rmtree(folder)


def _takes_statements(running: Postgres, process: subprocess.Popen[bytes], log: Path) -> bool:
    import psycopg2

    assert process.poll() is None, log.read_text()
    with suppress(psycopg2.OperationalError):
        running.sql("SELECT 1", "postgres")
        return True
    return False


Answer = Callable[[str], tuple[int, str, bytes]]
"""Gives status, content type and body for a path."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """Answer requests in this process, each on a thread of its own, and give the address."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def web_server(answer: Answer, port: int = 0) -> Iterator[str]:
    """Run a plain web server in this process, which answers every request alike, and give its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, kind, body = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = reply  # noqa: N815 - the names are http.server's

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with serving(Handler, port) as address:
        yield address
