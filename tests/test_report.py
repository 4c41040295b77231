"""The report of a run: what a person needs to know of it, in two files that nothing can take over."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
import re
from collections import Counter
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import trackway
from trackway.trace.loggers import Tracker
from trackway.trace.loggers.reading import LoggerState, read_run
from trackway.viewers.plot import sparkline, svg
from trackway.viewers.report import report_of
from trackway.viewers.report_html import html

from .browser import chromium

HOSTILE = (
    "<script>alert('x')</script><img src=x onerror=alert(2)>\"'><svg onload=alert(3)> [a](http://evil.example)"
    " ![b](http://evil.example/b) `code` ``` **bold** | pipe \x1b[2J\u202e &lt; www.evil.example"
)
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "nav", "a", "p", "dl", "dt", "dd", "div"),
    *("table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre", "figure", "figcaption"),
    *("svg", "line", "text", "circle", "polyline"),
}


class Page(HTMLParser):
    """What a browser would make of a page.

    Attributes:
        tags: how many there are of each element.
        attributes: every name of an attribute with its element.
        links: where they lead.
        text: all of it, style left out.
        policy: the Content-Security-Policy.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[tuple[str, str]] = set()
        self.links: list[str] = []
        self.texts: list[str] = []
        self.style = self.policy = ""
        self._in = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = "".join(self.texts)

    def handle_starttag(self, tag, attrs):
        self._in = tag
        self.tags[tag] += 1
        self.attributes |= {(tag, name) for name, _ in attrs}
        values = dict(attrs)
        if tag == "a":
            self.links.append(values["href"])
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]

    def handle_data(self, data):
        if self._in == "style":
            self.style += data
        else:
            self.texts.append(data)

    def handle_endtag(self, tag):
        self._in = ""


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "store"


def report(cli, store: Path, name: str = "last") -> tuple[str, Page]:
    """Write the report of a run; give the Markdown and the page."""
    done = cli("report", name, "-o", str(store.parent / "out"), "--store", str(store))
    assert done.code == 0, done.err
    written = [Path(line) for line in done.out.splitlines()]
    assert [path.suffix for path in written] == [".md", ".html"]
    return written[0].read_text(encoding="utf-8"), Page(written[1])


def record(store: Path, experiment: str, rewards: dict[int, float], **more) -> None:
    """Record one rollout for each reward; those of ``more["fails"]`` raise, of ``more["long"]`` are cut."""
    trackway.configure(store=store, project="p", experiment=experiment, backend=None, sync="off")

    @trackway.llm_trace
    def generate(messages):
        sample = messages[0]["sample"]
        if sample in more.get("fails", ()):
            raise TimeoutError("the tool hangs")
        finish = "length" if sample in more.get("long", ()) else "stop"
        message = {"role": "assistant", "content": f"answer {sample} {more.get('text', '')}"}
        return {"choices": [{"message": message, "finish_reason": finish}]}

    for sample, reward in rewards.items():
        with suppress(TimeoutError), trackway.trajectory(step=1, sample_index=sample, rollout_n=0):
            trackway.reward("score", reward)
            generate([{"role": "user", "content": f"question {sample}", "sample": sample}])
    trackway.shutdown()


def test_a_report_says_what_came_of_a_run(store, cli):
    with Tracker(
        ["file"], store=store, project="p", experiment="e", config={"optim": {"lr": 0.5}}
    ) as tracker:
        for step in range(1, 11):
            tracker.log_metrics({"reward/mean": step / 10, "loss": 1 / step, "timing/gen": 7}, step=step)
        tracker.log_metrics({"loss": math.nan}, step=11)
        rows = [{"sample_index": 17, "prompt": "6 × 7?", "completion": "it is 42", "score": 1.0}]
        tracker.log_generations(rows, step=10)
        tracker.alert("reward stands still", "for 5 steps", step=9)
        tracker.log_artifact(b"weights", "model/final.bin")
    markdown, page = report(cli, store)
    for text in (markdown, page.text):
        for part in (
            *(tracker.run.id, "finished", "1 to 11", "reward/mean", "timing/gen", "reward stands still"),
            *("for 5 steps", "6 × 7?", "it is 42", "val/10/17/0", "lr: 0.5", "model/final.bin"),
            *(hashlib.sha256(b"weights").hexdigest()[:32], "1 other metric", f"pytest=={pytest.__version__}"),
            *("has everything", "Python", str(store / "runs" / tracker.run.id)),
        ):
            assert part in text
    assert "| loss | 1 | 0.1 | 1 | nan | 11 | 11 | 1 |" in markdown.replace("`", "")
    assert sparkline({step: step for step in range(1, 11)}) in markdown
    assert page.tags["svg"] == 2
    assert "No metrics" not in page.text


def test_a_report_of_a_run_that_logged_nothing(store, cli):
    Tracker(["file"], store=store).finish("failed")
    markdown, page = report(cli, store)
    for text in (markdown, page.text):
        assert "failed" in text
        assert "No metrics were logged." in text
        assert "Trajectories" not in text


def test_the_best_and_the_worst_trajectories_of_the_run(store, cli):
    record(store, "e", {100: 5.0})  # before it
    with Tracker(["file"], store=store, experiment="e") as tracker:
        tracker.log_metrics({"reward/mean": 0.5}, step=1)
        record(store, "e", {n: n / 20 for n in range(20)}, fails=(3, 4), long=(18, 19))
        record(store, "another", {200: 9.0})
    with Tracker(["file"], store=store, experiment="e"):
        record(store, "e", {300: 8.0})  # after it
    markdown, page = report(cli, store, tracker.run.id)
    best, worst = markdown.partition("## Best")[2].split("## Worst")
    assert re.findall(r"^\| (1/\d+/0) \| ([\d.]+) \|", best, re.M) == [
        (f"1/{n}/0", f"{n / 20:g}") for n in (19, 18, 17, 16, 15)
    ]
    assert re.findall(r"^\| (1/\d+/0) \| ([\d.]+) \|", worst, re.M) == [
        (f"1/{n}/0", f"{n / 20:g}") for n in range(5)
    ]
    for text in (markdown, page.text):
        assert "20, 0 of them in validations" in text.replace("`", "")
        assert "answer 19" in text
        assert "question 0" in text
        assert "the tool hangs" in text
        assert "1/100/0" not in text
        assert "1/200/0" not in text
        assert "1/300/0" not in text
    assert "- failed: 2\n- came to their length limit: 2\n" in markdown
    assert "| TimeoutError | 2 |" in markdown
    assert "- mean reward: 0.475\n" in markdown


def test_few_trajectories_are_not_listed_twice(store, cli):
    with Tracker(["file"], store=store, experiment="e"):
        record(store, "e", {1: 1.0, 2: math.nan, 3: 0.0})
    markdown, _ = report(cli, store)
    best, worst = markdown.partition("## Best")[2].split("## Worst")
    assert re.findall(r"^\| (1/\d/0) \|", best, re.M) == ["1/1/0"]
    assert re.findall(r"^\| (1/\d/0) \|", worst, re.M) == ["1/3/0"]
    assert "- recorded: 3, 0 of them in validations" in markdown.replace("`", "")


def test_rollouts_of_another_name_belong_to_the_run_whose_id_they_carry(store, cli):
    with Tracker(["file"], store=store, experiment="metrics"):
        record(store, "rollouts", {1: 1.0})
    markdown, _ = report(cli, store)
    assert "| 1/1/0 | 1 |" in markdown


def test_of_two_runs_at_once_each_has_its_own(store, cli):
    with Tracker(["file"], store=store, experiment="e") as one:
        record(store, "e", {1: 1.0})
        with Tracker(["file"], store=store, experiment="e") as other:
            record(store, "e", {2: 2.0})
    first, _ = report(cli, store, one.run.id)
    second, _ = report(cli, store, other.run.id)
    assert "| 1/1/0 |" in first
    assert "| 1/2/0 |" not in first
    assert "| 1/2/0 |" in second
    assert "| 1/1/0 |" not in second


def hostile_run(store: Path) -> str:
    """Log a run in which every text that can come from outside is hostile."""
    text = HOSTILE
    config = {text: text, "list": [text], "url": "javascript:alert(1)"}
    with Tracker(["file"], store=store, project=text, experiment=text, group=text, config=config) as tracker:
        tracker.log_metrics({f"loss {text}": 1, "loss": 2, f"{text}/kl": 3}, step=1)
        tracker.log_metrics({"loss": 1, f"{text}/kl": 2}, step=2)
        tracker.log_generations([{"sample_index": text, "prompt": text, "completion": text, text: 1}], step=2)
        tracker.alert(text, text)
        tracker.alert("see", 'https://tracker.example/<script>?a=1"onclick=')
        tracker.alert("linked", "https://tracker.example/run?a=1&b=2")
        tracker.log_artifact(b"x", text.replace("/", "∕"))
        record(store, text, {1: 1.0, 2: 0.0, 3: 0.5}, fails=(2,), text=text)
    return tracker.run.id


def test_nothing_in_the_page_is_taken_for_markup(store, cli, swallowing):
    hostile_run(store)
    _, page = report(cli, store)
    assert set(page.tags) <= TAGS
    assert not [name for _, name in page.attributes if name.startswith("on") or name in ("style", "src")]
    assert page.text.count("<script>alert('x')</script>") > 12
    assert "\x1b" not in page.source
    assert "\u202e" not in page.source
    assert "javascript:alert(1)" in page.text
    assert [link for link in page.links if not link.startswith("#")] == []
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in page.policy
    assert page.policy.startswith("default-src 'none'; ")


def test_addresses_that_a_logger_keeps_can_be_followed(store, cli):
    with Tracker(["file"], store=store) as tracker:
        pass
    addresses = [
        "https://tracker.example/p/run?a=1&b=2",
        "http://localhost:5000/#/experiments/1",
        "javascript:alert(1)",
        'https://a.example/"onclick=alert(1)',
        "https://<script>",
        "http://a.example/ b",
    ]
    state = {str(number): address for number, address in enumerate(addresses)}
    logger = LoggerState("there", 0, 0, 0, None, "finished", state)
    found = dataclasses.replace(read_run(tracker.run.directory), loggers=[logger])
    path = store.parent / "page.html"
    path.write_text(html(report_of(found, None)), encoding="utf-8")
    page = Page(path)
    assert [link for link in page.links if not link.startswith("#")] == addresses[:2]
    assert set(page.tags) <= TAGS
    assert all(address in page.text for address in addresses)


def test_nothing_in_the_markdown_is_taken_for_markup(store, cli, swallowing):
    hostile_run(store)
    markdown, _ = report(cli, store)
    assert "\x1b" not in markdown
    assert markdown.count("<script>alert('x')</script>") > 12
    kinds: Counter[str] = Counter()
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        for each in (token, *(token.children or ())):
            kinds[each.type] += 1
            if each.type == "text":
                assert "evil" not in each.content
                assert "pipe" not in each.content
    allowed = {"inline", "text", "code_inline", "fence", "softbreak"}
    blocks = {"heading", "paragraph", "bullet_list", "list_item", "table", "thead", "tbody", "tr", "th", "td"}
    assert set(kinds) <= allowed | {f"{each}_{end}" for each in blocks for end in ("open", "close")}


def points_of(drawn: str) -> list[tuple[float, float]]:
    """Give the points of all curves."""
    pairs = [pair for points in re.findall(r'points="([^"]*)"', drawn) for pair in points.split()]
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in pairs)]


def test_a_curve_shows_its_spikes_and_stays_small():
    values = dict.fromkeys(range(100_000), 0.0)
    values[54_321] = 1.0
    points = points_of(svg(values, "loss"))
    assert len(points) <= 400
    assert min(y for _, y in points) < 20 < 100 < max(y for _, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)


@pytest.mark.parametrize(
    ("values", "curves", "points"),
    [
        ({}, 0, 0),
        ({1: math.nan, 2: math.inf}, 0, 0),
        ({5: 3.0}, 0, 1),
        ({1: 1.0, 2: math.nan, 3: 2.0, 4: 3.0}, 1, 1),
        ({1: -1.7e308, 2: 1.7e308}, 1, 0),
        ({1: 5e-324, 2: 0.0}, 1, 0),
        ({0: 2**70, 2**62: 2**70}, 1, 0),
        ({1: 1e-300, 2: 1e-300}, 1, 0),
    ],
)
def test_a_curve_of_odd_values_can_be_drawn(values, curves, points):
    drawn = svg(values, "x")
    assert (drawn.count("<polyline"), drawn.count("<circle")) == (curves, points)
    assert "nan" not in drawn.replace("no finite value", "")
    assert all(0 <= y <= 170 and 0 <= x <= 420 for x, y in points_of(drawn))
    assert len(sparkline(values)) <= 24


def test_a_line_of_bars_follows_the_values():
    assert sparkline({1: 0.0, 2: 7.0, 3: math.nan, 4: 3.5}) == "▁█ ▅"
    assert sparkline({1: 2.0, 2: 2.0}) == "▅▅"
    long = sparkline({step: step for step in range(1000)})
    assert (len(long), long[0], long[-1]) == (24, "▁", "█")


def test_what_a_resumed_run_ran_in_is_compared(store, cli, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    with Tracker(["file"], store=store) as tracker:
        tracker.log_metrics({"loss": 1}, step=1)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    Tracker(["file"], store=store, resume=tracker.run.id).finish()
    markdown, _ = report(cli, store)
    assert "2, as it was resumed" in markdown
    assert "| 2 | variables | `NCCL_DEBUG` | INFO | WARN |" in markdown


def test_a_report_does_not_change_with_where_it_is_written(store, cli):
    with Tracker(["file"], store=store) as tracker:
        tracker.log_metrics({"loss": 1}, step=1)
    _, page = report(cli, store)
    record_ = read_run(store / "runs" / tracker.run.id)
    assert html(report_of(record_, None)) == page.source
    done = cli("report", "last", "--store", str(store))
    assert Path(f"{tracker.run.id}.html").read_text(encoding="utf-8") == page.source
    assert done.out.splitlines() == [f"{tracker.run.id}.md", f"{tracker.run.id}.html"]


@pytest.mark.slow
def test_a_browser_shows_the_report_and_runs_nothing(store, cli, swallowing):
    run = hostile_run(store)
    report(cli, store)
    address = (store.parent / "out" / f"{run}.html").as_uri()
    with chromium() as browser:
        page = browser.page
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        backgrounds = set()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            browser.go(address)
            browser.read(page.locator("h1"), f"Run {run}")
            browser.read(page.locator("dl").first, "experiment", "<script>alert('x')</script>", "project")
            backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            browser.picture(f"report-{scheme}")
        assert len(backgrounds) == 2
        browser.see(page.locator("script, img, iframe, [onload], [onerror]"), 0)
        for curve in page.locator("polyline.curve").all():
            box = curve.bounding_box()
            assert box is not None
            assert box["width"] > 100
            assert box["height"] > 20
            assert curve.evaluate("each => getComputedStyle(each).stroke") != "none"
        assert page.locator("svg.plot").count() == 2
        # Folded away until somebody asks, without any script.
        config = page.locator("h2#configuration + details")
        assert not config.locator("pre").is_visible()
        config.locator("summary").click()
        browser.read(config.locator("pre"), "<script>alert('x')</script>", "javascript:alert(1)")
        browser.read(page.locator("h2#best-trajectories + div"), "1/1/0", "1/3/0")
        browser.read(page.locator("h2#worst-trajectories + div"), "1/2/0", "TimeoutError")
        page.locator("nav a", has_text="Environment").click()
        assert page.evaluate("document.scrollingElement.scrollTop") > 0
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide == 0
        assert browser.said == []
        # The browser of these tests prepares each page for MLflow, which a blank one refuses.
        assert [text for text in complaints if "localStorage" not in text] == []
        assert set(asked) <= {address, "about:blank"}
