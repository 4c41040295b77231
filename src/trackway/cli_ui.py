"""``trackway ui``: the page of a store in MLflow, on a server of its own or on the one it is sent to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import webbrowser
from collections.abc import Container
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from .cli_output import fail, say, tell

HOW_TO_FILTER = """\
in the page:     the views Rollouts and Failures; or the funnel with Field = Tag, for instance step = 1
in the address:  add &tag=step%3D1 at its end (then &tag=sample_index%3D17)
in Python:       mlflow.search_traces(filter_string="tags.step = '1'")"""

_NOT_THERE = "there is no experiment {!r} yet: nothing of this project was sent; `trackway sync` sends it"


def visit(uri: str, project: str, *, browser: bool) -> None:
    """Say where the page of a project is on a tracking server, and open it.

    Args:
        uri: address of the server; a password in it is shown to nobody.
        project: name of the experiment.
        browser: open the page.
    """
    scheme, _, place = uri.partition("://")
    address = f"{scheme}://{place.rpartition('@')[2].rstrip('/')}"
    page = address
    try:
        from trackway.trace.exporters.mlflow_store import check_server, open_store

        check_server(uri)
        experiment = open_store(uri).get_experiment_by_name(project)
        if experiment is None:
            say(_NOT_THERE.format(project))
        else:
            page = _page(address, str(experiment.experiment_id), experiment.tags)
    except Exception as error:  # MLflow's own, of the network, of the login
        say(f"the server does not say which experiment is {project!r}: {error}")
    _show(page, browser)


def serve(path: Path, uri: str, project: str, host: str, port: int, *, browser: bool) -> None:
    """Run MLflow's server until Ctrl-C, SIGTERM or its own end.

    Args:
        path: folder of the store.
        uri: the database, as MLflow names it.
        project: name of the experiment whose page is opened.
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
    command += ["--uvicorn-opts", "--log-level warning"]  # a line for each request would bury the address
    before = signal.signal(signal.SIGTERM, stop)
    # MLflow starts processes of its own. They get a process group, so that all of them end with this one;
    # and what MLflow leaves in its working directory stays inside the store.
    server = subprocess.Popen(command, cwd=path, start_new_session=True)
    try:
        host = "127.0.0.1" if host in ("0.0.0.0", "localhost") else host
        _welcome(server, host, port, project, browser)
        code = server.wait()
    except KeyboardInterrupt:
        code = 0
    finally:
        _end_group(server)
        signal.signal(signal.SIGTERM, before)
    if code:
        fail(f"the MLflow UI ended with exit code {code}")


def _welcome(server: subprocess.Popen[bytes], host: str, port: int, project: str, browser: bool) -> None:
    """Wait until the server answers, then say where the page is."""
    experiment = None
    while experiment is None:
        if server.poll() is not None:
            return
        time.sleep(0.2)
        experiment = _experiment(host, port, project)
    page = f"http://{host}:{port}"
    if experiment:
        tags = {tag.get("key") for tag in experiment.get("tags", ())}
        page = _page(page, experiment["experiment_id"], tags)
    else:
        say(_NOT_THERE.format(project))
    _show(page, browser)


def _show(page: str, browser: bool) -> None:
    tell(f"MLflow UI:       {page}")
    tell(HOW_TO_FILTER)
    if browser:
        webbrowser.open(page)


def _page(address: str, experiment: str, tags: Container[str]) -> str:
    """Give the address of an experiment's traces, in our view where it still is there."""
    from trackway.trace.exporters.mlflow_views import ROLLOUTS, VIEW_TAG

    view = f"&traceViewShareKey={ROLLOUTS}" if VIEW_TAG + ROLLOUTS in tags else ""
    return f"{address}/#/experiments/{quote(experiment)}/traces?startTimeLabel=ALL{view}"


def _experiment(host: str, port: int, project: str) -> dict[str, Any] | None:
    """Give the experiment of a project, empty where there is none; None before the server answers."""
    connection = HTTPConnection(host, port, timeout=10)
    try:
        name = quote(project, safe="")
        connection.request("GET", f"/api/2.0/mlflow/experiments/get-by-name?experiment_name={name}")
        return dict(json.loads(connection.getresponse().read()).get("experiment", {}))
    except (OSError, HTTPException):
        return None
    except (ValueError, TypeError, AttributeError):
        return {}
    finally:
        connection.close()


def _end_group(server: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=5)
        os.killpg(server.pid, signal.SIGKILL)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
