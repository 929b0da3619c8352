"""Prints a golden's curves with the loss off by 5e-4 from step 31 on, as a run's metrics."""

from __future__ import annotations

import json
import sys
from pathlib import Path

run = json.loads(Path(sys.argv[1]).read_text())
run.pop("_provenance")
losses = run["lm loss"]["values"]
for step in losses:
    if int(step) > 30:
        losses[step] *= 1.0005
print(json.dumps(run))
