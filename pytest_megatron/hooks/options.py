"""The options of the plugin: one table, whose rows are the fields of `Options`.

From a row come the option of pytest, its ini option, its typed value, and its line in
`docs/reference/options.md`. Runs at every pytest start, so it imports nothing but pytest.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, overload

import pytest

from pytest_megatron.hooks import option_values as kinds
from pytest_megatron.hooks.option_values import (
    COUNT,
    FLAG,
    INDEX,
    SECONDS,
    WORDS,
    ValueKind,
    dest,
    one_of,
)

if TYPE_CHECKING:
    from pytest_megatron.ci.decide import Decision
    from pytest_megatron.gang.slurm_step import SlurmStep

GoldenMode = Literal["check", "record", "refresh", "off"]
Device = Literal["auto", "cuda", "cpu"]
GangStart = Literal["fork", "fresh"]
Experimental = Literal["exclude", "include", "only"]
T = TypeVar("T")
MIN_REFRESH_REPEATS = 2
LOCAL = "local"
WORKLOADS_PLUGIN = "megatron-workloads"  # the name of the role that runs them
COLLECTING_PLUGIN = "megatron-collecting"  # the same, in a rank that collects for itself
# In what a worker of pytest-xdist sends back: lines on what other plugins lack on gangs.
LIMITS_OF_OTHERS = "megatron_limits_of_others"
SELECTION = ("scope", "cadence", "environment", "platform", "model", "test-case", "tag")
_ALSO_ABOUT_UNITS = ("environment", "platform", "tag", "labels", "ci-event")
_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_LAST_PORT = 65_535
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class OptionRow(Generic[T]):
    """One option.

    Attributes:
        name: Without the dashes in front.
        kind: How its value is parsed.
        help: Its meaning, in Markdown, for `--help` and the reference.
        default: Its value where none is given.
        shown: The default in the reference, where the value itself does not explain it.
        more: Continues the meaning in the reference.
    """

    name: str
    kind: ValueKind[T]
    help: str
    default: T | None
    shown: str
    more: str

    @property
    def help_line(self) -> str:
        """The text for `--help`."""
        is_plain = self.shown_default in ("false", "no filter", "none")
        text = self.help if is_plain else f"{self.help} (default: {self.shown_default})"
        return _LINK.sub(r"\1", text).replace("`", "")

    @property
    def shown_default(self) -> str:
        """The default as the reference shows it."""
        return self.shown or (
            f"{self.default:g}" if isinstance(self.default, float) else str(self.default).lower()
        )

    def typed(self, config: pytest.Config) -> object:
        """Return the value on the command line, else None."""
        value: object = config.getoption(dest(self.name))
        return None if value is False else value

    def given(self, config: pytest.Config) -> object:
        """Return the value on the command line, else the one in the ini file, else None."""
        value = self.typed(config)
        return config.getini(dest(self.name)) if value is None else value

    def read(self, config: pytest.Config) -> T | None:
        """Return the parsed value."""
        value = self.given(config)
        return self.default if value is None else self.kind.parse(self.name, value)


@overload
def option(name: str, kind: ValueKind[T], text: str, *, shown: str, more: str = "") -> T | None: ...
@overload
def option(
    name: str, kind: ValueKind[T], text: str, *, default: T, shown: str = "", more: str = ""
) -> T: ...
def option(
    name: str,
    kind: ValueKind[T],
    text: str,
    *,
    default: T | None = None,
    shown: str = "",
    more: str = "",
) -> T | None:
    """Declare a field of `Options` that is an option."""
    row = OptionRow(name, kind, text, default, shown, more)
    declared: T | None = field(metadata={"row": row})
    return declared


def _filter(name: str, text: str, shown: str = "no filter") -> tuple[str, ...]:
    return option(name, WORDS, text, default=(), shown=shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for.

    Attributes:
        typed: Names of the options on the command line.
        given: The same, with those that the ini file sets.
        decision: What labels and an event mean; None where neither is given.
        rdzv_step: Name of the step of Slurm that has the endpoint, or "".
    """

    scope: tuple[str, ...] = _filter(
        "scope", "only workloads of this cost tier (`L0`, `L1`, `nightly`, `mr`, ...)"
    )
    cadence: tuple[str, ...] = _filter(
        "cadence", "only workloads of this trigger (`pr`, `nightly`, `mergegroup`, `weekly`)"
    )
    environment: tuple[str, ...] = _filter(
        "environment", "only workloads of this software stack (`dev`, `lts`)"
    )
    platform: tuple[str, ...] = _filter(
        "platform",
        "only workloads of this hardware (`cpu`, `dgx_h100`, ...)",
        "no filter; rows for hardware that is not here are skipped",
    )
    model: tuple[str, ...] = _filter(
        "model", "only workloads of this model family, the folder above a test case"
    )
    test_case: tuple[str, ...] = _filter("test-case", "only workloads of this test case")
    tag: tuple[str, ...] = _filter("tag", "only rows with this tag")
    labels: str = option(
        "labels",
        kinds.text("LIST"),
        "CI labels of a pull request, with commas or as a JSON array",
        default="",
        shown="none",
        more=": [scope, cadence, repeats, lightweight, environment](#labels-and-event)",
    )
    ci_event: str = option(
        "ci-event",
        kinds.text("NAME"),
        "what CI runs for: `merge_group`, `schedule`, ...",
        default="pull_request",
        shown="`pull_request`, with `--labels`",
    )
    bucket: tuple[str, ...] = option(
        "bucket",
        WORDS,
        "python tests of these files or `dir/**/*.py`, without those of `!pattern`",
        default=(),
        shown="all files",
        more=": [python tests by marks and files](#python-tests-by-marks-and-files)",
    )
    experimental: Experimental = option(
        "experimental-tests",
        one_of("exclude", "include", "only"),
        "tests with the mark `experimental`, where python tests are selected",
        default="exclude",
    )
    run_dir: Path | None = option(
        "run-dir",
        kinds.path("DIR"),
        "where logs and results go",
        shown="`.pytest_megatron/runs/<time>-<id>` below the project's root",
        more="; links and `..` in it are followed once, at the start; refused if it holds an "
        "earlier run, or another session runs in it",
    )
    num_repeats: int | None = option(
        "n-repeat",
        COUNT,
        "how often each workload is trained",
        shown="what the recipe says, else 1",
    )
    max_attempts: int | None = option(
        "max-attempts",
        COUNT,
        "how often at most a repeat is started, if it fails for a "
        "[transient cause](verdicts.md#retries)",
        shown="what the row says, else `3`",
    )
    max_retries: int = option(
        "max-retries-per-run",
        INDEX,
        "how many further attempts all items of a run, workloads and distributed tests, may have "
        "together; 0 is none",
        default=10,
    )
    retry_backoff_s: float = option(
        "retry-backoff",
        SECONDS,
        "pause before a second attempt, doubled for each further one",
        default=5.0,
        more=" up to 120 s, a quarter more or less by chance",
    )
    is_flaky_failure: bool = option(
        "fail-flaky",
        FLAG,
        "exit code 1 if an item passed only when it was run again",
        default=False,
        more="; pytest-rerunfailures' `--fail-on-flaky` does the same",
    )
    history: str = option(
        "history",
        kinds.text("FILE|off"),
        "the [file of past outcomes](run-directory.md#historyjsonl), or `off`",
        default="",
        shown="`.pytest_megatron/history.jsonl` below the project's root",
    )
    num_kept_runs: int | None = option(
        "keep-runs",
        COUNT,
        "when this run ends, all but the latest N runs below `.pytest_megatron/runs` are "
        "[removed](commands.md#runs-prune)",
        shown="all",
        more=", this one included in N; no run that has not ended, and none of a `--run-dir`",
    )
    is_lightweight: bool = option(
        "lightweight", FLAG, "4 iterations, one repeat, not compared with a golden", default=False
    )
    executor: str = option(
        "executor",
        kinds.text("NAME"),
        "where workloads run: `local`, `docker`, `slurm` or an engine that another package brings",
        default=LOCAL,
    )
    executor_config: Path | None = option(
        "executor-config",
        kinds.path("FILE"),
        "[settings](executor-config.md) of the executor",
        shown="none",
    )
    queue_timeout_s: float = option(
        "queue-timeout",
        SECONDS,
        "how long a workload may wait in the queue of `--executor` for each of its attempts; then "
        "it is [cancelled](#--executor)",
        default=0.0,
        shown="`0`: no limit",
    )
    attach: Path | None = option(
        "attach",
        kinds.path("RUN"),
        "take over the run in this run directory, whose pytest is gone, "
        "[with its options](#--attach)",
        shown="none; the ini option is not read",
        more="; typed as `--attach=RUN`",
    )
    golden: GoldenMode = option(
        "golden",
        one_of("check", "record", "refresh", "off", problem="is not a way to use goldens"),
        "[what to do with goldens](#--golden): `check` compares, `record` writes missing ones, "
        "`refresh` replaces them after a clean run, `off` does neither",
        default="check",
    )
    golden_policy: str = option(
        "golden-policy",
        kinds.text("POLICY"),
        "how to compare: [`strict`](goldens.md#strict), [`megatron`](goldens.md#megatron) or a "
        "[file](goldens.md#policy-files)",
        default="strict",
    )
    golden_reason: str | None = option(
        "golden-reason",
        kinds.REASON,
        "why goldens [change](../how-to/refresh-goldens.md#what-needs-a-reason); the goldens then "
        "record it",
        shown="none",
    )
    is_plan: bool = option(
        "plan",
        FLAG,
        "print what would run and run nothing",
        default=False,
        more=": each workload, and which gangs would run how many tests",
    )
    tee_ranks: tuple[int, ...] | None = option(
        "tee-ranks",
        kinds.RANKS,
        "ranks whose output is copied live to the terminal: numbers with commas, `all` or `none`",
        default=(0, 3),
        shown="`0,3`",
        more="; of distributed tests [with `-s`, or if typed](#output-of-ranks)",
    )
    num_gpus: int | None = option(
        "gpus",
        kinds.GPUS,
        "run python tests on a gang of N ranks, one for each CUDA device, with NCCL",
        shown="python tests run in pytest's own process",
    )
    num_ranks: int | None = option(
        "ranks", COUNT, "run python tests on a gang of N ranks, on any device", shown="as above"
    )
    ranks_per_gpu: int = option(
        "ranks-per-gpu",
        COUNT,
        "how many ranks of a gang [share a GPU](#gpus), on a host with fewer GPUs than ranks",
        default=1,
        more="; NCCL uses sockets then",
    )
    device: Device = option(
        "device",
        one_of("auto", "cuda", "cpu"),
        "device of the ranks; cpu means gloo",
        default="auto",
        shown="`auto`: cuda if there are as many GPUs as ranks, else cpu",
        more=". The header shows the choice",
    )
    num_nodes: int = option(
        "nnodes",
        COUNT,
        "nodes that a gang spans, each with `--gpus` or `--ranks` ranks",
        default=1,
        shown="`1`, or Slurm's",
    )
    node_rank: int = option(
        "node-rank",
        INDEX,
        "index of this node; node 0 runs the session",
        default=0,
        shown="`0`, or Slurm's",
    )
    rdzv_endpoint: str = option(
        "rdzv-endpoint",
        kinds.text("HOST:PORT"),
        "address of node 0, where the others connect",
        default="",
        shown="Slurm's",
    )
    rank_timeout_s: float = option(
        "rank-timeout",
        SECONDS,
        "limit for one phase (setup, call, teardown) of a distributed test; 0 is none",
        default=300.0,
        more="; a `timeout` mark wins, and this wins over what is set for pytest-timeout",
    )
    rank_grace_s: float = option(
        "rank-grace",
        SECONDS,
        "after a rank failed, skipped or died, how long the others may take",
        default=10.0,
    )
    signatures: tuple[Path, ...] = option(
        "signatures",
        kinds.FILES,
        "TOML file with [signatures of your own](triage.md#signatures-of-your-own)",
        default=(),
        shown="those of `signatures` in `[tool.pytest-megatron]`",
        more=", repeatable or with commas",
    )
    num_transient_reruns: int = option(
        "rerun-transient",
        INDEX,
        "how often at most a distributed test that failed for a [transient cause](#reruns) runs "
        "again",
        default=0,
    )
    pdb_rank: int | None = option(
        "pdb-rank",
        INDEX,
        "with `--pdb`, the rank to [debug](#debugging-a-rank)",
        shown="the first rank that fails; rank 0 at breakpoints",
    )
    gang_start: GangStart = option(
        "gang-start",
        one_of("fork", "fresh"),
        "fork ranks from what pytest has loaded, or start fresh interpreters",
        default="fork",
    )
    is_empty_allowed: bool = option(
        "allow-empty", FLAG, "a selection that matches no workload is no error", default=False
    )
    is_dirty_allowed: bool = option(
        "allow-dirty",
        FLAG,
        "write goldens from a tree that is not committed; the golden records it",
        default=False,
    )
    typed: frozenset[str]
    given: frozenset[str]
    decision: Decision | None = None
    rdzv_step: str = ""

    @property
    def selection(self) -> dict[str, tuple[str, ...]]:
        """Option name without dashes in front -> words given; empty means no filter."""
        return {name: getattr(self, name.replace("-", "_")) for name in SELECTION}

    @property
    def is_attached(self) -> bool:
        """Whether the run directory is that of a run whose controller is gone."""
        return "attach" in self.typed

    @property
    def asks_for_workloads(self) -> bool:
        """Whether an option was typed that makes sense for workloads only.

        The defaults of an ini file must not make a plain pytest train.
        """
        if "golden" in self.typed and self.is_writing_goldens:
            return True
        # With a bucket, the words choose among python tests.
        return "bucket" not in self.typed and not self.typed.isdisjoint(
            (*SELECTION, "plan", "labels", "ci-event")
        )

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


# In the order of the fields, which is that of `--help` and of the reference.
OPTION_ROWS: dict[str, OptionRow[object]] = {
    f.name: f.metadata["row"] for f in fields(Options) if f.metadata
}


def add_options(parser: pytest.Parser) -> None:
    """Declare every option, each also as the ini option `megatron_<name>`."""
    group = parser.getgroup("megatron", "training workloads and distributed tests")
    for row in OPTION_ROWS.values():
        settings = {"metavar": row.kind.metavar} if row.kind.metavar else {"action": "store_true"}
        settings |= {"action": "append"} if row.kind.is_repeatable else {}
        name = dest(row.name)
        group.addoption(f"--{row.name}", dest=name, default=None, help=row.help_line, **settings)
        parser.addini(name, help=f"default of --{row.name}", default=None)


def read_options(config: pytest.Config) -> Options:
    """Read the options of a session.

    Raises:
        pytest.UsageError: A value is not one that the option takes.
    """
    rows = OPTION_ROWS.items()
    values = {f.name: f.metadata["row"].read(config) for f in fields(Options) if f.metadata}
    options = Options(
        **values,
        typed=frozenset(row.name for _, row in rows if row.typed(config) is not None),
        given=frozenset(row.name for _, row in rows if row.given(config) is not None),
    )
    if options.is_attached:
        options = replace(options, run_dir=options.attach)
    if getattr(config.option, "fail_on_flaky", None):  # the same, of pytest-rerunfailures
        options = replace(options, is_flaky_failure=True)
    options = _with_nodes(options)
    if not options.given.isdisjoint(("labels", "ci-event")):
        options = _with_labels(config, options)
    _refuse_contradictions(options)
    return options


def _with_labels(config: pytest.Config, options: Options) -> Options:
    """Return options with the decision for labels and event; what the user typed wins."""
    from pytest_megatron.hooks.labels import decision_of  # noqa: PLC0415 - not for all

    decision = decision_of(config, options)
    return replace(
        options,
        decision=decision,
        scope=options.scope or decision.scope,
        cadence=options.cadence or decision.cadence,
        environment=options.environment or (decision.environment,),
        is_lightweight=options.is_lightweight or decision.is_lightweight,
    )


def may_ask_for_units(config: pytest.Config) -> bool:
    """Return true if an option is given that leaves out python tests by file or by mark.

    Words that also choose among workloads have to be typed: their default in an ini file must not
    leave out tests of a plain pytest.
    """
    rows = {row.name: row for row in OPTION_ROWS.values()}
    is_theirs = any(rows[n].given(config) is not None for n in ("bucket", "experimental-tests"))
    return is_theirs or any(rows[name].typed(config) is not None for name in _ALSO_ABOUT_UNITS)


def _with_nodes(options: Options) -> Options:
    """Return options with the nodes of Slurm's step where they are not given.

    Raises:
        pytest.UsageError: Options for several nodes are incomplete.
    """
    has_count = "nnodes" in options.given
    has_node_rank = "node-rank" in options.given
    if options.asks_for_gangs and not (has_count and options.num_nodes == 1):
        step = _slurm_step()
        if step is not None and (not has_count or options.num_nodes == step.num_nodes):
            from pytest_megatron.gang.slurm_step import slurm_address  # noqa: PLC0415 - not for all

            node_rank = options.node_rank if has_node_rank else step.node_rank
            has_node_rank = True
            options = replace(options, num_nodes=step.num_nodes, node_rank=node_rank)
            if not options.rdzv_endpoint:
                endpoint = f"{slurm_address(step.host)}:{step.port}"
                options = replace(options, rdzv_endpoint=endpoint, rdzv_step=step.name)
    if options.num_nodes == 1:
        return options
    if not options.asks_for_gangs:
        raise pytest.UsageError(
            f"--nnodes: {options.num_nodes} nodes run tests on gangs; give --ranks or --gpus, "
            f"the ranks of each node"
        )
    if not has_node_rank:
        raise pytest.UsageError(
            f"--node-rank: not given with --nnodes {options.num_nodes}, "
            f"expected the index of this node, 0 to {options.num_nodes - 1}"
        )
    host, _, port = options.rdzv_endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
        raise pytest.UsageError(
            f"--rdzv-endpoint: {options.rdzv_endpoint!r} is no address, expected HOST:PORT of "
            f"node 0, the same on every node"
        )
    return options


def _slurm_step() -> SlurmStep | None:
    """Return the step of Slurm on several nodes that this process is a task of.

    Raises:
        pytest.UsageError: The step has not one task on each node.
    """
    if not any(name in os.environ for name in _SLURM_STEP):
        return None
    from pytest_megatron.errors import LaunchError  # noqa: PLC0415 - not at every start
    from pytest_megatron.gang.slurm_step import find_slurm_step  # noqa: PLC0415 - see above

    try:
        return find_slurm_step(os.environ)
    except LaunchError as error:
        raise pytest.UsageError(str(error)) from None


def early_words(early_config: pytest.Config, name: str) -> tuple[str, ...]:
    """Return the words of an option before conftest files are loaded.

    Words that are wrong are passed on: `read_options` says so.
    """
    key = dest(name)
    lists = vars(early_config.known_args_namespace).get(key) or early_config.getini(key) or ()
    lines = [lists] if isinstance(lists, str) else lists
    return tuple(word.strip() for line in lines for word in line.split(",") if word.strip())


def early_size(early_config: pytest.Config) -> tuple[int, int] | None:
    """Return ranks of a node and nodes, before conftest files are loaded; None without gangs.

    A value that is wrong is none here: `read_options` says so.
    """
    given = vars(early_config.known_args_namespace)
    texts = {
        name: given.get(dest(name)) or early_config.getini(dest(name))
        for name in ("ranks", "gpus", "nnodes", "ranks-per-gpu")
    }
    num_ranks = texts["ranks"] or texts["gpus"]
    if num_ranks and not texts["nnodes"]:
        with contextlib.suppress(pytest.UsageError):
            step = _slurm_step()
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
