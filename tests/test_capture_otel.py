"""Spans of other OpenTelemetry instrumentation in a rollout become part of its trajectory, on request."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

import trackway
from trackway import open_store
from trackway.trace.model import Trajectory

from .programs import run
from .servers import web_server

PREPARE = """
import json, logging
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from trackway import annotate, carry, detached, extract, inject, rollout_trace, tool_trace

memory = InMemorySpanExporter()

def provide():
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    otel.set_tracer_provider(provider)

def span(name, **more):
    return otel.get_tracer("theirs", "1.2").start_as_current_span(name, **more)
"""

CONFIGURE = 'trackway.configure(store="store", sync="off", capture_otel=True)\n'


def recorded(folder: Path, code: str, **environment: str) -> tuple[dict[str, Trajectory], str, str]:
    """Run a program; give its trajectories by key, what it printed and what it logged."""
    done = run(folder, PREPARE + textwrap.dedent(code), **{"TRACKWAY_STRICT": "1", **environment})
    assert done.returncode == 0, done.stderr
    store = open_store(folder / "store")
    found = {item.name: store.load(item.trace_id) for item in store.query(all_attempts=True)}
    return found, done.stdout, done.stderr


def names(known: Trajectory) -> list[str]:
    return [f"{'  ' * depth}{span.name}" for depth, span in known.walk()]


def test_a_span_of_theirs_is_recorded_with_all_that_it_holds_and_theirs_goes_on_as_before(
    tmp_path: Path,
) -> None:
    code = f"""
        provide()
        {CONFIGURE}
        get = {{"http.request.method": "GET"}}
        link = Link(SpanContext(7, 8, False, TraceFlags(1)), {{"why": "cache"}})
        with trajectory(step=1, sample_index=2, policy_version=5) as mine:
            with span("GET", kind=SpanKind.CLIENT, links=[link], attributes=get) as open:
                open.add_event("sent", {{"bytes": 17}})
                with span("inner"):
                    call(1)
                open.set_status(Status(StatusCode.ERROR, "refused"))
        (inner, get) = memory.get_finished_spans()
        times = get.start_time, get.end_time
        print(json.dumps([get.name, get.status.description, dict(get.attributes), *times]))
        print(f"{{get.context.trace_id:032x}}" == mine.trace_id, get.resource.attributes["service.name"])
    """
    found, out, _ = recorded(tmp_path, code, OTEL_SERVICE_NAME="theirs-own")
    known = found["1/2/0"]
    assert names(known) == ["trajectory", "  GET", "    inner", "      call"]
    theirs, first = json.loads(out.splitlines()[0]), known.spans[1]
    assert theirs[:3] == ["GET", "refused", {"http.request.method": "GET"}]
    assert out.splitlines()[1] == "True theirs-own"
    assert (first.kind, first.side, first.status, first.error) == ("other", "client", "error", "refused")
    assert [first.start_ns, first.end_ns] == theirs[3:]
    assert first.attributes["http.request.method"] == "GET"
    assert (first.attributes["otel.scope.name"], first.attributes["otel.scope.version"]) == ("theirs", "1.2")
    assert [(event.name, event.attributes) for event in first.events] == [("sent", {"bytes": 17})]
    (link,) = first.links
    assert (link.trace_id, link.span_id, link.attributes) == (f"{7:032x}", f"{8:016x}", {"why": "cache"})
    # Found by what names the rollout, as any other span of it.
    assert first.attributes["trackway.step"] == 1
    assert first.attributes["trackway.policy_version"] == 5
    status = open_store(tmp_path / "store").status()
    assert (status.recorded, status.dropped) == (4, 0)


def test_without_the_setting_nothing_of_theirs_is_recorded_and_nothing_is_set(tmp_path: Path) -> None:
    code = f"""
        {CONFIGURE.replace("True", "False")}
        with trajectory(step=1, sample_index=1):
            with span("theirs"):
                call(1)
        print(type(otel.get_tracer_provider()).__name__)
        provide()
        with trajectory(step=2, sample_index=1):
            with span("theirs"):
                call(1)
        print(len(memory.get_finished_spans()))
    """
    found, out, log = recorded(tmp_path, code)
    assert [len(item.spans) for item in found.values()] == [2, 2]
    assert out.split() == ["ProxyTracerProvider", "1"]
    assert "capture_otel" not in log


def test_only_what_runs_inside_of_a_recorded_rollout_is_recorded(tmp_path: Path) -> None:
    code = """
        import concurrent.futures as futures
        provide()
        trackway.configure(store="store", sync="off", capture_otel=True, keep_samples=[1, 3], ratio=0.0)
        with span("before"):
            with trajectory(step=1, sample_index=1) as mine:
                with span("inside"):
                    pass
                with detached(), span("detached"):
                    pass
                with trajectory(step=1, sample_index=2):  # which is not sampled
                    with span("not sampled"):
                        pass
                with futures.ThreadPoolExecutor(1) as pool:
                    def work(name):
                        with span(name):
                            pass
                    pool.submit(work, "outside").result()
                    carry(pool).submit(work, "carried").result()
                carrier = inject()
            with span("after"):
                pass
        with extract(carrier), span("continued"):
            with span("child"):
                pass
        trackway.shutdown()
        with span("too late"):
            pass
        print(len(memory.get_finished_spans()))
    """
    found, out, _ = recorded(tmp_path, code)
    assert list(found) == ["1/1/0"]
    assert {item.name for item in found["1/1/0"].spans} == {
        "trajectory",
        "inside",
        "carried",
        "continued",
        "child",
    }
    assert out.split() == ["10"]


def test_a_generator_that_leaves_a_span_of_theirs_open_while_it_yields_stays_around_it(
    tmp_path: Path,
) -> None:
    code = f"""
        provide()
        {CONFIGURE}
        @tool_trace
        def stream():
            with span("open"):
                yield 1
                call(1)
                yield 2
        with trajectory(step=1, sample_index=1), span("outer"):
            print(*stream())
    """
    found, out, _ = recorded(tmp_path, code)
    assert names(found["1/1/0"]) == ["trajectory", "  outer", "    stream", "      open", "        call"]
    assert out.split() == ["1", "2"]


def test_what_a_span_has_set_off_belongs_to_its_rollout_also_after_its_end(tmp_path: Path) -> None:
    code = f"""
        provide()
        {CONFIGURE}
        with trajectory(step=1, sample_index=1):
            with span("sender") as sender:
                context = otel.set_span_in_context(sender)
        late = otel.get_tracer("theirs").start_span("late", context=context)
        late.end()
    """
    found, _, _ = recorded(tmp_path, code)
    assert names(found["1/1/0"]) == ["trajectory", "  sender", "    late"]


def test_of_a_rollout_that_has_ended_no_token_ids_are_kept_for_spans_that_may_come_late(
    tmp_path: Path,
) -> None:
    code = f"""
        import gc, tracemalloc
        provide()
        {CONFIGURE}
        @llm_trace
        def generate(prompt_ids):
            with span("theirs"):
                return {{"response_ids": [1]}}
        def record(count):
            for step in range(count):
                with trajectory(step=step, sample_index=1):
                    generate(list(range(step, step + 10_000)))
                    carrier = inject()
                with extract(carrier):
                    generate(list(range(step, step + 10_000)))
            trackway.flush()
            memory.clear()
            gc.collect()
        record(2)
        tracemalloc.start()
        record(50)
        print(tracemalloc.get_traced_memory()[0])
    """
    _, out, _ = recorded(tmp_path, code)
    assert int(out) < 50 * 10_000  # less than a byte for each of them


def test_a_provider_that_comes_late_is_found_when_the_next_rollout_starts(tmp_path: Path) -> None:
    code = f"""
        {CONFIGURE}
        provide()
        for step in (1, 2):
            with trajectory(step=step, sample_index=1), span("theirs"):
                pass
        trackway.configure(store="store", sync="off", capture_otel=True, experiment="other")
        with trajectory(step=3, sample_index=1), span("theirs"):
            pass
        print(len(memory.get_finished_spans()))
    """
    found, out, log = recorded(tmp_path, code)
    # Once each, also after a second configure.
    assert [[item.name for item in known.spans] for known in found.values()] == [["trajectory", "theirs"]] * 3
    assert out.split() == ["3"]
    assert "no OpenTelemetry tracer provider" not in log


def test_where_there_is_no_provider_one_is_set_that_draws_nothing_from_random(tmp_path: Path) -> None:
    code = f"""
        import random
        {CONFIGURE}
        random.seed(7)
        before = random.getstate()
        tracer = otel.get_tracer("got early")
        for step in (1, 2):
            with trajectory(step=step, sample_index=1), tracer.start_as_current_span("theirs"):
                pass
        with tracer.start_as_current_span("outside") as outside:
            print(outside.is_recording(), random.getstate() == before)
            assert outside.get_span_context().is_valid
    """
    found, out, log = recorded(tmp_path, code)
    assert [len(item.spans) for item in found.values()] == [2, 2]
    assert out.split() == ["True", "True"]
    assert log.count("no OpenTelemetry tracer provider was set when the first rollout began") == 1


def test_a_provider_that_takes_no_processors_is_named(tmp_path: Path) -> None:
    code = f"""
        class Odd(otel.TracerProvider):
            def get_tracer(self, *args, **kwargs):
                return otel.NoOpTracer()
        otel.set_tracer_provider(Odd())
        {CONFIGURE}
        for step in (1, 2):
            with trajectory(step=step, sample_index=1), span("theirs"):
                pass
    """
    found, _, log = recorded(tmp_path, code)
    assert len(found) == 2
    assert log.count("the tracer provider of this program is a Odd, which takes no span processors") == 1


def test_secrets_are_masked_and_long_texts_cut_as_in_what_is_our_own(tmp_path: Path) -> None:
    code = """
        provide()
        trackway.configure(
            store="store", sync="off", capture_otel=True, max_text_length=1000, redact=["account"]
        )
        with trajectory(step=1, sample_index=1):
            attributes = {
                "http.request.header.authorization": ["Basic hunter2hunter2=="],
                "api_key": "hunter2",
                "account": "hunter2",
                "url.full": "https://me:hunter2@example.org/",
                "input.value": json.dumps({"password": "hunter2", "n": 1}),
                "long": "x" * 5000,
            }
            link = Link(SpanContext(7, 8, False, TraceFlags(1)), {"password": "hunter2"})
            with span("call", attributes=attributes, links=[link]) as open:
                open.add_event("sent", {"cookie": "hunter2"})
                open.set_status(Status(StatusCode.ERROR, "https://me:hunter2@example.org/"))
        print(memory.get_finished_spans()[0].attributes["api_key"])
    """
    found, out, _ = recorded(tmp_path, code)
    assert out.split() == ["hunter2"], "theirs is as it was"
    assert not [path for path in (tmp_path / "store").rglob("*.jsonl") if "hunter2" in path.read_text()]
    (_, known) = found["1/1/0"].spans
    assert len(known.attributes["long"]) < 1200
    assert known.inputs == {"password": "⟨redacted⟩", "n": 1}


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"gen_ai.operation.name": "chat"}, "llm"),
    ({"gen_ai.operation.name": "text_completion"}, "llm"),
    ({"gen_ai.operation.name": "execute_tool"}, "tool"),
    ({"gen_ai.operation.name": "invoke_agent"}, "rollout"),
    ({"gen_ai.operation.name": "embeddings"}, "other"),
    ({"openinference.span.kind": "LLM"}, "llm"),
    ({"openinference.span.kind": "TOOL"}, "tool"),
    ({"openinference.span.kind": "RETRIEVER"}, "other"),
    ({"traceloop.span.kind": "tool"}, "tool"),
    ({"llm.request.type": "chat"}, "llm"),
    ({"http.request.method": "GET"}, "other"),
    ({"trackway.kind": "trajectory", "trackway.step": 99}, "other"),
]


def test_what_a_span_is_its_attributes_tell_by_any_of_the_usual_conventions(tmp_path: Path) -> None:
    code = f"""
        provide()
        {CONFIGURE}
        for number, (attributes, _) in enumerate({KINDS!r}):
            with trajectory(step=1, sample_index=number), span("theirs", attributes=attributes):
                pass
    """
    found, _, _ = recorded(tmp_path, code)
    assert [known.spans[1].kind for known in found.values()] == [kind for _, kind in KINDS]
    assert found["1/11/0"].spans[1].attributes["trackway.step"] == 1, "nobody else says what a rollout is"


def test_the_conversation_is_read_from_generations_and_tools_of_theirs(tmp_path: Path) -> None:
    asked = [{"role": "user", "parts": [{"type": "text", "content": "What is 17 * 3?"}]}]
    call = {"type": "tool_call", "id": "c1", "name": "calculator", "arguments": {"expression": "17*3"}}
    answer = {"role": "assistant", "parts": [call], "finish_reason": "tool_call"}
    reply = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "51"}]}
    last = {
        "role": "assistant",
        "parts": [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": "It is 51."}],
        "finish_reason": "stop",
    }
    chat = {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 4}
    system = json.dumps([{"type": "text", "content": "Be brief."}])
    first = {
        **chat,
        "gen_ai.system_instructions": system,
        "gen_ai.input.messages": json.dumps(asked),
        "gen_ai.output.messages": json.dumps([answer]),
    }
    tool = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "calculator",
        "gen_ai.tool.call.arguments": json.dumps({"expression": "17*3"}),
        "gen_ai.tool.call.result": "51",
    }
    second = {
        **chat,
        "gen_ai.system_instructions": system,
        "gen_ai.input.messages": json.dumps([*asked, answer, reply]),
        "gen_ai.output.messages": json.dumps([last]),
    }
    request = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0.5}
    response = {"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
    openinference = {
        "openinference.span.kind": "LLM",
        "input.value": json.dumps(request),
        "output.value": json.dumps(response),
    }
    broken = {**chat, "gen_ai.input.messages": json.dumps(asked)[:-3], "gen_ai.output.messages": "[7, null]"}
    code = f"""
        provide()
        {CONFIGURE}
        with trajectory(step=1, sample_index=1):
            for name, attributes in [("chat", {first!r}), ("calculator", {tool!r}), ("chat", {second!r})]:
                with span(name, attributes=attributes):
                    pass
        with trajectory(step=1, sample_index=2), span("ChatCompletion", attributes={openinference!r}):
            pass
        with trajectory(step=1, sample_index=3), span("chat", attributes={broken!r}):
            pass
    """
    found, _, log = recorded(tmp_path, code)
    known = found["1/1/0"]
    assert [(turn.role, turn.text) for turn in known.turns] == [
        ("system", "Be brief."),
        ("user", "What is 17 * 3?"),
        ("assistant", ""),
        ("tool", "51"),
        ("assistant", "It is 51."),
    ]
    (asked_for,) = known.tool_calls
    assert (asked_for.name, asked_for.arguments, asked_for.result) == (
        "calculator",
        {"expression": "17*3"},
        "51",
    )
    assert known.turns[-1].finish_reason == "stop"
    assert [turn.text for turn in found["1/2/0"].turns] == ["hello", "hi"]
    assert len(found["1/3/0"].spans) == 2
    assert "no generation" not in log
    assert "without a call of a function decorated" not in log


@pytest.mark.slow
def test_requests_of_an_instrumented_client_are_recorded_and_those_of_exporters_never(tmp_path: Path) -> None:
    code = """
        import httpx
        from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor
        provide()
        HTTPXClientInstrumentor().instrument()
        trackway.configure(store="store", sync="inline", backend="elsewhere", capture_otel=True)
        with httpx.Client() as client, trajectory(step=1, sample_index=1):
            assert client.get(sys.argv[1] if len(sys.argv) > 1 else os.environ["ADDRESS"]).text == "well"
        print(trackway.flush(60).pending, len(memory.get_finished_spans()))
    """
    exporter = """
        import os
        import httpx
        from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

        class Exporter(SpanExporter):
            def export(self, spans):
                with httpx.Client() as client:
                    client.post(os.environ["ADDRESS"], content=str(len(spans)))
                return SpanExportResult.SUCCESS
    """
    from .programs import install_exporter

    seen: list[str] = []

    def answer(path: str) -> tuple[int, str, bytes]:
        seen.append(path)
        return 200, "text/plain", b"well"

    with web_server(answer) as address:
        found, out, _ = recorded(
            tmp_path, code, ADDRESS=f"{address}/here", **install_exporter(tmp_path, exporter)
        )
    assert out.split() == ["0", "1"]
    assert len(seen) == 2
    (known,) = found.values()
    assert [item.name for item in known.spans] == ["trajectory", "GET"]
    assert known.spans[1].side == "client"
    assert 200 in known.spans[1].attributes.values()


def test_a_forked_child_records_what_it_makes_itself(tmp_path: Path) -> None:
    code = f"""
        provide()
        {CONFIGURE}
        with trajectory(step=1, sample_index=1), span("around"):
            child = os.fork()
            with span("in the child" if not child else "in the parent"):
                pass
            if not child:
                trackway.flush()
                trackway.shutdown()
                os._exit(0)
            os.waitpid(child, 0)
    """
    found, _, _ = recorded(tmp_path, code)
    assert sorted(names(found["1/1/0"])) == [
        "    in the child",
        "    in the parent",
        "  around",
        "trajectory",
    ]
    status = open_store(tmp_path / "store").status()
    assert (status.recorded, status.dropped) == (4, 0)


def test_the_setting_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from trackway.trace.config import load_config

    assert not load_config().capture_otel
    monkeypatch.setenv("TRACKWAY_CAPTURE_OTEL", "1")
    assert load_config().capture_otel
    with pytest.raises(
        trackway.ConfigError, match="capture_otel='sometimes' is not allowed; expected true or"
    ):
        load_config(capture_otel="sometimes")
