"""Stands in for the run_clm.py of transformers: Trainer's arguments, lines and state, no torch."""

import argparse
import json
import pathlib
import sys

parser = argparse.ArgumentParser()
for name in ("config_name", "tokenizer_name", "train_file", "output_dir", "model_type"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--max_steps", type=int, default=-1)
parser.add_argument("--logging_steps", type=int, default=500)
parser.add_argument("--learning_rate", type=float, default=5e-5)
for name in ("do_train", "overwrite_output_dir"):
    parser.add_argument(f"--{name}", action="store_true")
given = parser.parse_args()
out = pathlib.Path(given.output_dir)
if out.exists() and not given.overwrite_output_dir:
    sys.exit(f"ValueError: Output directory ({out}) already exists and is not empty")
weight, history = 5.54, []
for step in range(1, given.max_steps + 1):
    weight -= 1000 * given.learning_rate * weight / (step + 20)
    print(f"\r{step * 100 // given.max_steps}%| | {step}/{given.max_steps} [00:00<00:01]", end="")
    if step % given.logging_steps == 0:
        entry = {"loss": round(weight, 4), "learning_rate": 5e-05, "epoch": step / 45}
        print(f"\r{entry}")
        history.append({**entry, "step": step})
out.mkdir(exist_ok=True)
(out / "trainer_state.json").write_text(json.dumps({"log_history": history}))
