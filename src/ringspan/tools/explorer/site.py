"""Puts the explorer's page together: its own files, the modules that it runs, and Pyodide, which npm fetches once."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

from ringspan.runtime.settings import RunError

PYODIDE_VERSION = "314.0.7"
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
# What the page runs. tests/tools/explorer checks that it imports without torch, and nothing else of the package.
MODULES = (
    *("__init__.py", "balance.py", "layout.py", "runtime/__init__.py", "runtime/counts.py", "tools/__init__.py"),
    *("geometry/*.py", "planning/*.py"),
    *(f"tools/explorer/{name}.py" for name in ("__init__", "baselines", "settings", "views")),
)
_PACKAGE = Path(__file__).parents[2]
_PAGE = Path(__file__).parent / "page"
_HOME = 'href="../index.html"'
_FIRST_TIME = (1980, 1, 1, 0, 0, 0)  # so that equal sources give equal archives


def write_site(folder: Path, *, in_docs: bool = False) -> None:
    """Write the static site into a folder. ``in_docs``: the folder is next to the pages of the documentation."""
    pyodide = pyodide_folder()
    shutil.copytree(_PAGE, folder, dirs_exist_ok=True)
    shutil.copytree(pyodide, folder / "pyodide", dirs_exist_ok=True)
    write_modules(folder / "ringspan.zip")
    if not in_docs:
        page = folder / "index.html"
        page.write_text(page.read_text().replace(_HOME, 'href="./"'))


def write_modules(path: Path) -> None:
    """Write the archive of the modules that run in the page."""
    files = sorted({file for name in MODULES for file in _PACKAGE.glob(name)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(str(Path("ringspan") / file.relative_to(_PACKAGE)), _FIRST_TIME)
            archive.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)


def pyodide_folder() -> Path:
    """The folder with Pyodide's files, in the user's cache. npm fetches them if they are missing.

    Raises RunError, which says what to do, if they cannot be fetched.
    """
    folder = Path.home() / ".cache/ringspan" / f"pyodide-{PYODIDE_VERSION}"
    if all((folder / name).is_file() for name in PYODIDE_FILES):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        _fetch(Path(place))
        shutil.rmtree(folder, ignore_errors=True)
        (Path(place) / "package").rename(folder)
    return folder


def _fetch(place: Path) -> None:
    """Fetch Pyodide with npm, and leave its files in ``package``."""
    way_out = f"run `npm pack pyodide@{PYODIDE_VERSION}` to see why; the explorer needs it once, about 6 MB"
    command = ["npm", "pack", f"pyodide@{PYODIDE_VERSION}", "--silent", "--pack-destination", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    except FileNotFoundError:
        raise RunError(
            "the explorer runs Python in the browser with Pyodide, which npm fetches, but npm is not installed: "
            "install Node.js, then run `ringspan explore` again"
        ) from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise RunError(f"npm could not fetch Pyodide {PYODIDE_VERSION}: {way_out}") from error
    (found,) = place.glob("*.tgz")
    (place / "package").mkdir()
    with tarfile.open(found) as archive:
        for name in PYODIDE_FILES:
            content = archive.extractfile(f"package/{name}")
            if content is None:
                raise RunError(f"Pyodide {PYODIDE_VERSION} has no file {name}: {way_out}")
            (place / "package" / name).write_bytes(content.read())
