"""One HTML file that needs nothing else: escaping, the frame, styles and scripts inside. Pure.

A page may load nothing and run nothing but its own script: its policy (CSP) allows the digests of
what we put in and no more. So a text that got out of its quotes would still be inert.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from urllib.parse import quote

from pytest_megatron.base.files import JsonValue
from pytest_megatron.pages.model import FileLink

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_INDENT = re.compile(r"^\s+", re.MULTILINE)
_COMMENT_LINE = re.compile(r"^\s*//.*\n", re.MULTILINE)


def text(value: str) -> str:
    """Return a text for HTML, also within quotes; what would not be seen is made visible."""
    return html.escape(_CONTROL.sub("\ufffd", value), quote=True)


def href(path: str) -> str:
    """Return a relative path for an attribute; never a scheme, whatever its characters."""
    return html.escape(quote(path, safe="/._-~+=@,"), quote=True)


def link(path: str, shown: str) -> str:
    """Return a link."""
    return f'<a href="{href(path)}">{text(shown)}</a>'


def links(found: Sequence[FileLink], files: str | None) -> str:
    """Return links to files beside one another.

    Args:
        found: Their paths are below one directory.
        files: What leads from the page to that directory; None if it cannot be reached.
    """
    if files is None:
        return " &middot; ".join(text(one.text) for one in found)
    return " &middot; ".join(link(f"{files}{one.path}", one.text) for one in found)


def data_block(value: JsonValue) -> str:
    """Return JSON for a page's script, which cannot end the element that it stands in."""
    packed = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    for character in "<>&":
        packed = packed.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="data">{packed}</script>'


def document(title: str, body: str, script: str) -> str:
    """Return a whole page.

    Args:
        title: Not escaped yet.
        body: HTML.
        script: Name of one of our scripts.
    """
    style, code = asset("page.css"), asset(script)
    policy = (
        f"default-src 'none'; style-src 'sha256-{_digest(style)}'; "
        f"script-src 'sha256-{_digest(code)}'; base-uri 'none'; form-action 'none'"
    )
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title>\n"
        f"<style>{style}</style></head>\n<body>\n{body}\n<script>{code}</script></body></html>\n"
    )
    return page.encode("utf-8", "replace").decode()  # half a surrogate pair is no UTF-8


@cache
def asset(name: str) -> str:
    """Return a file of ours without indentation and comments."""
    content = (files("pytest_megatron.pages") / "assets" / name).read_text(encoding="utf-8")
    return _INDENT.sub("", _COMMENT_LINE.sub("", content)).strip()


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
