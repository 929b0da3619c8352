"""Where the files of a test case are, below the root of a project. Pure: looks at no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from pytest_megatron.recipe.model import Workload

CASES = Path("tests/functional_tests/test_cases")
CASE_NAME = "model_config.yaml"
GOLDENS = Path("golden_values")
GOLDEN_PREFIX = "golden_values"
NO_OTHER_NAMES: Mapping[str, str] = MappingProxyType({})


def case_path(root: Path, workload: Workload) -> Path:
    """Return the `model_config.yaml` of a workload."""
    return root / CASES / workload.model / workload.test_case / CASE_NAME


def golden_name(environment: str, platform: str) -> str:
    """Return the file name of a golden; the oldest ones name no platform."""
    return "_".join(part for part in (GOLDEN_PREFIX, environment, platform) if part) + ".json"


def golden_paths(
    root: Path, workload: Workload, other_names: Mapping[str, str] = NO_OTHER_NAMES
) -> tuple[Path, ...]:
    """Return where a workload's golden may be, the place that counts most first.

    That is our place, then Megatron-LM's beside the case, each with the platform's own name, then
    the two places with each of its other names. The first one is where a new golden belongs.

    Args:
        root: The project's.
        workload: Whose golden.
        other_names: Name in a golden's file name to the platform that it stands for.
    """
    return tuple(_places(root, workload, _names_of(workload.platform, other_names)))


def _names_of(platform: str, other_names: Mapping[str, str]) -> Iterator[str]:
    yield platform
    for name, meant in other_names.items():
        if meant == platform and name != platform:
            yield name


def _places(root: Path, workload: Workload, names: Iterator[str]) -> Iterator[Path]:
    for name in names:
        below = Path(workload.model, workload.test_case, golden_name(workload.environment, name))
        yield root / GOLDENS / below
        yield root / CASES / below
