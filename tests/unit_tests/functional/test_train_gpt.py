from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from forked_programs import Program, run_programs

PROGRAM = Path(__file__).resolve().parents[2] / "functional_tests" / "train_gpt.py"
TINY = ("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training that has ended."""

    exit_code: int
    output: str
    directory: Path

    @property
    def board(self) -> Path:
        return self.directory / "tb"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """The training program on one rank, on the CPU, with what each test gives it."""
    root = tmp_path_factory.mktemp("trained")
    given = {
        "sound": (
            *("--train-iters", "4", "--log-num-zeros-in-grad"),
            *("--log-memory-to-tensorboard", "--log-timers-to-tensorboard"),
        ),
        "killed": ("--fault", "kill@3"),
        "nan": ("--fault", "nan@2"),
    }
    programs = []
    for name, flags in given.items():
        directory = root / name
        directory.mkdir()
        board = ("--tensorboard-dir", str(directory / "tb"))
        program = Program(
            words=[str(PROGRAM), *TINY, "--seq-length", "16", *flags, *board],
            output=str(root / f"{name}.txt"),
            env={
                "CUDA_VISIBLE_DEVICES": "",
                "TORCHELASTIC_ERROR_FILE": str(root / f"{name}.json"),
            },
        )
        programs.append(program)
    codes = run_programs(programs, ["gpt_training", "tensorboard"], [PROGRAM.parent])
    return {
        name: Trained(
            exit_code=code, output=(root / f"{name}.txt").read_text(), directory=root / name
        )
        for name, code in zip(given, codes, strict=True)
    }


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Read what was written to TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks what is written on the CPU")
def test_four_iterations_are_logged_with_megatrons_names(trained: dict[str, Trained]) -> None:
    done = trained["sound"]
    assert done.exit_code == 0, done.output
    lines = re.findall(r"iteration +(\d+)/ +4 \| .* lm loss: (\S+) \|", done.output)
    assert [int(step) for step, _ in lines] == [1, 2, 3, 4]
    found = scalars(done.board)
    assert sorted(found) == [
        "grad-norm",
        "iteration-time",
        "learning-rate",
        "lm loss",
        "mem-allocated-bytes",
        "mem-max-allocated-bytes",
        "num-zeros",
    ]
    assert [step for step, _ in found["lm loss"]] == [1, 2, 3, 4]
    assert found["lm loss"][-1][1] < found["lm loss"][0][1]
    assert found["lm loss"][0][1] == pytest.approx(float(lines[0][1]), rel=1e-6)
    assert [path.name for path in done.directory.iterdir()] == ["tb"]


def test_a_killed_run_leaves_its_steps(trained: dict[str, Trained]) -> None:
    done = trained["killed"]
    assert done.exit_code == -9
    assert [step for step, _ in scalars(done.board)["lm loss"]] == [1, 2]


def test_a_nan_ends_the_run_and_is_in_the_error_file(trained: dict[str, Trained]) -> None:
    done = trained["nan"]
    assert done.exit_code == 1
    message = json.loads(done.directory.with_suffix(".json").read_text())["message"]["message"]
    assert "found NaN in local forward loss calculation" in message
