"""Places of a project that start ranks: found in a tree of real files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_megatron.adopt.advise import advise
from pytest_megatron.adopt.find import MOST_BYTES, search
from pytest_megatron.errors import AdoptError


def write(root: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def places(root: Path) -> list[tuple[str, str, str]]:
    inventory = search(root)
    return [
        (found.where, found.kind, advise(found, inventory).instead) for found in inventory.findings
    ]


def test_classes_are_followed_through_the_projects_own(tmp_path: Path) -> None:
    write(
        tmp_path,
        tests__base_DOT_py=(
            "from torch.testing._internal.common_distributed import MultiProcessTestCase\n"
            "class Base(MultiProcessTestCase):\n"
            "    @property\n    def world_size(self): return 4\n"
        ),
        tests__test_a_DOT_py="from base import Base as B\nclass TestA(B): ...\n",
        tests__test_b_DOT_py="class Base: ...\nclass TestB(Base): ...\n",
        tests__test_c_DOT_py=(
            "from unit.common import DistributedTest\n"
            "class TestC(DistributedTest):\n    world_size = [2, 4]\n"
        ),
    )
    assert places(tmp_path) == [
        ("tests/base.py:2", "class", "@pytest.mark.world_size(4)"),
        ("tests/test_a.py:2", "class", "@pytest.mark.world_size(N)"),
        ("tests/test_c.py:2", "class", "@pytest.mark.world_size(2, 4)"),
    ]


def test_a_projects_own_class_of_that_name_is_not_deepspeeds(tmp_path: Path) -> None:
    text = (
        "import unittest\n"
        "class DistributedTest(unittest.TestCase): ...\n"
        "class A(DistributedTest): ...\n"
    )
    write(tmp_path, tests__test_a_DOT_py=text)
    assert places(tmp_path) == []


SPAWN = """\
import torch.multiprocessing as mp
def run(rank, world_size): ...
def test_a():
    '''torchrun --nproc_per_node=2 test_a.py'''
    mp.spawn(run, args=(2,), nprocs=2)
    ctx = mp.get_context("spawn")
    for rank in range(2):
        ctx.Process(target=run, args=(rank, 2)).start()
    ctx.Process(target=print).start()
    pool = mp.Pool(processes=2)
    alone = mp.Pool(1)
"""


def test_spawned_ranks_are_found_and_helpers_are_not(tmp_path: Path) -> None:
    write(tmp_path, tests__test_a_DOT_py=SPAWN, pkg__loader_DOT_py=SPAWN)
    assert places(tmp_path) == [
        ("tests/test_a.py:5", "spawn", "@pytest.mark.world_size(2)"),
        ("tests/test_a.py:8", "spawn", "@pytest.mark.world_size(N)"),
        ("tests/test_a.py:10", "spawn", "@pytest.mark.world_size(2)"),
    ]


def test_launchers_that_a_test_starts_are_found(tmp_path: Path) -> None:
    text = (
        "import sys\n"
        "A = ['torchrun', f'--nproc_per_node={N}']\n"
        "B = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node=2', 'x.py']\n"
        "C = f'torchrun --nproc_per_node={N} x.py'\n"
        "assert cmd[0] == 'mpirun'\n"
        "parser.add_argument('--dir', help='torchrun --log-dir for the server')\n"
    )
    write(tmp_path, tests__test_a_DOT_py=text)
    assert [where for where, _, _ in places(tmp_path)] == [
        f"tests/test_a.py:{line}" for line in (2, 3, 4)
    ]


def test_tests_of_mpi_stay_where_they_are(tmp_path: Path) -> None:
    write(
        tmp_path,
        tests__test_a_DOT_py=(
            "import pytest\nfrom mpi4py import MPI\n@pytest.mark.parallel(2)\ndef test_a(): ...\n"
        ),
        run_DOT_sh="mpiexec -n 2 pytest tests\n",
    )
    stays = "stays: its tests use mpi4py, and ranks of pytest-megatron are no MPI processes"
    assert places(tmp_path) == [
        ("run.sh:1", "pytest", stays),
        ("tests/test_a.py:3", "mark", stays),
    ]


RECIPE = """\
type: basic
format_version: 1
spec:
  name: "{test_case}_{environment}_{platforms}"
  model: gpt
  nodes: 1
  gpus: 8
  platforms: dgx_h100
  script: torchrun --nproc-per-node 8 tests/run.py
products:
  - test_case: [gpt_tp1]
    products:
      - environment: [dev]
        scope: [mr]
        platforms: [dgx_h100]
"""


def test_a_recipe_is_one_place(tmp_path: Path) -> None:
    write(tmp_path, recipes__gpt_DOT_yaml=RECIPE)
    assert places(tmp_path) == [
        ("recipes/gpt.yaml:1", "recipe", "pytest -p megatron recipes/gpt.yaml --plan")
    ]


def test_what_cannot_be_read_is_named_and_the_rest_is_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        tests__test_broken_DOT_py="import multiprocessing\ndef (:\n",
        run_DOT_sh="torchrun -m pytest t\n",
        large_DOT_sh="#" * (MOST_BYTES + 1),
        binary_DOT_sh="\x00torchrun -m pytest t",
    )
    os.mkfifo(tmp_path / "fifo.sh")
    (tmp_path / "link.sh").symlink_to(tmp_path / "run.sh")
    inventory = search(tmp_path)
    assert [found.where for found in inventory.findings] == ["run.sh:1"]
    assert sorted(problem.partition(":")[0] for problem in inventory.unread) == [
        "fifo.sh",
        "large.sh",
        "tests/test_broken.py",
    ]


@pytest.mark.parametrize("folder", [".venv", "node_modules", ".tox", "third_party"])
def test_folders_of_others_are_left_out(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "run.sh").write_text("torchrun -m pytest t\n")
    assert places(tmp_path) == []


@pytest.mark.parametrize("mark", ["pyvenv.cfg", ".git"])
def test_environments_and_submodules_are_known_by_their_files(tmp_path: Path, mark: str) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / mark).write_text("")
    (tmp_path / "x" / "run.sh").write_text("torchrun -m pytest t\n")
    assert places(tmp_path) == []


def test_the_search_ends_at_its_limit(tmp_path: Path) -> None:
    write(tmp_path, run_DOT_sh="torchrun -m pytest t\n")
    assert search(tmp_path, limit_s=-1).is_cut


def test_a_path_that_is_no_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AdoptError, match=r"expected a project's directory"):
        search(tmp_path / "none")
