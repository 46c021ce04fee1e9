"""The explorer in a real browser: Chromium without a window, driven by Playwright, from a server on this machine.

Skipped where Playwright, Chromium or Pyodide (which npm fetches) is missing.
"""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringspan.tools.explorer.server import address, make_server
from ringspan.tools.explorer.site import write_site
from tests.explorer.page import Explorer, launch


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None:  # any other reason why there is no page is a failure
        pytest.skip("npm is not installed: apt-get install npm")
    folder = tmp_path_factory.mktemp("explorer")
    write_site(folder)
    return folder


@pytest.fixture(scope="session")
def home(site: Path) -> Iterator[str]:
    with make_server(site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield address(server)
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as running:
        launched = launch(running, chromium)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def shared(browser: Any, home: str) -> Iterator[Explorer]:
    """One page for many tests: loading takes a second or two. Each test sets the state it needs."""
    with Explorer(browser, home) as page:
        page.open()
        yield page


@pytest.fixture
def explorer(shared: Explorer) -> Explorer:
    shared.show()
    return shared
