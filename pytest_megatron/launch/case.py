"""A test case: what its `model_config.yaml` asks for. The file is read and never written.

Source: Megatron-LM tests/functional_tests/test_cases/*/*/model_config.yaml, d98e8a64dd.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from pytest_megatron.errors import CaseError
from pytest_megatron.files import JsonValue
from pytest_megatron.launch.arguments import Argument
from pytest_megatron.recipe.cases import unknown_keys
from pytest_megatron.yamllines import Document, read_yaml

DEFAULT_TRAIN_ITERS = 100
LIGHTWEIGHT_ITERS = 4
LIGHTWEIGHT_SAVE_INTERVAL = 2
LIGHTWEIGHT_NEMO_STEPS = 2


class TestType(Enum):
    """TEST_TYPE: which phases a case has and what they are compared with."""

    __test__ = False  # the name is Megatron's; pytest must not collect it

    REGULAR = "regular"
    CKPT_RESUME = "ckpt-resume"
    FROZEN_START = "frozen-start"
    FROZEN_RESUME = "frozen-resume"
    CHECKPOINT_CONSISTENCY = "checkpoint-consistency"
    RELEASE = "release"


class Mode(Enum):
    """MODE: what kind of program runs, and so what it measures."""

    PRETRAINING = "pretraining"
    INFERENCE = "inference"
    RL = "rl"


class Evaluation(Enum):
    """TEST_EVALUATION: whether the case is expected to pass."""

    PASS = "pass"  # noqa: S105 - not a password
    XPASS = "xpass"


class Starter(Enum):
    """LAUNCHER: what starts the ranks."""

    TORCHRUN = "torchrun"
    FT_LAUNCHER = "ft_launcher"


_Choice = TypeVar("_Choice", TestType, Mode, Evaluation, Starter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One `model_config.yaml`.

    Attributes:
        path: The file.
        arguments: MODEL_ARGS in the order of the file.
        env: ENV_VARS, as strings.
        metrics: METRICS; None where the file has no such key.
        before_script: Shell to run before the training, or None; likewise `after_script`.
    """

    path: Path
    test_type: TestType
    mode: Mode
    evaluation: Evaluation
    starter: Starter
    arguments: tuple[Argument, ...]
    env: Mapping[str, str]
    metrics: tuple[str, ...] | None
    before_script: str | None
    after_script: str | None

    def argument(self, name: str) -> str | None:
        """Return the text of an argument, the last one where it stands twice; None without it."""
        return next((a.text for a in reversed(self.arguments) if a.name == name), None)

    @property
    def train_iters(self) -> int:
        """Iterations that a full run trains: `--train-iters`, by default 100.

        Raises:
            CaseError: The value is not a positive number.
        """
        if self.argument("--train-iters") is None:
            return DEFAULT_TRAIN_ITERS
        return self._count("--train-iters")

    @property
    def last_iteration(self) -> int:
        """Iteration that a full run ends after.

        Reinforcement learning counts samples, and says when to end by `--exit-interval`.

        Raises:
            CaseError: The value is not a positive number.
        """
        if self.mode is Mode.RL and self.argument("--exit-interval") is not None:
            return self._count("--exit-interval")
        return self.train_iters

    @property
    def precision(self) -> str:
        """What the model computes in: `bf16`, `fp16` or `fp32`."""
        reduced = ("bf16", "fp16")
        return next((name for name in reduced if self.argument(f"--{name}") == "true"), "fp32")

    @property
    def is_nondeterministic(self) -> bool:
        """Whether the case says that two runs of it may differ."""
        switches = ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NON_DETERMINSTIC_RESULTS")
        return any(self.env.get(name) == "1" for name in switches)

    @property
    def is_never_compared(self) -> bool:
        """Whether the case asks for a run without a comparison (SKIP_PYTEST)."""
        return self.env.get("SKIP_PYTEST") == "1"

    @property
    def is_always_lightweight(self) -> bool:
        """Whether the case itself asks for lightweight mode."""
        return self.env.get("ENABLE_LIGHTWEIGHT_MODE", "").lower() == "true"

    def _count(self, name: str) -> int:
        text = self.argument(name) or ""
        if not text.isdecimal() or not int(text):
            line = next(a.line for a in self.arguments if a.name == name)
            raise CaseError(
                f"{self.path}:{line}",
                f"{name} is {text!r}, expected a number of iterations from 1 on",
            )
        return int(text)


def check_mode(case: Case) -> None:
    """Refuse a pair of MODE and TEST_TYPE that has no meaning, so that no typo compares nothing.

    Raises:
        CaseError: It is such a pair.
    """
    if case.mode is Mode.PRETRAINING or case.test_type in (TestType.REGULAR, TestType.FROZEN_START):
        return
    raise CaseError(
        str(case.path),
        f"TEST_TYPE is {case.test_type.value!r} with MODE {case.mode.value!r}, expected one of "
        "frozen-start, regular: such a run has one phase",
    )


def read_case(path: Path) -> Case:
    """Read a test case.

    Raises:
        CaseError: The file is missing, is not YAML, or a value of it has the wrong type or word.
    """
    reader = _Reader(read_yaml(path, error=CaseError))
    return Case(
        path=path,
        test_type=reader.choice("TEST_TYPE", TestType, default=None),
        mode=reader.choice("MODE", Mode, default=Mode.PRETRAINING),
        evaluation=reader.choice("TEST_EVALUATION", Evaluation, default=Evaluation.PASS),
        starter=reader.choice("LAUNCHER", Starter, default=Starter.TORCHRUN),
        arguments=reader.arguments("MODEL_ARGS"),
        env=reader.env("ENV_VARS"),
        metrics=reader.metrics(),
        before_script=reader.script("BEFORE_SCRIPT"),
        after_script=reader.script("AFTER_SCRIPT"),
    )


class _Reader:
    """Takes typed values out of a document; errors name the file and the line."""

    def __init__(self, document: Document) -> None:
        self._document = document
        for finding in unknown_keys(document):
            raise CaseError(f"{finding.file}:{finding.line}", finding.message)

    def choice(self, key: str, choices: type[_Choice], *, default: _Choice | None) -> _Choice:
        value = self._document.value.get(key)
        if value is None and default is not None:
            return default
        for choice in choices:
            if choice.value == value:
                return choice
        words = ", ".join(sorted(choice.value for choice in choices))
        found = "is missing" if value is None else f"is {value!r}"
        raise self._error([key], f"{key} {found}, expected one of {words}")

    def arguments(self, key: str) -> tuple[Argument, ...]:
        return tuple(self._argument(key, name) for name in self._mapping(key))

    def env(self, key: str) -> dict[str, str]:
        found = {}
        for name, value in self._mapping(key).items():
            text = self._document.text_of([key, name])
            if isinstance(value, dict | list) or text is None:
                raise self._error([key, name], f"{key}.{name} is a container, expected one value")
            found[name] = "" if value is None else text
        return found

    def metrics(self) -> tuple[str, ...] | None:
        value = self._document.value.get("METRICS")
        if value is None:
            return () if "METRICS" in self._document.value else None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._error(["METRICS"], f"METRICS is {value!r}, expected a list of metric names")
        return tuple(str(name) for name in value)

    def script(self, key: str) -> str | None:
        value = self._document.value.get(key)
        if value is not None and not isinstance(value, str):
            raise self._error([key], f"{key} is {value!r}, expected the text of a shell script")
        return value

    def _argument(self, key: str, name: str) -> Argument:
        value = self._mapping(key)[name]
        line = self._document.line_of([key, name])
        if isinstance(value, dict):
            raise self._error([key, name], f"{name} is a mapping, expected one value or a list")
        if isinstance(value, list):
            words = [self._document.text_of([key, name, i]) for i in range(len(value))]
            if None in words:
                raise self._error([key, name], f"{name} holds a container, expected plain values")
            return Argument(name=name, text=None, words=tuple(w or "" for w in words), line=line)
        return Argument(
            name=name,
            text=None if value is None else self._document.text_of([key, name]),
            is_text=isinstance(value, str),
            line=line,
        )

    def _mapping(self, key: str) -> dict[str, JsonValue]:
        value = self._document.value.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._error([key], f"{key} is {value!r}, expected a mapping")
        return value

    def _error(self, path: list[str | int], problem: str) -> CaseError:
        return CaseError(self._document.where(path), problem)
