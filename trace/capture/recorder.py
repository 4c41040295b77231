"""Opens the spans of this process and hands the finished ones to the writer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from trackway.samplers import HeadSampler

from .. import semconv
from ..log import logger
from . import foreign, runtime
from .calls import Call, Target
from .scope import NotSampled, Rollout, Scope, carried_run, current, hide
from .writer import Writer

if TYPE_CHECKING:
    from ..config import TraceConfig
    from ..model import TrajectoryKey

log = logger()

SCHEMA_VERSION = 1


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
        # MLflow that shares OpenTelemetry's context with others knows only spans of its own provider: below
        # one of ours its traces would have no root, and be lost.
        hide(os.environ.get("MLFLOW_USE_DEFAULT_TRACER_PROVIDER", "").lower() in ("false", "0"))
        self._open: dict[int, Scope] = {}
        resource: dict[str, str | int] = {
            "service.name": "trackway",
            "service.version": version("trackway"),
            "process.pid": os.getpid(),
            semconv.SCHEMA: SCHEMA_VERSION,
            semconv.PROJECT: config.project,
            semconv.EXPERIMENT: config.experiment,
        }
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
        if config.capture_otel:
            self.guard(foreign.look, True)
        return Rollout(
            key,
            policy_version,
            config.project,
            experiment or config.experiment,
            run_id or config.run_id or self.active_run(),
            runtime.tracked[-1] if runtime.tracked else None,
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
                rollout.trace_id = f"{call.trace_id:032x}"
            else:
                return NotSampled()
            self.opened(call)
            return call
        except Exception as error:
            self.trouble(f"could not open a span for {target.name}", error)
            return None

    def opened(self, scope: Scope) -> None:
        """Remember an open span; of too many the oldest one is given up."""
        self._open[id(scope)] = scope
        if len(self._open) > self.config.max_open_spans:
            with suppress(RuntimeError):  # another thread has opened or closed one at this moment
                oldest = next(iter(self._open.values()))
                self.expire(oldest, f"more than {self.config.max_open_spans:,} spans were open")

    def expire(self, scope: Scope, reason: str) -> None:
        """Give an open span up: what is known of it is written, and it is recorded again if it ends."""
        if self._open.pop(id(scope), None) is not None:
            self.writer.expire(scope, reason)

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
        message = what if error is None else f"{what}: {_reason(error)}"
        kind = what if error is None else f"{what} {type(error).__name__}"
        self.warn_once(kind, f"tracing problem (training goes on): {message}")
        if self._strict and error is not None:
            raise RuntimeError(message) from error


def _reason(error: BaseException) -> str:
    """Say what happened: a disk in the words of the system, all else with its kind."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
