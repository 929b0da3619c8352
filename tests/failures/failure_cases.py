"""The cases: what goes wrong on which rank, and what a person who saw the logs would say. Data.

Each expectation was written from what the case does and from the logs that it left, before any
classifier saw them. Families are the rows of the catalogue of failures.
"""

from __future__ import annotations

from cases_gpu import GPU
from cases_python import PYTHON
from cases_ranks import DESYNC, LAUNCHER, NETWORKS
from cases_system import SYSTEM
from failure_case import Case, Form

__all__ = ["CASES", "Case"]

_SOUND: tuple[tuple[str, Form], ...] = (
    ("innocent_memory", "torch"),
    ("innocent_health", "mixed"),
    ("innocent_retry", "ours"),
    ("innocent_traceback", "torch"),
    ("innocent_warnings", "single"),
    ("innocent_numbers", "torch"),
    ("innocent_handlers", "srun"),
    ("innocent_configuration", "zip"),
    ("innocent_probe", "tasks"),
    ("innocent_child", "torch"),
)
INNOCENT = tuple(
    Case(
        id=name.replace("_", "-"),
        fault=name,
        families=(),
        chance="innocent",
        root="none",
        form=form,
    )
    for name, form in _SOUND
)
CASES: tuple[Case, ...] = (*PYTHON, *SYSTEM, *NETWORKS, *DESYNC, *LAUNCHER, *INNOCENT, *GPU)
