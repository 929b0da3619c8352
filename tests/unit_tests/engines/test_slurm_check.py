"""What is said of workloads before they are submitted, by a real Slurm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from labs import SlurmLab

from pytest_megatron.base.files import JsonValue
from pytest_megatron.engines.config import SlurmConfig
from pytest_megatron.engines.slurm.checks import SlurmChecks
from pytest_megatron.engines.slurm.submit import RealSlurm, SlurmAwayError
from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.workloads.engine.api import EngineContext, Resources
from pytest_megatron.workloads.recipe.model import Row, Workload, parse_row
from pytest_megatron.workloads.training.plan.plan import Setting

NEEDED = Resources(
    platform="dgx_h100", num_nodes=2, gpus_per_node=8, ranks_per_node=8, time_limit_s=600
)
SPEC: dict[str, JsonValue] = {
    "model": "gpt",
    "test_case": "tp2",
    "environment": "dev",
    "platforms": "dgx_h100",
    "scope": "L0",
    "cadence": ["pr"],
    "gpus": 8,
    "nodes": 2,
    "training_script_path": "train.py",
}


def workload(**spec: JsonValue) -> Workload:
    return parse_row(
        Row(line=7, spec={**SPEC, **spec}, axes=()), file=Path("recipes/r.yaml"), variant=()
    )


class Cluster:
    """A cluster as the checks see it, and how often it was asked."""

    def __init__(self, root: Path, env: dict[str, str]) -> None:
        self.slurm = RealSlurm(env, root)
        self.context = EngineContext(
            root=root, run_dir=root / "run", facts=gather_facts(root), env=env
        )
        self.num_asked = 0

    def refusal(self, words: Sequence[str]) -> str | None:
        self.num_asked += 1
        return self.slurm.refusal(words)

    def checks(self, config: SlurmConfig) -> SlurmChecks:
        return SlurmChecks(config, self.context, self.refusal)

    def said(self, config: SlurmConfig, needed: Resources = NEEDED) -> str | None:
        """Return the only finding about a workload, None where there is none."""
        setting = Setting(root=self.context.root, env={}, tee_ranks=None, is_lightweight=False)
        found = self.checks(config).findings(workload(), setting, needed)
        if not found:
            return None
        (finding,) = found
        assert (finding.rule.id, finding.is_error) == ("slurm-refuses", False)
        assert finding.where == "--executor-config: slurm"
        return finding.found.removeprefix("sbatch --test-only says: ")


def test_slurm_itself_says_what_it_would_refuse(slurm_lab: SlurmLab, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {**os.environ, **slurm_lab.env})
    plain, short = SlurmConfig(), SlurmConfig(partition="short", time_slack=0)
    fits = replace(NEEDED, time_limit_s=120)
    assert cluster.said(plain) is None
    assert cluster.said(short, fits) is None
    assert cluster.said(replace(plain, gpus_per_node=0), replace(NEEDED, gpus_per_node=9)) is None
    wrong = {
        "Node count specification invalid": (plain, replace(NEEDED, num_nodes=5)),
        "Requested node configuration is not available": (plain, replace(NEEDED, gpus_per_node=9)),
        "Requested time limit is invalid": (short, replace(fits, time_limit_s=121)),
        "Invalid partition name specified": (replace(plain, partition="shrt"), NEEDED),
    }
    for said, (config, needed) in wrong.items():
        assert said in (cluster.said(config, needed) or ""), said


def test_jobs_that_need_the_same_are_asked_about_once(slurm_lab: SlurmLab, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {**os.environ, **slurm_lab.env})
    checks = cluster.checks(SlurmConfig(partition="shrt"))
    setting = Setting(root=tmp_path, env={}, tee_ranks=None, is_lightweight=False)
    found = [checks.findings(workload(), setting, NEEDED) for _ in range(3)]
    assert ([len(one) for one in found], cluster.num_asked) == ([1, 1, 1], 1)


@pytest.mark.parametrize(
    ("script", "env", "kind", "expected"),
    [
        pytest.param("train.py", {"NEMO_HOME": "/data/nemo"}, "xfs", "/data/nemo", id="given"),
        pytest.param("train.py", {"NEMO_HOME": "/data/nemo"}, "lustre", None, id="shared"),
        pytest.param("train.py", {}, "xfs", None, id="no program of NeMo"),
        pytest.param("nemo/llm.py", {}, "xfs", "/root/.cache/nemo", id="its default"),
    ],
)
def test_a_nemo_home_that_one_machine_sees_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    env: dict[str, str],
    kind: str,
    expected: str | None,
) -> None:
    monkeypatch.setenv("HOME", "/root")
    mounts = [SimpleNamespace(mountpoint=point, fstype=kind) for point in ("/data", "/root")]
    root = SimpleNamespace(mountpoint="/", fstype="nfs4")
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: [root, *mounts])
    checks = Cluster(tmp_path, {"PATH": "/nonexistent"}).checks(SlurmConfig())
    setting = Setting(root=tmp_path, env=env, tee_ranks=None, is_lightweight=False)
    found = checks.findings(workload(training_script_path=script), setting, NEEDED)
    assert [(one.rule.id, one.is_error) for one in found] == [("nemo-home", False)] * bool(expected)
    assert all(f"NEMO_HOME is {expected} on {kind}" in one.found for one in found)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_slurm_that_does_not_answer_is_left_to_the_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    cluster = Cluster(tmp_path, {"PATH": "/nonexistent"})

    def time_out(_words: Sequence[str]) -> None:
        raise SlurmAwayError("Socket timed out")

    if is_there:
        monkeypatch.setattr(cluster.slurm, "refusal", time_out)
    assert cluster.said(SlurmConfig()) is None
