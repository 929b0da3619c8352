"""A test case: what its `model_config.yaml` asks for. The file is read and never written.

Source: Megatron-LM tests/functional_tests/test_cases/*/*/model_config.yaml, d98e8a64dd.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TypeVar

from pytest_megatron.errors import CaseError
from pytest_megatron.files import JsonValue
from pytest_megatron.launch.arguments import Argument
from pytest_megatron.recipe.cases import MODEL_ARGS, phase_problems, unknown_keys, wrong_types
from pytest_megatron.recipe.vocabulary import nearest
from pytest_megatron.yamllines import YamlDocument, read_yaml

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


class CaseMode(Enum):
    """MODE: what kind of program runs, and so what it measures."""

    PRETRAINING = "pretraining"
    INFERENCE = "inference"
    RL = "rl"


class Evaluation(Enum):
    """TEST_EVALUATION: whether the case is expected to pass."""

    PASS = "pass"  # noqa: S105 - not a password
    XPASS = "xpass"


class Launcher(Enum):
    """LAUNCHER: what starts the ranks."""

    TORCHRUN = "torchrun"
    FT_LAUNCHER = "ft_launcher"


_Choice = TypeVar("_Choice", TestType, CaseMode, Evaluation, Launcher)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One `MODEL_ARGS*` key: what one start of the program is given.

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
        before_script: Shell to run before the training, or None; likewise `after_script`.
        expected_failure: Regular expression that the cause of a case with `xpass` must match, or
            None for any failure.
        gradient_tolerance: GRADIENT_TOLERANCE, or None for what follows from the precision.
        env_lines: Where the names of `env` stand in the file, from 1.
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
    env_lines: Mapping[str, int] = field(default_factory=dict)

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


def read_case(path: Path) -> WorkloadCase:
    """Read a test case.

    Raises:
        CaseError: The file is missing, is not YAML, or a value of it has the wrong type or word.
    """
    reader = _CaseReader(read_yaml(path, error=CaseError))
    reader.check_phases()
    return WorkloadCase(
        path=path,
        test_type=reader.choice("TEST_TYPE", TestType, default=None),
        mode=reader.choice("MODE", CaseMode, default=CaseMode.PRETRAINING),
        evaluation=reader.choice("TEST_EVALUATION", Evaluation, default=Evaluation.PASS),
        starter=reader.choice("LAUNCHER", Launcher, default=Launcher.TORCHRUN),
        variants=reader.variants(),
        env=reader.env("ENV_VARS"),
        metrics=reader.metrics(),
        before_script=reader.script("BEFORE_SCRIPT"),
        after_script=reader.script("AFTER_SCRIPT"),
        expected_failure=reader.pattern("EXPECTED_FAILURE"),
        gradient_tolerance=reader.tolerance("GRADIENT_TOLERANCE"),
        env_lines=reader.lines("ENV_VARS"),
    )


class _CaseReader:
    """Takes typed values out of a document; errors name the file and the line."""

    def __init__(self, document: YamlDocument) -> None:
        self._document = document
        for finding in (*unknown_keys(document), *wrong_types(document)):
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
        hint = nearest(str(value), [choice.value for choice in choices]) if value else ""
        raise self._error([key], f"{key} {found}, expected one of {words}{hint}")

    def check_phases(self) -> None:
        """Refuse words and keys that would silently take a check away."""
        for finding in phase_problems(self._document):
            raise CaseError(f"{finding.file}:{finding.line}", finding.message)

    def variants(self) -> tuple[Variant, ...]:
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

    def env(self, key: str) -> dict[str, str]:
        return self._texts([key], self._mapping(key))

    def lines(self, key: str) -> dict[str, int]:
        return {name: self._document.line_of([key, name]) for name in self._mapping(key)}

    def _variant_env(self, key: str) -> dict[str, str]:
        own = self._mapping("MODEL_ENV_VARS").get(key) or {}
        path: list[str | int] = ["MODEL_ENV_VARS", key]
        if not isinstance(own, dict):
            raise self._error(path, f"MODEL_ENV_VARS.{key} is {own!r}, expected a mapping")
        found = self._texts(path, own)
        num_ranks = found.get("GPUS_PER_NODE", "1")
        if not num_ranks.isdecimal() or not int(num_ranks):
            raise self._error(
                [*path, "GPUS_PER_NODE"],
                f"GPUS_PER_NODE is {num_ranks!r}, expected a number of ranks from 1 on",
            )
        return found

    def _texts(self, path: list[str | int], values: Mapping[str, JsonValue]) -> dict[str, str]:
        found = {}
        for name, value in values.items():
            text = self._document.text_of([*path, name])
            if isinstance(value, dict | list) or text is None:
                where = ".".join(str(step) for step in [*path, name])
                raise self._error([*path, name], f"{where} is a container, expected one value")
            found[name] = "" if value is None else text
        return found

    def metrics(self) -> tuple[str, ...] | None:
        value = self._document.value.get("METRICS")
        if value is None:
            return () if "METRICS" in self._document.value else None
        assert isinstance(value, list)
        return tuple(str(name) for name in value)

    def script(self, key: str) -> str | None:
        value = self._document.value.get(key)
        assert value is None or isinstance(value, str)
        return value

    def pattern(self, key: str) -> str | None:
        value = self.script(key)
        try:
            re.compile(value or "")
        except re.error as error:
            raise self._error(
                [key], f"{key} is {value!r}, no regular expression: {error}"
            ) from None
        return value

    def tolerance(self, key: str) -> float | None:
        value = self._document.value.get(key)
        assert value is None or isinstance(value, int | float)
        return None if value is None else float(value)

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
        assert value is None or isinstance(value, dict)
        return value or {}

    def _error(self, path: list[str | int], problem: str) -> CaseError:
        return CaseError(self._document.where(path), problem)
