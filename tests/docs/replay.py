"""Stands in for a training program where pages are run: replays the golden of its case.

Starts in milliseconds, prints the lines of a training and measures what the golden says; all else
of a page's command is real. `.ci/run` trains this repository's workloads, and the page of the
first workload trains its own.

Variables: REPLAY_FACTOR changes the loss after step 1; REPLAY_PORT=1 has first attempts fail at
step 2, since a port is in use.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--fault")
parser.add_argument("--load")
parser.add_argument("--output-path", type=Path)
given, _ = parser.parse_known_args()
output = os.environ["OUTPUT_PATH"]
factor = float(os.environ.get("REPLAY_FACTOR", "1"))
has_port = not ("REPLAY_PORT" in os.environ and "/attempt_1/" in output)

if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    (case,) = re.findall(r"/\w+-(\w+)-dev-cpu-", output)
    goldens = sorted(Path("golden_values").glob(f"*/{case}/golden_values_dev_cpu.json"))
    golden = json.loads(goldens[0].read_text()) if goldens else {}
    golden.pop("_provenance", None)
    if given.load:
        print("successfully loaded checkpoint")
    if given.output_path:
        given.output_path.write_text(json.dumps(golden))
    elif given.fault:
        print("iteration 4/20 | lm loss: 4.1E+00 |", flush=True)
        message = "found NaN in local forward loss calculation"
        raise RuntimeError(f"Rank 0, iteration 5: Unexpected result nan (message='{message}')")
    else:
        name = "lm loss" if "lm loss" in golden else "lm-loss"
        with Path(os.environ["PYTEST_MEGATRON_METRICS"]).open("w") as metrics:
            for step in golden[name]["values"]:
                if step == "2" and not has_port:
                    raise RuntimeError("The server socket has failed to listen: EADDRINUSE")
                found = {key: series["values"].get(step) for key, series in golden.items()}
                values = {k: v for k, v in found.items() if isinstance(v, (int, float))}
                values[name] *= factor if step != "1" else 1.0
                print(json.dumps({"step": int(step), **values}), file=metrics)
                line = f"iteration {step}/{given.train_iters} | lm loss: {values[name]:.6E} |"
                print(line, flush=True)
