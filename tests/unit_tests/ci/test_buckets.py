"""Buckets and shards hold every test file exactly once, or say which they do not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pytest_megatron.ci.decide import matches, matches_any
from pytest_megatron.ci.test_files import Bucket, balance, base_of, find_test_files, share_out
from pytest_megatron.errors import RecipeError

FILES = ("t/a/test_1.py", "t/a/test_2.py", "t/a/b/test_3.py", "t/test_4.py")


def shared(*patterns: str, files: tuple[str, ...] = FILES) -> tuple[Bucket, ...]:
    return share_out(files, {pattern: f"r.yaml:{n}" for n, pattern in enumerate(patterns, 1)})


def test_a_file_belongs_to_the_bucket_that_names_it_most_exactly() -> None:
    assert shared("t/**/*.py", "t/a/**/*.py", "t/a/test_2.py", "t/a/b/**/*.py") == (
        Bucket(pattern="t/**/*.py", files=("t/test_4.py",), words=("t/**/*.py", "!t/a/**/*.py")),
        Bucket(
            pattern="t/a/**/*.py",
            files=("t/a/test_1.py",),
            words=("t/a/**/*.py", "!t/a/test_2.py", "!t/a/b/**/*.py"),
        ),
        Bucket(pattern="t/a/test_2.py", files=("t/a/test_2.py",), words=("t/a/test_2.py",)),
        Bucket(pattern="t/a/b/**/*.py", files=("t/a/b/test_3.py",), words=("t/a/b/**/*.py",)),
    )


def test_the_words_of_a_bucket_mean_its_files_and_no_others() -> None:
    for bucket in shared("t/**/*.py", "t/a/**/*.py", "t/a/test_2.py", "t/a/b/**/*.py"):
        assert tuple(sorted(f for f in FILES if matches_any(f, bucket.words))) == bucket.files


@pytest.mark.parametrize(
    ("patterns", "error"),
    [
        pytest.param(
            ("t/a/**/*.py",),
            "r.yaml: no bucket holds t/test_4.py, expected each test file in one; add a bucket",
            id="a file in none",
        ),
        pytest.param(
            ("t/**/*.py", "t/c/**/*.py"),
            "r.yaml:2: bucket 't/c/**/*.py' holds no test file, expected at least one; correct",
            id="an empty one",
        ),
        pytest.param(
            ("t/**/*.py", "t/a/**/*.py", "t/a/test_1.py", "t/a/test_2.py", "t/a/b/test_3.py"),
            "r.yaml:2: bucket 't/a/**/*.py' holds no test file",
            id="one that others emptied",
        ),
        pytest.param(
            ("t",), "r.yaml:1: test_case: 't' is no bucket, expected a file", id="a folder"
        ),
        pytest.param(("t/*.py",), "r.yaml:1: test_case: 't/*.py' is no bucket", id="a glob"),
    ],
)
def test_files_without_a_bucket_and_buckets_without_files_are_errors(
    patterns: tuple[str, ...], error: str
) -> None:
    """In Megatron-LM a wrong list is a green bucket."""
    with pytest.raises(RecipeError) as caught:
        shared(*patterns)
    assert str(caught.value).startswith(error)


def test_test_files_are_what_pytest_takes_for_them(tmp_path: Path) -> None:
    for name in ("t/test_a.py", "t/b_test.py", "t/conftest.py", "t/.x/test_c.py", "t/d/test_d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert find_test_files(tmp_path, ["t", "gone"]) == ("t/b_test.py", "t/test_a.py")


@pytest.mark.parametrize(
    ("pattern", "base"),
    [("t/a/**/*.py", "t/a"), ("t/a.py", "t/a.py"), ("t/*/x.py", "t"), ("**/*.py", "")],
)
def test_pytest_starts_where_a_pattern_begins(pattern: str, base: str) -> None:
    assert base_of(pattern) == base


@pytest.mark.parametrize(
    ("path", "pattern", "is_match"),
    [
        ("a/b/c.md", "**/*.md", True),
        ("c.md", "**/*.md", True),
        ("a/b/c.md", "a/*.md", False),
        ("docs/x/y", "docs/**", True),
        ("docsx/y", "docs/**", False),
        ("m/ssm/a.py", "m/{rl,ssm}{,/**}", True),
        ("m/ssm", "m/{rl,ssm}{,/**}", True),
        ("m/ssms/a.py", "m/{rl,ssm}{,/**}", False),
        ("a+b.py", "a+?.py", True),
    ],
)
def test_patterns_of_paths(path: str, pattern: str, is_match: bool) -> None:  # noqa: FBT001
    assert matches(path, pattern) == is_match


@pytest.mark.parametrize("num_shards", [1, 3, 7, 50])
def test_shards_hold_every_file_exactly_once_and_none_is_empty(num_shards: int) -> None:
    rng = random.Random(num_shards)
    files = [f"t/test_{n}.py" for n in range(20)]
    durations = {file: rng.expovariate(1.0) for file in files[:15]} | {"gone.py": 9.0}
    shards = balance(files, durations, num_shards)
    assert sorted(file for shard in shards for file in shard.files) == sorted(files)
    assert (len(shards), all(shard.files for shard in shards)) == (min(num_shards, 20), True)
    loads = [shard.expected_s for shard in shards]
    assert max(loads) <= sum(loads) / len(loads) + max(durations.values())
    shuffled = files.copy()
    rng.shuffle(shuffled)
    assert balance(shuffled, durations, num_shards) == shards


def test_the_longest_file_gets_a_shard_of_its_own() -> None:
    shards = balance(["a", "b", "c", "d"], {"a": 30.0, "b": 10.0, "c": 10.0, "d": 10.0}, 2)
    assert [(shard.files, shard.expected_s) for shard in shards] == [
        (("a",), 30.0),
        (("b", "c", "d"), 30.0),
    ]


def test_files_without_durations_are_shared_out_evenly() -> None:
    assert [len(s.files) for s in balance([str(n) for n in range(9)], {}, 3)] == [3, 3, 3]
    nothing = {str(n): 0.0 for n in range(9)}
    assert [len(s.files) for s in balance(list(nothing), nothing, 3)] == [3, 3, 3]
