"""From a failing run to the same failure in another checkout: real sessions, real processes.

No step of it needs paths of the first machine, or ports or directories that two runs share.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from gang_suite import Suite
from tiny_project import Project

from pytest_megatron.base.crc32c import masked_crc32c
from pytest_megatron.base.files import JsonValue
from pytest_megatron.repro.command import command

ORDER = """\
    import os, time
    SEEN = []

    def test_clean(rank): pass
    def test_polluter(rank): SEEN.append(rank)
    def test_between(rank): pass
    def test_victim(rank): assert not SEEN, "polluted"
    def test_split(rank):
        if rank == 1:
            import pytest
            pytest.skip("not here")
    def test_dies(rank):
        if rank == 1:
            os._exit(3)
    def test_hangs(rank):
        if rank == 0:
            time.sleep(600)
    """


def commit(root: Path) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=root, check=True)  # noqa: S607 - the user's git


def repro(checkout: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments, "--project", str(checkout)])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A zip of a run whose tests failed in several ways, and a checkout elsewhere."""
    root = tmp_path_factory.mktemp("there")
    suite = Suite(root, is_fresh=True).write(test_a=ORDER)
    arguments = (
        "--ranks",
        "2",
        "-o",
        "megatron_rank_grace=1",
        "--rank-timeout",
        "2",
        "--run-dir",
        "out",
    )
    ended = suite.run(*arguments, env={"PYTHONHASHSEED": "7", "NCCL_ALGO": "Ring"})
    assert ended.summary == "4 failed, 3 passed"
    packed = Path(shutil.make_archive(str(root / "artifact"), "zip", root / "out"))
    shutil.rmtree(root / "out")
    checkout = tmp_path_factory.mktemp("here")
    shutil.copy(root / "test_a.py", checkout)
    return packed, checkout


@pytest.mark.parametrize(
    ("name", "headline"),
    [
        ("victim", "AssertionError: polluted at test_a.py:7"),
        ("split", "rank 1 skipped, rank 0 did not"),
        ("dies", "rank 1 of 2 exited with code 3"),
        ("hangs", "rank 0 did not end in 2 s at test_a.py:17 in test_hangs"),
    ],
)
def test_a_failure_of_an_artifact_is_the_same_in_another_checkout(
    artifact: tuple[Path, Path], name: str, headline: str
) -> None:
    packed, checkout = artifact
    done = repro(checkout, str(packed), f"test_{name}")
    assert (done.exit_code, done.stdout.splitlines()[-1].endswith(headline)) == (1, True), (
        done.output
    )
    assert "fails in the same way" in done.stdout


def test_several_failures_are_listed(artifact: tuple[Path, Path]) -> None:
    packed, checkout = artifact
    done = repro(checkout, str(packed))
    assert done.exit_code == 125
    assert "4 items failed; name one:\n  test_a.py::test_victim\n" in done.stderr


def test_a_fixed_checkout_passes_and_a_broken_one_cannot_tell(
    artifact: tuple[Path, Path], tmp_path: Path
) -> None:
    packed, _ = artifact
    test = tmp_path / "test_a.py"
    codes = []
    for text in (
        ORDER.replace("assert not SEEN", "assert SEEN"),
        ORDER.replace('assert not SEEN, "polluted"', "raise KeyError(1)"),
        "import nothing_of_that_name",
    ):
        Suite(tmp_path).write(test_a=text)
        codes.append(repro(tmp_path, str(packed), "victim").exit_code)
    assert codes == [0, 3, 125]
    commit(tmp_path)
    Suite(tmp_path).write(test_a=ORDER.replace('assert not SEEN, "polluted"', "raise KeyError(1)"))
    (tmp_path / ".git/BISECT_START").touch()
    assert repro(tmp_path, str(packed), "victim").exit_code == 125
    test.unlink()
    assert repro(tmp_path, str(packed), "victim").exit_code == 125


def test_the_test_that_pollutes_is_found(artifact: tuple[Path, Path]) -> None:
    packed, checkout = artifact
    done = repro(checkout, str(packed), "victim", "--bisect-order")
    assert done.exit_code == 1
    assert "fails in the same way after\n  test_a.py::test_polluter\n" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("test_a.py::test_polluter test_a.py::test_victim")


def test_the_lines_to_do_it_by_hand_are_printed(artifact: tuple[Path, Path]) -> None:
    packed, checkout = artifact
    results = list((checkout / ".pytest_megatron/repro").rglob("run"))
    done = repro(checkout, str(packed), "dies", "--print", "--ranks", "3")
    first, second = done.stdout.splitlines()
    assert (done.exit_code, first) == (0, f"cd {shlex.quote(str(checkout))}")
    assert second.startswith("NCCL_ALGO=Ring PYTHONHASHSEED=7 ")
    words = "--megatron-ranks 3 --megatron-device cpu --megatron-rank-timeout 2"
    assert f" {words} -o megatron_rank_grace=1 " in second
    assert list((checkout / ".pytest_megatron/repro").rglob("run")) == results


LEAVES = """\
    import os

    def test_sets():
        os.environ["LEFT"] = "1"
    """


@pytest.mark.parametrize(
    ("arguments", "ini"),
    [([], "megatron_leaks = true"), (["--leaks"], "megatron_leaks=false")],
    ids=["in the ini file", "typed against the ini file"],
)
def test_a_test_that_failed_by_an_option_fails_by_it_again(
    tmp_path: Path, arguments: list[str], ini: str
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for root in (there, here):
        root.mkdir()
        Suite(root).write(test_a=LEAVES, **{"pytest.ini": "[pytest]\n"})
    (there / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    suite = Suite(there, is_fresh=True, has_torch=False)
    ended = suite.run("--ranks=1", "--device=cpu", "--run-dir=out", *arguments)
    assert ended.summary == "1 passed, 1 error"
    assert json.loads((there / "out/run.json").read_text())["options"] == {"leaks": True}
    done = repro(here, str(there / "out"))
    assert (done.exit_code, " --megatron-leaks " in done.stdout) == (1, True), done.output
    assert "fails in the same way: " in done.stdout


SECRETS = {
    "PLANTED_TOKEN": "plantedInTheEnv1",
    "GITHUB_PAT": 'planted<&>"pat"',
    "PROXY": "http://user:plantedInUrl@proxy.example:3128",
    "PIN_KEY": "1234567",
    "HOUSE_WORD": "plantedByOwnName",
}
CASE_SECRETS = {"CASE_TOKEN": "plantedInTheCase"}
ARGUMENTS: dict[str, JsonValue] = {
    "wandb_key": "plantedAsArgument",
    "url": "https://me:plantedInAnArgument@example.org",
}
PLANTED = (
    *("plantedInTheEnv1", 'planted<&>"pat"', "plantedInUrl", "plantedByOwnName"),
    *("plantedInTheCase", "plantedAsArgument", "plantedInAnArgument", "plantedInANewFile"),
)


def test_no_planted_secret_is_anywhere_in_a_run(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest-megatron]\nsecret-names = ["HOUSE_*"]\n[tool.pytest]\naddopts = ["-v"]\n'
    )
    project.add("leaks", "leak@2", "crash@4:1", env=CASE_SECRETS, config=None, **ARGUMENTS)
    commit(tmp_path)
    recipe = tmp_path / "recipes" / "tiny.yaml"
    recipe.write_text(f"{recipe.read_text()}# {SECRETS['PLANTED_TOKEN']}\n")
    (tmp_path / "id_ed25519").write_text("plantedInANewFile")
    run = project.run("recipes", "--junitxml", "junit.xml", **SECRETS)
    assert run.verdict("leaks") == ("FAILED", "failed")
    files = [p for p in run.directory.rglob("*") if p.is_file()] + [tmp_path / "junit.xml"]
    data = {path: path.read_bytes() for path in files}
    assert {p.name for p in files} >= {"plan.json", "run.json", "stdout.log", "dirty.patch"}
    found = [(path.name, word) for path in files for word in PLANTED if word.encode() in data[path]]
    assert found == []
    assert [word for word in PLANTED if word in run.stdout] == []
    (notes,) = run.directory.rglob("notes.json")
    assert '"n": 1234567' in notes.read_text()  # a number is no text, though a secret looks so
    (events,) = run.directory.rglob("*tfevents.args")
    records = events.read_bytes()
    length = int.from_bytes(records[:8], "little")
    payload = records[12 : 12 + length]
    assert b"*" * len(CASE_SECRETS["CASE_TOKEN"]) in payload
    assert int.from_bytes(records[12 + length : 16 + length], "little") == masked_crc32c(payload)
    assert records.endswith(b"kept" + masked_crc32c(b"kept").to_bytes(4, "little"))
    assert run.json["is_redacted"] is True
