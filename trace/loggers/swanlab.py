"""SwanLab: the one run that it knows in a process, kept apart from everything else in the program."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ..config_values import ConfigError, wrong
from .base import ExperimentLogger, Level, Run, Status, Unavailable
from .values import Names, finite

TABLE: Final = "val/generations"
"""The key of the tables of generations, as verl names it."""
ALERTS: Final = "alerts"
_MODES: Final = ("cloud", "online", "local", "offline", "disabled")
_STATES: Final = {"finished": "success", "failed": "crashed", "killed": "aborted"}
_CODE: Final = "--x_x--0_0--"
"""What pyecharts, which makes SwanLab's tables, takes for the beginning and the end of JavaScript."""
_SETTLE: Final = 5.0
"""Seconds to wait at most until SwanLab has written what it was given; it does so every half second."""
_opening = threading.Lock()


class SwanlabLogger(ExperimentLogger):
    """Writes one run to SwanLab: to its cloud, or to files on this machine.

    SwanLab has one run in a process. Where there is one already, another waits until that is finished and
    is then brought everything; the two never mix. ``swanlab.log`` of the program itself arrives in ours.
    SwanLab's record of what the program prints is off unless ``SWANLAB_TERMINAL_PROXY_TYPE`` says
    otherwise, and so is what it does when a program ends or fails, which is seen to here.

    What is logged for one step in a row is sent together when the next step begins, since SwanLab keeps the
    first of two values of a step (``local``: the last). Earlier steps may come later. Going on with a run in
    the cloud, SwanLab ignores steps that it has; on this machine a run that goes on is a new directory.
    What is not finite is left out, since the cloud gets NaN for infinities; how often that happened so far is
    the metric ``nonfinite/<name>``. Generations are a table at their step (``local``: texts, as its page has
    no tables), alerts texts below ``alerts``. Artifacts are not uploaded, the configuration notes their
    places, and the originals of names that SwanLab does not take.
    """

    package = "swanlab"
    settings = frozenset({"mode", "save_dir", "api_key", "workspace", "id", "offline"})
    secrets = frozenset({"api_key"})

    def __init__(
        self,
        run: Run,
        *,
        mode: str | None = None,
        save_dir: str | None = None,
        api_key: str | None = None,
        workspace: str | None = None,
        id: str | None = None,
    ) -> None:
        """Begin the run at SwanLab, or go on with it.

        Args:
            run: which one.
            mode: ``cloud``, ``local``, ``offline``, ``disabled``. Default: ``SWANLAB_MODE``, else ``cloud``.
            save_dir: where SwanLab keeps its files. Default: ``SWANLAB_LOG_DIR``, else ``swanlog``.
            api_key: for the cloud. Default: ``SWANLAB_API_KEY``, else what ``swanlab login`` has kept.
            workspace: user or organization. Default: ``SWANLAB_WORKSPACE``, else the user.
            id: of the run in the cloud to go on with. Default: ``SWANLAB_RUN_ID``, else a new one.

        Raises:
            Unavailable: the process has another SwanLab run.
        """
        super().__init__(run)
        self._mode = mode
        self._arguments = {"logdir": save_dir, "workspace": workspace}
        self._key = api_key
        chosen = os.environ.get("SWANLAB_RUN_ID") if run.rank in (None, 0) else None
        self._asked = id or self.state.get("id") or chosen
        self._names = Names(_name, 512, self.state.get("names", {}))
        self._run: Any = None
        self._settings = _settings(mode)
        if self._settings.mode != "disabled":
            self._begin()

    @classmethod
    def check(cls, settings: Mapping[str, Any], *, offline: bool) -> dict[str, Any]:
        """See ``ExperimentLogger.check``; without an API key ``offline`` means SwanLab's own offline mode."""
        checked = dict(settings)
        for name in ("save_dir", "api_key", "workspace", "id"):
            value = settings.get(name)
            if isinstance(value, os.PathLike) and name == "save_dir":
                value = checked[name] = os.fspath(value)
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise wrong(
                    f"swanlab.{name}", "***" if name == "api_key" else value, "a text that is not empty"
                )
        if checked.get("save_dir"):  # a relative path counts from where the run begins
            checked["save_dir"] = str(Path(checked["save_dir"]).expanduser().absolute())
        mode = settings.get("mode")
        if mode not in (None, *_MODES):
            raise wrong("swanlab.mode", mode, f"one of {', '.join(_MODES)}")
        if checked.pop("offline", False):
            if mode not in (None, "offline"):
                raise ConfigError(f"swanlab.offline=True and swanlab.mode={mode!r} contradict each other")
            mode = checked["mode"] = "offline"
        known = _settings(mode)
        if known.mode == "online" and not (checked.get("api_key") or known.api_key):
            if not offline:
                raise Unavailable(
                    "swanlab: there is no API key: call `swanlab login`, set SWANLAB_API_KEY, or log on this "
                    "machine, with swanlab={'mode': 'offline'}, SWANLAB_MODE or on_error='offline'"
                )
            checked["mode"] = "offline"
        if known.mode == "local" and find_spec("swanboard") is None:
            raise Unavailable(
                "swanlab: mode local needs SwanLab's dashboard: pip install 'swanlab[dashboard]', "
                "or log with swanlab={'mode': 'offline'}"
            )
        if known.mode != "disabled" and not offline:
            _check_alone()
        return checked

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add to what is sent for this step when the next one begins."""
        if self._run is None:
            return
        values = finite(metrics)
        if len(values) < len(metrics):
            counts = self.state.setdefault("nonfinite", {})
            for name in metrics:
                if name not in values:
                    counts[name] = values[f"nonfinite/{name}"] = counts.get(name, 0) + 1
        if self.state.get("open", {}).get("step") != step:
            self._send()
        self.state["open"] = {
            "step": step,
            "metrics": {**self.state.get("open", {}).get("metrics", {}), **values},
        }

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Add to the configuration, or change it."""
        if self._run is not None:
            self._here().config.update(dict(config))

    def log_artifact(self, artifact: Path, name: str) -> None:
        """Note where an artifact is."""
        self._note("artifacts", {name: str(artifact)})

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write a table of these rows, or texts."""
        if self._run is None:
            return
        import swanlab

        before, number = self.state.get("round", (None, 0))
        number = number + 1 if before == step else 1
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[_cell(row.get(name)) for name in columns] for row in rows]
        shown: Any
        if self._settings.mode == "local":
            shown = [
                swanlab.Text("\n".join(f"{name}: {cell}" for name, cell in zip(columns, row, strict=True)))
                for row in cells
            ]
        else:
            shown = swanlab.echarts.Table().add(
                headers=["step", *columns], rows=[[step, *row] for row in cells]
            )
        self._here().log({TABLE if number == 1 else f"{TABLE}-{number}": shown}, step=step)
        self.state["round"] = (step, number)

    def alert(self, title: str, text: str, level: Level = "warning", step: int | None = None) -> None:
        """Write an alert as a text, at its step or the next one that has none."""
        if self._run is None:
            return
        import swanlab

        place = max(step or 0, self.state.get("alert", -1) + 1)
        at = "" if step is None else f" at step {step}"
        self._here().log({ALERTS: swanlab.Text(f"{level}{at}: {title}\n{text}")}, step=place)
        self.state["alert"] = place

    def flush(self) -> None:
        """Wait until SwanLab has written what it was given, as far as this version of it can be asked."""
        if self._run is None or not self._run.alive:
            return
        with suppress(AttributeError):
            waiting, consumer = self._run._components.emitter.queue, self._run._components.consumer
            end = time.monotonic() + _SETTLE
            while time.monotonic() < end and not (waiting.empty() and consumer._batch_empty):
                time.sleep(0.02)
            self._run._core._store.ensure_flushed()

    def finish(self, status: Status) -> None:
        """Close the run; waits for the upload of what remains."""
        if self._run is None:
            return
        self._send()
        if not self._run.alive:
            return
        hook = sys.excepthook
        error = None if status == "finished" else f"the program has {status}"
        self._run.finish(state=_STATES[status], error=error)
        sys.excepthook = hook  # SwanLab puts back what it has found there at the beginning

    def _begin(self) -> None:
        import swanlab

        further: dict[str, Any] = {"interactive": False}
        if not os.environ.get("SWANLAB_TERMINAL_PROXY_TYPE"):
            further["terminal"] = {"proxy_type": "none"}
        if self._key is not None:
            further["api_key"] = self._key
        online = self._settings.mode == "online"
        with _opening:
            _check_alone()
            hook = sys.excepthook
            self._run = swanlab.init(
                **self._arguments,
                mode=self._settings.mode,
                project=re.sub(r"[^0-9a-zA-Z_\-+.]", "-", self.run.project)[:100],
                experiment_name=self.run.experiment[:512],
                group=self.run.group,
                id=self._asked if online else self.state.get("id"),
                resume="allow" if online and self._asked else None,
                settings=further,
            )
            # The tracker ends it, when everything has arrived.
            with suppress(AttributeError):
                atexit.unregister(self._run._handle_atexit)
                if sys.excepthook == self._run._handle_except:
                    sys.excepthook = hook
        self._asked = self.state["id"] = self._run.id
        self._note("", {"run": self.run.id, "project": self.run.project})

    def _here(self) -> Any:
        """Give the run, begun again where the program has ended it by ``swanlab.finish``."""
        if not self._run.alive:
            self._begin()
        return self._run

    def _send(self) -> None:
        left = self.state.get("open")
        if left is None:
            return
        given = self._names.map(left["metrics"])
        if self.state.get("names", {}) != self._names.changed:
            self.state["names"] = dict(self._names.changed)
            self._note("metrics", {to: name for name, to in self._names.changed.items()})
        self._here().log(given, step=left["step"])
        del self.state["open"]

    def _note(self, kind: str, facts: Mapping[str, str]) -> None:
        """Keep facts about the run in its configuration, each under a key of its own."""
        if self._run is not None:
            keys = {"/".join(filter(None, ("trackway", kind, name))): fact for name, fact in facts.items()}
            self._here().config.update(keys)


def _settings(mode: str | None) -> Any:
    """Give SwanLab's settings as its variables and files have them.

    Raises:
        ConfigError: one of them is wrong.
    """
    import swanlab

    try:
        return swanlab.Settings() if mode is None else swanlab.Settings(mode=mode)
    except ValueError as error:
        raise ConfigError(f"swanlab: {error}") from None


def _check_alone() -> None:
    import swanlab

    if swanlab.has_run():
        raise Unavailable(
            "swanlab: this process has a SwanLab run already, and SwanLab knows one at a time; finish that "
            "one first"
        )


def _name(name: str) -> str:
    """Give a key that SwanLab takes as it is, and that is not one of its own or of ours."""
    name = re.sub(r"[\x00-\x1f\x7f]", "_", name).strip(" ./") or "_"
    if name.startswith("__swanlab__"):
        return f"metric{name}"
    return f"{name}_" if name == ALERTS or name.startswith(TABLE) else name


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return value.replace(_CODE, "--x_x- -0_0--") if isinstance(value, str) else value
