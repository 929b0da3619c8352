"""Workloads on pretended GPUs: what their health says of a failure, and how a hang ends.

In Megatron-LM's harness a hang costs a limit of ten minutes or more, and only two ranks are
watched.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pretended_gpus import gpu, pretend_gpus
from tiny_project import Project, Run, read_object

from pytest_megatron.base.files import JsonValue

pytestmark = pytest.mark.nightly

PLATFORM = "dgx_h100"


def add(project: Project, case: str, *faults: str, step_ms: str = "1.0") -> None:
    axes: dict[str, JsonValue] = {"platforms": [PLATFORM]}
    env = {"TINY_TRAIN_STEP_MS": step_ms}
    project.row(project.case(case, fault=list(faults), env=env), write_golden=False, **axes)


def run_on_gpus(project: Project, *arguments: str, **state: object) -> Run:
    """Run on four pretended GPUs; `state` is added to what NVML has."""
    env = pretend_gpus(project.root, 4, **state)
    return project.run("recipes", "--golden", "off", *arguments, **env)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    project = Project(root=tmp_path_factory.mktemp("gpus"))
    add(project, "ecc", "ecc@3:0")
    add(project, "hang", "watchdog@2")
    add(project, "flip", "flip@4:1", step_ms="60000.0")
    return run_on_gpus(project, "--tee-ranks", "none")


@pytest.mark.everyday
def test_an_uncorrected_error_of_a_gpu_is_the_cause_and_the_next_attempt_has_other_gpus(
    run: Run,
) -> None:
    assert run.verdict("ecc") == ("PASSED", "flaky")
    first, second = run.attempts("ecc")
    assert str(first["cause"]).startswith(
        "GPU 0 (GPU-0) had 1 new uncorrected ECC error; rank 0 of 2 raised RuntimeError: CUDA error"
    )
    assert (first["signature"], first["is_transient"]) == ("ecc_dbe", True)
    assert first["health"] == {
        "faults": ["GPU 0 (GPU-0) had 1 new uncorrected ECC error"],
        "notes": [],
    }
    assert second["health"] == {"faults": [], "notes": []}
    healths = [read_object(Path(str(a["directory"]), "health.json")) for a in (first, second)]
    leased = [[gpu["uuid"] for gpu in health["before"]] for health in healths]  # type: ignore[union-attr,index,call-overload]
    assert leased == [["GPU-0", "GPU-1"], ["GPU-1", "GPU-2"]]
    assert "again at once: known as ecc_dbe, which is transient" in run.stdout


def test_an_uncorrected_error_is_the_cause_of_a_training_that_was_stopped_for_it(run: Run) -> None:
    assert run.verdict("flip") == ("PASSED", "flaky")
    first, second = run.attempts("flip")
    assert second["cause"] is None
    assert "stopped after iteration 3 of 10: lm loss is nan at step 2" in str(first["cause"])
    assert (first["signature"], first["is_transient"]) == ("ecc_dbe", True)


def test_a_hang_that_no_teed_rank_reports_ends_after_every_rank_has_dumped(run: Run) -> None:
    assert run.verdict("hang") == ("FAILED", "failed")
    problem = run.problem("hang")
    assert "of 2 waited for a collective that did not finish, after iteration 1 of 10" in problem
    phase = run.item_dir("hang") / "repeat_1" / "attempt_1" / "phase_1"
    dumps = sorted(path.name for path in (phase / "flight").iterdir())
    assert dumps == ["nccl_trace_rank_0", "nccl_trace_rank_1"]
    stacks = [(phase / "logs" / str(rank) / "stderr.log").read_text() for rank in (0, 1)]
    assert ["in hang_for_ever" in stack for stack in stacks] == [True, True]


def test_an_oom_beside_another_program_is_tried_again(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    script = "echo 'torch.OutOfMemoryError: CUDA out of memory.' >&2; exit 1"
    project.row("oom", script=[script], platforms=[PLATFORM], write_golden=False)
    gpus = [{**gpu(index), "processes": [[4711, 60_000_000_000]]} for index in range(2)]
    run = run_on_gpus(project, "-o", "megatron_retry_backoff=0", gpus=gpus)
    assert run.verdict("oom") == ("ERROR", "broken")
    said = "process 4711, not of this run, held 60.0 GB of GPU 0 (GPU-0)"
    assert [str(a["cause"]).endswith(said) for a in run.attempts("oom")] == [True, True]
    advice = run.problem("oom").splitlines()[1]
    assert advice.startswith("known as cuda_oom (transient as a rule; not run again: ")
    assert advice.endswith("): end that process")


def test_an_nvml_that_crashes_fails_no_run(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row("fine", script=["true"], platforms=[PLATFORM], write_golden=False)
    run = run_on_gpus(project, crash_at_events=True)
    assert run.verdict("fine") == ("PASSED", "passed")
    (attempt,) = run.attempts("fine")
    said = "not all could be read: no answer before the attempt, NVML may have crashed"
    assert attempt["health"] == {"faults": [], "notes": [said]}
