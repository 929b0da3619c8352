"""Count the decisions that clusters leave to a reviewer, on refreshes of a real history.

    python benchmarks/golden_clusters.py path/to/Megatron-LM COMMIT...

Of each commit, the golden files that it changes are compared with those before it. A cluster of
three or more goldens is one decision; each golden of a smaller one is a decision of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path, PurePosixPath

from pytest_megatron.errors import MegatronError
from pytest_megatron.workloads.golden.model import Golden
from pytest_megatron.workloads.golden.store import read_golden
from pytest_megatron.workloads.refresh.difference import FileDifference, cluster, differ

GOLDENS = "tests/functional_tests/test_cases/*golden_values*.json"
LEAST = 3


def git(repository: Path, *arguments: str) -> bytes | None:
    """Return what git prints; None if it fails."""
    command = ["git", "-C", str(repository), *arguments]
    done = subprocess.run(command, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


def golden_at(repository: Path, revision: str, path: str, directory: Path) -> Golden | None:
    """Return a golden of a revision; None if it is not there or cannot be read."""
    content = git(repository, "show", f"{revision}:{path}")
    if content is None:
        return None
    file = directory / PurePosixPath(path).name
    file.write_bytes(content)
    try:
        return read_golden(file)
    except MegatronError:
        return None


def differences_of(repository: Path, commit: str, directory: Path) -> list[FileDifference]:
    """Return the goldens that a commit changes."""
    words = ("show", "--format=", "--name-only", "--diff-filter=M", commit, "--", GOLDENS)
    found = []
    for path in (git(repository, *words) or b"").decode().split():
        old = golden_at(repository, f"{commit}~", path, directory)
        new = golden_at(repository, commit, path, directory)
        if old is not None and new is not None:
            found.append(differ(path, old, new))
    return found


def main() -> None:
    """Print a line for each commit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("repository", type=Path)
    parser.add_argument("commits", nargs="+")
    parser.add_argument("-v", "--verbose", action="store_true", help="Print the clusters.")
    given = parser.parse_args()
    for commit in given.commits:
        with tempfile.TemporaryDirectory() as directory:
            differences = differences_of(given.repository, commit, Path(directory))
        clusters = cluster(differences, lambda difference: difference)
        sizes = [len(one.members) for one in clusters]
        decisions = sum(1 if size >= LEAST else size for size in sizes)
        print(f"{commit}: {len(differences)} goldens, {len(clusters)} clusters: {decisions}")
        for one in clusters if given.verbose else ():
            print(f"    {one.text}")


if __name__ == "__main__":
    main()
