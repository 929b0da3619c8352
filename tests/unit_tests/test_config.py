from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.base.project import ProjectConfig, load_config
from pytest_megatron.errors import ConfigError


def test_the_nearest_pyproject_counts(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(
        '[tool.pytest-megatron]\nplatforms = ["dgx_b300"]\n[tool.pytest-megatron.ci]\na = 1\n'
    )
    (tmp_path / "recipes/h100").mkdir(parents=True)
    expected = ProjectConfig(file=path, platforms=("dgx_b300",), tables={"ci": {"a": 1}})
    assert load_config(tmp_path / "recipes/h100") == expected


def test_a_project_without_settings_has_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text("[project]\nname = 'x'\n")
    assert load_config(tmp_path) == ProjectConfig(file=path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "scope = ['a']",
            "unknown key 'scope', expected one of environments, kept-variables, ",
        ),
        ("scopes = 'a'", "[tool.pytest-megatron] scopes: found 'a', expected a list of non-empty"),
        ("scopes = ['']", "[tool.pytest-megatron] scopes: found [''], expected a list of non-emp"),
        (
            "golden-form = 'compact'",
            "[tool.pytest-megatron]: golden-form was removed; delete the key, ",
        ),
        ("golden-platforms.a = 'cpu'", "[tool.pytest-megatron]: golden-platforms was removed; "),
        ("scopes = [", "pyproject.toml: cannot be read: "),
    ],
)
def test_a_wrong_setting_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest-megatron]\n{text}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path)
    assert str(tmp_path / "pyproject.toml") in str(raised.value)
    assert message in str(raised.value)
