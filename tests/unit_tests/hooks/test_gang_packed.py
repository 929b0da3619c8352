"""Gangs that share GPUs by memory, on pretended ones: nothing here uses a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gang_suite import Suite
from pretended_gpus import pretend_gpus
from typing_extensions import override

from pytest_megatron.gang.ipc.messages import Done
from pytest_megatron.gang.schedule import Packing
from pytest_megatron.gang.spec import GangSpec, RankResult, Reason, RunEnd
from pytest_megatron.gpu.health import GpuProcess, GpuState, MemoryWatch
from pytest_megatron.gpu.host import Gpu, Lease
from pytest_megatron.hooks.gangs.gang_pool import Leases
from pytest_megatron.runs.record import RecordedTest, read_run

SUITE = """
    import fcntl
    import json
    import os
    import time
    from pathlib import Path

    import pytest

    HERE = Path(__file__).parent

    def use(gib):
        '''Have NVML know that this process uses so much.'''
        path = Path(os.environ["PRETEND_NVML"])
        with open(HERE / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = json.loads(path.read_text())
            uuid = os.environ["CUDA_VISIBLE_DEVICES"]
            (gpu,) = [gpu for gpu in state["gpus"] if gpu["uuid"] == uuid]
            gpu["processes"] = [p for p in gpu["processes"] if p[0] != os.getpid()]
            gpu["processes"].append([os.getpid(), int(gib * 2**30)])
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(state))
            new.replace(path)

    def meet(name, other):
        (HERE / f"is_here_{name}").touch()
        until = time.monotonic() + 60
        while not (HERE / f"is_here_{other}").exists():
            assert time.monotonic() < until, "nobody came"
            time.sleep(0.005)

    @pytest.mark.gpu_memory_gib(30)
    def test_one():
        use(29)
        meet("one", "two")

    @pytest.mark.gpu_memory_gib(30.5)
    def test_two():
        use(35)
        meet("two", "one")

    @pytest.fixture
    def alone():
        lock = open(HERE / "alone", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
        lock.close()

    @pytest.mark.gpu_memory_gib(50)
    def test_big(alone):
        use(10)

    def test_unknown(alone):
        use(20)

    @pytest.mark.gpu_memory_gib(60)
    @pytest.mark.parametrize("times", [1, 2])
    def test_runs_out(times, alone):
        ran = HERE / f"ran_{times}"
        number = len(ran.read_text()) if ran.exists() else 0
        ran.write_text("x" * (number + 1))
        if number < times:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path).write(test_suite=SUITE)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A host with one pretended GPU."""
    return {**pretend_gpus(tmp_path, 1), "PYTEST_MEGATRON_KEY": "k"}


def test_gangs_share_a_gpu_as_far_as_its_memory_goes(suite: Suite, env: dict[str, str]) -> None:
    words = ("--gpus", "1", "--pack-gpus", "4", "--run-dir", "run")
    run = suite.run(*words, env=env)
    assert run.summary == "1 failed, 5 passed", run.stdout
    of = "megatron: GPU memory: test_suite.py::test_"
    lines = [line.removeprefix(of) for line in run.stdout.splitlines() if line.startswith(of)]
    assert sorted(lines) == [
        "runs_out[1] ran out of it beside other tests; it ran again alone and passed",
        "runs_out[2] ran out of it beside other tests; it ran again alone and failed",
        "two declares 30.5 GiB and used 35.0 GiB, by which it is scheduled from now on",
    ]
    records = read_run(suite.root / "run").items
    crowded, failed = (records[f"test_suite.py::test_runs_out[{n}]"] for n in (1, 2))
    assert isinstance(crowded, RecordedTest)
    assert [(a.signature, a.is_transient) for a in crowded.attempts] == [
        ("cuda_oom", False),
        (None, False),
    ]
    assert (crowded.verdict, failed.verdict) == ("passed", "failed")
    known = json.loads((suite.root / ".pytest_cache/v/megatron/gpu_memory").read_text())
    used = {name.rpartition("::test_")[2]: mib for name, mib in known.items()}
    assert {name: used[name] for name in ("one", "two", "big", "unknown")} == {
        "one": 29 << 10,
        "two": 35 << 10,
        "big": 10 << 10,
        "unknown": 20 << 10,
    }


def test_tests_without_a_mark_share_gpus_by_what_they_used_before(
    suite: Suite, env: dict[str, str]
) -> None:
    plain = SUITE.replace("@pytest.mark.gpu_memory_gib(30)", "").replace(
        "@pytest.mark.gpu_memory_gib(30.5)", ""
    )
    suite.write(test_suite=plain)
    cache = suite.root / ".pytest_cache/v/megatron/gpu_memory"
    cache.parent.mkdir(parents=True)
    known = {"test_suite.py::test_one": 20 << 10, "test_suite.py::test_two": 20 << 10}
    cache.write_text(json.dumps(known))
    run = suite.run("--gpus", "1", "--pack-gpus", "2", "-k", "one or two", env=env)
    assert run.summary == "2 passed, 4 deselected", run.stdout


GIB = 1 << 30
GPU = Gpu(index=0, name="H", uuid="GPU-0", memory_bytes=80 * GIB)


class Watch(MemoryWatch):
    """NVML as a test has it."""

    def __init__(self, used_gib: int, processes: dict[int, int] | None = None) -> None:
        found = (GpuProcess(pid=p, memory_bytes=n * GIB) for p, n in (processes or {}).items())
        self.state = GpuState(
            uuid="GPU-0", memory_used_bytes=used_gib * GIB, processes=tuple(found)
        )

    @override
    def read(self) -> dict[str, GpuState]:
        return {"GPU-0": self.state}


def leases_on(watch: Watch, *gangs: int) -> Leases:
    """Return the leases of gangs that take so many GiB each of one GPU."""
    leases = Leases(lambda _: None)
    leases.packing, leases.most_gpus = Packing(most=4, memory_mib=79 << 10), 1
    leases._watch = watch
    leases._measure_rooms([GPU])
    for number, gib in enumerate(gangs):
        leases.of_gangs[number] = Lease(gpus=(GPU,), descriptors=(), memory_mib=gib << 10)
    return leases


@pytest.mark.parametrize(
    ("used_gib", "gangs", "room_gib"),
    [(0, [30], 49), (30, [30], 19), (0, [1, 1, 1], 76), (0, [1, 1, 1, 1], 0), (0, [0], 0)],
    ids=["beside another", "beside other users", "the fourth", "the fifth", "a whole GPU"],
)
def test_memory_that_others_use_is_not_shared_out(
    used_gib: int, gangs: list[int], room_gib: int
) -> None:
    leases = leases_on(Watch(used_gib), *gangs)
    fit = [
        gib
        for gib in (0, *range(1, 80))
        if leases.has_room(GangSpec(world_size=1, device="cuda", memory_mib=gib << 10))
    ]
    assert fit == list(range(1, room_gib + 1))


@pytest.mark.parametrize(
    ("processes", "gangs", "memory", "used_mib"),
    [
        pytest.param({7: 12, 8: 3}, [20, 20], (7, 10 * GIB, 15 * GIB), 17 << 10, id="its process"),
        pytest.param({}, [20], (7, 10 * GIB, 15 * GIB), 17 << 10, id="alone in a container"),
        pytest.param({}, [20, 9], (7, 10 * GIB, 15 * GIB), (15 << 10) + 768, id="torch's word"),
        pytest.param({7: 12}, [20, 20], (7,), 12 << 10, id="no CUDA of torch"),
        pytest.param({}, [20, 20], (7,), 0, id="no CUDA"),
    ],
)
def test_used_memory_is_that_of_the_process_at_the_peak_of_torch(
    processes: dict[int, int], gangs: list[int], memory: tuple[int, ...], used_mib: int
) -> None:
    leases = leases_on(Watch(5), *gangs)  # of another user
    leases._watch = Watch(17, processes)
    ranks = (RankResult(rank=0, done=Done(run=1, reports=(), gpu_memory=memory)),)
    end = RunEnd(run=1, reason=Reason.DONE, ranks=ranks, limit_s=0.0, duration_s=0.0, is_kept=True)
    assert leases.used_memory(0, end) == used_mib
    died = replace(end, ranks=(*ranks, RankResult(rank=1, exit_code=-9)))
    assert leases.used_memory(0, died) is None


def test_ranks_that_collect_share_a_gpu_as_well(suite: Suite, env: dict[str, str]) -> None:
    with (suite.root / "test_suite.py").open("a") as file:
        file.write('\nRANK = os.environ["RANK"]\n')
    run = suite.run("-v", "--gpus", "1", "--pack-gpus", "4", "-k", "not runs_out", env=env)
    assert run.summary == "4 passed, 2 deselected", run.stdout
    assert "every rank collects for itself: RANK in " in run.stdout


@pytest.mark.parametrize(
    ("mark", "given"), [("(0)", "0"), ("('4')", "'4'"), ("(n=4)", "n=4"), ("(4, 5)", "4, 5")]
)
def test_a_mark_that_is_no_memory_is_refused(tmp_path: Path, mark: str, given: str) -> None:
    suite = Suite(tmp_path).write(
        test_suite=f"import pytest\n\n@pytest.mark.gpu_memory_gib{mark}\ndef test_one(): pass\n"
    )
    run = suite.run("--ranks", "1", "--device", "cpu")
    assert run.returncode == 4
    assert run.stderr.strip() == (
        f"ERROR: test_suite.py::test_one: mark gpu_memory_gib: {given} is given, expected one "
        "number of GiB above 0"
    )
