"""What a program adds to the files around it, and the place that all readers of a phase share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_tensorboard import event, simple, write_events

from pytest_megatron.errors import MetricsError
from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.workloads.golden.collect import (
    Collector,
    WatchedFiles,
    has_measured,
    newest,
    read_measured,
)
from pytest_megatron.workloads.golden.model import series_of
from pytest_megatron.workloads.recipe.metrics import MetricSource, parse_source
from pytest_megatron.workloads.verdict.attempt import measured_in

SAMPLES = Path(__file__).with_name("samples")
CSV = parse_source({"source": "csv", "path": "out/**/metrics.csv"}, ("train/loss",))
PRINTED = parse_source({"source": "printed", "pattern": "nanogpt"}, ("loss",))


def collector(source: MetricSource, root: Path) -> tuple[Collector, PhaseDirs]:
    dirs = PhaseDirs(root=root / "phase_1")
    dirs.logs.mkdir(parents=True, exist_ok=True)
    return Collector(source, dirs, root), dirs


def test_only_files_of_this_run_count_and_of_an_old_one_what_was_appended(tmp_path: Path) -> None:
    old, appended = tmp_path / "a.jsonl", tmp_path / "sub" / "b.jsonl"
    appended.parent.mkdir()
    for path in (old, appended):
        path.write_text('{"step": 1, "loss": 9.0}\n')
    watched = WatchedFiles(tmp_path, "**/*.jsonl")
    watched.mark()
    with appended.open("a") as file:
        file.write('{"step": 1, "loss": 2.0}\n')
    new = tmp_path / "new.jsonl"
    new.write_text("{}\n")
    hidden = tmp_path / ".venv" / "c.jsonl"
    hidden.parent.mkdir()
    hidden.write_text("{}\n")
    assert watched.changed() == {new: 0, appended: 25}
    appended.write_text('{"step": 7, "loss": 2.0, "it": "was written anew"}\n{}\n{}\n{}\n')
    assert watched.changed() == {new: 0, appended: 0}


def test_files_of_the_project_become_the_metrics_of_the_phase(tmp_path: Path) -> None:
    collected, dirs = collector(CSV, tmp_path)
    assert not has_measured(dirs)
    collected.refresh()
    assert not has_measured(dirs)  # not yet; a problem counts at the end
    version = tmp_path / "out" / "version_0"
    version.mkdir(parents=True)
    shutil.copy(SAMPLES / "lightning-2.6.csv", version / "metrics.csv")
    collected.refresh()
    metrics = read_measured(dirs).metrics
    found = newest(metrics, ("train/epoch_loss", "val/loss"))
    assert found is not None
    assert found[:2] == (29, "train/epoch_loss")
    assert newest(metrics, ("other",)) is None


def test_a_file_that_was_never_written_is_one_clear_line(tmp_path: Path) -> None:
    collected, dirs = collector(CSV, tmp_path)
    collected.refresh(is_ended=True)
    with pytest.raises(MetricsError) as caught:
        read_measured(dirs)
    assert str(caught.value) == (
        f"{tmp_path}/out/**/metrics.csv: no metrics: the program wrote no such file; "
        "metrics.path names it"
    )


def loss_of(source: str, step: int, loss: float, rank: int) -> str:
    """Return what one rank writes at a step: `time` is its own, and is not compared."""
    if source == "jsonl":
        return f'{{"step": {step}, "loss": {loss}, "time": {rank}}}\n'
    if source == "csv":
        return f"{'step,loss,time' * (step == 1)}\n{step},{loss},{rank}\n"
    return f"iter {step}: loss {loss}, time {rank}ms\n"


@pytest.mark.parametrize(
    ("keys", "where", "place"),
    [
        ({"source": "tensorboard", "path": "out/**"}, "out/events.tfevents.1.r1", "events."),
        ({"source": "csv", "path": "out/*.csv"}, "out/r1.csv", "r0.csv"),
        ({"source": "jsonl", "path": "out/**/*.jsonl"}, "out/r1.jsonl", "r0.jsonl"),
        (
            {
                "source": "printed",
                "pattern": r"iter (?P<step>\d+): loss (?P<loss>\S+), time (?P<t>.)",
            },
            "lines of rank 1",
            "lines of rank 0",
        ),
    ],
)
def test_what_several_ranks_write_is_one_where_it_is_equal_and_refused_where_it_is_not(
    tmp_path: Path, keys: dict[str, str], where: str, place: str
) -> None:
    source = parse_source(keys, ("loss",))
    collected, dirs = collector(source, tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    dirs.launcher_log.write_text("iter 1: loss 9.0, time 1s\n")  # ours have logs of their own
    for last in (2.0, 2.5):  # of rank 1
        for rank in (0, 1):
            losses = {1: 3.0, 2: 2.0 if rank == 0 else last}
            if keys["source"] == "tensorboard":
                scalars = [
                    event(s, simple("loss", v), simple("time", rank)) for s, v in losses.items()
                ]
                write_events(out / f"events.tfevents.1.r{rank}", *scalars)
                continue
            file = out / f"r{rank}.{keys['source']}"
            if keys["source"] == "printed":
                file = dirs.logs / "none_x" / "attempt_0" / str(rank) / "stdout.log"
                file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(loss_of(keys["source"], s, v, rank) for s, v in losses.items()))
        collected.refresh()
        if keys["source"] in ("printed", "tensorboard") or last == 2.0:
            assert read_measured(dirs).metrics["loss"].values == (3.0, 2.0)
        collected.refresh(is_ended=True)
        if last == 2.0:
            assert read_measured(dirs).metrics["loss"].values == (3.0, 2.0)
    with pytest.raises(MetricsError) as caught:
        read_measured(dirs)
    assert caught.value.where.endswith(where)
    told, _, first = str(caught.value).partition(";")[0].rpartition(" in ")
    assert "step 2 has two values of 'loss', 2.5 here and 2.0" in told
    assert place in first


@pytest.mark.parametrize(("tag", "is_rl"), [("lm loss", False), ("lm-loss", True)])
def test_ranks_that_write_into_the_directory_of_the_phase_have_to_agree(
    tmp_path: Path, tag: str, *, is_rl: bool
) -> None:
    dirs = PhaseDirs(root=tmp_path)
    for rank, loss in ((0, 3.5), (1, 3.5), (2, 3.75)):
        scalars = (simple(tag, loss), simple("time", rank))
        write_events(dirs.tensorboard / f"events.out.tfevents.{rank}.x", event(1, *scalars))
        if rank == 1:
            found = measured_in(dirs, is_rl=is_rl, names=("lm loss",))
            assert found["lm loss"].values == (3.5,)
    with pytest.raises(MetricsError, match=r"step 1 has two values of 'lm.loss', 3\.75 here"):
        measured_in(dirs, is_rl=is_rl, names=("lm loss",))


def test_printed_lines_that_are_counted_are_counted_once(tmp_path: Path) -> None:
    source = parse_source({"source": "printed", "pattern": "loss (?P<loss>[0-9.]+)"}, ("loss",))
    collected, dirs = collector(source, tmp_path)
    for number in (1, 2, 3):
        with dirs.launcher_log.open("a") as log:
            log.write(f"loss {number}.5\nloss")
        collected.refresh()
        with dirs.launcher_log.open("a") as log:
            log.write(f" {number}.75\n")
        collected.refresh()
    expected = {1: 1.5, 2: 1.75, 3: 2.5, 4: 2.75, 5: 3.5, 6: 3.75}
    assert dict(read_measured(dirs).metrics["loss"].items()) == expected
    collected.refresh(is_ended=True)
    assert dict(read_measured(dirs).metrics["loss"].items()) == expected


def test_jsonlines_and_tensorboard_of_one_phase_must_agree(tmp_path: Path) -> None:
    dirs = PhaseDirs(root=tmp_path)
    dirs.metrics_lines.write_text('{"step": 3, "loss": 2.5}\n')
    dirs.tensorboard.mkdir()
    write_events(dirs.tensorboard / "events.out.tfevents.1.x", event(3, simple("loss", 2.5)))
    assert dict(read_measured(dirs).metrics["loss"].items()) == {3: 2.5}
    dirs.metrics_lines.write_text('{"step": 3, "loss": 2.75}\n')
    with pytest.raises(MetricsError, match=r"'loss' is 2\.75 at step 3, and 2\.5 in"):
        read_measured(dirs)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"source": "printed"}, "pattern is missing, expected one of megatron"),
        ({"source": "csv", "pattern": "x"}, "pattern does not go with source csv; remove it"),
        ({"source": "printed", "pattern": "loss"}, "pattern 'loss' has no group"),
        ({"source": "printed", "pattern": "("}, "is no regular expression"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(keys: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_source(keys, ("loss",))


def test_a_walk_passes_over_links_and_environments(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "x.csv").write_text("a\n")
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "env" / "x.csv").write_text("a\n")
    assert WatchedFiles(tmp_path, "**/*.csv").changed() == {tmp_path / "run" / "x.csv": 0}


def test_series_of_steps_keep_zero() -> None:
    assert newest({"loss": series_of({0: 1.0})}, ("loss",)) == (0, "loss", 1.0)
