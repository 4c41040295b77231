"""TensorBoard: event files that it reads, and the tools around it, written without torch."""

from __future__ import annotations

import hashlib
import html
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config_values import wrong
from ..printable import visible
from .base import ExperimentLogger, Histogram, Run, Status

FLUSH = 1.0
"""Seconds that written events may wait in memory while more of them keep coming."""
_FILES = "*tfevents*"
"""What TensorBoard takes for event files."""
_TEXT = "/text_summary"
"""How tags of texts end, as torch's writer names them."""
_CONFIG = "config"
_ARTIFACTS = "artifacts/"


class TensorboardLogger(ExperimentLogger):
    """Writes one run into event files, in a directory of its own that is named by the run's id.

    That directory is made inside the setting ``dir``, else inside ``TENSORBOARD_DIR``, else inside
    ``tensorboard_log/<project>/<experiment>``. TensorBoard opened on any of these shows every run below it as
    one of its runs, so that two with the same names never mix.

    Names of metrics stay as they are, numbers become single precision, as TensorBoard keeps them; NaN and
    infinities stay. Of a step logged again TensorBoard shows the last value. A step that lies before the
    latest one of the same metric would make it hide everything since, as after a restart: such values go to
    the run ``<id>/late`` beside it. Generations, the configuration and the places of artifacts, which
    TensorBoard cannot keep, are texts; nothing in them is read as Markdown or HTML.
    """

    package = "tensorboard"
    settings = frozenset({"dir", "flush_seconds"})

    def __init__(
        self, run: Run, *, dir: str | os.PathLike[str] | None = None, flush_seconds: float = FLUSH
    ) -> None:
        """Open the run's directory, and a file in it for this life of the run.

        Args:
            run: which one.
            dir: where the run's directory is made.
            flush_seconds: how long events may wait in memory while more of them keep coming; as soon as
                nothing waits to be logged everything is written.
        """
        super().__init__(run)
        if dir is not None or "directory" not in self.state:
            base = dir or os.environ.get("TENSORBOARD_DIR") or _default(run)
            self.state["directory"] = str(Path(base).expanduser().absolute() / run.id)
        self._directory = Path(self.state["directory"])
        self._flush_seconds = flush_seconds
        self._files: dict[str, _EventFile] = {}
        self._latest: dict[str, int] = {}
        self._kinds: dict[str, str] = {}
        self._file("")

    @classmethod
    def check(cls, settings: Mapping[str, Any], *, offline: bool) -> dict[str, Any]:
        """See ``ExperimentLogger.check``."""
        place = settings.get("dir")
        if place is not None and (
            not isinstance(place, (str, os.PathLike)) or not os.fspath(place) or "://" in str(place)
        ):
            raise wrong("tensorboard.dir", place, "the path of a directory on this machine")
        seconds = settings.get("flush_seconds", FLUSH)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
            raise wrong("tensorboard.flush_seconds", seconds, "a number of seconds, at least 0")
        checked = dict(settings)
        if place is not None:  # a relative path counts from where the run begins
            checked["dir"] = str(Path(place).expanduser().absolute())
        return checked

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write scalars."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(
            [Summary.Value(tag=self._tag(name, "scalar"), simple_value=x) for name, x in metrics.items()],
            step,
        )

    def log_histograms(self, histograms: Mapping[str, Histogram], step: int) -> None:
        """Write histograms, with the bins that they have."""
        from tensorboard.compat.proto.histogram_pb2 import HistogramProto
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = []
        for name, histogram in histograms.items():
            proto = HistogramProto(
                min=histogram.edges[0],
                max=histogram.edges[-1],
                num=sum(histogram.counts),
                sum=histogram.total,
                sum_squares=histogram.squares,
                bucket_limit=histogram.edges[1:],
                bucket=histogram.counts,
            )
            values.append(Summary.Value(tag=self._tag(name, "histogram"), histo=proto))
        self._write(values, step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration as a text of step 0; one that is there already is not written again."""
        text = json.dumps(config, indent=2, ensure_ascii=False)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if self.state.get("config") != digest:
            self._write([_text(_CONFIG, _literal(text))], 0)
            self.state["config"] = digest

    def log_artifact(self, artifact: Path, name: str) -> None:
        """Write where the artifact is, as a text of step 0."""
        self._write([_text(f"{_ARTIFACTS}{name}", _literal(str(artifact)))], 0)

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write one text for all rows: for each its columns, then prompt and completion."""
        parts = []
        for row in rows:
            texts = {name: str(row.get(name, "")) for name in ("prompt", "completion")}
            rest = "\n".join(f"{name}: {value}" for name, value in row.items() if name not in texts)
            parts.append(_literal(rest))
            parts += [f"**{name}**\n\n{_literal(text)}" for name, text in texts.items()]
        self._write([_text("val/generations", "\n\n".join(parts))], step)

    def rewind(self, step: int) -> None:
        """Take what was written of this step and of later ones out of the files.

        A mark that TensorBoard calls the start of a session says so to one that has read them already. By
        itself it would not do: readers that heed it for scalars keep texts.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self.finish("finished")
        for path in sorted(self._directory.rglob(_FILES)):
            _cut(path, step)
        self._latest = {tag: min(latest, step - 1) for tag, latest in self._latest.items()}
        if step > 0:  # at 0 it would take the configuration too
            log = SessionLog(status=SessionLog.START)
            self._file("").write(Event(wall_time=self.time, step=step, session_log=log))

    def flush(self) -> None:
        """See ``ExperimentLogger.flush``."""
        for file in self._files.values():
            file.flush()

    def finish(self, status: Status) -> None:
        """Write what waits in memory, and close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, values: Sequence[Any], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        late = [value for value in values if step < self._latest.get(value.tag, 0)]
        timely = [value for value in values if step >= self._latest.get(value.tag, 0)]
        for place, chosen in (("", timely), ("late", late)):
            if chosen:
                self._file(place).write(Event(wall_time=self.time, step=step, summary=Summary(value=chosen)))
        self._latest.update((value.tag, step) for value in timely)

    def _file(self, place: str) -> _EventFile:
        if place not in self._files:
            self._files[place] = _EventFile(self._directory / place, self._flush_seconds)
        return self._files[place]

    def _tag(self, name: str, kind: str) -> str:
        """Give the tag of a metric; TensorBoard shows a tag as what it was first, and nothing else."""
        return name if self._kinds.setdefault(name, kind) == kind else f"{name}/{kind}"


class _EventFile:
    """A new event file, read after those that are in its directory."""

    def __init__(self, directory: Path, flush_seconds: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads them in the order of their names, and each to its end before the next.
        number = sum(1 for _ in directory.glob(_FILES))
        path = directory / f"events.out.tfevents.{int(time.time()):010d}.{number:06d}.trackway"
        self._writer = RecordWriter(path.open("xb"))
        self._flush_seconds = flush_seconds
        self._flushed = time.monotonic()
        self.write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if number == 0:  # the first session; TensorBoard takes only further ones for restarts
            self.write(Event(wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))

    def write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()


def _default(run: Run) -> Path:
    """Give the directory that verl has, without what would lead out of it."""
    names = f"{run.project}/{run.experiment}".split("/")
    return Path("tensorboard_log", *(name for name in names if name not in ("", ".", "..")))


def _text(tag: str, markdown: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    return Summary.Value(
        tag=f"{tag}{_TEXT}",
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
        tensor=TensorProto(dtype=DT_STRING, string_val=[markdown.encode()]),
    )


def _literal(text: str) -> str:
    """Give Markdown that shows a text as it is."""
    text = html.escape(visible(text), quote=False)
    # The one thing that TensorBoard's Markdown reads inside of HTML.
    for fence, same in (("```", "&#96;``"), ("~~~", "&#126;~~")):
        text = text.replace(fence, same)
    return f"<pre>\n{text}\n</pre>"


def _cut(path: Path, step: int) -> None:
    """Take out of an event file what belongs to a step and to later ones."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    temporary = path.with_name(".rewinding")
    with temporary.open("wb") as file:
        writer = RecordWriter(file)
        for data in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(data)
            if event.step < step or _has_no_step(event.summary.value):
                writer.write(data)
    temporary.replace(path)


def _has_no_step(values: Iterable[Any]) -> bool:
    """Say whether values are none, or belong to the run as a whole."""
    return all(
        value.tag.endswith(_TEXT) and value.tag.startswith((_CONFIG + _TEXT, _ARTIFACTS)) for value in values
    )
