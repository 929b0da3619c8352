"""Draws what a command wrote to a terminal as an SVG picture.

    script -qec "pytest -p megatron recipes" run.typescript
    python docs/images/terminal_svg.py run.typescript run.svg --command "pytest -p megatron recipes"

Knows the few colours that pytest uses, and lines that are written over. Standard library only.
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import argparse
import html
import re
from pathlib import Path

WIDTH_PX, HEIGHT_PX, MARGIN_PX = 7.83, 18, 14  # of a letter of 13 px, of a line, around all
COLOURS = {"31": "#ff7b72", "32": "#56d364", "33": "#e3b341", "36": "#79c0ff"}
NAMESPACE = "http://www.w3.org/2000/svg"
KEPT_BLANKS = 'xml:space="preserve"'
STYLE = "text { font: 13px ui-monospace, Menlo, monospace; fill: #e6edf3; white-space: pre }"
_SEQUENCE = re.compile(r"\x1b\[([\d;]*)m")
_NOTES_OF_SCRIPT = ("Script started", "Script done")


def read_lines(path: Path) -> list[str]:
    """Return the lines as they stood at the end: what was written over is gone."""
    text = path.read_bytes().decode().replace("\r\n", "\n")
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.split("\n")]
    lines = [line for line in lines if not line.startswith(_NOTES_OF_SCRIPT)]
    return "\n".join(lines).strip().split("\n")


def draw(lines: list[str], *, title: str) -> str:
    """Return the SVG text."""
    num_columns = max(len(_SEQUENCE.sub("", line)) for line in lines)
    width = round(num_columns * WIDTH_PX + 2 * MARGIN_PX)
    height = len(lines) * HEIGHT_PX + 2 * MARGIN_PX
    rows = [
        f'<text x="{MARGIN_PX}" y="{MARGIN_PX + (index + 1) * HEIGHT_PX - 5}">{_spans(line)}</text>'
        for index, line in enumerate(lines)
        if line
    ]
    return "\n".join(
        [
            f'<svg xmlns="{NAMESPACE}" {KEPT_BLANKS} viewBox="0 0 {width} {height}" role="img">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
            *rows,
            "</svg>\n",
        ]
    )


def _spans(line: str) -> str:
    """Turn colour sequences into spans."""
    spans = []
    attributes: dict[str, str] = {}
    parts = _SEQUENCE.split(line)
    for index, part in enumerate(parts):
        if index % 2:
            for code in part.split(";"):
                if code == "1":
                    attributes["font-weight"] = "bold"
                elif code in COLOURS:
                    attributes["fill"] = COLOURS[code]
                else:
                    attributes.clear()
        elif part:
            style = ";".join(f"{name}:{value}" for name, value in attributes.items())
            text = html.escape(part, quote=False)
            spans.append(f'<tspan style="{style}">{text}</tspan>' if style else text)
    return "".join(spans)


def main() -> None:
    """Read a terminal's text, write a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("typescript", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--command", required=True, help="shown as the first line")
    arguments = parser.parse_args()
    lines = [f"$ {arguments.command}", *read_lines(arguments.typescript)]
    arguments.svg.write_text(draw(lines, title=arguments.command), encoding="utf-8")


if __name__ == "__main__":
    main()
