"""Reads a project for tests that run on several ranks (effects: reads files, and nothing else)."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import yaml

from pytest_megatron.adopt.launch import LaunchedTests, is_test_path, launched_in
from pytest_megatron.adopt.python_code import (
    KNOWN_CLASSES,
    MAY_MATTER,
    LaunchingClass,
    PythonModule,
    StartedRanks,
    read_module,
)
from pytest_megatron.adopt.shell import read_shell
from pytest_megatron.base.files import read_bytes
from pytest_megatron.errors import AdoptError
from pytest_megatron.recipe.expand import Profile
from pytest_megatron.recipe.load import read_recipe

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BLOCKS = ("|", ">")
_MAY_LAUNCH = re.compile(
    r"torchrun|torch\.distributed|mpirun|mpiexec|orterun|accelerate|deepspeed|horovodrun|srun"
    r"|ft_launcher|composer|popen",
    re.IGNORECASE,
)


def may_launch(text: str) -> bool:
    """Return whether a text names a launcher at all, and tests."""
    return _MAY_LAUNCH.search(text) is not None and re.search(r"pytest|\.py\b", text) is not None


def launched_in_script(text: str, *, is_makefile: bool) -> list[LaunchedTests]:
    """Return the launched commands of a shell script or a Makefile, lines counted from 0."""
    return launched_in(read_shell(text, is_makefile=is_makefile))


def launched_in_yaml(text: str) -> list[LaunchedTests]:
    """Return the launched commands of every step in a YAML file, of whatever CI system.

    A file that is no YAML, such as a template of one, is read as a script.
    """
    try:
        documents = list(yaml.compose_all(text, Loader=_Loader))
    except (yaml.YAMLError, RecursionError, ValueError):
        return launched_in_script(text, is_makefile=False)
    lines = text.splitlines()
    found: dict[LaunchedTests, None] = {}
    for document in documents:
        for value, line in _texts(document, lines, set()):
            for one in launched_in(read_shell(value)):
                found[replace(one, line=one.line + line)] = None
    return list(found)


def _texts(node: yaml.Node | None, lines: list[str], seen: set[int]) -> Iterator[tuple[str, int]]:
    """Yield each scalar that may hold commands with the line of its first one."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    match node:
        case yaml.ScalarNode():
            is_block = node.style in _BLOCKS
            first = node.start_mark.line + is_block
            while is_block and first < len(lines) and not lines[first].strip():
                first += 1
            value = str(node.value)
            num_empty = len(value) - len(value.lstrip("\n")) if is_block else 0
            if may_launch(value):
                yield value[num_empty:], first
        case yaml.SequenceNode():
            words = [str(item.value) for item in node.value if isinstance(item, yaml.ScalarNode)]
            is_argv = len(words) == len(node.value) > 1 and not any(" " in w for w in words[:2])
            if is_argv and may_launch(joined := shlex.join(words)):
                yield joined, node.start_mark.line
            for item in node.value:
                yield from _texts(item, lines, seen)
        case yaml.MappingNode():
            for key, item in node.value:
                yield from _texts(key, lines, seen)
                yield from _texts(item, lines, seen)
        case _:
            pass


MOST_BYTES = 1 << 20
LIMIT_S = 120.0
LOOKED_FOR = (
    "torchrun, torch.distributed.run, accelerate launch, deepspeed, horovodrun, mpirun, mpiexec or "
    "srun in front of pytest or of a test; classes of torch.testing._internal and DeepSpeed; "
    "torch.multiprocessing in tests; marks of mpi-pytest; recipes of Megatron-LM"
)
_SKIPPED = frozenset(
    {".git", ".hg", ".svn", ".tox", ".nox", ".eggs", ".venv", "venv", "env", "node_modules"}
    | {"site-packages", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
    | {".pytest_megatron", "third_party", "3rdparty", "vendor"}
)
_SHELL = (".sh", ".bash", ".slurm", ".sbatch", ".zsh", ".ksh", ".sub")
_YAML = (".yaml", ".yml")
_INI = (".ini", ".cfg", ".toml")
_NAMED = re.compile(
    r"(?:GNU)?[Mm]akefile|.*\.mk|Dockerfile.*|.*\.[Dd]ockerfile|Jenkinsfile.*|justfile"
)
_IMPORTS_MPI = re.compile(r"^\s*(?:from|import) mpi4py\b", re.MULTILINE)
_RECIPE = re.compile(r"^spec:", re.MULTILINE), re.compile(r"^products:", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundClass:
    """A class whose tests start ranks.

    Attributes:
        base: The class of torch or DeepSpeed that it derives from, at last.
    """

    base: str
    definition: LaunchingClass


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRecipe:
    """A recipe of Megatron-LM's format with its number of workloads."""

    num_workloads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlace:
    """A place of a project that pytest-megatron has another way for.

    Attributes:
        path: From the project's root, with slashes.
        line: From 1.
    """

    path: str
    line: int
    what: LaunchedTests | FoundClass | StartedRanks | FoundRecipe

    @property
    def kind(self) -> str:
        """One of `pytest`, `script`, `class`, `spawn`, `subprocess`, `mark` and `recipe`."""
        match self.what:
            case LaunchedTests(script=script):
                return "script" if script else "pytest"
            case StartedRanks(kind=kind):
                return kind
            case FoundClass():
                return "class"
            case FoundRecipe():
                return "recipe"

    @property
    def where(self) -> str:
        """Path and line, as editors take them."""
        return f"{self.path}:{self.line}"


@dataclass(slots=True, kw_only=True)
class Inventory:
    """Everything that was found in a project.

    Attributes:
        findings: By path and line.
        unread: Files that could not be read, with the reason.
        num_files: Files that were looked at.
        num_cases: Test cases of Megatron-LM; `num_goldens` alike.
        uses_mpi: Whether the project's Python imports mpi4py.
        is_cut: Whether the time limit ended the search.
    """

    findings: list[FoundPlace] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    num_files: int = 0
    num_cases: int = 0
    num_goldens: int = 0
    uses_mpi: bool = False
    is_cut: bool = False


def search(root: Path, *, limit_s: float = LIMIT_S) -> Inventory:
    """Return what a project has, by reading its files.

    Raises:
        AdoptError: `root` is no directory that can be listed.
    """
    try:
        next(root.iterdir(), None)
    except OSError as error:
        raise AdoptError(str(root), f"{error.strerror}, expected a project's directory") from error
    inventory = Inventory()
    python: dict[str, str] = {}
    deadline = time.monotonic() + limit_s
    for path in _files(root):
        if time.monotonic() > deadline:
            inventory.is_cut = True
            break
        name = path.relative_to(root).as_posix()
        inventory.num_cases += name.endswith("/model_config.yaml") and "/test_cases/" in name
        inventory.num_goldens += path.name.startswith("golden_values") and path.suffix == ".json"
        if not _is_read(path):
            continue
        text = _read(path, name, inventory)
        if text is None:
            continue
        inventory.num_files += 1
        if path.suffix == ".py":
            python[name] = text
            inventory.uses_mpi |= _IMPORTS_MPI.search(text) is not None
        else:
            inventory.findings += _in_text(path, name, text)
    inventory.findings += _in_python(_modules(python, inventory, deadline))
    inventory.findings.sort(key=lambda found: (found.path, found.line))
    return inventory


def _files(root: Path) -> Iterator[Path]:
    """Yield regular files below a directory, without environments and other repositories."""
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED
            and not (here / name / "pyvenv.cfg").exists()
            and not (here / name / ".git").exists()
        )
        for name in sorted(files):
            if not (here / name).is_symlink():
                yield here / name


def _is_read(path: Path) -> bool:
    is_known = path.suffix in (*_SHELL, *_YAML, *_INI, ".py") or not path.suffix
    return is_known or _NAMED.fullmatch(path.name) is not None


def _read(path: Path, name: str, inventory: Inventory) -> str | None:
    try:
        data = read_bytes(path, MOST_BYTES)
    except OSError as error:
        inventory.unread.append(f"{name}: {error.strerror}")
        return None
    if b"\0" in data[:1024] or (not path.suffix and not _may_be_script(path, data)):
        return None
    return data.decode("utf-8", "replace").replace("\r\n", "\n")


def _may_be_script(path: Path, data: bytes) -> bool:
    return data.startswith(b"#!") or _NAMED.fullmatch(path.name) is not None


def _in_text(path: Path, name: str, text: str) -> Iterator[FoundPlace]:
    if path.suffix in _YAML and all(pattern.search(text) for pattern in _RECIPE):
        num_workloads = len(read_recipe(path, Profile.COMPAT).workloads)
        if num_workloads:
            yield FoundPlace(path=name, line=1, what=FoundRecipe(num_workloads=num_workloads))
            return
    if not may_launch(text):
        return
    if path.suffix in _YAML:
        found = launched_in_yaml(text)
    else:
        is_makefile = re.fullmatch(r"(?:GNU)?[Mm]akefile|.*\.mk", path.name) is not None
        found = launched_in_script(text, is_makefile=is_makefile)
    for one in found:
        if not one.script or is_test_path(one.script) or _is_beside(path, name, one.script):
            yield FoundPlace(path=name, line=one.line + 1, what=one)


def _is_beside(path: Path, name: str, script: str) -> bool:
    """Return whether a launched file lies in the folder of its script, and among tests."""
    own = PurePosixPath(script).name
    return is_test_path(str(PurePosixPath(name).with_name(own))) and path.with_name(own).exists()


def _modules(
    texts: dict[str, str], inventory: Inventory, deadline: float
) -> tuple[PythonModule, ...]:
    """Return the parsed files that matter: those with a known name, or with a class derived so."""
    modules: list[PythonModule] = []
    names, asked = MAY_MATTER, set(KNOWN_CLASSES)
    while chosen := [path for path, text in texts.items() if names.search(text)]:
        for path in chosen:
            if time.monotonic() > deadline:
                inventory.is_cut = True
                return tuple(modules)
            try:
                modules.append(read_module(path, texts.pop(path)))
            except SyntaxError as error:
                inventory.unread.append(f"{path}:{error.lineno or 1}: {error.msg}")
            except (ValueError, RecursionError, MemoryError) as error:
                inventory.unread.append(f"{path}: {error}")
        derived = {name for _, name in _bases(modules)} - asked
        asked |= derived
        names = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(derived))) or '(?!)'})\b")
    return tuple(modules)


def _in_python(modules: Sequence[PythonModule]) -> Iterator[FoundPlace]:
    bases = _bases(modules)
    for module in modules:
        for started in module.started:
            yield FoundPlace(path=module.path, line=started.line, what=started)
        for one in module.classes:
            base = bases.get((module.path, one.name))
            if base is not None:
                found = FoundClass(base=base, definition=one)
                yield FoundPlace(path=module.path, line=one.line, what=found)


def _bases(modules: Sequence[PythonModule]) -> dict[tuple[str, str], str]:
    """Return the known class that each class of a file derives from, through the project's own."""
    known: dict[tuple[str, str], str] = {}
    by_name: dict[str, str] = {}
    others = {  # a project's own `DistributedTest`, which is not DeepSpeed's
        one.name
        for module in modules
        for one in module.classes
        if one.name in KNOWN_CLASSES and any(base.endswith("TestCase") for base in one.bases)
    }
    names = KNOWN_CLASSES - others
    before = -1
    while len(known) > before:
        before = len(known)
        for module in modules:
            own = {one.name for one in module.classes}
            for one in module.classes:
                bases = (_base(name, module, own, known, by_name, names) for name in one.bases)
                base = next(filter(None, bases), None)
                if base is not None:
                    known[module.path, one.name] = base
                    by_name.setdefault(one.name, base)
    return known


def _base(
    name: str,
    module: PythonModule,
    own: Collection[str],
    known: Mapping[tuple[str, str], str],
    by_name: Mapping[str, str],
    names: Collection[str],
) -> str | None:
    """Return the known class behind a base as it is written in a module."""
    if name in own:
        return known.get((module.path, name), name if name in names else None)
    original = module.imports.get(name, name).rpartition(".")[2]
    return original if original in names else by_name.get(original)
