"""Checks an environment against what trainings need: facts, rules as data, findings.

Facts are gathered by probes that can each be pointed elsewhere (`places.py`), checks are functions
from facts to findings, and every text of a finding is in `rules.toml`. Nothing here imports torch;
what torch says comes from a process of the environment that is looked at.
"""
