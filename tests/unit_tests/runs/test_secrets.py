from __future__ import annotations

import pytest

from pytest_megatron.runs.redact import Redactor, is_secret_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("password", True),
        ("AZURE_STORAGE_CONNECTION_STRING", True),
        ("SENTRY_DSN", True),
        ("SLACK_WEBHOOK_URL", True),
        ("GITLAB_CI_JWT", True),
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--wandb-api-key", "abcdefgh"], ["--wandb-api-key", "***"]),
        (["--token=abcdefgh", "x"], ["--token=***", "x"]),
        (["optimizer.secret=abcdefgh"], ["optimizer.secret=***"]),
        (["--hub-token", "--lr", "0.1"], ["--hub-token", "--lr", "0.1"]),
        (["https://me:pw@h/p", "a:b@c"], ["https://me:***@h/p", "a:b@c"]),
    ],
)
def test_an_option_with_a_secret_name_loses_its_value(
    words: list[str], expected: list[str]
) -> None:
    assert Redactor.of({}).words(words) == expected


@pytest.mark.parametrize(
    "text",
    [
        "login hf_" + "a1" * 17,
        "ghp_" + "A1b2" * 9,
        "AKIA" + "ABCD" * 4,
        "sk-proj-" + "a1B2" * 6,
        "curl -H 'Authorization: Bearer abc.def'",
        "http://u:p@h",
    ],
)
def test_a_secret_goes_by_the_form_that_its_issuer_gives_it(text: str) -> None:
    assert "***" in Redactor.of({}).text(text)


def test_a_value_goes_in_every_form_in_which_files_hold_it() -> None:
    redactor = Redactor.of({"MY_TOKEN": 'a<b>"c&d/e', "SSH_KEY": "first line\nsecond line"})
    for form in ('a<b>"c&d/e', 'a<b>\\"c&d/e', "a&lt;b&gt;&quot;c&amp;d/e", "a%3Cb%3E%22c%26d%2Fe"):
        assert redactor.text(f"[{form}]") == "[***]"
    assert redactor.text('<system-out>a&lt;b&gt;"c&amp;d/e</system-out>') == (
        "<system-out>***</system-out>"
    )
    assert redactor.text("second line") == "***"


def test_words_that_are_no_secret_stay_although_a_name_says_so() -> None:
    assert Redactor.of({"WANDB_API_KEY": "disabled", "SHORT_KEY": "on"}).values == ()


def test_a_project_names_secrets_of_its_own() -> None:
    redactor = Redactor.of({"HOUSE_WORD": "abcdefgh"}, ["--house-x", "zyxwvu"], ["HOUSE_*"])
    assert redactor.env({"HOUSE_WORD": "abcdefgh", "A": "x abcdefgh"}) == {
        "A": "x ***",
        "HOUSE_WORD": "***",
    }
    assert redactor.words(["--house-x", "zyxwvu"]) == ["--house-x", "***"]
