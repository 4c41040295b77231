"""Makes spans on a provider of our own and hands the finished ones to the writer."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider, sampling
from opentelemetry.sdk.trace.id_generator import IdGenerator

from trackway.samplers import HeadSampler

from .. import semconv
from .calls import Call, Target
from .scope import NotSampled, Rollout, Scope, carried_run, current
from .writer import Writer

if TYPE_CHECKING:
    from ..config import TraceConfig
    from ..model import TrajectoryKey

log = logging.getLogger("trackway")

SCHEMA_VERSION = 1


class _OsIds(IdGenerator):
    """Ids from the operating system: a trainer seeds ``random``, and ids drawn from it would repeat."""

    def generate_span_id(self) -> int:
        return int.from_bytes(os.urandom(8), "big") or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(os.urandom(16), "big") or 1


class Recorder:
    """Everything that recording needs in one process.

    Args:
        config: the settings.
        every_second: called now and then from the writer's thread.

    Attributes:
        idle: whether nothing has been asked of it yet.
        troubles: how often something went wrong inside Trackway.

    Raises:
        OSError: the store cannot be written.
    """

    def __init__(self, config: TraceConfig, every_second: Callable[[], None]) -> None:
        self.config = config
        self.token_fields = {
            **dict.fromkeys(config.prompt_fields, "prompt"),
            **dict.fromkeys(config.response_fields, "response"),
            **dict.fromkeys(config.mask_fields, "mask"),
            **dict.fromkeys(config.logprob_fields, "logprobs"),
        }
        self.troubles = 0
        self.idle = True
        self._said: set[str] = set()
        self._strict = os.environ.get("TRACKWAY_STRICT") == "1"
        self._sampler = HeadSampler(config)
        self._open: dict[int, Scope] = {}
        resource: dict[str, str | int] = {
            "service.name": "trackway",
            "service.version": version("trackway"),
            "process.pid": os.getpid(),
            semconv.SCHEMA: SCHEMA_VERSION,
        }
        # Nothing of the cluster's OTEL_* environment may steer this provider: limits, sampler and
        # resource are given, and a disabled SDK (OTEL_SDK_DISABLED) is meant for telemetry, not for this.
        unlimited = SpanLimits(
            max_span_attributes=SpanLimits.UNSET,
            max_events=SpanLimits.UNSET,
            max_links=SpanLimits.UNSET,
            max_event_attributes=SpanLimits.UNSET,
            max_link_attributes=SpanLimits.UNSET,
            max_span_attribute_length=SpanLimits.UNSET,
            max_attribute_length=SpanLimits.UNSET,
            max_attributes=SpanLimits.UNSET,
        )
        provider = TracerProvider(
            sampler=sampling.ALWAYS_ON,
            resource=Resource(resource),
            shutdown_on_exit=False,
            id_generator=_OsIds(),
            span_limits=unlimited,
        )
        provider._disabled = False
        self.tracer = provider.get_tracer("trackway")
        self.writer = Writer(self, resource, every_second)

    def sampled(self, key: TrajectoryKey) -> bool:
        """Decide whether a rollout is recorded."""
        self.idle = False
        return self._sampler.decide(key.step, key.sample_index, validate=key.validate)

    def new_rollout(
        self,
        key: TrajectoryKey | None,
        policy_version: int | str | None = None,
        experiment: str | None = None,
        run_id: str | None = None,
    ) -> Rollout:
        """Bind what is in force at this moment to a rollout: later changes do not move it."""
        config = self.config
        return Rollout(
            key,
            policy_version,
            config.project,
            experiment or config.experiment,
            run_id or config.run_id or self.active_run(),
        )

    def active_run(self) -> str | None:
        """Give the MLflow run that is active in this thread, or was where its work was carried from."""
        if "mlflow" not in self.config.backend:
            return None
        with suppress(Exception):
            # Only a program that has imported it can have a run.
            run = sys.modules["mlflow"].active_run()
            if run is not None:
                return str(run.info.run_id)
        return carried_run()

    def begin(
        self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | NotSampled | None:
        """Open the span of a decorated call.

        Returns:
            None when the call is not recorded.
        """
        self.idle = False
        parent = current()
        if isinstance(parent, NotSampled):
            return None
        if isinstance(parent, Scope) and parent.recorder is not self and not parent.recorder.writer.closed:
            return parent.recorder.begin(target, args, kwargs)  # a rollout ends where it began
        try:
            if parent is not None:
                call = Call(self, parent.rollout, parent, target, args, kwargs)
            elif self._sampler.decide(None, None, token=os.urandom(8).hex()):
                if target.kind != "rollout":
                    self.warn_once(
                        "unattached",
                        f"{target.name} ran outside of any trajectory(...) and is recorded by itself; "
                        "work that is handed to a thread needs trackway.carry",
                    )
                rollout = self.new_rollout(None)
                call = Call(self, rollout, None, target, args, kwargs)
                rollout.trace_id = f"{call.span.get_span_context().trace_id:032x}"
            else:
                return NotSampled()
            self.opened(call)
            return call
        except Exception as error:
            self.trouble(f"could not open a span for {target.name}", error)
            return None

    def opened(self, scope: Scope) -> None:
        """Remember an open span."""
        self._open[id(scope)] = scope

    def open_scopes(self) -> list[Scope]:
        """Give the spans that are open now."""
        return list(self._open.values())

    def record(self, scope: Scope) -> None:
        """Take a finished span."""
        self._open.pop(id(scope), None)
        if not self.writer.put(scope) and not self.writer.abandoned:
            self.writer.lose()

    def guard(self, work: Callable[..., None], *args: Any) -> None:
        """Run a piece of our own, and keep its failure from the traced code."""
        try:
            work(*args)
        except Exception as error:
            self.trouble("could not record a call", error)

    def warn_once(self, kind: str, text: str) -> None:
        """Tell the user something, once for each kind of it."""
        if kind not in self._said:
            self._said.add(kind)
            log.warning("%s", text)

    def trouble(self, what: str, error: BaseException | None = None) -> None:
        """Count a problem of Trackway's own, and say it once per kind.

        Raises:
            RuntimeError: only under ``TRACKWAY_STRICT=1``, which is for tests.
        """
        self.troubles += 1
        message = what if error is None else f"{what}: {type(error).__name__}: {error}"
        kind = what if error is None else f"{what} {type(error).__name__}"
        self.warn_once(kind, f"tracing problem (training goes on): {message}")
        if self._strict and error is not None:
            raise RuntimeError(message) from error
