"""One session of trainings that pass, without pytest-xdist: what they leave and what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_project import ITERS, Project, Run, loss_of, read_object

RESUME = {"TEST_TYPE": "ckpt-resume"}
ARGUMENTS = ("recipes", "--tee-ranks", "1")
SCRIPT = """\
set -u
test -d "{assets_dir}" && test -d "{artifacts_dir}"
echo '{model} {test_case} {environment} {platforms} {gpus} {n_repeat} {name}'
echo "${{HOME:+braces}} ${{ENABLE_LIGHTWEIGHT_MODE:-full}}"
env | grep -E '^(RANK|LOCAL_RANK|TORCHELASTIC_RUN_ID)=|^MASTER_PORT=1$' || true
"""
WORDS = ["gpt script dev cpu 2 1 script_dev_cpu", "braces full"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("sound"))
    project.add("board")
    project.add("lines", tensorboard_dir=None)
    project.add("resume", save_interval=5, config=RESUME)
    project.add("flood", "flood@3:1", "flood@4:0")
    project.add("spawn", "spawn@3:0")
    project.row("script", script=[SCRIPT], write_golden=False)
    return project


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    return project.run(*ARGUMENTS)


@pytest.mark.parametrize("case", ["board", "lines", "resume", "flood", "spawn", "script"])
def test_a_sound_workload_passes_at_its_first_attempt(run: Run, case: str) -> None:
    assert run.verdict(case) == ("PASSED", "passed")
    assert len(run.attempts(case)) == 1


def test_the_metrics_of_a_run_are_kept_in_full(run: Run) -> None:
    attempt = run.item_dir("lines") / "repeat_1" / "attempt_1"
    loss = loss_of(attempt / "phase_1" / "metrics.json")
    assert loss.steps == tuple(range(1, ITERS + 1))
    assert loss.values[0] == 5.0 - 0.1 + 1.234


def test_the_second_phase_resumes_half_way(run: Run) -> None:
    attempt = run.item_dir("resume") / "repeat_1" / "attempt_1"
    stdout = (attempt / "phase_2" / "logs" / "1" / "stdout.log").read_text()
    assert stdout.splitlines()[0] == "resumed after iteration 5"
    assert loss_of(attempt / "phase_2" / "metrics.json").steps == (6, 7, 8, 9, 10)


def test_the_directory_of_an_attempt_holds_all_that_belongs_to_it(run: Run) -> None:
    item = run.item_dir("board")
    found = sorted(str(p.relative_to(item)) for p in item.rglob("*") if p.is_file())
    attempt = "repeat_1/attempt_1"
    kept = [name for name in found if "tfevents" not in name and "/meeting/" not in name]
    assert kept == [
        "comparison.json",
        "curves.html",
        "golden.json",
        f"{attempt}/phase_1/launcher.log",
        *(f"{attempt}/phase_1/logs/{r}/std{s}.log" for r in (0, 1) for s in ("err", "out")),
        f"{attempt}/phase_1/metrics.json",
        f"{attempt}/plan.json",
    ]


def test_the_plan_of_an_attempt_says_how_to_do_it_again(run: Run, project: Project) -> None:
    plan = read_object(run.item_dir("resume") / "repeat_1" / "attempt_1" / "plan.json")
    kept = ("schema", "node_id", "recipe", "cwd", "script", "world_size", "time_limit_s")
    assert {key: plan[key] for key in kept} == {
        "schema": 1,
        "node_id": "recipes/tiny.yaml::resume[dev-cpu]",
        "recipe": plan["recipe"],
        "cwd": str(project.root),
        "script": None,
        "world_size": 2,
        "time_limit_s": 1800,
    }
    assert str(plan["recipe"]).startswith("recipes/tiny.yaml:")
    phases = plan["phases"]
    assert isinstance(phases, list)
    assert [p["rewind_to"] for p in phases if isinstance(p, dict)] == [None, 5]


def test_run_json_says_what_ran_where_and_with_what(run: Run) -> None:
    kept = run.json
    assert kept["schema"] == 1
    assert kept["arguments"] == ["-rA", "-p", "megatron", "--run-dir", "run", *ARGUMENTS]
    assert {"started", "updated", "commit", "versions", "gpus", "cpu", "items"} <= kept.keys()
    record = run.record("board")
    took, _, rest = str(record["summary"]).partition(" s, ")
    assert rest == "lm loss 6.1340 -> 5.2340 in 10 iterations, bitwise equal"
    assert float(took) == pytest.approx(record["duration_s"], abs=0.051)  # each was rounded


def test_the_summary_has_a_line_for_each_workload(run: Run) -> None:
    lines = run.stdout.splitlines()
    for case in ("board", "script"):
        start = f"passed  recipes/tiny.yaml::{case}[dev-cpu]  {run.record(case)['summary']}"
        assert start in lines


def test_lines_of_chosen_ranks_are_shown_and_progress_lines_are_not(run: Run) -> None:
    assert "[rank1]: resumed after iteration 5" in run.stdout
    assert "[rank0]:" not in run.stdout
    assert "iteration        1/      10" not in run.stdout


def test_a_flood_of_output_is_kept_whole(run: Run) -> None:
    log = run.item_dir("flood") / "repeat_1/attempt_1/phase_1/logs/1/stdout.log"
    assert log.read_text().count("x" * 1023) == 4096


def test_a_grandchild_that_outlives_the_training_is_killed_and_counted(
    run: Run, project: Project
) -> None:
    (attempt,) = run.attempts("spawn")
    assert attempt["num_left"] == 1
    assert (project.state("spawn").exists(), project.processes()) == (True, [])


def script_log(run: Run) -> list[str]:
    log = run.item_dir("script") / "repeat_1/attempt_1/phase_1/launcher.log"
    return log.read_text().splitlines()


def test_a_script_runs_under_bash_with_the_words_of_its_row(run: Run) -> None:
    assert script_log(run) == WORDS


def test_a_row_sees_nothing_of_the_launcher_around_pytest(project: Project) -> None:
    env = {"RANK": "7", "LOCAL_RANK": "7", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    run = project.run("recipes", "--test-case", "script", run_dir="nested", **env)
    assert run.verdict("script") == ("PASSED", "passed")
    assert script_log(run) == WORDS


@pytest.mark.parametrize("more", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_run_directory_with_an_earlier_run_is_refused_and_kept(
    run: Run, project: Project, more: tuple[str, ...]
) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in run.directory.rglob("*"))
    again = project.run("recipes", "-k", "lines", *more)
    assert again.returncode == pytest.ExitCode.USAGE_ERROR
    assert again.stderr == "ERROR: --run-dir: run holds an earlier run; give another\n\n"
    assert before == sorted((path, path.stat().st_mtime_ns) for path in run.directory.rglob("*"))


def test_a_run_directory_of_our_own_has_a_link_to_the_latest(project: Project) -> None:
    run = project.run("recipes", "--test-case", "script", run_dir="")
    assert run.outcomes == {"script": "PASSED"}
    latest = project.root / ".pytest_megatron" / "runs" / "latest"
    assert latest.is_symlink()
    assert (latest / "run.json").is_file()
    assert latest.readlink().parent == Path()


def test_a_training_is_not_subject_to_the_time_after_which_pytest_shows_stacks(
    tmp_path: Path,
) -> None:
    project = Project(root=tmp_path)
    project.row("slow", script=["sleep 1"], write_golden=False)
    settings = ("-o", "faulthandler_timeout=0.2", "-o", "faulthandler_exit_on_timeout=true")
    run = project.run("recipes", *settings)
    assert run.verdict("slow") == ("PASSED", "passed")
    assert "Timeout (" not in run.stderr
