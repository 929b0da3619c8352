"""What Slurm's commands print, and what its states are to a training."""

from __future__ import annotations

from datetime import datetime

import pytest

from pytest_megatron.engines.slurm.states import (
    SQUEUE_FORMAT,
    SlurmJob,
    expand_hosts,
    parse_squeue,
    phase_of,
    trouble_of,
    why_never,
)
from pytest_megatron.workloads.engine.api import SubmissionPhase, TroubleKind

START = datetime(2026, 11, 21, 9, 30)  # noqa: DTZ001 - Slurm's local time


def squeue_line(*values: str) -> str:
    """Return a line as squeue prints it: each value in its width, and the sign after it."""
    widths = [int(field.partition(":")[2].rstrip("|")) for field in SQUEUE_FORMAT.split(",")]
    return "".join(f"{v:<{w}}"[:w] + "|" for v, w in zip(values, widths, strict=True))


def test_lines_of_squeue() -> None:
    text = "\n".join(
        [
            squeue_line(
                "41", "PENDING", "Resources", "0", "0", "2026-11-21T09:30:00", "", "a.0123abcd-1"
            ),
            squeue_line("42", "FAILED", "None", "1", "256", "N/A", "node[1-2]", "a|b"),
            squeue_line("43_[3-9]", "PENDING", "None", "0", "0", "N/A", "", "x"),
            "slurm_load_jobs error: what it says on a bad day",
        ]
    )
    assert parse_squeue(text) == (
        SlurmJob(
            job_id=41,
            state="PENDING",
            reason="Resources",
            start=START,
            name="a.0123abcd-1",
        ),
        SlurmJob(
            job_id=42,
            state="FAILED",
            num_restarts=1,
            exit_status=256,
            nodes="node[1-2]",
            name="a|b",
        ),
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("node7", ("node7",)),
        ("gpu[08-10,12]-ib,head", ("gpu08-ib", "gpu09-ib", "gpu10-ib", "gpu12-ib", "head")),
        ("r[1-2]n[3-4]", ("r1n3", "r1n4", "r2n3", "r2n4")),
    ],
)
def test_lists_of_hosts(text: str, names: tuple[str, ...]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ("PENDING", SubmissionPhase.WAITING),
        ("CONFIGURING", SubmissionPhase.WAITING),
        ("REQUEUE_HOLD", SubmissionPhase.WAITING),
        ("RUNNING", SubmissionPhase.RUNNING),
        ("COMPLETING", SubmissionPhase.RUNNING),
        ("SUSPENDED", SubmissionPhase.RUNNING),
        ("A_STATE_OF_TOMORROW", SubmissionPhase.RUNNING),
        ("REVOKED", SubmissionPhase.ENDED),
    ],
)
def test_how_far_a_job_is(state: str, phase: SubmissionPhase) -> None:
    assert phase_of(SlurmJob(job_id=1, state=state)) is phase


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("TIMEOUT", TroubleKind.TIMEOUT),
        ("DEADLINE", TroubleKind.TIMEOUT),
        ("NODE_FAIL", TroubleKind.NODE_FAIL),
        ("PREEMPTED", TroubleKind.PREEMPTED),
        ("OUT_OF_MEMORY", TroubleKind.OUT_OF_MEMORY),
        ("BOOT_FAIL", TroubleKind.BOOT_FAIL),
        ("CANCELLED", TroubleKind.CANCELLED),
        ("REVOKED", TroubleKind.CANCELLED),
        ("FAILED", TroubleKind.LOST),
        ("COMPLETED", TroubleKind.LOST),
    ],
)
def test_every_end_is_told_apart(state: str, kind: TroubleKind) -> None:
    trouble = trouble_of(SlurmJob(job_id=41, state=state, nodes="node1"), had_record=False)
    assert trouble is not None
    assert trouble.kind is kind
    assert trouble.text.startswith(f"job 41 on node1 ended as {state}")


def test_a_record_says_more_than_that_a_job_failed_and_less_than_that_its_node_did() -> None:
    failed = SlurmJob(job_id=41, state="FAILED", nodes="node1", exit_status=256)
    assert trouble_of(failed, had_record=True) is None
    node = SlurmJob(job_id=41, state="NODE_FAIL", nodes="node1")
    assert trouble_of(node, had_record=True) is not None


@pytest.mark.parametrize(
    ("status", "kind"),
    [(4021, TroubleKind.BOOT_FAIL), (9, TroubleKind.LOST)],
    ids=["its log cannot be made", "it was killed"],
)
def test_slurm_has_one_reason_for_jobs_that_were_not_launched_and_that_were_killed(
    status: int, kind: TroubleKind
) -> None:
    job = SlurmJob(
        job_id=41, state="FAILED", nodes="node1", reason="JobLaunchFailure", exit_status=status
    )
    trouble = trouble_of(job, had_record=False)
    assert trouble is not None
    assert trouble.kind is kind


def test_a_job_that_ended_before_it_had_nodes_never_started() -> None:
    job = SlurmJob(job_id=3, state="FAILED", reason="BadConstraints", exit_status=1)
    trouble = trouble_of(job, had_record=False)
    assert trouble is not None
    assert (trouble.kind, trouble.text) == (
        TroubleKind.NOT_STARTED,
        "job 3 ended as FAILED before it started: BadConstraints",
    )


@pytest.mark.parametrize(
    ("reason", "is_final"),
    [
        ("BadConstraints", True),
        ("QOSMaxNodePerJobLimit", True),
        ("AssocMaxWallDurationPerJobLimit", True),
        ("InvalidAccount", True),
        ("Resources", False),
        ("Priority", False),
        ("QOSMaxGRESPerUser", False),
        ("AssocGrpGRES", False),
        ("JobHeldAdmin", False),
        ("ReqNodeNotAvail, UnavailableNodes:node7", False),
    ],
)
def test_reasons_that_no_waiting_helps(reason: str, *, is_final: bool) -> None:
    job = SlurmJob(job_id=41, state="PENDING", reason=reason)
    assert (why_never(job) is not None) is is_final
