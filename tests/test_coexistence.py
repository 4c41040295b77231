"""Other tracing in a program goes on as if Trackway were not there, Trackway as if it were alone."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from trackway import open_store

from .otlp_receiver import Refusal, Request, http_receiver
from .programs import install_exporter, run, stop_followers, wait_until
from .weave_server import serving

MLFLOW = """
import json, mlflow
from trackway import rollout_trace, tool_trace
mlflow.set_tracking_uri(f"sqlite:///{os.getcwd()}/theirs.db")
mlflow.set_experiment("theirs")

def stored():
    mlflow.flush_trace_async_logging()
    traces = mlflow.search_traces(return_type="list", order_by=["timestamp_ms ASC"])
    print(json.dumps([[trace.info.state, [[span.name, span.parent_id is None] for span in trace.data.spans]]
                      for trace in traces]))
"""


def program(folder: Path, code: str, **environment: str) -> list[str]:
    """Run a program and give the lines that it printed."""
    done = run(folder, textwrap.dedent(code), timeout=240, **{"TRACKWAY_STRICT": "1", **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def trees(folder: Path) -> dict[str, list[str]]:
    """Give the names of the spans of each trajectory, indented by depth."""
    store = open_store(folder / "store")
    known = [store.load(item.trace_id) for item in store.query(all_attempts=True)]
    return {item.name: [f"{'  ' * depth}{span.name}" for depth, span in item.walk()] for item in known}


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])
@pytest.mark.parametrize("shared", [False, True], ids=["mlflow's own context", "shared context"])
def test_traces_of_mlflow_around_and_inside_of_rollouts_are_whole_and_ours_too(
    tmp_path: Path, shared: bool, captured: bool
) -> None:
    code = MLFLOW + textwrap.dedent("""
        trackway.configure(store="store", sync="off", capture_otel=os.environ["CAPTURE"])

        @tool_trace
        def tool(x):
            return x

        @mlflow.trace
        def inner(x):
            return tool(x)

        @mlflow.trace
        def outer(x):
            return inner(x)

        @rollout_trace
        def solve(x):
            return outer(x)

        with trajectory(step=1, sample_index=1):
            solve(1)

        @mlflow.trace
        def around():
            with trajectory(step=2, sample_index=1):
                solve(2)

        around()
        print(trackway.flush().dropped)
        stored()
        """)
    lines = program(
        tmp_path,
        code,
        CAPTURE=str(captured),
        MLFLOW_USE_DEFAULT_TRACER_PROVIDER=str(not shared),
    )
    assert lines[0] == "0"
    assert json.loads(lines[1]) == [
        ["OK", [["outer", True], ["inner", False]]],
        ["OK", [["around", True], ["outer", False], ["inner", False]]],
    ]
    ours = ["trajectory", "  solve", "    tool"]
    if captured and shared:  # else MLflow's spans are none of OpenTelemetry's provider
        ours = ["trajectory", "  solve", "    outer", "      inner", "        tool"]
    assert trees(tmp_path) == {"1/1/0": ours, "2/1/0": ours}


@pytest.mark.slow
def test_a_rollout_that_goes_on_in_another_process_is_one_where_mlflow_shares_its_context(
    tmp_path: Path,
) -> None:
    code = MLFLOW + textwrap.dedent("""
        from trackway import extract, inject
        trackway.configure(store="store", sync="off")

        @mlflow.trace
        def theirs(x):
            return call(x)

        with trajectory(step=1, sample_index=1):
            carrier = inject()
        if os.fork() == 0:
            with extract(carrier):
                call(1)
            trackway.shutdown()
            os._exit(0)
        os.wait()
        with extract(carrier):
            theirs(2)
        stored()
        """)
    lines = program(tmp_path, code, MLFLOW_USE_DEFAULT_TRACER_PROVIDER="false")
    assert json.loads(lines[0]) == [["OK", [["theirs", True]]]]
    assert trees(tmp_path) == {"1/1/0": ["trajectory", "  call", "  call"]}


@pytest.mark.slow
def test_autologging_of_mlflow_logs_what_is_trained_inside_of_a_rollout(tmp_path: Path) -> None:
    code = MLFLOW + textwrap.dedent("""
        from sklearn.linear_model import LinearRegression
        mlflow.sklearn.autolog(log_models=False, log_datasets=False)
        trackway.configure(store="store", sync="off", capture_otel=True)

        @tool_trace
        def fit(numbers):
            return float(LinearRegression().fit([[n] for n in numbers], numbers).coef_[0])

        with trajectory(step=1, sample_index=1), mlflow.start_run() as active:
            slope = fit([1, 2, 3, 4])
        logged = mlflow.get_run(active.info.run_id)
        print(round(slope, 6), logged.info.status, logged.data.params["fit_intercept"])
        """)
    assert program(tmp_path, code) == ["1.0 FINISHED True"]
    assert trees(tmp_path) == {"1/1/0": ["trajectory", "  fit"]}


@pytest.mark.slow
def test_calls_of_weave_around_and_inside_of_rollouts_are_whole_and_ours_too(tmp_path: Path) -> None:
    code = """
        import weave
        from trackway import rollout_trace, tool_trace
        client = weave.init("team/theirs")
        trackway.configure(store="store", sync="off", capture_otel=True)

        @tool_trace
        def tool(x):
            return x

        @weave.op
        def inner(x):
            return tool(x)

        @weave.op
        def outer(x):
            return inner(x)

        with trajectory(step=1, sample_index=1):
            outer(1)

        @weave.op
        def around():
            with trajectory(step=2, sample_index=1):
                outer(2)

        around()
        client.finish()
    """
    with serving(tmp_path) as server:
        program(tmp_path, code, **server.environment)
        found = {item["id"]: item for item in server.calls()}

    def path(item: dict[str, Any]) -> str:
        above = found.get(item.get("parent_id") or "")
        name = item["op_name"].rpartition("/")[2].partition(":")[0]
        return name if above is None else f"{path(above)} > {name}"

    assert sorted(map(path, found.values())) == [
        "around",
        "around > outer",
        "around > outer > inner",
        "outer",
        "outer > inner",
    ]
    assert all(item["ended_at"] and not item.get("exception") for item in found.values())
    ours = ["trajectory", "  tool"]
    assert trees(tmp_path) == {"1/1/0": ours, "2/1/0": ours}


def test_spans_of_opentelemetry_inside_of_a_rollout_are_exported_below_it_as_ever(tmp_path: Path) -> None:
    code = """
        from opentelemetry import trace as otel
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        memory = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(memory))
        otel.set_tracer_provider(provider)
        tracer = otel.get_tracer("theirs")
        trackway.configure(store="store", sync="off")
        with tracer.start_as_current_span("request") as request:
            with trajectory(step=1, sample_index=1) as ours:
                call(1)
                with tracer.start_as_current_span("inside"):
                    call(2)
            with tracer.start_as_current_span("after"):
                pass
        inside, after, _ = memory.get_finished_spans()
        mine = int(ours.trace_id, 16)
        print((inside.context.trace_id, inside.parent.trace_id) == (mine, mine))
        print(after.parent.span_id == request.get_span_context().span_id)
        print(otel.get_tracer_provider() is provider)
    """
    assert program(tmp_path, code) == ["True", "True", "True"]
    assert trees(tmp_path) == {"1/1/0": ["trajectory", "  call", "  call"]}


ELSEWHERE = """
    import os
    from pathlib import Path
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Exporter(SpanExporter):
        def export(self, spans):
            with Path(os.environ["PLACE"]).open("a") as output:
                output.writelines(f"{span.context.span_id:016x}\\n" for span in spans)
            return SpanExportResult.SUCCESS
"""


@pytest.mark.slow
def test_one_recording_goes_to_every_destination_and_one_that_fails_keeps_no_other(tmp_path: Path) -> None:
    code = """
        trackway.configure(store="store", backend=["otlp", "mlflow", "elsewhere"], project="all")
        for number in range(10):
            with trajectory(step=number, sample_index=1):
                call(number)
        status = trackway.flush(100)
        print(*sorted((name, item.exported) for name, item in status.destinations.items()), sep="\\n")
    """
    away = True

    def answer(request: Request) -> Refusal | None:
        return Refusal(503, "not now") if away else None

    place = tmp_path / "elsewhere.txt"
    store = tmp_path / "store"
    with http_receiver() as receiver:
        receiver.answer = answer
        environment = {
            "PLACE": str(place),
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address,
            **install_exporter(tmp_path, ELSEWHERE),
        }
        wanted = code.replace("trackway.flush(100)", "others()")
        waiting = textwrap.dedent("""
            def others():
                while True:
                    status = trackway.flush(0.2)
                    found = status.destinations
                    if len(found) == 3 and found["mlflow"].exported == found["elsewhere"].exported == 20:
                        return status
        """)
        lines = program(tmp_path, waiting + textwrap.dedent(wanted), **environment)
        assert lines == ["('elsewhere', 20)", "('mlflow', 20)", "('otlp', 0)"]
        away = False
        wait_until(lambda: len(receiver.spans) == 20)
        wait_until(lambda: open_store(store).status().pending == 0)
        stop_followers(store)
    known = {span.span_id for item in open_store(store).query() for span in _spans(store, item.trace_id)}
    assert {span.span_id.hex() for span in receiver.spans} == known
    assert sorted(place.read_text().split()) == sorted(known)
    status = open_store(store).status()
    assert (status.recorded, status.exported, status.dropped) == (20, 20, 0)


def _spans(store: Path, trace_id: str) -> Any:
    return open_store(store).load(trace_id).spans


PAGE = (Path(__file__).parent.parent / "docs" / "write-an-exporter.md").read_text()


def page(language: str) -> list[str]:
    """Give the blocks of code in the page on exporters."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def install(folder: Path) -> dict[str, str]:
    """Install the exporter of the page as a package would be, and give the environment that finds it."""
    (module,), (project,) = page("python"), page("toml")
    name = module.splitlines()[0].removeprefix("# ")
    group, line = re.findall(r'^\[project\.entry-points\."(.+)"\]\n(.+ = ".+:.+")$', project, re.MULTILINE)[0]
    info = folder / "packages" / "lines-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "packages" / name).write_text(module)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{line.replace(chr(34), '')}\n")
    return {"PYTHONPATH": str(folder / "packages"), "LINES_PATH": str(folder / "lines.txt")}


def test_the_example_of_the_page_on_exporters_is_one_file_and_one_line(tmp_path: Path) -> None:
    code = """
        trackway.configure(store="store", backend="lines", sync="inline")
        for number in (1, 2):
            with trajectory(step=number, sample_index=17):
                call(number)
        print(trackway.flush(60).pending)
    """
    assert program(tmp_path, code, **install(tmp_path)) == ["0"]
    lines = [line.rsplit(" ", 1) for line in (tmp_path / "lines.txt").read_text().splitlines()]
    assert [name for name, _ in lines] == [
        f"{number}/17 {span}" for number in (1, 2) for span in ("trajectory trajectory", "llm call")
    ]
    assert all(float(seconds) >= 0 for _, seconds in lines)


def test_whole_trajectories_may_be_taken_and_refused_as_the_page_says(tmp_path: Path) -> None:
    (method,) = [block for block in page("py") if "def " in block]
    exporter = textwrap.dedent("""
        from pathlib import Path
        from opentelemetry.sdk.trace.export import SpanExporter

        class Exporter(SpanExporter):
            def __init__(self, config):
                self._project = config.project

            def export(self, spans):
                raise AssertionError

            def _send(self, *facts):
                print(self._project, *facts, flush=True)

        """) + textwrap.indent(method, "    ")
    code = """
        trackway.configure(store="store", backend="elsewhere", sync="inline", project="mine")
        for number in (1, 2):
            with trajectory(step=number, sample_index=17):
                call(number)
                if number == 1:
                    trackway.reward("reward", 0.5)
        print(trackway.flush(60).destinations["elsewhere"].refused)
    """
    assert program(tmp_path, code, **install_exporter(tmp_path, exporter)) == ["mine 1/17/0 0.5 ['1']", "2"]
