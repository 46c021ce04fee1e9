"""Take the explorer's screenshots for the docs again: `make pictures`. Prints how long the page takes to load."""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from ringspan.tools.explorer.server import address, make_server
from ringspan.tools.explorer.site import write_site

FIGURES = Path(__file__).parent / "figures"
DESKTOP, PHONE = {"width": 1360, "height": 900}, {"width": 390, "height": 844}
IMAGE = "pattern=64x1,256x4&causal=false&order=hilbert&grid=32x32&layout=contiguous&query=300"
LARGE = (
    "pattern=2048x1,8192x4,32768x16,131072x64,1048576x512&tokens=1M&ranks=1024&layout=contiguous&heads=32&kv_heads=8"
)
PACKED = "pattern=full&lengths=40,6*4&layout=balanced&heads=1&kv_heads=1&query=30"
NODES = "pattern=full&causal=false&ranks=8&routing=by-node&ranks_per_node=4&layout=contiguous&heads=1&kv_heads=1&hop=2"
# name: (viewport, colours, link, the card to show, or "" for the page)
PICTURES: dict[str, tuple[dict[str, int], str, str, str]] = {
    "explorer_light": (DESKTOP, "light", "query=37", ""),
    "explorer_dark": (DESKTOP, "dark", IMAGE, ""),
    "explorer_phone": (PHONE, "light", "query=37", ""),
}
VIEWS = {
    "matrix": "query=37",
    "ring": NODES,
    "holdings": PACKED,
    "grid": IMAGE,
    "costs": LARGE,
}
LOADS = 5
OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--views", type=Path, help="also take each view alone, in both colours and widths")
    parser.add_argument("--loads", action="store_true", help="only measure how long the page takes to load")
    arguments = parser.parse_args()
    wanted = {} if arguments.loads else {FIGURES / name: picture for name, picture in PICTURES.items()}
    if arguments.views:
        arguments.views.mkdir(parents=True, exist_ok=True)
        for view, link in VIEWS.items():
            for colours in ("light", "dark"):
                for width, viewport in (("desktop", DESKTOP), ("phone", PHONE)):
                    wanted[arguments.views / f"{view}_{colours}_{width}"] = (viewport, colours, link, f"#{view}-card")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        write_site(Path(folder))
        server = make_server(Path(folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
        ]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        for path, picture in wanted.items():
            take(browser, address(server), path.with_suffix(".png"), *picture)
            print(path.with_suffix(".png"))
        seconds = [load_seconds(browser, address(server)) for _ in range(LOADS)]
        print(
            f"from navigation to all views: {statistics.median(seconds):.2f} s, median of {LOADS} loads without cache"
        )
        browser.close()
        server.shutdown()


def take(browser: Any, home: str, path: Path, viewport: dict[str, int], colours: str, link: str, card: str) -> None:
    page = browser.new_page(viewport=viewport, color_scheme=colours, device_scale_factor=1.25)
    show(page, f"{home}#{link}")
    page.wait_for_timeout(400)
    if card:
        page.locator(card).screenshot(path=path)
    else:
        page.screenshot(path=path, full_page=True)
    page.close()


def load_seconds(browser: Any, home: str) -> float:
    page = browser.new_context().new_page()
    begin = time.perf_counter()
    show(page, home)
    seconds = time.perf_counter() - begin
    page.context.close()
    return seconds


def show(page: Any, link: str) -> None:
    page.goto(link)
    page.wait_for_function(
        "document.body.dataset.done && document.querySelector('main').ariaBusy === 'false'", timeout=90_000
    )


if __name__ == "__main__":
    main()
