"""MLflow's pages in a real browser, on the demo's rollouts and on long, long-winded and hostile ones."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import trackway
from trackway.trace.exporters.mlflow_fold import LIMIT
from trackway.trace.exporters.mlflow_store import embedded_uri
from trackway.trace.exporters.text import TEXT_LIMIT
from trackway.trace.model import Summary

from .browser import Browser, chromium
from .programs import Cli, run, wait_until
from .servers import free_port

pytest.importorskip("mlflow")
pytestmark = pytest.mark.slow

PROJECT = "trackway-demo"
RUN = "grpo-17"
LONG = 200_000
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>[red]**bold** \x1b[31m"

# The demo's project has more than the demo: thousands of calls, a very long prompt, a rollout that fails.
MORE = f"""\
from trackway import reward, rollout_trace, tool_trace

trackway.configure(
    store="store", project={PROJECT!r}, backend="mlflow", sync="process", max_text_length=None
)

@llm_trace(name="generate")
def generate(messages, n):
    asked = {{"name": "search", "arguments": '{{"q": %d}}' % n}}
    calls = [{{"id": f"c{{n}}", "type": "function", "function": asked}}]
    return {{"role": "assistant", "content": f"turn {{n}}", "tool_calls": calls}}

@tool_trace(name="search")
def search(q):
    if q == 40:
        raise ValueError("no such page")
    return read_page(q)

@tool_trace(name="read_page")
def read_page(q):
    return f"page {{q}}"

@rollout_trace(name="web_agent")
def agent(turns, calls, prompt):
    messages = [{{"role": "user", "content": prompt}}]
    for n in range(turns):
        messages = [*messages, generate(messages, n)]
        for k in range(calls):
            try:
                found = search(n * calls + k)
            except ValueError as error:
                found = str(error)
        messages = [*messages, {{"role": "tool", "tool_call_id": f"c{{n}}", "content": found}}]
    reward("answer", 0.5)

with trajectory(step=3, sample_index="web/1"):
    agent(50, 49, "Find it.")
with trajectory(step=4, sample_index=0):
    agent(2, 1, "Read this. " + "x" * {LONG})
try:
    with trajectory(step=5, sample_index=0):
        agent(1, 1, {HOSTILE!r})
        raise RuntimeError("the sandbox is gone")
except RuntimeError:
    pass
status = trackway.flush(timeout=200)
assert status.pending == 0, status
"""


@dataclass
class Ui:
    """``trackway ui`` at work.

    Attributes:
        store: whose page it serves.
        server: address of the server.
        page: address that it named, of the experiment in the view Rollouts.
        run_id: of the run that all rollouts belong to.
    """

    store: Path
    server: str
    page: str
    run_id: str

    @property
    def experiment(self) -> str:
        return self.page.partition("/traces")[0]

    def only(self, **tags: object) -> str:
        """Give the address of the list with the rollouts that have these tags."""
        return self.page + "".join(
            f"&tag={quote(f'{name}={value}', safe='')}" for name, value in tags.items()
        )

    def rollouts(self, **where: Any) -> list[Summary]:
        """Find rollouts in the store, which the page has to agree with."""
        return list(trackway.open_store(self.store).query(**where))


def trackway_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "trackway", *map(str, arguments)]


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory, blank_mlflow: Path) -> Iterator[Ui]:
    """The demo is played, more is recorded, all of it under one run; then ``trackway ui`` is called."""
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("page")
    store = folder / "store"
    store.mkdir()
    shutil.copy(blank_mlflow, store / "mlflow.db")
    client = MlflowClient(embedded_uri(store))
    experiment = client.create_experiment(PROJECT, artifact_location=str(folder / "artifacts"))
    run_id = client.create_run(experiment, run_name=RUN).info.run_id
    environment = {**os.environ, "MLFLOW_RUN_ID": run_id}
    demo = trackway_command("demo", "--no-model", "--prompts", "2", "--store", store)
    subprocess.run(demo, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    more = run(folder, MORE, timeout=280, MLFLOW_RUN_ID=run_id)
    assert more.returncode == 0, more.stderr

    port = free_port()
    command = trackway_command("ui", "--no-open", "--store", store, "--port", str(port))
    log = folder / "ui.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)
    try:
        said = wait_until(lambda: process.poll() is None and re.search(r"MLflow UI: +(\S+)", log.read_text()))
        assert said, log.read_text()
        yield Ui(store, f"http://127.0.0.1:{port}", said[1], run_id)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


# The list


def test_ui_opens_all_rollouts_with_their_steps_and_rewards(ui: Ui, browser: Browser) -> None:
    assert ui.page.startswith(f"{ui.server}/#/experiments/")
    rollouts = ui.rollouts()
    browser.list(ui.page, len(rollouts))
    browser.read(browser.part("mlflow.traces-v4.saved_views.trigger"), "Rollouts")
    table = browser.page.locator("table, [role=table]").first
    browser.read(table, "Session", "reward", "answer", "format", "Input", "rollout_n", "sample_index", "step")
    rewards = [f"{each.reward:.2f}" for each in rollouts if each.reward is not None]
    assert rewards.count("1.10") > 3
    browser.see(table.get_by_text("1.10", exact=True), rewards.count("1.10"))
    browser.picture("rollouts")


def test_the_failures_are_one_click_away(ui: Ui, browser: Browser) -> None:
    rollouts = ui.rollouts()
    failed = [each for each in rollouts if each.errors or each.status != "ok"]
    assert 0 < len(failed) < len(rollouts)
    browser.list(ui.page, len(rollouts))
    browser.part("mlflow.traces-v4.saved_views.trigger").click()
    browser.page.get_by_role("menuitem", name="Failures").click()
    browser.see(browser.rows(), len(failed))
    browser.picture("failures")


def test_the_filter_for_a_tag_leaves_the_rollouts_of_one_step(ui: Ui, browser: Browser) -> None:
    browser.list(ui.page, len(ui.rollouts()))
    browser.part("web-shared.traces-table.filter.trigger").click()
    browser.part("web-shared.traces-table.filter.field").click()
    browser.page.get_by_role("option", name="Tag", exact=True).click()
    browser.part("web-shared.traces-table.filter.key").fill("step")
    browser.part("web-shared.traces-table.filter.value").fill("1")
    with browser.page.expect_request("**/traces/search") as asked:
        browser.part("web-shared.traces-table.filter.apply").click()
    assert "tags.step = '1'" in asked.value.post_data_json["filter"]
    browser.see(browser.rows(), len(ui.rollouts(step=1)))
    browser.picture("step-1")
    # The same by address, as the command says it.
    browser.list(f"{ui.page}&tag=step%3D1&tag=sample_index%3D0", len(ui.rollouts(step=1, sample=0)))


# One rollout


def test_a_rollout_shows_its_chat_its_tool_calls_its_rewards_and_its_tokens(ui: Ui, browser: Browser) -> None:
    found = next(each for each in ui.rollouts(step=1) if each.errors and each.turns > 3)
    trajectory = trackway.open_store(ui.store).load(found.trace_id)
    failed = next(call for call in trajectory.tool_calls if call.error)
    worked = next(call for call in trajectory.tool_calls if not call.error)
    browser.list(ui.only(step=1, sample_index=found.sample_index, rollout_n=found.rollout_n), 1)
    drawer = browser.open()
    browser.see(browser.spans(drawer), found.spans)
    generations = [span for span in trajectory.spans if span.kind == "llm"]
    tokens = sum(len(span.prompt_ids or ()) + len(span.response_ids or ()) for span in generations)
    browser.read(drawer, f"{tokens:,} tokens")
    browser.read(
        drawer,
        "What is 12 times 36?",  # the prompt before it ends with this
        "Outputs",
        "Tool calls",
        str(failed.arguments["expression"]),
        str(failed.error),
        "Tool calls",
        str(worked.arguments["expression"]),
        str(worked.result),
        "Answer:",
        "reward",
        f"{found.reward:g}",
    )
    browser.picture("rollout")
    drawer.get_by_text("Answer:").last.scroll_into_view_if_needed()
    browser.picture("rollout-end")
    drawer.get_by_text("Assess").first.click()
    feedback = [text for name in sorted(found.rewards) for text in (name, f"{found.rewards[name]:g}")]
    browser.read(drawer, "Feedback (3)", *feedback)
    browser.picture("rollout-rewards")


def test_a_failed_call_is_red_and_says_why(ui: Ui, browser: Browser) -> None:
    found = next(each for each in ui.rollouts(step=1) if each.errors)
    trajectory = trackway.open_store(ui.store).load(found.trace_id)
    failed = next(call for call in trajectory.tool_calls if call.error)
    browser.list(ui.only(step=1, sample_index=found.sample_index, rollout_n=found.rollout_n), 1)
    drawer = browser.open()
    drawer.get_by_test_id(f"span-title-row-{failed.span_id}").click()
    browser.read(drawer, "exception.message", str(failed.error).partition(": ")[2])
    browser.picture("failed-call")


def test_a_failed_rollout_says_why_and_what_it_says_stays_text(ui: Ui, browser: Browser) -> None:
    browser.list(ui.only(step=5), 1)
    browser.read(browser.page.locator("body"), "⟨error: RuntimeError: the sandbox is gone⟩")
    drawer = browser.open()
    browser.read(drawer, "Error", "<img src=x onerror=alert(1)>", "RuntimeError: the sandbox is gone")
    browser.picture("failed-rollout")
    assert browser.said == []


def test_the_run_has_all_its_rollouts(ui: Ui, browser: Browser) -> None:
    count = len(ui.rollouts())
    browser.go(f"{ui.experiment}/runs/{ui.run_id}/evaluations")
    browser.read(browser.page.locator("body"), RUN, f"{count} of {count}")
    browser.picture("run")


# Several rollouts


def test_a_group_is_one_session_with_the_reward_of_each_rollout(ui: Ui, browser: Browser) -> None:
    group = sorted(ui.rollouts(step=1, sample=0), key=lambda each: each.start_ns)
    assert len({each.reward for each in group}) > 1
    browser.go(f"{ui.experiment}/chat-sessions/1:0")
    expected = []
    for each in group:
        expected += ["What is 12 times 36?", f"reward: {each.reward:g}"]
    browser.read(browser.page.locator("body"), "1:0", *expected)
    browser.picture("session")


def test_two_rollouts_are_compared_side_by_side(ui: Ui, browser: Browser) -> None:
    group = ui.rollouts(step=1, sample=0)
    best, worst = (choose(group, key=lambda each: each.reward or 0) for choose in (max, min))
    assert best.reward != worst.reward
    browser.list(ui.only(step=1, sample_index=0), len(group))
    for each in (best, worst):
        row = browser.page.locator("tr, [role=row]").filter(
            has=browser.page.locator(f"[aria-label^='Open trace tr-{each.trace_id}']")
        )
        row.locator("[data-component-id='web-shared.traces-table.row-select']").click()
    browser.part("mlflow.traces-v4.actions.trigger").click()
    browser.part("mlflow.traces-v4.actions.compare").click()
    drawer = browser.page.locator("[role=dialog]")
    browser.read(drawer, "Comparing 2 traces", best.trace_id, worst.trace_id)
    browser.see(drawer.get_by_text("What is 12 times 36?"), 2)
    browser.read(drawer, "reward", f"{best.reward:g}", "reward", f"{worst.reward:g}")
    browser.picture("compared")
    drawer.get_by_text("Details & Timeline").click()
    browser.see(drawer.get_by_text("Trace breakdown"), 2)
    browser.read(drawer, "calculator_agent", "What is 12 times 36?", "calculator_agent")
    browser.picture("compared-details")


# Long ones


def test_thousands_of_calls_are_folded_and_the_page_says_how_to_see_them(ui: Ui, browser: Browser) -> None:
    (found,) = ui.rollouts(step=3)
    browser.list(ui.only(folded=f"{found.spans - LIMIT} of {found.spans} spans"), 1)
    drawer = browser.open()
    browser.see(browser.spans(drawer), LIMIT)
    browser.read(drawer, "left_out", f"{found.spans - LIMIT} of {found.spans} spans are left out here")
    browser.picture("folded")
    browser.spans(drawer).nth(1).click()
    browser.read(drawer, "left_out", "read_page × ", "search × ", "are left out here")
    browser.picture("folded-inside")
    whole = json.loads(as_the_page_says(ui, drawer))
    assert len(whole["spans"]) == found.spans


def test_a_long_prompt_is_cut_and_the_page_says_how_to_see_it(ui: Ui, browser: Browser) -> None:
    browser.list(ui.only(step=4), 1)
    drawer = browser.open()
    browser.picture("long-prompt")
    drawer.get_by_text("See more").first.click()
    browser.read(drawer, f"⟨{LONG + len('Read this. ') - TEXT_LIMIT} characters are left out here; ")
    assert as_the_page_says(ui, drawer).count("x") >= LONG


def as_the_page_says(ui: Ui, drawer: Any) -> str:
    """Call the command that stands in the page."""
    text = re.sub(r"\s+", " ", drawer.inner_text())
    command = re.search(r"trackway show \S+ --(json|full)", text)
    assert command, text
    words = trackway_command(*shlex.split(command[0])[1:], "--store", ui.store)
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout


# On a server that is there already


def test_ui_of_a_store_that_goes_to_a_server_opens_its_page_there(
    ui: Ui, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ui.server)
    result = cli("ui", "--store", str(ui.store))
    assert result.code == 0, result.err
    assert f"MLflow UI:       {ui.page}\n" in result.out
    assert opened == [ui.page]


def test_ui_opens_the_usual_page_where_the_view_was_deleted(
    ui: Ui, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    experiment = MlflowClient(ui.server).create_experiment("a / plain one?")
    trackway.configure(store=tmp_path / "store", project="a / plain one?", backend=None)
    trackway.shutdown()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ui.server)
    result = cli("ui", "--no-open", "--store", str(tmp_path / "store"))
    assert f"{ui.server}/#/experiments/{experiment}/traces?startTimeLabel=ALL\n" in result.out


def test_ui_of_a_project_that_was_never_sent_says_so(
    ui: Ui, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackway.configure(store=tmp_path / "store", project="another", backend=None)
    trackway.shutdown()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ui.server)
    result = cli("ui", "--no-open", "--store", str(tmp_path / "store"))
    assert f"MLflow UI:       {ui.server}\n" in result.out
    assert "there is no experiment 'another' yet" in result.out + result.err
