"""The ways to trace that are compared: Trackway, and the real packages that one would use instead.

``opened`` gives a way by its name, set up in the current directory, which should be empty. All of them trace
the same plain functions; what they have in common is ``Way``.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from opentelemetry.sdk.trace import TracerProvider

UNTRACED = "untraced"
BARE = "bare SDK span, ten attributes"
BATCH = "SDK with BatchSpanProcessor, ten attributes"
OURS = "Trackway"
MLFLOW = "MLflow"
WEAVE = "weave.op"
VERL = "verl with MLflow and token2text"

PEERS = Path(__file__).parent.parent / "build" / "peers"
"""Where ``make bench`` puts packages of which only a module is loaded."""
_VERL = PEERS / "verl" / "utils" / "rollout_trace.py"
_PATIENCE = 600.0


@dataclass
class Way:
    """One way to trace.

    Attributes:
        op: gives a function traced: its kind (``rollout``, ``llm`` or ``tool``) and the function.
        rollout: is the block around a rollout, given step, sample and number.
        reward: gives the rollout that runs a reward.
        drain: waits until what was traced so far is where it goes.
        kept: counts the spans that are there; None where nothing is kept.
    """

    op: Callable[[str, Callable[..., Any]], Callable[..., Any]]
    rollout: Callable[[int, int, int], AbstractContextManager[Any]] = lambda step, sample, n: nullcontext()
    reward: Callable[[float], None] = lambda value: None
    drain: Callable[[], object] = lambda: None
    kept: Callable[[], int] | None = None


def installed(name: str) -> bool:
    """Say whether a way's package is here."""
    if name == VERL:
        return _VERL.is_file() and importlib.util.find_spec("mlflow") is not None
    module = {MLFLOW: "mlflow", WEAVE: "weave", BATCH: "opentelemetry.exporter.otlp.proto.http"}.get(name)
    try:
        return module is None or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def opened(name: str, **settings: Any) -> AbstractContextManager[Way]:
    """Set a way up in the current directory.

    Args:
        name: one of the names above.
        settings: of ``trackway.configure``; ``tokenizer`` is what verl's decodes with as well.
    """
    if name == UNTRACED:
        return nullcontext(Way(lambda kind, fn: fn))
    if name == BARE:
        # No processor: what it makes goes nowhere.
        return nullcontext(Way(_sdk_op(TracerProvider())))
    if name == BATCH:
        return _batch()
    if name == OURS:
        return _trackway(**settings)
    if name == MLFLOW:
        return _mlflow()
    if name == WEAVE:
        return _weave()
    if name == VERL:
        return _verl(settings.get("tokenizer"))
    raise ValueError(f"no way is called {name!r}")


def _sdk_op(provider: TracerProvider) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    tracer = provider.get_tracer("benchmark")

    def op(kind: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        name = fn.__name__

        async def waits(*args: Any, **kwargs: Any) -> Any:
            with tracer.start_as_current_span(name) as span:
                for number in range(10):
                    span.set_attribute(f"attribute.{number}", number)
                return await fn(*args, **kwargs)

        def plain(*args: Any, **kwargs: Any) -> Any:
            with tracer.start_as_current_span(name) as span:
                for number in range(10):
                    span.set_attribute(f"attribute.{number}", number)
                return fn(*args, **kwargs)

        return waits if inspect.iscoroutinefunction(fn) else plain

    return op


@contextmanager
def _batch() -> Iterator[Way]:
    """The SDK's own processor at its defaults, with OpenTelemetry's own exporter to a stand-in collector."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    with _stand_in() as address:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{address}/v1/traces")))
        yield Way(
            _sdk_op(provider),
            drain=lambda: provider.force_flush(60_000),
            kept=lambda: int(json.load(urllib.request.urlopen(f"{address}/benchmark/counts"))["spans"]),
        )
        provider.shutdown()


@contextmanager
def _stand_in() -> Iterator[str]:
    """Run a stand-in for a server as a process of its own; give its address."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("stand_in.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin and server.stdout
    try:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
    finally:
        with suppress(BrokenPipeError):
            server.stdin.close()
        server.wait(10)


@contextmanager
def _trackway(**settings: Any) -> Iterator[Way]:
    import trackway
    from trackway.trace.exporters.sync import is_followed

    store = Path("store").absolute()
    config = trackway.configure(**{"store": store, "sync": "off", "project": "benchmark", **settings})
    ops = {"rollout": trackway.rollout_trace, "llm": trackway.llm_trace, "tool": trackway.tool_trace}

    def drain() -> None:
        status = trackway.flush(_PATIENCE)
        if status.pending and config.sync != "off":
            raise RuntimeError(f"{status.pending} spans are still pending after {_PATIENCE:.0f} s")

    try:
        yield Way(
            lambda kind, fn: ops[kind](fn),
            lambda step, sample, n: trackway.trajectory(step=step, sample_index=sample, rollout_n=n),
            lambda value: trackway.reward("reward", value),
            drain,
            lambda: spans_in_journal(store),
        )
    finally:
        trackway.shutdown(_PATIENCE)
        while config.sync == "process" and is_followed(store):  # it leaves when its last writer has
            time.sleep(0.1)


def spans_in_journal(store: Path) -> int:
    """Count the spans that stand in a store's journal, whatever its counters say."""
    return sum(
        line.count(b'"spanId":"')
        for path in (store / "journal").glob("*.jsonl")
        if not path.name.endswith(".open.jsonl")
        for line in path.open("rb")
        if line.endswith(b"\n")
    )


@contextmanager
def _mlflow() -> Iterator[Way]:
    """``mlflow.trace`` and ``mlflow.start_span`` as they come: asynchronous, here into SQLite."""
    import mlflow

    _fresh_database(mlflow)

    @contextmanager
    def rollout(step: int, sample: int, n: int) -> Iterator[None]:
        with mlflow.start_span("rollout"):
            tags = {"step": str(step), "sample_index": str(sample), "rollout_n": str(n), "validate": "False"}
            mlflow.update_current_trace(tags={**tags, "experiment_name": "benchmark"})
            yield

    yield Way(
        lambda kind, fn: mlflow.trace(fn, span_type={"llm": "CHAT_MODEL", "tool": "TOOL"}.get(kind, "AGENT")),
        rollout,
        drain=mlflow.flush_trace_async_logging,
        kept=lambda: rows_in_mlflow("spans"),
    )


def _fresh_database(mlflow: ModuleType) -> None:
    if not Path("mlflow.db").exists():
        mlflow.set_tracking_uri(f"sqlite:///{Path('mlflow.db').absolute()}")
        # Its artifacts would land beside the current directory's files otherwise.
        mlflow.create_experiment("benchmark", artifact_location=str(Path("artifacts").absolute()))
    mlflow.set_experiment("benchmark")


def rows_in_mlflow(table: str, database: Path = Path("mlflow.db")) -> int:
    """Count the rows of a table of MLflow's database, for instance ``spans`` or ``trace_info``."""
    with sqlite3.connect(f"file:{database.absolute()}?mode=ro", uri=True) as db:
        (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(count)


@contextmanager
def _weave() -> Iterator[Way]:
    """The real client, which talks to a stand-in for its server."""
    with _stand_in() as address:
        os.environ |= {
            "WF_TRACE_SERVER_URL": address,
            "WANDB_BASE_URL": address,
            "WANDB_API_KEY": "0" * 40,  # no account: the stand-in takes any
            "WANDB_ERROR_REPORTING": "false",
            "WEAVE_PRINT_CALL_LINK": "false",
        }
        import weave

        client = weave.init("benchmark/benchmark")
        yield Way(
            lambda kind, fn: weave.op(fn),
            lambda step, sample, n: weave.attributes({"step": step, "sample_index": sample, "rollout_n": n}),
            drain=client.flush,
        )
        weave.finish()


@contextmanager
def _verl(tokenizer: Any) -> Iterator[Way]:
    """verl's own ``verl.utils.rollout_trace``, with MLflow and token2text, as its trainer sets it up."""
    import mlflow

    _fresh_database(mlflow)
    os.environ["MLFLOW_TRACKING_URI"] = mlflow.get_tracking_uri()
    verl = load_verl()
    verl.RolloutTraceConfig.init("benchmark", "benchmark", "mlflow", token2text=True)

    class Owner:
        """verl decorates methods, and decodes with the tokenizer of their object."""

    owner: Any = Owner()
    owner.tokenizer = tokenizer

    def op(kind: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(fn)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

        async def waits(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await fn(*args, **kwargs)

        def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        method: Any = waits if inspect.iscoroutinefunction(fn) else plain
        method.__qualname__ = fn.__qualname__
        method.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])
        return verl.rollout_trace_op(method).__get__(owner)  # type: ignore[no-any-return]

    yield Way(
        op,
        lambda step, sample, n: verl.rollout_trace_attr(sample_index=sample, step=step, rollout_n=n),
        drain=mlflow.flush_trace_async_logging,
        kept=lambda: rows_in_mlflow("spans"),
    )


def load_verl() -> ModuleType:
    """Load verl's one module from its package, without the rest of verl and what that needs.

    It imports one function from verl, which gives the event loop; that is stood in for while it loads.
    """
    import asyncio

    ray_utils = ModuleType("verl.utils.ray_utils")
    ray_utils.get_event_loop = asyncio.get_running_loop  # type: ignore[attr-defined]
    stubs = {
        "verl": ModuleType("verl"),
        "verl.utils": ModuleType("verl.utils"),
        ray_utils.__name__: ray_utils,
    }
    spec = importlib.util.spec_from_file_location("verl.utils.rollout_trace", _VERL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules |= stubs
    try:
        spec.loader.exec_module(module)
    finally:
        for stub in stubs:
            del sys.modules[stub]
    return module
