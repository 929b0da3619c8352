"""Writes the picture of the layers into `architecture.md` from the import contract.

    python docs/explanation/architecture_picture.py

The layers are those of the contract in `pyproject.toml`, the lines the first lines of the packages'
docstrings. A test compares the page with both.
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).parent / "architecture.md"
_WIDTH = 96


def picture() -> str:
    """Return the layers as boxes, the topmost first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["type"] == "layers")
    edge = f"+{'-' * (_WIDTH - 2)}+"
    lines = [edge]
    for layer in layers:
        for module in layer.split(" | "):
            lines += (f"| {text:<{_WIDTH - 4}} |" for text in _lines(module))
        lines.append(edge)
    return "\n".join(lines)


def _lines(module: str) -> Iterator[str]:
    """Yield the line of a package, and one of its folders if it has any."""
    name = module.partition(".")[2]
    folder = ROOT / module.replace(".", "/")
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    yield f"{name:<9} {_first_line(source)}"
    folders = sorted(p.parent.name for p in folder.glob("*/__init__.py"))
    if folders:
        yield f"{'':<9} {' '.join(f'{folder}/' for folder in folders)}"


def _first_line(source: Path) -> str:
    docstring = ast.get_docstring(ast.parse(source.read_text("utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".")


def main() -> None:
    """Replace the picture."""
    text = PAGE.read_text("utf-8")
    old = re.search(r"^\+-+\+\n(?:[|+].*\n)+", text, re.MULTILINE)
    assert old is not None
    PAGE.write_text(text.replace(old[0], f"{picture()}\n"), "utf-8")


if __name__ == "__main__":
    main()
