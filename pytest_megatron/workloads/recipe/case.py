"""A test case: the paths of its files, and its content. The files are read and never written.

Source: Megatron-LM tests/functional_tests/test_cases/*/*/model_config.yaml, d98e8a64dd.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeAlias

from annotated_types import Ge, Lt

from pytest_megatron.base import schema
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.findings import Finding, finding_at
from pytest_megatron.base.schema import (
    About,
    Checked,
    Count,
    ExpectedError,
    Pattern,
    Positive,
    Text,
    closed,
    matches,
    read,
)
from pytest_megatron.base.yaml import YamlDocument, read_document, read_yaml
from pytest_megatron.errors import CaseError
from pytest_megatron.workloads.recipe.metrics import MetricsFrom, MetricSource, parse_source
from pytest_megatron.workloads.recipe.model import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One entry of MODEL_ARGS.

    Attributes:
        name: The key as written, `--train-iters` or `trainer.max_steps`.
        text: The value as written (a number keeps its spelling); None for YAML's null.
        words: The elements where the value is a YAML list; None otherwise.
        is_text: The value was quoted, so `"true"` is a word and not a switch.
        line: Where it stands in its file, counted from 1.
    """

    name: str
    text: str | None
    words: tuple[str, ...] | None = None
    is_text: bool = False
    line: int


class ModelArgs:
    """The arguments of one start of a training; of two with one name the last one counts."""

    def __init__(self, arguments: Iterable[Argument]) -> None:
        self._last = {argument.name: argument for argument in arguments}

    def __contains__(self, name: str) -> bool:
        """Return whether the argument is there, with whatever value."""
        return name in self._last

    def text(self, name: str) -> str | None:
        """Return a value as written; None without it, for null and for a list."""
        argument = self._last.get(name)
        return None if argument is None or argument.text is None else argument.text.strip(" \"'")

    def number(self, name: str) -> int | None:
        """Return a value that is a whole number, None for any other."""
        text = self.text(name)
        return int(text) if text is not None and text.isdecimal() else None

    def size(self, name: str) -> int | None:
        """Return a parallel size: 1 where it is not given, None where it is no number from 1 on."""
        return (self.number(name) or None) if name in self._last else 1

    def is_on(self, *names: str) -> bool:
        """Return whether one of these switches is set."""
        return any(self.text(name) == "true" for name in names)

    def line(self, *names: str) -> int | None:
        """Return the line of the first of these arguments that is there."""
        return next((self._last[name].line for name in names if name in self._last), None)

    def has_any(self, *names: str) -> bool:
        """Return whether one of these arguments is there."""
        return any(name in self._last for name in names)


TP, CP = "--tensor-model-parallel-size", "--context-parallel-size"
PP = "--pipeline-model-parallel-size"
EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
# Sizes of older releases that put an encoder on ranks of its own.
_ENCODERS = ("--encoder-tensor-model-parallel-size", "--encoder-pipeline-model-parallel-size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Tensor, pipeline, context, expert and expert-tensor parallel sizes."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1


def sizes_of(model_args: ModelArgs) -> ParallelSizes | None:
    """Return the sizes; None where one is no number, or an encoder has ranks of its own."""
    tp, pp, cp, ep = (model_args.size(name) for name in (TP, PP, CP, EP))
    etp = model_args.size(ETP) if ETP in model_args else tp
    if not (tp and pp and cp and ep and etp) or model_args.has_any(*_ENCODERS):
        return None
    return ParallelSizes(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)


# Names in ENV_VARS that the harness itself reads; the second is misspelt there, for good.
HARNESS_VARIABLES = (
    *("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NON_DETERMINSTIC_RESULTS", "SKIP_PYTEST", "N_REPEAT"),
    *("ENABLE_LIGHTWEIGHT_MODE", "THROUGHPUT_START_STEP"),
)
MODEL_ARGS = re.compile(r"MODEL_ARGS(_[1-9]\d*)?").fullmatch
_NUMBERED_NAME = r"MODEL_ARGS_([1-9]\d*)"
_NUMBERED = re.compile(_NUMBERED_NAME).fullmatch
# Which MODEL_ARGS_<n> a TEST_TYPE reads; those that train once read none.
_ONE_START = ("frozen-start", "regular")
_MANY_STARTS = ("checkpoint-consistency", "ckpt-resume", "frozen-resume", "release")
_PHASES = {"ckpt-resume": 2, "frozen-resume": 2}
DEFAULT_TRAIN_ITERS = 100
LIGHTWEIGHT_ITERS = 4
LIGHTWEIGHT_SAVE_INTERVAL = 2
LIGHTWEIGHT_NEMO_STEPS = 2


class TestType(Enum):
    """TEST_TYPE: the phases of a case and their comparison."""

    __test__ = False  # the name is Megatron's; pytest must not collect it

    REGULAR = "regular"
    CKPT_RESUME = "ckpt-resume"
    FROZEN_START = "frozen-start"
    FROZEN_RESUME = "frozen-resume"
    CHECKPOINT_CONSISTENCY = "checkpoint-consistency"
    RELEASE = "release"


class CaseMode(Enum):
    """MODE: the kind of program, and so of its results."""

    PRETRAINING = "pretraining"
    INFERENCE = "inference"
    RL = "rl"


class Evaluation(Enum):
    """TEST_EVALUATION: the expected outcome."""

    PASS = "pass"  # noqa: S105 - not a password
    XPASS = "xpass"


class Launcher(Enum):
    """LAUNCHER: the program that starts the ranks."""

    TORCHRUN = "torchrun"
    FT_LAUNCHER = "ft_launcher"
    NONE = "none"  # the program is started alone, without RANK


class ExitPolicy(Enum):
    """EXIT_POLICY: the outcome of a program that has done its work and does not exit."""

    FAIL = "fail"
    PASS = "pass"  # noqa: S105 - not a password
    WAIT = "wait"  # until the time limit


def _check_line(line: str) -> str:
    """Refuse a line that no shell could split."""
    try:
        shlex.split(line)
    except ValueError as error:
        raise ExpectedError(f"words of a command line: {str(error).lower()}") from error
    return line


Line: TypeAlias = Annotated[Text, Checked(_check_line)]
Stop: TypeAlias = Annotated[
    Line,
    matches(r".*\{steps\}.*", "words with {steps} in them: --max_steps={steps}"),
    About("Words that have the program train {steps} steps."),
]


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The words by which a program saves and resumes; {dir} and {at} are filled in.

    Attributes:
        at: The step after which the second start goes on.
        save: Added to both starts.
        load: Added to the second start.
        drop: Pattern of what is removed from the directory between them, or None.
    """

    at: Annotated[Positive, About("The step after which the second start goes on.")]
    save: Annotated[
        Line,
        matches(r".*\{dir\}.*", "words with {dir} in them: attempts must not share a directory"),
        About("Words for both starts: --out {dir} --save_steps {at}"),
    ]
    load: Annotated[Line, About("Words for the second start: --resume {dir}/step-{at}")]
    drop: Annotated[Text | None, About("Pattern of what is removed between them.")] = None

    @property
    def is_fixed(self) -> bool:
        """True if no word says at which step the program saves, so that it is always the same."""
        return "{at}" not in self.save

    def words(self, line: str, directory: Path | str) -> tuple[str, ...]:
        """Return the words of a line, filled in."""
        filled = (word.replace("{at}", str(self.at)) for word in shlex.split(line))
        return tuple(word.replace("{dir}", str(directory)) for word in filled)


_Mapping: TypeAlias = dict[str, object]


_NUMBERED_ARGS: type[dict[str, _Mapping | None]] = dict[str, _Mapping | None]


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFile:
    """The keys of a `model_config.yaml`, beside MODEL_ARGS_2 and so on; null is no value.

    Source: Megatron-LM tests/functional_tests/shell_test_utils/run_ci_test.sh, d98e8a64dd
    """

    TEST_TYPE: TestType
    MODE: CaseMode | None = None
    TEST_EVALUATION: Evaluation | None = None
    LAUNCHER: Launcher | None = None
    METRICS: tuple[str, ...] | None = None
    MODEL_ARGS: _Mapping | None = None
    MODEL_ENV_VARS: dict[str, _Mapping | None] | None = None
    BASE_MODEL_ARGS: object = None
    ENV_VARS: _Mapping | None = None
    THROUGHPUT_TEST_PARAMS: _Mapping | None = None
    BEFORE_SCRIPT: str | None = None
    AFTER_SCRIPT: str | None = None
    EXPECTED_FAILURE: Pattern | None = None  # ours, as are the next
    EXIT_POLICY: ExitPolicy | None = None
    LAST_STEP: Count | None = None
    STOP: Stop | None = None
    RESUME: Resume | None = None
    METRICS_FROM: MetricsFrom | None = None
    GRADIENT_TOLERANCE: Annotated[float, Ge(0), Lt(1)] | None = None


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of a case, with MODEL_ARGS_2 and so on."""
    found = schema.json_schema(CaseFile, "pytest-megatron test case")
    arguments: JsonValue = {"type": ["object", "null"]}
    return found | {"patternProperties": {f"^{_NUMBERED_NAME}$": arguments}}


def check_case(document: YamlDocument) -> tuple[WorkloadCase | None, tuple[Finding, ...]]:
    """Return a test case, None where it has an error, and what is wrong with it."""
    try:
        case = parse_case(document)
    except CaseError as error:
        line = int(error.where.rpartition(":")[2])
        found = Finding(file=document.file, line=line, rule="case", message=error.problem)
        return None, (found,)
    if (void := find_no_resume(document.value)) is not None:
        return case, (finding_at(document, ("TEST_TYPE",), "case", void),)
    return case, ()


def sound_case(document: YamlDocument) -> WorkloadCase | None:
    """Return a test case; None where it has an error, as lint says."""
    try:
        return parse_case(document)
    except CaseError:
        return None


def _parts_of(document: YamlDocument) -> tuple[dict[str, JsonValue], dict[str, JsonValue]]:
    """Return the MODEL_ARGS_2 and so on, and the other keys."""
    numbered = {key: value for key, value in document.value.items() if _NUMBERED(key)}
    return numbered, {k: v for k, v in document.value.items() if k not in numbered}


def _refuse_void(document: YamlDocument) -> None:
    """Refuse a setting of a case that its TEST_TYPE, MODE or TEST_EVALUATION makes void."""
    value = document.value
    test_type, mode = value.get("TEST_TYPE"), value.get("MODE", "pretraining")
    if mode in ("inference", "rl") and test_type in _MANY_STARTS:
        message = f"TEST_TYPE {test_type} does not go with MODE {mode}, expected one of "
        message += ", ".join(_ONE_START)
        raise CaseError(document.where(("TEST_TYPE",)), message)
    for key in value:
        found = _NUMBERED(key)
        if found is None or test_type == "checkpoint-consistency":
            continue
        if not 1 < int(found[1]) <= _PHASES.get(str(test_type), 1):
            message = f"TEST_TYPE {test_type} never runs with {key}; remove it, or change TEST_TYPE"
            raise CaseError(document.where((key,)), message)
    needs = {
        "EXPECTED_FAILURE": (value.get("TEST_EVALUATION") == "xpass", "TEST_EVALUATION: xpass"),
        "GRADIENT_TOLERANCE": (
            test_type == "checkpoint-consistency",
            "TEST_TYPE: checkpoint-consistency",
        ),
    }
    for key, (is_read, what) in needs.items():
        if key in value and not is_read:
            message = f"{key} is read only with {what}; remove it, or add that"
            raise CaseError(document.where((key,)), message)


def find_no_resume(case: Mapping[str, JsonValue]) -> str | None:
    """Return why nothing can be resumed in a case of TEST_TYPE ckpt-resume, None if it can."""
    is_resume, resume = case.get("TEST_TYPE") == "ckpt-resume", case.get("RESUME")
    if not is_resume:
        return None if resume is None else "RESUME is read only with TEST_TYPE: ckpt-resume"
    text = json.dumps(case)
    for name, flag in (("CHECKPOINT_SAVE_PATH", "--save"), ("CHECKPOINT_LOAD_PATH", "--load")):
        if resume is None and name not in text:
            return (
                f"TEST_TYPE is ckpt-resume, and nothing names ${{{name}}}, so no checkpoint is "
                f"resumed; add {flag}: ${{{name}}} to MODEL_ARGS, or RESUME"
            )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One `MODEL_ARGS*` key: the arguments of one start of the program.

    Attributes:
        key: `MODEL_ARGS`, `MODEL_ARGS_2` and so on.
        number: The one in the key, 1 for the bare one.
        env: `MODEL_ENV_VARS.<key>`: variables of this start alone.
    """

    key: str
    number: int
    arguments: tuple[Argument, ...]
    env: Mapping[str, str]

    @property
    def num_ranks(self) -> int | None:
        """`GPUS_PER_NODE`, the ranks per node of this start; None leaves that to the recipe."""
        text = self.env.get("GPUS_PER_NODE")
        return int(text) if text is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCase:
    """One `model_config.yaml`.

    Attributes:
        path: The file.
        variants: Every `MODEL_ARGS*` in the order of the file; the bare one is always there.
        env: ENV_VARS, as strings.
        metrics: METRICS; None where the file has no such key.
        source: Where the metrics are, METRICS_FROM; None where they are handed to us.
        before_script: Shell to run before the training, or None; likewise `after_script`.
        expected_failure: Regular expression that the cause of a case with `xpass` must match, or
            None for any failure.
        exit_policy: EXIT_POLICY, `fail` by default.
        gradient_tolerance: GRADIENT_TOLERANCE, or None for that of the precision.
        env_lines: Where the names of `env` stand in the file, from 1.
        last_step: The last step of the metrics, where no argument says so; None without it.
        stop: Words that have the program train `{steps}` steps; None where that is not known.
        resume: How the program saves and resumes, or None for Megatron-LM's way.
    """

    path: Path
    test_type: TestType
    mode: CaseMode
    evaluation: Evaluation
    starter: Launcher
    variants: tuple[Variant, ...]
    env: Mapping[str, str]
    metrics: tuple[str, ...] | None
    before_script: str | None
    after_script: str | None
    expected_failure: str | None
    gradient_tolerance: float | None
    exit_policy: ExitPolicy = ExitPolicy.FAIL
    env_lines: Mapping[str, int] = field(default_factory=dict)
    source: MetricSource | None = None
    last_step: int | None = None
    stop: str | None = None
    resume: Resume | None = None

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """MODEL_ARGS in the order of the file."""
        return self.variant(1).arguments

    def variant(self, number: int) -> Variant:
        """Return the `MODEL_ARGS_<number>`, or the bare MODEL_ARGS where there is none."""
        found = {variant.number: variant for variant in self.variants}
        return found.get(number, found[1])

    def argument(self, name: str) -> str | None:
        """Return the text of an argument, the last one where it stands twice; None without it."""
        return next((a.text for a in reversed(self.arguments) if a.name == name), None)

    @property
    def train_iters(self) -> int:
        """Iterations that a full run trains: `--train-iters`, by default 100.

        Raises:
            CaseError: The value is not a positive number.
        """
        return self.train_iters_of(self.variant(1))

    def train_iters_of(self, variant: Variant) -> int:
        """Return the same for one of several MODEL_ARGS.

        Raises:
            CaseError: The value is not a positive number.
        """
        return self._count(variant, "--train-iters") or DEFAULT_TRAIN_ITERS

    @property
    def exit_interval(self) -> int | None:
        """The iteration at which a release is done, `--exit-interval`; None without it.

        Raises:
            CaseError: The value is not a positive number.
        """
        return self._count(self.variant(1), "--exit-interval")

    def _count(self, variant: Variant, name: str) -> int | None:
        """Return the number of iterations that an argument gives, None without it."""
        found = next((a for a in reversed(variant.arguments) if a.name == name), None)
        if found is None:
            return None
        if found.text is None or not found.text.isdecimal() or not int(found.text):
            raise CaseError(
                f"{self.path}:{found.line}",
                f"{name} is {found.text!r}, expected a number of iterations from 1 on",
            )
        return int(found.text)

    @property
    def precision(self) -> str:
        """The number format of the model: `bf16`, `fp16` or `fp32`."""
        reduced = ("bf16", "fp16")
        return next((name for name in reduced if self.argument(f"--{name}") == "true"), "fp32")

    @property
    def is_nondeterministic(self) -> bool:
        """True if two runs of the case may differ, as the case declares."""
        switches = ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NON_DETERMINSTIC_RESULTS")
        return any(self.env.get(name) == "1" for name in switches)

    @property
    def is_judged(self) -> bool:
        """True unless the case asks for a run in which no metric is looked at."""
        return not (self.env.get("SKIP_PYTEST") == "1" or self.is_always_lightweight)

    @property
    def is_compared(self) -> bool:
        """True if a run of the case is compared with a golden, if there is one."""
        return self.is_judged and self.test_type is not TestType.CHECKPOINT_CONSISTENCY

    @property
    def needs_golden(self) -> bool:
        """True if a run is compared with a golden and expected to agree."""
        return self.is_compared and self.evaluation is Evaluation.PASS

    @property
    def compared_end(self) -> int | None:
        """The step at which a training that is compared ends; None where that is not given."""
        if self.last_step is not None or not self.needs_golden:
            return self.last_step if self.needs_golden else None
        model_args = ModelArgs(self.arguments)
        counts = (model_args.number(name) for name in ("--train-iters", "--exit-interval"))
        return min((count for count in counts if count), default=None)

    @property
    def is_always_lightweight(self) -> bool:
        """True if the case itself asks for lightweight mode."""
        return self.env.get("ENABLE_LIGHTWEIGHT_MODE", "").lower() == "true"


def read_case(path: Path) -> WorkloadCase:
    """Read a test case.

    Raises:
        CaseError: The file is missing, is not YAML, or a value of it has the wrong type or word.
    """
    return parse_case(read_yaml(path, error=CaseError))


def case_of(root: Path, workload: Workload) -> WorkloadCase:
    """Read the test case of a row, as `read_case`."""
    own = workload.own_case
    return read_case(case_path(root, workload)) if own is None else parse_case(own)


def parse_case(document: YamlDocument) -> WorkloadCase:
    """Return a test case that was read as a document, as `read_case`. Pure."""
    numbered, others = _parts_of(document)
    file = read(CaseFile, document, CaseError, others)
    read(_NUMBERED_ARGS, document, CaseError, numbered)
    _refuse_void(document)
    reader = _CaseReader(document)
    return WorkloadCase(
        path=document.file,
        test_type=file.TEST_TYPE,
        mode=file.MODE or CaseMode.PRETRAINING,
        evaluation=file.TEST_EVALUATION or Evaluation.PASS,
        starter=file.LAUNCHER or Launcher.TORCHRUN,
        variants=reader.variants(),
        env=reader.texts("ENV_VARS"),
        metrics=() if file.METRICS is None and "METRICS" in document.value else file.METRICS,
        before_script=file.BEFORE_SCRIPT,
        after_script=file.AFTER_SCRIPT,
        expected_failure=file.EXPECTED_FAILURE,
        gradient_tolerance=file.GRADIENT_TOLERANCE,
        exit_policy=file.EXIT_POLICY or ExitPolicy.FAIL,
        env_lines={name: document.line_of(("ENV_VARS", name)) for name in file.ENV_VARS or ()},
        source=_source_of(document),
        last_step=file.LAST_STEP,
        stop=file.STOP,
        resume=file.RESUME,
    )


def _source_of(document: YamlDocument) -> MetricSource | None:
    """Return where the metrics of a case are, None where they are handed to us.

    Raises:
        CaseError: METRICS_FROM describes no place, or none that its case can use.
    """
    found, names = (document.value.get(key) for key in ("METRICS_FROM", "METRICS"))
    if not isinstance(found, dict):
        return None
    keys = {key: str(value) for key, value in found.items()}
    where, problem = document.where(("METRICS_FROM",)), None
    try:
        source = parse_source(keys, tuple(map(str, names)) if isinstance(names, list) else ())
    except ValueError as error:
        raise CaseError(where, f"METRICS_FROM: {error}") from error
    if not source.names:
        problem = "is there and METRICS is not, expected the names of metrics to compare"
    elif document.value.get("TEST_TYPE") in _MANY_STARTS and not source.counts_on:
        problem = (
            f"source {keys['source']} of a resumed training has the steps before as well, or is "
            f"counted anew, expected steps that go on; name another source, such as tensorboard"
        )
    if problem is not None:
        raise CaseError(where, f"METRICS_FROM: {problem}")
    return source


class _CaseReader:
    """Takes values out of a document as they are written; errors name the file and the line."""

    def __init__(self, document: YamlDocument) -> None:
        self._document = document

    def variants(self) -> tuple[Variant, ...]:
        """Return the argument sets of the case, one for each MODEL_ARGS key."""
        keys = [key for key in self._document.value if MODEL_ARGS(key)]
        return tuple(
            Variant(
                key=key,
                number=int(key.removeprefix("MODEL_ARGS").removeprefix("_") or 1),
                arguments=tuple(self._argument(key, name) for name in self._mapping(key)),
                env=self._variant_env(key),
            )
            for key in (keys if "MODEL_ARGS" in keys else ["MODEL_ARGS", *keys])
        )

    def _variant_env(self, key: str) -> dict[str, str]:
        """Return the variables of one argument set."""
        found = self.texts("MODEL_ENV_VARS", key)
        num_ranks = found.get("GPUS_PER_NODE", "1")
        if not num_ranks.isdecimal() or not int(num_ranks):
            raise CaseError(
                self._document.where(("MODEL_ENV_VARS", key, "GPUS_PER_NODE")),
                f"GPUS_PER_NODE is {num_ranks!r}, expected a number of ranks from 1 on",
            )
        return found

    def texts(self, *path: str) -> dict[str, str]:
        """Return a mapping of variables as strings."""
        found = {}
        for name, value in self._mapping(*path).items():
            text = self._document.text_of((*path, name))
            if isinstance(value, dict | list) or text is None:
                where = ".".join((*path, name))
                problem = f"{where} is a container, expected one value"
                raise CaseError(self._document.where((*path, name)), problem)
            found[name] = "" if value is None else text
        return found

    def _argument(self, key: str, name: str) -> Argument:
        """Return an argument with its words and its line."""
        value = self._mapping(key)[name]
        line = self._document.line_of((key, name))
        where = f"{self._document.file}:{line}"
        if isinstance(value, dict):
            raise CaseError(where, f"{name} is a mapping, expected one value or a list")
        if isinstance(value, list):
            words = [self._document.text_of((key, name, i)) for i in range(len(value))]
            if None in words:
                raise CaseError(where, f"{name} holds a container, expected plain values")
            return Argument(name=name, text=None, words=tuple(w or "" for w in words), line=line)
        return Argument(
            name=name,
            text=None if value is None else self._document.text_of((key, name)),
            is_text=isinstance(value, str),
            line=line,
        )

    def _mapping(self, *path: str) -> dict[str, JsonValue]:
        """Return a mapping that the schema knows to be one, if it is there."""
        value: JsonValue = self._document.value
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(value, dict) else {}


CASES = Path("tests/functional_tests/test_cases")
CASE_NAME = "model_config.yaml"
GOLDENS = Path("golden_values")
GOLDEN_PREFIX = "golden_values"


def case_path(root: Path, workload: Workload) -> Path:
    """Return the `model_config.yaml` of a workload; the recipe of one in the short form."""
    if workload.own_case is not None:
        return workload.own_case.file
    return root / CASES / workload.model / workload.test_case / CASE_NAME


def case_document(root: Path, workload: Workload) -> YamlDocument | None:
    """Return the case of a workload as a document; None where the row has none.

    Raises:
        YamlError: The file cannot be read as data.
    """
    path = case_path(root, workload)
    return workload.own_case or (read_document(path) if path.is_file() else None)


def is_missing_program(root: Path, program: str) -> bool:
    """Return whether a `training_script_path` names a Python file of the project that is not there.

    A command (`nemo llm pretrain`) is looked for by the shell, an absolute path may be one of the
    machines that train, and values of variables and placeholders are not known.
    """
    file = (shlex.split(program) or [""])[0]
    is_ours = file.endswith(".py") and not Path(file).is_absolute() and not set(file) & set("{}$")
    return is_ours and not (root / file).is_file()


def golden_name(environment: str, platform: str) -> str:
    """Return the file name of a golden; the oldest ones name no platform."""
    return "_".join(part for part in (GOLDEN_PREFIX, environment, platform) if part) + ".json"


def golden_paths(root: Path, workload: Workload) -> tuple[Path, ...]:
    """Return where a workload's golden may be: our place, then Megatron-LM's beside the case.

    The first one is where a new golden belongs.
    """
    name = golden_name(workload.environment, workload.platform)
    below = Path(workload.model, workload.test_case, name)
    return root / GOLDENS / below, root / CASES / below


_CASE_KEYS = ("BEFORE_SCRIPT", "ENV_VARS", "MODE", "MODEL_ENV_VARS", "RESUME", "TEST_TYPE")
# Variables of the harness that change what is trained, or what of it counts.
_TRAINED_VARIABLES = ("NVTE_ALLOW_NONDETERMINISTIC_ALGO",)
_LENGTH = 16  # hexadecimal digits


def fingerprint(workload: Workload, case: Mapping[str, JsonValue] | None) -> str:
    """Return 16 hexadecimal digits: the `config_hash` of a golden.

    Args:
        workload: The row.
        case: The content of its `model_config.yaml`; None for a row that has none.
    """
    env = (case or {}).get("ENV_VARS")
    ignored = set(HARNESS_VARIABLES) - set(_TRAINED_VARIABLES)
    known: dict[str, JsonValue] = {
        key: value
        for key, value in (case or {}).items()
        if key in _CASE_KEYS or MODEL_ARGS(key) is not None
    }
    if isinstance(env, dict):
        known["ENV_VARS"] = {name: value for name, value in env.items() if name not in ignored}
    written = workload.written
    row: dict[str, JsonValue] = {
        "checkpoint_load_path": written.checkpoint_load_path,
        "data_path": written.data_path,
        "gpus": written.gpus,
        "nodes": written.nodes,
        "script": written.script,
        "training_script_path": written.training_script_path,
    }
    text = json.dumps([known, row], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]
