"""Stands in for a program that nobody may change: its own words, no seed, no file."""

import random
import sys

rounds = int(sys.argv[sys.argv.index("--max_rounds") + 1])
cost = 2.0 + random.random()
for number in range(1, rounds + 1):
    print(f"round {number:03d} finished, objective={cost:.6f}, 3 ms")
    cost *= 0.9 + random.random() / 50
