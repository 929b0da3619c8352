from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.errors import TraceError
from pytest_megatron.trace.bits import compare_bits
from pytest_megatron.trace.equivalence import Phase, TraceComparison, headline
from pytest_megatron.trace.files import (
    TraceEnd,
    TraceHeader,
    TraceLayout,
    TraceRecord,
    TraceWriter,
)

FC1, FC2 = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"


def record(module: str, tensor: str, phase: Phase = "forward", *, step: int = 1) -> TraceRecord:
    return TraceRecord(
        order=0,
        step=step,
        microbatch=0,
        phase=phase,
        module=module,
        kind="Linear",
        tensor=tensor,
        shape=(2, 4),
        dtype="float32",
        norm=1.0,
        mean=0.5,
        hash="0123456789abcdef",
        not_finite=0,
    )


STEP = (
    record("", "input.0"),
    record(FC1, "input.0"),
    record(FC1, "output.0"),
    record(FC2, "output.0"),
    record(FC2, "grad_output.0", "backward"),
    record(FC1, "grad_output.0", "backward"),
    record(FC1, "weight", "gradient"),
    record(FC1, "weight", "update"),
)
STEPS = (*STEP, *(replace(one, step=2) for one in STEP))
END = TraceEnd(steps=2)
OTHER = "fedcba9876543210"


def trace(
    directory: Path,
    *ranks: Sequence[TraceRecord],
    layouts: Sequence[TraceLayout] = (),
    end: TraceEnd | None = END,
) -> Path:
    for rank, records in enumerate(ranks):
        writer = TraceWriter(directory, rank, has_values=False)
        writer.write_header(
            TraceHeader(
                rank=rank,
                world_size=len(ranks),
                device="cpu",
                torch="2.13.0",
                megatron_core=None,
                layout=layouts[rank] if layouts else TraceLayout(dp=(rank, len(ranks))),
                values="hash",
            )
        )
        for order, one in enumerate(records):
            writer.write_record(replace(one, order=order))
        writer.close(end)
    return directory


def changed(
    records: Sequence[TraceRecord], *at: int, to: str = OTHER, norm: float = 1.0
) -> list[TraceRecord]:
    return [replace(one, hash=to, norm=norm) if i in at else one for i, one in enumerate(records)]


def compared(
    tmp_path: Path, reference: Sequence[TraceRecord], candidate: Sequence[TraceRecord]
) -> TraceComparison:
    return compare_bits(trace(tmp_path / "a", reference), trace(tmp_path / "b", candidate))


def test_equal_traces_are_counted(tmp_path: Path) -> None:
    assert compared(tmp_path, STEPS, STEPS) == TraceComparison(
        verdict="equal", steps=2, num_compared=16
    )


def test_sums_that_a_gpu_rounds_otherwise_are_no_difference(tmp_path: Path) -> None:
    noisy = [replace(one, norm=1.0 + 1e-15, mean=0.5 - 1e-16) for one in STEPS]
    assert compared(tmp_path, STEPS, noisy).verdict == "equal"


def test_the_first_difference_has_module_tensor_step_phase_and_rank(tmp_path: Path) -> None:
    other = changed(STEPS, 3, 4, 5, 6, 7, 11, norm=2.0)
    found = compare_bits(trace(tmp_path / "a", STEPS, STEPS), trace(tmp_path / "b", STEPS, other))
    assert (found.verdict, found.num_divergences, found.num_compared) == ("different", 6, 32)
    first = found.divergences[0]
    assert headline(first) == f"forward of {FC2} output.0, step 1, rank 1"
    assert (first.kind, first.norm_ratio, first.order) == ("bits", 2.0, 3)


def test_a_pipeline_stage_is_not_blamed_for_what_it_receives(tmp_path: Path) -> None:
    """Each rank counts its records from 0, so that the last stage's differs at a smaller number."""
    stages = [TraceLayout(pp=(rank, 2)) for rank in range(2)]
    first, last = [*STEP[:3], *STEP[5:]], STEP[3:5]
    found = compare_bits(
        trace(tmp_path / "a", first, last, layouts=stages),
        trace(tmp_path / "b", changed(first, 2, 3), changed(last, 0, 1), layouts=stages),
    )
    assert [headline(one) for one in found.divergences] == [
        f"forward of {FC1} output.0, step 1, rank 0",
        f"forward of {FC2} output.0, step 1, rank 1",
        f"backward of {FC2} grad_output.0, step 1, rank 1",
        f"backward of {FC1} grad_output.0, step 1, rank 0",
    ]


def test_virtual_stages_are_ordered_by_their_layers(tmp_path: Path) -> None:
    stages = [TraceLayout(pp=(rank, 2), vpp=2) for rank in range(2)]
    chunks = [
        [record("decoder.layers.2.mlp", "output.0"), record("decoder.layers.0.mlp", "output.0")],
        [record("decoder.layers.3.mlp", "output.0"), record("decoder.layers.1.mlp", "output.0")],
    ]
    found = compare_bits(
        trace(tmp_path / "a", *chunks, layouts=stages),
        trace(tmp_path / "b", changed(chunks[0], 0), changed(chunks[1], 0, 1), layouts=stages),
    )
    assert [one.module for one in found.divergences] == [
        f"decoder.layers.{layer}.mlp" for layer in (1, 2, 3)
    ]


def test_a_module_that_one_side_lacks_hides_no_other_difference(tmp_path: Path) -> None:
    added = record("decoder.layers.0.norm", "output.0")
    candidate = [*STEPS[:2], added, *changed(STEPS, 3)[2:]]
    found = compared(tmp_path, STEPS, candidate)
    assert [(one.kind, one.module) for one in found.divergences] == [
        ("extra", "decoder.layers.0.norm"),
        ("bits", FC2),
    ]
    assert found.num_compared == 16
    back = compare_bits(tmp_path / "b", tmp_path / "a")
    assert [one.kind for one in back.divergences] == ["missing", "bits"]


def test_a_module_that_is_called_twice_is_compared_call_by_call(tmp_path: Path) -> None:
    twice = [replace(STEP[1], hash="0" * 16), replace(STEP[1], hash="1" * 16)]
    added = record("decoder.layers.0.norm", "output.0")
    found = compared(tmp_path, twice, [added, *twice])
    assert [one.kind for one in found.divergences] == ["extra"]


def test_memory_is_bounded_where_no_record_is_in_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_megatron.trace.bits._MOST_WAITING", 3)
    other = [replace(one, module=f"new.{one.module}") for one in STEPS]
    found = compared(tmp_path, STEPS, other)
    assert (found.num_compared, found.num_divergences, len(found.divergences)) == (0, 32, 32)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        pytest.param({"shape": (2, 8)}, "shape", id="shape"),
        pytest.param({"dtype": "bfloat16"}, "shape", id="dtype"),
        pytest.param({"hash": OTHER, "norm": None, "not_finite": 3}, "not_finite", id="nan"),
    ],
)
def test_a_difference_has_its_kind(tmp_path: Path, change: dict[str, object], kind: str) -> None:
    other = [*STEPS[:2], replace(STEPS[2], **change), *STEPS[3:]]  # type: ignore[arg-type]
    assert [one.kind for one in compared(tmp_path, STEPS, other).divergences] == [kind]


def test_the_first_fifty_differences_are_kept(tmp_path: Path) -> None:
    many = [record(f"decoder.layers.{layer}.mlp", "output.0") for layer in range(80)]
    found = compared(tmp_path, many, changed(many, *range(80)))
    assert found.num_divergences == 80
    assert [one.order for one in found.divergences] == list(range(50))


def test_other_data_are_named(tmp_path: Path) -> None:
    found = compared(tmp_path, STEPS, changed(STEPS, *range(16)))
    assert found.hint == "the inputs of the model differ: data, labels or position ids"


def test_other_initial_weights_are_named(tmp_path: Path) -> None:
    first = record(FC1, "weight", "update", step=0)
    found = compared(tmp_path, [first, *STEPS], [replace(first, hash=OTHER), *STEPS])
    assert headline(found.divergences[0]) == f"initial value of {FC1}.weight, rank 0"
    assert found.hint is not None
    assert found.hint.startswith("weights differ before the first step")


def test_a_trace_of_a_program_without_modules_is_not_called_equal(tmp_path: Path) -> None:
    empty = trace(tmp_path / "a", [], end=TraceEnd(steps=0, problem="the program called no module"))
    with pytest.raises(TraceError, match="cannot be compared: the program called no module"):
        compare_bits(empty, empty)
    bare = trace(tmp_path / "b", [])
    with pytest.raises(TraceError, match="holds no tensors, so nothing is compared"):
        compare_bits(bare, bare)


def test_only_steps_of_both_are_compared(tmp_path: Path) -> None:
    one_step = trace(tmp_path / "b", changed(STEP, 7), end=TraceEnd(steps=1))
    assert compare_bits(trace(tmp_path / "a", STEPS), one_step).num_compared == 8


def test_a_trace_of_a_crash_is_compared_up_to_there(tmp_path: Path) -> None:
    whole = trace(tmp_path / "a", STEPS)
    cut = trace(tmp_path / "b", changed(STEP, 5)[:6], end=None)
    found = compare_bits(whole, cut)
    assert [(one.kind, one.module) for one in found.divergences] == [("bits", FC1)]
    assert compare_bits(cut, whole).num_divergences == 1


def test_a_trace_that_is_cut_off_is_not_called_equal(tmp_path: Path) -> None:
    whole, cut = trace(tmp_path / "a", STEPS), trace(tmp_path / "b", STEPS[:9], end=None)
    with pytest.raises(TraceError, match=r"rank_0\.jsonl: is cut off, and there is no difference"):
        compare_bits(whole, cut)


def test_another_layout_is_refused_with_the_way_to_compare_it(tmp_path: Path) -> None:
    tp2 = [TraceLayout(tp=(rank, 2)) for rank in range(2)]
    with pytest.raises(TraceError) as caught:
        compare_bits(trace(tmp_path / "a", STEPS), trace(tmp_path / "b", STEPS, STEPS, layouts=tp2))
    assert str(caught.value) == (
        f"{tmp_path / 'b'}: is of 2 ranks in another layout than the reference, which has 1: bits "
        "are compared rank by rank; to compare layouts, write pytest-megatron trace compare ROW ROW"
    )
