"""Mistakes in Python code, in checkpoints and in numbers: genuine, the code must change."""

from __future__ import annotations

import json
import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from ways import way

if TYPE_CHECKING:
    import torch
    from training import Training


@way("loss")
def crash_runtime(training: Training) -> None:
    raise RuntimeError(f"attention mask of sequence {training.rank * 8 + 3} is empty")


@way("step")
def crash_value(training: Training) -> None:
    raise ValueError(f"token id 50304 is out of range for a vocabulary of 50257, {training.rank=}")


@way("step")
def crash_key(training: Training) -> None:
    batch = {"tokens": training.rank}
    print(batch["labels"])


@way("gradients")
def crash_zero_division(training: Training) -> None:
    num_tokens = training.iteration - training.iteration
    print(1 / num_tokens)


@way("step")
def crash_chained(training: Training) -> None:
    try:
        index: dict[str, int] = {}
        print(index["shard_00017.idx"])
    except KeyError as error:
        raise RuntimeError("cannot build the index of blended dataset 2") from error


class VocabularyMissingError(Exception):
    pass


@way("setup")
def crash_own_type(training: Training) -> None:
    raise VocabularyMissingError("no entry for <|fim_middle|>")


@way("step")
def crash_recursion(training: Training) -> None:
    crash_recursion(training)


@way("imports")
def import_missing_module(training: Training) -> None:
    import_module("transformer_engine_not_here.pytorch")


@way("imports")
def import_missing_name(training: Training) -> None:
    exec("from json import decode_everything")  # noqa: S102 - no type checker reads it


@way("imports")
def import_missing_library(training: Training) -> None:
    import ctypes

    ctypes.CDLL("libcudnn_graph_not_here.so.9")


@way("loss")
def shapes_of_a_product(training: Training) -> None:
    import torch

    hidden = torch.randn(8, 17, device=training.device)
    training.model(hidden)


@way("setup")
def state_dict_size(training: Training) -> None:
    import torch

    training.model.load_state_dict(torch.nn.Linear(16, 8).state_dict())


@way("setup")
def state_dict_keys(training: Training) -> None:
    import torch

    training.model.load_state_dict(torch.nn.Sequential(torch.nn.Linear(16, 4)).state_dict())


def _checkpoint(training: Training) -> str:
    import torch

    path = training.work / f"checkpoint_{training.rank}.pt"
    torch.save({"model": training.model.state_dict(), "noise": torch.randn(5000)}, path)
    return str(path)


@way("setup")
def checkpoint_truncated(training: Training) -> None:
    import os

    import torch

    path = _checkpoint(training)
    os.truncate(path, os.path.getsize(path) // 2)  # noqa: PTH202
    training.model.load_state_dict(torch.load(path)["model"])


@way("setup")
def checkpoint_empty(training: Training) -> None:
    import os

    import torch

    path = _checkpoint(training)
    os.truncate(path, 0)
    training.model.load_state_dict(torch.load(path)["model"])


@way("setup")
def checkpoint_zeroed(training: Training) -> None:
    """A file system that lost the blocks and kept the length."""
    from pathlib import Path

    import torch

    path = Path(_checkpoint(training))
    path.write_bytes(bytes(path.stat().st_size))
    training.model.load_state_dict(torch.load(path)["model"])


@way("setup")
def checkpoint_missing(training: Training) -> None:
    tracker = training.work / "latest_checkpointed_iteration.txt"
    print(tracker.read_text())


@way("reduced")
def assertion(training: Training) -> None:
    num_experts, num_local = 8, 3
    assert num_experts % num_local == 0, "number of experts is not divisible by local experts"


@way("reduced")
def assertion_with_words(training: Training) -> None:
    raised: str | None = None
    expected = "TimeoutError: NCCL watchdog"
    assert raised == expected, f"expected a TimeoutError from NCCL to be reported, got {raised}"


@way("setup")
def golden_text(training: Training) -> None:
    """What Megatron-LM's comparison says in a log of its own."""
    golden, seen = [10.8612, 10.7313], [10.8612, 10.9541]
    is_close = [abs(a - b) < 1e-3 for a, b in zip(golden, seen, strict=True)]
    print("Actual values:", seen, "Golden values:", golden)
    assert all(is_close), "The following metrics failed: lm loss"


@way("imports")
def config_divisible(training: Training) -> None:
    tensor_parallel = 3
    if training.world_size % tensor_parallel:
        raise ValueError(
            f"world size ({training.world_size}) is not divisible by "
            f"tensor_model_parallel_size ({tensor_parallel})"
        )


@way("imports")
def config_json(training: Training) -> None:
    path = training.work / f"model_config_{training.rank}.json"
    path.write_text('{"hidden_size": 64, "num_layers": }')
    print(json.loads(path.read_text()))


def _check_loss(training: Training, loss: torch.Tensor) -> None:
    """The check and the words of Megatron-LM's `rerun_state_machine`."""
    if not loss.isfinite():
        raise RuntimeError(
            f"Rank {training.rank}, node host, device {training.device}, iteration "
            f"{training.iteration}: Unexpected result {loss.item()} "
            f"(message='found NaN in local forward loss calculation')"
        )


@way("loss")
def nan_loss(training: Training) -> None:
    """0 * inf, as a mask over a logit that overflowed."""
    import torch

    logits = torch.full_like(training.loss, 1e38) * 100
    training.loss = training.loss + logits * 0
    _check_loss(training, training.loss)


@way("reduced", is_lasting=True, is_everywhere=True)
def inf_gradient(training: Training) -> None:
    """A learning rate that makes the weights explode on every rank alike."""
    import torch

    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(1e15)
    for parameter in training.model.parameters():
        assert parameter.grad is not None
        norm = parameter.grad.norm()
        if not norm.isfinite():
            raise RuntimeError(
                f"Rank {training.rank}: found Inf in local grad norm for bucket #0 in backward "
                f"pass before data-parallel communication collective, grad norm {norm.item()}"
            )


@way("destroyed")
def teardown(training: Training) -> None:
    """The training is done and saved; closing what it wrote fails."""
    from tempfile import SpooledTemporaryFile

    writer = SpooledTemporaryFile()  # noqa: SIM115 - closed on purpose
    writer.close()
    writer.write(b"last scalars")


@way("saved")
def teardown_exit_hook(training: Training) -> None:
    import atexit
    import os

    def upload() -> None:
        try:
            raise RuntimeError("upload of 3 metrics did not end: run was never started")
        except RuntimeError:
            logging.exception("exit hook failed")
            sys.stderr.flush()
            os._exit(1)

    atexit.register(upload)


@way("step")
def caught_then_real(training: Training) -> None:
    """A failure with alarming words is handled, and something else is the end."""
    import torch

    try:
        torch.ones(1).reshape(7)
    except RuntimeError:
        logging.exception("evaluation of CUDA out of memory fallback skipped, going on")
    batch: list[int] = []
    print(batch[training.iteration])


@way("step")
def two_at_once(training: Training) -> None:
    raise ValueError(f"sample {training.rank} of the batch has no label")
