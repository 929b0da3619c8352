"""Makes the simulated CI's project here, and what its jobs left: plan.json and artifacts/.

A test fails, the workload's loss differs, and the job of one bucket left nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "simulated_ci"))
from ci_project import make_project, run

make_project(Path.cwd(), fails=True, differs=True)
Path("plan.json").write_text(run("pytest-megatron", "plan", "--format", "json", cwd=Path.cwd()))
for job in json.loads(Path("plan.json").read_text())["jobs"]:
    if "more" not in job["id"]:
        where = f"artifacts/logs-{job['id']}"
        run("pytest-megatron", "ci", "job", job["id"], "--directory", where, cwd=Path.cwd())
        line = f"{job['command']} --run-dir {where}/run --junitxml {where}/junit.xml"
        with (Path(where) / "pytest.log").open("w") as log:
            subprocess.run(["/bin/bash", "-c", line], stdout=log, check=False)
