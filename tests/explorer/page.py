"""The explorer as tests use it: open it, show settings, read what it shows."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

VIEWS = ("matrix", "ring", "holdings", "grid", "costs")
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
# Counts how far things move while the page loads: the cumulative layout shift.
SHIFTS = (
    "window.shifts = 0; new PerformanceObserver(list => { for (const one of list.getEntries()) "
    "if (!one.hadRecentInput) window.shifts += one.value; }).observe({type: 'layout-shift', buffered: true});"
)
_TIMEOUT = 60_000  # milliseconds, on a busy machine


def launch(playwright: Any, chromium: str) -> Any:
    """Chromium without a window and with a fresh profile."""
    return playwright.chromium.launch(executable_path=chromium, args=list(_OPTIONS))


def fragment(settings: dict[str, Any]) -> str:
    return urlencode({name: str(x).lower() if isinstance(x, bool) else x for name, x in settings.items()}, safe=",")


class Explorer:
    """A page in a context of its own. Records the requests and the errors of the page."""

    def __init__(self, browser: Any, home: str, **options: Any) -> None:
        self.home = home
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(_TIMEOUT)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def __enter__(self) -> Explorer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.context.close()

    def open(self, link: str = "") -> None:
        self.page.goto(link if link.startswith("http") else f"{self.home}#{link}")
        self.wait()

    def wait(self) -> None:
        """Until all views show the settings."""
        self.page.wait_for_function("document.body.dataset.done && document.querySelector('main').ariaBusy === 'false'")
        assert self.errors == []

    def show(self, **settings: Any) -> None:
        """Show these settings and selections; all others are defaults."""
        self.follow(fragment(settings))

    def follow(self, link: str) -> None:
        """Show the state of a link."""
        script = "link => { document.body.dataset.done ||= 'yes'; window.location.hash = link || 'head=0'; }"
        self.page.mouse.move(0, 0)  # points at nothing
        self.page.evaluate(script, link)
        self.page.evaluate("() => new Promise(done => setTimeout(done, 50))")
        self.wait()

    def drawn(self) -> dict[str, str]:
        """What each view shows, as SVG."""
        return {name: self.page.eval_on_selector(f"#{name}", "box => box.innerHTML") for name in VIEWS}

    def costs(self) -> dict[int, dict[str, int]]:
        """The numbers in the table of ranks."""
        rows = self.page.eval_on_selector_all("#numbers tr[data-rank]", "rows => rows.map(row => ({...row.dataset}))")
        return {int(row["rank"]): {name: int(value) for name, value in row.items()} for row in rows}

    def error(self) -> str:
        return str(self.page.inner_text("#error")) if self.page.is_visible("#error") else ""

    def settings(self) -> dict[str, Any]:
        """The settings in the link of the page."""
        return dict(json.loads(self.page.evaluate(
            "() => JSON.stringify(Object.fromEntries(new URLSearchParams(location.hash.slice(1))))"
        )))  # fmt: skip
