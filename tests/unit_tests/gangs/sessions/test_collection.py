"""What is collected, selected, skipped and refused; no training is started here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_project import Project, Run


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("collection"))
    project.row(project.case("small"), scope=["L0", "nightly"])
    project.row(project.case("large"), environment=["dev", "lts"], tag=["latest"])
    project.row(project.case("far"), platforms=["dgx_a100"], gpus=[64])  # no host has as many
    project.row(project.case("off"), scope=["mr-broken"])
    (project.root / "test_python.py").write_text("def test_python():\n    pass\n")
    return project


def collected(run: Run) -> list[str]:
    """Return the node ids of `--collect-only -q`."""
    return [line for line in run.stdout.splitlines() if "::" in line]


ALL = [
    "small[dev-cpu-L0]",
    "small[dev-cpu-L2]",
    "large[dev-cpu]",
    "large[lts-cpu]",
    "far[dev-dgx_a100]",
    "off[dev-cpu]",
]


def test_a_row_has_a_node_id_that_tells_it_apart(project: Project) -> None:
    run = project.run("recipes", "--collect-only", "-q")
    assert run.stderr == ""
    assert [node.removeprefix("recipes/tiny.yaml::") for node in collected(run)] == ALL


SELECTIONS = {
    "mark of the environment": (["-m", "lts"], ["large[lts-cpu]"]),
    "mark with a name": (["-m", "platform(name='dgx_a100')"], ["far[dev-dgx_a100]"]),
    "scope by its alias": (["--scope", "nightly"], ["small[dev-cpu-L2]"]),
    "two": (["--tag", "latest", "--environment", "dev"], ["large[dev-cpu]"]),
    "repeated": (["--test-case", "far", "--test-case", "off"], ALL[-2:]),
    "with -k": (["--scope", "nightly", "-k", "dev"], ["small[dev-cpu-L2]"]),
}
# Each session in a process of its own, forked once pytest and the plugin are imported.
SESSIONS = """
import json, os, sys
import pytest
import pytest_megatron.workloads.items.plugin
for arguments in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if not os.fork():
        code = pytest.main(["-p", "megatron", "recipes", "--collect-only", "-q", *arguments])
        sys.stdout.flush()
        os._exit(code)
    print(f"ended: {os.waitstatus_to_exitcode(os.wait()[1])}")
"""


@pytest.fixture(scope="module")
def selected(project: Project) -> dict[str, list[str]]:
    """The rows that each selection collects."""
    given = json.dumps([arguments for arguments, _ in SELECTIONS.values()])
    done = subprocess.run(
        [sys.executable, "-c", SESSIONS, given],
        cwd=project.root,
        env=project.env(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    *parts, rest = re.split(r"^ended: \d\n", done.stdout, flags=re.MULTILINE)
    assert rest == ""
    return {
        name: re.findall(r"^recipes/tiny\.yaml::(.*)", part, re.MULTILINE)
        for name, part in zip(SELECTIONS, parts, strict=True)
    }


@pytest.mark.parametrize("name", SELECTIONS)
def test_workloads_are_selected(selected: dict[str, list[str]], name: str) -> None:
    assert selected[name] == SELECTIONS[name][1]


def test_a_plain_pytest_collects_no_workload(project: Project) -> None:
    run = project.run("--collect-only", "-q", run_dir="")
    assert collected(run) == ["test_python.py::test_python"]


def test_a_selection_makes_a_plain_pytest_collect_workloads(project: Project) -> None:
    run = project.run("--collect-only", "-q", "--scope", "L2", run_dir="")
    assert collected(run) == [
        "recipes/tiny.yaml::small[dev-cpu-L2]",
        "test_python.py::test_python",
    ]


def test_a_project_below_a_folder_named_recipes_is_no_recipe(tmp_path: Path) -> None:
    project = Project(root=tmp_path / "recipes" / "project")
    project.row(project.case("small"))
    (project.root / "test_python.py").write_text("def test_python():\n    pass\n")
    run = project.run("--collect-only", "-q", run_dir="")
    assert collected(run) == ["test_python.py::test_python"]


def test_a_folder_of_recipes_is_taken_from_anywhere(tmp_path: Path) -> None:
    project = Project(root=tmp_path / "elsewhere")
    project.row(project.case("small"))
    other = Project(root=tmp_path / "here")
    run = other.run(str(project.root / "recipes"), "--collect-only", "-q")
    assert [line.rpartition("::")[2] for line in collected(run)] == ["small[dev-cpu]"]


def test_a_misspelt_type_in_a_folder_of_recipes_is_an_error_and_not_silence(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("small"))
    (tmp_path / "recipes" / "large.yaml").write_text("typ: basic\n")
    run = project.run("recipes", "--collect-only", "-q")
    assert [line.rpartition("::")[2] for line in collected(run)] == ["small[dev-cpu]"]
    assert "recipes/large.yaml:1: type: is missing, expected one of basic, build" in run.stdout


OTHER_PLUGIN = """\
import pytest

class Item(pytest.Item):
    def runtest(self): pass

class File(pytest.File):
    def collect(self):
        yield Item.from_parent(self, name="theirs")

def pytest_collect_file(file_path, parent):
    if file_path.name == "test_other.yaml":
        return File.from_parent(parent, path=file_path)
"""


def test_a_yaml_file_elsewhere_that_is_no_recipe_is_left_to_others(tmp_path: Path) -> None:
    project = Project(root=tmp_path)
    project.row(project.case("small"))
    (tmp_path / "test_other.yaml").write_text("stages: []\n")
    (tmp_path / "conftest.py").write_text(OTHER_PLUGIN)
    run = project.run("recipes", "test_other.yaml", "--collect-only", "-q")
    names = [line.rpartition("::")[2] for line in collected(run)]
    assert names == ["small[dev-cpu]", "theirs"]


MALFORMED = """\
type: basic
format_version: 1
spec: {model: gpt, gpus: 2, training_script_path: train.py}
products:
  - test_case: [small]
    products:
      - {environment: [dev], scope: [L0], platforms: [cpu]}
"""


FAULTS = {
    "scope": ("scope: [L0]", "scope: [L00]", "7: scope: unknown word 'L00', expected one of "),
    "platform": (
        "platforms: [cpu]",
        "platforms: [cpuu]",
        "7: platforms: unknown word 'cpuu', expected one of cpu, dgx_a100, ",
    ),
    "environment": (
        "environment: [dev]",
        "environment: [devel]",
        "7: environment: unknown word 'devel', expected one of dev, lts",
    ),
    "cadence": (
        "scope: [L0]",
        "scope: [L0], cadence: [daily]",
        "7: cadence: unknown word 'daily', expected one of mergegroup, ",
    ),
    "bare string": (
        "scope: [L0]",
        "scope: L0",
        "7: products[0].products[0].scope: found 'L0', expected a list; write [L0]",
    ),
    "no products": (
        "    products:\n      - {",
        "    product:\n      - {",
        "6: products[0].product: unknown key, expected one of cadence, products, test_case; did ",
    ),
    "no YAML": ("type: basic", "type: [basic", ""),
}


@pytest.fixture(scope="module")
def malformed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    project = Project(root=tmp_path_factory.mktemp("malformed"))
    project.row(project.case("small"))
    for number, (old, new, _) in enumerate(FAULTS.values()):
        assert MALFORMED.count(old) == 1
        path = project.root / "recipes" / f"bad{number}.yaml"
        path.write_text(MALFORMED.replace(old, new))
    return project.run("recipes", "--collect-only", "-q")


@pytest.mark.parametrize("name", FAULTS)
def test_a_malformed_recipe_is_one_error_and_the_others_are_collected(
    malformed: Run, name: str
) -> None:
    """In Megatron-LM one malformed recipe breaks all of CI."""
    assert malformed.returncode == pytest.ExitCode.TESTS_FAILED
    assert collected(malformed)[0] == "recipes/tiny.yaml::small[dev-cpu]"
    assert "Traceback" not in malformed.text
    start = f"recipes/bad{[*FAULTS].index(name)}.yaml:"
    (line,) = [x for x in malformed.stdout.splitlines() if x.startswith(start)]
    assert line.removeprefix(start).startswith(FAULTS[name][2])


def test_rows_that_are_switched_off_or_not_for_this_host_are_skipped_with_a_reason(
    project: Project,
) -> None:
    run = project.run("recipes", "--test-case", "far,off", run_dir="skipped")
    assert run.returncode == 0
    skipped = sorted(x for x in run.stdout.splitlines() if x.startswith("SKIPPED"))
    assert [x.partition(": ")[2].partition(", this host has")[0] for x in skipped] == [
        "dgx_a100 needs 64 x A100",
        "scope 'mr-broken' disables the row",
    ]
    assert run.json["items"] == {}
    assert run.json["exit_code"] == 0  # where the user asked for the run to be told of


def test_a_platform_that_is_asked_for_and_not_here_is_an_error(project: Project) -> None:
    run = project.run("recipes", "--platform", "dgx_a100", run_dir="asked")
    assert run.outcomes == {"far": "ERROR"}
    assert "dgx_a100 needs 64 x A100, this host has " in run.stdout
    assert "; nothing was run" in run.stdout
    assert not run.directory.exists()


EMPTY = (
    "--scope L1: matches none of 6 workloads; 6 workloads match without --scope L1: "
    "small[dev-cpu-L0], small[dev-cpu-L2], large[dev-cpu], ..."
)


def test_an_empty_selection_is_a_usage_error_with_the_nearest_matches(project: Project) -> None:
    run = project.run("recipes", "--scope", "L1", run_dir="empty")
    assert (run.returncode, run.stderr) == (pytest.ExitCode.USAGE_ERROR, f"ERROR: {EMPTY}\n\n")
    assert not run.directory.exists()


def test_an_empty_selection_is_the_same_error_under_xdist(project: Project) -> None:
    run = project.run("recipes", "--scope", "L1", "-n", "2", run_dir="empty")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {EMPTY}" in run.stdout.splitlines()
    assert "INTERNALERROR" not in run.text


def test_an_empty_selection_may_be_allowed(project: Project) -> None:
    run = project.run("recipes", "--scope", "L1", "--allow-empty", run_dir="empty")
    assert (run.returncode, run.stderr) == (pytest.ExitCode.OK, "")


UNKNOWN = "--environment: unknown environment 'dve', expected one of dev, lts; did you mean 'dev'?"


def test_an_unknown_word_in_a_selection_lists_the_choices(project: Project) -> None:
    run = project.run("recipes", "--environment", "dve", run_dir="empty")
    assert (run.returncode, run.stderr) == (
        pytest.ExitCode.USAGE_ERROR,
        f"ERROR: {UNKNOWN}\n\n",
    )


def test_without_our_options_nothing_of_ours_is_seen_and_nothing_heavy_is_imported(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_python.py").write_text(
        "import sys\n"
        "def test_python(request):\n"
        "    ours = 'pytest_megatron.gangs.ipc.messages'\n"
        "    heavy = {'torch', 'pydantic', 'yaml', 'numpy', 'psutil', 'filelock', ours}\n"
        "    assert not heavy & set(sys.modules)\n"
        "    assert request.config.pluginmanager.has_plugin('megatron')\n"
    )
    project = Project(root=tmp_path, has_torch=True)
    run = subprocess.run(  # an interpreter of its own, which has imported nothing
        project.command("-m", "not slow", run_dir=""),
        cwd=project.root,
        env=project.env(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0
    lines = [x for x in run.stdout.splitlines() if not x.startswith("plugins: ")]
    assert "megatron" not in "".join(lines)
    assert not (tmp_path / ".pytest_megatron").exists()
