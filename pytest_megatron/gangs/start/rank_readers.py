"""Code of a project that reads the rank while it is collected, found by its source.

It is searched before anything is imported, in what stands outside of functions in conftest files,
test files and modules of the project that they import. `EnvWatch` notices everything else later.
Imports only pytest.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import glob
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from _pytest.pathlib import fnmatch_ex
from typing_extensions import override

from pytest_megatron.gangs.start import RANK_VARIABLES, is_library

_READS = ("getenv", "get", "pop", "setdefault")  # of `os` and `os.environ`
_NAMED = re.compile(rf"[\"'](?:{'|'.join(sorted(RANK_VARIABLES))})[\"']")
_FROM = re.compile(r"^from[ \t]+([\w.]+)[ \t]+import[ \t]+(?:\(([^)]*)|(.*))", re.MULTILINE)
_IMPORT = re.compile(r"^(?:import[ \t]+|pytest_plugins\b.*?=)(.*)", re.MULTILINE)
_NAME = re.compile(r"[\w.]+")


def find_reader(config: pytest.Config) -> str:
    """Return `VARIABLE in file:line` where code reads the rank while it is imported, or "".

    Args:
        config: Configuration of a session that has imported nothing of the project.
    """
    ini_paths = map(Path, _ini(config, "pythonpath"))
    paths = (config.rootpath, config.invocation_params.dir, *ini_paths, *map(Path, sys.path))
    roots = [path for path in dict.fromkeys(paths) if _is_of_project(config, path)]
    find = functools.cache(_find_module)
    files = list(dict.fromkeys(_collected_files(config)))
    known = {*files}
    for file in files:  # grows
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if _NAMED.search(text):
            search = _ImportedModule()
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # reported later
                search.visit(ast.parse(text))
            if search.found:
                return "{0} in {2}:{1}".format(*search.found[0], file)
        above = [path for path in file.parents if _is_of_project(config, path)]
        for name in _imported_names(text):
            level = len(name) - len(name.lstrip("."))
            places = above[level - 1 : level] if level else [*roots, *above]
            found = next(filter(None, (find(place, name.strip(".")) for place in places)), ())
            files += [one for one in found if one not in known]
            known.update(found)
    return ""


def _imported_names(text: str) -> Iterator[str]:
    """Yield the modules that lines without indentation import, and names of what is in them."""
    for names in _IMPORT.findall(text):
        yield from _NAME.findall(names)
    for module, several, one in _FROM.findall(text):
        for name in _NAME.findall(several or one):
            yield f"{module.rstrip('.')}.{name}"


def _find_module(place: Path, name: str) -> tuple[Path, ...]:
    """Return the files of a module, and of the packages above it, in a directory."""
    found: list[Path] = []
    for part in name.split("."):
        place /= part
        files = (place.with_name(f"{part}.py"), place / "__init__.py")
        found += [file for file in files if file.is_file()]
        if not place.is_dir():
            break
    return tuple(found)


def _is_of_project(config: pytest.Config, path: Path) -> bool:
    roots = (config.rootpath, config.invocation_params.dir)
    return any(map(path.is_relative_to, roots)) and not is_library(str(path))


def _ini(config: pytest.Config, name: str) -> list[str]:
    with contextlib.suppress(ValueError):  # its plugin is disabled
        return [str(value) for value in config.getini(name)]
    return []


def _collected_files(config: pytest.Config) -> Iterator[Path]:
    """Yield conftest files and test files, as pytest will find them."""
    here, root = config.invocation_params.dir, config.rootpath
    words = [word.partition("::")[0] for word in config.known_args_namespace.file_or_dir]
    if not words and here == root:
        for pattern in _ini(config, "testpaths"):
            words += sorted(glob.glob(str(root / pattern), recursive=True))  # noqa: PTH207 - any
    # A word may be the value of an option that a conftest file declares.
    found = [Path(here, word) for word in words]
    paths = [path for path in found if os.path.exists(path)]  # noqa: PTH110 - also a long one
    patterns = ["conftest.py", *_ini(config, "python_files")]
    skipped = ["__pycache__", *_ini(config, "norecursedirs")]
    for path in paths or [here]:
        yield from (p / "conftest.py" for p in reversed(path.parents) if _is_of_project(config, p))
        if path.is_file():
            yield path
        for name, below, names in os.walk(path):
            directory = Path(name)
            if "pyvenv.cfg" in names:
                below.clear()
                continue
            below[:] = sorted(name for name in below if not _fits(directory / name, skipped))
            files = [directory / name for name in sorted(names) if name.endswith(".py")]
            yield from (file for file in files if _fits(file, patterns))


def _fits(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch_ex(pattern, path) for pattern in patterns)


class _ImportedModule(ast.NodeVisitor):
    """Searches what runs while a module is imported.

    Attributes:
        found: Each variable of ranks that it reads, and the line.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def _note(self, key: ast.expr) -> None:
        """Note a variable, if it is one of a rank."""
        if isinstance(key, ast.Constant) and key.value in RANK_VARIABLES:
            self.found.append((str(key.value), key.lineno))

    @override
    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Load):
            self._note(node.slice)
        self.generic_visit(node)

    @override
    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in _READS and node.args:
            self._note(node.args[0])
        self.generic_visit(node)

    @override
    def visit_Compare(self, node: ast.Compare) -> None:
        self._note(node.left)
        self.generic_visit(node)

    @override
    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Compare) and ast.unparse(node.test.left) == "__name__"):
            self.generic_visit(node)

    @override
    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Visit what runs where a function is defined."""
        for part in (*node.decorator_list, node.args):
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - a name of ast

    @override
    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Leave out what runs later."""
