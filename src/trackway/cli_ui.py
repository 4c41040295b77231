"""``trackway ui``: the MLflow UI on the database of a store, until Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import webbrowser
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NoReturn

from .cli_output import fail, tell

HOW_TO_FILTER = """\
in the page:     open the experiment, Traces, then the funnel with Field = Tag, for instance step = 1
in the address:  end it with /traces?tag=step%3D1 (then &tag=sample_index%3D17, &startTimeLabel=ALL)
in Python:       mlflow.search_traces(filter_string="tags.step = '1'")"""


def serve(path: Path, uri: str, host: str, port: int, *, browser: bool) -> None:
    """Run MLflow's server until Ctrl-C, SIGTERM or its own end.

    Args:
        path: folder of the store.
        uri: the database, as MLflow names it.
        host, port: where to listen.
        browser: open the page when the server answers.
    """
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        other = port + 1 if port < 65535 else 5000
        fail(f"cannot listen on {host}:{port} ({reason}); try --port {other}")
    tell("starting the MLflow UI; Ctrl-C ends it")

    def stop(_number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt

    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri]
    command += ["--host", host, "--port", str(port), "--workers", "1"]
    before = signal.signal(signal.SIGTERM, stop)
    # MLflow starts processes of its own. They get a process group, so that all of them end with this one;
    # and what MLflow leaves in its working directory stays inside the store.
    server = subprocess.Popen(command, cwd=path, start_new_session=True)
    try:
        _welcome(server, "127.0.0.1" if host in ("0.0.0.0", "localhost") else host, port, browser)
        code = server.wait()
    except KeyboardInterrupt:
        code = 0
    finally:
        _end_group(server)
        signal.signal(signal.SIGTERM, before)
    if code:
        fail(f"the MLflow UI ended with exit code {code}")


def _welcome(server: subprocess.Popen[bytes], host: str, port: int, browser: bool) -> None:
    """Wait until the server answers, then say where the traces of each experiment are."""
    experiments = None
    while experiments is None:
        if server.poll() is not None:
            return
        time.sleep(0.2)
        experiments = _experiments(host, port)
    address = f"http://{host}:{port}"
    pages = [f"{address}/#/experiments/{number}/traces" for number in experiments] or [address]
    tell("\n".join(f"MLflow UI:       {page}" for page in pages))
    tell(HOW_TO_FILTER)
    if browser:
        webbrowser.open(pages[0])


def _experiments(host: str, port: int) -> list[str] | None:
    """Ids of the latest experiments, without MLflow's own empty one; None before the server answers."""
    connection = HTTPConnection(host, port, timeout=10)
    body = json.dumps({"max_results": 5, "order_by": ["last_update_time DESC"]})
    try:
        connection.request(
            "POST", "/api/2.0/mlflow/experiments/search", body, {"Content-Type": "application/json"}
        )
        answer = json.loads(connection.getresponse().read())
        ids = [each["experiment_id"] for each in answer.get("experiments", ())]
        return [number for number in ids if number != "0"]
    except (OSError, HTTPException):
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    finally:
        connection.close()


def _end_group(server: subprocess.Popen[bytes]) -> None:
    import signal
    import subprocess

    try:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=5)
        os.killpg(server.pid, signal.SIGKILL)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
