"""Runs that fail, each in its own way: a project, how pytest starts, and what must fail again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tiny_project import Project

from pytest_megatron.base.files import JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One failing run.

    Attributes:
        id: Of the case, and the name of its artifact.
        item: A part of the node id that fails.
        headline: A part of what is said of the failure, there and here.
        tests: Text of `test_a.py` and of other files by name; empty for workloads.
        build: Makes a project with workloads.
        arguments: Of pytest, after those that every run has.
        env: Variables that only the failing run has.
        again: Arguments of `repro`, after artifact and item.
        change: Text that is added to `test_a.py` after the commit.
        culprit: What `--bisect-order` must find, or "".
    """

    id: str
    item: str
    headline: str
    tests: Mapping[str, str] = field(default_factory=dict)
    build: Callable[[Project], object] | None = None
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    again: tuple[str, ...] = ()
    change: str = ""
    culprit: str = ""


def _unit(case_id: str, body: str, headline: str, **more: object) -> Case:
    """Return a case with one file of tests, of which `test_x` fails."""
    return Case(
        id=case_id,
        item="test_a.py::test_x",
        headline=headline,
        tests={"test_a.py": body},
        **more,  # type: ignore[arg-type]  # fields of a case
    )


UNIT = (
    _unit("assert", "def test_x(rank):\n    assert 0 < 0\n", "assert 0 < 0"),
    _unit(
        "raises-alone",
        "def test_x(rank, process_group):\n"
        "    if rank == 1:\n        raise KeyError('lost')\n"
        "    process_group.barrier().wait()\n",
        "KeyError: 'lost'",
    ),
    _unit(
        "exit",
        "import os\n\ndef test_x(rank):\n    if rank == 1:\n        os._exit(3)\n",
        "rank 1 of 2 exited with code 3",
    ),
    _unit(
        "segfault",
        "import faulthandler\n\ndef test_x(rank):\n"
        "    if rank == 0:\n        faulthandler._sigsegv()\n",
        "rank 0 of 2 was killed by SIGSEGV",
    ),
    _unit(
        "kill-in-setup",
        "import os, signal, pytest\n\n@pytest.fixture\ndef broken(rank):\n"
        "    if rank == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n\n"
        "def test_x(broken): pass\n",
        "was killed by SIGKILL",
    ),
    _unit(
        "hang-in-collective",
        "def test_x(rank, process_group):\n"
        "    if rank == 1:\n        process_group.barrier().wait()\n",
        "rank 1 did not end in",
        arguments=("--rank-timeout", "12"),
    ),
    _unit(
        "hang",
        "import time\n\ndef test_x(rank):\n    time.sleep(600)\n",
        "ranks 0-1 did not end in 2 s",
        arguments=("--rank-timeout", "2"),
    ),
    _unit(
        "skip-on-one-rank",
        "import pytest\n\ndef test_x(rank):\n    if rank == 1:\n        pytest.skip('no')\n",
        "rank 1 skipped, rank 0 did not",
    ),
    _unit(
        "desynchronised",
        "import torch\nimport torch.distributed as dist\n\n"
        "def test_x(rank, process_group):\n"
        "    if rank == 0:\n        dist.barrier(async_op=True)\n",
        "took part in different collectives",
    ),
    _unit(
        "import-error",
        "def test_x(rank):\n    if rank == 1:\n        import no_module_of_that_name\n",
        "ModuleNotFoundError",
    ),
    _unit(
        "teardown",
        "import pytest\n\n@pytest.fixture\ndef leaks(rank):\n    yield\n"
        "    raise OSError('not given back')\n\ndef test_x(leaks): pass\n",
        "OSError: not given back",
    ),
    _unit(
        "order",
        "SEEN = []\n\ndef test_a(rank): pass\ndef test_b(rank): SEEN.append(1)\n"
        "def test_c(rank): pass\ndef test_x(rank): assert not SEEN\n",
        "assert not [1]",
        culprit="test_a.py::test_b",
    ),
    Case(
        id="order-across-files",
        item="test_b.py::test_x",
        headline="AssertionError: a variable is left",
        tests={
            "test_a.py": "import os\n\ndef test_a(rank): pass\n"
            "def test_sets(rank): os.environ['LEFT'] = '1'\ndef test_z(rank): pass\n",
            "test_b.py": "import os\n\ndef test_first(rank): pass\n"
            "def test_x(rank): assert 'LEFT' not in os.environ, 'a variable is left'\n",
        },
        culprit="test_a.py::test_sets",
    ),
    _unit(
        "hash-seed",
        "def test_x(rank):\n    assert hash('megatron') != {hash}\n",
        "assert ",
        env={"PYTHONHASHSEED": "41"},
    ),
    _unit(
        "variable",
        "import os\n\ndef test_x(rank):\n    assert os.environ.get('NCCL_ALGO') != 'Tree'\n",
        "assert 'Tree' != 'Tree'",
        env={"NCCL_ALGO": "Tree"},
    ),
    _unit(
        "uncommitted",
        "LIMIT = 5\n\ndef test_x(rank):\n    assert LIMIT == 5\n",
        "assert 6 == 5",
        change="\nLIMIT = 6\n",
    ),
    _unit(
        "world-size",
        "import pytest\n\n@pytest.mark.world_size(3)\ndef test_x(rank):\n    assert rank != 2\n",
        "assert 2 != 2",
    ),
)


def _workload(
    case_id: str,
    headline: str,
    *faults: str,
    config: Mapping[str, JsonValue] | None = None,
    save_interval: int | None = None,
) -> Case:
    name = case_id.replace("-", "_")

    def build(project: Project) -> None:
        project.add(name, *faults, config=config, save_interval=save_interval)

    return Case(id=case_id, item=f"::{name}[dev-cpu]", headline=headline, build=build)


def _mismatch(project: Project) -> None:
    project.add("mismatch")
    project.golden("mismatch", changes={5: 0.5})


def _hang(project: Project) -> None:
    env = {"TINY_TRAIN_STATE": "hang"}  # the same place in every checkout
    project.row(project.case("train_hang", fault=["hang@3:1"], env=env), time_limit=[4])


RESUMED: Mapping[str, JsonValue] = {"TEST_TYPE": "ckpt-resume"}
WORKLOADS = (
    _workload("crash", "rank 1 of 2 raised ValueError: the crash of rank 1", "crash@4:1"),
    _workload("train-segfault", "rank 0 of 2 was killed by SIGSEGV", "segfault@3:0"),
    _workload("train-kill", "rank 1 of 2 was killed by SIGKILL", "kill@3:1"),
    _workload("nan", "nan", "nan@4"),
    _workload("oom", "CUDA out of memory", "oom@2:0"),
    _workload("no-metrics", "no metrics", "silent@1"),
    Case(id="mismatch", item="::mismatch[", headline="its metrics disagree", build=_mismatch),
    Case(id="train-hang", item="::train_hang[", headline="time limit of 4 s", build=_hang),
    _workload("resume-drift", "its metrics disagree", "drift@1", config=RESUMED, save_interval=5),
    Case(
        id="second-phase",
        item="::second_phase[",
        headline="rank 1 of 2 raised ValueError",
        build=lambda project: project.add(
            "second_phase",
            config={
                **RESUMED,
                "BEFORE_SCRIPT": '[ "$RUN_NUMBER" = 1 ] || export TINY_TRAIN_FAULT=crash@8:1',
            },
            save_interval=5,
        ),
        again=("--phase", "2", "--trust"),
    ),
    _workload(
        "before-script",
        "BEFORE_SCRIPT",
        config={"BEFORE_SCRIPT": "echo no data >&2; exit 7"},
    ),
)
CASES = (*UNIT, *WORKLOADS)
