"""Tests that pass and leave something behind; each is followed by one that leaves nothing.

What each is made after is in its docstring. `LEAKS` is what `--leaks` has to say of them.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

KEPT: list[object] = []
LEAKS = {
    "test_creates_a_group": "1 process group",
    "test_destroys_model_parallel_but_not_its_groups": "process groups",
    "test_creates_groups_of_one": "2 process groups",
    "test_exports_a_variable": "environment: NVTE_FLASH_ATTN set",
    "test_removes_a_variable": "environment: HOME unset",
    "test_leaves_a_thread": "1 thread (left-by-a-test)",
    "test_starts_a_timer": "1 thread (Timer-of-a-test)",
    "test_leaves_a_process": "1 child process (/bin/sleep 600)",
    "test_leaves_a_forked_process": "1 child process (",
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


def test_creates_groups_of_one() -> None:
    """A group for each rank, of which every rank keeps its own and forgets the other."""
    world = range(dist.get_world_size())
    KEPT.extend([dist.new_group([other]) for other in world] for _ in range(2))


def test_exports_a_variable() -> None:
    """NVIDIA/Megatron-LM#7531: NVTE variables that a test sets stay set."""
    os.environ["NVTE_FLASH_ATTN"] = "1"


def test_is_clean_with_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)


def test_removes_a_variable() -> None:
    KEPT.append(os.environ.pop("HOME"))


def test_is_clean_with_it_set_back() -> None:
    os.environ["HOME"] = str(KEPT.pop())


def test_leaves_a_thread() -> None:
    """NVIDIA-Merlin/models#1167: a loader that was half consumed keeps its thread."""
    threading.Thread(target=threading.Event().wait, name="left-by-a-test", daemon=True).start()


def test_is_clean_with_a_thread() -> None:
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()


def test_starts_a_timer() -> None:
    timer = threading.Timer(600, print)
    timer.name, timer.daemon = "Timer-of-a-test", True
    timer.start()


def test_leaves_a_process() -> None:
    """sgl-project/sglang#27422: the server of the test before still runs."""
    KEPT.append(subprocess.Popen(["/bin/sleep", "600"]))


def test_ends_that_process() -> None:
    process = KEPT.pop()
    assert isinstance(process, subprocess.Popen)
    process.kill()
    process.wait()


def test_leaves_a_forked_process() -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.daemon = True
    process.start()
    KEPT.append(process)


def test_is_clean_with_a_forked_process() -> None:
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    process.join()


def test_is_clean_with_workers_of_a_loader() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(2))
    assert len(list(torch.utils.data.DataLoader(data, num_workers=1))) == 2


def test_is_clean_with_a_compiled_module() -> None:
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(2))


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
