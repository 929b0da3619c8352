"""How long 10,000 recipe rows take from YAML text to workloads: `python benchmarks/expand.py`.

Written in the style of Megatron-LM's recipes: a spec with two long scripts, entries of one test
case with one or two products. Prints one line for each profile and way to split the rows. The
first reading of a process also pays for importing pydantic, so it is measured in a fresh process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_ROWS = 10_000
REPEATS = 5
HEAD = """\
type: basic
format_version: 1
maintainers: [team]
loggers: [stdout]
spec:
  name: "{test_case}_{environment}_{platforms}"
  model: gpt
  build: image-{environment}
  nodes: 1
  gpus: 8
  n_repeat: 5
  platforms: dgx_a100
  script: |-
    set -euo pipefail
    ARGUMENTS=(
        "DATA_PATH=/data"
        "OUTPUT_PATH={assets_dir}"
        "TRAINING_PARAMS_PATH=./cases/{model}/{test_case}/model_config.yaml"
        "LIGHTWEIGHT=${{LIGHTWEIGHT:-}}"
    )
    bash ./run.sh "${{ARGUMENTS[@]}}"

products:
"""
ENTRY = """\
  - test_case: [gpt3_mcore_te_{index}_tp1_pp2_resume_torch_dist_dist_optimizer]
    products:
      - environment: [dev]
        scope: [mr, mr-github]
        platforms: [dgx_h100]
"""
SECOND_PRODUCT = """\
      - environment: [lts]
        scope: [nightly] # a tier of its own
"""


def write_recipes(directory: Path, num_files: int) -> None:
    """Write recipes of together `NUM_ROWS` rows."""
    for number in range(num_files):
        wanted = NUM_ROWS // num_files + (number < NUM_ROWS % num_files)
        parts, num_rows, index = [HEAD], 0, 0
        while num_rows < wanted:
            parts.append(ENTRY.replace("{index}", str(index)))
            num_rows += 2
            if num_rows == wanted + 1:  # an odd number of rows ends with one scope
                parts[-1] = parts[-1].replace("mr, ", "")
                num_rows -= 1
            elif num_rows < wanted and index % 2:
                parts.append(SECOND_PRODUCT)
                num_rows += 1
            index += 1
        (directory / f"recipe_{number}.yaml").write_text("".join(parts))


def read_recipes(directory: Path, profile_name: str) -> None:
    """Read all recipes of a directory once and print the seconds; runs in a fresh process."""
    start = time.perf_counter()
    from pytest_megatron.workloads.recipe.expand import Profile  # noqa: PLC0415  the import counts
    from pytest_megatron.workloads.recipe.load import find_recipes, load_recipe  # noqa: PLC0415

    profile = Profile(profile_name)
    num_rows = sum(len(load_recipe(path, profile)) for path in find_recipes([directory]))
    seconds = time.perf_counter() - start
    assert num_rows == NUM_ROWS, num_rows
    print(seconds)


def main() -> None:
    """Measure every profile on one file and on 49."""
    if len(sys.argv) == 3:
        read_recipes(Path(sys.argv[1]), sys.argv[2])
        return
    for num_files in (1, 49):
        for profile in ("strict", "compat"):
            with tempfile.TemporaryDirectory() as name:
                write_recipes(Path(name), num_files)
                command = [sys.executable, __file__, name, profile]
                seconds = sorted(
                    float(subprocess.run(command, check=True, capture_output=True).stdout)
                    for _ in range(REPEATS)
                )
            print(
                f"{NUM_ROWS} rows in {num_files} files, {profile}: "
                f"{seconds[0]:.2f} s best, {seconds[REPEATS // 2]:.2f} s median of {REPEATS} "
                "(python benchmarks/expand.py)"
            )


if __name__ == "__main__":
    main()
