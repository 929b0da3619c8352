"""What the place and the name of a golden file say: whose golden it is. Pure.

`golden_values_<environment>_<platform>.json`, below a directory for the model and one for the test
case, in one of two trees. Older names have a cluster for the platform, or nothing; a second run of
a repeated test leaves `_2nd` behind, which nothing reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.recipe.places import CASES, GOLDEN_PREFIX, GOLDENS, golden_name

PATTERN = f"{GOLDEN_PREFIX}*.json"
_SECOND_RUN = "_2nd"
_TREES = (GOLDENS, CASES)
_DEPTH = 3  # model, test case, file


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenOwner:
    """Whose golden a file is, by where it lies and what it is called.

    Attributes:
        tree: `golden_values`, or the directory of the test cases.
        platform: As the file calls it; empty in a file that names none.
        is_second_run: Whether the name ends in `_2nd`.
    """

    tree: Path
    model: str
    test_case: str
    environment: str
    platform: str
    is_second_run: bool = False

    def moved(self, tree: Path, other_names: Mapping[str, str]) -> Path:
        """Return the path, below the project, in another tree and with the platform's own name."""
        platform = other_names.get(self.platform, self.platform)
        return tree / self.model / self.test_case / golden_name(self.environment, platform)


def parse_name(name: str, environments: Collection[str]) -> tuple[str, str, bool] | None:
    """Return environment, platform and whether it is of a second run; None for another name."""
    stem = name.removesuffix(".json")
    if stem == name or not stem.startswith(f"{GOLDEN_PREFIX}_"):
        return None
    is_second_run = stem.endswith(_SECOND_RUN)
    words = stem.removeprefix(f"{GOLDEN_PREFIX}_").removesuffix(_SECOND_RUN)
    for environment in sorted(environments, key=len, reverse=True):
        if words == environment:
            return environment, "", is_second_run
        if words.startswith(f"{environment}_"):
            return environment, words.removeprefix(f"{environment}_"), is_second_run
    return None


def place_of(path: Path, root: Path, environments: Collection[str]) -> GoldenOwner | None:
    """Return whose golden the file `path` is; None where place or name do not say it."""
    owner = owner_of(path, root)
    found = parse_name(path.name, environments)
    if owner is None or found is None:
        return None
    tree, model, test_case = owner
    environment, platform, is_second_run = found
    return GoldenOwner(
        tree=tree,
        model=model,
        test_case=test_case,
        environment=environment,
        platform=platform,
        is_second_run=is_second_run,
    )


def owner_of(path: Path, root: Path) -> tuple[Path, str, str] | None:
    """Return tree, model and test case of a file in its right place, whatever its name."""
    tree = tree_of(path, root)
    if tree is None:
        return None
    parts = path.absolute().relative_to(root.absolute() / tree).parts
    return (tree, parts[0], parts[1]) if len(parts) == _DEPTH else None


def tree_of(path: Path, root: Path) -> Path | None:
    """Return the tree, relative to the project's `root`, that a path is below; None elsewhere."""
    absolute = path.absolute()
    return next((tree for tree in _TREES if absolute.is_relative_to(root.absolute() / tree)), None)
