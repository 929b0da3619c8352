"""The options of the plugin: kinds of values, and a table, whose rows are the fields of `Options`.

From a row come the option of pytest, its ini option, its typed value, and the start of its line in
`docs/reference/options.md`. A wrong value is a usage error. Runs at every pytest start, so it
imports nothing heavy.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, NoReturn, TypeVar, cast

import pytest
from typing_extensions import override

from pytest_megatron.base.text import one_of as one_word_of
from pytest_megatron.errors import REMOVED, MegatronError
from pytest_megatron.features import FEATURES, ExtensionPoint
from pytest_megatron.runs.layout import BY_HAND
from pytest_megatron.session.short_names import PREFIX, ShortNames

if TYPE_CHECKING:
    from pytest_megatron.runs.record import OptionValue
    from pytest_megatron.session.decision import Decision
    from pytest_megatron.session.slurm_step import SlurmStep


T_co = TypeVar("T_co", covariant=True)
D = TypeVar("D")
ChoiceT = TypeVar("ChoiceT", bound=str)


@dataclass(frozen=True, slots=True)
class ValueKind(Generic[T_co]):
    """A kind of value; called, it declares a field that is an option of this kind.

    Attributes:
        parse: Return the value, of where it was given (`--NAME`) and the user's input.
        metavar: Placeholder in the help; "" for a flag, which takes no value.
        is_repeatable: Whether the command line may hold the option several times.
        bare: The value of an option that was typed without one; None if it needs one.
    """

    parse: Callable[[str, object], T_co]
    metavar: str = ""
    is_repeatable: bool = False
    bare: str | None = None

    def __call__(
        self,
        name: str,
        text: str,
        default: D,
        shown: str = "",
        *,
        metavar: str = "",
        feature: str = "",
    ) -> T_co | D:
        """Return the field; for the arguments see `OptionRow`."""
        row = OptionRow(name, text, self, default, shown, metavar or self.metavar, feature)
        declared: D = field(metadata={"row": row})
        return declared


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option.

    Attributes:
        name: Without the dashes in front.
        text: The meaning; the text in the reference begins with it.
        kind: How its value is parsed.
        default: Value where none is given.
        shown: The default in texts, where the value itself does not explain it.
        metavar: Placeholder of the value.
        feature: The feature that can be taken out with it; "" for those that are always there.
    """

    name: str
    text: str
    kind: ValueKind[object]
    default: object
    shown: str
    metavar: str
    feature: str

    @property
    def is_setting(self) -> bool:
        """True for one of the ini file alone, which `-o` gives on a command line."""
        return self.name in SETTINGS

    @property
    def typed_name(self) -> str:
        """The name in texts: `--NAME`, or that in the ini file if it is a setting."""
        return dest(self.name) if self.is_setting else f"--{self.name}"

    @property
    def is_there(self) -> bool:
        """False for an option of a feature that was taken out."""
        return not self.feature or self.feature in FEATURES

    @property
    def help(self) -> str:
        """The option's text for `--help`."""
        has_default = self.shown_default not in ("false", "no filter", "none")
        return f"{self.text} (default: {self.shown_default})" if has_default else self.text

    @property
    def shown_default(self) -> str:
        """The default as text."""
        if self.shown or self.default in (None, ""):
            return self.shown or "none"
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default)) or "no filter"
        is_float = isinstance(self.default, float)
        return f"{self.default:g}" if is_float else str(self.default).lower()

    def read(self, config: pytest.Config) -> object:
        """Return the parsed value of the option, or of its ini option."""
        value = given(config, self.name)
        return self.default if value is None else self.kind.parse(self.typed_name, value)

    def words(self, value: OptionValue) -> list[str]:
        """Return the words of a command line that give a recorded value.

        Raises:
            pytest.UsageError: The option does not take it.
        """
        if plain_value(self.kind.parse(self.typed_name, value)) != value:
            raise pytest.UsageError(f"{self.typed_name}: does not take {value!r}")
        if self.is_setting:
            text = ",".join(value) if isinstance(value, tuple) else str(value).removesuffix(".0")
            return ["-o", f"{dest(self.name)}={text}"]
        option = f"--{PREFIX}{self.name}"
        if not self.metavar:
            return [option] if value else []
        if self.kind in (TEXT, FILES):  # may begin with a dash
            return [f"{option}={word}" for word in (value if isinstance(value, tuple) else [value])]
        return [option, str(value).removesuffix(".0")]


def plain_value(value: object) -> OptionValue:
    """Return a parsed value as JSON has it."""
    if isinstance(value, tuple):
        return tuple(map(str, value))
    return value if isinstance(value, bool | int | float) else str(value)


def typed(config: pytest.Config, name: str) -> object:
    """Return the value of an option on the command line, else None."""
    value: object = config.getoption(dest(name), None)
    return None if value is False else value


def given(config: pytest.Config, name: str) -> object:
    """Return the value on the command line, else the one in the ini file, else None."""
    value = typed(config, name)
    return chosen_ini(config, dest(name)) if value is None else value


def dest(name: str) -> str:
    """Return the name of an option in the ini file, and in pytest's namespace."""
    return f"megatron_{name.replace('-', '_')}"


def chosen_ini(config: pytest.Config, name: str) -> object:
    """Return an ini value where the user set it, else None.

    A default is not the user's choice, and differs between releases of pytest and of the plugin
    that declares it: "", 0.0, None.
    """
    try:
        value: object = config.getini(name)
    except ValueError:  # nobody declares it
        return None
    in_file = name in _ini_file(config)
    for line in reversed(_override_lines(config)):
        key, _, text = line.partition("=")
        if key.strip() == name:
            return text if name.startswith(dest("")) else value
    return value if in_file else None


def _ini_file(config: pytest.Config) -> Iterable[str]:
    """Return the names that the ini file sets."""
    attributes = vars(config)  # the public name is deprecated from pytest 9.1 on
    names: Iterable[str] = attributes.get("_inicfg", attributes.get("inicfg", ()))
    return names


def _override_lines(config: pytest.Config) -> list[str]:
    """Return the values of `-o`."""
    spaces = (config.option, config.known_args_namespace)
    return next(filter(None, (getattr(space, "override_ini", None) for space in spaces)), [])


@contextlib.contextmanager
def usage_errors(shorten: Callable[[str], str] = str) -> Generator[None]:
    """Make usage errors of pytest of the plugin's own errors, with their texts shortened."""
    try:
        yield
    except MegatronError as error:
        raise pytest.UsageError(shorten(str(error))) from None


def is_rank(config: pytest.Config) -> bool:
    """Return true if this process is a rank of ours, which collects for itself."""
    return config.pluginmanager.has_plugin(COLLECTING_PLUGIN)


def has_own_items(config: pytest.Config) -> bool:
    """Return true if the session runs workloads, or tests on gangs."""
    return config.stash.get(HAS_GANGS, False) or config.pluginmanager.has_plugin(WORKLOADS_PLUGIN)


def has_workers(config: pytest.Config) -> bool:
    """Return true if pytest-xdist hands tests to workers; `--dist` without `-n` does not."""
    option = config.option
    return getattr(option, "dist", "no") != "no" and bool(getattr(option, "tx", None))


def _flag(where: str, value: object) -> bool:
    """Parse a value of an option that is on or off."""
    found = str(value).lower()
    if found in ("true", "1", "yes"):
        return True
    if found in ("", "false", "0", "no"):
        return False
    raise pytest.UsageError(
        f"{dest(where.removeprefix('--'))}: {found!r} is neither true nor false"
    )


def _number(where: str, value: object, least: int, problem: str) -> int:
    """Parse a whole number."""
    if not str(value).isdecimal() or int(str(value)) < least:
        raise pytest.UsageError(f"{where}: {value!r} {problem}")
    return int(str(value))


def _count(where: str, value: object, also: str = "") -> int:
    return _number(where, value, 1, f"is not a count, expected a number from 1 on{also}")


def _index(where: str, value: object) -> int:
    return _number(where, value, 0, "is not a number, expected one from 0 on")


def _seconds(where: str, value: object) -> float:
    return seconds_of(str(value), where)


def seconds_of(value: object, where: str, more: str = "") -> float:
    """Parse a number of seconds.

    Raises:
        pytest.UsageError: It is none.
    """
    try:
        found = float(str(value))
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        problem = f"is not a time, expected seconds from 0 on{more}"
        raise pytest.UsageError(f"{where}: {value!r} {problem}")
    return found


def _words(where: str, value: object) -> tuple[str, ...]:
    """Parse words with commas."""
    lists = value if isinstance(value, Sequence) and not isinstance(value, str) else [str(value)]
    found = [word.strip() for line in lists for word in str(line).split(",")]
    if not all(found):
        raise pytest.UsageError(f"{where}: {','.join(map(str, lists))!r} holds an empty word")
    return tuple(found)


def _ranks(where: str, value: object) -> tuple[int, ...] | None:
    """Parse numbers of ranks; None for all, none for `none`."""
    found = str(value)
    if found in ("all", "none"):
        return None if found == "all" else ()
    numbers = [word.strip() for word in found.split(",")]
    if not all(word.isdecimal() for word in numbers):
        raise pytest.UsageError(
            f"{where}: {found!r} names no ranks, expected numbers with commas, all or none"
        )
    return tuple(sorted({int(word) for word in numbers}))


def _fake_ranks(_: str, value: object) -> str:
    """Return the value of `--fake-ranks`, if its feature can read it."""
    with usage_errors():
        for read in _RANK_CHOICE.all():
            read(str(value))
    return str(value)


def one_of(*choices: ChoiceT, problem: str = "is unknown") -> ValueKind[ChoiceT]:
    """Return the kind of a value that is one of `choices`."""

    def parse(where: str, value: object) -> ChoiceT:
        """Return the choice that a value names."""
        for choice in choices:
            if choice == value:
                return choice
        expected = one_word_of(str(value), choices)
        raise pytest.UsageError(f"{where}: {str(value)!r} {problem}, expected {expected}")

    return ValueKind(parse, "|".join(choices))


TEXT = ValueKind(lambda _, value: str(value), "TEXT")
PATH = ValueKind(lambda _, value: Path(str(value)) if value else None, "PATH")
FLAG = ValueKind(_flag)
COUNT = ValueKind(_count, "N")
INDEX = ValueKind(_index, "N")
SECONDS = ValueKind(_seconds, "S")
WORDS = ValueKind(_words, "LIST", is_repeatable=True)
FILES = ValueKind(lambda where, v: tuple(map(Path, _words(where, v))), "FILE", is_repeatable=True)
REASON = ValueKind(lambda _, value: str(value).strip() or None, "TEXT")
RANKS = ValueKind(_ranks, "LIST")
FAKE_RANKS = ValueKind(_fake_ranks, "all|N|LIST", bare="12")
GPUS = ValueKind(lambda where, v: 0 if v == "all" else _count(where, v, ", or all"), "N|all")


GoldenMode = Literal["check", "record", "refresh", "off"]
Device = Literal["auto", "cuda", "cpu"]
GangStart = Literal["auto", "fork", "collect"]
TensorTrace = Literal["off", "hash", "full"]
Experimental = Literal["exclude", "include", "only"]
ScriptMode = Literal["native", "bash"]
MIN_REFRESH_REPEATS = 2
LOCAL = "local"
WORKLOADS_PLUGIN = "megatron-workloads"  # the name of the plugin that reads and selects them
TRAINING_PLUGIN = "megatron-training"  # and of the one that runs them
COLLECTING_PLUGIN = "megatron-collecting"  # the same, in a rank that collects for itself
HAS_GANGS = pytest.StashKey[bool]()  # tests of the session run on gangs
ON_ONE_PROCESS = pytest.StashKey[Iterable[str]]()  # tests of several ranks that passed on one
# They change how an item runs or is judged: `run.json` has them, and what runs it again gives them.
OF_ITEMS = (
    *("fake-ranks", "gang-start", "golden", "golden-policy", "leaks"),
    *("lightweight", "rank-grace", "rank-timeout", "ranks-per-gpu", "script", "signatures"),
    "tensor-trace",
)
SETTINGS = (  # rarely changed: in the ini file alone, or by `-o megatron_NAME=VALUE`
    *("experimental-tests", "fail-flaky", "gang-start", "history"),
    *("max-retries-per-run", "preload", "queue-timeout", "rank-grace", "retry-backoff"),
    *("script", "signatures"),
)
SELECTION = ("scope", "cadence", "environment", "platform", "model", "test-case", "tag")
_RANK_CHOICE: ExtensionPoint[Callable[[str], object]] = ExtensionPoint("fake_ranks")
_DECIDE: ExtensionPoint[Callable[[Path, str, str, str | None, str | None], Decision]] = (
    ExtensionPoint("decide")
)
_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_LAST_PORT = 65_535


_EXPERIMENTAL: ValueKind[Experimental] = one_of("exclude", "include", "only")
_GOLDEN: ValueKind[GoldenMode] = one_of(
    "check", "record", "refresh", "off", problem="is not a way to use goldens"
)
_DEVICE: ValueKind[Device] = one_of("auto", "cuda", "cpu")
_TENSOR_TRACE: ValueKind[TensorTrace] = one_of("off", "hash", "full")
_SCRIPT: ValueKind[ScriptMode] = one_of("native", "bash")
_STARTS: ValueKind[GangStart] = one_of("auto", "fork", "collect")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a session.

    Attributes:
        typed: Names of the options on the command line.
        given: The same, with those that the ini file sets.
        decision: The one for labels and an event; None where neither is given.
        rdzv_step: Name of the step of Slurm that has the endpoint, or "".
    """

    num_ranks: int | None = COUNT(
        "ranks",
        "run python tests on a gang of N ranks, on any device",
        None,
        "python tests run in pytest's own process",
    )
    num_gpus: int | None = GPUS(
        "gpus",
        "run python tests on a gang of N ranks, one for each CUDA device, with NCCL",
        None,
        "as above",
    )
    device: Device = _DEVICE(
        "device",
        "device of the ranks",
        "auto",
        "auto: cuda if there are as many GPUs as ranks, else cpu; the header shows it",
    )
    rank_timeout_s: float = SECONDS(
        "rank-timeout", "limit for one phase (setup, call, teardown) of a distributed test", 300.0
    )
    golden: GoldenMode = _GOLDEN(
        "golden",
        "what to do with goldens: check compares, record writes missing ones, refresh replaces "
        "them after a clean run, off does neither",
        "check",
    )
    platform: tuple[str, ...] = WORDS(
        "platform",
        "only workloads of this hardware (cpu, dgx_h100, ...)",
        (),
        "no filter; rows for hardware that is not here are skipped",
    )
    scope: tuple[str, ...] = WORDS(
        "scope", "only workloads of this cost tier (L0, L1, nightly, mr, ...)", ()
    )
    model: tuple[str, ...] = WORDS(
        "model", "only workloads of this model family, the folder above a test case", ()
    )
    test_case: tuple[str, ...] = WORDS("test-case", "only workloads of this test case", ())
    is_plan: bool = FLAG("plan", "print what would run and run nothing", default=False)
    executor: str = TEXT(
        "executor",
        "where workloads run: local, docker, slurm or an engine that another package brings",
        LOCAL,
        metavar="NAME",
    )
    cadence: tuple[str, ...] = WORDS(
        "cadence", "only workloads of this trigger (pr, nightly, mergegroup, weekly)", ()
    )
    environment: tuple[str, ...] = WORDS(
        "environment", "only workloads of this software stack (dev, lts)", ()
    )
    tag: tuple[str, ...] = WORDS("tag", "only rows with this tag", ())
    labels: str = TEXT(
        "labels",
        "CI labels of a pull request, with commas or as a JSON array",
        "",
        metavar="LIST",
        feature="ci",
    )
    ci_event: str = TEXT(
        "ci-event",
        "what CI runs for: merge_group, schedule, ...",
        "pull_request",
        "pull_request, with --labels",
        metavar="NAME",
        feature="ci",
    )
    bucket: tuple[str, ...] = WORDS(
        "bucket",
        "python tests of these files or dir/**/*.py, without those of !pattern",
        (),
        "all files",
        feature="ci",
    )
    experimental: Experimental = _EXPERIMENTAL(
        "experimental-tests",
        "tests with the mark experimental, where python tests are selected",
        "exclude",
        feature="ci",
    )
    run_dir: Path | None = PATH(
        "run-dir",
        "where logs and results go",
        None,
        ".pytest_megatron/runs/<time>-<id> below the project's root",
        metavar="DIR",
    )
    num_repeats: int | None = COUNT(
        "n-repeat", "how often each workload is trained", None, "what the recipe says, else 1"
    )
    max_attempts: int | None = COUNT(
        "max-attempts",
        "starts of a repeat that fails for a transient cause",
        None,
        "what the row says, else 3",
    )
    max_retries: int = INDEX(
        "max-retries-per-run",
        "further attempts that all workloads and distributed tests of a run may have",
        10,
    )
    retry_backoff_s: float = SECONDS("retry-backoff", "pause before a second attempt", 5.0)
    is_flaky_failure: bool = FLAG(
        "fail-flaky",
        "exit code 1 if an item passed only when it was run again",
        default=False,
        metavar="true",
    )
    history: str = TEXT(
        "history",
        "the file of past outcomes, or off",
        "",
        ".pytest_megatron/history.jsonl below the project's root",
        metavar="FILE|off",
    )
    is_lightweight: bool = FLAG(
        "lightweight", "4 iterations, one repeat, not compared with a golden", default=False
    )
    script: ScriptMode = _SCRIPT(
        "script",
        "start what a script hands to Megatron-LM's driver, or have bash run the driver",
        "native",
    )
    executor_config: Path | None = PATH(
        "executor-config", "settings of the executor", None, metavar="FILE"
    )
    queue_timeout_s: float = SECONDS(
        "queue-timeout",
        "limit for the wait of each attempt in the queue of --executor",
        0.0,
        "0: no limit",
    )
    golden_policy: str = TEXT(
        "golden-policy", "how to compare: strict, megatron or a file", "strict", metavar="POLICY"
    )
    golden_reason: str | None = REASON(
        "golden-reason", "why goldens change, which they record", None
    )
    fake_ranks: str | None = FAKE_RANKS(
        "fake-ranks",
        "run single ranks of each workload for two steps on fake process groups, whatever hardware "
        "it names, and compare them: those that can differ, all, N of them, or a list",
        None,
        feature="layouts",
    )
    tensor_trace: TensorTrace = _TENSOR_TRACE(
        "tensor-trace",
        "record tensors of the first steps of each workload: hash their statistics, full also "
        "their values",
        "off",
        feature="trace",
    )
    tee_ranks: tuple[int, ...] | None = RANKS(
        "tee-ranks",
        "ranks whose output is copied live to the terminal: numbers with commas, all or none",
        (0, 3),
    )
    ranks_per_gpu: int = COUNT(
        "ranks-per-gpu",
        "how many ranks of a gang share a GPU, on a host with fewer GPUs than ranks",
        1,
    )
    num_nodes: int = COUNT(
        "nnodes", "nodes that a gang spans, each with --gpus or --ranks ranks", 1, "1, or Slurm's"
    )
    node_rank: int = INDEX("node-rank", "index of this node", 0, "0, or Slurm's")
    rdzv_endpoint: str = TEXT(
        "rdzv-endpoint",
        "address of node 0, where the others connect",
        "",
        "Slurm's",
        metavar="HOST:PORT",
    )
    finds_leaks: bool = FLAG(
        "leaks",
        "fail distributed tests that leave process groups, CUDA memory, threads, processes or "
        "variables behind in their ranks",
        default=False,
        feature="leaks",
    )
    rank_grace_s: float = SECONDS(
        "rank-grace",
        "after a rank failed, skipped or died, how long the others may take",
        10.0,
    )
    signatures: tuple[Path, ...] = FILES(
        "signatures",
        "TOML file with signatures of your own",
        (),
        "those of signatures in [tool.pytest-megatron]",
    )
    num_transient_reruns: int = INDEX(
        "rerun-transient",
        "reruns of a distributed test that failed for a transient cause, at most",
        0,
    )
    pdb_rank: int | None = INDEX(
        "pdb-rank",
        "with --pdb, the rank to debug",
        None,
        "the first rank that fails; rank 0 at breakpoints",
    )
    gang_start: GangStart = _STARTS(
        "gang-start",
        "fork ranks from what pytest has loaded, or have each of them collect for itself, from the "
        "start of the session on",
        "auto",
        "auto: fork, unless a file reads the rank while it is collected",
    )
    preload: tuple[str, ...] = WORDS(
        "preload",
        "modules of installed packages that ranks which collect, and pytest-megatron watch, load "
        "once, beside torch",
        (),
        "none",
    )
    is_empty_allowed: bool = FLAG(
        "allow-empty", "a selection that matches no workload is no error", default=False
    )
    is_dirty_allowed: bool = FLAG(
        "allow-dirty", "write goldens from a tree that is not committed", default=False
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
    def of_items(self) -> dict[str, OptionValue]:
        """The options that change how an item runs or is judged, where they are not as by default.

        One that was given counts as well. The names have underscores in place of dashes.
        """
        return {
            row.name.replace("-", "_"): plain_value(getattr(self, name))
            for name, row in OPTION_ROWS.items()
            if row.name in OF_ITEMS
            and (row.name in self.given or getattr(self, name) != row.default)
        }

    @property
    def asks_for_workloads(self) -> bool:
        """True if an option was typed that makes sense for workloads only.

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
        """True if the session may write goldens at all."""
        return self.golden in ("record", "refresh")

    @property
    def asks_for_gangs(self) -> bool:
        """True if every python test runs on a gang."""
        return self.num_gpus is not None or self.num_ranks is not None

    @property
    def has_selection(self) -> bool:
        """True if an option selects workloads."""
        return any(self.selection.values())


# By field, in the order of `--help` and of the reference: what most sessions need comes first.
OPTION_ROWS: dict[str, OptionRow] = {
    f.name: f.metadata["row"] for f in fields(Options) if f.metadata
}


class _Former(argparse.Action):
    """Refuses an option of earlier versions, also one that is a setting now, with what to do."""

    @override
    def __call__(self, _: object, __: object, value: object, option: str | None = None) -> NoReturn:
        name = str(option).removeprefix("--").removeprefix(PREFIX)
        setting = dest(name)
        moved = f"is a setting now; write -o {setting}={value or 'VALUE'}, or put {setting} into "
        raise pytest.UsageError(f"{option}: {REMOVED.get(f'--{name}', f'{moved}the ini file')}")


def add_options(parser: pytest.Parser) -> ShortNames:
    """Declare every option, each also as the ini option `megatron_<name>`, and the settings."""
    names = ShortNames(parser)
    for row in OPTION_ROWS.values():
        if not row.is_there:
            continue
        text = row.help if row.is_setting else f"default of --{row.name}"
        parser.addini(dest(row.name), help=text, default=None)
        if row.is_setting:  # an option of earlier versions
            names.refuse(row.name, _Former)
            continue
        settings: dict[str, object] = {"dest": dest(row.name), "default": None, "help": row.help}
        settings |= {"metavar": row.metavar} if row.metavar else {"action": "store_true"}
        settings |= {} if row.kind.bare is None else {"nargs": "?", "const": row.kind.bare}
        settings |= {"action": "append"} if row.kind.is_repeatable else {}
        names.declare(row.name, settings)
    for option in (word for word in REMOVED if word.startswith("--")):
        names.refuse(option.removeprefix("--"), _Former)
    return names


def _refuse_removed_settings(config: pytest.Config) -> None:
    """Refuse ini options of earlier versions, which are not declared.

    Raises:
        pytest.UsageError: One is given.
    """
    typed_names = (line.partition("=")[0].strip() for line in _override_lines(config))
    given_names = {*_ini_file(config), *typed_names}
    for name, instead in REMOVED.items():
        setting = dest(name.removeprefix("--")) if name.startswith("--") else name
        if setting in given_names:
            raise pytest.UsageError(f"{setting}: {instead}")


def read_options(config: pytest.Config) -> Options:
    """Read the options of a session.

    Raises:
        pytest.UsageError: A value is not one that the option takes.
    """
    _refuse_removed_settings(config)
    names = [row.name for row in OPTION_ROWS.values()]
    options = Options(
        **{f.name: f.metadata["row"].read(config) for f in fields(Options) if f.metadata},
        typed=frozenset(name for name in names if typed(config, name) is not None),
        given=frozenset(name for name in names if given(config, name) is not None),
    )
    if getattr(config.option, "fail_on_flaky", None):  # the same, of pytest-rerunfailures
        options = replace(options, is_flaky_failure=True)
    options = _with_nodes(options)
    if not options.given.isdisjoint(("labels", "ci-event")):
        options = _with_labels(config, options)
    _refuse_contradictions(options)
    return options


def _with_labels(config: pytest.Config, options: Options) -> Options:
    """Return options with the decision for labels and event; what the user typed wins.

    Raises:
        pytest.UsageError: The event is unknown, or the project's table is wrong.
    """
    cadence, environment = (
        x[0] if len(x) == 1 else None for x in (options.cadence, options.environment)
    )
    decide = _DECIDE.first()
    assert decide is not None  # it declares the options
    with usage_errors():
        decision = decide(config.rootpath, options.labels, options.ci_event, cadence, environment)
    return replace(
        options,
        decision=decision,
        scope=options.scope or decision.scope,
        cadence=options.cadence or decision.cadence,
        environment=options.environment or (decision.environment,),
        is_lightweight=options.is_lightweight or decision.is_lightweight,
    )


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
            node_rank = options.node_rank if has_node_rank else step.node_rank
            has_node_rank = True
            options = replace(options, num_nodes=step.num_nodes, node_rank=node_rank)
            if not options.rdzv_endpoint:
                options = replace(options, rdzv_endpoint=step.endpoint, rdzv_step=step.name)
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
    from pytest_megatron.session.slurm_step import find_slurm_step

    with usage_errors():
        return find_slurm_step(os.environ)


def early_given(early_config: pytest.Config, name: str) -> object:
    """Return what is given for an option before conftest files are loaded; typed words win."""
    value: object = vars(early_config.known_args_namespace).get(dest(name))
    return value or chosen_ini(early_config, dest(name))


def early_words(early_config: pytest.Config, name: str) -> tuple[str, ...]:
    """Return the words of an option before conftest files are loaded.

    Wrong words are passed on: `read_options` reports them.
    """
    lists = cast("Sequence[str]", early_given(early_config, name) or ())
    lines = [lists] if isinstance(lists, str) else lists
    return tuple(word.strip() for line in lines for word in line.split(",") if word.strip())


def early_size(early_config: pytest.Config) -> tuple[int, int] | None:
    """Return ranks of a node and nodes, before conftest files are loaded; None without gangs.

    A wrong value gives None: `read_options` reports it.
    """
    texts = {
        name: early_given(early_config, name)
        for name in ("ranks", "gpus", "nnodes", "ranks-per-gpu")
    }
    num_ranks = texts["ranks"] or texts["gpus"]
    if num_ranks and not texts["nnodes"]:
        with contextlib.suppress(pytest.UsageError):
            step = _slurm_step()
            texts["nnodes"] = step.num_nodes if step else None
    if num_ranks == "all":
        from pytest_megatron.gpu.host import this_host

        per_gpu = str(texts["ranks-per-gpu"] or 1)
        num_ranks = len(this_host().gpus) * (int(per_gpu) if per_gpu.isdecimal() else 1)
    words = str(num_ranks), str(texts["nnodes"] or 1)
    if not all(word.isdecimal() and int(word) for word in words):
        return None
    return int(words[0]), int(words[1])


def least_repeats() -> int:
    """Return how often a workload whose golden is written has to train in this session."""
    return MIN_REFRESH_REPEATS - (BY_HAND in os.environ)


def _refuse_contradictions(options: Options) -> None:
    """Refuse options that exclude one another."""
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
    if options.fake_ranks is not None and (is_writing or options.executor != LOCAL):
        other = f"--golden {options.golden}" if is_writing else f"--executor {options.executor}"
        raise pytest.UsageError(
            f"--fake-ranks: ranks run here, on fake process groups, and measure nothing; "
            f"drop it or {other}"
        )
    if is_writing and options.tensor_trace != "off":
        raise pytest.UsageError(
            f"--tensor-trace: the first steps of a traced training are slower, and --golden "
            f"{options.golden} keeps their times; drop one of them"
        )
    if is_writing and options.is_lightweight:
        raise pytest.UsageError(
            f"--golden {options.golden}: a lightweight run measures nothing to keep; "
            f"drop --lightweight"
        )
    least = least_repeats()
    if is_writing and options.num_repeats is not None and options.num_repeats < least:
        raise pytest.UsageError(
            f"--golden {options.golden}: needs at least {least} repeats to know "
            f"their spread, --n-repeat is {options.num_repeats}; raise or drop it"
        )
