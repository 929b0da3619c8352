from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_megatron.runs.redact import Redactor, is_secret_name, redact_tree


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
        "npm_" + "A1b2" * 9,
        "pypi-" + "A1b2" * 9,
        "sk-proj-" + "a1B2" * 6,
        "curl -H 'Authorization: Bearer abc.def'",
        "http://u:p@h",
    ],
)
def test_a_secret_goes_by_the_form_that_its_issuer_gives_it(text: str) -> None:
    assert "***" in Redactor.of({}).text(text)


KEY_LINES = ["MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"] * 2
KEY_BEGIN = ("-----BEGIN RSA PRIVATE KEY-----", "DEK-Info: AES", "")
KEY_END = ("Qg==", "-----END RSA PRIVATE KEY-----", "the last line")
KEY = "\n".join((*KEY_BEGIN, *KEY_LINES, *KEY_END))


@pytest.mark.parametrize(
    ("text", "secrets", "kept"),
    [
        pytest.param(KEY, ["MII", "Qg"], ["BEGIN", "last line"], id="a key"),
        pytest.param(
            KEY.replace("\n", "\n[rank0]: "), ["MII", "Qg"], ["END RSA", "last line"], id="in a log"
        ),
        pytest.param(
            KEY.replace("\n", "\n+"), ["MII", "Qg"], ["DEK-Info", "+the last line"], id="in a patch"
        ),
        pytest.param(
            json.dumps({"a": {"private_key": KEY, "id": "me"}}),
            ["MII", "Qg"],
            ["private_key", '"id": "me"', "last line"],
            id="of an account",
        ),
        pytest.param(
            json.dumps({"evidence": KEY.splitlines()}), ["MII", "Qg"], ["last line"], id="lines"
        ),
        pytest.param(
            KEY.partition("-----END")[0] + "step 3 loss 5.0\nsum 4\n",
            ["MII", "Qg"],
            ["step 3 loss 5.0", "sum 4"],
            id="cut off",
        ),
        pytest.param(
            'if "-----BEGIN PRIVATE KEY-----" in text:\n    pass', [], ["text:", "pass"], id="code"
        ),
        pytest.param(
            "//registry.npmjs.org/:_authToken=a1b2c3d4\n_auth = bWU6aGVyZQ==\nself._password = f()",
            ["a1b2c3d4", "bWU6"],
            ["//registry.npmjs.org/:_authToken=", "self._password = f()"],
            id="npm",
        ),
        pytest.param(
            "machine api.wandb.ai login user password hunter\nmachine a\n  password a1b2c3d4\n"
            "wrong password given, password: incorrect\npassword incorrect\n",
            ["hunter", "a1b2c3d4"],
            ["login user", "password given, password: incorrect", "password incorrect"],
            id="netrc",
        ),
        pytest.param(
            f"aws_secret_access_key = {'aB3/' * 10}\naws_secret_access_key=cfg.key",
            ["aB3/"],
            ["cfg.key"],
            id="aws",
        ),
    ],
)
@pytest.mark.parametrize("name", ["stdout.log", "run.json"])
def test_a_secret_goes_by_the_form_of_the_file_that_it_is_from(
    tmp_path: Path, name: str, text: str, secrets: list[str], kept: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert redact_tree(tmp_path, Redactor.of({})) == ()
    found = path.read_text()
    assert [s for s in secrets if s in found] == []
    assert [k for k in kept if k not in found] == []
    redact_tree(tmp_path, Redactor.of({}))
    assert path.read_text() == found


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
