"""The page in a real browser, on a real run: `producer dashboard`, `producer submit` and `worker run` as processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from contract.ledger import BatchState
from contract.settings import ProducerSettings
from producer.gateway import keys
from tests.e2e.system import START_S, System
from tests.servers import free_port

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\u202egpj.exe '
PATIENCE_MS = 20_000
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: install the package `chromium`"),
]


class Watched:
    """A page in the browser, and everything that went wrong in it."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.add_init_script(WATCH)
        self.trouble: list[str] = []
        self.page.on("dialog", lambda dialog: (self.trouble.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("console", lambda told: self.trouble.append(told.text) if told.type == "error" else None)

    def is_well(self) -> None:
        assert self.trouble == []
        assert self.page.evaluate("window.violations") == []

    def tab_to(self, label: str) -> None:
        """Press Tab until what is called `label` has the focus."""
        for _ in range(60):
            self.page.keyboard.press("Tab")
            named = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
            if self.page.evaluate(named).strip() == label:
                return
        raise AssertionError(f"'{label}' cannot be reached with the keyboard")


@pytest.fixture
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def test_a_run_is_seen_moving_and_a_failed_prompt_is_retried_by_keyboard(
    system: System, browser: Any, wait_until: Callable[..., None]
) -> None:
    key = keys.make(keys.place(ProducerSettings(root=system.root)), "alice", None, None)
    address = f"http://127.0.0.1:{(port := free_port())}"
    system.start("producer", "dashboard", "--port", str(port), "--allow-actions")
    system.start("worker", "run", "--max-rows", "4")
    wait_until(lambda: _answers(address), START_S)
    watched = Watched(browser.new_context(viewport={"width": 1280, "height": 900}))
    log_in(watched, address, key)
    rows = [{"prompt": f"prompt {number}", "max_new_tokens": 96} for number in range(40)]
    batch = system.submit("asked.jsonl", [{"prompt": HOSTILE * 200, "id": "hostile"}, *rows])
    it_moves_without_being_loaded_again(watched, batch, wait_until)
    wait_until(lambda: _is(system, batch, BatchState.DONE), START_S)
    the_failed_prompt_is_text(watched, address, batch)
    it_is_retried(watched, system, address, batch, wait_until)
    a_phone_scrolls_one_way_only(watched, address, batch)
    dark_is_dark(watched, address)


def log_in(watched: Watched, address: str, key: str) -> None:
    """By keyboard: the field has the focus, Enter sends it."""
    watched.page.goto(address)
    watched.page.keyboard.type(key)
    watched.page.keyboard.press("Enter")
    watched.page.wait_for_selector("h1:text('Overview')")
    assert watched.page.evaluate("document.cookie") == ""  # no script reads it
    watched.page.keyboard.press("Tab")
    assert watched.page.evaluate("document.activeElement.textContent") == "Skip to content"
    watched.is_well()


def it_moves_without_being_loaded_again(watched: Watched, batch: str, wait_until: Callable[..., None]) -> None:
    page = watched.page
    page.evaluate("window.loaded = 'once'")
    page.wait_for_selector(f"#batches a:text('{batch}')")
    page.wait_for_selector("#workers td:text('tiny')")
    for sight in (
        "#batches progress').value > 1",
        "#batches progress').value == 41",
        "#throughput dd').textContent > '1'",
    ):
        wait_until(lambda sight=sight: page.evaluate(f"document.querySelector('{sight}"))
    assert page.evaluate("window.loaded") == "once"
    watched.is_well()


def the_failed_prompt_is_text(watched: Watched, address: str, batch: str) -> None:
    page = watched.page
    for path in (f"/batches/{batch}", f"/batches/{batch}:0", "/failures", "/"):
        page.goto(f"{address}{path}")
        assert page.evaluate("document.images.length") == 0
    page.goto(f"{address}/batches/{batch}")
    assert "<script>alert(1)</script>" in page.inner_text("#failed .prompt >> nth=0")
    assert "\\u202egpj" in page.inner_text("#failed .prompt >> nth=0")
    assert "prompt_too_long" in page.inner_text("#failed")
    watched.is_well()


def it_is_retried(watched: Watched, system: System, address: str, batch: str, wait_until: Callable[..., None]) -> None:
    finished = system.ledger().get(batch).finished_at  # type: ignore[union-attr]
    watched.tab_to(f"Retry row 0 of {batch}")
    watched.page.keyboard.press("Enter")
    watched.page.wait_for_selector("#notices li:has-text('1 row queued again')")
    # It is as long as before: it runs, and fails, a second time.
    wait_until(lambda: _is(system, batch, BatchState.DONE), START_S)
    assert system.ledger().get(batch).finished_at > finished  # type: ignore[union-attr, operator]
    watched.page.goto(f"{address}/batches/{batch}:0")
    assert "prompt_too_long" in watched.page.inner_text("main")
    watched.is_well()


def a_phone_scrolls_one_way_only(watched: Watched, address: str, batch: str) -> None:
    watched.page.set_viewport_size({"width": 320, "height": 640})
    for path in ("/", f"/batches/{batch}", f"/batches/{batch}:0", "/failures"):
        watched.page.goto(f"{address}{path}")
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= 320, path


def dark_is_dark(watched: Watched, address: str) -> None:
    watched.page.goto(address)
    colours = {}
    for scheme in ("light", "dark"):
        watched.page.emulate_media(color_scheme=scheme)
        told = watched.page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        colours[scheme] = [sum(map(int, one.removeprefix("rgb(").rstrip(")").split(","))) for one in told]
    assert colours["light"][0] > 600 > 200 > colours["light"][1]
    assert colours["dark"][0] < 200 < 600 < colours["dark"][1]
    watched.is_well()


def _is(system: System, batch: str, state: BatchState) -> bool:
    found = system.ledger().get(batch)
    return found is not None and found.state is state


def _answers(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/login").status_code == 200
    except httpx2.TransportError:
        return False
