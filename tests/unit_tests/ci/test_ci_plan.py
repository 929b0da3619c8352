"""`pytest-megatron plan`: rows, jobs with their commands, buckets, outputs, empty selections."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pytest_megatron.base.files import JsonValue
from pytest_megatron.ci.plan_command import command

RECIPE = """\
type: basic
format_version: 1
spec:
  {name: "{test_case}", model: gpt, gpus: 8, platforms: dgx_h100, script: run,
   build: "image-{environment}"}
products:
  - test_case: [slim]
    products:
      - {environment: [dev], scope: [mr-github-slim, mr-github], n_repeat: [1],
         platforms: [dgx_h100, dgx_gb200]}
  - test_case: [two_nodes]
    products: [{environment: [dev, lts], scope: [mr-github], nodes: [2], time_limit: [600]}]
  - test_case: [night]
    products: [{environment: [dev], scope: [nightly, weekly]}]
  - test_case: [merge]
    products: [{environment: [dev], scope: [mr-github], cadence: [mergegroup]}]
  - test_case: [switched_off]
    products: [{environment: [dev], scope: [mr-github-broken]}]
"""
UNITS = """\
type: basic
format_version: 1
spec: {name: "{test_case}", model: unit-tests, gpus: 8, platforms: dgx_h100, script: "run"}
products:
  - test_case: [tests/unit_tests/**/*.py]
    products: [{environment: [lts, dev], tag: [latest, legacy], scope: [unit-tests]}]
  - test_case: [tests/unit_tests/moe/**/*.py]
    products: [{environment: [dev], tag: [latest], scope: [unit-tests]}]
  - test_case: [tests/unit_tests/ssm/test_ssm.py]
    products: [{environment: [dev], tag: [latest], scope: [unit-tests-broken]}]
"""
PLAIN = "NO_MARK = '@pytest.mark.experimental'\ndef test_a(): pass\n"
MARKED = """\
import pytest

@pytest.mark.launch_on_gb200
@pytest.mark.experimental
def test_gb(): pass
"""
FILES = ("test_a.py", "test_b.py", "moe/test_moe.py", "moe/test_gb.py", "ssm/test_ssm.py")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project with workloads of every tier and buckets of unit tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_OUTPUT", raising=False)
    write(tmp_path / "recipes/gpt.yaml", RECIPE)
    write(tmp_path / "recipes/unit-tests.yaml", UNITS)
    for name in FILES:
        write(tmp_path / "tests/unit_tests" / name, PLAIN)
    write(tmp_path / "tests/unit_tests/moe/test_gb.py", MARKED)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def plan(*arguments: str) -> dict[str, JsonValue]:
    result = invoke(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    found: JsonValue = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def rows(value: JsonValue) -> list[dict[str, JsonValue]]:
    assert isinstance(value, list)
    return [row for row in value if isinstance(row, dict)]


def jobs(*arguments: str) -> dict[str, dict[str, JsonValue]]:
    return {str(job["name"]): job for job in rows(plan(*arguments)["jobs"])}


def names(*arguments: str) -> list[str]:
    return [f"{row['test_case']} {row['platform']}" for row in rows(plan(*arguments)["workloads"])]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param((), ["slim dgx_h100", "slim dgx_gb200"], id="L0"),
        pytest.param(
            ("--labels", "Run tests", "--platform", "dgx_h100"),
            ["slim dgx_h100", "two_nodes dgx_h100", "merge dgx_h100"],
            id="L1, any cadence",
        ),
        pytest.param(
            ("--event", "merge_group", "--platform", "dgx_h100"),
            ["slim dgx_h100", "two_nodes dgx_h100", "merge dgx_h100"],
            id="merge group",
        ),
        pytest.param(
            ("--event", "push", "--platform", "dgx_h100"),
            ["slim dgx_h100", "two_nodes dgx_h100"],
            id="cadence pr",
        ),
        pytest.param(("--event", "schedule"), ["night dgx_h100"], id="nightly"),
        pytest.param(
            ("--event", "schedule", "--cadence", "weekly"), ["night dgx_h100"], id="weekly"
        ),
        pytest.param(
            ("--labels", "Run functional tests,container::lts"), ["two_nodes dgx_h100"], id="lts"
        ),
    ],
)
def test_rows_are_selected_by_scope_cadence_environment_and_platform(
    arguments: tuple[str, ...], expected: list[str]
) -> None:
    """The cadence filters, lts reaches the rows, L2 and L3 run."""
    assert names("--only", "workloads", *arguments) == expected


def test_the_json_has_the_decision_under_the_names_of_the_contract() -> None:
    found = plan("--only", "workloads", "--labels", "Run tests,bug", "--platform", "dgx_gb200")
    expected = {
        "event": "pull_request",
        "labels": ["Run tests", "bug"],
        "scope": "L1",
        "cadence": "",
        "n_repeat": 1,
        "lightweight": True,
        "environment": "dev",
        "platform": "dgx_gb200",
        "image": "dev",
        "suites": [],
        "reason": "rule 'label Run tests': label 'Run tests'",
        "unknown_labels": ["bug"],
        "matrix": {"unit": [], "integration": [{"model": "gpt", "test_case": "slim"}]},
    }
    assert {key: found[key] for key in expected} == expected
    (row,) = rows(found["workloads"])
    assert (row["id"], row["line"]) == ("recipes/gpt.yaml::slim[dev-dgx_gb200-L1]", 9)
    assert isinstance(row["spec"], dict)
    assert row["spec"]["script"] == "run"


def test_each_job_has_its_exact_command_nodes_and_a_time_that_holds_all_repeats() -> None:
    """Time limits, nodes and repeats of a recipe count, which Megatron-LM ignores."""
    found = jobs(
        "--only", "workloads", "--labels", "Run functional tests", "--platform", "dgx_h100"
    )
    two = found["recipes/gpt.yaml::two_nodes[dev-dgx_h100]"]
    assert two == {
        "id": two["id"],
        "kind": "workload",
        "name": "recipes/gpt.yaml::two_nodes[dev-dgx_h100]",
        "model": "gpt",
        "test_case": "two_nodes",
        "environment": "dev",
        "platform": "dgx_h100",
        "build": "image-dev",
        "nodes": 2,
        "gpus": 8,
        "ranks": 8,
        "n_repeat": 5,
        "lightweight": False,
        "time_limit_s": 600,
        "timeout_minutes": 60,
        "num_files": 0,
        "compared": False,  # a script judges itself
        "command": "pytest -p megatron 'recipes/gpt.yaml::two_nodes[dev-dgx_h100]' "
        "--megatron-platform dgx_h100 --megatron-n-repeat 5",
    }
    slim = found["recipes/gpt.yaml::slim[dev-dgx_h100-L1]"]
    assert (slim["n_repeat"], slim["timeout_minutes"]) == (1, 40)


def test_a_plan_says_which_rows_are_compared_with_nothing(project: Path) -> None:
    """In Megatron-LM most rows of the default tier are lightweight by their own config."""
    program = RECIPE.replace("script: run", "training_script_path: train.py")
    write(project / "recipes/gpt.yaml", program)
    config = project / "tests/functional_tests/test_cases/gpt"
    write(config / "slim/model_config.yaml", "ENV_VARS: {ENABLE_LIGHTWEIGHT_MODE: true}\n")
    write(config / "two_nodes/model_config.yaml", "TEST_TYPE: regular\n")
    given = ("--only", "workloads", "--event", "push", "--platform", "dgx_h100")
    assert [job["compared"] for job in jobs(*given).values()] == [False, True]
    lines = invoke(*given).stdout.splitlines()
    assert lines[2] == "1 of 2 workloads is compared with no golden, because of the case"
    assert [line.endswith(", not compared") for line in lines if "ranks" in line] == [True, False]


def test_jobs_on_two_platforms_have_ids_of_their_own() -> None:
    """In Megatron-LM local jobs overwrite each other across platforms."""
    found = plan("--labels", "Run functional tests", "--only", "workloads")
    ids = [str(job["id"]) for job in rows(found["jobs"])]
    assert len(ids) == len({i.casefold() for i in ids}) == 4
    assert all(i.replace("-", "").replace("_", "").isalnum() for i in ids)


def test_a_label_sets_variables_of_the_commands() -> None:
    found = jobs("--only", "workloads", "--labels", "Record checkpoints", "--platform", "dgx_h100")
    (job,) = found.values()
    assert str(job["command"]).startswith("RECORD_CHECKPOINTS=true pytest -p megatron ")


def test_a_label_selects_among_unit_tests_by_what_changed() -> None:
    def commands(*labels: str, event: str = "pull_request") -> list[str]:
        asked = ("--only", "units", "--event", event, "--labels", ",".join(labels))
        return [str(job["command"]) for job in jobs(*asked).values()]

    selective, every = "run selective unit tests", commands()
    assert commands(selective) == [f"{command} --testmon" for command in every]
    assert commands(selective, "Disable selective unit tests") == every
    assert commands(selective, event="merge_group") == every
    lines = invoke("--only", "units", "--labels", selective).stdout.splitlines()
    assert "label Run selective unit tests: unit tests with --testmon" in lines
    workloads = jobs("--only", "workloads", "--labels", selective).values()
    assert not any("--testmon" in str(job["command"]) for job in workloads)


def test_buckets_share_out_every_file_and_say_what_stays_out() -> None:
    found = plan("--only", "units", "--platform", "dgx_h100", "--explain")
    common = (
        "pytest -p megatron --megatron-gpus 8 --megatron-environment dev --megatron-tag latest "
        "--megatron-platform dgx_h100"
    )
    moe, ssm = "tests/unit_tests/moe/**/*.py", "tests/unit_tests/ssm/test_ssm.py"
    assert [str(job["command"]) for job in rows(found["jobs"])] == [
        f"{common} --megatron-bucket 'tests/unit_tests/**/*.py,!{moe},!{ssm}'",
        f"{common} --megatron-bucket '{moe}'",
        f"{common} -o megatron_experimental_tests=only --megatron-bucket '{moe}'",
    ]
    assert found["matrix"] == {
        "unit": [
            {"bucket": "tests/unit_tests/**/*.py"},
            {"bucket": "tests/unit_tests/moe/**/*.py"},
        ],
        "integration": [],
    }
    reasons = {str(row["id"]): row["reasons"] for row in rows(found["left_out"])}
    assert reasons["recipes/unit-tests.yaml::tests/unit_tests/ssm/test_ssm.py[dev-dgx_h100]"] == [
        "scope 'unit-tests-broken' disables the row"
    ]
    assert reasons["recipes/unit-tests.yaml::tests/unit_tests/**/*.py[lts-dgx_h100-legacy]"] == [
        "environment lts, asked dev",
        "tag legacy, asked latest",
    ]


def test_a_bucket_that_is_not_for_an_environment_does_not_fall_to_a_wider_one() -> None:
    (job,) = jobs("--only", "units", "--labels", "container::lts").values()
    assert "!tests/unit_tests/moe/**/*.py" in str(job["command"])
    assert " --megatron-environment lts " in str(job["command"])


def test_on_a_platform_that_is_opted_into_only_marked_files_count(project: Path) -> None:
    text = UNITS.partition("  - test_case: [tests/unit_tests/moe")[0].replace(
        "dgx_h100", "dgx_gb200"
    )
    write(project / "recipes/gb200/unit-tests.yaml", text)
    found = jobs("--only", "units", "--platform", "dgx_gb200")
    assert {name: job["num_files"] for name, job in found.items()} == {
        "tests/unit_tests/**/*.py": 1,
        "tests/unit_tests/**/*.py (experimental)": 1,
    }


def test_a_bucket_that_two_recipes_name_is_an_error(project: Path) -> None:
    write(project / "recipes/z.yaml", UNITS)
    result = invoke("--only", "units")
    assert "recipes/z.yaml:6: bucket 'tests/unit_tests/**/*.py' is also at recipes/unit-" in str(
        result.exception
    )


def shards(*arguments: str) -> dict[str, list[str]]:
    """Return the files of each shard, from its command."""
    return {
        name: shlex.split(str(job["command"]))[-1].split(",")
        for name, job in jobs("--only", "units", *arguments).items()
        if "experimental" not in name
    }


def history(durations_s: dict[str, float]) -> str:
    """Return a history with a line for each item; without `::` for the tests of a file."""
    entries: list[JsonValue] = [
        {
            "schema": 1,
            "time": "2026-01-01T00:00:00Z",
            "run": "r",
            "kind": "test" if "::" in node_id else "tests",
            "node_id": node_id,
            "verdict": "passed",
            "num_attempts": 1,
            "causes": [],
            "duration_s": duration_s,
            "commit": None,
            "is_dirty": False,
            "platform": "cpu-2",
        }
        for node_id, duration_s in durations_s.items()
    ]
    return "".join(f"{json.dumps(entry)}\n" for entry in entries)


def test_shards_run_on_the_gang_that_is_asked_for() -> None:
    found = jobs("--only", "units", "--shards", "1", "--ranks", "2", "--platform", "cpu")
    assert str(found["shard-1-of-1"]["command"]).startswith(
        "pytest -p megatron --megatron-ranks 2 --megatron-device cpu --megatron-environment dev "
        "--megatron-tag latest --megatron-platform cpu "
        "--megatron-bucket tests/unit_tests/moe/test_gb.py,"
    )


def test_shards_without_ranks_leave_them_to_pytests_settings(project: Path) -> None:
    write(project / "tox.ini", "[pytest]\nmegatron_ranks = 2\n")
    job = jobs("--only", "units", "--shards", "1")["shard-1-of-1"]
    assert (job["nodes"], job["gpus"], job["ranks"]) == (1, 0, 0)
    assert "ranks" not in str(job["command"])  # pytest reads them where the job runs


def test_durations_come_from_the_history_of_the_project(project: Path) -> None:
    own = project / ".pytest_megatron/history.jsonl"
    took = {
        "tests/unit_tests/test_a.py::test_a": 50.0,
        "tests/unit_tests/test_b.py::TestB::test_x": 60.0,
        "tests/unit_tests/moe/test_moe.py": 1.0,
    }
    write(own, history(took))
    # Of the two files without a duration each counts as 50 s, the median.
    found = shards("--shards", "3")
    assert {name: [Path(file).stem for file in files] for name, files in found.items()} == {
        "shard-1-of-3": ["test_b"],
        "shard-2-of-3": ["test_gb", "test_a"],
        "shard-3-of-3": ["test_moe", "test_ssm"],
    }


NIGHTLY = RECIPE.partition("products:")[0] + (
    "products: [{test_case: [night], products: [{environment: [dev], scope: [nightly]}]}]\n"
)


@pytest.mark.parametrize(
    "arguments",
    [("--shards", "2"), ("--shards", "2", "--platform", "dgx_h100"), ()],
    ids=["shards", "shards-of-a-platform", "buckets"],
)
def test_unit_jobs_are_planned_where_every_workload_is_of_another_scope(
    project: Path, arguments: tuple[str, ...]
) -> None:
    write(project / "recipes/gpt.yaml", NIGHTLY)
    kinds = {job["kind"] for job in rows(plan(*arguments)["jobs"])}
    assert kinds == {"unit"}


@pytest.mark.parametrize("arguments", [("--test-case", "night"), ("--only", "workloads")])
def test_workloads_that_were_asked_for_and_are_not_selected_are_an_error(
    project: Path, arguments: tuple[str, ...]
) -> None:
    write(project / "recipes/gpt.yaml", NIGHTLY)
    result = invoke("--shards", "2", *arguments)
    assert (result.exit_code, result.stdout) == (5, "")
    assert "matches none of 1 workload" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param(
            ("--platform", "dgx_a100"),
            "--scope L0 --cadence pr --environment dev --platform dgx_a100: matches none of 10 "
            "workloads; 2 workloads match without --platform dgx_a100: slim[dev-dgx_h100-L0], ",
            id="workloads",
        ),
        pytest.param(
            ("--only", "units", "--tag", "oldest"),
            "--environment dev --tag oldest: matches none of 6 rows of unit tests; ",
            id="units",
        ),
        pytest.param(("--recipes", "empty"), "the selection: there are no workloads", id="none"),
    ],
)
def test_an_empty_plan_is_an_error_that_names_what_is_nearest(
    project: Path, arguments: tuple[str, ...], error: str
) -> None:
    """In Megatron-LM a placeholder is planned, which nothing can run."""
    (project / "empty").mkdir()
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (5, "")
    assert error.partition(":")[2] in result.stderr
    allowed = invoke(*arguments, "--allow-empty", "--format", "json")
    assert allowed.exit_code == 0
    assert "placeholder" not in allowed.stdout
    if "units" in arguments:
        assert invoke(*arguments, "--allow-empty").stdout.endswith("\nno jobs\n")


def test_recipes_are_found_where_megatron_lm_has_them(project: Path) -> None:
    (project / "tests/test_utils").mkdir()
    (project / "recipes").rename(project / "tests/test_utils/recipes")
    recipe = project / "tests/test_utils/recipes/gpt.yaml"
    recipe.write_text(RECIPE.replace("platforms: [dgx_h100, dgx_gb200]", "platforms: [dg  x_h100]"))
    found = names("--labels", "Run tests")  # as Megatron-LM's own parser reads them
    assert found[:2] == ["slim dg  x_h100", "two_nodes dgx_h100"]
    write(project / "pyproject.toml", '[tool.pytest-megatron.ci]\nrecipe_profile = "strict"\n')
    assert "unknown word 'dg  x_h100'" in invoke("--labels", "Run tests").stderr


DRIVEN = """\
type: basic
format_version: 1
spec:
  {name: "{test_case}", model: gpt, gpus: 1, nodes: 1, platforms: dgx_h100, script: "SCRIPT"}
products:
  - test_case: [tp2]
    products: [{environment: [dev], scope: [mr-github], n_repeat: [5]}]
"""
CALL = (
    "cd /opt/megatron-lm\\nARGUMENTS=(DATA_PATH=- DATA_CACHE_PATH=- OUTPUT_PATH={assets_dir} "
    "TENSORBOARD_PATH={assets_dir} CHECKPOINT_SAVE_PATH={assets_dir} CHECKPOINT_LOAD_PATH=/x "
    "TRAINING_SCRIPT_PATH=train.py TRAINING_PARAMS_PATH=CASE/model_config.yaml "
    "GOLDEN_VALUES_PATH=CASE/golden_values_dev_dgx_h100.json N_REPEAT={n_repeat} MORE)\\n"
    "bash tests/functional_tests/shell_test_utils/run_ci_test.sh ${{ARGUMENTS[@]}}"
).replace("CASE", "tests/functional_tests/test_cases/{model}/{test_case}")


@pytest.mark.parametrize(
    ("more", "size"), [("", (8, 2)), ("GPUS_PER_NODE={gpus}", (1, 2)), ("WRONG=x", (1, 5))]
)
def test_rows_of_megatron_lms_driver_have_its_ranks_and_repeats(
    more: str, size: tuple[int, int], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUS_PER_NODE", raising=False)
    case = project / "tests/functional_tests/test_cases/gpt/tp2/model_config.yaml"
    write(case, "TEST_TYPE: regular\nENV_VARS: {N_REPEAT: 2}\n")
    write(project / "recipes/gpt.yaml", DRIVEN.replace("SCRIPT", CALL.replace("MORE", more)))
    found = plan("--labels", "Run functional tests")
    job, row = rows(found["jobs"])[0], rows(found["workloads"])[0]
    assert (job["gpus"], job["n_repeat"]) == (row["gpus"], row["n_repeat"]) == size


@pytest.mark.parametrize(
    ("scope", "why"),
    [
        ("mr", "rows have mr (1), the rules of CI L0, L1, L2, L3"),
        ("L3", "rows have L3 (1), the rules of CI L0, L1, L2, L3"),
        ("L1-broken", "and every row is disabled"),
    ],
)
def test_an_empty_plan_names_the_scopes_that_have_rows(project: Path, scope: str, why: str) -> None:
    row = f"{{environment: [dev], scope: [{scope}], cadence: [pr, weekly]}}"
    products = f"products: [{{test_case: [a], products: [{row}]}}]\n"
    write(project / "recipes/gpt.yaml", RECIPE.partition("products:")[0] + products)
    (project / "recipes/unit-tests.yaml").unlink()
    result = invoke("--explain")
    assert (result.exit_code, result.stdout) == (5, "")
    assert "rule 'otherwise' asks for scope L0" in result.stderr
    assert why in result.stderr
    assert "left out: 1 row\n" in result.stderr
    assert "\n  -> otherwise: no other rule matched\n" in result.stderr


def test_every_error_of_the_recipes_is_told(project: Path) -> None:
    write(
        project / "recipes/gpt.yaml", RECIPE.replace("nightly", "nightlyy").replace("lts", "ltss")
    )
    result = invoke()
    assert result.exit_code == 2
    assert [line.partition(": ")[2][:24] for line in result.stderr.splitlines()] == [
        "recipes/gpt.yaml:12: env",
        "recipes/gpt.yaml:14: sco",
    ]


EXPLAINED = """\
scope L1, cadence pr, 5 repeats, full, environment dev, platform dgx_h100, image dev
because of rule 'CI workload': event push, ref refs/heads/main

rules, the first that holds decides:
     merge group: needs event 'merge_group', it is push
     label Run tests: needs label 'Run tests', it is not attached
     label Run functional tests: needs label 'Run functional tests', it is not attached
     label Run weekly: needs label 'Run weekly', it is not attached
     label Run nightly: needs label 'Run nightly', it is not attached
     weekly: needs event 'schedule' or 'workflow_dispatch', it is push
     nightly: needs event 'schedule', it is push
     dispatch: needs event 'workflow_dispatch', it is push
  -> CI workload: event push, ref refs/heads/main
     otherwise: not looked at, 'CI workload' comes first

2 workloads
  G::slim[dev-dgx_h100-L1]  1x8 ranks, at most 40 min
    pytest -p megatron 'G::slim[dev-dgx_h100-L1]' --megatron-platform dgx_h100 --megatron-n-repeat 1
  G::two_nodes[dev-dgx_h100]  2x8 ranks, at most 60 min
    pytest -p megatron 'G::two_nodes[dev-dgx_h100]' --megatron-platform dgx_h100 \
--megatron-n-repeat 5

left out: 8 rows
  1: cadence mergegroup, asked pr: G::merge[dev-dgx_h100]
  1: environment lts, asked dev: G::two_nodes[lts-dgx_h100]
  1: platform dgx_gb200, asked dgx_h100: G::slim[dev-dgx_gb200-L1]
  1: scope 'mr-github-broken' disables the row: G::switched_off[dev-dgx_h100]
  1: scope L0, asked L1: G::slim[dev-dgx_h100-L0]
  1: scope L0, asked L1; platform dgx_gb200, asked dgx_h100: G::slim[dev-dgx_gb200-L0]
  1: scope L2, asked L1; cadence nightly, asked pr: G::night[dev-dgx_h100-L2]
  1: scope L3, asked L1; cadence weekly, asked pr: G::night[dev-dgx_h100-L3]
"""


def test_explain_says_why_each_rule_and_row_is_in_or_out(project: Path) -> None:
    program = RECIPE.replace("script: run", "training_script_path: train.py")
    write(project / "recipes/gpt.yaml", program)
    push = ("--event", "push", "--ref", "refs/heads/main")
    result = invoke("--only", "workloads", *push, "--explain", "--platform", "dgx_h100")
    assert result.stdout.replace("recipes/gpt.yaml", "G") == EXPLAINED


@pytest.mark.parametrize(
    ("head", "is_refused"),
    [
        pytest.param({"repo": {"full_name": "me/it"}}, False, id="own"),
        pytest.param({"repo": {"full_name": "stranger/it"}}, True, id="fork"),
        pytest.param({"repo": None}, True, id="fork that is gone"),
    ],
)
def test_a_pull_request_of_a_fork_runs_on_hosted_runners_alone(
    project: Path, monkeypatch: pytest.MonkeyPatch, head: JsonValue, *, is_refused: bool
) -> None:
    write(project / "event.json", json.dumps({"pull_request": {"head": head}}))
    monkeypatch.setenv("GITHUB_EVENT_PATH", "event.json")
    monkeypatch.setenv("GITHUB_REPOSITORY", "me/it")
    problem = (
        "the plan: a pull request of a fork runs on no runner of your own, such as that of dgx"
    )
    assert str(invoke().exception).startswith(problem) is is_refused
    assert invoke("--only", "units", "--shards", "1", "--ranks", "2").exit_code == 0


def test_github_outputs_cannot_be_set_by_what_a_stranger_writes(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_OUTPUT", str(project / "outputs"))
    (project / "outputs").write_text("before=1\n")
    label = "x\nscope=L3\nend-"
    labels = json.dumps(["Run tests", label])
    result = invoke("--labels", labels, "--format", "github", "--platform", "dgx_h100")
    assert result.exit_code == 0
    outputs = read_outputs((project / "outputs").read_text())
    assert (outputs["before"], outputs["scope"], outputs["lightweight"]) == ("1", "L1", "true")
    assert json.loads(outputs["unit-tests"])[1] == {"bucket": "tests/unit_tests/moe/**/*.py"}
    assert [job["test_case"] for job in json.loads(outputs["workload_jobs"])] == [
        *("slim", "two_nodes", "merge"),
    ]
    assert json.loads(outputs["integration-tests"])[0] == {"model": "gpt", "test_case": "slim"}


def read_outputs(text: str) -> dict[str, str]:
    """Read them as GitHub does: `name=value`, or `name<<WORD`, lines, `WORD`."""
    found: dict[str, str] = {}
    lines = iter(text.splitlines())
    for line in lines:
        name, is_long, word = line.partition("<<")
        if not is_long:
            found[line.partition("=")[0]] = line.partition("=")[2]
            continue
        value = []
        while (part := next(lines)) != word:
            value.append(part)
        found[name] = "\n".join(value)
    return found


def test_a_matrix_that_github_would_refuse_is_an_error(project: Path) -> None:
    for number in range(257):
        write(project / f"tests/unit_tests/many/test_{number}.py", "")
    result = invoke("--only", "units", "--shards", "300", "--format", "github")
    assert str(result.exception).startswith("--format github: 263 unit jobs, a matrix of GitHub ")


def test_changed_paths_suggest_a_label_that_may_be_applied(project: Path) -> None:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    for words in (
        ["init", "-q", "-b", "main"],
        [*identity, "commit", "-q", "--allow-empty", "-mx"],
    ):
        subprocess.run(["git", *words], cwd=project, check=True)  # noqa: S607 - the user's git
    write(project / ".gitignore", "*\n!pretrain_gpt.py\n")
    write(project / "pretrain_gpt.py", "")
    given = ("--diff", "main", "--only", "workloads", "--format", "json")
    told = json.loads(invoke(*given).stdout)
    applied = json.loads(invoke(*given, "--apply-suggestion").stdout)
    assert (told["scope"], told["suggestion"]["label"]) == ("L0", "Run functional tests")
    assert (applied["scope"], applied["rule"]) == ("L1", "label Run functional tests")
    line = "label for these changes: 'Run functional tests', numerics changed: pretrain_gpt.py"
    assert line in invoke("--diff", "main").stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--gpus", "1", "--ranks", "1"), "--gpus: --ranks is given as well; give one of them"),
        (("--event", "pushed"), "--event: unknown event 'pushed', expected one of merge_group,"),
        (("--platform", "dgx_h10"), "--platform: unknown platform 'dgx_h10', expected one of cpu"),
        (("--recipes", "gone"), "gone: no such file or directory, expected recipes"),
        (("--labels", "["), "--labels: '[' is no list of labels, expected words with commas"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: tuple[str, ...], error: str) -> None:
    assert str(invoke(*arguments).exception).startswith(error)
