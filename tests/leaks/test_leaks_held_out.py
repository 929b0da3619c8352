"""More tests that leave something behind; these were written before the audit was tuned."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random

KEPT: list[object] = []
LEAKS = {
    "test_creates_groups_of_one": "2 process groups (1 rank)",
    "test_leaves_rng_states": "RNG tracker states",
    "test_fills_the_memory_buffer": "global memory buffer",
    "test_sets_a_handler": "handler of SIGUSR2",
    "test_starts_a_timer": "1 thread (Timer-of-a-test)",
    "test_listens": "1 open socket",
    "test_leaves_a_forked_process": "1 child process",
    "test_keeps_memory": "host memory",
    "test_enters_inference_mode": "inference mode True",
    "test_changes_the_number_of_threads": "threads of torch 3, was 1",
    "test_patches_a_method": "patched torch.nn.Module.forward_of_a_test",
    "test_patches_megatron": "patched megatron.core.parallel_state.get_tensor_model_parallel_rank",
    "test_removes_a_variable": "HOME unset",
}


def test_is_clean_before() -> None:
    dist.barrier()


def test_creates_groups_of_one() -> None:
    """A group for each rank, of which every rank keeps its own and forgets the other."""
    world = range(dist.get_world_size())
    KEPT.extend([dist.new_group([other]) for other in world] for _ in range(2))


def test_leaves_rng_states() -> None:
    """NVIDIA/Megatron-LM: `model_parallel_cuda_manual_seed` with no reset; on the CPU by hand."""
    tracker = megatron_random.get_cuda_rng_tracker()
    tracker.set_states({**tracker.get_states(), "left-by-a-test": torch.get_rng_state()})


def test_fills_the_memory_buffer() -> None:
    parallel_state.destroy_global_memory_buffer()  # of a test before, if there is one
    parallel_state._set_global_memory_buffer()
    buffer = parallel_state.get_global_memory_buffer()
    buffer.buffer["left", torch.float32] = torch.zeros(1 << 18)


def test_sets_a_handler() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def test_is_clean_with_an_alarm() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 100)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_starts_a_timer() -> None:
    timer = threading.Timer(600, print)
    timer.name, timer.daemon = "Timer-of-a-test", True
    timer.start()


def test_listens() -> None:
    """`Address already in use`, in the test after."""
    KEPT.append(socket.create_server(("127.0.0.1", 0)))


def test_is_clean_with_a_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        pass


def test_leaves_a_forked_process() -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.daemon = True
    process.start()
    KEPT.append(process)


def test_is_clean_with_a_forked_process() -> None:
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    process.join()


def test_keeps_memory() -> None:
    """vllm-project/vllm#57371: memory that builds up from test to test."""
    KEPT.append(np.ones(34 << 20))  # 272 MiB


def test_is_clean_with_memory() -> None:
    np.ones(34 << 20).sum()


def test_enters_inference_mode() -> None:
    mode = torch.inference_mode()
    mode.__enter__()
    KEPT.append(mode)  # which leaves the mode when it is collected


def test_changes_the_number_of_threads() -> None:
    torch.set_num_threads(3)


def test_patches_a_method() -> None:
    setattr(torch.nn.Module, "forward_of_a_test", lambda module: module)  # noqa: B010


def test_patches_megatron() -> None:
    parallel_state.get_tensor_model_parallel_rank = lambda: 7


def test_removes_a_variable() -> None:
    del os.environ["HOME"]
