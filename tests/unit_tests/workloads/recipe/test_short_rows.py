"""Rows in the short form: a command line becomes a workload and its case."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_texts import read

from pytest_megatron.workloads.recipe.case import (
    Launcher,
    Resume,
    TestType,
    case_of,
    fingerprint,
    golden_paths,
)
from pytest_megatron.workloads.recipe.lint import lint_recipes
from pytest_megatron.workloads.recipe.load import read_recipe
from pytest_megatron.workloads.recipe.model import Vocabulary, Workload, select
from pytest_megatron.workloads.training.checks.check import lint_row


def rows(text: str) -> tuple[Workload, ...]:
    found = read(text)
    assert found.findings == ()
    return found.workloads


def row(keys: str) -> Workload:
    (found,) = rows("rows:\n  - name: a\n" + "".join(f"    {line}\n" for line in keys.split("\n")))
    return found


def test_a_name_and_a_command_are_a_workload() -> None:
    found = row("command: python -u train.py --lr 1.0e-3 'two words'")
    assert found.item_name == "a[dev-cpu]"
    assert found.training_script_path == "train.py --lr 1.0e-3 'two words'"
    assert (found.gpus, found.nodes, found.cadence) == (1, 1, ("pr", "nightly", "mergegroup"))
    assert golden_paths(Path(), found)[0] == Path("golden_values/r/a/golden_values_dev_cpu.json")
    case = case_of(Path(), found)
    assert (case.test_type, case.starter) == (TestType.REGULAR, Launcher.NONE)
    assert (case.arguments, case.env, case.metrics, case.last_step) == ((), {}, None, None)


def test_all_keys_of_a_row_are_those_of_a_spec_and_of_a_case() -> None:
    found = row(
        "command: [trl, sft, --max_steps, 20, --lr, 1.0e-3]\n"
        "env: {OUT: '${TENSORBOARD_PATH}', N: 1.50, FLAG: true}\n"
        "last_step: 20\n"
        "stop: --max_steps {steps}\n"
        "metrics: [loss]\n"
        "resume: {save: '--out {dir} --every {at}', load: '--from {dir}/step-{at}', at: 10}\n"
        "compare: {loss: {band: 1.0e-3}}\n"
        "deterministic: false\n"
        "time_limit: 60\n"
        "tag: smoke"
    )
    assert found.training_script_path == "trl sft --max_steps 20 --lr 1.0e-3"
    assert (found.time_limit_s, found.tag) == (60, "smoke")
    assert found.limits == {"loss": {"band": 0.001}}
    case = case_of(Path(), found)
    assert case.env == {
        "OUT": "${TENSORBOARD_PATH}",
        "N": "1.50",
        "FLAG": "true",
        "NON_DETERMINSTIC_RESULTS": "1",
    }
    assert case.env_lines["OUT"] == 4
    assert case.is_nondeterministic
    assert (case.metrics, case.last_step, case.stop) == (("loss",), 20, "--max_steps {steps}")
    assert case.test_type is TestType.CKPT_RESUME
    assert case.resume == Resume(
        at=10, save="--out {dir} --every {at}", load="--from {dir}/step-{at}"
    )
    assert case.resume.words(case.resume.load, "/c") == ("--from", "/c/step-10")


@pytest.mark.parametrize(
    ("keys", "program", "starter", "shape"),
    [
        pytest.param(
            "command: torchrun --standalone --nproc_per_node=2 --nnodes 3 train.py --standalone",
            "train.py --standalone",
            Launcher.TORCHRUN,
            (2, 3),
            id="torchrun",
        ),
        pytest.param(
            "command: python3 -m pkg.train\nranks: 2",
            "-m pkg.train",
            Launcher.TORCHRUN,
            (2, 1),
            id="ranks",
        ),
        pytest.param(
            "command: torchrun --nproc-per-node 2 train.py\nranks: none\ngpus: 2",
            "torchrun --nproc-per-node 2 train.py",
            Launcher.NONE,
            (2, 1),
            id="its own torchrun",
        ),
        pytest.param(
            "command: accelerate launch --num_processes=2 train.py",
            "accelerate launch --num_processes=2 train.py",
            Launcher.NONE,
            (2, 1),
            id="accelerate",
        ),
        pytest.param(
            "command: deepspeed --num_accelerators 4 train.py",
            "deepspeed --num_accelerators 4 train.py",
            Launcher.NONE,
            (4, 1),
            id="deepspeed",
        ),
        pytest.param(
            "command: /venv/bin/python train.py",
            "/venv/bin/python train.py",
            Launcher.NONE,
            (1, 1),
            id="another interpreter",
        ),
    ],
)
def test_a_launcher_in_the_command_says_how_many_ranks_there_are(
    keys: str, program: str, starter: Launcher, shape: tuple[int, int]
) -> None:
    found = row(keys)
    assert found.training_script_path == program
    assert case_of(Path(), found).starter is starter
    assert (found.gpus, found.nodes) == shape


def test_variables_before_the_command_are_set() -> None:
    case = case_of(Path(), row("command: A=1 B='x y' python train.py c=2\nenv: {B: z}"))
    assert case.env == {"A": "1", "B": "z"}


def test_each_platform_and_scope_has_its_item() -> None:
    found = rows(
        "model: mine\nrows:\n"
        "  - {name: a, command: x, platforms: [cpu, dgx_h100], scope: [L0, nightly]}\n"
    )
    assert [one.item_name for one in found] == [
        *("a[dev-cpu-L0]", "a[dev-dgx_h100-L0]", "a[dev-cpu-L2]", "a[dev-dgx_h100-L2]"),
    ]
    assert {one.model for one in found} == {"mine"}


def test_what_changes_the_training_changes_the_fingerprint() -> None:
    texts = ("command: x", "command: x --a", "command: x\nenv: {A: 1}", "command: x\nlast_step: 2")
    found = [fingerprint(one, one.own_case.value) for one in map(row, texts) if one.own_case]
    assert len(set(found)) == 3
    assert found[0] == found[3]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        pytest.param("comand: x", ":3: rows[0].comand: unknown key, expected one of "),
        pytest.param(
            "command: a && b", ":3: command: has '&&', and no shell runs it, expected one command; "
        ),
        pytest.param(
            "command: torchrun --nproc-per-node gpu x.py",
            ":3: command: --nproc-per-node is 'gpu', expected a number; leave it out and write "
            "ranks",
        ),
        pytest.param(
            "command: torchrun --nproc-per-node 2 x.py\nranks: 4",
            ":4: ranks: is 4, and the command starts 2 on a node; change one",
        ),
        pytest.param(
            "command: x\nnodes: 2",
            ":4: nodes: a program without ranks has one; give ranks a number",
        ),
        pytest.param(
            "command: x\nranks: 2\ngpus: 2",
            ":5: gpus: each rank has one of its own; remove it",
        ),
        pytest.param(
            "command: x\nresume: {save: --out, load: x, at: 1}",
            ":4: rows[0].resume.save: found '--out', expected words with {dir} in them: attempts "
            "must not share a directory",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_told_with_line_and_remedy(keys: str, problem: str) -> None:
    text = "rows:\n  - name: a\n" + "".join(f"    {line}\n" for line in keys.split("\n"))
    (finding,) = read(text).findings
    assert str(finding).startswith(f"r.yaml{problem}")


def test_a_name_is_that_of_one_row() -> None:
    found = read("rows:\n  - {name: a, command: x}\n  - {name: a, command: y}\n")
    assert [str(finding) for finding in found.findings] == [
        "r.yaml:3: name: 'a' is also the row of line 2; expected one row of a name; change one"
    ]
    assert len(found.workloads) == 1


def test_rows_share_nothing() -> None:
    text = "rows:\n  - {name: a, command: x, tag: t}\n  - {name: b, command: y, ranks: 2}\n"
    found = [(one.training_script_path, one.gpus, one.tag) for one in rows(text)]
    assert found == [("x", 1, "t"), ("y", 2, None)]


def test_a_row_without_a_scope_is_in_each() -> None:
    found = rows("rows:\n  - {name: a, command: x}\n  - {name: b, command: x, scope: L0}\n")
    for scope, names in (("L0", ["a", "b"]), ("nightly", ["a"])):
        selected = select(found, {"scope": (scope,)}, Vocabulary())
        assert [one.test_case for one in selected] == names


def test_a_program_that_is_not_there_is_found_at_its_row(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "rows:\n  - {name: a, command: python trian.py --x 1, compare: none}\n"
        "  - {name: b, command: trl sft, compare: none}\n"
    )
    (found,) = lint_recipes([tmp_path / "r.yaml"], root=tmp_path)
    assert found.line == 2
    assert found.message == (
        "'a' trains with trian.py, which is not there; write it, or change command, which counts "
        "from the project's root"
    )


def test_a_wrong_limit_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "rows:\n  - name: a\n    command: x\n    compare: {loss: {peak: 1.0}}\n"
    )
    (row,) = read_recipe(tmp_path / "r.yaml").workloads
    (found,) = lint_row(row, case_of(tmp_path, row))
    assert found.is_error
    assert found.line == 2
    assert found.message.startswith("compare.loss: 'peak' is no limit of it")


def test_both_profiles_read_the_short_form() -> None:
    text = "rows:\n  - {name: a, command: x}\n"
    found = (*read(text, "compat").workloads, *read(text).workloads)
    assert [one.item_name for one in found] == ["a[dev-cpu]"] * 2
