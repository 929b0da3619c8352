"""What is said of workloads before they are submitted, with a real Slurm and made-up mounts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from labs import SlurmLab

from pytest_megatron.base.files import JsonValue
from pytest_megatron.engines.slurm.checks import (
    Around,
    Cluster,
    SlurmChecks,
    ask_slurm,
    look_around,
)
from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.workloads.engine.api import EngineContext, Resources
from pytest_megatron.workloads.engine.config import ContainerConfig, SlurmConfig
from pytest_megatron.workloads.recipe.model import Row, Workload, parse_row
from pytest_megatron.workloads.training.plan.plan import Setting

NEEDED = Resources(
    platform="dgx_h100", num_nodes=2, gpus_per_node=8, ranks_per_node=8, time_limit_s=600
)
MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / {shared} rw - nfs4 server:/x rw
"""


def workload(**changes: str) -> Workload:
    spec: dict[str, JsonValue] = {
        "model": "gpt",
        "test_case": "tp2",
        "environment": "dev",
        "platforms": "dgx_h100",
        "scope": "L0",
        "cadence": ["pr"],
        "gpus": 8,
        "nodes": 2,
        "training_script_path": "train.py",
        **changes,
    }
    return parse_row(Row(line=7, spec=spec, axes=()), file=Path("recipes/r.yaml"), variant=())


class Place:
    """A project and a run directory, one of them on a shared file system."""

    def __init__(self, root: Path) -> None:
        self.shared, self.local = root / "shared", root / "local"
        for directory in (self.shared, self.local, root / "proc/self"):
            directory.mkdir(parents=True)
        (root / "proc/self/mountinfo").write_text(MOUNTS.format(shared=self.shared))
        self.around = replace(look_around(root), hosts=frozenset(["login"]))
        self.cluster = Cluster(partitions=(), hosts=frozenset(["node1", "node2"]))

    def found(
        self,
        config: SlurmConfig,
        row: Workload | None = None,
        *,
        run_dir: Path | None = None,
        env: dict[str, str] | None = None,
        needed: Resources = NEEDED,
        around: Around | None = None,
    ) -> list[tuple[str, str | None]]:
        context = EngineContext(
            root=self.shared / "project",
            run_dir=run_dir or self.shared / "run",
            facts=gather_facts(self.shared),
            env={},
        )
        setting = Setting(root=context.root, env=env or {}, tee_ranks=None, is_lightweight=False)
        checks = SlurmChecks(config, context, around or self.around, lambda: self.cluster)
        return [
            (finding.rule.id, finding.where)
            for finding in checks.findings(row or workload(), setting, needed)
        ]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


SOUND = SlurmConfig(python="/usr/bin/python3")


def test_what_all_nodes_see_and_the_partition_takes_is_submitted(place: Place) -> None:
    assert place.found(SOUND) == []


def test_a_run_directory_of_this_machine_is_refused_unless_it_is_vouched_for(place: Place) -> None:
    run_dir = place.local / "run"
    assert place.found(SOUND, run_dir=run_dir) == [("shared-run-dir", "--run-dir")]
    vouched = replace(SOUND, shared_paths=(str(place.local),))
    assert place.found(vouched, run_dir=run_dir) == []


def test_a_cluster_of_this_one_machine_sees_everything(place: Place) -> None:
    around = replace(place.around, hosts=frozenset(["node1", "node2"]))
    assert place.found(SOUND, run_dir=place.local, around=around) == []


def test_data_caches_and_the_interpreter_are_warned_of(place: Place) -> None:
    python = place.local / "venv/bin/python"
    row = workload(
        data_path=str(place.local / "data"),
        data_cache_path=str(place.shared / "cache"),
        checkpoint_load_path="{assets}/model",
        training_script_path="nemo llm pretrain",
    )
    found = place.found(
        SlurmConfig(python=str(python)), row, env={"HF_HOME": str(place.local / "hf")}
    )
    assert found == [
        ("shared-python", "--executor-config: python"),
        ("shared-data", "recipes/r.yaml:7"),
        ("shared-data", "the environment"),
        ("shared-data", "its default"),
    ]


def test_in_a_container_what_is_mounted_counts(place: Place) -> None:
    row = workload(data_path="/data/wiki", checkpoint_load_path="/models/base")
    mounts = (f"{place.local}:/data:ro", f"{place.shared}:/lustre")
    config = SlurmConfig(container=ContainerConfig(image="i.sqsh", mounts=mounts))
    assert place.found(config, row) == [("shared-data", "recipes/r.yaml:7")]


def test_partitions_are_asked_of_a_real_slurm(place: Place, slurm_lab: SlurmLab) -> None:
    place.cluster = ask_slurm(slurm_lab.env)
    assert {p.name for p in place.cluster.partitions} >= {"debug", "short"}
    assert place.cluster.hosts <= look_around().hosts
    cpu = replace(NEEDED, platform="cpu", gpus_per_node=0, ranks_per_node=2)
    where = "--executor-config: slurm"
    short = replace(SOUND, partition="short", time_slack=0)
    fits = replace(NEEDED, time_limit_s=120)
    wanted = {
        "sound": place.found(SOUND),
        "nodes": place.found(SOUND, needed=replace(NEEDED, num_nodes=5)),
        "gpus": place.found(SOUND, needed=replace(NEEDED, gpus_per_node=9)),
        "whole nodes": place.found(
            replace(SOUND, gpus_per_node=0), needed=replace(NEEDED, gpus_per_node=9)
        ),
        "cpu": place.found(SOUND, needed=cpu),
        "time": place.found(short, needed=replace(fits, time_limit_s=121)),
        "just in time": place.found(short, needed=fits),
        "slack": place.found(replace(short, time_slack=1), needed=fits),
        "either": place.found(replace(short, partition="short,debug", time_slack=9), needed=fits),
        "name": place.found(replace(SOUND, partition="shrt")),
        "ports": place.found(
            replace(SOUND, ports="20000-20002"),
            needed=replace(NEEDED, num_nodes=1, gpus_per_node=4),
        ),
        "ports of whole nodes": place.found(replace(SOUND, ports="20000-20002")),
    }
    assert wanted == {
        "sound": [],
        "nodes": [("partition-nodes", where)],
        "gpus": [("partition-gpus", where)],
        "whole nodes": [],
        "cpu": [],
        "time": [("partition-time", where)],
        "just in time": [],
        "slack": [("partition-time", where)],
        "either": [],
        "name": [("partition-unknown", where)],
        "ports": [("ports-few", where)],
        "ports of whole nodes": [],
    }


def test_a_slurm_that_does_not_answer_is_left_to_the_submission(tmp_path: Path) -> None:
    assert ask_slurm({"PATH": str(tmp_path)}) == Cluster(partitions=())
