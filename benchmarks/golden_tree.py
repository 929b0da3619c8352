"""Writes a tree of goldens as large and as various as Megatron-LM's: 915 files, 33 MB.

Counts and grids are those of that repository (commit d98e8a64dd), the values are made up: 333 test
cases, 49 recipes with 623 rows, 371 goldens that a row reaches, second-run dumps, old names of
platforms, text `nan` in iteration-time, lists of values, inference outputs, empty files.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

CASES = Path("tests/functional_tests/test_cases")
NUM_CASES = 333
NUM_RECIPES = 49
SUFFIXES = (
    *(("dev_dgx_h100", 190), ("dev_dgx_gb200", 145), ("dev_dgx_a100", 132), ("lts_dgx_a100", 132)),
    *(("lts_dgxa100_dracooci", 48), ("lts_dgxa100_dracooci-ord", 47)),
    *(("dev_dgxa100_dracooci", 14), ("dev_dgxa100_dracooci-ord", 14), ("dev_dgxh100_dgxc", 5)),
    *(("lts", 37), ("dev", 6), ("dev_dgx_h100_2nd", 75), ("lts_dgx_a100_2nd", 28)),
)
NUM_INFERENCE = 42  # the others are training goldens: 873 and 42 are 915
LONG = 6_000  # steps of a long run
METRICS = ("iteration-time", "lm loss", "mem-allocated-bytes", "mem-max-allocated-bytes")


def write_tree(root: Path, seed: int = 0) -> None:
    """Write recipes, cases and goldens below `root`."""
    random.seed(seed)
    models = ("gpt",) * 6 + ("moe",) * 2 + ("hybrid", "t5")
    cases = [(models[i % len(models)], f"{models[i % 10]}_case_{i}") for i in range(NUM_CASES)]
    _write_cases(root, cases)
    targets = _targets(cases)
    _write_recipes(root, [path for path in targets if path.parts[1] != cases[-1][1]])
    for index, path in enumerate(targets):
        file = root / CASES / path
        number = int(path.parts[1].rpartition("_")[2])
        file.write_text(_golden(index, len(targets), train_iters=_train_iters(number)))


def _train_iters(number: int) -> int:
    """Return how long the case of that number trains."""
    return LONG if number % 40 == 9 else (50, 100, 100, 100, 2000)[number % 5 if number % 3 else 1]


def _targets(cases: list[tuple[str, str]]) -> list[Path]:
    """Return where the goldens go: each suffix over as many cases as it has files."""
    training = [case for index, case in enumerate(cases) if index % 8 != 3]
    paths = []
    for suffix, count in SUFFIXES:
        for index in range(count):
            model, case = training[(index * 7) % len(training)]
            paths.append(Path(model, case, f"golden_values_{suffix}.json"))
    for index in range(NUM_INFERENCE):
        model, case = cases[index * 8 + 3]
        paths.append(Path(model, case, "golden_values_dev_dgx_h100.json"))
    return paths


def _golden(index: int, num_files: int, *, train_iters: int) -> str:
    if index in {5, 250, 500, 700}:
        return "{}"
    if index in {6, 251}:
        return ""
    if index >= num_files - NUM_INFERENCE:
        return json.dumps(_inference(), indent=4)
    interval = 5 if index % 5 == 2 else 1
    end = train_iters // 2 if index % 60 == 7 else train_iters
    steps = [s for s in range(1, end + 1) if s == 1 or s % interval == 0]
    document = {name: _block(name, steps, interval, index) for name in (*METRICS, "num-zeros")}
    if index in {42, 142}:
        for block in document.values():
            block |= {"start_step": 0, "values": list(block["values"].values())}  # type: ignore[attr-defined]
    return json.dumps(document, indent=4)


def _block(name: str, steps: list[int], interval: int, index: int) -> dict[str, object]:
    if name == "iteration-time" and index % 5 == 0:
        values: dict[str, object] = {
            str(s): "nan" if s % 7 else round(random.random(), 5) for s in steps
        }
    elif name.startswith("mem"):
        values = {str(s): float(random.randrange(10**9, 4 * 10**10)) for s in steps}
    else:
        values = {str(s): round(11 * random.random(), 5) for s in steps}
    return {
        "start_step": steps[0],
        "end_step": steps[-1],
        "step_interval": interval,
        "values": values,
    }


def _inference() -> dict[str, object]:
    request = {
        "input_prompt": "Once upon a time",
        "generated_text": "there was a test",
        "generated_tokens": [random.randrange(50_000) for _ in range(64)],
        "logprobs": [-random.random() for _ in range(64)],
        "latency": random.random(),
    }
    return {"0": request, "throughput": [random.random() for _ in range(8)]}


def _write_cases(root: Path, cases: list[tuple[str, str]]) -> None:
    for index, (model, case) in enumerate(cases):
        directory = root / CASES / model / case
        directory.mkdir(parents=True)
        flags = "".join(f"  --flag-{n}: {n}\n" for n in range(40))
        mode = "MODE: inference\nMETRICS: [logprobs]\n" if index % 8 == 3 else ""
        (directory / "model_config.yaml").write_text(
            f"ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\n{mode}TEST_TYPE: regular\n"
            f"MODEL_ARGS:\n  --train-iters: {_train_iters(index)}\n{flags}"
        )


def _write_recipes(root: Path, targets: list[Path]) -> None:
    """Write rows for two of five goldens with a current name, and a few for none."""
    directory = root / "tests/test_utils/recipes/h100"
    directory.mkdir(parents=True)
    current = [path for path in targets if path.stem.endswith(("h100", "gb200", "dgx_a100"))]
    rows: dict[str, list[str]] = {}
    for index, path in enumerate(current):
        if index % 5 < 3:
            rows.setdefault(path.parts[0], []).append(_row(path, index))
    models = sorted(rows)
    for number in range(NUM_RECIPES):
        model = models[number % len(models)]
        share = rows[model][number // len(models) :: -(-NUM_RECIPES // len(models))]
        (directory / f"recipe_{number}.yaml").write_text(
            "type: basic\nformat_version: 1\nspec:\n"
            "  name: '{test_case}_{environment}_{platforms}'\n"
            f"  model: {model}\n  nodes: 1\n  gpus: 8\n"
            "  script: |-\n    GOLDEN_VALUES_PATH={assets_dir} bash ./run.sh\n"
            f"products:\n{''.join(share)}"
        )


def _row(path: Path, index: int) -> str:
    environment, _, platform = path.stem.removeprefix("golden_values_").partition("_")
    missing = ", dgx_h200" if index % 15 == 0 else ""
    return (
        f"  - test_case: [{path.parts[1]}]\n    products:\n"
        f"      - environment: [{environment}]\n        scope: [mr, mr-github]\n"
        f"        platforms: [{platform}{missing}]\n"
    )


if __name__ == "__main__":
    write_tree(Path(sys.argv[1]))
