"""Templates of HTML, SVG, Markdown and CI's YAML, in environments that are loaded on first use.

Templates are files in the folder `templates` of a feature. They escape every value but those that a
filter of this module has escaped already, and fail on a name that they are not given. In YAML,
where the place of a value decides how it is escaped, a filter does it.
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from pytest_megatron.base import text

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_PACKAGE = Path(__file__).parents[1]


def render(name: str, **values: object) -> str:
    """Return a whole template; the end of its name is its language."""
    page = _environment(name).get_template(name).render(values)
    return page.encode("utf-8", "replace").decode()  # half a surrogate pair is no UTF-8


def render_macro(name: str, macro: str, *arguments: object) -> str:
    """Return one macro of a template."""
    module = _environment(name).get_template(name).module
    return str(getattr(module, macro)(*arguments)).encode("utf-8", "replace").decode()


def _environment(name: str) -> Environment:
    if name.endswith(".yml"):
        return _yaml()
    return _markdown() if name.endswith(".md") else _html()


@cache
def _html() -> Environment:
    """Return the environment of templates for HTML pages, which escapes values."""
    environment = _new(lambda value: html.escape(text.visible(value)))
    environment.filters["href"] = _href
    environment.filters["cut"] = text.shorten
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _href(path: str) -> str:
    """Return a relative path for an attribute; never a scheme, whatever its characters."""
    return quote(path, safe="/._-~+=@,", errors="replace")


@cache
def _markdown() -> Environment:
    """Return the environment of templates for Markdown, which escapes values."""
    environment = _new(text.escaped)
    environment.filters |= {
        "code": lambda value, most=None: _safe(text.code(str(value), most)),
        "cell": lambda value, most=None: _safe(text.code(str(value), most).replace("|", "\\|")),
        "fenced": lambda value, most=None, language="text": _safe(
            text.fenced(value, most, language)
        ),
        "within": lambda lines, most_bytes, rest: _safe(text.within(lines, most_bytes, rest)),
    }
    return environment


@cache
def _yaml() -> Environment:
    """Return the environment of files for CI systems, whose expressions have braces."""
    environment = _new(str).overlay(
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
    )
    environment.filters |= {
        "inner_json": _inner_json,
        "quoted": _quoted,
        "shell": shlex.quote,
        "words": lambda words: "".join(f" {shlex.quote(word)}" for word in words),
    }
    return environment


def _inner_json(value: object) -> str:
    """Return JSON for a string of an expression; without spaces it is a plain scalar of YAML."""
    return json.dumps(value, separators=(",", ":")).replace("'", "''")


def _quoted(text: str) -> str:
    """Return a scalar of YAML, and of GitHub's expressions, for any text."""
    return "'" + text.replace("'", "''") + "'"


def _safe(markup: str) -> Markup:
    """Mark a text that is escaped already, so that templates leave it alone."""
    from markupsafe import Markup

    return Markup(markup)  # noqa: S704 - was escaped


def _new(escape: Callable[[str], str]) -> Environment:
    """Return an environment in which `escape` makes a text harmless."""
    # Neither a start of pytest nor a rank imports jinja2.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def escaped(value: object) -> object:
        is_safe = isinstance(value, int | float) or hasattr(value, "__html__")
        return value if is_safe else _safe(escape(str(value)))

    return Environment(
        loader=FileSystemLoader(sorted(_PACKAGE.glob("*/templates"))),
        autoescape=True,  # leaves a text that `escaped` returned as it is
        auto_reload=False,
        finalize=escaped,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
