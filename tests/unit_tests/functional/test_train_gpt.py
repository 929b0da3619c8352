from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).resolve().parents[2] / "functional_tests" / "train_gpt.py"
TINY = ("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2")


def train(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the training program on one rank, on the CPU."""
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, PROGRAM, *TINY, "--seq-length", "16", *flags],
        env=alone | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Read what was written to TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks what is written on the CPU")
def test_four_iterations_are_logged_with_megatrons_names(tmp_path: Path) -> None:
    done = train(
        *("--train-iters", "4", "--tensorboard-dir", str(tmp_path / "tb")),
        *("--log-num-zeros-in-grad", "--log-memory-to-tensorboard", "--log-timers-to-tensorboard"),
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"iteration +(\d+)/ +4 \| .* lm loss: (\S+) \|", done.stdout)
    assert [int(step) for step, _ in lines] == [1, 2, 3, 4]
    found = scalars(tmp_path / "tb")
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
    assert [path.name for path in tmp_path.iterdir()] == ["tb"]


def test_a_killed_run_leaves_its_steps(tmp_path: Path) -> None:
    done = train("--fault", "kill@3", "--tensorboard-dir", str(tmp_path))
    assert done.returncode == -9
    assert [step for step, _ in scalars(tmp_path)["lm loss"]] == [1, 2]


def test_a_nan_ends_the_run_and_is_in_the_error_file(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    done = train("--fault", "nan@2", TORCHELASTIC_ERROR_FILE=str(error_file))
    assert done.returncode == 1
    message = json.loads(error_file.read_text())["message"]["message"]
    assert "found NaN in local forward loss calculation" in message
