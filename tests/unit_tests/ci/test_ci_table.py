"""The table that decides: what is built in, a project's own, and what is wrong in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.project import load_config
from pytest_megatron.base.schema import trusted, validate
from pytest_megatron.ci.decide import Trigger, decide
from pytest_megatron.ci.table import (
    BUILT_IN,
    CiTable,
    built_in_table,
    load_table,
    table_json_schema,
)
from pytest_megatron.errors import ConfigError
from pytest_megatron.workloads.recipe.model import project_words

RULE = 'name = "a"\nscope = ["L0"]\nn_repeat = 2\nlightweight = false\n'

LABEL = """
[[tool.pytest-megatron.ci.labels]]
label = "container::lts"
environment = "lts"
image = "old"
[[tool.pytest-megatron.ci.labels]]
label = "new"
environment = "dev"
"""


def load(root: Path, text: str, above: str = "") -> CiTable:
    (root / "pyproject.toml").write_text(f"{above}\n[tool.pytest-megatron.ci]\n{text}")
    return load_table(load_config(root), project_words(root))


def rules(*texts: str) -> str:
    return "\n".join(f"[[tool.pytest-megatron.ci.rules]]\n{text}" for text in texts)


def test_what_is_built_in_is_what_the_schema_asks_for() -> None:
    import tomllib

    keys: dict[str, JsonValue] = tomllib.loads(BUILT_IN.read_text())
    properties = table_json_schema()["properties"]
    assert isinstance(properties, dict)
    assert trusted(CiTable, keys) == validate(CiTable, keys)
    assert set(keys) == set(properties) - {"recipe_profile", "workflow"}


def test_a_project_without_a_table_has_the_built_in_one(tmp_path: Path) -> None:
    assert load_table(load_config(tmp_path), project_words(tmp_path)) is built_in_table()


def test_a_key_of_a_project_replaces_the_built_in_one_whole(tmp_path: Path) -> None:
    first = 'when = { label = ["go"], cadence = ["pr", "weekly"] }\n'
    table = load(tmp_path, rules(first + RULE, RULE.replace("L0", "nightly").replace('"a"', '"b"')))
    assert [rule.name for rule in table.rules] == ["a", "b"]
    assert table.labels == built_in_table().labels
    decided = decide(Trigger(labels=("go",)), table)
    assert (decided.rule, decided.scope, decided.cadence) == ("b", ("L2",), ())
    assert decide(Trigger(labels=("go",), cadence="pr"), table).rule == "a"


def test_a_rule_may_have_an_environment_which_labels_still_change(tmp_path: Path) -> None:
    table = load(tmp_path, rules('environment = "lts"\n' + RULE) + LABEL)
    plain, labelled = (decide(Trigger(labels=words), table) for words in ((), ("new",)))
    assert [(d.environment, d.image) for d in (plain, labelled)] == [("lts", "old"), ("dev", "dev")]


def test_a_project_may_name_scopes_environments_and_events_of_its_own(tmp_path: Path) -> None:
    words = '[tool.pytest-megatron]\nscopes = ["smoke"]\nenvironments = ["edge"]\n'
    text = 'events = ["merge_request"]\nenvironment = "edge"\n'
    table = load(tmp_path, text + rules(RULE.replace("L0", "smoke")), words)
    decided = decide(Trigger(event="merge_request"), table)
    assert (decided.scope, decided.environment) == (("smoke",), "edge")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param("rule = []", " rule: unknown key, expected one of default_", id="key"),
        pytest.param(
            rules(RULE.replace("2", '"five"')),
            " rules[0].n_repeat: found 'five', expected an integer >= 1",
            id="type",
        ),
        pytest.param(
            rules('when = { events = ["push"] }\n' + RULE),
            " rules[0].when.events: unknown key, expected one of cadence, event, label, ref; "
            "did you mean 'event'?",
            id="condition",
        ),
        pytest.param(
            rules('name = "a"'), " rules[0].scope: is missing; add it (and 2 more)", id="missing"
        ),
        pytest.param(
            rules(RULE.replace("L0", "L9")),
            " rules[0].scope: unknown word 'L9', expected",
            id="scope",
        ),
        pytest.param(
            rules('when = { event = ["pushed"] }\n' + RULE),
            " rules[0].when.event: unknown word 'pushed', expected one of merge_group,",
            id="event",
        ),
        pytest.param(
            rules(RULE, RULE),
            " rules[1]: can never decide, rules[0] always does; move it up",
            id="unreachable",
        ),
        pytest.param(
            'environment = "lst"', " environment: unknown word 'lst', expected one of dev", id="env"
        ),
        pytest.param(
            'opt_in_platforms = ["dgx_gb2100"]',
            " opt_in_platforms: unknown word 'dgx_gb2100', expected one of cpu,",
            id="a misspelt platform",
        ),
        pytest.param(
            '[[tool.pytest-megatron.ci.marks]]\nmark = "x"\nplatforms = ["cpu"]',
            " marks[0].platforms: unknown key, expected one of environment, mark, platform, tag;",
            id="mark",
        ),
    ],
)
def test_a_wrong_table_is_one_error_with_file_and_key(
    tmp_path: Path, text: str, error: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    where = f"{tmp_path / 'pyproject.toml'}: [tool.pytest-megatron.ci]"
    assert str(caught.value).startswith(where + error)


def test_an_event_that_no_rule_takes_is_an_error(tmp_path: Path) -> None:
    table = load(tmp_path, rules('when = { event = ["push"] }\n' + RULE))
    with pytest.raises(Exception, match="--event schedule: matches none of 1 rules; end the rules"):
        decide(Trigger(event="schedule"), table)
