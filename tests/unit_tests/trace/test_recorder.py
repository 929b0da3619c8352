from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from pytest_megatron.errors import TraceError
from pytest_megatron.trace.files import (
    TraceEnd,
    TraceRecord,
    read_end,
    read_header,
    read_records,
)
from pytest_megatron.trace.recorder import Recorder
from pytest_megatron.trace.settings import TraceSettings


class Block(torch.nn.Module):
    """Two linear layers, computed anew in the backward pass if asked for."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 4)

    def body(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.second(torch.relu(self.first(hidden)))
        return out

    @override
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.recompute == "off":
            return self.body(hidden)
        is_reentrant = self.recompute == "reentrant"
        out: torch.Tensor = checkpoint(self.body, hidden, use_reentrant=is_reentrant)
        return out


class Model(torch.nn.Module):
    """An embedding, two blocks, and a layer for the output."""

    def __init__(self, recompute: str = "off") -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.blocks = torch.nn.ModuleList([Block(recompute), Block(recompute)])
        self.output = torch.nn.Linear(4, 10)

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        out: torch.Tensor = self.output(hidden)
        return out


def train(settings: TraceSettings | None, *, recompute: str = "off", seed: int = 0) -> list[float]:
    """Train three steps of two microbatches, and return the losses."""
    torch.manual_seed(seed)
    model = Model(recompute)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorder = None if settings is None else Recorder(settings)
    losses = []
    if recorder is not None:
        recorder.start()
    try:
        for _ in range(3):
            for _ in range(2):
                tokens = torch.randint(10, (2, 5))
                loss = torch.nn.functional.cross_entropy(
                    model(tokens).view(-1, 10), tokens.view(-1)
                )
                loss.backward()  # type: ignore[no-untyped-call] # torch's stub
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if recorder is not None:
            recorder.stop()
    return losses


def records(directory: Path) -> list[TraceRecord]:
    return list(read_records(directory / "rank_0.jsonl"))


def names(found: list[TraceRecord]) -> Iterator[tuple[object, ...]]:
    for one in found:
        yield (one.step, one.microbatch, one.phase, one.module, one.tensor)


def test_a_trace_changes_nothing(tmp_path: Path) -> None:
    assert train(TraceSettings(directory=tmp_path, values="full")) == train(None)


def test_a_step_is_recorded_in_its_order(tmp_path: Path) -> None:
    train(TraceSettings(directory=tmp_path, steps=1))
    found = [one for one in records(tmp_path) if one.step == 1]
    assert [one.order for one in found] == sorted(one.order for one in found)
    second = [one for one in found if one.microbatch == 1]
    assert [(one.module, one.tensor) for one in second if one.phase == "backward"] == [
        ("", "grad_output.0"),
        ("output", "grad_output.0"),
        ("output", "grad_input.0"),
        ("blocks.1", "grad_output.0"),
        ("blocks.1.second", "grad_output.0"),
        ("blocks.1.second", "grad_input.0"),
        ("blocks.1.first", "grad_output.0"),
        ("blocks.1.first", "grad_input.0"),
        ("blocks.1", "grad_input.0"),
        ("blocks.0", "grad_output.0"),
        ("blocks.0.second", "grad_output.0"),
        ("blocks.0.second", "grad_input.0"),
        ("blocks.0.first", "grad_output.0"),
        ("blocks.0.first", "grad_input.0"),
        ("blocks.0", "grad_input.0"),
        ("embedding", "grad_output.0"),
    ]
    assert [one.phase for one in found if one.parameter is not None] == (
        ["gradient"] * 11 + ["update"] * 11
    )
    assert read_end(tmp_path / "rank_0.jsonl") == TraceEnd(steps=1)


def test_stored_values_are_those_that_were_measured(tmp_path: Path) -> None:
    train(TraceSettings(directory=tmp_path, values="full"))
    path = tmp_path / "rank_0.jsonl"
    assert read_header(path).values == "full"
    data = path.with_suffix(".bin").read_bytes()
    for one in records(tmp_path):
        assert one.at is not None
        offset, length = one.at
        part = bytearray(data[offset : offset + length])
        values = torch.frombuffer(part, dtype=getattr(torch, one.dtype))
        assert values.double().norm().item() == pytest.approx(one.norm)
        assert values.numel() == torch.Size(one.shape).numel()


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_recomputed_activations_are_recorded_once(tmp_path: Path, recompute: str) -> None:
    train(TraceSettings(directory=tmp_path / "off"))
    train(TraceSettings(directory=tmp_path / "on"), recompute=recompute)
    off, on = records(tmp_path / "off"), records(tmp_path / "on")
    assert Counter(names(on)).most_common(1)[0][1] == 1
    assert dict(zip(names(on), (one.hash for one in on), strict=True)) == dict(
        zip(names(off), (one.hash for one in off), strict=True)
    )


def test_weights_of_another_run_replace_those_of_the_program(tmp_path: Path) -> None:
    first = train(TraceSettings(directory=tmp_path / "a", weights_to=tmp_path / "w"))
    other = TraceSettings(directory=tmp_path / "b", weights_from=tmp_path / "w")
    assert train(other, seed=5) == first
    found = records(tmp_path / "b")
    made = [one for one in found if one.phase == "initial"]
    before = {one.hash for one in records(tmp_path / "a") if not one.step}
    assert len(made) == 11
    assert not before & {one.hash for one in made}
    assert [replace(one, order=one.order - 11) for one in found[11:]] == records(tmp_path / "a")


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    train(TraceSettings(directory=tmp_path / "a", weights_to=tmp_path / "w"))
    settings = TraceSettings(directory=tmp_path / "b", weights_from=tmp_path / "w")
    recorder = Recorder(settings)
    recorder.start()
    with pytest.raises(TraceError, match=r"holds 0 of 6 values of weight \[2, 3\] at \[0, 0\]"):
        torch.nn.Linear(3, 2)(torch.ones(1, 3))
    recorder.stop(is_whole=False)


@pytest.mark.parametrize("recompute", ["off", "reentrant"])
def test_noise_is_small_and_the_same_again(tmp_path: Path, recompute: str) -> None:
    plain = train(None)
    settings = TraceSettings(directory=tmp_path, noise_seed=7)
    noisy = train(settings, recompute=recompute)
    assert noisy != plain
    assert noisy == pytest.approx(plain, rel=1e-5)
    assert noisy == train(settings)


def test_a_program_without_an_optimizer_is_named(tmp_path: Path) -> None:
    recorder = Recorder(TraceSettings(directory=tmp_path))
    recorder.start()
    torch.nn.Linear(3, 2)(torch.ones(1, 3)).sum().backward()
    recorder.stop()
    problem = "no optimizer of torch or megatron-core made a step"
    assert read_end(tmp_path / "rank_0.jsonl") == TraceEnd(steps=0, problem=problem)


def test_a_program_without_modules_is_named(tmp_path: Path) -> None:
    recorder = Recorder(TraceSettings(directory=tmp_path))
    recorder.start()
    recorder.stop()
    problem = "the program called no torch.nn.Module with gradients"
    assert read_end(tmp_path / "rank_0.jsonl") == TraceEnd(steps=0, problem=problem)


class First(torch.autograd.Function):
    """Takes two tensors; the loss depends on the first."""

    @override
    @staticmethod
    def forward(_ctx: object, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + 0 * second

    @override
    @staticmethod
    def backward(_ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def test_an_output_may_have_no_gradient(tmp_path: Path) -> None:
    model = Block("off")
    optimizer = torch.optim.SGD(model.parameters())
    recorder = Recorder(TraceSettings(directory=tmp_path, steps=1))
    recorder.start()
    try:
        first = model(torch.ones(2, 4))
        loss: torch.Tensor = First.apply(first, model(torch.ones(2, 4)))  # type: ignore[no-untyped-call] # torch's stub
        loss.sum().backward()  # type: ignore[no-untyped-call] # torch's stub
        optimizer.step()
    finally:
        recorder.stop()
    outputs = [one for one in records(tmp_path) if one.module == "" and "output" in one.tensor]
    assert [one.tensor for one in outputs] == ["output.0", "output.0", "grad_output.0"]
