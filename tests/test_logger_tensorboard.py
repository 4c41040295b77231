"""TensorBoard's event files, read back with TensorBoard's own readers."""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

import numpy
import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.text.text_plugin import text_array_to_html

from trackway import Tracker
from trackway.trace.config_values import ConfigError
from trackway.trace.loggers import Run
from trackway.trace.loggers.tensorboard import TensorboardLogger

from .programs import run as run_program

EVERYTHING = {"scalars": 0, "tensors": 0, "histograms": 0}
HOSTILE = (
    "<script>alert(1)</script> <img src=x onerror=alert(2)> ![spy](http://elsewhere/a.png)\n\n"
    "# a heading\n\n[click](javascript:alert(3))\n```\nfence\n```\n"
    "~~~~\nother\n~~~~\n</pre><b>out</b>\n\n| a | b |\n|---|---|\n"
    "&lt; \x1b[31mred\x02\r\n    four spaces\n<http://elsewhere>"
)


def tracker(folder: Path, **more) -> Tracker:
    settings = {"dir": folder / "tb", **more.pop("tensorboard", {})}
    return Tracker("tensorboard", store=folder / "store", tensorboard=settings, **more)


def load(tracked: Tracker, folder: Path, place: str = "") -> EventAccumulator:
    return EventAccumulator(str(folder / "tb" / tracked.run.id / place), EVERYTHING).Reload()


def scalars(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def texts(events: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    found = events.Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


def shown(text: str) -> str:
    """Give the page's HTML for a text."""
    return text_array_to_html(numpy.array(text.encode(), dtype=object), enable_markdown=True)


def test_scalars_keep_their_names_steps_and_values(tmp_path):
    names = ["val/acc@1", "timing(s)/gen", "a:b", "loss[d=1,3]", "奖励/均值", "x" * 300, "a@1", "a_at_1"]
    with tracker(tmp_path) as tracked:
        for step in (1, 2, 5):
            tracked.log_metrics({name: step + n / 8 for n, name in enumerate(names)}, step)
        tracked.log_metrics({"ok": 1, "nan": math.nan, "inf": math.inf, "low": -math.inf}, 5)
    events = load(tracked, tmp_path)
    for n, name in enumerate(names):
        assert scalars(events, name) == [(step, step + n / 8) for step in (1, 2, 5)]
    assert scalars(events, "ok") == [(5, 1.0)]
    assert scalars(events, "inf") == [(5, math.inf)]
    assert scalars(events, "low") == [(5, -math.inf)]
    ((step, value),) = scalars(events, "nan")
    assert step == 5 and math.isnan(value)
    assert set(events.Tags()["scalars"]) == {*names, "ok", "nan", "inf", "low"}


def test_histograms_keep_their_bins(tmp_path):
    values = numpy.concatenate([numpy.linspace(-1, 3, 500), [math.nan]])
    with tracker(tmp_path) as tracked:
        tracked.log_metrics({"advantages": values}, 3)
    (event,) = load(tracked, tmp_path).Histograms("advantages")
    counts, edges = numpy.histogram(values[:-1], bins=64)
    assert event.step == 3
    assert event.histogram_value.bucket == counts.tolist()
    assert event.histogram_value.bucket_limit == edges[1:].tolist()
    assert (event.histogram_value.min, event.histogram_value.max, event.histogram_value.num) == (-1, 3, 500)
    assert event.histogram_value.sum == pytest.approx(numpy.nansum(values))


def test_a_name_that_is_a_number_first_and_then_a_distribution_keeps_both(tmp_path):
    with tracker(tmp_path) as tracked:
        tracked.log_metrics({"reward": numpy.array([0.5])}, 1)
        tracked.log_metrics({"reward": numpy.array([0.5, 1.0])}, 2)
        tracked.log_metrics({"reward": numpy.array([0.25])}, 3)
    events = load(tracked, tmp_path)
    assert scalars(events, "reward") == [(1, 0.5), (3, 0.25)]
    assert [event.step for event in events.Histograms("reward/histogram")] == [2]


def test_two_runs_with_the_same_names_do_not_mix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [
        Tracker("tensorboard", project="math/../..", experiment="/grpo", store=tmp_path / "store")
        for _ in range(2)
    ]
    for number, tracked in enumerate(runs):
        tracked.log_metrics({"loss": number}, 1)
    for tracked in runs:
        tracked.finish()
    for number, tracked in enumerate(runs):
        place = tmp_path / "tensorboard_log" / "math" / "grpo" / tracked.run.id
        assert scalars(EventAccumulator(str(place), EVERYTHING).Reload(), "loss") == [(1, float(number))]


def test_the_variable_that_verl_reads_names_the_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    with Tracker("tensorboard", store=tmp_path / "store") as tracked:
        tracked.log_metrics({"loss": 1}, 1)
    assert scalars(load(tracked, tmp_path), "loss") == [(1, 1.0)]


def rows(step: int) -> list[dict[str, object]]:
    return [{"sample_index": 7, "prompt": f"asked at {step}", "completion": "42", "reward": step / 2}]


def steps_everywhere(tracked: Tracker, folder: Path) -> dict[str, list[int]]:
    """Give the steps of each kind of value, from both of TensorBoard's readers in Python."""
    events = load(tracked, folder)
    path = str(folder / "tb" / tracked.run.id)
    page = plugin_event_accumulator.EventAccumulator(path, {"tensors": 0}).Reload()
    found = {
        "scalars": [event.step for event in events.Scalars("loss")],
        "histograms": [event.step for event in events.Histograms("advantages")],
        "texts": [event.step for event in events.Tensors("val/generations/text_summary")],
        "configs": [event.step for event in events.Tensors("config/text_summary")],
    }
    tags = ("loss", "advantages", "val/generations/text_summary", "config/text_summary")
    for kind, tag in zip(found, tags, strict=True):
        assert [event.step for event in page.Tensors(tag)] == found[kind]
    return found


def log_all(tracked: Tracker, steps: range, sign: int = 1) -> None:
    for step in steps:
        tracked.log_generations(rows(step), step)
        tracked.log_metrics({"loss": sign * step, "advantages": numpy.arange(4.0)}, step)


def test_a_run_that_is_resumed_at_an_earlier_step_has_one_value_per_step(tmp_path):
    with tracker(tmp_path, config={"lr": 1e-6}) as first:
        log_all(first, range(151))
    files = list((tmp_path / "tb" / first.run.id).iterdir())
    with files[0].open("r+b") as file:  # the process died while it wrote
        file.truncate(files[0].stat().st_size - 5)
    with tracker(tmp_path, config={"lr": 1e-6}, resume=first.run.id) as second:
        log_all(second, range(100, 161), sign=-1)
    found = steps_everywhere(second, tmp_path)
    assert found == {kind: list(range(161)) for kind in ("scalars", "histograms", "texts")} | {"configs": [0]}
    values = dict(scalars(load(second, tmp_path), "loss"))
    assert values == {step: float(step if step < 100 else -step) for step in range(161)}


def test_a_run_that_begins_again_keeps_its_configuration(tmp_path):
    with tracker(tmp_path, config={"lr": 1e-6}) as first:
        log_all(first, range(5))
    with tracker(tmp_path, config={"lr": 1e-5}, resume=first.run.id) as second:
        log_all(second, range(3))
    found = steps_everywhere(second, tmp_path)
    assert found == {kind: [0, 1, 2] for kind in ("scalars", "histograms", "texts")} | {"configs": [0, 0]}


def test_a_reader_that_has_read_the_first_life_forgets_what_was_taken_back(tmp_path):
    with tracker(tmp_path) as first:
        log_all(first, range(10))
    page = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tb" / first.run.id)).Reload()
    with tracker(tmp_path, resume=first.run.id) as second:
        log_all(second, range(5, 8))
    page.Reload()
    assert [event.step for event in page.Tensors("loss")] == list(range(8))
    assert [event.step for event in page.Tensors("val/generations/text_summary")] == list(range(8))


@pytest.mark.parametrize("end", ["", "raise RuntimeError('out of memory')", "sys.exit(3)"])
def test_a_short_run_is_complete_however_it_ends(tmp_path, end):
    code = f"""
        from trackway import Tracker
        with Tracker("tensorboard", store="store", tensorboard={{"dir": "tb"}}) as tracker:
            for step in range(3):
                tracker.log_metrics({{"loss": step}}, step)
            {end or "pass"}
    """
    done = run_program(tmp_path, code)
    assert ("out of memory" in done.stderr) == ("memory" in end)
    (place,) = (tmp_path / "tb").iterdir()
    assert scalars(EventAccumulator(str(place)).Reload(), "loss") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_it_is_written_when_nothing_waits_and_after_the_interval_that_was_set(tmp_path):
    def logged(seconds: float) -> tuple[TensorboardLogger, EventAccumulator]:
        run = Run(f"run-{seconds:g}", "p", "e", tmp_path)
        logger = TensorboardLogger(run, dir=tmp_path / "tb", flush_seconds=seconds)
        logger.log_metrics({"loss": 1.0}, 1)
        return logger, EventAccumulator(str(tmp_path / "tb" / run.id))

    logger, events = logged(0)
    assert events.Reload().Tags()["scalars"] == ["loss"]
    logger.finish("finished")
    logger, events = logged(1e6)
    assert events.Reload().Tags()["scalars"] == []
    logger.flush()
    assert events.Reload().Tags()["scalars"] == ["loss"]
    logger.finish("finished")


def test_texts_are_shown_as_they_are(tmp_path):
    row = {"sample_index": "<b>7</b>", "prompt": HOSTILE, "completion": HOSTILE[::-1], "*score*": 0.5}
    with tracker(tmp_path, config={"a": HOSTILE}) as tracked:
        tracked.log_generations([row], 4)
        tracked.log_artifact(b"data", "final <b>/model")
    events = load(tracked, tmp_path)
    ((step, generation),) = texts(events, "val/generations")
    assert step == 4
    page = shown(generation)
    literal = [html.unescape(part) for part in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)]
    assert len(literal) == 3
    assert "sample: <b>7</b>" in literal[0] and "*score*: 0.5" in literal[0]
    expected = HOSTILE.replace("\x1b", r"\x1b").replace("\x02", r"\x02").replace("\r", r"\r")
    assert literal[1].strip("\n") == expected
    assert "<script>" not in literal[2]
    rest = re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL)
    assert set(re.findall(r"<[^>]*>", rest)) == {"<p>", "</p>", "<strong>", "</strong>"}
    ((_, config),) = texts(events, "config")
    assert json.loads(html.unescape(re.fullmatch(r"<pre>\n(.*)\n</pre>", config, re.DOTALL)[1])) == {
        "a": HOSTILE
    }
    ((_, artifact),) = texts(events, "artifacts/final <b>/model")
    place = Path(html.unescape(shown(artifact)).removeprefix("<pre>").removesuffix("</pre>").strip())
    assert place.read_bytes() == b"data"


def test_torch_is_not_needed(tmp_path):
    code = """
        from trackway import Tracker
        with Tracker("tensorboard", store="store", config={"a": 1}, tensorboard={"dir": "tb"}) as tracker:
            tracker.log_metrics({"loss": 1}, 1)
            tracker.log_generations([{"prompt": "a", "completion": "b"}], 1)
        print("torch" in sys.modules, "tensorflow" in sys.modules)
    """
    assert run_program(tmp_path, code).stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dir": ""}, "tensorboard.dir='' is not allowed; expected the path of a directory"),
        ({"dir": "s3://bucket/logs"}, "tensorboard.dir='s3://bucket/logs' is not allowed"),
        ({"flush_seconds": -1}, "tensorboard.flush_seconds=-1 is not allowed; expected a number of seconds"),
        ({"flush_seconds": "soon"}, "tensorboard.flush_seconds='soon' is not allowed"),
        ({"directory": "x"}, "there is no setting 'directory'; settings are dir, flush_seconds"),
    ],
)
def test_a_wrong_setting_is_an_error(tmp_path, setting, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        tracker(tmp_path, tensorboard=setting)


@pytest.mark.slow
def test_its_page_shows_late_values_and_loses_none_of_the_others(tmp_path):
    with tracker(tmp_path) as tracked:
        for step in (1, 2, 3, 4, 2, 4, 5):
            tracked.log_metrics({"loss": step / 4}, step)
        tracked.log_metrics({"first/seen/late": 1.5}, 2)
        tracked.log_generations([{"prompt": "<i>why</i>", "completion": "*so*"}], 4)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", tmp_path / "tb", "--port", "0"]
    with subprocess.Popen([*command, "--host", "127.0.0.1"], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+", line)))

            def ask(what: str, run: str, tag: str) -> list:
                query = urlencode({"run": run, "tag": tag})
                with urllib.request.urlopen(f"{address}data/plugin/{what}?{query}") as answer:
                    return json.load(answer)

            run = tracked.run.id
            found = [(step, value) for _, step, value in ask("scalars/scalars", run, "loss")]
            assert found == [(step, step / 4) for step in range(1, 6)]
            late = [(step, value) for _, step, value in ask("scalars/scalars", f"{run}/late", "loss")]
            (text,) = ask("text/text", run, "val/generations/text_summary")
            assert [step for _, step, _ in ask("scalars/scalars", run, "first/seen/late")] == [2]
        finally:
            server.kill()
    assert late == [(2, 0.5)]
    assert text["step"] == 4
    assert "&lt;i&gt;why&lt;/i&gt;" in text["text"] and "*so*" in text["text"]
