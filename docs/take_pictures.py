"""Take the explorer's screenshots for the docs again: `make pictures`."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from ringspan.tools.explorer.server import address, make_server
from ringspan.tools.explorer.site import write_site
from tests.explorer.page import launch

FIGURES = Path(__file__).parent / "figures"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--views", type=Path, help="also take each view alone, in both colours and widths")
    arguments = parser.parse_args()
    wanted = {FIGURES / name: picture for name, picture in PICTURES.items()}
    wanted |= {FIGURES / f"explorer_{view}": (DESKTOP, "light", link, f"#{view}-card") for view, link in VIEWS.items()}
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
        browser = launch(playwright, shutil.which("chromium") or "chromium")
        for path, picture in wanted.items():
            take(browser, address(server), path.with_suffix(".png"), *picture)
            print(path.with_suffix(".png"))
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


def show(page: Any, link: str) -> None:
    page.goto(link)
    page.wait_for_function(
        "document.body.dataset.done && document.querySelector('main').ariaBusy === 'false'", timeout=90_000
    )


if __name__ == "__main__":
    main()
