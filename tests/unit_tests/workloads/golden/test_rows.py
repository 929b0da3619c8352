"""Readers of metrics, by files that releases of the libraries wrote (`samples/`), and by lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.errors import MetricsError
from pytest_megatron.workloads.golden.formats.rows import (
    find_disagreement,
    read_printed,
    read_rows,
    rows_of,
)
from pytest_megatron.workloads.golden.model import refuse_disagreements, series_of
from pytest_megatron.workloads.recipe.metrics import READY, LinePattern, MetricFormat

SAMPLES = Path(__file__).with_name("samples")


def read(path: Path, form: MetricFormat, step: str | None = None) -> dict[str, dict[int, object]]:
    metrics = read_rows(rows_of(path, form), step).metrics
    return {name: dict(series.items()) for name, series in metrics.items()}


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("release", ["4.49", "5.24"])
def test_trainer_state_has_a_first_step_sparse_ones_and_evaluations(release: str) -> None:
    found = read(SAMPLES / f"trainer_state-{release}.json", MetricFormat.TRAINER_STATE)
    assert list(found["loss"]) == [1, 5, 10, 15, 20]
    assert list(found["eval_loss"]) == [10, 20]
    assert found["loss"][20] == pytest.approx(3.8989, abs=1e-4)
    assert list(found["train_loss"]) == [20]


@pytest.mark.parametrize("release", ["2.2", "2.6"])
def test_lightnings_csv_has_empty_cells_and_values_once_an_epoch(release: str) -> None:
    found = read(SAMPLES / f"lightning-{release}.csv", MetricFormat.CSV)
    assert list(found["train/loss"]) == [3, 7, 11, 15, 19, 23, 27]
    assert list(found["val/loss"]) == list(found["train/epoch_loss"]) == [9, 19, 29]
    assert found["train/loss"][3] == 1.0553274154663086


@pytest.mark.parametrize("release", ["4.49", "5.24"])
def test_printed_dicts_of_the_trainer_are_counted_name_by_name(release: str) -> None:
    found = read_printed(READY["hf_trainer"], [SAMPLES / f"hf_trainer-{release}.log"]).metrics
    assert found["loss"].steps == (1, 2, 3, 4, 5)
    assert found["loss"].values[0] == pytest.approx(3.912, abs=1e-3)
    assert found["eval_loss"].steps == (1, 2)


# Two releases each, as their users pasted them.
@pytest.mark.parametrize(
    ("pattern", "line", "step", "name", "value"),
    [
        pytest.param(
            "megatron",
            " samples/sec: 7.799 | iteration       34/   10000 | learning rate: 2.111E-06 | "
            "approx flops per GPU: 112.9TFLOPS | lm_loss: 1.118665E+01 | grad norm: nan |",
            34,
            "lm_loss",
            11.18665,
        ),
        pytest.param(
            "torchtitan",
            "[titan] 2026-02-24 19:46:17,508 - root - INFO - \x1b[31mstep:  4  \x1b[32mloss:  "
            "7.62585  \x1b[38;2;180;60;0mgrad_norm: 26.6250  memory: 66.91GiB(37.51%)",
            4,
            "grad_norm",
            26.625,
        ),
        pytest.param(
            "nanotron",
            "10/17/2025 16:31:56 [INFO|DP=0|PP=0|TP=0]: iteration: 327281 / 378950 | "
            "consumed_tokens: 85.8G | elapsed_time_per_iteration_ms: 11.5K | grad_norm: 1.25",
            327281,
            "consumed_tokens",
            85.8e9,
        ),
        pytest.param(
            "nemo",
            "Training epoch 0, iteration 1/9 | lr: 0.0006 | consumed_samples: 64 | "
            "global_batch_size: 32 | global_step: 1 | reduced_train_loss: 9.761",
            1,
            "reduced_train_loss",
            9.761,
        ),
        ("nanogpt", "iter 1631: loss 4.0863, time 561.94ms", 1631, "loss", 4.0863),
        pytest.param(
            "nanogpt",
            "2023-03-22 09:32:32 step 3000: train loss 4.0390, val loss 4.0427",
            3000,
            "val loss",
            4.0427,
        ),
        pytest.param(
            "deepspeed",
            "[2022-03-11 02:06:58,985] [INFO] [logging.py:69:log_dist] [Rank 0] step=40, "
            "skipped=2, lr=[5e-05], mom=[[0.9, 0.999]]",
            40,
            "lr",
            5e-05,
        ),
        pytest.param(
            "deepspeed",
            "steps: 10 loss: 2.3078 iter time (s): 0.042 samples/sec: 6095.3",
            10,
            "loss",
            2.3078,
        ),
    ],
)
def test_ready_patterns_read_the_lines_of_their_programs(
    pattern: str, line: str, step: int, name: str, value: float
) -> None:
    found_step, values = READY[pattern].read(line)
    assert found_step == step
    assert values[name] == pytest.approx(value)


@pytest.mark.parametrize(
    "line",
    [
        "[2023-07-25 21:03:17,269] [INFO] [logging.py:96:log_dist] [Rank 0] | step: 1172.13",
        "number of parameters: 10.65M, step by step",
        "saving checkpoint to out",
    ],
)
def test_other_lines_have_no_values(line: str) -> None:
    assert [name for name, pattern in READY.items() if pattern.read(line)[1]] == []


def test_rows_without_a_step_are_counted_and_an_epoch_counts_where_it_is_whole(
    tmp_path: Path,
) -> None:
    lines = '{"loss": 2.0, "note": "x"}\n{"config": {"lr": 1}}\n{"loss": 1.0, "ok": true}\n'
    path = written(tmp_path / "log.jsonl", lines)
    assert read(path, MetricFormat.JSONL) == {"loss": {1: 2.0, 2: 1.0}, "config/lr": {1: 1.0}}
    epochs = written(tmp_path / "epochs.csv", "epoch,loss\n0,2\n1,1\n")
    assert read(epochs, MetricFormat.CSV) == {"loss": {0: 2.0, 1: 1.0}}
    parts = written(tmp_path / "parts.jsonl", '{"epoch": 1, "a": 5}\n{"epoch": 1.5, "a": 6}\n')
    assert read(parts, MetricFormat.JSONL) == {"a": {1: 5.0, 2: 6.0}}


HEADER_TWICE = "step,loss\n1,1.0\nstep,val_loss,loss\n4,0.3,0.25\n"


@pytest.mark.parametrize(
    ("text", "start", "loss"),
    [
        pytest.param(HEADER_TWICE, 0, {1: 1.0, 4: 0.25}, id="a-second-header-has-more"),
        pytest.param(f"{HEADER_TWICE}7,0.2,0.1\n", len(HEADER_TWICE), {7: 0.1}, id="appended"),
        pytest.param("step,x,loss\n1,2,3\nstep,loss\n4,5\n", 0, {1: 3.0, 4: 5.0}, id="fewer"),
        pytest.param("\ufeffstep,loss\n10,1.0\n20,0.5\n", 0, {10: 1.0, 20: 0.5}, id="bom"),
        pytest.param(" step , loss,\n 10, 1.0,\n,,\n20,0,\n", 0, {10: 1.0, 20: 0.0}, id="blanks"),
    ],
)
def test_a_cell_of_a_table_belongs_to_the_header_above_it(
    tmp_path: Path, text: str, start: int, loss: dict[int, float]
) -> None:
    path = written(tmp_path / "log.csv", text)
    found = read_rows(rows_of(path, MetricFormat.CSV, start), None)
    assert dict(found.metrics["loss"].items()) == loss


@pytest.mark.parametrize("start", [0, 24])
def test_a_row_that_has_more_cells_than_its_header_is_an_error(tmp_path: Path, start: int) -> None:
    path = written(tmp_path / "log.csv", "step,loss\n1,1.0\n\n2,0.9\n\n4,0.3,0.25\n")
    problem = r"log.csv:6: has 3 cells, its header 2 names; write a header with every column"
    with pytest.raises(MetricsError, match=problem):
        list(rows_of(path, MetricFormat.CSV, start))


def test_a_step_that_is_no_number_of_one_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "log.csv", "t,loss\n1,2\n1.5,1\n")
    with pytest.raises(MetricsError, match=r"log.csv:3: t is 1.5, expected the number of a step"):
        read(path, MetricFormat.CSV, "t")


def test_the_last_line_counts_only_if_it_has_its_end(tmp_path: Path) -> None:
    assert read(written(tmp_path / "a.csv", "step,loss\n1,2.5\n2,2."), MetricFormat.CSV) == {
        "loss": {1: 2.5}
    }
    log = written(tmp_path / "log", "iter 1: loss 2.5\niter 2: loss 2.")
    assert dict(read_printed(READY["nanogpt"], [log]).metrics["loss"].items()) == {1: 2.5}


def test_what_a_progress_bar_shows_on_its_way_does_not_count(tmp_path: Path) -> None:
    log = written(tmp_path / "log", " 10%|# | loss 9.0\r 20%|## | loss 8.0\r{'loss': 2.5}\n")
    bar = LinePattern(values=r"loss\S* (?P<loss>[\d.]+)")
    assert dict(read_printed(bar, [log]).metrics["loss"].items()) == {1: 2.5}


def test_a_metric_that_begins_anew_is_refused_only_if_it_is_compared(tmp_path: Path) -> None:
    text = "".join(f"iter {step}: loss {loss}\n" for step, loss in ((0, 3.0), (1, 2.0), (0, 4.0)))
    curves = read_printed(READY["nanogpt"], [written(tmp_path / "log", text)])
    refuse_disagreements(curves.disagreements, ["other"])
    with pytest.raises(MetricsError) as caught:
        refuse_disagreements(curves.disagreements, ["loss"])
    assert str(caught.value) == (
        f"{tmp_path / 'log'}:3: step 0 has two values of 'loss', 3.0 and then 4.0; have one rank "
        "write it, each training a file of its own, and a resumed one go on counting"
    )


def test_sources_disagree_where_their_float32_differ() -> None:
    one = {"loss": series_of({1: 0.1, 2: 2.5})}
    assert find_disagreement(one, {"loss": series_of({1: 0.10000000149011612})}) is None
    assert find_disagreement(one, {"loss": series_of({2: 2.6})}) == ("loss", 2, 2.5, 2.6)
