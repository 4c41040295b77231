"""The ``trackway`` command.

Exit codes: 0, 1 when something is not there or did not work, 2 for wrong use. What a command needs is
imported inside it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from rich.console import RenderableType

    from trackway.trace.model import Status, Summary, Trajectory
    from trackway.trace.store import Store

app = typer.Typer(
    name="trackway",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ROWS = 1000
"""How many rows ``ls`` prints as a table unless told otherwise."""

StorePath = Annotated[
    Path | None,
    typer.Option("--store", metavar="PATH", help="The store; else $TRACKWAY_STORE or ./trackway-store."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command line; a user's mistake ends in one sentence on stderr, not in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="trackway")
    except Exception as error:
        import sqlite3

        from trackway.trace.config import ConfigError
        from trackway.trace.store import StoreError

        if isinstance(error, ConfigError):
            _fail(str(error), 2)
        if isinstance(error, StoreError):
            _fail(str(error.args[0]) if error.args else str(error))
        if isinstance(error, sqlite3.Error):
            _fail(f"the store's index cannot be used: {error}. It may be deleted; it is made again")
        if isinstance(error, OSError):
            _leave_stdout()
            _fail(str(error))
        raise


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        _write(f"trackway {version('trackway')}\n")
        raise typer.Exit


@app.callback()
def _trackway(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Record, find and replay what an LLM agent does in every reinforcement-learning rollout."""


def _integer(least: int | None = None, most: int | None = None) -> Callable[[Any], int]:
    """Read the integer of an option, in words of its own where it is none."""

    def parse(text: Any) -> int:
        try:
            value = int(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not an integer") from None
        if least is not None and value < least:
            raise typer.BadParameter(f"{value} is less than {least}")
        if most is not None and value > most:
            raise typer.BadParameter(f"{value} is more than {most}")
        return value

    return parse


def _number(text: Any) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def _temperature(text: Any) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise typer.BadParameter(f"{text} is no temperature: it is 0 or more")
    return value


@app.command()
def demo(
    store: StorePath = None,
    prompts: Annotated[int, typer.Option(metavar="N", parser=_integer(1), help="Samples in each step.")] = 4,
    group: Annotated[int, typer.Option(metavar="N", parser=_integer(1), help="Rollouts of each sample.")] = 4,
    turns: Annotated[
        int, typer.Option(metavar="N", parser=_integer(1), help="Generations in a rollout, at most.")
    ] = 3,
    temperature: Annotated[
        float, typer.Option(metavar="T", parser=_temperature, help="Sampling temperature.")
    ] = 0.7,
    steps: Annotated[int, typer.Option(metavar="N", parser=_integer(1), help="Training steps.")] = 2,
    validation: Annotated[
        int, typer.Option(metavar="N", parser=_integer(0), help="Validation rollouts at the end.")
    ] = 2,
    model: Annotated[bool, typer.Option("--model/--no-model", help="A real model, or a script.")] = True,
) -> None:
    """Record tool-calling rollouts of a small model, and show them."""
    from trackway.demo import run
    from trackway.trace.store import store_path

    code = run(
        store=store_path(store),
        prompts=prompts,
        group=group,
        turns=turns,
        temperature=temperature,
        steps=steps,
        model=model,
        validation=validation,
    )
    raise typer.Exit(code)


def _status_word(text: str | None) -> str | None:
    if text is None:
        return None
    from typing import get_args

    from trackway.trace.model import Status

    allowed = get_args(Status)
    if text.lower() not in allowed:
        raise typer.BadParameter(f"{text!r} is not a status; use one of {', '.join(allowed)}")
    return text.lower()


@app.command("ls")
def list_trajectories(
    store: StorePath = None,
    step: Annotated[int | None, typer.Option(metavar="N", parser=_integer(), help="Only this step.")] = None,
    sample: Annotated[
        str | None, typer.Option(metavar="ID", help="Only this sample, as in a key: 17 or task%2F3.")
    ] = None,
    rollout: Annotated[
        int | None, typer.Option(metavar="N", parser=_integer(), help="Only rollouts with this number.")
    ] = None,
    validate: Annotated[
        bool | None, typer.Option("--validate/--train", help="Only validation, or only training.")
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(callback=_status_word, metavar="S", help="Only ok, error, cancelled, running or died."),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(metavar="R", parser=_number, help="Only rewards from here.")
    ] = None,
    max_reward: Annotated[
        float | None, typer.Option(metavar="R", parser=_number, help="Only rewards up to here.")
    ] = None,
    experiment: Annotated[str | None, typer.Option(metavar="NAME", help="Only this experiment.")] = None,
    errors: Annotated[
        bool, typer.Option("--errors", help="Only those in which some call failed, as a tool.")
    ] = False,
    newest: Annotated[bool, typer.Option("--newest", help="The latest first.")] = False,
    limit: Annotated[
        int | None, typer.Option(metavar="N", parser=_integer(1), help="At most this many.")
    ] = None,
    all_attempts: Annotated[
        bool, typer.Option("--all-attempts", help="Also attempts that a later one replaced.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List trajectories, one line each."""
    rows = limit or (None if as_json else ROWS)
    found = _open(store).query(
        step=step,
        sample=_sample(sample),
        rollout=rollout,
        validate=validate,
        status=cast("Status | None", status),
        min_reward=min_reward,
        max_reward=max_reward,
        experiment=experiment,
        all_attempts=all_attempts,
        newest=newest,
    )
    matching = (summary for summary in found if summary.errors or not errors)
    shown = list(islice(matching, rows))
    if as_json:
        _write("[" + ",".join(f"\n{_json(_summary(summary))}" for summary in shown) + "\n]\n" * bool(shown))
        if not shown:
            _write("]\n")
        return
    if not shown:
        _say("no trajectory matches; `trackway status` says what the store holds")
        return
    from trackway.viewers.tables import table

    more = next(matching, None) is not None
    _print(table(shown, more=more), whole_lines=True)
    if more and limit is None:
        _say(f"there are more than these {ROWS:,}; narrow the search or give --limit")


def _sample(text: str | None) -> int | str | None:
    if text is None:
        return None
    from trackway.trace.model import TrajectoryKey

    try:
        return TrajectoryKey.parse(f"0/{text}/0").sample_index
    except ValueError:  # an id with a slash in it, as the data set has it
        return text


# A key without a step begins with a dash, as in -/17/0, and is no option.
@app.command(context_settings={"ignore_unknown_options": True})
def show(
    name: Annotated[str, typer.Argument(metavar="KEY|ID", help="1/17/0, val/1/17/0, or a trace id.")],
    store: StorePath = None,
    full: Annotated[bool, typer.Option("--full", help="Cut nothing.")] = False,
    turn: Annotated[int | None, typer.Option(metavar="N", parser=_integer(), help="Only turn N.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trajectory: turns, tool calls, errors, rewards."""
    from trackway.viewers.terminal import replay

    trajectory = _open(store).load(name)
    try:
        view = replay(trajectory, full=full, turn=turn)
    except LookupError as error:
        _fail(str(error.args[0]))
    if as_json:
        _write(_json(_trajectory(trajectory, turn)) + "\n")
    else:
        _print(view)


@app.command()
def status(store: StorePath = None, as_json: AsJson = False) -> None:
    """Say what the store holds and what is still to be sent."""
    from dataclasses import asdict

    opened = _open(store)
    state = opened.status()
    if as_json:
        _write(_json({"store": str(opened.path), **asdict(state)}) + "\n")
        return
    from trackway.viewers.tables import status_view

    _print(status_view(state, str(opened.path)), whole_lines=True)


@app.command()
def sync(
    store: StorePath = None,
    follow: Annotated[
        bool, typer.Option("--follow/--once", help="Wait for more, or stop when done.")
    ] = False,
) -> None:
    """Send what is recorded to MLflow and other destinations."""
    from trackway.trace.exporters.sync import is_followed, run

    opened = _open(store)
    try:
        code = run(opened.path, follow=follow, say=_tell)
    except KeyboardInterrupt:
        code = 0 if follow else 130
    if not follow and code == 0 and is_followed(opened.path):
        # The follower did the work, or failed to; run() knows only that it is there.
        for name, destination in opened.status().destinations.items():
            if destination.last_error:
                _tell(f"{name}: {destination.last_error}")
                code = 1
    raise typer.Exit(code)


@app.command()
def ui(
    store: StorePath = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", parser=_integer(1, 65535), help="Port to listen on.")
    ] = 5000,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Open the trajectories in the MLflow UI."""
    from importlib.util import find_spec

    path = _open(store).path
    if find_spec("mlflow") is None:
        _fail("the MLflow UI needs the package mlflow: pip install 'trackway[mlflow]'")
    from trackway.trace.exporters.mlflow import tracking_uri
    from trackway.trace.exporters.sync import load_settings

    uri = tracking_uri(path, load_settings(path).tracking_uri)
    if uri.startswith(("http://", "https://")):
        _tell(f"this store is sent to the MLflow server at {uri.rpartition('@')[2]}")
        _tell(_HOW_TO_FILTER)
    else:
        _serve(path, uri, host, port, browser=not no_open)


_HOW_TO_FILTER = """\
in the page:     open the experiment, Traces, then the funnel with Field = Tag, for instance step = 1
in the address:  end it with /traces?tag=step%3D1 (then &tag=sample_index%3D17, &startTimeLabel=ALL)
in Python:       mlflow.search_traces(filter_string="tags.step = '1'")"""


def _serve(path: Path, uri: str, host: str, port: int, *, browser: bool) -> None:
    import signal
    import socket
    import subprocess

    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        other = port + 1 if port < 65535 else 5000
        _fail(f"cannot listen on {host}:{port} ({reason}); try --port {other}")
    _tell("starting the MLflow UI; Ctrl-C ends it")

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
        _fail(f"the MLflow UI ended with exit code {code}")


def _welcome(server: subprocess.Popen[bytes], host: str, port: int, browser: bool) -> None:
    """Wait until the server answers, then say where the traces of each experiment are."""
    import time
    import webbrowser

    experiments = None
    while experiments is None:
        if server.poll() is not None:
            return
        time.sleep(0.2)
        experiments = _experiments(host, port)
    address = f"http://{host}:{port}"
    pages = [f"{address}/#/experiments/{number}/traces" for number in experiments] or [address]
    _tell("\n".join(f"MLflow UI:       {page}" for page in pages))
    _tell(_HOW_TO_FILTER)
    if browser:
        webbrowser.open(pages[0])


def _experiments(host: str, port: int) -> list[str] | None:
    """Ids of the latest experiments, without MLflow's own empty one; None before the server answers."""
    import json
    from http.client import HTTPConnection, HTTPException

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


def _open(path: Path | None) -> Store:
    from trackway.trace.store import open_store

    return open_store(path)


def _summary(summary: Summary) -> dict[str, Any]:
    return {
        "key": summary.name,
        "step": summary.step,
        "sample_index": summary.sample_index,
        "rollout_n": summary.rollout_n,
        "attempt": summary.attempt,
        "validate": summary.validate,
        "status": summary.status,
        "error": summary.error,
        "reward": summary.reward,
        "rewards": summary.rewards,
        "turns": summary.turns,
        "generations": summary.generations,
        "tool_calls": summary.tool_calls,
        "tokens": summary.tokens,
        "errors": summary.errors,
        "spans": summary.spans,
        "start": _iso(summary.start_ns),
        "duration_s": _seconds(summary.start_ns, summary.end_ns),
        "policy_version": summary.policy_version,
        "project": summary.project,
        "experiment": summary.experiment,
        "trace_id": summary.trace_id,
    }


def _trajectory(trajectory: Trajectory, turn: int | None) -> dict[str, Any]:
    key = trajectory.key
    turns = [
        {
            "index": each.index,
            "role": each.role,
            "name": each.name,
            "text": each.text,
            "token_ids": each.token_ids,
            "mask": each.mask,
            "logprobs": each.logprobs,
            "tool_calls": [
                {
                    "name": call.name,
                    "arguments": call.arguments,
                    "result": call.result,
                    "error": call.error,
                    "call_id": call.call_id,
                    "start": _iso(call.start_ns),
                    "duration_s": _seconds(call.start_ns, call.end_ns),
                    "span_id": call.span_id,
                }
                for call in each.tool_calls
            ],
            "error": each.error,
            "finish_reason": each.finish_reason,
            "policy_version": each.policy_version,
            "start": _iso(each.start_ns),
            "duration_s": _seconds(each.start_ns, each.end_ns),
            "span_id": each.span_id,
        }
        for each in trajectory.turns
        if turn is None or each.index == turn
    ]
    spans = [
        {
            "name": span.name,
            "kind": span.kind,
            "span_id": span.span_id,
            "parent_id": span.parent_id,
            "status": span.status,
            "error": span.error,
            "start": _iso(span.start_ns),
            "duration_s": _seconds(span.start_ns, span.end_ns),
        }
        for span in trajectory.spans
    ]
    return {
        "key": trajectory.name,
        "step": key and key.step,
        "sample_index": key and key.sample_index,
        "rollout_n": key and key.rollout_n,
        "attempt": key and key.attempt,
        "validate": key and key.validate,
        "status": trajectory.status,
        "error": trajectory.error,
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        "annotations": trajectory.annotations,
        "policy_versions": trajectory.policy_versions,
        "tokens": trajectory.tokens,
        "errors": trajectory.errors,
        "start": _iso(trajectory.start_ns),
        "duration_s": _seconds(trajectory.start_ns, trajectory.end_ns),
        "project": trajectory.project,
        "experiment": trajectory.experiment,
        "run_id": trajectory.run_id,
        "trace_id": trajectory.trace_id,
        "notes": trajectory.notes,
        "turns": turns,
        "spans": spans,
    }


def _iso(time_ns: int | None) -> str | None:
    if time_ns is None:
        return None
    from datetime import datetime, timedelta, timezone

    return (datetime.fromtimestamp(0, timezone.utc) + timedelta(microseconds=time_ns // 1000)).isoformat()


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e9


def _json(value: Any) -> str:
    """JSON in ASCII, so that no text can steer a terminal and a lone surrogate survives."""
    import json

    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    """The same plain value with null for NaN and the infinities, which JSON has no word for."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if hasattr(value, "items"):
        return {str(name): _finite(each) for name, each in value.items()}
    return value


def _print(view: RenderableType, *, whole_lines: bool = False) -> None:
    """Print a view, without colour when not to a terminal.

    Args:
        whole_lines: in a pipe, be as wide as the view needs, so that a row stays one line for grep.
    """
    from rich.console import Console

    console = Console()
    if whole_lines and not console.is_terminal and "COLUMNS" not in os.environ:
        wide = console.options.update(width=10_000)
        console.width = max(80, console.measure(view, options=wide).maximum)
    with console.capture() as captured:
        console.print(view)
    _write(captured.get())


def _write(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        _leave_stdout()
        raise typer.Exit from None
    except OSError as error:
        _leave_stdout()
        _fail(f"the output cannot be written: {error.strerror or error}")


def _leave_stdout() -> None:
    """Drop what standard output did not take: at exit Python would try again, and complain."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(text: str) -> None:
    from trackway.viewers.text import visible

    _write(f"{visible(text)}\n")


def _say(text: str) -> None:
    from trackway.viewers.text import visible

    print(visible(text), file=sys.stderr)


def _fail(text: str, code: int = 1) -> NoReturn:
    _say(f"trackway: {text}")
    sys.exit(code)
