"""Sphinx configuration of this documentation; `make docs` builds it into artifacts/docs.

`studies.figures.site` writes tables and plots from docs/results/*.json into the pages first. The options of the command
line are added here.
"""

from sphinx.application import Sphinx

from studies.figures.site import options

project = "redraft"
copyright = "the redraft authors, Apache-2.0"
extensions = ["myst_parser"]
exclude_patterns = ["results"]
nitpicky = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

html_theme = "furo"
html_static_path = ["assets"]
html_css_files = ["site.css"]
html_title = "redraft"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": []}
highlight_language = "none"
pygments_style = "friendly"


def add_options(app: Sphinx, page: str, source: list[str]) -> None:
    """Append what `--help` says of each command to the page of the command line."""
    if page == "reference/cli":
        source[0] += f"\n{options()}"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_options)
