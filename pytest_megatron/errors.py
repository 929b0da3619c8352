"""Errors that a user can cause; each text has the place and what to do.

The text of all of them is `<where>: <what is wrong>, <what was expected>; <what to do>`. The hooks
turn them into pytest's usage errors or failures, the command line into one line on stderr; nobody
else catches them. Must not import anything of ours: every layer may raise these.
"""

from __future__ import annotations

from typing_extensions import override

__all__ = [
    "CaseError",
    "CiError",
    "ConfigError",
    "EmptySelectionError",
    "GoldenError",
    "HostError",
    "LaunchError",
    "MegatronError",
    "MetricsError",
    "RecipeError",
    "ReportError",
    "ReproError",
    "RunError",
    "SelectionError",
    "TraceError",
    "TriageError",
]

# A command ("golden show"), an option ("--NAME", also `megatron_NAME` in the ini file) or a setting
# ("megatron_NAME") of earlier versions: what to do instead.
REMOVED = {
    "adopt": "was removed; docs/migration.md has the places to look for and what to type instead",
    "changed": "was removed, as pytest-testmon works on ranks; delete the files of its records",
    "ci rows": "was removed; write pytest -p megatron ROW --fake-ranks=12 in a job of your own",
    "ci comment": "was removed; write gh pr comment NUMBER --body-file summary/comment.md",
    "cost": "was removed; run.json has GPUs and times of each item, and `ci summary` GPU hours",
    "culprit": "was removed; write git bisect run pytest-megatron repro RUN ITEM",
    "golden convert": "was removed; goldens are read in each form, where they lie",
    "golden show": "was removed; the page curves.html of a run has the curves, git diff the values",
    "golden-platforms": "was removed; give goldens the name of their platform, with git mv",
    "golden-form": "was removed; delete the key, goldens are written in one form",
    "golden review": "was removed; see with golden accept RUN --dry-run, take with --only ITEM",
    "interactive": "was removed; write srun --pty bash, with the flags that sbatch ITEM prints",
    "report": "is a part of runs; write pytest-megatron runs report RUN",
    "schema": "is a part of lint; write pytest-megatron lint --schema NAME",
    "gangs": "was removed; pytest-megatron watch TESTS runs tests again after each edit",
    "trace show": "was removed; read the lines of rank_<r>.jsonl with grep or jq",
    "--changed": "was removed; write --testmon, as pytest-testmon works on ranks",
    "--audit": "was removed, and looks no longer by default; write --leaks in place of fail",
    "--audit-determinism": "was removed; write pytest-megatron trace repeat ROW",
    "--attach": "was removed; cancel the jobs of a pytest that is gone with scancel, by the ids in "
    "engine/journal.jsonl of its run, and start a new run",
    "--keep-contexts": "was removed, as runs were slower with it; drop it",
    "--keep-gangs": "was removed; pytest-megatron watch TESTS runs tests again after each edit",
    "--pack-gpus": "was removed, as it gained little; drop it: each gang has its own GPUs",
    "--record-changed": "was removed; write --testmon, as pytest-testmon works on ranks",
    "--stop-early": "was removed, as only a loss that is not finite ends a training; drop it",
    "--stress": "was removed; write --count N of pytest-repeat, which works on ranks",
    "--workload-start": "was removed, as every rank starts as it would without us; drop it",
    "megatron_changed_draw": "was removed, as --changed was; drop it",
    "megatron_changed_file": "was removed, as --changed was; drop it",
    "megatron_keep_runs": "was removed; write pytest-megatron runs prune --keep N after a run",
    "megatron_stress_seed": "was removed, as --stress was; drop it",
}


class MegatronError(Exception):
    """Something outside this package is wrong; the base of all our errors.

    Attributes:
        where: The file with its line, the option or the item that the user can go to.
        problem: What is wrong there, what was expected, what to do; lower case, no final period.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)  # both in `args`: the error survives pickling
        self.where = where
        self.problem = problem

    @override
    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class RecipeError(MegatronError):
    """A recipe file cannot be read, or a row of it means nothing."""


class ReproError(MegatronError):
    """A run or an artifact cannot be read, or holds nothing that can be done again here."""


class RunError(MegatronError):
    """A run directory or an artifact of one cannot be found or read."""


class SelectionError(MegatronError):
    """The selection options match no workload, or name something unknown."""


class EmptySelectionError(SelectionError):
    """Everything that was selected by is known, and nothing matches all of it."""


class CaseError(MegatronError):
    """A test case's `model_config.yaml` cannot be read or cannot be turned into a command."""


class CiError(MegatronError):
    """A plan, a run or an artifact of CI cannot be read, or a file of CI must not be written."""


class ConfigError(MegatronError):
    """A setting of the project (`[tool.pytest-megatron]`) or of this package is wrong."""


class LaunchError(MegatronError):
    """A workload cannot be started on this host, or its directories cannot be made."""


class HostError(MegatronError):
    """This host lacks what was asked for: GPUs, a program, a free directory."""


class MetricsError(MegatronError):
    """What a training wrote cannot be read as metrics, or there is nothing to read."""


class GoldenError(MegatronError):
    """A golden file is missing, cannot be read, or must not be written."""


class TraceError(MegatronError):
    """A trace cannot be written, read or compared, or its settings mean nothing."""


class TriageError(MegatronError):
    """A log or an artifact cannot be read as one."""


class ReportError(MegatronError):
    """A run directory or an artifact cannot be shown, or its pages cannot be written."""
