"""One HTML file that needs nothing else: the frame of a page, with its style and script inside.

A page may load nothing and run nothing but its own script: its policy (CSP) allows the digests of
our own style and script and no more. So a text that got out of its quotes would still be inert.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from pytest_megatron.base.templates import render

_INDENT = re.compile(r"^\s+", re.MULTILINE)
_COMMENT_LINE = re.compile(r"^\s*//.*\n", re.MULTILINE)


def document(template: str, script: str, **values: object) -> str:
    """Return a whole page from a template that extends `page.html`.

    Args:
        template: Name of the template.
        script: Name of one of our scripts.
        values: Values of the template; `title` is the page's.
    """
    style, code = _asset("page.css"), _asset(script)
    policy = (
        f"default-src 'none'; style-src 'sha256-{_digest(style)}'; "
        f"script-src 'sha256-{_digest(code)}'; base-uri 'none'; form-action 'none'"
    )
    return render(template, policy=policy, style=style, script=code, **values)


@cache
def _asset(name: str) -> str:
    """Return a file of ours without indentation and comments."""
    content = (files("pytest_megatron.pages") / "assets" / name).read_text(encoding="utf-8")
    return _INDENT.sub("", _COMMENT_LINE.sub("", content)).strip()


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
