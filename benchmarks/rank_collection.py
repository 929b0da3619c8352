"""A suite that reads LOCAL_RANK, beside torchrun: `benchmarks/rank_collection.py [--ranks 2 4]`.

Its conftest.py imports megatron-core and reads `LOCAL_RANK`, as that of Megatron-LM's unit tests
does, so that every rank collects for itself. With and without `megatron_gang_start = collect` and
under torchrun, first sessions run in turns; the median of the turns' ratios counts. On a busy
machine the CPU time of all processes shows more than the time.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

CONFTEST = """
    import os

    import pytest
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    LOCAL_RANK = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(LOCAL_RANK)


    @pytest.fixture(scope="module")
    def model_parallel_group():
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=torch.distributed.get_world_size()
        )
        yield parallel_state.get_tensor_model_parallel_group()
        parallel_state.destroy_model_parallel()
"""
TESTS = """
    import pytest
    import torch
    from conftest import LOCAL_RANK


    @pytest.mark.parametrize("size", range(1, 11))
    def test_sum(model_parallel_group, size):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found = torch.full((size,), float(LOCAL_RANK), device=device)
        torch.distributed.all_reduce(found, group=model_parallel_group)
        num_ranks = model_parallel_group.size()
        assert found.tolist() == [num_ranks * (num_ranks - 1) / 2] * size
"""
NUM_FILES = 10
INI = """\
[pytest]
megatron_gang_start = collect
megatron_preload = megatron.core.models.gpt
"""
WAYS = ("auto", "collect", "torchrun")


def write_suite(root: Path, ini: str) -> None:
    """Write a new copy of the suite, so that every session is a first one."""
    (root / "pytest.ini").write_text(ini)
    (root / "conftest.py").write_text(textwrap.dedent(CONFTEST))
    for number in range(NUM_FILES):
        (root / f"test_{number}.py").write_text(textwrap.dedent(TESTS))


def seconds(directory: Path, command: list[str]) -> tuple[float, float]:
    """Return how long a run takes, as a user sees it, and the CPU time of all its processes."""
    started, cpu_before_s = time.perf_counter(), cpu_s()
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=directory,
        check=False,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed\n{done.stdout}\n{done.stderr}")
    return time.perf_counter() - started, cpu_s() - cpu_before_s


def cpu_s() -> float:
    """Return the CPU time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run both ways in turns, for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpus", action="store_true", help="ranks on GPUs, not on the CPU")
    options = parser.parse_args()
    size = "--gpus" if options.gpus else "--ranks"
    for num_ranks in options.ranks:
        ours = ["pytest", "-q", "-p", "megatron", f"{size}={num_ranks}"]
        launcher = ["torch.distributed.run", f"--nproc-per-node={num_ranks}", "--standalone"]
        theirs = [*launcher, "-m", "pytest", "-q", "-p", "no:megatron", "-p", "no:cacheprovider"]
        rounds: list[dict[str, tuple[float, float]]] = []
        for _ in range(options.rounds):
            rounds.append({})
            for way in WAYS:
                with tempfile.TemporaryDirectory() as name:
                    write_suite(Path(name), INI if way == "collect" else "[pytest]\n")
                    command = theirs if way == "torchrun" else ours
                    rounds[-1][way] = seconds(Path(name), command)
        for index, what in enumerate(("time", "CPU time")):
            for way in WAYS:
                found_s = statistics.median(each[way][index] for each in rounds)
                ratio = statistics.median(e[way][index] / e["torchrun"][index] for e in rounds)
                print(f"{num_ranks} ranks, {what}, {way}: {found_s:.1f} s, {ratio:.2f} x torchrun")


if __name__ == "__main__":
    main()
