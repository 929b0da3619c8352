"""Projects that have not asked for the plugin, and those that own names of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_megatron import plugin
from pytest_megatron.entry import FIXTURES

# Declarations as public projects have them; docs/reference/other-plugins.md names those.
SHAPES = {
    "a fixture that returns its option": (
        """
import pytest
def pytest_addoption(parser):
    parser.addoption("--device", action="store", default="cpu", choices=["cpu", "mps"])
@pytest.fixture
def device(request):
    return request.config.getoption("--device")
""",
        ("--device", "mps"),
        "def test(device): assert device == 'mps'",
    ),
    "a comparison with what a training left": (
        """
def pytest_addoption(parser):
    parser.addoption("--scope", action="store", help="tier")
    parser.addoption("--train-iters", default=100, type=int)
""",
        ("--scope=mr",),
        "def test(request): assert request.config.getoption('--scope') == 'mr'",
    ),
    "a flag where ours has a value, in a group of our name": (
        """
def pytest_addoption(parser):
    group = parser.getgroup("megatron")
    group.addoption("--gpus", action="store_true")
    group.addoption("--model", default="resnet", dest="arch")
""",
        ("--gpus", "--model", "bert"),
        "def test(pytestconfig): assert pytestconfig.option.gpus and pytestconfig.option.arch",
    ),
    "fixtures and a mark of our names": (
        """
import pytest
def pytest_addoption(parser):
    parser.addoption("--executor", default="127.0.0.1")
def pytest_configure(config):
    config.addinivalue_line("markers", "owner(team): who is asked")
@pytest.fixture(scope="session")
def world_size():
    return "eight"
@pytest.fixture
def rank(world_size):
    return "of " + world_size
""",
        ("--executor", "grid"),
        "import pytest\n@pytest.mark.owner('us')\ndef test(rank): assert rank == 'of eight'",
    ),
}
ASKED = "megatron: declared by this project or another plugin: "


def run(place: Path, *words: str, **env: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", *words]
    done = subprocess.run(
        [*command, "--strict-config"],
        cwd=place,
        env={**clean_env(), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def clean_env() -> dict[str, str]:
    import os

    return {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}


def project(place: Path, conftest: str, test: str) -> Path:
    (place / "pytest.ini").write_text("[pytest]\n")
    (place / "conftest.py").write_text(conftest)
    (place / "test_it.py").write_text(f"{test}\n")
    return place


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "how", [(), ("-p", "no:megatron"), ("-p", "megatron", "--ranks", "2", "--megatron-device=cpu")]
)
def test_a_project_keeps_what_it_declares(shape: str, how: tuple[str, ...], tmp_path: Path) -> None:
    conftest, words, test = SHAPES[shape]
    project(tmp_path, conftest, test)
    code, output = run(tmp_path, *how, *words)
    assert code == 0, output
    assert (ASKED in output) == ("megatron" in how), output


def test_unasked_it_declares_nothing(tmp_path: Path) -> None:
    for words in (("--help",), ("--markers",), ("--fixtures",)):
        with_it, without = run(tmp_path, *words), run(tmp_path, "-p", "no:megatron", *words)
        here, there = (
            [line for line in output.split("\n") if not line.startswith(("plugins:", "==="))]
            for _, output in (with_it, without)
        )
        assert here == there


@pytest.mark.parametrize(
    ("words", "ini", "env"),
    [
        (("-p", "megatron"), "", {}),
        (("-ppytest_megatron.plugin",), "", {}),
        ((), "addopts = -p megatron", {}),
        ((), "required_plugins = pytest-megatron>=0", {}),
        ((), "megatron_rank_grace = 5", {}),
        (("-o", "megatron_rank_grace=5"), "", {}),
        ((), "", {"PYTEST_ADDOPTS": "-p megatron"}),
        ((), "", {"PYTEST_PLUGINS": "megatron"}),
        (("-p", "megatron"), "", {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
        (("-p", "pytest_megatron.plugin"), "", {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
    ],
)
def test_ways_to_ask(words: tuple[str, ...], ini: str, env: dict[str, str], tmp_path: Path) -> None:
    test = "def test(local_rank, request): assert request.config.getoption('--gpus') is None"
    project(tmp_path, "", test)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    code, output = run(tmp_path, *words, **env)
    assert code == 0, output
    if "pytest_megatron.plugin" not in str(words):  # the last word wins
        code, output = run(tmp_path, *words, "-p", "no:megatron", **env)
        refused = ("'local_rank' not found", "required plugins", "Unknown config option")
        assert any(text in output for text in refused), output


def test_a_conftest_cannot_ask_for_it(tmp_path: Path) -> None:
    asks = "pytest_plugins = ['megatron']"
    project(tmp_path, asks, "def test(world_size): assert world_size == 2")
    for words in ((), ("--ranks", "2", "--device=cpu")):
        code, output = run(tmp_path, *words)
        assert (code, "ask for it with -p megatron, typed or in addopts" in output) == (4, True)


@pytest.mark.parametrize("ranks", [(), ("--ranks=2", "--megatron-device=cpu")])
def test_assertions_of_a_package_of_its_name_stay_as_they_are(
    ranks: tuple[str, ...], tmp_path: Path
) -> None:
    project(
        tmp_path,
        "import os\nRANK = os.environ.get('LOCAL_RANK')",
        "import megatron.core, pytest\n"
        "def test():\n    with pytest.raises(AssertionError) as caught:\n"
        "        megatron.core.check(1)\n    assert str(caught.value) == 'is no 2'",
    )
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "core.py").write_text("def check(x):\n    assert x == 2, 'is no 2'\n")
    code, output = run(tmp_path, "-p", "megatron", *ranks)
    assert code == 0, output


def test_options_of_nobody_name_what_to_add(tmp_path: Path) -> None:
    project(tmp_path, "", "def test(): pass")
    for word in ("--gpus", "--megatron-gpus"):
        code, output = run(tmp_path, word, "8")
        assert code == pytest.ExitCode.USAGE_ERROR
        assert f"{word}: nobody declares it" in output
        assert f"pytest -p megatron -p no:cacheprovider --strict-markers {word} 8" in output
    code, output = run(tmp_path, "--gpux", "8")
    assert "unrecognized arguments: --gpux" in output


def test_a_missing_fixture_of_its_says_what_to_add(tmp_path: Path) -> None:
    project(tmp_path, "", "def test(process_group): pass\ndef test_other(process_groups): pass")
    code, output = run(tmp_path)
    hint = "pytest-megatron has a fixture 'process_group', for sessions that ask for it, with -p"
    assert (code, output.count("pytest-megatron has a fixture")) == (1, 1)
    assert "fixture 'process_group' not found" in output
    assert hint in output
    assert "pytest -p megatron -p no:cacheprovider --strict-markers" in output
    there = {name for name in FIXTURES if getattr(plugin, name)}
    _, asked = run(tmp_path, "-p", "megatron", "--fixtures")
    assert there == {name for name in FIXTURES if f"\n{name} " in asked}


def test_a_conftest_further_down_declares_one(tmp_path: Path) -> None:
    conftest, _, _ = SHAPES["a comparison with what a training left"]
    project(tmp_path, "", "def test(): pass")
    (tmp_path / "a" / "b").mkdir(parents=True)
    project(tmp_path / "a" / "b", conftest, "def test(): pass")
    (tmp_path / "a" / "b" / "pytest.ini").unlink()
    (tmp_path / "a" / "b" / "test_it.py").rename(tmp_path / "a" / "b" / "test_other.py")
    code, output = run(tmp_path, "-p", "megatron")
    assert (code, "2 passed" in output) == (0, True), output


def test_its_options_reach_it_by_their_long_names(tmp_path: Path) -> None:
    conftest, words, _ = SHAPES["a flag where ours has a value, in a group of our name"]
    test = "def test(world_size): assert world_size == 3"
    project(tmp_path, conftest, test)
    code, output = run(tmp_path, "-p", "megatron", *words, "--megatron-ranks=3", "--device=cpu")
    assert code == 0, output
    assert "gangs of 3 ranks" in output
    assert f"{ASKED}--gpus, --model; ours: --megatron-gpus, --megatron-model" in output


def test_the_entry_point_imports_next_to_nothing() -> None:
    code = (
        "import pytest, sys; before = set(sys.modules); import pytest_megatron.entry; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["pytest_megatron", "pytest_megatron.entry"]


def test_a_second_session_of_a_process_may_name_it_otherwise(tmp_path: Path) -> None:
    project(tmp_path, "", "def test(): pass")
    call = "pytest.main(['-p', 'no:cacheprovider', '-W', 'error', '-p', '{}'])"
    calls = "; ".join(call.format(name) for name in ("megatron", "pytest_megatron.plugin"))
    done = subprocess.run(
        [sys.executable, "-c", f"import pytest; {calls}"],
        cwd=tmp_path,
        env=clean_env(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.count("1 passed"), done.stderr) == (2, "")
