"""The options of the plugin: declared here, read here, nowhere else.

Runs at every pytest start, so it imports nothing but pytest.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import pytest

from pytest_megatron.hooks import option_values as values

if TYPE_CHECKING:
    from pytest_megatron.ci.decide import Decision

GoldenMode = Literal["check", "record", "refresh", "off"]
Device = Literal["auto", "cuda", "cpu"]
GangStart = Literal["fork", "fresh"]
Experimental = Literal["exclude", "include", "only"]
MIN_REFRESH_REPEATS = 2
LOCAL = "local"
WORKLOADS_PLUGIN = "megatron-workloads"  # the name of the role that runs them
COLLECTING_PLUGIN = "megatron-collecting"  # the same, in a rank that collects for itself
_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_LAST_PORT = 65_535

_LISTS = {
    "scope": "cost tier (L0, L1, nightly, mr, ...)",
    "cadence": "trigger (pr, nightly, mergegroup, weekly)",
    "environment": "software stack (dev, lts)",
    "platform": "hardware (cpu, dgx_h100, ...); by default what this host can run",
    "model": "model family, the folder above a test case",
    "test-case": "test case",
    "tag": "tag of a row",
}
_ALSO_ABOUT_UNITS = ("environment", "platform", "tag", "labels", "ci-event")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for.

    Attributes:
        selection: Option name without dashes in front -> words given; empty means no filter.
        run_dir: Where logs and results go; None picks a new directory.
        num_repeats: How often each workload runs; None leaves it to the recipe.
        max_attempts: How often at most a repeat is started; None leaves it to the recipe.
        max_retries: How many further attempts the items of a run may have together.
        retry_backoff_s: Pause before the second attempt of a repeat.
        is_flaky_failure: Whether a flaky item makes the session fail.
        history: The file of past outcomes, `off`, or "" for the project's own.
        tee_ranks: Ranks copied to the terminal; None is all of them.
        is_tee_typed: Whether the command line says so, for python tests whose output is captured.
        num_kept_runs: How many runs stay in our own directory; None is all.
        executor: Name of the engine that runs workloads.
        executor_config: Its settings, below the directory of the user; or None.
        queue_timeout_s: How long a workload may wait in a queue; 0 is without limit.
        is_attached: Whether the run directory is that of a run whose controller is gone.
        golden_reason: Why goldens change, or None.
        num_gpus: Ranks of a gang, one for each CUDA device; 0 is all of them; None if not asked.
        num_ranks: Ranks of a gang on a node, on any device; None if not asked.
        ranks_per_gpu: Ranks of a gang that share a CUDA device at the most.
        device: `auto`, `cuda` or `cpu`.
        rdzv_endpoint: `HOST:PORT` of node 0, or "".
        rdzv_step: Name of the step of Slurm that has the endpoint, or "".
        rank_timeout_s: Limit for one phase of a distributed test; 0 is none.
        is_rank_timeout_given: Whether the user set it, so that pytest-timeout's does not count.
        rank_grace_s: How long ranks may take after the first one failed.
        signatures: Files with signatures of the user's own.
        num_transient_reruns: How often a distributed test is rerun after a transient failure.
        pdb_rank: The rank whose failures open the debugger; None is the first that fails.
        gang_start: `fork` or `fresh`.
        decision: What labels and an event mean; None where neither is given.
        bucket: Patterns of test files, `!` takes away; empty is all files.
        experimental: What becomes of tests with the mark `experimental`.
        asks_for_workloads: Whether an option was typed that makes sense for workloads only; the
            defaults of an ini file must not make a plain pytest train.
    """

    selection: dict[str, tuple[str, ...]]
    run_dir: Path | None
    num_repeats: int | None
    max_attempts: int | None
    max_retries: int
    retry_backoff_s: float
    is_flaky_failure: bool
    history: str
    num_kept_runs: int | None
    is_lightweight: bool
    executor: str
    executor_config: Path | None
    queue_timeout_s: float
    is_attached: bool
    golden: GoldenMode
    golden_policy: str
    golden_reason: str | None
    is_plan: bool
    tee_ranks: tuple[int, ...] | None
    is_tee_typed: bool
    is_empty_allowed: bool
    is_dirty_allowed: bool
    num_gpus: int | None
    num_ranks: int | None
    ranks_per_gpu: int
    device: Device
    num_nodes: int
    node_rank: int
    rdzv_endpoint: str
    rdzv_step: str
    rank_timeout_s: float
    is_rank_timeout_given: bool
    rank_grace_s: float
    signatures: tuple[Path, ...]
    num_transient_reruns: int
    pdb_rank: int | None
    gang_start: GangStart
    decision: Decision | None
    bucket: tuple[str, ...]
    experimental: Experimental
    asks_for_workloads: bool

    @property
    def is_writing_goldens(self) -> bool:
        """Whether the session may write goldens at all."""
        return self.golden in ("record", "refresh")

    @property
    def asks_for_gangs(self) -> bool:
        """Whether every python test runs on a gang."""
        return self.num_gpus is not None or self.num_ranks is not None

    @property
    def has_selection(self) -> bool:
        """Whether any workload was selected by an option."""
        return any(self.selection.values())


# In what a worker of pytest-xdist sends back: lines on what other plugins lack on gangs.
LIMITS_OF_OTHERS = "megatron_limits_of_others"


def add_options(parser: pytest.Parser) -> None:
    """Declare every option, each also as the ini option `megatron_<name>`."""
    group = parser.getgroup("megatron", "training workloads and distributed tests")

    def add(name: str, help_text: str, **settings: object) -> None:
        dest = values.dest(name)
        group.addoption(f"--{name}", dest=dest, default=None, help=help_text, **settings)
        parser.addini(dest, help=f"default of --{name}", default=None)

    several = {"action": "append", "metavar": "LIST"}
    for name, meaning in _LISTS.items():
        add(name, f"only workloads of this {meaning}", **several)
    add("run-dir", "where logs and results go", metavar="DIR")
    add("labels", "CI labels of a pull request; give scope, repeats and more", metavar="LIST")
    add("ci-event", "what CI runs for: pull_request (default), merge_group, ...", metavar="NAME")
    add("bucket", "python tests of these files or dir/**/*.py, without those of !...", **several)
    add(
        "experimental-tests",
        "tests marked experimental, where python tests are selected: exclude (default)",
        metavar="exclude|include|only",
    )
    add("n-repeat", "how often each workload runs", metavar="N")
    add("max-attempts", "how often at most after a transient failure (3)", metavar="N")
    add("max-retries-per-run", "further attempts of all items of a run (10)", metavar="N")
    add("retry-backoff", "pause before a second attempt, then doubled (5)", metavar="S")
    add("fail-flaky", "fail if an item passed only when run again", action="store_true")
    add("history", "file of past outcomes, or off", metavar="FILE|off")
    add("keep-runs", "remove all but the latest N runs when this one ends", metavar="N")
    add("lightweight", "4 iterations, not compared with a golden", action="store_true")
    add(
        "golden",
        "check (default): compare; record: write missing ones; refresh: replace after a clean run; "
        "off: do not compare",
        metavar="check|record|refresh|off",
    )
    add("executor", "where workloads run: local (default), docker, slurm", metavar="NAME")
    add("executor-config", "settings of the executor", metavar="FILE")
    add("queue-timeout", "how long a workload may wait in a queue, 0 is no limit (0)", metavar="S")
    add("attach", "take over a run whose pytest is gone, with what it was told", metavar="RUN")
    add("golden-policy", "how to compare: strict (default), megatron or a file", metavar="POLICY")
    add("golden-reason", "why goldens change, which they then say", metavar="TEXT")
    add("plan", "print what would run and run nothing", action="store_true")
    add("tee-ranks", "ranks copied live to the terminal (0,3; all; none)", metavar="LIST")
    add("allow-empty", "a selection that matches nothing is no error", action="store_true")
    add("gpus", "run python tests on N ranks, one for each CUDA device", metavar="N|all")
    add("ranks", "run python tests on N ranks, on any device", metavar="N")
    add("ranks-per-gpu", "ranks that share a GPU where there are too few (1)", metavar="N")
    add("device", "device of ranks: auto (default), cuda or cpu", metavar="auto|cuda|cpu")
    add("nnodes", "nodes that a gang spans, each with --ranks or --gpus ranks (1)", metavar="N")
    add("node-rank", "index of this node, 0 runs the session", metavar="N")
    add("rdzv-endpoint", "address of node 0, where the others call", metavar="HOST:PORT")
    add("rank-timeout", "limit for one phase of a distributed test, 0 is none (300)", metavar="S")
    add("rank-grace", "how long ranks may take after the first failed (10)", metavar="S")
    add("signatures", "TOML file with signatures of your own", action="append", metavar="FILE")
    add("rerun-transient", "reruns of a test that failed for a transient cause (0)", metavar="N")
    add("pdb-rank", "with --pdb, the rank to debug; by default the first to fail", metavar="RANK")
    add("gang-start", "fork ranks (default), or fresh interpreters", metavar="fork|fresh")
    add("allow-dirty", "write goldens from an uncommitted tree", action="store_true")


def read_options(config: pytest.Config) -> Options:
    """Read the options of a session.

    Raises:
        pytest.UsageError: A value is not one that the option takes.
    """
    golden = values.text(config, "golden", "check")
    if golden not in ("check", "record", "refresh", "off"):
        raise pytest.UsageError(
            f"--golden: {golden!r} is not a way to use goldens, "
            f"expected one of check, off, record, refresh"
        )
    attached = str(values.typed(config, "attach") or "")
    run_dir = attached or values.text(config, "run-dir", "")
    executor_config = values.text(config, "executor-config", "")
    num_nodes, node_rank, rdzv_endpoint, rdzv_step = _nodes(config)
    max_retries = values.index(config, "max-retries-per-run")
    options = Options(
        selection={name: values.words(config, name) for name in _LISTS},
        run_dir=Path(run_dir) if run_dir else None,
        num_repeats=values.count(config, "n-repeat"),
        max_attempts=values.count(config, "max-attempts"),
        max_retries=10 if max_retries is None else max_retries,
        retry_backoff_s=values.seconds(config, "retry-backoff", 5.0),
        # pytest-rerunfailures has the other name, and means the same.
        is_flaky_failure=values.flag(config, "fail-flaky")
        or bool(getattr(config.option, "fail_on_flaky", None)),
        history=values.text(config, "history", ""),
        num_kept_runs=values.count(config, "keep-runs"),
        is_lightweight=values.flag(config, "lightweight"),
        executor=values.text(config, "executor", LOCAL),
        executor_config=Path(executor_config) if executor_config else None,
        queue_timeout_s=values.seconds(config, "queue-timeout", 0.0),
        is_attached=bool(attached),
        golden=cast("GoldenMode", golden),
        golden_policy=values.text(config, "golden-policy", "strict"),
        golden_reason=values.text(config, "golden-reason", "").strip() or None,
        is_plan=values.flag(config, "plan"),
        tee_ranks=values.ranks(values.text(config, "tee-ranks", "0,3")),
        is_tee_typed=values.typed(config, "tee-ranks") is not None,
        is_empty_allowed=values.flag(config, "allow-empty"),
        is_dirty_allowed=values.flag(config, "allow-dirty"),
        num_gpus=values.gpus(config),
        num_ranks=values.count(config, "ranks"),
        ranks_per_gpu=values.count(config, "ranks-per-gpu") or 1,
        device=cast("Device", values.choice(config, "device", ("auto", "cpu", "cuda"))),
        num_nodes=num_nodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_step=rdzv_step,
        rank_timeout_s=values.seconds(config, "rank-timeout", 300.0),
        is_rank_timeout_given=values.given(config, "rank-timeout") is not None,
        rank_grace_s=values.seconds(config, "rank-grace", 10.0),
        signatures=tuple(Path(name) for name in values.words(config, "signatures")),
        num_transient_reruns=values.index(config, "rerun-transient") or 0,
        pdb_rank=values.index(config, "pdb-rank"),
        gang_start=cast("GangStart", values.choice(config, "gang-start", ("fork", "fresh"))),
        decision=None,
        bucket=values.words(config, "bucket"),
        experimental=cast("Experimental", _experimental(config)),
        asks_for_workloads=_asks_for_workloads(config),
    )
    if any(values.given(config, name) is not None for name in ("labels", "ci-event")):
        options = _with_labels(config, options)
    _refuse_contradictions(options)
    return options


def _with_labels(config: pytest.Config, options: Options) -> Options:
    """Return options with the decision for labels and event; what the user typed wins."""
    from pytest_megatron.hooks.labels import decision_of  # noqa: PLC0415 - not for all

    decision = decision_of(config, options.selection)
    decided = {
        "scope": decision.scope,
        "cadence": decision.cadence,
        "environment": (decision.environment,),
    }
    selection = {name: words or decided.get(name, ()) for name, words in options.selection.items()}
    return replace(
        options,
        decision=decision,
        selection=selection,
        is_lightweight=options.is_lightweight or decision.is_lightweight,
    )


def may_ask_for_units(config: pytest.Config) -> bool:
    """Whether an option is given that leaves out python tests by file or by mark.

    Words that also choose among workloads have to be typed: their default in an ini file must not
    leave out tests of a plain pytest.
    """
    is_theirs = any(values.given(config, n) is not None for n in ("bucket", "experimental-tests"))
    return is_theirs or any(values.typed(config, name) is not None for name in _ALSO_ABOUT_UNITS)


def _asks_for_workloads(config: pytest.Config) -> bool:
    """Whether the command line says something that makes sense for workloads only."""
    if values.typed(config, "golden") in ("record", "refresh"):
        return True
    # With a bucket, the words choose among python tests.
    is_about_units = values.typed(config, "bucket") is not None
    typed = [values.typed(config, n) for n in (*_LISTS, "plan", "labels", "ci-event")]
    return not is_about_units and any(word not in (None, False) for word in typed)


def _experimental(config: pytest.Config) -> str:
    return values.choice(config, "experimental-tests", ("exclude", "include", "only"))


def _nodes(config: pytest.Config) -> tuple[int, int, str, str]:
    """Return how many nodes there are, which one this is, the address of node 0, and the step.

    Where they are not given, the step of Slurm says so that distributed tests run in.
    """
    given = values.count(config, "nnodes")
    node_rank = values.index(config, "node-rank")
    endpoint = values.text(config, "rdzv-endpoint", "")
    asks_for_gangs = any(values.given(config, name) is not None for name in ("gpus", "ranks"))
    num_nodes, name = given or 1, ""
    if asks_for_gangs and given != 1 and any(name in os.environ for name in _SLURM_STEP):
        from pytest_megatron.errors import LaunchError  # noqa: PLC0415 - not at every start
        from pytest_megatron.gang.slurm_step import (  # noqa: PLC0415 - see above
            find_slurm_step,
            slurm_address,
        )

        try:
            step = find_slurm_step(os.environ)
        except LaunchError as error:
            raise pytest.UsageError(str(error)) from None
        if step is not None and given in (None, step.num_nodes):
            num_nodes = step.num_nodes
            node_rank = step.node_rank if node_rank is None else node_rank
            if not endpoint:
                endpoint, name = f"{slurm_address(step.host)}:{step.port}", step.name
    if num_nodes == 1:
        return 1, node_rank or 0, endpoint, ""
    if not asks_for_gangs:
        raise pytest.UsageError(
            f"--nnodes: {num_nodes} nodes run tests on gangs; give --ranks or --gpus, the ranks "
            f"of each node"
        )
    if node_rank is None:
        raise pytest.UsageError(
            f"--node-rank: not given with --nnodes {num_nodes}, "
            f"expected the index of this node, 0 to {num_nodes - 1}"
        )
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
        raise pytest.UsageError(
            f"--rdzv-endpoint: {endpoint!r} is no address, expected HOST:PORT of node 0, "
            f"the same on every node"
        )
    return num_nodes, node_rank, endpoint, name


def early_words(early_config: pytest.Config, name: str) -> tuple[str, ...]:
    """Return the words of an option before conftest files are loaded.

    Words that are wrong are passed on: `read_options` says so.
    """
    dest = values.dest(name)
    lists = vars(early_config.known_args_namespace).get(dest) or early_config.getini(dest) or ()
    lines = [lists] if isinstance(lists, str) else lists
    return tuple(word.strip() for line in lines for word in line.split(",") if word.strip())


def early_size(early_config: pytest.Config) -> tuple[int, int] | None:
    """Return ranks of a node and nodes, before conftest files are loaded; None without gangs.

    A value that is wrong is none here: `read_options` says so.
    """
    given = vars(early_config.known_args_namespace)
    texts = {
        name: given.get(values.dest(name)) or early_config.getini(values.dest(name))
        for name in ("ranks", "gpus", "nnodes", "ranks-per-gpu")
    }
    num_ranks = texts["ranks"] or texts["gpus"]
    if num_ranks and not texts["nnodes"] and any(name in os.environ for name in _SLURM_STEP):
        from pytest_megatron.errors import LaunchError  # noqa: PLC0415 - not at every start
        from pytest_megatron.gang.slurm_step import find_slurm_step  # noqa: PLC0415 - see above

        with contextlib.suppress(LaunchError):
            step = find_slurm_step(os.environ)
            texts["nnodes"] = step.num_nodes if step else None
    if num_ranks == "all":
        from pytest_megatron.gpu.host import this_host  # noqa: PLC0415 - not for all

        per_gpu = str(texts["ranks-per-gpu"] or 1)
        num_ranks = len(this_host().gpus) * (int(per_gpu) if per_gpu.isdecimal() else 1)
    words = str(num_ranks), str(texts["nnodes"] or 1)
    if not all(word.isdecimal() and int(word) for word in words):
        return None
    return int(words[0]), int(words[1])


def _refuse_contradictions(options: Options) -> None:
    if options.num_gpus is not None and options.num_ranks is not None:
        raise pytest.UsageError("--gpus: --ranks is given as well; give one of them")
    if options.num_gpus is not None and options.device == "cpu":
        raise pytest.UsageError("--gpus: --device is cpu; use --ranks for ranks on the CPU")
    if options.ranks_per_gpu > 1 and options.num_nodes > 1:
        raise pytest.UsageError(
            f"--ranks-per-gpu: {options.ranks_per_gpu} ranks share a GPU on one node only, "
            f"--nnodes is {options.num_nodes}; drop one of them"
        )
    if options.node_rank >= options.num_nodes:
        raise pytest.UsageError(
            f"--node-rank: {options.node_rank} of {options.num_nodes} nodes, "
            f"expected 0 to {options.num_nodes - 1}; set --nnodes"
        )
    is_writing = options.is_writing_goldens
    if is_writing and options.is_lightweight:
        raise pytest.UsageError(
            f"--golden {options.golden}: a lightweight run measures nothing to keep; "
            f"drop --lightweight"
        )
    if is_writing and options.num_repeats is not None and options.num_repeats < MIN_REFRESH_REPEATS:
        raise pytest.UsageError(
            f"--golden {options.golden}: needs at least {MIN_REFRESH_REPEATS} repeats to know "
            f"their spread, --n-repeat is {options.num_repeats}; raise or drop it"
        )
