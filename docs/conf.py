"""The documentation site: `make docs`. Built from the pages of this folder and from docstrings, without network."""

import sys
from pathlib import Path

import ringspan

sys.path.insert(0, str(Path(__file__).parent))  # commands, explorer_site and formulas are extensions of this folder

project = "ringspan"
author = "The ringspan authors"
copyright = author
release = ringspan.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "commands",
    "explorer_site",
    "formulas",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
smartquotes = False  # `--option` in running text stays what it is

default_role = "code"  # `names` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures are long enough; docstrings say what matters
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_math_renderer = "mathtext"
html_title = f"ringspan {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
