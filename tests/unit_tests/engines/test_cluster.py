from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.engines.slurm.checks import (
    NamedPath,
    Wanted,
    check_partition,
    check_ports,
    check_shared,
    in_container,
    parse_cluster,
    parse_mounts,
)
from pytest_megatron.workloads.training.checks.check import findings_of
from pytest_megatron.workloads.training.checks.rules import check_rules

MOUNTS = parse_mounts(
    "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    "30 22 0:40 / /lustre rw - lustre 10.0.0.1@o2ib:/fs rw\n"
    "31 22 0:41 / /vm rw - virtiofs host rw\n"
)
PARTITIONS = (
    "PartitionName=batch AllowAccounts=ALL AllowQos=ALL Default=YES MaxNodes=4 "
    "MaxTime=1-00:00:00 MinNodes=1 State=UP TotalNodes=6 TRES=cpu=64\n"
    "PartitionName=short AllowAccounts=nlp,vision AllowQos=quick Default=NO MaxNodes=UNLIMITED "
    "MaxTime=00:30:59 MinNodes=2 State=UP TotalNodes=2\n"
    "PartitionName=old AllowAccounts=ALL DenyAccounts=vision DenyQos=quick Default=NO "
    "MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 State=DRAIN TotalNodes=1\n"
)
NODES = (
    "batch|3|gpu:h100:8(S:0-1)|n1\nbatch|1|gpu:a100:4,shard:8|n2\nbatch|2|(null)|n3\n"
    "short|2|gpu:4|n2\nold|1|(null)|n9\n"
)
CLUSTER = parse_cluster(PARTITIONS, NODES)
FITS = Wanted(
    partitions=(), minutes=1440, nodes=3, gpus=8, account="nlp", queue="quick", where="slurm"
)
SHORT = replace(FITS, partitions=("short",), minutes=30, nodes=2, gpus=4)


@pytest.mark.parametrize(
    ("wrong", "right", "rule", "found"),
    [
        pytest.param(
            replace(FITS, partitions=("bach",)),
            replace(FITS, partitions=("batch",)),
            "partition-unknown",
            "there is no partition 'bach'",
            id="name",
        ),
        pytest.param(
            replace(FITS, minutes=1441),
            FITS,
            "partition-time",
            "the job asks for 1-00:01:00, and partition batch gives at most 1-00:00:00",
            id="time",
        ),
        pytest.param(
            replace(FITS, nodes=5, gpus=0),
            replace(FITS, nodes=4, gpus=0),
            "partition-nodes",
            "the job asks for 5 nodes, and partition batch: at most 4",
            id="most nodes",
        ),
        pytest.param(
            replace(SHORT, nodes=1),
            SHORT,
            "partition-nodes",
            "the job asks for 1 nodes, and partition short: at least 2",
            id="least nodes",
        ),
        pytest.param(
            replace(SHORT, nodes=3),
            SHORT,
            "partition-nodes",
            "the job asks for 3 nodes, and partition short: has 2",
            id="all nodes",
        ),
        pytest.param(
            replace(FITS, nodes=4),
            replace(FITS, nodes=4, gpus=4),
            "partition-gpus",
            "the job asks for 4 nodes with 8 GPUs each, and partition batch has "
            "3 with 8, 1 with 4, 2 with 0 GPUs",
            id="GPUs",
        ),
        pytest.param(
            replace(SHORT, account="audio"),
            replace(SHORT, account="vision"),
            "partition-member",
            "partition short does not take the account audio: it takes nlp, vision",
            id="account",
        ),
        pytest.param(
            replace(SHORT, queue="long"),
            replace(SHORT, queue=None),
            "partition-member",
            "partition short does not take the QOS long: it takes quick",
            id="QOS",
        ),
        pytest.param(
            replace(FITS, partitions=("old",), nodes=1, gpus=0, queue=None),
            replace(FITS, partitions=("old", "batch")),
            "partition-down",
            "partition old is DRAIN",
            id="state",
        ),
    ],
)
def test_what_no_partition_takes_is_found_and_its_neighbour_is_not(
    wrong: Wanted, right: Wanted, rule: str, found: str
) -> None:
    findings = findings_of(check_partition(CLUSTER, wrong))
    assert [(finding.rule.id, finding.found) for finding in findings] == [(rule, found)]
    assert findings_of(check_partition(CLUSTER, right)) == ()


def test_denied_accounts_and_queues_are_named() -> None:
    wanted = replace(FITS, partitions=("old",), nodes=1, gpus=0, account="vision")
    found = [finding.found for finding in findings_of(check_partition(CLUSTER, wanted))]
    assert found == [
        "partition old does not take the account vision: it takes all but vision",
        "partition old does not take the QOS quick: it takes all but quick",
        "partition old is DRAIN",
    ]


def test_a_cluster_that_does_not_answer_refuses_nothing() -> None:
    assert findings_of(check_partition(parse_cluster("", ""), FITS)) == ()


@pytest.mark.parametrize(
    ("rule", "path", "wrong"),
    [
        ("shared-run-dir", "/home/runs", True),
        ("shared-run-dir", "/lustre/runs", False),
        ("shared-project", "/home/project", True),
        ("shared-project", "/shared/project", False),  # vouched for
        ("shared-project", "/shared2/project", True),
        ("shared-python", "/home/venv/bin/python", True),
        ("shared-python", "/usr/bin/python3", False),
        ("shared-data", "/usr/data", True),
        ("shared-data", "/lustre/data", False),
    ],
)
def test_a_path_that_only_this_machine_sees_is_found(rule: str, path: str, wrong: object) -> None:
    named = NamedPath(use="it", path=Path(path), rule=rule, where="there")
    findings = findings_of(check_shared([named], MOUNTS, [Path("/shared")]))
    assert [finding.rule.id for finding in findings] == ([rule] if wrong else [])


def test_a_file_system_of_an_unknown_kind_is_a_warning_whatever_is_on_it() -> None:
    named = NamedPath(use="it", path=Path("/vm/x"), rule="shared-run-dir", where="there")
    (finding,) = findings_of(check_shared([named], MOUNTS, []))
    assert (finding.rule.id, finding.is_error) == ("shared-unknown", False)
    assert finding.found.startswith("it /vm/x is on virtiofs (/vm)")


@pytest.mark.parametrize(
    ("ports", "jobs", "rules"),
    [
        ("20000-29999", 5_000, []),
        ("20000-29999", 5_001, ["ports-few"]),
        ("30000-32767", 1, []),
        ("30000-32768", 1, ["ports-ephemeral"]),
        ("60999-65535", 1, ["ports-ephemeral"]),
        ("61000-65535", 1, []),
        ("1024-2000", 1, []),
        ("1023-2000", 1, ["ports-range"]),
        ("61000-65536", 1, ["ports-range"]),
        ("3000-2000", 1, ["ports-range"]),
    ],
)
def test_ports_are_free_ones_and_enough(ports: str, jobs: int, rules: list[str]) -> None:
    first, _, last = ports.partition("-")
    hits = check_ports(range(int(first), int(last) + 1), (32768, 60999), jobs, "slurm")
    assert [finding.rule.id for finding in findings_of(hits)] == rules


def test_a_path_in_a_container_is_looked_up_outside() -> None:
    mounts = {Path("/data"): Path("/lustre/data"), Path("/data/own"): Path("/home/own")}
    assert [in_container(Path(path), mounts) for path in ("/data/x", "/data/own/x", "/opt/x")] == [
        Path("/lustre/data/x"),
        Path("/home/own/x"),
        None,
    ]


def test_every_rule_of_the_cluster_is_tested_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    rules = [rule.id for rule in check_rules().values() if rule.group == "Cluster"]
    assert [rule for rule in rules if f'"{rule}"' not in text] == []
