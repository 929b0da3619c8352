"""Trainings whose metrics are read where their program writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tiny_project import Project, Run

from pytest_megatron.base.files import JsonValue

PROGRAM = """
import csv, json, os, sys, time
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
last, kind = int(args["--exit-interval"]), args["--kind"]
last = int(args.get("--really", last))
is_first = int(os.environ["RANK"]) == 0
out = open(args["--out"], "w") if "--out" in args and is_first else None
if kind == "csv" and is_first:
    print("epoch,step,train/loss,val/loss", file=out, flush=True)
for step in range(last + 1):
    loss = 5.0 / (1 + 0.07 * step)
    if not is_first or (step != 1 and step % 5):
        continue
    if kind == "printed":
        print(f"iter {step}: loss {loss:.4f}, time 3.1ms", flush=True)
    if kind == "trainer":
        print(f"\\r 50%| | {step}/22 [00:01<00:02, 8.1it/s]", end="", flush=True)
        print(f"\\r{{'loss': {loss:.4f}, 'epoch': 0.1}}", flush=True)
    if kind == "csv":
        print(f"0,{step},{loss},", file=out, flush=True)
if args.get("--end") == "hang":
    time.sleep(600)
sys.exit(int(args.get("--exit", 0)))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    project = Project(root=tmp_path_factory.mktemp("sources") / "project")
    (project.root / "train.py").write_text(PROGRAM)
    printed: dict[str, JsonValue] = {
        "METRICS": ["loss"],
        "METRICS_FROM": {"source": "printed", "pattern": "nanogpt"},
    }
    file: dict[str, JsonValue] = {
        "METRICS": ["train/loss"],
        "METRICS_FROM": {"source": "csv", "path": "${OUTPUT_PATH}/*.csv"},
    }

    trainer: dict[str, JsonValue] = {
        "METRICS": ["loss"],
        "METRICS_FROM": {"source": "trainer_state", "path": "${OUTPUT_PATH}/**/trainer_state.json"},
    }

    def case(name: str, config: Mapping[str, JsonValue], **arguments: JsonValue) -> None:
        given: dict[str, JsonValue] = {
            "tensorboard_dir": None,
            "save": None,
            "load": None,
            "train_iters": 21,
        }
        project.row(
            project.case(name, config=config, env=None, **given, **arguments), write_golden=False
        )

    case("printed", printed, kind="printed")
    case("fails", printed, kind="printed", really=12, exit=3)
    case("hangs", printed, kind="printed", really=12, end="hang")
    project.entries[-1]["products"][0]["time_limit"] = [5]  # type: ignore[index, call-overload]
    case("trainer", trainer, kind="trainer", really=15, exit=3)
    case("csv", file, kind="csv", out="${OUTPUT_PATH}/metrics.csv")
    return project.run(
        *("recipes", "-n", "2", "--golden", "record", "--allow-dirty", "--n-repeat", "2"),
        *("--max-attempts", "1"),
    )


def test_metrics_are_judged_and_summed_up_wherever_they_are(run: Run) -> None:
    for case, name in (("printed", "loss"), ("csv", "train/loss")):
        assert run.verdict(case) == ("PASSED", "passed"), run.text
        assert f"{name} 5.0000 -> 2.0833 in 20 iterations" in str(run.record(case)["summary"])
    golden = run.directory.parent / "golden_values/gpt/printed/golden_values_dev_cpu.json"
    assert not golden.exists()  # since not all of this run was clean


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("fails", "ended with exit code 3, after iteration 10 of 21"),
        ("hangs", "time limit of 5 s reached at train.py:22 in <module>, after iteration 10 of 21"),
        ("trainer", "ended with exit code 3, after iteration 15 of 21"),
    ],
)
def test_what_failed_says_how_far_it_was_by_the_same_metrics(
    run: Run, case: str, problem: str
) -> None:
    assert problem in run.problem(case)
    assert Path(run.item_dir(case)).is_dir()
