"""Gives the first workload's project, here, three rows of two ranks: one asks for 9 nodes."""

from __future__ import annotations

import shutil
from pathlib import Path

shutil.copy(Path(__file__).with_name("replay.py"), "train.py")
with Path("train.py").open("a") as program:
    program.write('if os.environ["RANK"] == "1" and "crashes" in output:\n')
    program.write('    raise ValueError("the crash of rank 1")\n')
recipe = Path("recipes/tiny.yaml")
head = recipe.read_text().replace("gpus: 1", "gpus: 2").partition("products:")[0]
row = "  - test_case: [{}]\n    products:\n      - {{environment: [dev], scope: [L0]{}}}\n"
rows = [row.format("too_wide", ", nodes: [9]"), row.format("crashes", ""), row.format("sound", "")]
recipe.write_text(f"{head}products:\n{''.join(rows)}")
for name in ("too_wide", "crashes", "sound"):
    for kind in ("tests/functional_tests/test_cases", "golden_values"):
        shutil.copytree(f"{kind}/tiny/line", f"{kind}/tiny/{name}")
