"""Writes tests of gangs that do not import torch, here: they start in a fraction of a second."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "test_sizes.py": """\
import pytest


@pytest.mark.isolated
def test_alone(rank): ...


@pytest.mark.world_size(1, 2)
def test_every_size(rank): ...


@pytest.mark.world_size(2)
def test_pair(rank): ...


@pytest.mark.controller
def test_of_a_parser(): ...


def test_1(rank): ...
def test_2(rank): ...
def test_3(rank): ...
""",
    "more/test_say.py": """\
def test_say(rank, world_size):
    print(f"I am {rank} of {world_size}")
""",
    "more/test_shards.py": """\
def test_shards_are_equal(rank):
    shard = [1.0, 1.0, 1.0]
    if rank == 1:
        shard[2] = 2.0
    assert shard == [1.0] * 3
""",
    "more/test_flaky.py": """\
from pathlib import Path


def test_download(rank):
    if rank == 0 and not Path("downloaded").exists():
        Path("downloaded").touch()
        raise OSError("Temporary failure in name resolution")
""",
    "more/test_pkg.py": """\
import pkg


def test_pkg(rank):
    assert pkg.double(rank) == 2 * rank
""",
    "pkg.py": "def double(x):\n    return x + x\n",
    ".gitignore": ".pytest_megatron/\n.pytest_cache/\n__pycache__/\nunit*\n",
    "pytest.ini": "[pytest]\npythonpath = .\ntestpaths = test_sizes.py\n",
    "tests/test_cache.py": """\
import os

cache = []


def test_shapes(rank): ...


def test_warm_up(rank):
    cache.append(rank)


def test_order(rank):
    found = len(cache)
    assert found == 0


def test_exit(rank):
    if rank == 1:
        os._exit(3)
""",
}

for name, text in FILES.items():
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)
