"""One logger for all of them: what is logged once arrives in every tool, and none holds up the training."""

from __future__ import annotations

import atexit
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, get_args
from weakref import WeakSet

from ..capture import runtime
from ..config_values import ConfigError, check, show
from ..log import logger as program_log
from ..store import store_path
from . import choosing, ranks, runlog, runs
from .alerts import Alerts, Rule
from .base import ExperimentLogger, Histogram, Level, Run, Status, Unavailable
from .delivery import Delivery, save
from .frequency import KEY_METRICS, Frequency
from .generations import table
from .resolving import resolved
from .values import plain

log = program_log()

FINISH = 30.0
"""Seconds that ``finish`` waits at most."""
_MOST_QUEUED = 20_000
"""Calls that may wait to be written to the log; only a disk that hangs lets them become so many."""
_LOOKS = 20
"""Calls after which a rule whose metric never came is told to be watching nothing."""
_GRACE = 10.0
"""Seconds between SIGTERM and the end."""


class Tracker(ExperimentLogger):
    """Writes metrics, configuration, artifacts, generations and alerts of one run to several loggers.

    Everything is first written to the run's log in the store, by a thread of its own; each logger is served
    from there, by another one. What a logger did not get ``trackway sync`` brings later. No call waits for a
    logger, and none raises once the run has begun.

    Use it as a context manager, or call ``finish``::

        with Tracker(["console", "wandb"], project="math", experiment="grpo-7b", config=config) as tracker:
            tracker.log_metrics({"reward/mean": 0.4}, step=1)

    Attributes:
        run: its id, names and directory.
        finishing: whether its end has begun; what is logged then is ignored.
        writes: whether this process writes; the others of a job do nothing.
        dropped: calls that were lost, since the disk did not take them or keep up.
    """

    def __init__(
        self,
        loggers: str | Iterable[str] = ("console",),
        *,
        project: str = "trackway",
        experiment: str = "default",
        config: Any = None,
        store: str | os.PathLike[str] | None = None,
        group: str | None = None,
        all_ranks: bool = False,
        resume: str | os.PathLike[str] | None = None,
        log_frequency: int | Mapping[str, int] | None = None,
        log_interval: int | Mapping[str, int] | None = None,
        key_metrics: Sequence[str] = KEY_METRICS,
        log_val_generations: int = 10,
        alerts: Iterable[str | Rule] = (),
        on_error: Literal["raise", "offline"] = "raise",
        **settings: Mapping[str, Any],
    ) -> None:
        """Begin a run.

        Args:
            loggers: names of loggers: one, several joined by commas, or a list.
            project: what the run belongs to.
            experiment: the name of the run; several runs may have the same.
            config: of the training: a mapping, an OmegaConf object or a dataclass, nested.
            store: the directory that keeps the run. Default: where rollouts are recorded in this process,
                else ``$TRACKWAY_STORE`` or ``./trackway-store``.
            group: ties together the runs of one job, or of one experiment.
            all_ranks: let every process of a job write a run of its own, in one group, in place of the first.
            resume: the id of a run, or a directory where ``save_id`` has left it: go on with that run.
            log_frequency: write metrics in the steps that this number divides, and in the first, the last
                and those with a validation (names that begin with ``val``, ``eval`` or ``test``); or a
                mapping from patterns of names to such numbers, ``*`` for all others. Default 1: all.
            log_interval: another name for it.
            key_metrics: patterns of metrics that are written in every step and that the console shows.
            log_val_generations: samples of a validation that are shown, chosen by hash; -1 is all.
            alerts: rules such as ``reward/mean < 0.1 for 20 steps``, ``kl > 0.5`` or ``isnan(loss)``.
            on_error: what to do when a logger cannot work as it is, for want of a package or credentials:
                ``raise`` an error, or go on ``offline``: what it lacks is brought later.
            **settings: a mapping of settings for each logger, by its name: ``wandb={"offline": True}``.

        Raises:
            ConfigError: an argument is wrong, a logger cannot be used, or the run to resume is not there or
                is being written by another process.
        """
        if log_frequency is not None and log_interval is not None:
            raise ConfigError("log_frequency and log_interval are the same setting; give one of the two")
        if on_error not in ("raise", "offline"):
            raise ConfigError(f"on_error={show(on_error)} is not allowed; expected raise or offline")
        wanted = choosing.names(loggers)
        unused = sorted(set(settings) - set(choosing.known()))
        if unused:
            raise ConfigError(f"{unused[0]}={show(settings[unused[0]])}: there is no such argument or logger")
        every = log_frequency if log_frequency is not None else 1 if log_interval is None else log_interval
        self._frequency: Frequency[float | Histogram] = Frequency(every, key_metrics)
        self._alerts = Alerts(alerts)
        self._looks = 0
        self._most_generations = log_val_generations
        self._skipped: set[str] = set()
        self.finishing = False
        self._closing = threading.Lock()
        self._pid = os.getpid()
        self.dropped = 0

        me = ranks.rank()
        self.writes = all_ranks or me in (None, 0)
        project, experiment = (
            check("project", "project", project),
            check("experiment", "experiment", experiment),
        )
        name = f"{experiment}-rank{me}" if all_ranks and me is not None else experiment
        place = _place(store)
        directory = runs.find(place, resume) if resume is not None and self.writes else None
        super().__init__(runs.describe(place, project, name, group, me, directory))
        if not self.writes:
            log.info(
                "rank %s of this job logs nothing, rank 0 does; all_ranks=True lets each write a run", me
            )
            return
        kept = {}
        self._deliveries = []
        for each in wanted:
            given = settings.get(each)
            if each == "console" and isinstance(given, (Mapping, type(None))):
                given = {"key_metrics": tuple(key_metrics), **(given or {})}
            make, kept[each] = _prepare(each, given, offline=on_error == "offline")
            self._deliveries.append(Delivery(each, make, self.run))
        try:
            self._log = runlog.RunLog(self.run.directory)
        except BlockingIOError as error:
            raise ConfigError(f"run {self.run.id} cannot be resumed: {error}") from None
        except OSError as error:
            raise ConfigError(f"store={show(str(place))} cannot be written: {error}") from error
        self._resumed = self.run.resumed
        self._queue: SimpleQueue[tuple[str, float, Any] | None] = SimpleQueue()
        runs.begin(self.run, kept)
        self._put("start", {"resumed": self.run.resumed})
        self._thread = threading.Thread(target=self._write, name="trackway-run", daemon=True)
        self._thread.start()
        # By itself, since git may hang.
        look = partial(runs.record_environment, self.run)
        self._environment = threading.Thread(target=look, name="trackway-environment", daemon=True)
        self._environment.start()
        for delivery in self._deliveries:
            delivery.start()
        _living.add(self)
        # What packages of loggers have registered, to close themselves, must come after.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        runtime.tracked.append(self.run.id)
        _handle_sigterm()
        if config is not None:
            self.log_config(config)

    # What follows is called by the training. It converts, puts into a queue, and never raises.

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write metrics of one step.

        Args:
            metrics: name -> number, boolean, ``Decimal``, or array or tensor of one element of any type and
                device; larger ones become histograms, a mapping inside becomes names joined by ``/``. Other
                values are left out, which is said once for each name.
            step: not negative. Of a step logged again the values are added to those before, and replace
                those of the same name. Earlier steps may be logged later.
        """
        if not self._on():
            return
        try:
            at = self._step(step)
            if not isinstance(metrics, Mapping):
                self._say_once("metrics", f"{show(metrics)} is no mapping of names to values")
            elif at is not None:
                self._put("metrics", (at, *plain(metrics, self._skip)))
        except Exception as error:
            self._failed("metrics", error, ours=True)

    def log_config(self, config: Any) -> None:
        """Write the configuration, or more of it; secrets in it are redacted.

        Args:
            config: a mapping, an OmegaConf object or a dataclass, nested.
        """
        if not self._on():
            return
        try:
            self._put("config", {"config": resolved(config)})
        except Exception as error:
            self._failed("config", error)

    def log_artifact(self, artifact: Any, name: str) -> None:
        """Keep a file as it is now; the same content is kept once.

        Args:
            artifact: the path of a file or directory, or ``bytes``. The caller waits until it is copied into
                the store.
            name: how it is called, perhaps with slashes.
        """
        if not self._on():
            return
        try:
            self._put("artifact", runs.keep(self.run.directory, artifact, name))
        except Exception as error:
            self._failed(f"artifact {name}", error)

    def log_generations(self, rows: Iterable[Mapping[str, Any]], step: int, scores: Any = None) -> None:
        """Write what the model generated in a validation: of ``log_val_generations`` samples.

        Args:
            rows: one for each rollout: ``prompt`` (or ``input``) and ``completion`` (or ``output``), each a
                text or a list of messages; the sample it belongs to by ``sample_index`` or ``uid``, else by
                its prompt; ``rollout_n``; and any scores.
            step: the training step that the validation belongs to.
            scores: further columns, joined by key, see ``trackway.samplers.join_scores``.
        """
        if not self._on():
            return
        try:
            at = self._step(step)
            if at is not None:
                chosen, originals = table(rows, scores, self._most_generations, at)
                if chosen:
                    self._put("generations", {"step": at, "rows": chosen, "originals": originals})
        except Exception as error:
            self._failed("generations", error)

    def alert(self, title: str, text: str = "", level: Level = "warning", step: int | None = None) -> None:
        """Tell people, wherever the loggers can.

        Args:
            title: one line.
            text: what happened.
            level: ``info``, ``warning`` or ``error``; anything else counts as ``warning``.
            step: the step that it is about, if any.
        """
        if self._on():
            at = None if step is None else self._step(step)
            level = level if level in get_args(Level) else "warning"
            self._put("alert", {"title": str(title), "text": str(text), "level": level, "step": at})

    def flush(self, timeout: float = FINISH) -> None:
        """Wait until all loggers have what was logged so far.

        Args:
            timeout: seconds to wait at most.
        """
        if not self._on():
            return
        done = threading.Event()
        self._put("flush", done)
        deadline = time.monotonic() + timeout
        done.wait(timeout)
        while self.behind and time.monotonic() < deadline:
            time.sleep(0.01)

    @property
    def behind(self) -> tuple[str, ...]:
        """The loggers that lack something of what is in the run's log."""
        return tuple(each.name for each in self._deliveries if each.behind()) if self.writes else ()

    def finish(self, status: Status = "finished", timeout: float = FINISH) -> None:
        """End the run: bring everything to the loggers and close them. Later calls do nothing.

        Args:
            status: how it ended: ``finished``, ``failed`` or ``killed``.
            timeout: seconds to wait at most; what is not delivered by then ``trackway sync`` brings.
        """
        if os.getpid() != self._pid or not self.writes or not self._closing.acquire(blocking=False):
            return
        deadline = time.monotonic() + timeout
        self.finishing = True
        self._put("end", {"status": status})
        self._queue.put(None)
        self._thread.join(timeout)
        for delivery in self._deliveries:
            delivery.end(status, deadline)
        for delivery in self._deliveries:
            delivery.wait(deadline)
        self._environment.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            runs.end(self.run, status)
            self._log.close()
        self._say_what_is_missing()
        _living.discard(self)
        runtime.tracked.remove(self.run.id)
        if _signals and not _living:
            _terminate(_signals[0])

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        clean = kind is None or (issubclass(kind, SystemExit) and not getattr(rest[0], "code", 0))
        self.finish("finished" if clean else "failed")

    def save_id(self, directory: str | os.PathLike[str]) -> None:
        """Leave the run's id in a directory, such as that of a checkpoint, for ``resume``.

        Args:
            directory: made when it is not there.
        """
        if not self.writes:
            return
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            save(Path(directory) / runs.ID_FILE, {"run": self.run.id})
        except OSError as error:
            self._failed(f"id in {directory}", error)

    def _on(self) -> bool:
        if os.getpid() != self._pid:  # a forked child has the object, but none of the threads
            if "fork" not in self._skipped:
                self._skipped.add("fork")
                log.info("a child of the process that began run %s logs nothing to it", self.run.id)
            return False
        return self.writes and not self.finishing

    def _step(self, step: Any) -> int | None:
        try:
            at = operator.index(step)
            if 0 <= at < 2**63:
                return at
        except TypeError:
            pass
        self._say_once(
            f"step {show(step)}", "a step is a whole number, not negative; nothing of it is logged"
        )
        return None

    def _skip(self, name: str, reason: str) -> None:
        self._say_once(f"metric {name!r}", f"{reason}; it is left out")

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._skipped and len(self._skipped) < 1000:
            self._skipped.add(what)
            log.warning("%s: %s", what, text)

    def _failed(self, what: str, error: Exception, *, ours: bool = False) -> None:
        if ours and os.environ.get("TRACKWAY_STRICT") == "1":
            raise error
        self._say_once(f"{what} {type(error).__name__}", f"could not be logged: {error}")

    def _put(self, kind: str, data: Any) -> None:
        if self._queue.qsize() < _MOST_QUEUED or kind in ("end", "flush"):
            self._queue.put((kind, time.time(), data))
        else:
            self.dropped += 1

    # From here on it is the thread that writes the log.

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            kind, at, data = item
            try:
                if kind == "metrics":
                    self._write_metrics(at, *data)
                elif kind == "flush":
                    self._look()
                    data.set()
                    continue
                else:
                    if kind == "end":
                        self._write_chosen(at, *self._frequency.rest())
                        self._say_which_alerts_are_blind()
                    elif kind == "generations":
                        self._rewind(at, data["step"])
                    self._log.append(kind, data, at)
            except Exception as error:
                self.dropped += 1
                self._failed(kind, error, ours=not isinstance(error, OSError))
            if self._queue.empty():
                self._look()

    def _look(self) -> None:
        for delivery in self._deliveries:
            delivery.look()

    def _write_metrics(
        self, at: float, step: int, metrics: dict[str, float], histograms: dict[str, Any]
    ) -> None:
        self._rewind(at, step)
        for alert in self._alerts.look(metrics, step, at):
            self._log.append("alert", alert, at)
        self._looks += 1
        if self._looks == _LOOKS:
            self._say_which_alerts_are_blind()
        self._write_chosen(at, step, self._frequency.take(step, {**metrics, **histograms}))

    def _say_which_alerts_are_blind(self) -> None:
        for rule, text in self._alerts.blind().items():
            self._say_once(f"alert {show(rule)}", text)

    def _rewind(self, at: float, step: int) -> None:
        """Note at which step a resumed run goes on, before the first that it logs."""
        if self._resumed:
            self._resumed = False
            self._log.append("rewind", {"step": step}, at)

    def _write_chosen(self, at: float, step: int, values: Mapping[str, float | Histogram]) -> None:
        if values:
            self._log.append("metrics", runlog.metrics_record(step, values), at)

    def _say_what_is_missing(self) -> None:
        if self.dropped:
            log.warning(
                "run %s: %d calls were lost, since they could not be written", self.run.id, self.dropped
            )
        for delivery in self._deliveries:
            missing = delivery.pending
            if missing or delivery.finished is None:
                log.warning(
                    "%s lacks %d of %d records of run %s%s; `trackway sync` brings them",
                    delivery.name,
                    missing,
                    missing + delivery.delivered + delivery.refused,
                    self.run.id,
                    f" ({delivery.error})" if delivery.error else "",
                )


def _place(store: str | os.PathLike[str] | None) -> Path:
    """Give the store that is meant: where rollouts are recorded, unless another one is named."""
    recorder = runtime.started()
    return store_path(store) if store is not None or recorder is None else recorder.config.store


def _prepare(
    name: str, given: Mapping[str, Any] | None, *, offline: bool
) -> tuple[Callable[[Run], ExperimentLogger], dict[str, Any]]:
    """Check a logger; with ``offline``, one that cannot work stays behind until it can."""
    try:
        return choosing.prepare(name, given, offline=offline)
    except Unavailable as error:
        if not offline:
            raise
        log.warning("%s is left out of this run, `trackway sync` can bring it later: %s", name, error)
        reason = str(error)

        def make(run: Run) -> ExperimentLogger:
            raise Unavailable(reason)

        return make, {}


_living: WeakSet[Tracker] = WeakSet()
_signals: list[int] = []
"""SIGTERM, once it has come."""
_handled = False


def _finish_all(status: Status, timeout: float) -> None:
    for tracker in list(_living):
        tracker.finish(status, timeout)


def _at_exit() -> None:
    # The interpreter keeps there what it has shown as the reason of its end.
    _finish_all("failed" if hasattr(sys, "last_value") else "finished", FINISH)


def _handle_sigterm() -> None:
    """Finish on SIGTERM, where the program does nothing about it itself; a handler of its own that ends the
    program leads to ``_at_exit``."""
    global _handled
    if _handled or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)
        _handled = True


def _terminated(number: int, frame: object) -> None:
    # A finish that this has interrupted goes on, and ends the process itself.
    interrupted = any(tracker.finishing for tracker in _living)
    _signals.append(number)
    if not interrupted:
        _finish_all("killed", _GRACE)
        _terminate(number)


def _terminate(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
