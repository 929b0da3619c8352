"""Python files whose tests start ranks by themselves: classes, spawned functions, launchers. Pure.

The files are parsed, never imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pytest_megatron.adopt.launch import is_test_path

# Source: torch.testing._internal.{common_distributed,common_fsdp,distributed}; DeepSpeed's
# tests/unit/common.py.
TORCH_CLASSES = frozenset(
    {"DTensorContinuousTestBase", "DTensorTestBase", "DistributedTestBase"}
    | {"DynamoDistributedMultiProcTestCase", "FSDPTest", "FSDPTestContinuous"}
    | {"FSDPTestMultiThread", "MultiProcContinousTest", "MultiProcContinuousTest"}
    | {"MultiProcessTestCase", "MultiThreadedTestCase", "ShardedTensorTestBase"}
)
DEEPSPEED_CLASSES = frozenset({"DistributedFixture", "DistributedTest"})
KNOWN_CLASSES = TORCH_CLASSES | DEEPSPEED_CLASSES
_SPAWN = frozenset({"spawn", "start_processes"})
_MODULES = ("torch.multiprocessing", "multiprocessing", "torch.multiprocessing.spawn")
_RANK_NAMES = frozenset({"rank", "local_rank", "world_size", "global_rank"})
_LAUNCHED = re.compile(
    r"(?:torchrun|accelerate-launch|accelerate launch|mpirun|mpiexec|horovodrun|deepspeed"
    r"|(?:\S*python\S*|\{[^{}]*\}) (?:-\w+ )*-m torch\.distributed\.(?:run|launch)) +[-{]"
)
_PROGRAMS = frozenset({"torchrun", "accelerate-launch", "mpirun", "mpiexec", "horovodrun"})
_LAUNCH_MODULES = frozenset(
    {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
)
MAY_MATTER = re.compile(
    "|".join(
        (*sorted(KNOWN_CLASSES), *sorted(_PROGRAMS), r"multiprocessing", r"torch\.distributed\.")
    )
    + r"|mark\.(?:parallel|mpi)\b|accelerate[\s\"',]{1,40}launch"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchingClass:
    """A class that derives from one that starts ranks.

    Attributes:
        bases: As they are written.
        num_tests: Its own test methods.
        world_size: As it is written, "" where it is computed or inherited.
    """

    name: str
    line: int
    bases: tuple[str, ...]
    num_tests: int
    world_size: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRanks:
    """A place where a test starts processes, or has a mark of MPI.

    Attributes:
        kind: `spawn`, `subprocess` or `mark`.
        what: The call, the launcher or the mark.
        num_ranks: As it is written, "" where it is computed.
    """

    kind: str
    line: int
    what: str
    num_ranks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonModule:
    """A parsed file, as far as it matters here."""

    path: str
    imports: Mapping[str, str] = field(default_factory=dict)
    classes: tuple[LaunchingClass, ...] = ()
    started: tuple[StartedRanks, ...] = ()


def read_module(path: str, text: str) -> PythonModule:
    """Return the classes and started processes of a file.

    Raises:
        SyntaxError: It is no Python of this interpreter's version.
        ValueError: It holds a null byte.
        RecursionError: It is nested too deeply.
    """
    tree = ast.parse(text)
    imports = dict(_imports(tree))
    is_test = is_test_path(path)
    return PythonModule(
        path=path,
        imports=imports,
        classes=tuple(_class(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)),
        started=tuple(_started(tree, imports)) if is_test else (),
    )


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each imported name with what it stands for, `torch.multiprocessing` for `mp`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module or ''}.{alias.name}".strip(".")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname is not None:
                    yield alias.asname, alias.name
                else:
                    root = alias.name.partition(".")[0]
                    yield root, root


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` for such an expression, "" for any other."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _class(node: ast.ClassDef) -> LaunchingClass:
    methods = [
        item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    bases = tuple(filter(None, map(dotted, node.bases)))
    return LaunchingClass(
        name=node.name,
        line=node.lineno,
        bases=bases,
        num_tests=sum(method.name.startswith("test") for method in methods),
        world_size=_world_size(node),
    )


def _world_size(node: ast.ClassDef) -> str:
    """Return `world_size` of a class body: an attribute, or what a property returns."""
    for item in node.body:
        match item:
            case ast.Assign(targets=[ast.Name(id="world_size")], value=value):
                return _literal(value)
            case ast.AnnAssign(target=ast.Name(id="world_size"), value=ast.expr() as value):
                return _literal(value)
            case ast.FunctionDef(
                name="world_size", body=[*_, ast.Return(value=ast.expr() as value)]
            ):
                return _literal(value)
            case _:
                pass
    return ""


def _literal(node: ast.expr | None) -> str:
    """Return an integer or a list of integers as mark arguments, "" for anything else."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return str(number)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            numbers = [_literal(element) for element in elements]
            return ", ".join(numbers) if all(numbers) else ""
        case _:
            return ""


def _started(tree: ast.Module, imports: Mapping[str, str]) -> Iterator[StartedRanks]:
    """Yield the processes that a test file starts as ranks, in the order of lines."""
    names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    has_ranks = bool(_RANK_NAMES & names)
    found: list[StartedRanks] = []
    prose = set(_docstrings(tree))
    repeated = set(_repeated(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Call():
                found += _spawned(
                    node, imports, has_ranks=has_ranks, is_repeated=id(node) in repeated
                )
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                found += _launched_words(elements)
            case ast.Constant(value=str(text)) if id(node) not in prose:
                found += _launched_text(node, text)
            case ast.JoinedStr():
                found += _launched_text(node, _shown(node))
            case ast.Attribute(value=ast.Attribute(attr="mark"), attr="parallel" | "mpi" as mark):
                found.append(
                    StartedRanks(
                        kind="mark", line=node.lineno, what=f"@pytest.mark.{mark}", num_ranks=""
                    )
                )
            case _:
                pass
    sizes = _mark_sizes(tree)
    unique = {(one.line, one.kind): one for one in reversed(found)}
    for key in sorted(unique):
        one = unique[key]
        is_sized = one.kind == "mark" and one.line in sizes
        yield (
            StartedRanks(kind=one.kind, line=one.line, what=one.what, num_ranks=sizes[one.line])
            if is_sized
            else one
        )


def _mark_sizes(tree: ast.Module) -> dict[int, str]:
    """Return the sizes of marks of MPI by line; a mark without one means 3 ranks to mpi-pytest."""
    sizes = {}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="parallel"), args=[size]):
                sizes[node.lineno] = _literal(size)
            case ast.Call(func=ast.Attribute(attr="parallel" | "mpi"), keywords=keywords):
                for keyword in keywords:
                    if keyword.arg in ("nprocs", "min_size"):
                        sizes[node.lineno] = _literal(keyword.value)
            case _:
                pass
    return sizes


def _docstrings(tree: ast.Module) -> Iterator[int]:
    """Yield the identities of strings that are expressions of their own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            yield id(node.value)
        elif isinstance(node, ast.JoinedStr):
            yield from map(id, node.values)


def _repeated(tree: ast.Module) -> Iterator[int]:
    """Yield the identities of calls in loops."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.While | ast.ListComp | ast.GeneratorExp):
            yield from (id(inner) for inner in ast.walk(node) if isinstance(inner, ast.Call))


def _spawned(
    node: ast.Call, imports: Mapping[str, str], *, has_ranks: bool, is_repeated: bool
) -> Iterator[StartedRanks]:
    """Yield a call that starts processes by multiprocessing, if these look like ranks."""
    name = dotted(node.func)
    first, _, rest = name.partition(".")
    full = f"{imports[first]}.{rest}".strip(".") if first in imports else name
    module, _, last = full.rpartition(".")
    options = {keyword.arg: keyword.value for keyword in node.keywords}
    if module in _MODULES and last in _SPAWN:
        ranks = options.get("nprocs") or (node.args[2] if len(node.args) > 2 else None)  # noqa: PLR2004
        yield StartedRanks(kind="spawn", line=node.lineno, what=name, num_ranks=_literal(ranks))
        return
    kind = node.func.attr if isinstance(node.func, ast.Attribute) else last
    is_context = isinstance(node.func, ast.Attribute) and first not in imports  # `ctx.Process`
    if not has_ranks or not (is_context or module in _MODULES):
        return
    if kind == "Process" and "target" in options and is_repeated:
        yield StartedRanks(kind="spawn", line=node.lineno, what=name or kind, num_ranks="")
    elif kind == "Pool":
        ranks = options.get("processes") or (node.args[0] if node.args else None)
        if ranks is not None and _literal(ranks) != "1":
            yield StartedRanks(
                kind="spawn", line=node.lineno, what=name or kind, num_ranks=_literal(ranks)
            )


def _launched_words(elements: list[ast.expr]) -> Iterator[StartedRanks]:
    """Yield a launcher that begins a list of words, or that follows `-m` in one."""
    before = ""
    for index, element in enumerate(elements):
        text = element.value if isinstance(element, ast.Constant) else ""
        text = text if isinstance(text, str) else ""
        is_program = index == 0 and text.rpartition("/")[2] in _PROGRAMS
        is_module = before == "-m" and text in _LAUNCH_MODULES
        is_accelerate = text == "launch" and before == "accelerate" and index == 1
        if is_program or is_module or is_accelerate:
            what = "accelerate launch" if is_accelerate else text
            ranks = next(filter(None, map(_count_of, elements)), "")
            line = elements[0].lineno if is_accelerate else element.lineno
            yield StartedRanks(kind="subprocess", line=line, what=what, num_ranks=ranks)
            return
        before = text


def _count_of(element: ast.expr) -> str:
    """Return N of a word `--nproc-per-node=N`, "" of any other."""
    if isinstance(element, ast.Constant) and isinstance(element.value, str):
        match = re.fullmatch(r"--(?:nproc.per.node|num.processes)=(\d+)", element.value)
        return match[1] if match is not None else ""
    return ""


def _launched_text(node: ast.expr, text: str) -> Iterator[StartedRanks]:
    """Yield a command line in a string that is no prose."""
    match = _LAUNCHED.match(text.lstrip())
    if match is not None and re.search(r"\.py\b| -m |\{\}", text):
        what = " ".join(match[0].split()[:-1])
        count = re.search(r"(?:nproc.per.node|num.processes|-np?)[= ](\d+)", text)
        ranks = count[1] if count is not None else ""
        yield StartedRanks(kind="subprocess", line=node.lineno, what=what, num_ranks=ranks)


def _shown(node: ast.JoinedStr) -> str:
    """Return an f-string with `{}` for what is computed."""
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
    )
