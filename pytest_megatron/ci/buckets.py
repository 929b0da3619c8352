"""Buckets of test files: each file in exactly one, or an error. Pure but for listing files.

A bucket is a file or `dir/**/*.py`; a file belongs to the bucket that names it most exactly.
Source: Megatron-LM tests/unit_tests/run_ci_test.sh and find_test_cases.py, d98e8a64dd
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pytest_megatron.errors import RecipeError

SUFFIX = "/**/*.py"
TEST_FILES = ("test_*.py", "*_test.py")  # pytest's own default
_SKIPPED_DIRS = ("__pycache__", "node_modules", "venv", "build", "dist")
MAX_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Test files that one job runs.

    Attributes:
        pattern: As a recipe names it: a file, or `dir/**/*.py`.
        files: From the project's root, sorted.
        words: What `--bucket` takes to run it and nothing else; `!` takes away.
    """

    pattern: str
    files: tuple[str, ...]
    words: tuple[str, ...]


def find_test_files(root: Path, folders: Iterable[str]) -> tuple[str, ...]:
    """Return the test files below folders of a project, from its root, sorted."""
    found: set[str] = set()
    for folder in folders:
        for directory, names, files in os.walk(root / folder):
            names[:] = [n for n in names if n not in _SKIPPED_DIRS and not n.startswith(".")]
            there = Path(directory).relative_to(root)
            found.update((there / name).as_posix() for name in files if is_test_file(name))
    return tuple(sorted(found))


def is_test_file(name: str) -> bool:
    """Whether pytest takes a file of that name for one of tests."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in TEST_FILES)


def base_of(pattern: str) -> str:
    """Return the folder or file that a pattern is about."""
    path = pattern.removesuffix(SUFFIX)
    parts = PurePosixPath(path).parts
    plain = [part for part in parts if not any(sign in part for sign in "*?{[")]
    return "/".join(plain[: len(plain) if len(plain) == len(parts) else _first_glob(parts)])


def _first_glob(parts: Sequence[str]) -> int:
    return next(i for i, part in enumerate(parts) if any(sign in part for sign in "*?{["))


def share_out(files: Sequence[str], patterns: Mapping[str, str]) -> tuple[Bucket, ...]:
    """Return the bucket of each pattern; together they hold every file exactly once.

    Args:
        files: All test files, from the project's root.
        patterns: Pattern -> where it is written, `file:line`; in the order of the result.

    Raises:
        RecipeError: A pattern is none or matches no file, or a file is in no bucket.
    """
    bases = {pattern: _checked_base(pattern, where) for pattern, where in patterns.items()}
    owned: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    nobodys: list[str] = []
    for file in files:
        holding = [p for p, base in bases.items() if file == base or file.startswith(f"{base}/")]
        if holding:
            owned[max(holding, key=lambda pattern: len(bases[pattern]))].append(file)
        else:
            nobodys.append(file)
    if nobodys:
        raise RecipeError(
            ", ".join(sorted({where.rpartition(":")[0] for where in patterns.values()})),
            f"no bucket holds {_listed(nobodys)}, expected each test file in one; "
            f"add a bucket, such as [{os.path.commonpath(nobodys)}{SUFFIX}]",
        )
    for pattern, held in owned.items():
        if not held:
            raise RecipeError(
                patterns[pattern],
                f"bucket {pattern!r} holds no test file, expected at least one; "
                f"correct the path, or drop it",
            )
    return tuple(
        Bucket(
            pattern=pattern,
            files=tuple(sorted(held)),
            words=(pattern, *(f"!{inner}" for inner in _below(pattern, bases))),
        )
        for pattern, held in owned.items()
    )


def _checked_base(pattern: str, where: str) -> str:
    base = pattern.removesuffix(SUFFIX)
    is_folder = base != pattern
    if not base or any(sign in base for sign in "*?,!") or is_folder == base.endswith(".py"):
        raise RecipeError(
            where, f"test_case: {pattern!r} is no bucket, expected a file or dir{SUFFIX}"
        )
    return base


def _below(pattern: str, bases: Mapping[str, str]) -> tuple[str, ...]:
    """Return the widest buckets that lie within another."""
    inner = {p: b for p, b in bases.items() if b.startswith(f"{bases[pattern]}/")}
    return tuple(
        p for p, base in inner.items() if not any(base.startswith(f"{b}/") for b in inner.values())
    )


def _listed(files: Sequence[str]) -> str:
    more = f" and {len(files) - MAX_LISTED} more" if len(files) > MAX_LISTED else ""
    return ", ".join(files[:MAX_LISTED]) + more
