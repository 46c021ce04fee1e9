"""Take the screenshots of the start page, the concept page and the tutorials for docs/site.md: `make pictures`."""

from __future__ import annotations

import argparse
import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from run_tutorials import PAGES
from take_pictures import DESKTOP, FIGURES, PHONE
from tests.explorer.page import launch

DOCS = Path(__file__).parent
NAMES = ("index", "concepts", *(f"tutorials/{page.stem}" for page in PAGES))
# name: (viewport, colours, width of a picture on the sheet)
SHEETS: dict[str, tuple[dict[str, int], str, int]] = {
    "site_light": (DESKTOP, "light", 400),
    "site_dark": (DESKTOP, "dark", 400),
    "site_phone": (PHONE, "light", 225),
}
COLUMNS, GAP = 4, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, default=DOCS / "_build", help="the site that make docs built")
    parser.add_argument("--pages", type=Path, help="also write each page in full into this folder")
    arguments = parser.parse_args()
    with sync_playwright() as playwright:
        browser: Any = launch(playwright, shutil.which("chromium") or "")
        for sheet, (viewport, colours, width) in SHEETS.items():
            shots = []
            for name in NAMES:
                page = browser.new_page(viewport=viewport, color_scheme=colours)
                page.goto((arguments.site.resolve() / f"{name}.html").as_uri())
                wide = page.evaluate("document.documentElement.scrollWidth")
                if wide > viewport["width"]:
                    raise SystemExit(f"{name} is {wide} pixels wide on a screen of {viewport['width']}")
                shots.append(Image.open(io.BytesIO(page.screenshot())))
                if arguments.pages:
                    arguments.pages.mkdir(parents=True, exist_ok=True)
                    page.screenshot(path=arguments.pages / f"{sheet}_{name.replace('/', '_')}.png", full_page=True)
                page.close()
            contact_sheet(shots, width).save(FIGURES / f"{sheet}.webp", quality=80, method=6)
            print(f"docs/figures/{sheet}.webp")
        browser.close()


def contact_sheet(shots: Sequence[Image.Image], width: int) -> Image.Image:
    """All pictures side by side, on grey."""
    height = round(width * shots[0].height / shots[0].width)
    rows = -(-len(shots) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (width + GAP) + GAP, rows * (height + GAP) + GAP), "#8A8A8A")
    for i, shot in enumerate(shots):
        down, across = divmod(i, COLUMNS)
        place = (GAP + across * (width + GAP), GAP + down * (height + GAP))
        sheet.paste(shot.convert("RGB").resize((width, height), Image.Resampling.LANCZOS), place)
    return sheet


if __name__ == "__main__":
    main()
