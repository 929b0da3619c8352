"""Changes step 20 of a golden by 1e-3, here; the replay still trains what it was before.

The golden is another class of host's, so that it is judged alike on every machine.
"""

from __future__ import annotations

import json
from pathlib import Path

path = Path("golden_values/gpt/tp1_pp1/golden_values_dev_cpu.json")
golden = json.loads(path.read_text())
golden["_provenance"]["host_class"] = "another"
Path("golden_values/before").mkdir()
Path("golden_values/before/tp1_pp1").mkdir()
path.rename(f"golden_values/before/tp1_pp1/{path.name}")
golden["lm loss"]["values"]["20"] *= 1.001
path.write_text(json.dumps(golden))
