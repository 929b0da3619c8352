"""What is wrong in a `model_config.yaml`, and whether it compares metrics at all. Pure.

Reads only what lint needs; turning a case into a command is `launch`'s.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from pytest_megatron.files import JsonValue
from pytest_megatron.recipe.findings import RecipeFinding, RecipeSeverity
from pytest_megatron.recipe.vocabulary import nearest
from pytest_megatron.yamllines import YamlDocument

# Source: Megatron-LM tests/functional_tests/shell_test_utils/run_ci_test.sh, d98e8a64dd
KNOWN_WORDS = {
    "TEST_TYPE": (
        *("checkpoint-consistency", "ckpt-resume", "frozen-resume"),
        *("frozen-start", "regular", "release"),
    ),
    "MODE": ("inference", "pretraining", "rl"),
    "TEST_EVALUATION": ("pass", "xpass"),
    "LAUNCHER": ("ft_launcher", "torchrun"),
}
KNOWN_KEYS = (
    *("AFTER_SCRIPT", "BASE_MODEL_ARGS", "BEFORE_SCRIPT", "ENV_VARS", "LAUNCHER", "METRICS"),
    *("EXPECTED_FAILURE", "GRADIENT_TOLERANCE"),  # ours
    *("MODE", "MODEL_ARGS", "MODEL_ENV_VARS", "TEST_EVALUATION", "TEST_TYPE"),
    "THROUGHPUT_TEST_PARAMS",
)
# Names in ENV_VARS that the harness itself reads; the second is misspelt there, for good.
HARNESS_VARIABLES = (
    *("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NON_DETERMINSTIC_RESULTS", "SKIP_PYTEST", "N_REPEAT"),
    *("ENABLE_LIGHTWEIGHT_MODE", "THROUGHPUT_START_STEP"),
)
MODEL_ARGS = re.compile(r"MODEL_ARGS(_[1-9]\d*)?").fullmatch
_NUMBERED = re.compile(r"MODEL_ARGS_([1-9]\d*)").fullmatch
# Which MODEL_ARGS_<n> a TEST_TYPE reads; those that train once read none.
_ONE_START = ("frozen-start", "regular")
_MANY_STARTS = tuple(w for w in KNOWN_WORDS["TEST_TYPE"] if w not in _ONE_START)
_PHASES = {"ckpt-resume": 2, "frozen-resume": 2}
_SIMILAR = 0.85
_MAPPINGS = ("ENV_VARS", "MODEL_ENV_VARS", "THROUGHPUT_TEST_PARAMS")
_TEXTS = ("AFTER_SCRIPT", "BEFORE_SCRIPT", "EXPECTED_FAILURE")
_MOST_SHOWN = 100


def check_case(document: YamlDocument) -> Iterator[RecipeFinding]:
    """Yield what is wrong in a case."""
    for twin in document.duplicates:
        message = f"key {twin.key!r} is also on line {twin.first_line}, this one counts; remove one"
        yield RecipeFinding(
            file=document.file,
            line=twin.second_line,
            rule="case-duplicate-key",
            message=message,
            severity=RecipeSeverity.WARNING,
        )
    yield from unknown_keys(document)
    yield from wrong_types(document)
    yield from _unknown_words(document)
    yield from phase_problems(document)
    yield from _unread_variables(document)
    yield from _similar_variables(document)


def compares_metrics(document: YamlDocument) -> bool:
    """Whether a run of the case is compared with a golden file.

    It is not where the case says SKIP_PYTEST, is always lightweight, is expected to fail, checks
    gradients only, or is one of the pairs of MODE and TEST_TYPE that are refused.
    """
    env = document.value.get("ENV_VARS")
    env = env if isinstance(env, dict) else {}
    if str(env.get("SKIP_PYTEST")) == "1":
        return False
    if str(env.get("ENABLE_LIGHTWEIGHT_MODE")).lower() == "true":
        return False
    if document.value.get("TEST_EVALUATION") == "xpass":
        return False
    test_type = document.value.get("TEST_TYPE")
    if document.value.get("MODE", "pretraining") == "pretraining":
        return test_type != "checkpoint-consistency"
    return test_type in ("frozen-start", "regular")


def starts_frozen(document: YamlDocument) -> bool:
    """Whether a run of the case starts from a checkpoint that was made before."""
    return document.value.get("TEST_TYPE") in ("frozen-resume", "frozen-start")


def compared_metrics(document: YamlDocument) -> tuple[str, ...]:
    """Return the METRICS that a case names; none where it names none, or compares nothing."""
    named = document.value.get("METRICS")
    if not isinstance(named, list) or not compares_metrics(document):
        return ()
    return tuple(name for name in named if isinstance(name, str))


def last_step(document: YamlDocument) -> int | None:
    """Return the iteration at which a training of the case ends; None where it does not say so."""
    arguments = document.value.get("MODEL_ARGS")
    if not isinstance(arguments, dict) or not compares_metrics(document):
        return None
    counts = (arguments.get("--train-iters"), arguments.get("--exit-interval"))
    return min((c for c in counts if isinstance(c, int) and c > 0), default=None)


def _finding(
    document: YamlDocument, path: tuple[str, ...], rule: str, message: str
) -> RecipeFinding:
    return RecipeFinding(
        file=document.file, line=document.line_of(path), rule=rule, message=message
    )


def unknown_keys(document: YamlDocument) -> Iterator[RecipeFinding]:
    """Yield the top-level keys that nothing reads."""
    for key in document.value:
        if key not in KNOWN_KEYS and not MODEL_ARGS(key):
            message = f"unknown key {key!r}, nothing reads it" + nearest(key, KNOWN_KEYS)
            yield _finding(document, (key,), "case-unknown-key", message)


def wrong_types(document: YamlDocument) -> Iterator[RecipeFinding]:
    """Yield the keys whose value is not of the kind that a training is made from."""
    for key, value in document.value.items():
        expected = _expected_type(key, value)
        if expected is not None:
            message = f"{key} is {_shown(value)}, expected {expected}"
            yield _finding(document, (key,), "case-type", message)


def _expected_type(key: str, value: JsonValue) -> str | None:
    """Return what a value should have been; None where it is that, or there is none."""
    if value is None:
        return None
    if key == "METRICS":
        is_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
        return None if is_names else "a list of metric names" + _as_list(value)
    if key in _MAPPINGS or MODEL_ARGS(key):
        return None if isinstance(value, dict) else "a mapping"
    if key in _TEXTS:
        return None if isinstance(value, str) else "a text"
    if key == "GRADIENT_TOLERANCE":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_fraction = is_number and 0 <= float(str(value)) < 1
        return None if is_fraction else "a number from 0 to below 1"
    return None


def _as_list(value: JsonValue) -> str:
    """Return how to write the one name that stands where a list of them belongs."""
    return f"; write [{value}]" if isinstance(value, str) and value.strip() else ""


def _shown(value: JsonValue) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def phase_problems(document: YamlDocument) -> Iterator[RecipeFinding]:
    """Yield what a case says that its TEST_TYPE, MODE or TEST_EVALUATION makes void."""
    value = document.value
    test_type, mode = value.get("TEST_TYPE"), value.get("MODE", "pretraining")
    if test_type not in KNOWN_WORDS["TEST_TYPE"]:
        return  # that is what has to be said first
    if mode in ("inference", "rl") and test_type in _MANY_STARTS:
        message = f"TEST_TYPE {test_type} does not go with MODE {mode}, expected one of "
        message += ", ".join(_ONE_START)
        yield _finding(document, ("TEST_TYPE",), "case-void", message)
    for key in value:
        found = _NUMBERED(key)
        if found is None or test_type == "checkpoint-consistency":
            continue
        if not 1 < int(found[1]) <= _PHASES.get(str(test_type), 1):
            message = f"TEST_TYPE {test_type} never runs with {key}; remove it, or change TEST_TYPE"
            yield _finding(document, (key,), "case-void", message)
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
            yield _finding(document, (key,), "case-void", message)


def _unread_variables(document: YamlDocument) -> Iterator[RecipeFinding]:
    """Yield parts of MODEL_ENV_VARS that belong to no MODEL_ARGS; Megatron-LM has such."""
    own = document.value.get("MODEL_ENV_VARS")
    for key in own if isinstance(own, dict) else ():
        if key not in document.value:
            yield RecipeFinding(
                file=document.file,
                line=document.line_of(("MODEL_ENV_VARS", key)),
                rule="case-void",
                message=f"MODEL_ENV_VARS: the case has no {key!r}, nothing reads this",
                severity=RecipeSeverity.WARNING,
            )


def _unknown_words(document: YamlDocument) -> Iterator[RecipeFinding]:
    for key, choices in KNOWN_WORDS.items():
        value: JsonValue = document.value.get(key, choices[0])
        if value not in choices:
            message = f"{key}: unknown value {value!r}, expected one of {', '.join(choices)}"
            message += nearest(str(value), choices)
            yield _finding(document, (key,), "case-unknown-word", message)
    if "TEST_TYPE" not in document.value:
        choices = KNOWN_WORDS["TEST_TYPE"]
        message = f"TEST_TYPE: is missing, expected one of {', '.join(choices)}"
        yield _finding(document, (), "case-unknown-word", message)


def _similar_variables(document: YamlDocument) -> Iterator[RecipeFinding]:
    env = document.value.get("ENV_VARS")
    for name in env if isinstance(env, dict) else ():
        close = difflib.get_close_matches(name, HARNESS_VARIABLES, 1, _SIMILAR)
        if close and name not in HARNESS_VARIABLES:
            message = f"ENV_VARS: {name!r} has no effect on the harness; did you mean {close[0]!r}?"
            yield _finding(document, ("ENV_VARS", name), "case-unknown-variable", message)
