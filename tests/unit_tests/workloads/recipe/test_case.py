from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.errors import CaseError
from pytest_megatron.workloads.recipe.case import (
    CaseMode,
    Evaluation,
    Launcher,
    TestType,
    WorkloadCase,
    read_case,
)

HEAD = "TEST_TYPE: regular\n"


def read(tmp_path: Path, text: str) -> WorkloadCase:
    (tmp_path / "model_config.yaml").write_text(text)
    return read_case(tmp_path / "model_config.yaml")


def test_a_case_has_megatrons_defaults(tmp_path: Path) -> None:
    case = read(tmp_path, HEAD)
    assert (case.test_type, case.mode, case.evaluation, case.starter) == (
        TestType.REGULAR,
        CaseMode.PRETRAINING,
        Evaluation.PASS,
        Launcher.TORCHRUN,
    )
    assert (case.arguments, case.env, case.metrics, case.train_iters) == ((), {}, None, 100)


def test_values_keep_their_spelling_and_their_order(tmp_path: Path) -> None:
    text = "MODEL_ARGS:\n  --b: 1.0e-5\n  --a: true\n  --c: [x, 1]\n  --d: 'true'\n  --e:\n"
    case = read(tmp_path, HEAD + text)
    assert [(a.name, a.text, a.words, a.is_text, a.line) for a in case.arguments] == [
        ("--b", "1.0e-5", None, False, 3),
        ("--a", "true", None, False, 4),
        ("--c", None, ("x", "1"), False, 5),
        ("--d", "true", None, True, 6),
        ("--e", None, None, False, 7),
    ]


def test_of_a_key_that_stands_twice_the_last_one_counts(tmp_path: Path) -> None:
    case = read(tmp_path, HEAD + "MODEL_ARGS:\n  --train-iters: 5\n  --train-iters: 7\n")
    assert case.train_iters == 7


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ("{}", (False, True, False)),
        ("{NON_DETERMINSTIC_RESULTS: 1}", (True, True, False)),
        ("{NVTE_ALLOW_NONDETERMINISTIC_ALGO: 1}", (True, True, False)),
        ("{NVTE_ALLOW_NONDETERMINISTIC_ALGO: 0}", (False, True, False)),
        ("{SKIP_PYTEST: 1}", (False, False, False)),
        ("{ENABLE_LIGHTWEIGHT_MODE: true}", (False, False, True)),
        ("{ENABLE_LIGHTWEIGHT_MODE: 'True'}", (False, False, True)),
    ],
)
def test_a_case_steers_the_harness_by_its_variables(
    tmp_path: Path, env: str, expected: tuple[bool, bool, bool]
) -> None:
    case = read(tmp_path, f"{HEAD}ENV_VARS: {env}\n")
    found = (case.is_nondeterministic, case.is_compared, case.is_always_lightweight)
    assert found == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param(
            "TEST_TYPE: regulr\n",
            ":1: TEST_TYPE: found 'regulr', expected one of checkpoint-consistency, ckpt-resume, "
            "frozen-resume, frozen-start, regular, release; did you mean 'regular'?",
            id="unknown TEST_TYPE",
        ),
        pytest.param(
            "MODEL_ARGS: {}\n",
            ":1: TEST_TYPE: is missing, expected one of checkpoint-consistency, ckpt-resume, "
            "frozen-resume, frozen-start, regular, release; add it",
            id="no TEST_TYPE",
        ),
        pytest.param(
            HEAD + "MODE: pretrainning\n",
            ":2: MODE: found 'pretrainning', expected one of inference, pretraining, rl; "
            "did you mean 'pretraining'?",
            id="unknown MODE",
        ),
        pytest.param(
            HEAD + "MODEL_ARG: {}\n",
            ":2: MODEL_ARG: unknown key, expected one of AFTER_SCRIPT, BASE_MODEL_ARGS, "
            "BEFORE_SCRIPT, ENV_VARS, EXIT_POLICY, EXPECTED_FAILURE, GRADIENT_TOLERANCE, "
            "LAST_STEP, LAUNCHER, METRICS, METRICS_FROM, MODE, MODEL_ARGS, "
            "MODEL_ENV_VARS, RESUME, STOP, TEST_EVALUATION, TEST_TYPE, THROUGHPUT_TEST_PARAMS; "
            "did you mean 'MODEL_ARGS'?",
            id="unknown key",
        ),
        pytest.param(
            HEAD + "MODEL_ARGS: [a]\n",
            ":2: MODEL_ARGS: found ['a'], expected a mapping",
            id="MODEL_ARGS as a list",
        ),
        pytest.param(
            HEAD + "MODEL_ARGS:\n  --a: 1\n  --b: {c: 1}\n",
            ":4: --b is a mapping, expected one value or a list",
            id="a mapping as a value",
        ),
        pytest.param(
            HEAD + "ENV_VARS:\n  A: [1]\n",
            ":3: ENV_VARS.A is a container, expected one value",
            id="a list as a variable",
        ),
        pytest.param(
            HEAD + "METRICS: lm loss\n",
            ":2: METRICS: found 'lm loss', expected a list; write [lm loss]",
            id="METRICS as a word",
        ),
        pytest.param(
            HEAD + "METRICS_FROM: {source: csv}\n",
            ":2: METRICS_FROM: is there and METRICS is not, expected the names of metrics to "
            "compare",
            id="a source without names",
        ),
        pytest.param(
            HEAD + "METRICS: [loss]\nMETRICS_FROM: {source: printed}\n",
            ":3: METRICS_FROM: pattern is missing, expected one of megatron, nanotron, nemo, "
            "torchtitan, nanogpt, deepspeed, hf_trainer or a pattern",
            id="printed lines without a pattern",
        ),
        pytest.param(
            "TEST_TYPE: ckpt-resume\nRESUME: {save: '--out {dir}', load: '--in {dir}', at: 5}\n"
            "METRICS: [loss]\nMETRICS_FROM: {source: trainer_state}\n",
            ":4: METRICS_FROM: source trainer_state of a resumed training has the steps before as "
            "well, or is counted anew, expected steps that go on; name another source, such as "
            "tensorboard",
            id="a history of all steps for a resume",
        ),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(CaseError) as caught:
        read(tmp_path, text)
    assert str(caught.value) == f"{tmp_path / 'model_config.yaml'}{error}"


@pytest.mark.parametrize("text", ["TEST_TYPE: [regular\n", "- a\n", "", "\x00"])
def test_a_file_that_is_no_yaml_mapping_is_one_clear_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(CaseError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "model_config.yaml"))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CaseError) as caught:
        read_case(tmp_path / "model_config.yaml")
    assert str(caught.value).startswith(f"{tmp_path / 'model_config.yaml'}: cannot be read: ")


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_train_iters_is_a_count(tmp_path: Path, text: str) -> None:
    case = read(tmp_path, f"{HEAD}MODEL_ARGS:\n  --train-iters: {text}\n")
    with pytest.raises(CaseError, match=r"model_config\.yaml:3: --train-iters is .*from 1 on"):
        _ = case.train_iters
