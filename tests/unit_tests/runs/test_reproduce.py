"""How a failure is done again, and by what two failures are told to be the same one."""

from __future__ import annotations

import shlex

import pytest

from pytest_megatron.runs.headline import headline_fingerprint, reproduce_line


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[rank 0] assert 3 == 4", "[rank 1] assert 5 == 4"),
        ("ranks 0-1, 3 did not end in 300 s", "rank 2 did not end in 300 s"),
        ("rank 1 of 4 was killed by SIGSEGV", "rank 0 of 2 was killed by SIGSEGV"),
        ("assert not [1, 2, 3]", "assert not [7]"),
        ("assert 'A' in environ({'SHELL': 'sh', ...", "assert 'A' in environ({'TERM': 'vt100'})"),
        ("<Foo at 0x7f00>: /tmp/a/b is gone\nmore", "<Foo at 0x8e11>: /home/x is gone"),
    ],
)
def test_who_and_how_much_is_no_other_failure(one: str, other: str) -> None:
    assert headline_fingerprint(one, "done") == headline_fingerprint(other, "done")


def test_other_words_or_another_end_are() -> None:
    fingerprints = {
        headline_fingerprint("rank 1 of 2 was killed by SIGSEGV", "died"),
        headline_fingerprint("rank 1 of 2 was killed by SIGKILL", "died"),
        headline_fingerprint("rank 1 of 2 was killed by SIGKILL", "hung"),
        headline_fingerprint("KeyError: 'a'", "done"),
    }
    assert len(fingerprints) == 4


def test_the_line_can_be_pasted() -> None:
    line = reproduce_line("my runs/latest", "recipes/a.yaml::x[dev-cpu]")
    words = ["pytest-megatron", "repro", "my runs/latest", "recipes/a.yaml::x[dev-cpu]"]
    assert shlex.split(line) == ["reproduce:", *words]
