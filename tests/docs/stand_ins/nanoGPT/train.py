"""Stands in for nanoGPT's train.py: its arguments, its printed lines, no torch."""

import ast
import pathlib
import sys

settings = {"max_iters": 600000, "eval_interval": 2000, "log_interval": 1, "learning_rate": 6e-4}
for word in sys.argv[1:]:
    name, has_value, value = word.removeprefix("--").partition("=")
    if has_value:
        try:
            settings[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            settings[name] = value
    else:
        exec(pathlib.Path(word).read_text(), settings)
text = pathlib.Path("data", settings["dataset"], "train.bin").read_bytes()
weight = 4.2 + len(text) % 7 / 100
for step in range(settings["max_iters"] + 1):
    if step % settings["eval_interval"] == 0:
        print(f"step {step}: train loss {weight:.4f}, val loss {weight + 0.02:.4f}")
    if step % settings["log_interval"] == 0:
        print(f"iter {step}: loss {weight:.4f}, time 3.01ms, mfu -100.00%")
    weight -= 50 * settings["learning_rate"] * weight / (step + 10)
