"""The command that does an item again: what of an artifact gets into it, and what does not."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from chosen_runs import chosen_of
from recorded_runs import ROW, TEST, a_row, a_test, execution

from pytest_megatron.base.files import JsonValue
from pytest_megatron.repro.again import Again, Wishes, command_for
from pytest_megatron.repro.choose import Chosen

COMMON = ["py", "-m", "pytest", "-p", "megatron", "--rootdir", ".", "--megatron-run-dir", "new"]
COMMON += ["-o", "megatron_history=off", "--maxfail", "0"]


def made(
    chosen: Chosen, wishes: Wishes | None = None, *before: str, seeded: Collection[str] = ()
) -> Again:
    return command_for(
        chosen,
        wishes or Wishes(),
        before,
        python="py",
        seeded=seeded,
        run_dir="new",
    )


def test_a_test_runs_after_what_ran_before_it_on_as_many_ranks(tmp_path: Path) -> None:
    options: JsonValue = {
        "rank_timeout": 60.0,
        "rank_grace": 10.0,
        "ranks_per_gpu": 4,
        "gang_start": "collect",
    }
    chosen = chosen_of(tmp_path, a_test(), options=options)
    expected = [
        "--megatron-ranks",
        "2",
        "--megatron-device",
        "cpu",
        "--megatron-rank-timeout",
        "60",
        "--megatron-ranks-per-gpu",
        "4",
        "-o",
        "megatron_rank_grace=10",
    ]
    expected += [
        "-o",
        "megatron_gang_start=collect",
    ]
    assert made(chosen, None, "a.py::b").argv == (*COMMON, *expected, "a.py::b", TEST)


def test_a_workload_runs_once_and_is_judged_as_it_was(tmp_path: Path) -> None:
    options: JsonValue = {
        "golden": "refresh",
        "golden_policy": "megatron",
        "lightweight": True,
        "workload_start": "fresh",
    }
    chosen = chosen_of(tmp_path, a_row(), options=options)
    once = ["--megatron-n-repeat", "1", "--megatron-max-attempts", "1", "--megatron-platform=cpu"]
    again = made(chosen, Wishes(num_ranks=1))
    words = (*once, "--megatron-lightweight", "--megatron-golden-policy=megatron")
    assert again.argv == (*COMMON, *words, ROW)
    assert again.left_out == ("'workload_start' is no option that is given back",)  # as there was
    assert again.env == {"PYTEST_MEGATRON_RANKS": "1"}


def test_a_repeat_keeps_its_number_as_its_seed(tmp_path: Path) -> None:
    attempt: JsonValue = {"repeat": 3, "attempt": 1}
    again = made(chosen_of(tmp_path, a_row(attempts=[attempt])))
    assert again.env == {"PYTEST_MEGATRON_REPEAT": "3"}


@pytest.mark.parametrize(
    ("seed", "has_randomly", "expected"),
    [
        ("17", True, ["--randomly-seed=17", "--randomly-dont-reorganize"]),
        ("17", False, []),
        (None, True, ["-p", "no:randomly"]),
        ("1 --basetemp=/", True, ["-p", "no:randomly"]),
    ],
)
def test_pytest_randomly_keeps_its_seed_and_not_its_shuffling(
    tmp_path: Path, seed: str | None, expected: list[str], *, has_randomly: bool
) -> None:
    chosen = chosen_of(tmp_path, a_test(), seeds={"randomly_seed": seed, "PYTHONHASHSEED": "0"})
    again = made(chosen, seeded=["pytest_randomly"] if has_randomly else [])
    assert list(again.argv[-1 - len(expected) : -1]) == expected
    assert again.env == {"PYTHONHASHSEED": "0"}


@pytest.mark.parametrize(
    ("seed", "seeded", "expected"),
    [
        ("17", ["hypothesis"], ["--hypothesis-seed=17"]),
        ("17", [], []),
        (None, ["hypothesis"], []),
        ("-p evil", ["hypothesis"], []),
    ],
)
def test_hypothesis_draws_the_same_examples(
    tmp_path: Path, seed: str | None, seeded: list[str], expected: list[str]
) -> None:
    chosen = chosen_of(tmp_path, a_test(), seeds={"hypothesis_seed": seed})
    found = [word for word in made(chosen, seeded=seeded).argv if "hypothesis" in word]
    assert found == expected


def test_a_test_of_a_worker_of_xdist_runs_in_one_process(tmp_path: Path) -> None:
    directory = "/ci/run/ranks-gw1/attempt_1"
    chosen = chosen_of(tmp_path, a_test(attempts=[{**execution(1), "directory": directory}]))
    assert "-n0" in made(chosen).argv


# What an artifact may not decide: its variables could have the program load what it names.
HOSTILE = {
    "LD_PRELOAD": "/opt/evil.so",
    "PYTHONSTARTUP": "/opt/evil.py",
    "PYTHONPATH": "/opt/evil",
    "PATH": "/opt/evil",
    "NCCL_NET_PLUGIN": "evil",
    "NCCL_TOPO_FILE": "/etc/shadow",
    "CUDA_INJECTION64_PATH": "/opt/evil.so",
    "HF_ENDPOINT": "http://evil",
    "TORCH_EXTENSIONS_DIR": "/opt/evil",
    "NCCL_DEBUG": "INFO\nLD_PRELOAD=x",
    "CUBLAS_LOGDEST_DBG": "victim.txt",
    "UCX_STATS_DEST": "file:victim.txt",
    "UCX_MODULE_DIR": "evil",
    "OMP_TOOL_LIBRARIES": "evil.so",
    "MKL_VERBOSE_OUTPUT_FILE": "victim.txt",
    "NCCL_DEBUG_FILE": "victim.txt",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "victim",
    "NVTE_CUDA_INCLUDE_DIR": "evil",
}
HARMLESS = {"NCCL_ALGO": "Ring", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONHASHSEED": "0"}


def test_variables_that_could_run_code_are_not_set(tmp_path: Path) -> None:
    again = made(chosen_of(tmp_path, a_test(), env={**HOSTILE, **HARMLESS, "WANDB_KEY": "***"}))
    assert again.env == HARMLESS
    told = " ".join(again.left_out)
    assert all(name in told for name in HOSTILE if name not in ("PATH", "PYTHONPATH"))
    assert "WANDB_KEY was set there, to a secret that is not kept; set it yourself" in told
    assert "HF_ENDPOINT=http://evil was set there and is not taken over; --trust takes it" in told


@pytest.mark.parametrize("is_trusted", [False, True])
def test_what_belongs_to_a_shell_is_not_named(tmp_path: Path, *, is_trusted: bool) -> None:
    env: dict[str, JsonValue] = {
        "VIRTUAL_ENV_PROMPT": "(venv) ",
        "PYTHON_HISTORY": "/home/me/.history",
    }
    again = made(chosen_of(tmp_path, a_test(), env=env), Wishes(is_trusted=is_trusted))
    assert (again.env, again.left_out) == ({}, ())


def test_who_trusts_a_run_gets_its_variables_but_those_of_the_machine(tmp_path: Path) -> None:
    chosen = chosen_of(tmp_path, a_test(), env={**HOSTILE, "MY_FLAG": "1"})
    again = made(chosen, Wishes(is_trusted=True))
    assert again.env == {
        name: value
        for name, value in {**HOSTILE, "MY_FLAG": "1"}.items()
        if name not in ("PATH", "PYTHONPATH")
    }


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("rank_timeout", "1", "with a value that it does not take: --rank-timeout: does not take"),
        ("ranks_per_gpu", True, "that it does not take: --ranks-per-gpu: True is not a count"),
        ("gang_start", "fresh", "that it does not take: megatron_gang_start: 'fresh' is unknown"),
        ("lightweight", "yes", "with a value that it does not take: --lightweight: does not take"),
        ("tensor_trace", "full --pdb", "a value that it does not take: --tensor-trace: 'full --p"),
        (
            "signatures",
            ["a.toml,/etc/b"],
            "with a value that it does not take: megatron_signatures: ",
        ),
        ("golden_policy", "../own.toml", "and '../own.toml' is not taken over; --trust takes it"),
        ("golden_policy", "a\x00b", "and 'a\\x00b' is not taken over; --trust takes it over"),
        ("golden_policy", "a***.toml", "with a secret that is not kept; give it yourself"),
    ],
)
def test_an_option_that_is_not_given_back_is_named(
    tmp_path: Path, name: str, value: JsonValue, reason: str
) -> None:
    again = made(chosen_of(tmp_path, a_test(), options={name: value}))
    assert again.argv == made(chosen_of(tmp_path, a_test())).argv
    assert reason in again.left_out[0]
    is_setting = name in ("gang_start", "signatures")
    name = f"megatron_{name}" if is_setting else f"--{name.replace('_', '-')}"
    assert again.left_out[0].startswith(f"{name} was given there")


@pytest.mark.parametrize(
    "name", ["audit", "stress", "pdb", "p", "run_dir", "executor", "golden_reason", "--pdb"]
)
def test_no_other_option_is_given_back(tmp_path: Path, name: str) -> None:
    again = made(chosen_of(tmp_path, a_test(), options={name: "evil"}), Wishes(is_trusted=True))
    assert again.argv == made(chosen_of(tmp_path, a_test())).argv
    assert again.left_out == (f"{name!r} is no option that is given back",)


@pytest.mark.parametrize("record", [a_test(), a_row()])
def test_what_was_given_is_given_back_whole(tmp_path: Path, record: dict[str, JsonValue]) -> None:
    options: JsonValue = {
        "rank_timeout": 0.5,
        "tensor_trace": "full",
        "leaks": True,
        "signatures": ["a.toml", "b.toml"],
    }
    words = made(chosen_of(tmp_path, record, options=options)).argv
    given = ["--megatron-rank-timeout", "0.5"]
    given += ["--megatron-tensor-trace", "full", "--megatron-leaks"]
    given += ["-o", "megatron_signatures=a.toml,b.toml"]
    assert list(words[-1 - len(given) : -1]) == given


def test_a_policy_and_signatures_of_the_project_are_those_of_the_checkout(tmp_path: Path) -> None:
    options: JsonValue = {"golden_policy": "ci/own.toml", "signatures": ["ci/own.toml", "../x"]}
    words = made(chosen_of(tmp_path, a_row(), options=options)).argv
    assert "--megatron-golden-policy=ci/own.toml" in words
    assert [word for word in words if "signatures" in word] == ["megatron_signatures=ci/own.toml"]


def test_a_line_for_a_shell_is_quoted(tmp_path: Path) -> None:
    name = "test_a.py::test_x[$(touch pwned) `id` ; '\"]"
    chosen = replace(chosen_of(tmp_path, a_test(), env={"OMP_SCHEDULE": "$(id)"}), node_id=name)
    again = made(chosen)
    assert shlex.split(again.line) == ["OMP_SCHEDULE=$(id)", *again.argv]
