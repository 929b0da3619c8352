"""Tests that pass and leave something behind; each is followed by one that leaves nothing.

What each is made after is in its docstring. `LEAKS` is what the audit has to name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import random as megatron_random

KEPT: list[object] = []
LEAKS = {
    "test_creates_a_group": "1 process group (2 ranks)",
    "test_destroys_model_parallel_but_not_its_groups": "process groups (",
    "test_leaves_model_parallel": "parallel state of megatron-core",
    "test_sets_the_default_dtype": "default dtype torch.float64, was torch.float32",
    "test_sets_a_default_device": "default device meta, was cpu",
    "test_makes_algorithms_deterministic": "deterministic algorithms True, was False",
    "test_sets_the_matmul_precision": "float32 matmul precision medium, was highest",
    "test_disables_gradients": "gradient mode False, was True",
    "test_exports_a_variable": "NVTE_FLASH_ATTN set",
    "test_leaves_a_thread": "1 thread (left-by-a-test)",
    "test_opens_a_file": "1 open file (",
    "test_leaves_a_process": "1 child process (/bin/sleep 600)",
    "test_patches_an_operator": "patched torch.nn.functional.softmax",
    "test_patches_a_layer": "patched torch.nn.Dropout",
    "test_writes_into_the_working_directory": "left-checkpoint",
}


def test_is_clean_before() -> None:
    """Leave nothing: the first test of a gang starts the libraries."""
    a = torch.ones(4, 4, requires_grad=True)
    torch.autograd.grad((a @ a).sum(), a)
    dist.all_reduce(torch.ones(1))


def test_creates_a_group() -> None:
    """NVIDIA/Megatron-LM#6897: groups that only lose their last name."""
    group = dist.new_group([0, 1])
    dist.barrier(group)


def test_is_clean_after_a_group() -> None:
    group = dist.new_group([0, 1])
    dist.barrier(group)
    dist.destroy_process_group(group)


def test_destroys_model_parallel_but_not_its_groups() -> None:
    """NVIDIA/Megatron-LM#6897, word for word: `destroy_model_parallel` keeps c10d's groups."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    parallel_state.destroy_model_parallel()


def test_leaves_model_parallel() -> None:
    """NVIDIA/Megatron-LM#7580 and #134: the next test finds model parallelism initialised."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)


def test_sets_the_default_dtype() -> None:
    """pytorch/pytorch#68972, debpalash/VoiceStudio#1021."""
    torch.set_default_dtype(torch.float64)


def test_is_clean_with_a_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_dtype(before)


def test_sets_a_default_device() -> None:
    """teamtomo/teamtomo#125, sgl-project/sglang#11131."""
    torch.set_default_device("meta")


def test_is_reset_to_the_cpu() -> None:
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def test_makes_algorithms_deterministic() -> None:
    """Megatron-LM's determinism tests, without their `finally`."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)


def test_sets_the_matmul_precision() -> None:
    torch.set_float32_matmul_precision("medium")


def test_disables_gradients() -> None:
    """huggingface/transformers: `torch.set_grad_enabled(False)` in the body of a test."""
    torch.set_grad_enabled(mode=False)


def test_enables_gradients_again() -> None:
    torch.set_grad_enabled(mode=True)


def test_exports_a_variable() -> None:
    """NVIDIA/Megatron-LM#7531: NVTE variables that a test sets stay set."""
    os.environ["NVTE_FLASH_ATTN"] = "1"


def test_is_clean_with_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)


def test_leaves_a_thread() -> None:
    """NVIDIA-Merlin/models#1167: a loader that was half consumed keeps its thread."""
    threading.Thread(target=threading.Event().wait, name="left-by-a-test", daemon=True).start()


def test_is_clean_with_a_thread() -> None:
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()
    thread.join()


def test_opens_a_file(tmp_path: Path) -> None:
    """Opentrons/opentrons#7641: open files that add up."""
    KEPT.append((tmp_path / "log").open("w"))


def test_is_clean_with_a_file_in_a_cycle(tmp_path: Path) -> None:
    cycle: list[object] = [(tmp_path / "log").open("w")]
    cycle.append(cycle)


def test_leaves_a_process() -> None:
    """sgl-project/sglang#27422: the server of the test before still runs."""
    KEPT.append(subprocess.Popen(["/bin/sleep", "600"]))


def test_ends_that_process() -> None:
    process = KEPT.pop()
    assert isinstance(process, subprocess.Popen)
    process.kill()
    process.wait()


def test_patches_an_operator() -> None:
    """pytorch/pytorch#191931: polluting tests patch functions for good."""
    setattr(torch.nn.functional, "softmax", print)  # noqa: B010


def test_patches_a_layer() -> None:
    setattr(torch.nn, "Dropout", torch.nn.Identity)  # noqa: B010


def test_is_clean_with_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "gelu", print)
    monkeypatch.delattr(torch, "ones")


def test_writes_into_the_working_directory(rank: int) -> None:
    """A checkpoint in the checkout, which the next run loads."""
    if rank == 0:
        Path("left-checkpoint").mkdir()
    dist.barrier()


def test_is_clean_with_a_file_of_the_working_directory(rank: int) -> None:
    path = Path("own-checkpoint")
    if rank == 0:
        path.write_text("")
    dist.barrier()
    if rank == 0:
        path.unlink()


@pytest.fixture(scope="class")
def of_the_class() -> Iterator[object]:
    """Hold a thread, a variable and a group while the class runs."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="of-the-class")
    thread.start()
    os.environ["OF_THE_CLASS"] = "1"
    group = dist.new_group([0, 1])
    yield group
    dist.destroy_process_group(group)
    del os.environ["OF_THE_CLASS"]
    done.set()
    thread.join()


@pytest.mark.usefixtures("of_the_class")
class TestHoldsAFixture:
    def test_is_clean_beside_it(self) -> None:
        pass

    def test_is_clean_at_its_end(self) -> None:
        pass


@pytest.mark.audit(allow=["environment"])
def test_is_excused() -> None:
    os.environ["EXCUSED"] = "1"
    tempfile.gettempdir()


def test_is_clean_with_a_handler() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.signal(signal.SIGUSR1, before)
    tensor_parallel.get_cuda_rng_tracker()
    assert megatron_random is not None
