"""Configure the site: `python3 dev.py site` builds it from the pages as they are on GitHub.

The source directory is the repository, so that relative links mean the same file in both places.
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import re
import runpy
from importlib.metadata import version as version_of
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

project = "pytest-megatron"
author = "The pytest-megatron authors"
version = release = version_of(project)
root_doc = "docs/index"
include_patterns = ["docs/**.md", "README.md", "CONTRIBUTING.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
smartquotes = False  # `--` is an option

myst_heading_anchors = 6  # of each heading, as GitHub names them

default_role = "literal"
autodoc_type_aliases = {"JsonValue": "JsonValue"}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
napoleon_use_ivar = True  # an attribute with its type is described by autodoc as well

html_theme = "furo"
html_title = project
html_theme_options = {"light_css_variables": {"code-font-size": "var(--font-size--small--2)"}}
copybutton_prompt_text = "$ "  # of blocks with prompts, the commands alone are copied
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))
html_show_copyright = False
linkcheck_timeout = 20
linkcheck_retries = 2


_TOCTREE = """
```{{toctree}}
:hidden:
:caption: {caption}

{pages}
```
"""
_TABLE = re.compile(r"^<!-- table: (\w+\.py) (\w+) -->$", re.MULTILINE)
_REDIRECT = '<!doctype html><meta http-equiv="refresh" content="0; url={root}.html">\n'


def setup(app: Sphinx) -> None:
    """Connect what this site adds to Sphinx."""
    app.connect("source-read", _add_toctrees)
    app.connect("source-read", _add_tables)
    app.connect("doctree-read", _remove_comments)
    app.connect("build-finished", _redirect_to_root)


def _add_toctrees(_: Sphinx, name: str, content: list[str]) -> None:
    """Add the sections of the index to the side bar, with the pages that they link."""
    if name == root_doc:
        for section in content[0].split("\n## ")[1:]:
            caption, _rest, text = section.partition("\n")
            pages = "\n".join(dict.fromkeys(re.findall(r"\]\(([^)#]+\.md)[)#]", text)))
            content[0] += _TOCTREE.format(caption=caption, pages=pages)


def _add_tables(app: Sphinx, _: str, content: list[str]) -> None:
    """Replace each mark of a table by the rows that its script beside the pages makes."""
    if _TABLE.search(content[0]):
        app.env.note_reread()  # the next build may have other data

    def made(mark: re.Match[str]) -> str:
        """Return the lines of a table."""
        script = runpy.run_path(str(Path(__file__).parent / "reference" / mark[1]))
        return "\n".join(script[mark[2]]())

    content[0] = _TABLE.sub(made, content[0])


def _remove_comments(_: Sphinx, page: nodes.document) -> None:
    """Remove the directives of `tests/docs/literate.py`."""
    for node in list(page.findall(nodes.raw)):
        if node.astext().lstrip().startswith("<!--"):
            node.parent.remove(node)


def _redirect_to_root(app: Sphinx, error: Exception | None) -> None:
    """Open the index where somebody opens the directory of the site."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(_REDIRECT.format(root=root_doc))
