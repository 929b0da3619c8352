"""The lines about gangs, exactly as they are printed."""

from __future__ import annotations

from pytest_megatron.gangs.record import flaky_lines, header_line, plan_lines
from pytest_megatron.gangs.topology import GangSpec
from pytest_megatron.gpu.host import Gpu
from pytest_megatron.runs.record import RecordedExecution, RecordedTest, RecordedVerdict

GPUS = [Gpu(index=0, name="NVIDIA H200", uuid="GPU-0", memory_bytes=1)] * 8


def spec(size: int, device: str = "cuda", *, is_isolated: bool = False) -> GangSpec:
    return GangSpec(world_size=size, device=device, is_isolated=is_isolated)


def record(
    verdict: RecordedVerdict, *attempts: RecordedExecution, alone: bool = False
) -> RecordedTest:
    return RecordedTest(verdict=verdict, world_size=2, is_isolated=alone, attempts=attempts)


def attempt(end: str, *, kept: bool = False, signature: str | None = None) -> RecordedExecution:
    return RecordedExecution(
        end=end, is_gang_kept=kept, signature=signature, is_transient=signature is not None
    )


def test_the_header_says_what_was_found() -> None:
    assert [header_line(spec(8), GPUS, "d"), header_line(spec(1, "cpu"), [], "d")] == [
        "megatron: gangs of 8 ranks on cuda (NCCL), 8 x NVIDIA H200 found; logs in d",
        "megatron: gangs of 1 rank on cpu (gloo), no GPU found; logs in d",
    ]
    assert header_line(spec(2, "cpu"), None, "d") == (
        "megatron: gangs of 2 ranks on cpu (gloo); logs in d"
    )


def test_a_plan_counts_tests_for_each_kind_of_gang() -> None:
    specs = [spec(2), None, spec(8), spec(2), spec(2, is_isolated=True), None]
    assert plan_lines(specs) == [
        "gangs of 8 ranks on cuda: 1 test",
        "gangs of 2 ranks on cuda, a gang for each: 1 test",
        "gangs of 2 ranks on cuda: 2 tests",
        "in this process: 2 tests",
    ]
    assert plan_lines([]) == []


def test_the_summary_names_flaky_tests() -> None:
    records = [
        record("failed", attempt("died")),
        record("flaky", attempt("died", signature="gpu_lost"), attempt("done", kept=True)),
        record("failed", attempt("hung")),
        record("passed", attempt("done"), alone=True),
    ]
    assert flaky_lines({"a": records[0], "b": records[1]}) == [
        "flaky   b  passed at rerun 1, after gpu_lost"
    ]
