from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.base.text import nearest
from pytest_megatron.workloads.recipe.model import (
    Vocabulary,
    disabled_reason,
    enabled_scope,
    project_words,
)


@pytest.mark.parametrize(
    ("key", "word", "expected"),
    [
        ("scope", "mr-github", True),
        ("scope", "mr-github-broken", True),
        ("scope", "mr-github-temp-disabled", True),
        ("scope", "mr-gitub", False),
        ("scope", "broken", False),
        ("platforms", "dgx_h100", True),
        ("platforms", "dg  x_h100", False),
        ("environment", "lts", True),
        ("cadence", "daily", False),
        ("nemo_model", "anything", True),
    ],
)
def test_words_are_known_by_their_key(key: str, word: str, *, expected: bool) -> None:
    assert Vocabulary().knows(key, word) is expected


def test_a_project_adds_words_of_its_own(tmp_path: Path) -> None:
    settings = 'scopes = ["smoke"]\nplatforms = ["b200"]\nenvironments = ["next"]\n'
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest-megatron]\n{settings}")
    words = project_words(tmp_path)
    found = [("scope", "smoke"), ("scope", "smoke-broken"), ("platforms", "b200")]
    assert all(words.knows(key, word) for key, word in [*found, ("environment", "next")])
    assert not Vocabulary().knows("scope", "smoke")


@pytest.mark.parametrize("scope", ["mr-broken", "mr-github-temp-disabled", "flaky", "deprecated"])
def test_a_scope_may_disable_a_row(scope: str) -> None:
    assert disabled_reason(scope) == f"scope {scope!r} disables the row"


def test_other_scopes_do_not() -> None:
    assert (disabled_reason("L0"), enabled_scope("L0"), enabled_scope("mr-broken")) == (
        None,
        "L0",
        "mr",
    )


def test_the_nearest_word_is_offered_if_there_is_one() -> None:
    assert nearest("dve", ["dev", "lts"]) == "; did you mean 'dev'?"
    assert nearest("zzz", ["dev", "lts"]) == ""
