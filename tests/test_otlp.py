"""Trajectories to OTLP receivers: what arrives, under which names, and what happens to what does not."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import certifi
import pytest
from google.protobuf import json_format
from opentelemetry import trace as otel
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status as WireStatus
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link, SpanContext, TraceFlags

import trackway
from trackway import ConfigError, attach, llm_trace, open_store, reward, rollout_trace, tool_trace, trajectory
from trackway.trace import semconv
from trackway.trace.config import TraceConfig, load_config
from trackway.trace.exporters import destinations, sync
from trackway.trace.exporters.otlp import REQUEST_BYTES, OtlpExporter
from trackway.trace.exporters.otlp_spans import genai_spans
from trackway.trace.model import Span, Trajectory
from trackway.trace.testing import Recording, recording

from .otlp_receiver import Receiver, Refusal, grpc_receiver, http_receiver, partial
from .programs import run, stop_followers
from .servers import mlflow_server, web_server
from .test_mlflow import rollout

Receivers = Callable[[], AbstractContextManager[Receiver]]

PROTOCOLS = [
    pytest.param((http_receiver, "http/protobuf"), id="http"),
    pytest.param((grpc_receiver, "grpc"), id="grpc"),
]


@pytest.fixture(params=PROTOCOLS)
def receiver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver that the standard variables name, for each protocol."""
    make: Receivers
    make, protocol = request.param
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with make() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.address)
        yield running


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver over HTTP that the standard variables name."""
    with http_receiver() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.address)
        yield running


def exporter() -> OtlpExporter:
    return OtlpExporter(TraceConfig())


def several(count: int) -> list[Trajectory]:
    return [rollout(project="p", n=n) for n in range(count)]


def facts(span: Any) -> dict[str, Any]:
    """Give the attributes of a span as it came over the wire."""
    return {item.key: value_of(item.value) for item in span.attributes}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def ids(spans: list[Any]) -> set[str]:
    return {span.trace_id.hex() for span in spans}


# What arrives


@llm_trace
def generate(messages: list[dict[str, Any]], temperature: float, model: str) -> dict[str, Any]:
    if len(messages) > 1:
        return {"role": "assistant", "content": "It is 51.", "finish_reason": "stop"}
    function = {"name": "calculator", "arguments": '{"expression": "17*3"}'}
    call = {"id": "c1", "type": "function", "function": function}
    choice = {
        "message": {"role": "assistant", "content": "", "tool_calls": [call]},
        "finish_reason": "tool_calls",
    }
    return {"choices": [choice], "usage": {"prompt_tokens": 12, "completion_tokens": 7}}


@tool_trace
def calculator(expression: str) -> str:
    otel.get_current_span().add_link(SpanContext(7, 8, False, TraceFlags(1)), {"why": "cache"})
    if expression == "0/0":
        raise ValueError("no")
    return "51"


@rollout_trace
def solve(question: str) -> str:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    answer = generate(messages, temperature=0.5, model="qwen3")
    messages.append(answer["choices"][0]["message"])
    messages.append({"role": "tool", "tool_call_id": "c1", "content": calculator(expression="17*3")})
    return str(generate(messages, temperature=0.5, model="qwen3")["content"])


def record(n: int = 0) -> None:
    with trajectory(step=3, sample_index="a b", rollout_n=n, policy_version=9):
        solve("What is 17 * 3?")
        reward("correct", 1.0, explanation="it is")
        reward("odd", math.nan)


@pytest.mark.slow
def test_a_receiver_gets_every_span_under_the_names_of_the_conventions(receiver: Receiver) -> None:
    with recording() as recorded:
        record()
        (known,) = recorded.trajectories()
    assert exporter().export_trajectories([known]) == {}
    spans = {span.span_id.hex(): span for span in receiver.spans}
    assert spans.keys() == {span.span_id for span in known.spans}
    for span in known.spans:
        sent = spans[span.span_id]
        assert (sent.trace_id.hex(), sent.parent_span_id.hex()) == (span.trace_id, span.parent_id or "")
        assert (sent.start_time_unix_nano, sent.end_time_unix_nano) == (span.start_ns, span.end_ns)
        assert sent.name == span.name
        assert sent.status.code == WireStatus.STATUS_CODE_OK
        client = WireSpan.SPAN_KIND_CLIENT if span.kind == "llm" else WireSpan.SPAN_KIND_INTERNAL
        assert sent.kind == client
        told = facts(sent)
        assert (told["trackway.step"], told["trackway.sample_index"], told["trackway.rollout_n"]) == (
            3,
            "a b",
            0,
        )
        assert (told["trackway.policy_version"], told["trackway.validate"]) == (9, False)
    by_name = {span.name: span for span in receiver.spans}
    tool = facts(by_name["calculator"])
    assert tool["gen_ai.operation.name"] == "execute_tool"
    assert tool["gen_ai.tool.name"] == "calculator"
    assert json.loads(tool["gen_ai.tool.call.arguments"]) == {"expression": "17*3"}
    assert (tool["gen_ai.tool.call.result"], tool["gen_ai.tool.call.id"]) == ("51", "c1")
    (link,) = by_name["calculator"].links
    assert (link.trace_id.hex(), link.span_id.hex()) == (f"{7:032x}", f"{8:016x}")
    assert {item.key: item.value.string_value for item in link.attributes} == {"why": "cache"}
    (first, second) = sorted(
        (span for span in receiver.spans if span.name == "generate"),
        key=lambda span: span.start_time_unix_nano,
    )
    asked = facts(first)
    assert asked["gen_ai.operation.name"] == "chat"
    assert (asked["gen_ai.usage.input_tokens"], asked["gen_ai.usage.output_tokens"]) == (12, 7)
    assert (asked["gen_ai.request.model"], asked["gen_ai.request.temperature"]) == ("qwen3", 0.5)
    question = {"role": "user", "parts": [{"type": "text", "content": "What is 17 * 3?"}]}
    call = {"type": "tool_call", "id": "c1", "name": "calculator", "arguments": {"expression": "17*3"}}
    assert json.loads(asked["gen_ai.input.messages"]) == [question]
    assert json.loads(asked["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [call], "finish_reason": "tool_call"}
    ]
    given = json.loads(facts(second)["gen_ai.input.messages"])
    assert given[-1] == {
        "role": "tool",
        "parts": [{"type": "tool_call_response", "id": "c1", "response": "51"}],
    }
    said = json.loads(facts(second)["gen_ai.output.messages"])
    answer = {
        "role": "assistant",
        "parts": [{"type": "text", "content": "It is 51."}],
        "finish_reason": "stop",
    }
    assert said == [answer]
    root = by_name["trajectory"]
    assert facts(root)["gen_ai.operation.name"] == "invoke_agent"
    assert json.loads(facts(root)["gen_ai.input.messages"]) == [question]
    assert json.loads(facts(root)["gen_ai.output.messages"])[-1] == answer
    scores = [facts(event) for event in root.events if event.name == "gen_ai.evaluation.result"]
    assert [score["gen_ai.evaluation.name"] for score in scores] == ["correct", "odd"]
    assert scores[0]["gen_ai.evaluation.score.value"] == 1.0
    assert scores[0]["gen_ai.evaluation.explanation"] == "it is"
    assert math.isnan(scores[1]["gen_ai.evaluation.score.value"])
    (resource,) = {request.data.resource_spans[0].resource.SerializeToString() for request in receiver.taken}
    assert b"service.name" in resource
    assert b"trackway" in resource


def spans_of(known: Trajectory) -> dict[str, Any]:
    """Give the spans that a receiver would get, by name."""
    return {span.name: span for span in genai_spans(known, "default", {})}


def test_how_a_rollout_failed_is_told_and_its_cause_stands_on_the_span_that_raised() -> None:
    with recording() as recorded:
        with pytest.raises(ValueError, match="no"), trajectory(step=1, sample_index=1):
            calculator(expression="0/0")
        (known,) = recorded.trajectories()
    spans = spans_of(known)
    for span in spans.values():
        assert not span.status.is_ok
        assert span.status.description == "ValueError: no"
    (event,) = spans["calculator"].events
    assert (event.name, event.attributes["exception.message"]) == ("exception", "no")


def test_what_was_attached_later_stands_on_the_root() -> None:
    with recording() as recorded:
        record()
        attach("3/a b/0".replace(" ", "%20"), rewards={"judge": 0.25}, trained_step=4)
        (known,) = recorded.trajectories()
    spans = spans_of(known)
    assert len(spans) == 4
    root = spans["trajectory"]
    names = [event.attributes["gen_ai.evaluation.name"] for event in root.events]
    assert names == ["correct", "odd", "judge"]
    assert root.attributes["trackway.trained_step"] == 4


def test_a_rollout_whose_root_was_lost_gets_one_with_its_name() -> None:
    whole = rollout(project="p", step=5, sample="x")
    spans = genai_spans(replace(whole, spans=whole.spans[1:], status="died"), "e", {})
    roots = [span for span in spans if span.parent is None]
    assert len(roots) == 1
    assert roots[0].context.span_id == int(whole.spans[0].span_id, 16)
    assert (roots[0].attributes["trackway.step"], roots[0].attributes["trackway.sample_index"]) == (5, "x")
    assert not roots[0].status.is_ok


def test_images_and_reasoning_are_parts_of_their_own() -> None:
    @llm_trace
    def look(messages: list[dict[str, Any]]) -> str:
        return "a cat"

    data = base64.b64encode(b"png").decode()
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
    ]
    with recording() as recorded:
        with trajectory(step=1, sample_index=1):
            look([{"role": "user", "content": parts}])
        (known,) = recorded.trajectories()
    (sent,) = [span for span in spans_of(known).values() if span.name.endswith("look")]
    (message,) = json.loads(sent.attributes["gen_ai.input.messages"])
    assert message["parts"] == [
        {"type": "text", "content": "what?"},
        {"type": "blob", "modality": "image", "mime_type": "image/png", "content": data},
        {"type": "uri", "modality": "image", "uri": "https://example.org/cat.png"},
    ]


def test_hostile_values_become_something_that_every_encoder_takes() -> None:
    odd = "\ud800"
    known = rollout(project="p")
    first = replace(
        known.spans[0],
        name=f"{odd} name" * 100,
        attributes={
            **known.spans[0].attributes,
            f"k{odd}": odd,
            "huge": 2**70,
            "none": None,
            "nested": {"a": [None, 2**70, odd]},
            "raw": b"\xff",
        },
    )
    (root, *_) = genai_spans(replace(known, spans=(first, *known.spans[1:])), "e", {})
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    sent = encode_spans([root]).resource_spans[0].scope_spans[0].spans[0]
    found = {item.key: item.value for item in sent.attributes}
    assert found["huge"].string_value == str(2**70)
    assert "none" not in found
    assert found["raw"].bytes_value == b"\xff"
    assert len(sent.name) <= 250


# The journal


def test_every_line_of_the_journal_is_a_traces_data_of_otlp() -> None:
    with recording(capture_otel=True) as recorded:
        record()
        with pytest.raises(ValueError, match="no"), trajectory(step=1, sample_index=1):
            trackway.annotate(odd=[math.inf, {"\ud800": None}], ids=2**70)
            calculator(expression="0/0")

        @llm_trace
        def tokens(prompt_ids: list[int]) -> dict[str, Any]:
            return {"token_ids": [1, 2, 3], "log_probs": [-0.5, -1.0, math.nan], "response_mask": [1, 0, 1]}

        with trajectory(step=2, sample_index=2):
            tokens([4, 5])
        attach("2/2/0", advantages=[0.5, 0.5], rewards={"judge": -math.inf})
        recorded.status()
        lines = [
            line for path in recorded.path.glob("journal/*.jsonl") for line in path.read_text().splitlines()
        ]
        count = len(recorded.spans())
    spans = []
    for line in lines:
        data = json.loads(line)
        for span in _spans_in(data):
            for name in ("traceId", "spanId", "parentSpanId"):
                _as_protobuf(span, name)
            for link in span.get("links", ()):
                _as_protobuf(link, "traceId")
                _as_protobuf(link, "spanId")
        parsed = json_format.ParseDict(data, TracesData())
        for resource in parsed.resource_spans:
            assert "service.name" in {item.key for item in resource.resource.attributes}
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert len(spans) == count == 10
    for span in spans:
        assert (len(span.trace_id), len(span.span_id), len(span.parent_span_id) in (0, 8)) == (16, 8, True)
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    assert {span.kind for span in spans} == {WireSpan.SPAN_KIND_INTERNAL, WireSpan.SPAN_KIND_CLIENT}
    assert sum(len(span.links) for span in spans) == 2
    scores = [
        facts(event)["gen_ai.evaluation.score.value"]
        for span in spans
        for event in span.events
        if event.name == semconv.EVALUATION_EVENT
    ]
    assert -math.inf in scores
    assert any(math.isnan(score) for score in scores)


def _spans_in(data: Any) -> Iterator[dict[str, Any]]:
    for resource in data["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            yield from scope["spans"]


def _as_protobuf(item: dict[str, Any], name: str) -> None:
    """Ids are hexadecimal in OTLP's JSON, the one place where it leaves protobuf's own mapping."""
    item[name] = base64.b64encode(bytes.fromhex(item[name])).decode()


# The standard variables


@pytest.mark.slow
def test_headers_compression_and_the_endpoint_of_traces_are_those_of_the_variables(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = several(5)
    exporter().export_trajectories(known)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x,tenant=a")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-trainer")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    exporter().export_trajectories(known)
    plain, packed = receiver.requests
    assert (packed.headers["authorization"], packed.headers["tenant"]) == ("Bearer x", "a")
    assert len(plain.spans) == len(packed.spans) == 25
    if plain.path:  # gRPC unpacks before anybody can look
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.size < plain.size / 3
        assert plain.path == "/v1/traces"
    (resource,) = packed.data.resource_spans
    told = facts(resource.resource)
    assert (told["service.name"], told["deployment.environment"]) == ("my-trainer", "test")


@pytest.mark.slow
def test_the_variables_for_traces_win_over_the_general_ones(
    http: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "tenant=general")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{http.address}/my/own/path")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "tenant=traces")
    exporter().export_trajectories(several(1))
    (request,) = http.requests
    assert (request.path, request.headers["tenant"]) == ("/my/own/path", "traces")


@pytest.mark.slow
def test_a_receiver_that_does_not_answer_in_time_is_away(
    http: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    http.answer = lambda request: partial(int(not release.wait(60)), "")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with pytest.raises(ConnectionError, match=r"v1/traces is away: ReadTimeout"):
        exporter().export_trajectories(several(1))
    release.set()
    assert len(http.requests) == 1


@pytest.mark.slow
def test_the_certificate_of_a_receiver_is_checked_against_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = certificate(tmp_path)
    with http_receiver(files) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.address)
        with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            exporter().export_trajectories(several(1))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", certifi.where())  # says nothing about this receiver
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", files[0])
        assert exporter().export_trajectories(several(1)) == {}
        assert len(receiver.spans) == 5


def certificate(folder: Path) -> tuple[str, str]:
    """Make a certificate for 127.0.0.1 that signs itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "receiver")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(folder / "cert.pem"), str(folder / "key.pem")


def test_a_protocol_that_is_not_supported_is_an_error_when_it_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(
        ConfigError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL='http/json' .*use http/protobuf or grpc"
    ):
        trackway.configure(store=tmp_path / "store", backend="otlp", sync="off")


@pytest.mark.slow
@pytest.mark.parametrize("way", PROTOCOLS)
def test_the_variables_reach_the_process_that_exports(way: tuple[Receivers, str], tmp_path: Path) -> None:
    make, protocol = way
    code = """
        trackway.configure(store="store", backend="otlp")
        for number in range(20):
            with trajectory(step=number, sample_index=1):
                call(number)
        print(trackway.flush(60).pending, os.getpid())
    """
    with make() as receiver:
        done = run(
            tmp_path,
            code,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.address,
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
            OTEL_EXPORTER_OTLP_HEADERS="x-who=me",
        )
        stop_followers(tmp_path / "store")
        assert done.stdout.split()[0] == "0", done.stderr
        assert len(receiver.spans) == 40
        assert {request.headers["x-who"] for request in receiver.requests} == {"me"}


# What does not arrive


@pytest.mark.slow
def test_rejected_spans_are_refused_in_the_words_of_the_receiver_and_nothing_is_sent_twice(
    receiver: Receiver,
) -> None:
    bad = rollout(project="p", n=77)
    words = "attribute too odd"

    def answer(request: Any) -> Any:
        return partial(2, words) if bad.trace_id in ids(request.spans) else None

    receiver.answer = answer
    work = exporter()
    assert work.export_trajectories([bad]) == {bad.trace_id: f"2 of 5 spans were rejected: {words}"}
    assert len(receiver.requests) == 1
    # It does not say which spans it means: from now on each trajectory goes alone, so that one can tell.
    assert work.export_trajectories([*several(3), bad]) == {
        bad.trace_id: f"2 of 5 spans were rejected: {words}"
    }
    assert [len(ids(request.spans)) for request in receiver.requests[1:]] == [1] * 4


@pytest.mark.slow
def test_trajectories_of_a_request_with_rejected_spans_are_none_of_them_counted_as_exported(
    receiver: Receiver,
) -> None:
    receiver.answer = lambda request: partial(1, "no")
    known = several(3)
    refused = exporter().export_trajectories(known)
    assert refused.keys() == {item.trace_id for item in known}
    assert len(receiver.requests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 502, 503, 504, "UNAVAILABLE", "RESOURCE_EXHAUSTED"])
def test_a_receiver_that_is_away_is_asked_once_and_left_alone_as_long_as_it_says(
    status: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_http = isinstance(status, int)
    with (http_receiver if is_http else grpc_receiver)() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf" if is_http else "grpc")
        receiver.answer = lambda request: Refusal(status, "come again")
        work = exporter()
        with pytest.raises(ConnectionError, match=f"{status}: come again"):
            work.export_trajectories(several(3))
        assert len(receiver.requests) == 1
        receiver.answer = lambda request: Refusal(status, "come again", "3600")
        with pytest.raises(ConnectionError, match="is away"):
            work.export_trajectories(several(3))
        receiver.answer = lambda request: None
        with pytest.raises(ConnectionError, match=r"asked to be left alone, for 3[56]\d\d s more"):
            work.export_trajectories(several(3))
        assert len(receiver.requests) == 2
        assert exporter().export_trajectories(several(3)) == {}
        assert len(receiver.spans) == 15


@pytest.mark.slow
def test_a_date_may_say_until_when(http: Receiver) -> None:
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
    http.answer = lambda request: Refusal(503, "", later.strftime("%a, %d %b %Y %H:%M:%S GMT"))
    work = exporter()
    for words in ("is away", r"for 3[56]\d\d s more"):
        with pytest.raises(ConnectionError, match=words):
            work.export_trajectories(several(1))
    assert len(http.requests) == 1


@pytest.mark.slow
def test_the_follower_tries_again_until_everything_is_there(receiver: Receiver) -> None:
    answers: list[Any] = [Refusal(503 if over_http() else "UNAVAILABLE", "not now")] * 2
    receiver.answer = lambda request: answers.pop() if answers else None
    with recording() as recorded:
        for n in range(4):
            record(n)
        trackway.flush()
        work = follower(recorded)
        assert [work.step(patient=False) for _ in range(3)] == [False, False, True]
        status = open_store(recorded.path).status()
    assert (status.exported, status.pending) == (status.recorded, 0)
    assert len(receiver.requests) == 3
    assert len(receiver.spans) == status.recorded


def over_http() -> bool:
    return os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] != "grpc"


def follower(recorded: Recording, *backends: str) -> sync.Follower:
    """Give a follower that sends a store's trajectories by OTLP."""
    config = load_config(store=recorded.path, backend=list(backends or ("otlp",)), sync="off")
    sync.save_settings(config)
    return sync.Follower(recorded.path, config)


@pytest.mark.slow
def test_only_what_is_bad_is_refused_and_counted(receiver: Receiver) -> None:
    with recording() as recorded:
        for n in range(20):
            record(n)
        known = recorded.trajectories()
        bad = {known[3].trace_id, known[11].trace_id}
        status = 400 if over_http() else "INVALID_ARGUMENT"
        receiver.answer = lambda request: Refusal(status, "odd") if bad & ids(request.spans) else None
        work = follower(recorded)
        assert work.step()
        counts = open_store(recorded.path).status().destinations["otlp"]
    assert ids(receiver.spans) == {item.trace_id for item in known} - bad
    assert counts.refused == sum(len(item.spans) for item in known if item.trace_id in bad)
    assert counts.exported == len(receiver.spans)
    assert len(receiver.requests) <= 4 * 5 + 1


@pytest.mark.slow
def test_a_receiver_that_refuses_everything_from_the_beginning_is_itself_the_trouble(http: Receiver) -> None:
    http.answer = lambda request: Refusal(400, "no such tenant")
    work = exporter()
    with pytest.raises(
        RuntimeError, match=r"refuses everything \(HTTP 400: no such tenant\); look whether OTEL_"
    ):
        work.export_trajectories(several(3))
    http.answer = lambda request: None
    assert work.export_trajectories(several(3)) == {}
    http.answer = lambda request: Refusal(400, "no")
    assert len(work.export_trajectories(several(3))) == 3


@pytest.mark.slow
def test_what_comes_one_by_one_waits_until_the_receiver_has_taken_something(http: Receiver) -> None:
    bad, *others = several(4)
    http.answer = lambda request: (
        Refusal(400, "no such tenant") if bad.trace_id in ids(request.spans) else None
    )
    work = exporter()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"refuses everything \(HTTP 400: no such tenant\)"):
            work.export_trajectories([bad])
    assert work.export_trajectories([bad, *others]) == {bad.trace_id: "HTTP 400: no such tenant"}
    assert work.export_trajectories([bad]) == {bad.trace_id: "HTTP 400: no such tenant"}


@pytest.mark.slow
def test_a_web_page_is_no_receiver_whatever_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    page = 200, "text/html; charset=utf-8", b"<!doctype html><title>Traces</title>"
    work = exporter()
    with web_server(lambda path: page) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        with pytest.raises(RuntimeError, match=r"HTTP 200 and a web page.*OTEL_EXPORTER_OTLP_ENDPOINT"):
            work.export_trajectories(several(3))
    assert work.sent_bytes == 0


@pytest.mark.slow
def test_credentials_that_are_refused_lose_nothing_and_are_named(receiver: Receiver) -> None:
    statuses = [401, 403] if over_http() else ["UNAUTHENTICATED", "PERMISSION_DENIED"]
    work = exporter()
    for status in statuses:
        receiver.answer = lambda request, status=status: Refusal(status, "who are you?")  # type: ignore[misc]
        with pytest.raises(RuntimeError, match=f"{status}: who are you.*OTEL_EXPORTER_OTLP_HEADERS"):
            work.export_trajectories(several(4))
    assert len(receiver.requests) == 2
    receiver.answer = lambda request: None
    assert work.export_trajectories(several(4)) == {}


@pytest.mark.slow
def test_an_error_of_the_receiver_is_blamed_on_a_trajectory_only_where_others_are_taken(
    receiver: Receiver,
) -> None:
    status = 500 if over_http() else "INTERNAL"
    known = several(8)
    work = exporter()
    receiver.answer = lambda request: Refusal(status, "oops")
    with pytest.raises(ConnectionError, match=f"fails: .*{status}: oops"):
        work.export_trajectories(known)
    receiver.answer = lambda request: (
        Refusal(status, "oops") if known[2].trace_id in ids(request.spans) else None
    )
    refused = work.export_trajectories(known)
    assert refused.keys() == {known[2].trace_id}


# Sizes


def large(turns: int, characters: int) -> Trajectory:
    """Give a trajectory with generations of many characters, none of which compress."""
    whole = rollout(project="large")
    first = whole.spans[2]
    made: tuple[Span, ...] = tuple(
        replace(first, span_id=f"{number:016x}", attributes={**first.attributes, "text": "é" * characters})
        for number in range(1, turns + 1)
    )
    return replace(whole, spans=(*whole.spans, *made))


@pytest.mark.slow
def test_a_trajectory_larger_than_a_message_goes_in_several(receiver: Receiver) -> None:
    known = large(turns=40, characters=300_000)  # 24 MB
    assert exporter().export_trajectories([*several(2), known]) == {}
    assert len({span.span_id for span in receiver.spans}) == len(receiver.spans) == 10 + 5 + 40
    assert len(receiver.requests) < 20
    for request in receiver.requests:
        assert sum(span.ByteSize() for span in request.spans) <= REQUEST_BYTES


@pytest.mark.slow
def test_a_span_larger_than_a_message_is_cut_and_says_so(receiver: Receiver) -> None:
    assert exporter().export_trajectories([large(turns=1, characters=5_000_000)]) == {}
    (span,) = [span for span in receiver.spans if span.span_id == (1).to_bytes(8, "big")]
    assert span.ByteSize() < 2**21 + 2**16
    assert "characters are left out here" in facts(span)["text"]


@pytest.mark.slow
def test_a_receiver_that_takes_less_gets_less_at_once(http: Receiver) -> None:
    http.answer = lambda request: Refusal(413, "too large") if request.size > 50_000 else None
    known = large(turns=6, characters=30_000)
    assert exporter().export_trajectories([*several(3), known]) == {}
    assert ids(http.spans) == {item.trace_id for item in [*several(3), known]}
    assert len({span.span_id for span in http.spans}) == 15 + 5 + 6
    assert all(request.size <= 50_000 for request in http.taken)


@pytest.mark.slow
def test_a_grpc_server_with_a_small_limit_gets_less_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc_receiver([("grpc.max_receive_message_length", 50_000)]) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        known = large(turns=6, characters=30_000)
        assert exporter().export_trajectories([*several(3), known]) == {}
        assert len({(span.trace_id, span.span_id) for span in receiver.spans}) == 15 + 5 + 6


# Other ways in, and MLflow's server


@pytest.mark.slow
def test_spans_of_any_tracer_provider_are_sent_when_their_root_has_come(receiver: Receiver) -> None:
    provider = TracerProvider()
    work = exporter()
    provider.add_span_processor(SimpleSpanProcessor(work))
    tracer = provider.get_tracer("mine")
    with tracer.start_as_current_span("root"):
        with tracer.start_as_current_span("child", links=[Link(SpanContext(1, 2, False, TraceFlags(1)))]):
            pass
        assert receiver.requests == []
    provider.shutdown()
    assert sorted(span.name for span in receiver.spans) == ["child", "root"]
    assert sum(len(span.links) for span in receiver.spans) == 1


@pytest.mark.slow
def test_what_an_mlflow_server_is_sent_looks_as_what_is_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    from trackway.trace.exporters.mlflow import MlflowExporter

    def known(project: str) -> list[Trajectory]:
        failed = rollout(project=project, n=2, status="error", error="boom", tool_error="ValueError: no")
        return [
            rollout(project=project, rewards={"correct": 0.0, "style": 0.5}),
            rollout(project=project, n=1),
            failed,
        ]

    with mlflow_server(tmp_path / "server") as server:
        client = mlflow.MlflowClient(tracking_uri=server.address)
        place = client.create_experiment("by-otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-mlflow-experiment-id={place}")
        assert exporter().export_trajectories(known("by-otlp")) == {}
        config = TraceConfig(tracking_uri=server.address, store=tmp_path / "store")
        assert MlflowExporter(config).export_trajectories(known("direct")) == {}
        other = client.get_experiment_by_name("direct").experiment_id
        sent, written = (
            {trace.info.tags["rollout_n"]: trace for trace in client.search_traces(locations=[where])}
            for where in (place, other)
        )
        found = client.search_traces(
            locations=[place], filter_string="tags.step = '1' AND tags.`reward.style` = '0.5'"
        )
    assert sent.keys() == written.keys() == {"0", "1", "2"}
    assert [trace.info.tags["rollout_n"] for trace in found] == ["0"]
    for name, trace in sent.items():
        twin = written[name]
        assert trace.info.state == twin.info.state
        assert trace.info.request_preview == twin.info.request_preview
        assert trace.info.execution_duration == twin.info.execution_duration
        mine = {"mlflow.artifactLocation", *(tag for tag in trace.info.tags if tag.startswith("reward."))}
        tags = {tag: value for tag, value in trace.info.tags.items() if tag not in mine}
        assert tags == {tag: value for tag, value in twin.info.tags.items() if tag not in mine}
        for key in ("mlflow.trace.session", "mlflow.trace.tokenUsage"):
            assert trace.info.trace_metadata[key] == twin.info.trace_metadata[key]
        assert len(trace.data.spans) == len(twin.data.spans) == 5
        for span, other_span in zip(trace.data.spans, twin.data.spans, strict=True):
            for what in ("name", "span_type", "inputs", "outputs", "status", "start_time_ns", "end_time_ns"):
                assert getattr(span, what) == getattr(other_span, what), what


@pytest.mark.slow
def test_nothing_that_other_destinations_do_delays_or_loses_what_goes_by_otlp(http: Receiver) -> None:
    from .test_sync import Destination

    with recording() as recorded:
        record()
        trackway.flush()
        work = follower(recorded)
        away, there = Destination(), Destination()
        away.away = 100
        config = load_config(store=recorded.path, sync="off")
        object.__setattr__(config, "backend", ("away", "otlp", "there"))
        work = sync.Follower(recorded.path, config)
        for name, made in (("away", away), ("there", there)):
            work._destinations[name] = destinations.Destination(name, name, config, made)
        assert not work.step(patient=False)
        count = recorded.status().recorded
    assert len(http.spans) == len(there.spans) == count == 5
    assert away.spans == []
