"""What `record` reads from a command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_megatron.process.guarded import CommandEnd
from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.workloads.commands.by_hand import RunByHand
from pytest_megatron.workloads.commands.found import MetricSearch, length_of
from pytest_megatron.workloads.commands.record import choose
from pytest_megatron.workloads.golden.formats.rows import read_printed
from pytest_megatron.workloads.recipe.metrics import parse_source


@pytest.mark.parametrize(
    ("line", "length"),
    [
        ("train.py --max_steps 20", ("--max_steps", 20)),
        ("train.py --max_iters=20 --lr 1", ("--max_iters", 20)),
        ("app.py trainer.max_steps=7", ("trainer.max_steps", 7)),
        ("-m torchtitan.train --training.steps 12", ("--training.steps", 12)),
        ("train.py --num_train_epochs 3 --save_steps 5", None),
    ],
)
def test_the_length_of_a_training_is_an_argument(line: str, length: tuple[str, int] | None) -> None:
    assert length_of(line.split()) == length


def test_a_file_and_its_copies_below_are_one_place(tmp_path: Path) -> None:
    search = MetricSearch(tmp_path)
    search.mark()
    for directory in (tmp_path / "out", tmp_path / "out" / "checkpoint-20"):
        directory.mkdir()
        (directory / "log.csv").write_text("step,loss\n1,2.5\n2,2.25\n")
    search.look(PhaseDirs(root=tmp_path / "logs"), is_joint=False)
    assert [place.where for place in search.places] == ["csv, out/**/log.csv"]


def test_a_norm_of_gradients_that_is_printed_is_compared(tmp_path: Path) -> None:
    dirs = PhaseDirs(root=tmp_path / "logs")
    dirs.root.mkdir()
    dirs.launcher_log.write_text(
        "grad norm: 0.59 ::train loss: 5.5\ngrad norm: 0.61 ::train loss: 5.4\n"
    )
    search = MetricSearch(tmp_path)
    search.look(dirs, is_joint=False)
    assert [place.names for place in search.places] == [("train loss", "grad norm")]


def found(root: Path, printed: str, *, is_joint: bool = False, **files: str) -> MetricSearch:
    """Return what is found behind a program that prints something and writes files."""
    dirs = PhaseDirs(root=root / "logs")
    dirs.root.mkdir()
    dirs.launcher_log.write_text(printed)
    search = MetricSearch(root)
    search.mark()
    for name, text in files.items():
        (root / name.replace("_", ".")).write_text(text)
    search.look(dirs, is_joint=is_joint)
    return search


def json_lines(steps: range) -> str:
    return "".join(f'{{"step": {step}, "Loss/train": {1 / (step + 3)}}}\n' for step in steps)


BY_STEP = "".join(f"step {step} loss {3 - step / 100:.2f}\n" for step in range(60))
COUNTED = "".join(f"Train [{step}] loss {3 - step / 100:.2f}\n" for step in range(60))


@pytest.mark.parametrize(
    ("printed", "steps", "best"),
    [
        pytest.param(COUNTED, range(0, 60, 10), "jsonl, log.json", id="steps-before-length"),
        pytest.param(BY_STEP, range(0, 60, 10), "jsonl, log.json", id="digits-before-length"),
        pytest.param(BY_STEP, range(0, 60, 30), "printed, by step", id="two-steps-are-too-few"),
        pytest.param("", range(2), "jsonl, log.json", id="alone"),
    ],
)
def test_steps_and_digits_of_a_source_count_before_its_length(
    tmp_path: Path, printed: str, steps: range, best: str
) -> None:
    places = found(tmp_path, printed, log_json=json_lines(steps)).places
    assert places[0].where == best
    assert len(places) == 1 + bool(printed)


def test_a_list_of_rows_in_a_json_file_is_read(tmp_path: Path) -> None:
    rows = ",".join(json_lines(range(4)).splitlines())
    (place,) = found(tmp_path, "", log_json=f"[{rows}]", config_json='{\n "lr": 0.1\n}\n').places
    assert (place.keys, place.num_steps) == ({"source": "trainer_state", "path": "log.json"}, 4)


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (["Train: loss {a} acc {b}", "Test: loss {b} acc {a}"], "train loss, test loss"),
        (["epoch 1 | train | loss {a}", "epoch 1 | val | loss {b}"], "train loss, val loss"),
        (["step {n} train loss {a}, val loss {b}"], "train loss, val loss"),
        (["step {n} ce loss {a} aux loss {b}"], "aux loss, ce loss"),
        (["step {n} loss {a} (loss {b})"], "loss, loss 2"),
        (["train.py: step {n} loss {a}"], "loss"),
    ],
)
def test_lines_of_a_training_and_of_its_tests_are_metrics_of_their_own(
    tmp_path: Path, lines: list[str], names: str
) -> None:
    values = [(n, 3 - n / 8, 2 + n / 8) for n in range(5)]
    text = "".join(f"{line}\n".format(n=n, a=a, b=b) for n, a, b in values for line in lines)
    (place,) = found(tmp_path, text).places
    losses = [name for name in place.names if "acc" not in name]
    assert ", ".join(losses) == names
    assert {s.values[0] for n, s in place.metrics.items() if n in losses} <= {3.0, 2.0}
    row = parse_source(place.keys, place.names)
    assert row.lines is not None
    read = read_printed(row.lines, [tmp_path / "logs" / "launcher.log"]).metrics
    assert {name: read[name].values for name in losses} == {
        name: place.metrics[name].values for name in losses
    }


def test_of_ranks_that_name_themselves_the_lines_of_rank_0_are_read(tmp_path: Path) -> None:
    form = "[rank {r}] step {n} loss {loss}, bpb {r}\n[rank {r}] loss of all {loss}, mAP {n}\n"
    lines = [form.format(r=r, n=n, loss=3 - n - r / 4) for n in (0, 1, 2) for r in (1, 0)]
    search = found(tmp_path, "".join(lines), is_joint=True)
    (place,) = search.places
    assert place.where == "printed, lines of rank 0 by step"
    assert dict(place.metrics["loss"].items()) == {0: 3.0, 1: 2.0, 2: 1.0}
    assert [other.unread for other in search.others] == [
        ("loss", "bpb"),
        ("bpb", "loss", "loss of all", "mAP"),
    ]


def test_metrics_that_are_no_losses_by_name_are_kept_to_be_named(tmp_path: Path) -> None:
    table = "step,charts/entropy\n1,5\n2,6\n"
    text = "step: 1, lr: 0.1\nstep: 2, lr: 0.2, Validation bpb = 1.5\n12:30:01 at 5.0GB\n"
    search = found(tmp_path, text, log_csv=table)
    assert search.places == []
    assert [list(place.metrics) for place in search.others] == [
        *(["charts/entropy"], ["Validation bpb", "lr"], ["Validation bpb", "lr"])
    ]


def test_files_of_ranks_are_places_of_their_own(tmp_path: Path) -> None:
    search = MetricSearch(tmp_path)
    search.mark()
    for rank in (0, 1, 10):
        file = tmp_path / "run_7" / f"rank_{rank}" / f"log_rank{rank}_8.csv"
        file.parent.mkdir(parents=True)
        file.write_text(f"step,loss\n1,{2 + rank}\n2,1.5\n")
    (tmp_path / "rank1").mkdir()
    (tmp_path / "rank1" / "log3.csv").write_text("step,loss\n1,2.5\n")
    search.look(PhaseDirs(root=tmp_path / "logs"), is_joint=False)
    assert sorted(place.where for place in search.places) == [
        "csv, **/log_rank0_*.csv",
        "csv, **/log_rank10_*.csv",
        "csv, **/log_rank1_*.csv",
        "csv, rank1/log*.csv",
    ]


def test_what_an_evaluation_measures_is_compared_but_not_its_time(tmp_path: Path) -> None:
    names = ("charts/episodic_return", "eval/score", "Validation bpb", "interval", "eval_runtime")
    more = ("eval_samples_per_second", "metrics/mAP50(B)", "val/mAP", "test_fps", "latest")
    table = "\n".join(
        ",".join(map(str, row)) for row in (("step", *names, *more), range(11), range(11, 22))
    )
    (place,) = found(tmp_path, "", log_csv=f"{table}\n").places
    compared = ["Validation bpb", "charts/episodic_return", "eval/score", "val/mAP"]
    assert sorted(place.names) == compared


def test_a_metric_with_two_values_at_a_step_is_named(tmp_path: Path) -> None:
    rows = '{"step": 1, "loss": 2, "a/return": 3, "n": 1}\n{"step": 1, "a/return": 4, "n": 2}\n'
    search = found(tmp_path, "", log_jsonl=rows)
    (text,) = search.passed_over
    told = "log.jsonl:2: step 1 has two values of 'a/return', 3.0 and then 4.0, and two values of n"
    assert text.endswith(told)
    assert list(search.places[0].metrics) == ["loss"]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("step {n} | loss {a} | val_bpb {b}", "val_bpb"),
        ("step {n}\tloss {a}\tF1\t{b}\ttop-1: {a}%", "F1, top-1"),
        (
            "step {n} loss {a} Validation bpb {b} time 12.5ms mAP@0.5 {a}, old nan last inf.",
            "Validation bpb, time, mAP@0.5, old, last",
        ),
        ("step {n} loss{a} bpb{b} R2 ({b})", "bpb, R2"),
        ("12:30:01 train.py:7] [{n}/5] loss: {a} (2.5) bpb ~ {b} 3 ms", "bpb"),
        ("{{'loss': {a}, 'update_norm': {b}}}", "update_norm"),
        ("[{n}] loss {a}\n[{n}] Validation bpb {b}\n[{n}] took {b}", "Validation bpb"),
        ("[{n}] train loss {a}\n[{n}] loss (mean) {b}, F1 {a}", "F1, loss (mean)"),
        ("step {n} train ce loss {a}, epoch {n}, batch 3/7", "train ce loss"),
        ("step {n} loss {a} level info", ""),
    ],
)
def test_numbers_beside_a_step_or_a_loss_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, told: str
) -> None:
    values = [(n, 3 - n / 8, 2 + n / 8) for n in range(5)]
    text = "".join(f"{lines}\n".format(n=n, a=a, b=b) for n, a, b in values)
    start = "tokens per iteration will be: 512\nthe test set has 9\nlr: 0.1\n"
    search = found(tmp_path, start + text)
    run = RunByHand(
        CommandEnd(returncode=0, duration_s=1.0, num_left=0),
        tuple(search.places),
        tuple(search.others),
        tuple(search.passed_over),
    )
    choose(run, (), ("train",))
    said = re.findall(r"left out: (.+?) of printed", capsys.readouterr().out)
    assert sorted(", ".join(said).split(", ")) == sorted(told.split(", "))
