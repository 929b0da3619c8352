"""What a rank has as a process: signals, threads, descriptors, random numbers."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from gang_suite import Suite

pytestmark = pytest.mark.nightly

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTORCH_NVML_BASED_CUDA_CHECK")
SEEDS = """
    import random
    import numpy.random
    import torch

    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
"""
PROCESS = f"""
    import multiprocessing
    import os
    import random
    import signal

    import numpy.random
    import pytest
    import torch

    @pytest.mark.controller
    def test_controller_has_its_environment_back():
        assert [name for name in {VARIABLES!r} if name in os.environ] == []
        assert type(os.environ) is os._Environ


    def wait(up):
        up.set()
        signal.pause()


    @pytest.mark.controller
    def test_a_child_of_a_test_ends_by_sigterm():
        fork = multiprocessing.get_context("fork")
        up = fork.Event()
        child = fork.Process(target=wait, args=(up,))
        child.start()
        up.wait()
        child.terminate()
        child.join()
        assert child.exitcode == -signal.SIGTERM


    def test_signals_and_threads():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            assert signal.getsignal(number) == signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
        assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
        assert os.getsid(0) == os.getpid()


    def test_descriptors(rank):
        kinds = {{"socket": 0, "pipe": 0, "memfd": 0}}
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink("/proc/self/fd/" + name)
            except FileNotFoundError:
                continue
            assert "eventpoll" not in target
            kinds["pipe"] += target.startswith("pipe:")
            kinds["socket"] += target.startswith("socket:")
            kinds["memfd"] += "memfd:" in target
            if "/ranks/" in target:
                assert f"/{{rank}}/" in target
        # The connection to its agent, the pipes shared with it, and those of the agent of one rank
        # with that of its node.
        assert kinds["socket"] == 1
        assert (kinds["memfd"], kinds["pipe"]) in ((1, 1), (2, 2)), kinds


    def test_random_numbers(rank):
        with open(f"numbers.{{rank}}", "w") as file:
            print(random.random(), numpy.random.rand(), torch.rand(1).item(), sep="\\n", file=file)
"""


@contextlib.contextmanager
def ignored_signals() -> Iterator[None]:
    """Start sessions as a script starts `nohup pytest &`, with one signal more and one blocked."""
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_rank_is_as_a_process_of_its_own(tmp_path: Path) -> None:
    suite = Suite(tmp_path, is_fresh=True)
    plain = ("-p", "no:rerunfailures")  # its server would be a socket more
    suite.write(test_process=PROCESS)
    with ignored_signals():
        run = suite.run(*plain, "-v", "--ranks", "2")
    assert set(run.words.values()) == {"PASSED"}, run.stdout
    unseeded = [suite.read(f"numbers.{rank}") for rank in range(2)]

    suite.write(conftest=SEEDS)
    forking = Suite(tmp_path)
    run = forking.run(*plain, "-v", "--ranks", "2", "-k", "random")
    assert set(run.words.values()) == {"PASSED"}, run.stdout
    seeded = [suite.read(f"numbers.{rank}") for rank in range(2)]

    suite.write(reads="import os; os.environ['RANK']", conftest=f"    import reads\n{SEEDS}")
    with ignored_signals():
        run = suite.run(*plain, "-v", "--ranks", "2", "test_process.py")
    assert set(run.words.values()) == {"PASSED"}, run.stdout
    collecting = [suite.read(f"numbers.{rank}") for rank in range(2)]

    assert all(one != other for one, other in zip(*unseeded, strict=True))
    assert seeded == [seeded[0]] * 2
    assert collecting == seeded
