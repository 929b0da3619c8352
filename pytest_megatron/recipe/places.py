"""Where the files of a test case are, below the root of a project. Pure: looks at no file."""

from __future__ import annotations

from pathlib import Path

from pytest_megatron.recipe.model import Workload

CASES = Path("tests/functional_tests/test_cases")
GOLDENS = Path("golden_values")


def case_path(root: Path, workload: Workload) -> Path:
    """Return the `model_config.yaml` of a workload."""
    return root / CASES / workload.model / workload.test_case / "model_config.yaml"


def golden_paths(
    root: Path, *, model: str, test_case: str, environment: str, platform: str
) -> tuple[Path, Path]:
    """Return where a workload's golden may be: our place, then Megatron-LM's beside the case."""
    below = Path(model) / test_case / f"golden_values_{environment}_{platform}.json"
    return root / GOLDENS / below, root / CASES / below
