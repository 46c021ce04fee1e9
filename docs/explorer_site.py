"""Puts the explorer next to the pages of the site, in the folder `explorer`, each time the site is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringspan.tools.explorer.site import write_site


def write_explorer(app: Any, failure: Exception | None) -> None:
    """Handler of Sphinx's `build-finished` event."""
    if failure is None:
        write_site(Path(app.outdir) / "explorer", in_docs=True)


def setup(app: Any) -> None:
    app.connect("build-finished", write_explorer)
