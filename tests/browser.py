"""Chromium on the traces of an experiment, used as a person would; what it showed is kept as pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .programs import installed

SCREENSHOTS = Path(__file__).parents[1] / "build" / "screenshots"
PATIENCE = 120_000
"""Milliseconds for anything that must happen; far more than it needs."""

# Without these, the first visit is covered by hints of the page.
_SEEN = """
localStorage.setItem('mlflow.detectIssues.guidanceShown_v1', 'true');
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');
localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
"""


class Browser:
    """One tab of the browser.

    Attributes:
        page: playwright's.
        said: what dialogs of the page said; a trace must not make it say anything.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        page.on("dialog", self._dismiss)

    def _dismiss(self, dialog: Any) -> None:
        self.said.append(dialog.message)
        dialog.dismiss()

    def part(self, component: str) -> Any:
        """Give the elements that MLflow calls by a name."""
        return self.page.locator(f"[data-component-id='{component}']")

    def go(self, address: str) -> None:
        """Open an address; from a blank page, since one that differs after the ``#`` only changes nothing."""
        self.page.goto("about:blank")
        self.page.goto(address)

    def rows(self) -> Any:
        """Give the rows of the list of traces; of each the cell of its input, which opens it."""
        return self.page.locator("[aria-label^='Open trace'][aria-label$='input']")

    def list(self, address: str, count: int) -> None:
        """Open the list of traces at an address, and wait until it has this many rows."""
        self.go(address)
        self.see(self.rows(), count)

    def see(self, found: Any, count: int) -> None:
        """Wait until there are this many of the elements."""
        from playwright.sync_api import expect

        expect(found).to_have_count(count, timeout=PATIENCE)

    def read(self, found: Any, *texts: str) -> None:
        """Wait until an element shows all of these texts, in this order."""
        from playwright.sync_api import expect

        expect(found).to_contain_text(
            re.compile(".*?".join(map(re.escape, texts)), re.DOTALL), timeout=PATIENCE, use_inner_text=True
        )

    def open(self) -> Any:
        """Open the first trace of the list; give the drawer that shows it."""
        self.rows().first.click()
        drawer = self.page.locator("[role=dialog]")
        drawer.get_by_test_id("model-trace-explorer-default-span-view").wait_for()
        return drawer

    def spans(self, drawer: Any) -> Any:
        """Give the lines of the tree of spans."""
        return drawer.locator("[data-testid^='span-title-row']")

    def picture(self, name: str) -> None:
        """Keep what is in the window."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium; a test skips where it is missing, and fails under CI."""
    program = installed("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            context = browser.new_context(viewport={"width": 1500, "height": 950})
            context.add_init_script(_SEEN)
            context.set_default_timeout(PATIENCE)
            yield Browser(context.new_page())
        finally:
            browser.close()
