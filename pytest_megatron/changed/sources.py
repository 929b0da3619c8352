"""Files of a project: digests of their blocks, what they import, what there is."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import posixpath
import re
import stat
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from typing_extensions import override

from pytest_megatron.base.files import parse_json, read_bytes, write_bytes_atomically
from pytest_megatron.base.project import ask_git, read_git
from pytest_megatron.errors import SelectionError

MODULE = ""  # what runs when the file is imported: all but the bodies of functions
WHOLE = "*"
LISTING = "/"  # names in a directory
EXISTS = (
    "?"  # whether there is a file, a directory or nothing, and whether the file can be executed
)
KINDS = {"100644": "file", "100755": "program"}  # by git's mode
EXECUTABLE = "x"  # behind the digest of a file
_MOST_FILES = 8192  # whose parts are kept, of all commits that are read
_MOST_BYTES = 1 << 28  # of the text of the file that keeps them
# Blocks, names that it may import, and its functions that keep what they computed, with the names
# in them.
ParsedFile = tuple[Mapping[str, str], frozenset[str], Mapping[str, frozenset[str]]]


def digest(content: bytes) -> str:
    """Return the digest of a content, short."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def blocks_of(source: bytes) -> Mapping[str, str]:
    """Return name -> digest of the blocks of a Python file; one block where it is none.

    Comments and places of lines do not count. Functions of one name count together; a function
    within a function is part of it. A docstring belongs to the module, as anybody can read it.
    """
    return _parsed(source)[0]


@functools.lru_cache(_MOST_FILES)
def _parsed(source: bytes) -> ParsedFile:
    """Return the parts of a Python file."""
    blocks = {WHOLE: digest(source)}
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return blocks, frozenset(), {}
    imports: set[str] = set()
    parts: dict[str, list[str]] = {}
    keeping: dict[str, frozenset[str]] = {}
    for name, function in _functions(tree, ""):
        kept = frozenset[str]() if function.name == "__init__" else _kept_by(function)
        if kept:
            keeping[name] = keeping.get(name, frozenset()) | kept
        parts.setdefault(name, []).extend(_dump(function, imports))
        function.body = function.body[:1] if ast.get_docstring(function) is not None else []
    blocks |= {name: digest("\0".join(texts).encode()) for name, texts in parts.items()}
    blocks[MODULE] = digest("\0".join(_dump(tree, imports)).encode())
    return blocks, frozenset(imports), keeping


def _kept_by(function: ast.AST) -> frozenset[str]:
    """Return the names from which a function computes what it remembers; none if it does not.

    It tests what it also stores, as in `if key not in self.found: self.found[key] = ...`, in
    `if self.x is None: self.x = ...`, and the same of a global variable, with `hasattr` or with
    `try`. What it stores in a variable of its own lasts no longer than a call.
    """
    stores = _Stores()
    stores.generic_visit(function)
    seen: set[str] = set()
    found: set[str] = set()
    names = stores.tested & stores.values.keys() - (stores.own - stores.lasting)
    for name in names:  # what stands beside may fill it, as `self.x.read()` does
        for block in stores.blocks[name]:
            found = found.union(*map(_used_in, block))
    while names:  # back through the variables
        seen |= names
        values = [value for name in names for value in stores.values.get(name, ())]
        found |= set[str]().union(*map(_used_in, values))
        names = set[str]().union(*map(_names_in, values)) - seen
    return frozenset(found)


class _Stores(ast.NodeVisitor):
    """What a function stores and tests.

    Attributes:
        values: Attribute, container or variable -> values that are stored in it.
        blocks: The same -> lists of statements, one of which stores in it.
        own: Variables of a call.
        lasting: Variables that outlive it.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[ast.expr]] = {}
        self.blocks = defaultdict[str, list[list[ast.stmt]]](list)
        self._block: list[ast.stmt] = []
        self.tested: set[str] = set()
        self.own: set[str] = set()
        self.lasting: set[str] = set()

    @override
    def generic_visit(self, node: ast.AST) -> None:
        for _, field in ast.iter_fields(node):
            parts = field if isinstance(field, list) else [field]
            outer = self._block
            if parts and isinstance(parts[0], ast.stmt):
                self._block = parts
            for part in parts:
                if isinstance(part, ast.AST):
                    self.visit(part)
            self._block = outer

    @override
    def visit(self, node: ast.AST) -> None:
        """Note what a statement stores or tests, and visit what is below it."""
        match node:
            case ast.expr():
                return
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._store(target, value)
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.AugAssign(target=target, value=value)
                | ast.For(target=target, iter=value)
            ):
                self._store(target, value)
            case ast.arg(arg=name):
                self.own.add(name)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self.lasting.update(names)
            case ast.If(test=test):
                self.tested |= _names_in(test) | _asked_in(test)
            case ast.Try(body=body):
                self.tested |= set[str]().union(*map(_names_in, body))
            case _:
                pass
        self.generic_visit(node)

    def _store(self, target: ast.expr, value: ast.expr) -> None:
        """Note that a name, or each one of a tuple, gets a value here."""
        if isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._store(part, value)
            return
        name = _place_of(target)
        if isinstance(target, ast.Name):
            self.own.add(name)
        self.values.setdefault(name, []).append(value)
        self.blocks[name].append(self._block)


def _asked_in(test: ast.expr) -> set[str]:
    """Return the names that `hasattr` and `getattr` are asked for in a test."""
    asked = set()
    for node in ast.walk(test):
        match node:
            case ast.Call(
                func=ast.Name(id="hasattr" | "getattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                asked.add(name)
            case _:
                pass
    return asked


def _place_of(target: ast.expr) -> str:
    """Return the name of the attribute, the container or the variable that is stored to, or ""."""
    match target:
        case ast.Attribute(attr=name) | ast.Subscript(value=ast.Attribute(attr=name)):
            return name
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)):
            return name
        case _:
            return ""  # which nothing tests


def _names_in(tree: ast.AST) -> frozenset[str]:
    """Return the names of variables, functions and attributes in a tree."""
    nodes = list(ast.walk(tree))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(attributes | {node.id for node in nodes if isinstance(node, ast.Name)})


def _used_in(tree: ast.AST) -> frozenset[str]:
    """Return the names of functions that are called in a tree, and of attributes."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Constant() | ast.JoinedStr()):
                pass  # a method of a text
            case ast.Attribute(attr=name) | ast.Call(func=ast.Name(id=name)):
                found.add(name)
            case _:
                pass
    return frozenset(found)


@functools.lru_cache(_MOST_FILES)
def _names_of_functions(source: bytes) -> Mapping[str, frozenset[str]]:
    """Return the functions of a Python file, with the names in them."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, frozenset[str]] = {}
    for name, function in _functions(tree, ""):
        found[name] = found.get(name, frozenset()) | _used_in(function)
    return found


def _functions(
    node: ast.AST, within: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions below a node with their qualified names."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield within + child.name, child
            case ast.ClassDef():
                yield from _functions(child, f"{within}{child.name}.")
            case ast.expr():
                pass
            case _:
                yield from _functions(child, within)


def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    """Return the fields of a kind of node, the last one first, without those others imply."""
    names: tuple[str, ...] = kind.__match_args__
    return tuple(name for name in reversed(names) if name not in ("ctx", "kind"))


_FIELDS = {
    kind: _fields(kind)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}


def _dump(tree: ast.AST, imports: set[str]) -> list[str]:
    """Return all of a tree but its places, in words; add the names that it may import.

    Faster than `ast.dump`, and for trees of any depth.
    """
    words: list[str] = []
    waiting: list[object] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.AST):
            kind = type(node)
            words.append(kind.__name__)
            if kind in _IMPORTING:
                imports.update(_imports(node))
            waiting.extend(getattr(node, name, None) for name in _FIELDS[kind])
        elif isinstance(node, list):
            words.append(f"[{len(node)}")
            waiting.extend(reversed(node))
        else:  # of an integer, repr refuses thousands of digits
            words.append(hex(node) if type(node) is int else repr(node))
    return words


def block_of_code(qualname: str) -> str:
    """Return the name of the block that code of this qualified name belongs to, if it has one.

    A lambda outside of functions and the body of a class belong to the module.
    """
    return qualname.partition(".<locals>")[0]


def imports_of(source: bytes) -> frozenset[str]:
    """Return the dotted names that a Python file may import, relative ones with their dots.

    Those of texts count, as `import_module` takes them.
    """
    return _parsed(source)[1]


_IMPORTING = {ast.Import, ast.ImportFrom, ast.Constant}


def _imports(node: ast.AST) -> Iterator[str]:
    """Yield the modules that a node imports, by a statement or by a name in a text."""
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom():
            start = "." * node.level + (node.module or "")
            yield start
            dot = "" if start.endswith(".") else "."
            yield from (f"{start}{dot}{alias.name}" for alias in node.names)
        case ast.Constant(value=str(text)):
            name = text.partition(":")[0]
            if "." in name and all(part.isidentifier() for part in name.split(".")):
                yield name
        case _:
            pass


def decompressed(path: Path, limit: int) -> bytes:
    """Return the content of a compressed file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged, or larger than a limit.
    """
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(read_bytes(path), limit)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError("it is cut off or too large")
    return content


CONFTEST = "conftest.py"
_INSTALLED = "site-packages"  # also in the project's own .venv: what it has counts by its version
_WRITTEN = {".pytest_megatron", "__pycache__"}  # directories that running tests writes
_NOT_CODE = re.compile(r"^\.\.|\.dist-info/|\.pyc,")  # lines in the list of a package's files
LINK = "-> "  # in front of the target of a link, in the place of a digest


class Tree(Protocol):
    """Files of a project at some time. Paths are relative to its root, with `/`."""

    def is_file(self, path: str) -> bool:
        """Return true for a file."""
        ...

    def read(self, path: str) -> bytes | None:
        """Return the content of a file; None where there is none."""
        ...

    def names(self, path: str) -> Iterable[str] | None:
        """Return the names in a directory; None where there is none."""
        ...

    def kind(self, path: str) -> str:
        """Return what there is, in a word."""
        ...


class WorkingTree:
    """Files as they are now."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def is_file(self, path: str) -> bool:
        """Return true for a file."""
        return (self._root / path).is_file()

    def read(self, path: str) -> bytes | None:
        """Return the content of a file; None where there is none."""
        try:
            return (self._root / path).read_bytes()
        except OSError:
            return None

    def names(self, path: str) -> Iterable[str] | None:
        """Return the names in a directory; None where there is none."""
        full = self._root / path
        return [child.name for child in full.iterdir()] if full.is_dir() else None

    def kind(self, path: str) -> str:
        """Return what there is, in a word."""
        full = self._root / path
        link = f"{LINK}{full.readlink()} " if full.is_symlink() else ""
        return link + ("folder" if full.is_dir() else kind_of_file(full))


def kind_of_file(path: Path) -> str:
    """Return whether a file is there, and is a program, in a word."""
    if not path.is_file():
        return "nothing"
    return "program" if path.stat().st_mode & stat.S_IXUSR else "file"


class ParsedFiles:
    """The parts of Python files, kept in a file from one session to the next, by digest.

    A file that cannot be read, is damaged, or was written by another version counts as empty: all
    is parsed again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = f"4 {platform.python_version()}"  # a tree differs between releases
        self._found: dict[str, ParsedFile] = {}
        self._num_new = 0

    @functools.cached_property
    def _kept(self) -> dict[str, ParsedFile]:
        """Return the files that an earlier session parsed, as far as they can be read."""
        try:
            value = json.loads(decompressed(self._path, _MOST_BYTES))
            if value["version"] == self._version:
                return {
                    key: (blocks, frozenset(names), {k: frozenset(v) for k, v in kept.items()})
                    for key, blocks, names, kept in value["files"]
                }
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        return {}

    def parse(self, source: bytes) -> ParsedFile:
        """Return the parts of a Python file."""
        key = digest(source)
        if key not in self._found:
            self._num_new += key not in self._kept
            self._found[key] = self._kept[key] if key in self._kept else _parsed(source)
        return self._found[key]

    def write(self) -> None:
        """Keep what was parsed, besides what was kept before, up to a limit.

        Raises:
            OSError: It cannot be written.
        """
        if self._num_new:
            files = list((self._found | self._kept).items())[:_MOST_FILES]
            rows = [
                (key, blocks, sorted(names), {k: sorted(v) for k, v in kept.items()})
                for key, (blocks, names, kept) in files
            ]
            text = json.dumps({"version": self._version, "files": rows})
            write_bytes_atomically(self._path, zlib.compress(text.encode(), 1))


class Sources:
    """Files below a root, each read once. Paths are relative to it, with `/`."""

    def __init__(
        self,
        root: Path,
        import_paths: Iterable[Path] = (),
        tree: Tree | None = None,
        parse: Callable[[bytes], ParsedFile] | None = None,
    ) -> None:
        """Begin without any file read.

        Args:
            root: Root of the project.
            import_paths: Further directories, of which modules are imported.
            tree: The files; as they are now by default.
            parse: Returns the parts of a Python file, which may be known from an earlier session.
        """
        self.root = root
        self._starts = tuple(dict.fromkeys((f"{root}/", f"{os.path.realpath(root)}/")))
        self._tree = tree or WorkingTree(root)
        self._parse = parse or _parsed
        own = (path for path in (root, *import_paths) if _INSTALLED not in path.parts)
        shortened = (self.shorten(os.fspath(path)) for path in own)
        self._roots = dict.fromkeys(path for path in shortened if path is not None)
        self._blocks: dict[str, Mapping[str, str]] = {}
        self._edges: dict[str, frozenset[str]] = {}
        self._closures: dict[str, frozenset[str]] = {}
        self._listings: dict[str, frozenset[str]] = {}
        self._is_file = functools.cache(self._is_listed_file)

    def blocks(self, path: str) -> Mapping[str, str]:
        """Return name -> digest of the blocks of a file or directory, if it is there."""
        if path not in self._blocks:
            self._blocks[path] = self._read_blocks(path)
        return self._blocks[path]

    def _read_blocks(self, path: str) -> Mapping[str, str]:
        """Return the digests of the blocks of a file, or of a folder's names."""
        exists = {EXISTS: self._tree.kind(path)}
        names = self._tree.names(path)
        if names is not None:
            listed = "\0".join(sorted(filter(is_listed, names)))
            return {LISTING: digest(listed.encode("utf-8", "surrogateescape")), **exists}
        source = self._tree.read(path)
        if source is None:
            return exists
        blocks = self._parse(source)[0] if path.endswith(".py") else {WHOLE: digest(source)}
        return {**blocks, **exists}

    def keeping(self, path: str) -> Mapping[str, frozenset[str]]:
        """Return the functions of a file that keep what they computed, with the names in them."""
        source = self._tree.read(path) if path.endswith(".py") else None
        return {} if source is None else self._parse(source)[2]

    def names_in(self, path: str, function: str) -> frozenset[str]:
        """Return the names of functions that are called in a function, and of attributes."""
        source = self._tree.read(path)
        return _names_of_functions(source or b"").get(function, frozenset())

    def closure(self, path: str) -> frozenset[str]:
        """Return a file and all that it imports, directly and through others."""
        if path not in self._closures:
            reached, waiting = {path}, [path]
            while waiting:
                new = self.imports(waiting.pop()) - reached
                reached |= new
                waiting += new
            self._closures[path] = frozenset(reached)
        return self._closures[path]

    def imports(self, path: str) -> frozenset[str]:
        """Return the files of the project that a Python file names in its imports."""
        if path not in self._edges:
            source = self._tree.read(path) if path.endswith(".py") else None
            directory = posixpath.dirname(path) or "."
            self._edges[path] = frozenset(
                found
                for name in self._parse(source or b"")[1]
                for found in self._resolve(name, directory)
            )
        return self._edges[path]

    def _resolve(self, name: str, directory: str) -> Iterator[str]:
        """Yield the files that are executed to import a name, those of packages as well."""
        words = name.lstrip(".")
        level = len(name) - len(words)
        starts: Sequence[str] = (*self._roots, directory)
        if level:
            starts = [posixpath.join(directory, *[".."] * (level - 1))]
        parts = words.split(".") if words else []
        for start in starts:
            if parts and self._names_in(start).isdisjoint((parts[0], f"{parts[0]}.py")):
                continue  # as most names are of other projects
            for end in range(len(parts), -1 if level else 0, -1):
                place = posixpath.join(start, *parts[:end])
                for candidate in (f"{place}.py", f"{place}/__init__.py"):
                    path = posixpath.normpath(candidate)
                    if not path.startswith("../") and self._is_file(path):
                        yield path

    def _is_listed_file(self, path: str) -> bool:
        directory, name = posixpath.split(path)
        return name in self._names_in(directory) and self._tree.is_file(path)

    def _names_in(self, directory: str) -> frozenset[str]:
        """Return the names in a folder, read once."""
        if directory not in self._listings:
            names = self._tree.names(posixpath.normpath(directory or "."))
            self._listings[directory] = frozenset(names or ())
        return self._listings[directory]

    def shorten(self, path: str) -> str | None:
        """Return a full path as relative to the root; None outside of it."""
        if "/.." in path:
            path = posixpath.normpath(path)
        for start in self._starts:
            if path == start[:-1]:
                return "."
            if path.startswith(start):
                return path[len(start) :]
        return None

    def conftests(self, path: str) -> list[str]:
        """Return the `conftest.py` in the folders of a file."""
        parents = [parent.as_posix() for parent in Path(path).parents]
        found = [CONFTEST if parent == "." else f"{parent}/{CONFTEST}" for parent in parents]
        return [conftest for conftest in found if self._tree.is_file(conftest)]


def is_listed(name: str) -> bool:
    """Return false for what running tests leaves in a directory."""
    return not name.startswith((".", "__pycache__")) and not name.endswith(".pyc")


def checkout_of(root: Path) -> tuple[Path, str]:
    """Return the checkout that pytest's root lies in, and the root's path in it, "" at its top.

    Tests of `tests/pytest.ini` use the package beside it, so that all of the checkout counts.
    Without a checkout it is the root itself: `files_of` says what is missing.

    Raises:
        SelectionError: The root is reached by a link, so that names of files tell no place.
    """
    top = ask_git(root, "rev-parse", "--show-toplevel")
    if not top:
        return root, ""
    parents = (root, *root.parents)
    found = next((parent for parent in parents if parent.resolve() == Path(top).resolve()), None)
    if found is None:
        real = root.resolve()
        raise SelectionError("--changed", f"{root} is a link to {real}; start pytest there")
    start = root.relative_to(found).as_posix()
    return found, "" if start == "." else start


def files_of(root: Path, *records: Path) -> dict[str, str]:
    """Return path -> digest of the files that git knows or would add, but for what runs write.

    Args:
        root: Root of the project.
        records: Files of records, which each run replaces; they may lie in the project.

    Raises:
        SelectionError: git is missing, or there is no checkout.
    """
    output = read_git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if output is None:
        problem = "git cannot list the files of the project, expected a checkout; run without it"
        raise SelectionError("--changed", problem)
    found = {}
    for path in sorted(set(os.fsdecode(output).split("\0")) - {""}):
        full = root / path
        if full in records or not _WRITTEN.isdisjoint(full.parts[len(root.parts) :]):
            continue
        if full.is_symlink():
            found[path] = f"{LINK}{full.readlink()}"
        elif (full / ".git").exists():  # a submodule, or a checkout within this one
            inner = files_of(full, *records)
            found |= {posixpath.join(path, name): value for name, value in inner.items()}
        elif full.is_file():
            mark = EXECUTABLE if kind_of_file(full) == "program" else ""
            found[path] = digest(full.read_bytes()) + mark
    return found


def environment(root: Path) -> dict[str, str]:
    """Return the versions of Python and of packages, but for the project's own.

    A package of a folder or of git has code that its version does not tell: its files count. The
    code of one that is installed from the project by a link is recorded as tests run it.
    """
    found = {"python": f"{platform.python_implementation()} {platform.python_version()}"}
    for package in importlib.metadata.distributions():
        code = _code_of(root, package)
        if code is not None:
            found[package.name.lower()] = f"{package.version} {code}".rstrip()
    real, start = root.resolve(), Path(__file__).resolve().parent
    for word in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        place = Path(word).resolve()
        # Packages count by their versions, and our own `site` records.
        is_known = _INSTALLED in place.parts or place.is_relative_to(start)
        if not is_known and not place.is_relative_to(real):
            found[f"code in {place}"] = _digest_of_folder(place)
    return found


def _code_of(root: Path, package: importlib.metadata.Distribution) -> str | None:
    """Return the digest of a package's code where its version does not tell it, else "".

    None for one whose code is the project's own.
    """
    value = parse_json(package.read_text("direct_url.json") or "null")
    if not isinstance(value, dict):
        return ""
    place = Path(unquote(str(value.get("url", "")).removeprefix("file://")))
    details = value.get("dir_info")
    if not isinstance(details, dict) or not details.get("editable"):
        # The list of a copy's files has a digest of each; that of a script has the place of Python.
        listed = (package.read_text("RECORD") or "").splitlines()
        code = sorted(line for line in listed if not _NOT_CODE.search(line))
        return digest("\n".join(code).encode())
    if place.resolve().is_relative_to(root.resolve()):
        return None
    return _digest_of_folder(place)


def _digest_of_folder(place: Path) -> str:
    """Return a digest of the files of another checkout, or of the times of code without git."""
    try:
        found: object = files_of(place)
    except SelectionError:
        code = sorted((path, path.stat()) for path in place.rglob("*.py") if path.is_file())
        found = [(str(path), facts.st_size, facts.st_mtime_ns) for path, facts in code]
    return digest(json.dumps(found).encode())


def block_named(path: str, name: str, blocks: Mapping[str, str]) -> str:
    """Return the name of a block that stands for a name of code in a file."""
    if name in blocks:
        return name
    return MODULE if path.endswith(".py") and MODULE in blocks else WHOLE
