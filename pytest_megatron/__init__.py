"""A pytest plugin and GPU test harness for distributed tests and training workloads.

The names in `__all__` are what other projects may import; modules below are not for them. pytest
imports this package at every start, so a name is loaded when it is asked for, and nothing before.

PYTEST_DONT_REWRITE: `pytest-megatron watch` loads it before pytest does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_megatron.errors import LaunchError, MegatronError
    from pytest_megatron.gangs.fixtures import ModelParallel
    from pytest_megatron.workloads.engine.api import (
        Checking,
        Describing,
        Engine,
        EngineContext,
        EngineError,
        Planned,
        Resources,
        Submission,
        SubmissionOutcome,
        SubmissionPhase,
        TroubleKind,
        Update,
    )
    from pytest_megatron.workloads.engine.records import (
        JobSpec,
        outcome_of,
        read_record,
        write_spec,
    )
    from pytest_megatron.workloads.recipe.model import Workload
    from pytest_megatron.workloads.training.plan.plan import Setting

    __version__: str

__all__ = [
    "Checking",
    "Describing",
    "Engine",
    "EngineContext",
    "EngineError",
    "JobSpec",
    "LaunchError",
    "MegatronError",
    "ModelParallel",
    "Planned",
    "Resources",
    "Setting",
    "Submission",
    "SubmissionOutcome",
    "SubmissionPhase",
    "TroubleKind",
    "Update",
    "Workload",
    "__version__",
    "outcome_of",
    "read_record",
    "write_spec",
]
_MODULES = {
    "JobSpec": "workloads.engine.records",
    "LaunchError": "errors",
    "MegatronError": "errors",
    "ModelParallel": "gangs.fixtures",
    "Setting": "workloads.training.plan.plan",
    "Workload": "workloads.recipe.model",
    "outcome_of": "workloads.engine.records",
    "read_record": "workloads.engine.records",
    "write_spec": "workloads.engine.records",
}

if not TYPE_CHECKING:  # a type checker must not take any name for one of ours

    def __getattr__(name: str) -> object:
        """Load a name of `__all__`."""
        import importlib

        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "__version__":
            import importlib.metadata

            return importlib.metadata.version("pytest-megatron")
        module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'workloads.engine.api')}")
        return getattr(module, name)

    def __dir__() -> list[str]:
        """Return the names that may be used."""
        return list(__all__)
