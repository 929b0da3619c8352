"""Code of a project that reads the rank while it is collected, found by its source.

It is searched before anything is imported, and only files that name a variable of ranks are parsed.
What is missed here, `EnvWatch` notices later. Imports only pytest.
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
from typing import TypeAlias

import pytest
from _pytest.pathlib import fnmatch_ex
from typing_extensions import override

from pytest_megatron.gangs.start import RANK_VARIABLES, SIZE_VARIABLES, is_library

_VARIABLES = RANK_VARIABLES | SIZE_VARIABLES
_READS = ("os.getenv", "os.environ.get", "os.environ.pop", "os.environ.setdefault")
_OF_GROUPS = ("get_rank", "get_world_size", "is_initialized")  # of torch.distributed
_CALLED = r"^(?!from|import|def|async|class)(?:\S|[ \t]+@).*\b(?:{})\("  # outside of functions
_READ = re.compile(
    rf"(?<!setenv\()[\"'](?:{'|'.join(sorted(_VARIABLES))})[\"'](?!\]\s*=[^=])"
    rf"|{_CALLED.format('|'.join(_OF_GROUPS))}",
    re.MULTILINE,
)
_HINTS = ("RANK", "SIZE", "SLURM_", *_OF_GROUPS)  # one is in every text with a match of `_READ`
# Functions that only run as tests.
_TEST = re.compile(r"^([ \t]*)(?:async )?def test.*(?:\n(?:\1[ \t)].*)?)*", re.MULTILINE)
# What imports nothing while its module is imported.
_NO_IMPORT = re.compile(
    r"^(?:def|class|async|@|\)|if (?:typing\.)?TYPE_CHECKING|if __name__).*(?:\n(?:[ \t].*)?)*",
    re.MULTILINE,
)
_NEVER = ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'")
_FROM = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+(?:\(([^)]*)|(.*))", re.MULTILINE)
_IMPORT = re.compile(
    r"^(?:[ \t]*import[ \t]|pytest_plugins\b[^=\n]*=)[ \t]*([\[(][^\])]*|.*)", re.MULTILINE
)
_NAME = re.compile(r"[\w.]+")
_MARKED_SIZE = re.compile(r"mark\.world_size\(\s*(\d+)")
# Hooks that pytest calls when tests were collected begin so.
_LATE_HOOKS = (
    *("pytest_runtest", "pytest_fixture", "pytest_sessionfinish", "pytest_unconfigure"),
    *("pytest_terminal", "pytest_report_teststatus", "pytest_assert", "pytest_exception"),
)
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Read: TypeAlias = tuple[str, str]  # what is read, and where


def find_reader(config: pytest.Config, world_size: int) -> str:
    """Return `VARIABLE in file:line` where code reads the rank while it is collected, or "".

    Variables that are equal in all gangs of one size count if a mark names another size.

    Args:
        config: Configuration of a session that has imported nothing of the project.
        world_size: Of tests without a mark.
    """
    of_size = ""
    texts: dict[str, str] = {}
    for name, place in _reads(config, texts):
        if name not in SIZE_VARIABLES:
            return f"{name} in {place}"
        of_size = of_size or f"{name} in {place}"
    sizes = (int(size) for text in texts.values() for size in _MARKED_SIZE.findall(text))
    return of_size if of_size and any(size != world_size for size in sizes) else ""


def _reads(config: pytest.Config, texts: dict[str, str]) -> Iterator[_Read]:
    """Yield reads of the rank; put the texts of all files that are imported into `texts`."""
    project = _SourceFiles(config)
    modules: dict[str, _ImportedModule] = {}
    imports: dict[str, set[str]] = {}
    waiting = list(project.collected_files())
    for file in waiting:  # grows
        if file in texts:
            continue
        try:
            text = texts[file] = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        imports[file] = set(project.imported_by(file, text))
        waiting += imports[file]
        if any(hint in text for hint in _HINTS) and _READ.search(_without_tests(text)):
            modules[file] = _ImportedModule(file, text)
            yield from modules[file].reads
    for file, module in modules.items():
        for function, reads in module.functions_that_read():
            calls = re.compile(_CALLED.format(re.escape(function)), re.MULTILINE)
            if any(file in found and calls.search(texts[f]) for f, found in imports.items()):
                yield from reads


def _without_tests(text: str) -> str:
    """Return source without the bodies of tests, with the same numbers of lines."""
    return _TEST.sub(lambda test: f"{test[1]}def test(): pass" + "\n" * test[0].count("\n"), text)


class _SourceFiles:
    """Finds files of a project."""

    def __init__(self, config: pytest.Config) -> None:
        """Find out where its modules may be.

        Args:
            config: Configuration of a session that has imported nothing of the project.
        """
        self._config = config
        self._here, self._root = config.invocation_params.dir, config.rootpath
        paths = [self._root, self._here, *map(Path, (*self._ini("pythonpath"), *sys.path))]
        self._roots = list(dict.fromkeys(path for path in paths if self._has(path)))
        self._names_in = functools.cache(_names_in)
        self._above = functools.cache(lambda file: [p for p in Path(file).parents if self._has(p)])
        self._find = functools.cache(self._find_below)

    def _ini(self, name: str) -> list[str]:
        with contextlib.suppress(ValueError):  # its plugin is disabled
            return [str(value) for value in self._config.getini(name)]
        return []

    def _has(self, path: Path) -> bool:
        is_below = path.is_relative_to(self._root) or path.is_relative_to(self._here)
        return is_below and not is_library(str(path))

    def collected_files(self) -> Iterator[str]:
        """Yield conftest files and test files, as pytest will find them."""
        here, root = self._here, self._root
        words = [word.partition("::")[0] for word in self._config.known_args_namespace.file_or_dir]
        if not words and here == root:
            for pattern in self._ini("testpaths"):
                words += sorted(glob.glob(str(root / pattern), recursive=True))  # noqa: PTH207 - any
        # A word may be the value of an option that a conftest file declares.
        found = [Path(here, word) for word in words]
        paths = [path for path in found if os.path.exists(path)]  # noqa: PTH110 - also a long one
        for path in paths or [here]:
            yield from (str(p / "conftest.py") for p in reversed(path.parents) if self._has(p))
        for path in paths or [here]:
            yield from self._tests_in(path) if path.is_dir() else [str(path)]

    def _tests_in(self, path: Path) -> Iterator[str]:
        """Yield conftest files and test files of a directory."""
        patterns = ["conftest.py", *self._ini("python_files")]
        skipped = ["__pycache__", *self._ini("norecursedirs")]
        for directory, below, names in os.walk(path):
            if "pyvenv.cfg" in names:
                below.clear()
                continue
            below[:] = sorted(name for name in below if not _fits(Path(directory, name), skipped))
            files = [Path(directory, name) for name in sorted(names) if name.endswith(".py")]
            yield from (str(file) for file in files if _fits(file, patterns))

    def imported_by(self, file: str, text: str) -> Iterator[str]:
        """Yield files of the project that are imported with a module."""
        text = _NO_IMPORT.sub("", text)
        names = [name for line in _IMPORT.findall(text) for name in _NAME.findall(line)]
        for module, several, one in _FROM.findall(text):
            names += [f"{module.rstrip('.')}.{name}" for name in _NAME.findall(several or one)]
        above = self._above(file)
        for name in names:
            level = len(name) - len(name.lstrip("."))
            roots = above[level - 1 : level] if level else [*self._roots, *above]
            yield from next((f for root in roots if (f := self._find(root, name.strip(".")))), ())

    def _find_below(self, root: Path, name: str) -> tuple[str, ...]:
        """Return the files of a module, and of the packages above it, in a directory."""
        files: list[str] = []
        path = str(root)
        for part in name.split("."):
            if f"{part}.py" in self._names_in(path):
                files.append(f"{path}/{part}.py")
            if part not in self._names_in(path):
                break
            path = f"{path}/{part}"
            if "__init__.py" in self._names_in(path):
                files.append(f"{path}/__init__.py")
        return tuple(files)


def _fits(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch_ex(pattern, path) for pattern in patterns)


def _names_in(directory: str) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in os.scandir(directory))
    except OSError:
        return frozenset()


class _ImportedModule(ast.NodeVisitor):
    """What runs while one module is imported.

    Attributes:
        reads: What it reads of the rank.
    """

    def __init__(self, file: str, text: str) -> None:
        self.reads: list[_Read] = []
        self._file = file
        self._origins: dict[str, str] = {}
        self._functions: dict[str, _Function] = {}
        self._followed: list[str] = []
        self._lines = [text.count("\n", 0, read.start()) + 1 for read in _READ.finditer(text)]
        tree = _parse(_without_tests(text)) or _parse(text)
        if tree is not None:
            self._note_functions(tree.body, "")
            self._visit(tree.body)

    def _visit(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            with contextlib.suppress(RecursionError):  # of an expression of hundreds of terms
                self.visit(statement)

    def functions_that_read(self) -> Iterator[tuple[str, list[_Read]]]:
        """Yield names of functions that read the rank when they are called, and what they read."""
        for name, function in self._functions.items():
            if any(function.lineno <= n <= (function.end_lineno or n) for n in self._lines):
                self.reads = []
                self._follow(name)
                yield name.removesuffix(".__init__"), self.reads

    def _note_functions(self, body: list[ast.stmt], start: str) -> None:
        for node in body:
            if isinstance(node, _Function):
                self._functions[start + node.name] = node
            elif isinstance(node, ast.ClassDef):
                self._note_functions(node.body, f"{start}{node.name}.")

    def _follow(self, name: str) -> None:
        """Visit the body of a function of this module that is called."""
        if name in self._functions and name not in self._followed:
            self._followed.append(name)
            self._visit(self._functions[name].body)
            self._followed.pop()

    def _origin(self, node: ast.expr) -> str:
        """Return the full name of what an expression names, or ""."""
        match node:
            case ast.Name(id=name):
                return self._origins.get(name, name)
            case ast.Attribute(value=value, attr=attr) if start := self._origin(value):
                return f"{start}.{attr}"
        return ""

    def _note_read(self, key: ast.expr) -> None:
        """Note a read of a variable, if its name is one of a rank's."""
        if isinstance(key, ast.Constant) and key.value in _VARIABLES:
            self.reads.append((str(key.value), f"{self._file}:{key.lineno}"))

    def _call(self, function: ast.expr) -> None:
        """Note the call of a function."""
        origin = self._origin(function)
        module, _, name = origin.rpartition(".")
        if module == "torch.distributed" and name in _OF_GROUPS and not self._followed:
            self.reads.append((origin, f"{self._file}:{function.lineno}"))
        self._follow(origin)
        self._follow(f"{origin}.__init__")

    @override
    def visit_Import(self, node: ast.Import) -> None:
        self._origins |= {name.asname: name.name for name in node.names if name.asname}

    @override
    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._origins |= {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}

    @override
    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Name) and (origin := self._origin(node.value)):
            self._origins[node.targets[0].id] = origin
        self.generic_visit(node)

    @override
    def visit_Call(self, node: ast.Call) -> None:
        if self._origin(node.func) in _READS and node.args:
            self._note_read(node.args[0])
        self._call(node.func)
        self.generic_visit(node)

    @override
    def visit_Subscript(self, node: ast.Subscript) -> None:
        if self._origin(node.value) == "os.environ" and isinstance(node.ctx, ast.Load):
            self._note_read(node.slice)
        self.generic_visit(node)

    @override
    def visit_Compare(self, node: ast.Compare) -> None:
        if self._origin(node.comparators[0]) == "os.environ":
            self._note_read(node.left)
        self.generic_visit(node)

    @override
    def visit_If(self, node: ast.If) -> None:
        is_never = ast.unparse(node.test) in _NEVER
        for child in node.orelse if is_never else [node.test, *node.body, *node.orelse]:
            self.visit(child)

    @override
    def visit_FunctionDef(self, node: _Function) -> None:
        """Visit what runs where a function is defined, and hooks that pytest calls early."""
        for decorator in node.decorator_list:
            self._call(decorator)
            self.visit(decorator)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        if node.name.startswith("pytest_") and not node.name.startswith(_LATE_HOOKS):
            self._follow(node.name)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - a name of ast

    @override
    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Leave out what runs later."""


def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # reported where it is collected
        return None
