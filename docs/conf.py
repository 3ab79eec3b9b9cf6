"""Sphinx configuration; `make docs` builds with warnings as errors."""

from __future__ import annotations

from freetrain_parsl import __version__

project = "FreeTrain for Parsl"
author = "The FreeTrain developers"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # the NumPy-style docstrings state the relevant types
autodoc_member_order = "bysource"
napoleon_google_docstring = False

html_theme = "furo"
html_title = f"{project} {version}"
