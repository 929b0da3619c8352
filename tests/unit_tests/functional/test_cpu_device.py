from __future__ import annotations

import logging

import pytest
import torch
from cpu_device import CPU, answers, cpu_device

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # megatron-core warns of every library it does without
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to use"),
]


class LeftError(Exception):
    """Raised to leave a context."""


def leave_by_exception() -> None:
    """Open the context and leave it."""
    before = names()
    with cpu_device():
        assert names() != before
        raise LeftError


def names() -> list[object]:
    """What stands under every name that the context replaces."""
    return [vars(owner).get(name, "inherited") for owner, name, _ in answers()]


def test_leaving_puts_everything_back_also_after_an_exception() -> None:
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    before = (names(), list(logger.filters))
    with pytest.raises(LeftError):
        leave_by_exception()
    assert (names(), list(logger.filters)) == before
    assert not torch.ones(1).is_cuda
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_it_can_be_opened_again() -> None:
    for _ in range(2):
        with cpu_device():
            assert torch.zeros(1, device="cuda").device == CPU


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 0)], ids=repr
)
def test_a_named_gpu_is_the_cpu(device: str | torch.device) -> None:
    with cpu_device():
        made = [
            torch.empty(2, device=device),
            torch.tensor([1.0], device=device),
            torch.ones(2).to(device),
            torch.ones(2).to(device=device, dtype=torch.bfloat16),
            torch.ones(2).cuda(),
            torch.zeros(2, device=torch.cuda.current_device()),
        ]
        assert [tensor.device for tensor in made] == [CPU] * 6
        assert made[3].dtype == torch.bfloat16
        assert torch.ones(1).to("cpu").device == CPU


def test_tensors_say_that_they_are_on_a_gpu() -> None:
    with cpu_device():
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.ones(1).is_cuda
        assert torch.ones(1).type(torch.float64).dtype == torch.float64
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_forks_of_the_dropout_generator_keep_their_meaning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with cpu_device(), torch.random.fork_rng(devices=[]):
        torch.cuda.manual_seed(5)
        tracker = CudaRNGStatesTracker()
        tracker.add("layer", 7)
        outside = torch.rand(3)
        with tracker.fork("layer"):
            first = torch.rand(3)
        with tracker.fork("layer"):
            second = torch.rand(3)
        after = torch.rand(3)
    plain = torch.Generator().manual_seed(5)
    forked = torch.Generator().manual_seed(7)
    assert torch.equal(torch.cat([outside, after]), torch.rand(6, generator=plain))
    assert torch.equal(torch.cat([first, second]), torch.rand(6, generator=forked))
    assert caplog.messages == []


def test_streams_and_events_are_inert() -> None:
    with cpu_device():
        cuda = vars(torch.cuda)
        start, end = cuda["Event"](enable_timing=True), cuda["Event"](enable_timing=True)
        start.record()
        stream = cuda["Stream"]()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.current_stream())
            stream.record_event(end)
            torch.ones(1).record_stream(stream)
        torch.cuda.synchronize()
        assert (end.query(), start.elapsed_time(end) >= 0) == (True, True)


def test_it_refuses_to_hide_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="this process has CUDA"), cpu_device():
        pass
