"""Launchers in shell text and in steps of CI: where they stand, and what stands for them.

Commands have the forms of those in Megatron-LM's run_ci_test.sh, Megatron Bridge's launch scripts,
torchtitan's and mpi-pytest's workflows, torch-harmonics' run_tests.sh, ao's, apex's and ignite's
scripts.
"""

from __future__ import annotations

import pytest

from pytest_megatron.adopt.advise import command_for
from pytest_megatron.adopt.find import launched_in_script, launched_in_yaml
from pytest_megatron.adopt.launch import is_test_path
from pytest_megatron.adopt.shell import read_shell, unquote


def commands(text: str, *, is_makefile: bool = False) -> list[str]:
    return [command_for(one) for one in launched_in_script(text, is_makefile=is_makefile)]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("torchrun --nproc-per-node 2 -m pytest tests", "pytest -p megatron --ranks 2 tests"),
        (
            "CI=1 torchrun --nproc_per_node=$NGPU --local-ranks-filter=0 -m pytest a.py -s -v",
            'CI=1 pytest -p megatron --ranks "$NGPU" a.py -s -v',
        ),
        (
            (
                "uv run python -m torch.distributed.run --nproc_per_node=2 -m coverage run "
                '--data-file="${ROOT}/.coverage" --source="${ROOT}" -m pytest -vs -x t'
            ),
            'pytest -p megatron --ranks 2 --cov="${ROOT}" -vs -x t',
        ),
        ("torchrun --nproc-per-node gpu -m pytest t", "pytest -p megatron --gpus all t"),
        (
            "torchrun --nnodes 2 --nproc-per-node 8 -m pytest t",
            "pytest -p megatron --ranks 8 --nnodes 2 --node-rank I --rdzv-endpoint HOST:PORT t",
        ),
        ("accelerate launch --num_processes 4 -m pytest t", "pytest -p megatron --ranks 4 t"),
        (
            "mpirun -n 3 -mca x 0 python -m pytest t -k 'not a'",
            "pytest -p megatron --ranks 3 t -k 'not a'",
        ),
        (
            "pytest --dist=each --tx 4*popen//python=python t -v",
            "pytest -p megatron --ranks 4 t -v",
        ),
        ("torchrun -m pytest t  # all of them", "pytest -p megatron --ranks N t"),
        (
            "torchrun --nproc-per-node 2 -m pytest t > log 2>&1 || exit 1",
            "pytest -p megatron --ranks 2 t",
        ),
        ("time horovodrun -np 2 pytest t", "pytest -p megatron --ranks 2 t"),
    ],
)
def test_a_launched_pytest_has_one_command(text: str, command: str) -> None:
    assert commands(text) == [command]


def test_the_line_is_that_of_the_launcher() -> None:
    text = "set -e\nexport A=1\nA=2 \\\n  torchrun --nproc-per-node 2 \\\n  -m pytest \\\n  tests\n"
    assert [one.line for one in launched_in_script(text, is_makefile=False)] == [3]


def test_variables_of_the_script_are_replaced() -> None:
    text = (
        "ARGS=(\n  --nproc_per_node 8\n  --nnodes 1\n)\n"
        'RUN="torchrun ${ARGS[@]}"\n$RUN -m pytest tests\n'
    )
    assert commands(text) == ["pytest -p megatron --ranks 8 tests"]


def test_a_command_that_is_echoed_into_a_variable_is_found_once() -> None:
    text = (
        'CMD=$(echo python -m torch.distributed.run ${A[@]} \\\n  -m pytest -vs $B)\neval "$CMD"\n'
    )
    found = launched_in_script(text, is_makefile=False)
    assert [(one.line, one.arguments) for one in found] == [(0, ("-vs", "$B"))]


def test_pytest_in_a_script_that_a_launcher_runs_belongs_to_it() -> None:
    text = (
        'mpirun -np ${n} bash -c "\n  export A=1;\n'
        '  python3 -m pytest a.py\n  python3 -m pytest b.py\n"'
    )
    assert commands(text) == [
        'pytest -p megatron --ranks "${n}" a.py',
        'pytest -p megatron --ranks "${n}" b.py',
    ]


@pytest.mark.parametrize(
    "text",
    [
        "pytest tests",
        "python -m pytest tests",
        "# torchrun -m pytest tests",
        "echo torchrun --nproc-per-node 2 -m pytest tests",
        'echo "torchrun -m pytest tests"',
        "pip install deepspeed pytest",
        "uv pip install deepspeed pytest",
        "which torchrun && pytest tests",
        "it's a text with torchrun, and pytest",
        "python - <<EOF\nprint('torchrun')\nEOF\npytest tests",
        "",
        "'",
        '"',
        "$(",
        "${",
        "\\",
        "a=(",
    ],
)
def test_what_is_no_launched_pytest_is_not_found(text: str) -> None:
    assert commands(text) == []


def test_a_makefile_has_variables_and_prefixes() -> None:
    text = (
        "PYTEST ?= pytest\nN := 2\ntest:\n"
        "\t@$(PYTHON) -m composer.cli.launcher -n $(N) -m $(PYTEST) -m gpu $(ARGS)\n"
    )
    assert commands(text, is_makefile=True) == ['pytest -p megatron --ranks "$(N)" -m gpu $(ARGS)']


def test_a_program_that_is_launched_is_kept_with_its_name() -> None:
    (one,) = launched_in_script(
        "torchrun --nproc_per_node 2 test/test_dtensor.py", is_makefile=False
    )
    assert (one.script, command_for(one)) == (
        "test/test_dtensor.py",
        "pytest -p megatron --ranks 2 test/test_dtensor.py",
    )


WORKFLOW = """\
on: push
jobs:
  test:
    steps:
      - run: |

          : # first
          ${{ matrix.mpiexec }} -n 2 pytest -v -m parallel[2] tests
      - run: torchrun --nproc-per-node=2 -m pytest b
      - run: >
          torchrun --nproc-per-node=2
          -m pytest c
      - args: [torchrun, --nproc-per-node=4, -m, pytest, d]
"""


def test_steps_of_ci_are_found_where_they_stand() -> None:
    found = launched_in_yaml(WORKFLOW)
    assert [(one.line + 1, command_for(one)) for one in found] == [
        (8, "pytest -p megatron --ranks 2 -v -m parallel[2] tests"),
        (9, "pytest -p megatron --ranks 2 b"),
        (11, "pytest -p megatron --ranks 2 c"),
        (13, "pytest -p megatron --ranks 4 d"),
    ]


def test_a_file_that_is_no_yaml_is_read_as_a_script() -> None:
    text = "{% if x %}\nscript:\n  torchrun --nproc-per-node 2 -m pytest a\n{% endif %}\n\t- :"
    assert [one.line for one in launched_in_yaml(text)] == [2]


def test_words_keep_their_quotes() -> None:
    (command,) = read_shell("""a 'b c' "d \\" e" $(f "g h") ${i}""").commands
    assert [word.raw for word in command] == [
        "a",
        "'b c'",
        '"d \\" e"',
        '$(f "g h")',
        "${i}",
    ]


def test_unquote_takes_away_quotes_and_backslashes() -> None:
    assert unquote("""a'b c'"d \\" $e"\\ f""") == 'ab cd " $e f'


@pytest.mark.parametrize(
    ("path", "is_test"),
    [
        ("tests/helpers/utils.py", True),
        ("torchrec/distributed/test_utils/multi_process.py", True),
        ("pkg/foo_test.py", True),
        ("conftest.py", True),
        ("pkg/latest.py", False),
        ("contest/run.py", False),
        ("pkg/testament.py", False),
    ],
)
def test_a_path_of_tests_is_known_by_its_words(path: str, is_test: bool) -> None:  # noqa: FBT001
    assert is_test_path(path) is is_test
