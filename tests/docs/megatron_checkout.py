"""Makes files as a checkout of Megatron-LM has them, here: a recipe, a case and its goldens."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = """\
type: basic
format_version: 1
spec:
  name: "{test_case}_{environment}_{platforms}"
  model: gpt
  nodes: 1
  gpus: 2
  platforms: dgx_h100
  script: |-
    set -euo pipefail
    cd /opt/megatron-lm
    export GPUS_PER_NODE={gpus}
    ARGUMENTS=(
        "DATA_PATH=/mnt/artifacts"
        "DATA_CACHE_PATH=/workspace/data/cache"
        "OUTPUT_PATH={assets_dir}"
        "TENSORBOARD_PATH={assets_dir}/tensorboard"
        "CHECKPOINT_SAVE_PATH={artifacts_dir}/checkpoints"
        "CHECKPOINT_LOAD_PATH=/mnt/artifacts"
        "TRAINING_SCRIPT_PATH=pretrain_gpt.py"
        "TRAINING_PARAMS_PATH=./CASE/model_config.yaml"
        "GOLDEN_VALUES_PATH=./CASE/golden_values_{environment}_{platforms}.json"
        "N_REPEAT={n_repeat}"
    )
    bash ./tests/functional_tests/shell_test_utils/run_ci_test.sh ${{ARGUMENTS[@]}}
products:
  - test_case: [tp2]
    products:
      - environment: [dev]
        scope: [mr-github-slim]
""".replace("CASE", "tests/functional_tests/test_cases/{model}/{test_case}")

cases = Path("tests/functional_tests/test_cases/gpt/tp2")
recipes = Path("tests/test_utils/recipes/h100")
for directory in (cases, recipes):
    directory.mkdir(parents=True)
(recipes / "gpt.yaml").write_text(RECIPE)
Path("pretrain_gpt.py").write_text("")
case = ROOT / "tests/functional_tests/test_cases/gpt/tp2/model_config.yaml"
(cases / "model_config.yaml").write_text(case.read_text())
golden = json.loads((ROOT / "golden_values/gpt/tp2/golden_values_dev_dgx_h200.json").read_text())
for suffix, factor in (("dgx_h100", 1.0), ("dgx_h100_2nd", 1.0), ("dgxa100_dracooci", 1.5)):
    series = {}
    for name in ("lm loss", "iteration-time", "num-zeros"):
        scale = factor if name == "iteration-time" else 1.0
        found = golden[name]["values"].items()
        values = {k: round(v * scale, 5) for k, v in found if not isinstance(v, str)}
        series[name] = {"start_step": 1, "end_step": 50, "step_interval": 1, "values": values}
    path = cases / f"golden_values_dev_{suffix}.json"
    path.write_text(json.dumps(series, indent=4) + "\n")
