from __future__ import annotations

import pytest

from pytest_megatron.trace.equivalence import DivergenceKind, Phase, TensorDivergence
from pytest_megatron.trace.files import TraceLayout
from pytest_megatron.trace.hints import hint_of

_ONE = TraceLayout()
_TP2 = TraceLayout(tp=(0, 2))
_DP2 = TraceLayout(dp=(0, 2))
_PP2 = TraceLayout(pp=(0, 2))


def _at(  # noqa: PLR0913
    phase: Phase,
    module: str,
    tensor: str = "output.0",
    *,
    step: int = 1,
    ratio: float | None = None,
    ranks: tuple[int, ...] = (),
    kind: DivergenceKind = "value",
    is_buffer: bool = False,
) -> TensorDivergence:
    return TensorDivergence(
        order=0,
        step=step,
        microbatch=0,
        phase=phase,
        module=module,
        tensor=tensor,
        parameter=f"{module}.{tensor}" if phase in {"gradient", "update"} and module else None,
        ranks=ranks,
        norm_ratio=ratio,
        kind=kind,
        is_buffer=is_buffer,
    )


@pytest.mark.parametrize(
    ("layout", "divergences", "words"),
    [
        pytest.param(
            _DP2,
            [_at("gradient", "a", "weight", ratio=2.0), _at("gradient", "b", "weight", ratio=2.0)],
            "2 times the reference's, the number of data-parallel ranks",
            id="sum for mean",
        ),
        pytest.param(
            _TP2,
            [_at("forward", "mlp", ratio=0.5)],
            "1/2 of the reference's, 2 being the number of tensor-parallel ranks",
            id="missing reduction",
        ),
        pytest.param(
            _TP2, [_at("forward", "mlp", ratio=1.3, ranks=(1,))], "only rank 1 of 2", id="one shard"
        ),
        pytest.param(
            _TP2,
            [_at("gradient", "decoder.layers.0.input_layernorm", "weight", ratio=0.7)],
            "which have to be added",
            id="layernorm unsynced",
        ),
        pytest.param(
            _PP2,
            [_at("gradient", "embedding.word_embeddings", "weight", ratio=0.7)],
            "first and last pipeline stage",
            id="tied embedding",
        ),
        pytest.param(
            _DP2,
            [_at("gradient", "a.experts.local_experts.0.linear_fc1", "weight", ratio=0.7)],
            "only gradients of experts differ",
            id="expert group",
        ),
        pytest.param(
            TraceLayout(dp=(0, 2), ep=(0, 2)),
            [
                _at(
                    "gradient",
                    "a.experts.local_experts.4.linear_fc1",
                    "weight",
                    ratio=2,
                    ranks=(1,),
                )
            ],
            "only experts of rank 1 differ",
            id="experts of a rank",
        ),
        pytest.param(
            _DP2, [_at("gradient", "", "grad_norm", ratio=1.4)], "their norm does not", id="clip"
        ),
        pytest.param(
            _DP2,
            [_at("update", "a", "weight", kind="replicas", ranks=(0, 1))],
            "by the learning rate, the clipping or the state, or the parts of a distributed",
            id="other optimizers",
        ),
        pytest.param(
            _DP2,
            [_at("update", "a", "weight", ratio=50.0)],
            "what the optimizer makes of them",
            id="optimizer",
        ),
        pytest.param(
            _DP2,
            [_at("forward", "", "samples", kind="missing")],
            "samples of micro-batch 0",
            id="missing micro-batch",
        ),
        pytest.param(
            _DP2,
            [_at("update", "router", "expert_bias", is_buffer=True)],
            "the buffer is updated otherwise",
            id="buffer",
        ),
        pytest.param(
            _DP2,
            [_at("initial", "a", "weight", step=0, kind="replicas", ranks=(0, 1))],
            "ranks 0-1 begin with other values",
            id="begin",
        ),
        pytest.param(_DP2, [_at("forward", "", "input.0")], "the inputs of the model", id="inputs"),
    ],
)
def test_known_patterns_have_a_hint(
    layout: TraceLayout, divergences: list[TensorDivergence], words: str
) -> None:
    assert words in (hint_of(divergences, _ONE, layout) or "")


def test_equal_traces_and_unknown_patterns_have_none() -> None:
    assert hint_of([], _ONE, _TP2) is None
    assert hint_of([_at("forward", "mlp", ratio=1.3, ranks=(0, 1))], _ONE, _TP2) is None
    assert hint_of([_at("forward", "", "output.0", ratio=1.3)], _ONE, _DP2) is None
