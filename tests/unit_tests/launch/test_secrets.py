from __future__ import annotations

import pytest

from pytest_megatron.launch.secrets import Redactor, is_secret_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("password", True),
        ("TOKENIZER_PATH", False),
        ("KEYBOARD", False),
        ("CUDA_VISIBLE_DEVICES", False),
        ("MONKEY", False),
    ],
)
def test_a_name_tells_a_secret(name: str, *, expected: bool) -> None:
    assert is_secret_name(name) is expected


def test_a_secret_goes_by_name_and_wherever_its_value_stands() -> None:
    env = {"HF_TOKEN": "hf_abcdef", "URL": "https://u:hf_abcdef@host", "SHORT_KEY": "1", "N": "1"}
    redactor = Redactor.of(env)
    assert redactor.env(env) == {
        "HF_TOKEN": "***",
        "N": "1",
        "SHORT_KEY": "***",
        "URL": "https://u:***@host",
    }
    assert redactor.words(["--token", "hf_abcdef"]) == ["--token", "***"]
