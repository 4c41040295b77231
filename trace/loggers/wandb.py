"""W&B: a run of its own, whose rows are never dropped for the order of their steps."""

from __future__ import annotations

import netrc
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..config_values import ConfigError, wrong
from .base import ExperimentLogger, Histogram, Level, Run, Status, Unavailable
from .runlog import histograms_of, metrics_of, metrics_record
from .values import Names

AXIS = "step"
"""The metric that holds the training's step, which charts are drawn over."""
TABLE = "val/generations"
"""The key of the table of generations, as verl names it."""
_MODES = ("online", "offline", "disabled")
_ROUNDS = 100
"""Rounds of generations in one table: W&B shows no more of an incremental one, and names all the earlier
rounds anew in each."""
_LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}
_EXIT_CODES = {"finished": 0, "failed": 1, "killed": 255}  # 255 is what W&B itself takes for killed
_IF_KNOWN = {"finish_timeout": 30.0, "x_transaction_log_flush_interval": 1.0}
"""Settings of newer versions: after how many seconds the upload of what remains is left to `wandb sync`, and
how many seconds of what was logged may be lost when the process is killed."""
_RESERVED = re.compile(r"[:;,#?/']")
"""What the id of a run must not have."""
_opening = threading.Lock()


class WandbLogger(ExperimentLogger):
    """Writes one run to W&B, under the run's own id.

    It never takes over a run of the program or of another tracker. Where there is none, ``wandb.run`` is
    this one, so that what a program itself logs through ``wandb.log`` arrives there too.

    W&B drops a row whose number is below the last one's. So rows have numbers that only rise, the step's
    own as long as that does, and the step stands in the metric ``step``, which is the axis of all charts:
    a step that comes late is a row of its own. What is logged twice for one step in a row is one row. That
    row is sent when the next step begins, as ever with W&B.

    Names that begin with an underscore, and ``step``, get another name; the configuration has the original
    as ``trackway/metrics/<name>``. NaN and infinities stay as they are. The console's output is not
    recorded unless ``WANDB_CONSOLE`` says how. ``WANDB_*`` variables and ``wandb login`` hold as ever.
    """

    package = "wandb"
    settings = frozenset({"entity", "mode", "offline", "id", "wandb_proxy", "save_code", "log_artifact"})
    secrets = frozenset({"wandb_proxy"})

    def __init__(
        self,
        run: Run,
        *,
        entity: str | None = None,
        mode: str | None = None,
        offline: bool = False,
        id: str | None = None,
        wandb_proxy: str | None = None,
        save_code: bool = False,
        log_artifact: bool = False,
    ) -> None:
        """Begin the run at W&B, or go on with it.

        Args:
            run: which one.
            entity: user or team. Default: ``WANDB_ENTITY``, else the user's default.
            mode: ``online``, ``offline`` or ``disabled``. Default: ``WANDB_MODE``, else ``online``.
            offline: the same as ``mode="offline"``.
            id: of the run at W&B to go on with. Default: ``WANDB_RUN_ID``, else the run's own.
            wandb_proxy: address of a proxy for HTTPS.
            save_code: let W&B keep the program.
            log_artifact: upload artifacts; else only their places are noted in the configuration.
        """
        import wandb

        super().__init__(run)
        self._settings = {"entity": entity, "mode": "offline" if offline else mode, "save_code": save_code}
        self._proxy = wandb_proxy
        self._uploads = log_artifact
        chosen = os.environ.get("WANDB_RUN_ID") if run.rank in (None, 0) else None
        self.state["id"] = id or self.state.get("id") or chosen or run.id
        self._names = Names(_name, 1000, self.state.get("names", {}))
        self._artifacts = Names(_artifact_name, 120, self.state.get("artifacts", {}))
        self._values: dict[str, float | Histogram] = {}
        self._table: Any = None
        self._columns: list[tuple[str, bool]] = []
        self._rounds = 0
        self._run: Any = None
        if (self._settings["mode"] or wandb.setup().settings.mode) == "disabled":
            return
        self._open()
        self._send_again()

    @classmethod
    def check(cls, settings: Mapping[str, Any], *, offline: bool) -> dict[str, Any]:
        """See ``ExperimentLogger.check``; without credentials ``offline`` means W&B's own offline mode."""
        checked = dict(settings)
        for name in ("entity", "id", "wandb_proxy"):
            value = settings.get(name)
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise wrong(f"wandb.{name}", value, "a text that is not empty")
        if _RESERVED.search(settings.get("id") or ""):
            raise wrong("wandb.id", settings["id"], "a text without any of : ; , # ? / '")
        for name in ("offline", "save_code", "log_artifact"):
            if not isinstance(settings.get(name, False), bool):
                raise wrong(f"wandb.{name}", settings[name], "true or false")
        mode = settings.get("mode")
        if mode not in (None, *_MODES):
            raise wrong("wandb.mode", mode, f"one of {', '.join(_MODES)}")
        if checked.pop("offline", False):
            if mode not in (None, "offline"):
                raise ConfigError(f"wandb.offline=True and wandb.mode={mode!r} contradict each other")
            mode = "offline"
        import wandb

        known = wandb.setup().settings
        if (mode or known.mode) not in ("offline", "disabled", "dryrun") and not _has_credentials(known):
            if not offline:
                raise Unavailable(
                    f"wandb: there are no credentials for {known.base_url}: run `wandb login` or set "
                    "WANDB_API_KEY; or log offline with wandb={'offline': True}, WANDB_MODE=offline or "
                    "on_error='offline'"
                )
            mode = "offline"
        if mode is not None:
            checked["mode"] = mode
        return checked

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add metrics to the row of the step."""
        self._log(dict(metrics), step)

    def log_histograms(self, histograms: Mapping[str, Histogram], step: int) -> None:
        """Add histograms to the row of the step."""
        self._log(dict(histograms), step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Add to the configuration, or change it."""
        if self._run is not None:
            self._opened().config.update(dict(config), allow_val_change=True)

    def log_artifact(self, artifact: Path, name: str) -> None:
        """Upload the artifact, under its name with dashes for slashes, or note its place."""
        if self._run is None:
            return
        if not self._uploads:
            self._note("artifacts", {name: str(artifact)})
            return
        import wandb

        (given,) = self._artifacts.map({name: None})
        self.state["artifacts"] = self._artifacts.changed
        upload = wandb.Artifact(given, type="file", metadata={"name": name})
        if artifact.is_dir():
            upload.add_dir(str(artifact), policy="immutable")
        else:
            upload.add_file(str(artifact), policy="immutable")
        self._opened().log_artifact(upload)

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Add rows to a table, of which only these are sent.

        A table has the same columns for good. Where they change, after a hundred rounds and in each life of
        the run another one begins: ``val/generations-2`` and so on.
        """
        if self._run is None:
            return
        import wandb

        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = [(name, any(isinstance(row.get(name), str) for row in rows)) for name in names]
        if self._table is None or columns != self._columns or self._rounds == _ROUNDS:
            self.state["tables"] = self.state.get("tables", 0) + 1
            self._table = wandb.Table(columns=[AXIS, *names], log_mode="INCREMENTAL")
            self._columns, self._rounds = columns, 0
        for row in rows:
            self._table.add_data(step, *(row.get(name) for name in names))
        table, self._table = self._table, None  # one that could not be sent has its rows already
        number = self.state["tables"]
        self._add({TABLE if number == 1 else f"{TABLE}-{number}": table}, step)
        self._table = table
        self._rounds += 1
        self.state["open"].setdefault("generations", []).extend(map(dict, rows))

    def alert(self, title: str, text: str, level: Level = "warning", step: int | None = None) -> None:
        """Let W&B send a mail or a message, as the user has set there."""
        if self._run is not None:
            at = "" if step is None else f"step {step}: "
            self._opened().alert(title=title[:63], text=f"{at}{text}", level=_LEVELS[level])

    def finish(self, status: Status) -> None:
        """Close the run; waits for the upload of what remains."""
        if self._run is not None:
            self._run.finish(exit_code=_EXIT_CODES[status])
            self.state.pop("open", None)

    def _opened(self) -> Any:
        """Give the run, which is open; wandb.finish() ends every run, whoever began it."""
        if getattr(self._run, "_is_finished", False):
            self.state.pop("open", None)
            self._open()
        return self._run

    def _open(self) -> None:
        """Begin the run as one of its own."""
        import wandb

        options: dict[str, Any] = {"https_proxy": self._proxy}
        if not os.environ.get("WANDB_CONSOLE"):
            options["console"] = "off"
        options |= {name: value for name, value in _IF_KNOWN.items() if name in wandb.Settings.model_fields}
        mode = self._settings["mode"] or wandb.setup().settings.mode
        arguments = {
            **self._settings,
            "project": re.sub(r"[/\\#?%:]", "-", self.run.project)[:128],
            "name": self.run.experiment[:128],
            "group": self.run.group,
            "id": self.state["id"],
            # Without it W&B would empty a run that it has already; offline there is nothing to ask.
            "resume": None if mode in ("offline", "dryrun") else "allow",
            "settings": wandb.Settings(**options),
        }
        with _opening:
            opened = wandb.init(**arguments, reinit="return_previous" if wandb.run is None else "create_new")
            if opened.id != self.state["id"]:  # that of somebody who left wandb.run empty
                opened = wandb.init(**arguments, reinit="create_new")
        self._run = opened
        opened.define_metric(AXIS, hidden=True)
        opened.define_metric("*", step_metric=AXIS)
        self._note("", {"run": self.run.id, "project": self.run.project})

    def _send_again(self) -> None:
        """Log the row that an earlier life of the run had not completed when it died."""
        left = self.state.pop("open", None)
        if left is None:
            return
        self.state["row"] = left["row"] - 1
        step = left["data"]["step"]
        self._log({**metrics_of(left["data"]), **histograms_of(left["data"])}, step)
        if "generations" in left:
            self.log_generations(left["generations"], step)

    def _log(self, values: dict[str, float | Histogram], step: int) -> None:
        if self._run is None or not values:
            return
        import wandb

        row = self._names.map(values)
        if self.state.get("names", {}) != self._names.changed:
            self.state["names"] = dict(self._names.changed)
            self._note("metrics", {given: name for name, given in self._names.changed.items()})
        self._add(
            {
                name: wandb.Histogram(np_histogram=(list(value.counts), list(value.edges)))
                if isinstance(value, Histogram)
                else value
                for name, value in row.items()
            },
            step,
        )
        self._values.update(values)
        data = metrics_record(step, self._values)
        if "histograms" in data:
            data["histograms"] = {name: asdict(each) for name, each in data["histograms"].items()}
        self.state["open"]["data"] = data

    def _add(self, row: dict[str, Any], step: int) -> None:
        """Add to the row of the step, when that is the last one, or begin another."""
        run = self._opened()
        left = self.state.get("open")
        if left is None or left["data"]["step"] != step:
            self._values.clear()
            # Until something was logged W&B gives 0 for the step of a run that it has resumed.
            number = max(step, self.state.get("row", -1) + 1, run.starting_step, run.step)
            left = {"row": number, "data": metrics_record(step, {})}
        run.log({**row, AXIS: step, "_timestamp": self.time}, step=left["row"])
        self.state["row"] = left["row"]
        self.state["open"] = left

    def _note(self, kind: str, facts: Mapping[str, str]) -> None:
        """Keep facts about the run in its configuration, each under a key of its own."""
        keys = {"/".join(filter(None, ("trackway", kind, name))): fact for name, fact in facts.items()}
        self._opened().config.update(keys, allow_val_change=True)


def _name(name: str) -> str:
    """Give a name that W&B does not keep for itself."""
    return f"metric{name}" if name.startswith("_") else f"{name}_" if name == AXIS else name


def _artifact_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _has_credentials(settings: Any) -> bool:
    """Say whether W&B finds an API key or the like without asking."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    if settings.api_key or getattr(settings, "identity_token_file", None):
        return True
    places = [os.environ.get("NETRC") or "~/.netrc", "~/_netrc"]
    for path in map(os.path.expanduser, places):
        try:
            file = netrc.netrc(path)
        except (OSError, netrc.NetrcParseError):
            continue
        if any(map(file.authenticators, (urlsplit(settings.base_url).netloc, "api.wandb.ai"))):
            return True
    return False
