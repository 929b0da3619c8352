from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

from pytest_megatron.gangs.start.environment import EnvWatch, find_rank_words

ENV = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}


@pytest.fixture
def watch() -> EnvWatch:
    return EnvWatch(ENV, lambda: None)


def places(readers: list[str]) -> list[str]:
    assert all(f" in {__file__}:" in reader for reader in readers)
    return [reader.partition(" ")[0] for reader in readers]


def test_reads_are_noted_with_their_place_and_told_of_once() -> None:
    told: list[str] = []
    watch = EnvWatch(ENV, lambda: told.append("rank"))
    watch.start()
    try:
        read = os.environ["RANK"], os.getenv("LOCAL_RANK"), "GROUP_RANK" in os.environ
        for _ in range(2):
            os.environ.get("WORLD_SIZE")
    finally:
        watch.stop()
    assert (read, told) == (("0", "0", False), ["rank"])
    assert places(watch.rank_readers) == ["RANK", "LOCAL_RANK", "GROUP_RANK"]
    assert places(watch.size_readers) == ["WORLD_SIZE"]


def test_copies_of_the_whole_environment_are_no_reads(watch: EnvWatch) -> None:
    watch.start()
    try:
        copies = [dict(os.environ), {**os.environ}, os.environ.copy(), dict(os.environ.items())]
        looped = {name: os.environ[name] for name in os.environ}
    finally:
        watch.stop()
    assert copies == [looped] * 4
    assert looped["RANK"] == "0"
    assert watch.rank_readers == watch.size_readers == []


def test_a_read_after_looking_at_all_names_is_a_read(watch: EnvWatch) -> None:
    watch.start()
    try:
        has_nccl = any(name.startswith("NCCL_NOTHING") for name in os.environ)
        rank = os.environ["RANK"]
    finally:
        watch.stop()
    assert (has_nccl, rank) == (False, "0")
    assert places(watch.rank_readers) == ["RANK"]


def test_everything_is_put_back_but_what_others_set_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    watch = EnvWatch(ENV, lambda: None)
    watch.start()
    os.environ["WORLD_SIZE"] = "16"
    watch.stop()
    watch.stop()
    found = [os.environ.get(name) for name in ENV]
    assert found == ["7", None, "16"]
    assert type(os.environ) is os._Environ


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("r = os.environ['LOCAL_RANK']", "LOCAL_RANK"),
        ("\nW = env('WORLD_SIZE')", "WORLD_SIZE"),
        ("proc = 'SLURM_PROCID'", "SLURM_PROCID"),
        ("def test(rank, world_size): 'RANKING'", ""),
    ],
)
def test_words_of_ranks_are_found_in_sources_of_the_project(
    tmp_path: Path, text: str, word: str
) -> None:
    library = tmp_path / "site-packages" / "other.py"
    library.parent.mkdir()
    modules = []
    for path in (library, tmp_path / "helper.py"):
        path.write_text("RANK" if path == library else text)
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        modules.append(module)
    found = find_rank_words([ModuleType("built in"), *modules], tmp_path)
    line = text.count("\n") + 1
    assert found == (f"{word} in {tmp_path}/helper.py:{line}" if word else "")
