"""Places of the files of a run: names only, nothing is created here. Pure.

    <run-dir>/run.json
    <run-dir>/<item>/repeat_<i>/attempt_<k>/{plan,health}.json
    <run-dir>/<item>/repeat_<i>/attempt_<k>/phase_<n>/logs/<rank>/{stdout,stderr}.log
    <run-dir>/<item>/repeat_<i>/attempt_<k>/phase_<n>/{tensorboard/, metrics.json}
    <run-dir>/<item>/{by_hand,golden,comparison,triage}.json
    <run-dir>/<item>/curves.html

Every attempt has directories of its own, so that nothing of another attempt can be read when it is
judged.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import write_text_atomically

RUN_FILE = "run.json"
HISTORY_FILE = "history.jsonl"  # beside the run directories
PLAN_FILE = "plan.json"
HEALTH_FILE = "health.json"
COMPARISON_FILE = "comparison.json"
TRIAGE_FILE = "triage.json"
TRACE_DIR = "tensor_trace"
FLIGHT_PREFIX = "nccl_trace_rank_"  # torch's; the rank follows
BY_HAND = "PYTEST_MEGATRON_BY_HAND"  # variable: metrics of a run by hand, which is one repeat
_NODE = re.compile(r"node(\d+)").fullmatch
_NAME_LENGTH = 150  # of a directory; file systems take 255 bytes


class _Below:
    """A path in a directory, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, dirs: PhaseDirs | AttemptDirs | ItemDirs, owner: object) -> Path:
        return dirs.root / self._name


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseDirs:
    """The directories of one phase, which is one start of the training program.

    Attributes:
        logs: `<rank>/stdout.log` and `<rank>/stderr.log` of every rank.
        launcher_log: Output of the launcher, the lines of chosen ranks among it.
        tensorboard: Event files that the training writes.
        flight: Dumps of the flight recorder of each rank after a collective did not finish.
        trace: Trace of the tensors of each rank, of a phase that is traced.
        metrics_lines: Metrics as JSON lines, which a training may write instead.
        collected: What was read so far from the place that the row's `metrics` names, or the
            problem.
        generated: Requests of an inference program, `${INFERENCE_OUTPUT_PATH}`.
        metrics: The metrics that were read, in the form of a golden.
    """

    root: Path
    logs = _Below("logs")
    launcher_log = _Below("launcher.log")
    tensorboard = _Below("tensorboard")
    flight = _Below("flight")
    trace = _Below(TRACE_DIR)
    metrics_lines = _Below("metrics.jsonl")
    collected = _Below("collected.json")
    generated = _Below("generated.json")
    metrics = _Below("metrics.json")

    def first_rank_below(self, path: Path, ranks_per_node: int) -> int:
        """Return the first rank of the node that a log or a directory in `logs` belongs to."""
        found = _NODE(path.relative_to(self.logs).parts[0])
        return 0 if found is None else int(found[1]) * ranks_per_node

    def script(self, name: str) -> Path:
        """A script of the case, `before` or `after` the training; `.log` is its output."""
        return self.root / f"{name}_script.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDirs:
    """The directories of one attempt: one execution of a workload.

    Attributes:
        plan: Plan of the attempt: every command, word for word.
        health: State of the GPUs before and after.
        checkpoints: Checkpoints that the training saves; later phases of the attempt load them.
        data_cache: Cache of datasets, unless the recipe names another place.
        no_checkpoint: A directory that stays empty, for a run that has nothing to load.
        frozen_checkpoint: Shows one iteration of a frozen checkpoint, which is never written.
        metrics: The metrics of all windows of a release in one.
        home: HOME of a recipe's script.
        assets: `{assets_dir}` of a recipe's script.
        artifacts: `{artifacts_dir}` of a recipe's script.
    """

    root: Path
    plan = _Below(PLAN_FILE)
    health = _Below(HEALTH_FILE)
    checkpoints = _Below("checkpoints")
    data_cache = _Below("data_cache")
    no_checkpoint = _Below("no_checkpoint")
    frozen_checkpoint = _Below("frozen_checkpoint")
    metrics = _Below("metrics.json")
    home = _Below("home")
    assets = _Below("assets")
    artifacts = _Below("artifacts")

    def phase(self, number: int) -> PhaseDirs:
        """Return the directories of a phase, counted from 1."""
        return PhaseDirs(root=self.root / f"phase_{number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemDirs:
    """The directory of one workload in one run.

    Attributes:
        comparison: The comparison of every repeat with the golden.
        by_hand: What a run of the row's command by hand measured, where `record` ran it first.
        golden: A copy of the golden as it was when the workload started.
        triage: Diagnoses of the attempts that failed; not there if none did.
        curves: The page that shows all curves.
    """

    root: Path
    comparison = _Below(COMPARISON_FILE)
    by_hand = _Below("by_hand.json")
    golden = _Below("golden.json")
    triage = _Below(TRIAGE_FILE)
    curves = _Below("curves.html")

    def attempt(self, *, repeat: int, attempt: int) -> AttemptDirs:
        """Return the directories of an attempt; both numbers count from 1."""
        return AttemptDirs(root=self.root / f"repeat_{repeat}" / f"attempt_{attempt}")


def item_dirs(run_dir: Path, node_id: str) -> ItemDirs:
    """Return the directory of an item: readable, good for every file system, its own.

    A digest of the node id keeps names apart that are alike without brackets and slashes.
    """
    plain = node_id.removeprefix("recipes/").replace(".yaml::", "-")
    readable = re.sub(r"[^A-Za-z0-9._+=]+", "-", plain).strip("-")[:_NAME_LENGTH]
    digest = hashlib.sha256(node_id.encode()).hexdigest()[:6]
    return ItemDirs(root=run_dir / f"{readable}-{digest}")


OWN_DIR = Path(".pytest_megatron")
RUNS_DIR = OWN_DIR / "runs"


def make_own_dir(root: Path) -> None:
    """Make our directory in a project, ignored by git: a run must not make the tree dirty.

    Raises:
        OSError: It cannot be made.
    """
    directory = (root / OWN_DIR).resolve()  # maybe a link to scratch, where it is not there yet
    directory.mkdir(parents=True, exist_ok=True)
    _ignore(directory)


def make_results_dir(directory: Path) -> None:
    """Make a directory for results that the user named; in a git tree, git ignores a new one.

    Raises:
        OSError: It cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    is_in_tree = any((parent / ".git").exists() for parent in directory.absolute().parents)
    if is_in_tree and not any(directory.iterdir()):
        _ignore(directory)


def _ignore(directory: Path) -> None:
    if not (directory / ".gitignore").exists():
        write_text_atomically(directory / ".gitignore", "*\n")


def seed_of_examples(run_id: str) -> int:
    """Return the default seed of hypothesis for all ranks of a run."""
    return zlib.crc32(run_id.encode())
