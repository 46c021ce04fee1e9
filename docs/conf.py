"""The documentation site: `make docs`. Built from the pages of this folder and from docstrings, without network."""

import ringspan

project = "ringspan"
author = "The ringspan authors"
copyright = author
release = ringspan.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"ringspan {release}"
myst_heading_anchors = 3
default_role = "code"  # `names` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures are long enough; docstrings say what matters
napoleon_google_docstring = True
napoleon_numpy_docstring = False
exclude_patterns = ["_build"]
