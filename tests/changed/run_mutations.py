"""Proof of `--changed`: plant mutations, and ask whether a test that fails is selected.

    python tests/changed/run_mutations.py --mutations 40 --seed 7

Copies this checkout, records the tests of some packages once, and then changes one function of
their product code at a time: a comparison, a constant, an operator or a result. The functions are
drawn by the seed, of all that the packages have. The selected tests run first; if all of them pass,
the others run as well, and one that fails was missed. Mutations that no test finds count for what
is saved, and not as found.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_megatron.changed.record import ProjectState, TestRecord, read_record
from pytest_megatron.changed.select import Changes
from pytest_megatron.changed.sources import Sources, digest, files_of

ROOT = Path(__file__).resolve().parents[2]
_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of a function.

    Attributes:
        line: Of the code, from 1.
        start: First byte in that line.
        end: Last line, and the byte after the last one in it.
    """

    path: Path
    function: str
    line: int
    start: int
    end: tuple[int, int]
    new: str

    def apply(self, root: Path) -> None:
        """Change the file below a root."""
        lines = (root / self.path).read_bytes().splitlines(keepends=True)
        before = [*lines[: self.line - 1], lines[self.line - 1][: self.start]]
        after = [lines[self.end[0] - 1][self.end[1] :], *lines[self.end[0] :]]
        (root / self.path).write_bytes(b"".join([*before, self.new.encode(), *after]))


def _mutated(node: ast.AST) -> ast.expr | None:  # noqa: PLR0911 - a table
    """Return a changed expression for one, None where it has no change."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _OPPOSITES:
            return ast.Compare(node.left, [_OPPOSITES[type(op)]()], node.comparators)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return ast.BoolOp(other, node.values)
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value)):
            return ast.Constant(value + 1)
        case ast.Return(value=ast.expr()):
            return ast.Constant(None)
        case _:
            return None


def _of_function(path: Path, name: str, function: ast.AST) -> Iterator[Mutation]:
    for statement in getattr(function, "body", []):
        for node in ast.walk(statement):
            place = node.value if isinstance(node, ast.Return) else node
            new = _mutated(node)
            if new is None or not isinstance(place, ast.expr) or place.end_lineno is None:
                continue
            end = place.end_lineno, place.end_col_offset or 0
            text = f"({ast.unparse(new)})"
            yield Mutation(path, name, place.lineno, place.col_offset, end, text)


def _functions(node: ast.AST, within: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield f"{within}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{within}{child.name}.")


def find_mutations(root: Path, packages: Sequence[str], number: int, seed: int) -> list[Mutation]:
    """Return one mutation of each of `number` functions, drawn of all."""
    found: list[list[Mutation]] = []
    for package in packages:
        for file in sorted((root / "pytest_megatron" / package).rglob("*.py")):
            path = file.relative_to(root)
            for name, function in _functions(ast.parse(file.read_text(encoding="utf-8")), ""):
                found.append(list(_of_function(path, name, function)))
    chance = random.Random(seed)
    return [chance.choice(some) for some in chance.sample([f for f in found if f], number)]


def _pytest(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "megatron",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)


def _copy(root: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, names)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)


def _passes(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode in (0, 5)


@dataclass(frozen=True, slots=True)
class MutationResult:
    """What became of one mutation: `found`, `missed` or `survived`; the share of seconds saved."""

    mutation: Mutation
    outcome: str
    num_selected: int
    saved: float


def _selected(root: Path, record: TestRecord, path: Path, now: ProjectState) -> set[str]:
    """Return the tests that `--changed` selects when one file differs."""
    files = {**now.files, path.as_posix(): digest((root / path).read_bytes())}
    changes = Changes(record, Sources(root), ProjectState(environment={}, files=files))
    return {name for name in record.tests if changes.reason(name, None) is not None}


def _try(root: Path, selected: set[str], record: TestRecord, tests: Sequence[str]) -> str:
    """Return what became of a mutation: `found`, `missed`, `survived`."""
    if not _passes(_pytest(root, "--changed", "-x", *tests)):
        return "found"
    others = sorted(record.tests.keys() - selected)
    if not others:  # an empty list would have pytest collect all that there is
        return "survived"
    listed = root.parent / "others.txt"
    listed.write_text("\n".join(others), encoding="utf-8")
    return "survived" if _passes(_pytest(root, "-x", f"@{listed}")) else "missed"


def main() -> int:
    """Print a line for each mutation, and the sums; return 1 if one was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--packages", default="workloads/golden,workloads/recipe,ci")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for all mutations")
    parser.add_argument("--slow", type=float, default=1.0, help="seconds, from which tests are out")
    parser.add_argument("--directory", help="of an earlier copy, with its record, to use it again")
    given = parser.parse_args()
    packages = given.packages.split(",")
    tests = [f"tests/unit_tests/{package}" for package in packages]
    for tested in tests:
        if not (ROOT / tested).is_dir():
            parser.error(f"argument --packages: {tested} is no directory, expected one of tests")
    results: list[MutationResult] = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        root = Path(given.directory or temporary, "copy").resolve()
        if not root.exists():
            _copy(root)
            done = _pytest(root, "--record-changed", *tests)
            print(done.stdout.splitlines()[-1], flush=True)
        mutations = find_mutations(root, packages, given.mutations, given.seed)
        record = read_record(root / ".pytest_megatron/changed.z")
        now = ProjectState(environment={}, files=files_of(root))
        slow = [n for n, test in record.tests.items() if test.duration_s > given.slow]
        tests += [f"--deselect={name}" for name in slow]
        record = replace(record, tests={n: t for n, t in record.tests.items() if n not in slow})
        total = sum(test.duration_s for test in record.tests.values())
        print(f"{len(record.tests)} tests of {total:.0f} s, without {len(slow)} slow ones")
        start = time.monotonic()
        for mutation in mutations:
            if time.monotonic() - start > given.limit:
                print(f"stopped after {len(results)}: the time is over")
                break
            before = (root / mutation.path).read_bytes()
            mutation.apply(root)
            selected = _selected(root, record, mutation.path, now)
            outcome = _try(root, selected, record, tests)
            saved = 1 - sum(record.tests[name].duration_s for name in selected) / total
            result = MutationResult(mutation, outcome, len(selected), saved)
            (root / mutation.path).write_bytes(before)
            results.append(result)
            place = f"{mutation.path}:{mutation.line} {mutation.function}"
            print(
                f"{result.outcome:8} {result.num_selected:4} of {len(record.tests)} "
                f"{result.saved:6.1%} {place}",
                flush=True,
            )
    numbers = {
        word: sum(r.outcome == word for r in results) for word in ("found", "missed", "survived")
    }
    saved = sum(result.saved for result in results) / len(results)
    print(f"{len(results)} mutations: {numbers}, {saved:.1%} of test seconds saved")
    return int(numbers["missed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
