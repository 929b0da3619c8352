"""What `ci init` and `ci child` write: sound for linters, and never over a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import yaml
from ci_artifacts import ROW
from click.testing import CliRunner, Result
from expressions import evaluate, fill

from pytest_megatron.base.files import JsonValue
from pytest_megatron.ci.command import command
from pytest_megatron.ci.workflow import GITHUB_FILE, GITLAB_FILE
from pytest_megatron.errors import CiError, ConfigError

TABLE = """\
[tool.pytest-megatron.ci.workflow]
branches = ["main", "release/*"]
setup = ["python3 dev.py setup", "echo 'it''s up'"]
plan_setup = ["pip install ."]
plan = ["--platform", "cpu,dgx_h100"]
runners = {dgx_h100 = ["self-hosted", "h100"]}
images = {dev = "registry.example.com/dev:1", lts = "registry.example.com/lts:1"}
retention_days = 7
"""
PLAIN = """\
[tool.pytest-megatron.ci.workflow]
setup = ["python -m pip install ."]
"""
FULL = (
    TABLE
    + """\
executor = "slurm"
executor_config = "ci/slurm.yaml"
pytest_arguments = ["--rank-timeout", "600"]
secrets = ["HF_TOKEN", "WANDB_API_KEY"]
registry_secrets = ["NGC_USER", "NGC_PASSWORD"]
cache = ["~/.cache/uv"]
comments = true
keeps_history = true
"""
)
JOBS: list[JsonValue] = [
    {
        "id": f"tiny-line-dev-{platform}",
        "kind": "workload",
        "name": ROW,
        "test_case": "line",
        "platform": platform,
        "timeout_minutes": 40,
        "command": f"pytest -p megatron '{ROW}'",
    }
    for platform in ("cpu", "dgx_h100")
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project(PLAIN)


def ci(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def project(table: str) -> None:
    Path("pyproject.toml").write_text(table)


def github() -> dict[str, JsonValue]:
    """Return the workflow as it was written."""
    return cast("dict[str, JsonValue]", yaml.safe_load(GITHUB_FILE.read_text()))


def lint(*command_line: str) -> tuple[int, str]:
    """Run a linter of this environment."""
    scripts = Path(sys.executable).parent
    done = subprocess.run(
        [scripts / command_line[0], *command_line[1:]], check=False, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(FULL, id="full"),
    ],
)
def test_files_are_sound_for_linters(table: str) -> None:
    project(table)
    Path("plan.json").write_text(json.dumps({"image": "dev", "jobs": JOBS}))
    written = (ci("init"), ci("init", "--gitlab"))
    assert [result.exit_code for result in written] == [0, 0]
    Path("child.yml").write_text(ci("child", "plan.json").output)
    schema = ("check-jsonschema", "--builtin-schema")
    assert lint(*schema, "vendor.github-workflows", str(GITHUB_FILE))[0] == 0
    assert lint(*schema, "custom.github-workflows-require-timeout", str(GITHUB_FILE))[0] == 0
    code, output = lint(*schema, "vendor.gitlab-ci", str(GITLAB_FILE), "child.yml")
    assert code == 0, output
    audit = ("zizmor", "--offline", "--min-severity", "medium", "--min-confidence", "medium")
    code, output = lint(*audit, str(GITHUB_FILE))
    assert code == 0, output


def test_permissions_are_least() -> None:
    ci("init")
    workflow = github()
    jobs = cast("dict[str, dict[str, JsonValue]]", workflow["jobs"])
    permissions = {str(job["permissions"]) for job in jobs.values()}
    assert (workflow["permissions"], permissions) == ({}, {"{'contents': 'read'}"})


def test_nightly_and_weekly_really_run() -> None:
    """Megatron-LM has a schedule that nobody starts, and tiers that nothing reaches."""
    ci("init")
    workflow = github()
    crons = re.findall(r"- cron: '(.*)'", GITHUB_FILE.read_text())
    jobs = cast("dict[str, dict[str, list[dict[str, dict[str, str]]]]]", workflow["jobs"])
    step = next(step for step in jobs["plan"]["steps"] if "env" in step)
    found = {}
    for cron in crons:
        event: JsonValue = {"event_name": "schedule", "event": {"schedule": cron}}
        found[cron] = fill(step["env"]["CADENCE"], {"github": event, "inputs": {}})
    assert list(found.values()) == ["nightly", "weekly"]


@pytest.mark.parametrize(
    ("platform", "labels"),
    [
        pytest.param("cpu", ["ubuntu-24.04"], id="built-in"),
        pytest.param("", ["ubuntu-24.04"], id="shards"),
        pytest.param("dgx_h100", ["self-hosted", "h100"], id="own"),
        pytest.param("dgx_gb200", ["self-hosted", "dgx_gb200"], id="not-filled-in"),
    ],
)
def test_runners_by_platform(platform: str, labels: list[str]) -> None:
    project(TABLE)
    ci("init")
    jobs = cast("dict[str, dict[str, str]]", github()["jobs"])
    event: JsonValue = {"event_name": "push", "repository": "me/it", "event": {}}
    context: dict[str, JsonValue] = {"github": event, "matrix": {"platform": platform}}
    assert evaluate(jobs["integration"]["runs-on"], context) == labels


def test_an_image_that_is_not_filled_in_is_refused() -> None:
    """With the label of another environment, its image runs or nothing does."""
    project(TABLE)
    ci("init")
    jobs = cast("dict[str, dict[str, list[dict[str, str]]]]", github()["jobs"])
    script = next(s["run"] for s in jobs["plan"]["steps"] if s.get("name") == "Check the image")
    ended = [
        subprocess.run(
            ["/bin/bash", "-c", script], env={"IMAGE": image}, check=False, capture_output=True
        )
        for image in ("lts", "other")
    ]
    assert [done.returncode for done in ended] == [0, 1]
    assert b"the plan wants the image 'other'" in ended[1].stdout


def test_a_pull_request_of_a_fork_runs_nothing_on_own_runners() -> None:
    ci("init")
    jobs = cast("dict[str, dict[str, str]]", github()["jobs"])
    found = []
    for name in ("me/it", "stranger/it"):
        head: JsonValue = {"pull_request": {"head": {"repo": {"full_name": name}}}}
        event: JsonValue = {"event_name": "pull_request", "repository": "me/it", "event": head}
        for platform in ("cpu", "dgx_h100"):
            context: dict[str, JsonValue] = {"github": event, "matrix": {"platform": platform}}
            found.append(evaluate(jobs["unit"]["runs-on"], context))
    hosted, own = ["ubuntu-24.04"], ["self-hosted", "dgx_h100"]
    assert found == [hosted, own, hosted, "ubuntu-24.04"]


OWN_RULES = """\
[[tool.pytest-megatron.ci.rules]]
name = "mine"
when = {label = ["ship it"]}
scope = ["L3"]
n_repeat = 1
lightweight = false
[[tool.pytest-megatron.ci.rules]]
name = "else"
scope = ["L0"]
n_repeat = 1
lightweight = false
"""


@pytest.mark.parametrize(
    ("rules", "label"),
    [
        pytest.param("", "Run MBridge tests", id="built in"),
        pytest.param(OWN_RULES, "ship it", id="rules of its own"),
    ],
)
def test_a_workflow_has_the_labels_of_the_table(rules: str, label: str) -> None:
    project(PLAIN + rules)
    ci("init")
    labels = json.loads(re.findall(r"fromJSON\('(\[.*?\])'\)", GITHUB_FILE.read_text())[0])
    assert label in labels


@pytest.mark.parametrize(
    ("left", "kept", "is_saved"),
    [
        pytest.param(None, "1\n2\n", False, id="no-job-started"),
        pytest.param("", "1\n2\n", False, id="empty"),
        pytest.param("2\n3\n", "1\n2\n3\n", True, id="merged"),
        pytest.param("0", "0\n1\n2\n", True, id="cut-off"),
    ],
)
def test_the_history_of_earlier_runs_is_kept(
    left: str | None, kept: str, *, is_saved: bool
) -> None:
    project(FULL)
    ci("init")
    jobs = cast("dict[str, dict[str, list[dict[str, str]]]]", github()["jobs"])
    steps = {step.get("name", ""): step for step in jobs["verdict"]["steps"]}
    names = ["Restore the history", "Merge the history", "Save the history"]
    assert [name for name in steps if name in names] == names
    history = Path(".pytest_megatron/history.jsonl")
    history.parent.mkdir()
    history.write_text("1\n2\n")  # restored
    artifact = Path("artifacts/logs-unit")
    artifact.mkdir(parents=True)
    if left is not None:
        (artifact / "history.jsonl").write_text(left)
    outputs = Path("outputs")
    outputs.write_text("")
    subprocess.run(
        ["/bin/bash", "-e", "-o", "pipefail", "-c", steps["Merge the history"]["run"]],
        env={"PATH": os.environ["PATH"], "GITHUB_OUTPUT": str(outputs)},
        check=True,
    )
    found = dict(line.split("=") for line in outputs.read_text().splitlines())
    context: dict[str, JsonValue] = {"steps": {"history": {"outputs": cast("JsonValue", found)}}}
    assert history.read_text() == kept
    assert evaluate(steps["Save the history"]["if"], context) is is_saved


def test_a_file_that_is_there_is_not_replaced() -> None:
    assert ci("init").exit_code == 0
    GITHUB_FILE.write_text("mine")
    result = ci("init")
    assert (str(result.exception), GITHUB_FILE.read_text()) == (
        ".github/workflows/megatron.yml: is there already; --force replaces it",
        "mine",
    )
    assert ci("init", "--force").exit_code == 0
    assert GITHUB_FILE.read_text() != "mine"


def test_a_table_that_is_wrong_writes_nothing() -> None:
    project("[tool.pytest-megatron.ci.workflow]\nrunner = {cpu = ['x']}\n")
    result = ci("init")
    assert isinstance(result.exception, ConfigError)
    assert "workflow.runner: unknown key, expected one of" in str(result.exception)
    assert "did you mean 'runners'?" in str(result.exception)
    assert not Path(".github").exists()


def test_the_child_pipeline_has_every_job_and_the_verdict() -> None:
    """One test case on two platforms is two jobs."""
    project(TABLE)
    Path("plan.json").write_text(json.dumps({"image": "dev", "jobs": JOBS}))
    found = yaml.safe_load(ci("child", "plan.json").output)
    jobs = ["test tiny-line-dev-cpu", "test tiny-line-dev-dgx_h100"]
    assert list(found) == ["stages", "plan", *jobs, "verdict"]
    assert [found[name].get("tags") for name in jobs] == [None, ["self-hosted", "h100"]]
    job = found["test tiny-line-dev-cpu"]
    assert (job["timeout"], job["image"]) == ("40 minutes", "registry.example.com/dev:1")
    assert found["verdict"]["when"] == "always"
    assert job["artifacts"]["reports"] == {"junit": "megatron-jobs/$CI_JOB_ID/junit.xml"}


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        pytest.param({"jobs": []}, "plan.json: has no jobs, expected what", id="empty"),
        pytest.param(
            {"jobs": [{"id": "a", "command": "b"}] * 2},
            "plan.json: has two jobs with the id 'a'",
            id="twice",
        ),
        pytest.param({"jobs": [{}]}, "plan.json: jobs[0].id: is missing; expected what", id="row"),
    ],
)
def test_a_plan_without_jobs_is_no_pipeline(plan: JsonValue, problem: str) -> None:
    """No placeholder stands for an empty selection, as one does in Megatron-LM."""
    Path("plan.json").write_text(json.dumps(plan))
    result = ci("child", "plan.json")
    assert isinstance(result.exception, CiError)
    assert str(result.exception).startswith(problem)


def test_a_job_names_its_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tries of one test case never share a name, as they do in Megatron-LM."""
    monkeypatch.setenv("GITHUB_RUN_ID", "4711")
    monkeypatch.setenv("GITHUB_RUN_ATTEMPT", "2")
    monkeypatch.setenv("GITHUB_OUTPUT", "outputs")
    name = "tests/unit_tests/**/*.py"
    names = [ci("job", "a", "--test-case", name, "--directory", d).output for d in ("one", "two")]
    pattern = r"logs-tests-unit_tests-----.py-4711-[0-9a-f-]{36}\n"
    assert all(re.fullmatch(pattern, found) for found in names)
    assert names[0] != names[1]
    record = json.loads(Path("one/job.json").read_text())
    assert (record["job"], record["run_attempt"]) == ("a", 2)
    assert f"\n{names[0]}" in Path("outputs").read_text()
    assert isinstance(ci("job", "a", "--directory", "one").exception, CiError)


def test_what_a_killed_job_left_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = "correct-horse-battery"
    monkeypatch.setenv("REGISTRY_PASSWORD", planted)
    monkeypatch.setenv("HOUSE_NUMBER", "12 Elm Street")
    Path("pyproject.toml").write_text('[tool.pytest-megatron]\nsecret-names = ["HOUSE_*"]\n')
    logs = Path("job", "run", "ranks", "attempt_1", "0")
    logs.mkdir(parents=True)
    (logs / "stdout.log").write_text(f"pushing as {planted} from 12 Elm Street\n")
    Path("job", "pytest.log").write_text(f"E  environ({{'REGISTRY_PASSWORD': '{planted}'}})\n")
    assert (ci("redact", "job").exit_code, ci("redact", "job").output) == (0, "")
    assert (logs / "stdout.log").read_text() == "pushing as *** from ***\n"
    assert Path("job", "pytest.log").read_text() == "E  environ({'REGISTRY_PASSWORD': '***'})\n"
    assert isinstance(ci("redact", "nowhere").exception, CiError)


def test_without_a_line_that_installs_the_project_nothing_is_written() -> None:
    Path("pyproject.toml").write_text("")
    result = ci("init")
    assert isinstance(result.exception, ConfigError)
    assert "ci.workflow] setup: is missing, expected the shell lines" in str(result.exception)
    assert not GITHUB_FILE.exists()


@pytest.mark.parametrize(
    ("action", "label", "is_ignored"),
    [
        ("labeled", "documentation", True),
        ("unlabeled", "documentation", True),
        ("labeled", "Run tests", False),
        ("unlabeled", "container::lts", False),
        ("synchronize", "", False),
    ],
)
def test_a_label_that_the_plan_does_not_read_starts_and_cancels_nothing(
    action: str, label: str, *, is_ignored: bool
) -> None:
    ci("init")
    workflow = github()
    event: JsonValue = {"action": action, "label": {"name": label}, "pull_request": {"number": 7}}
    context: dict[str, JsonValue] = {
        "github": {"event_name": "pull_request", "event": event, "run_id": "99", "ref": "r"}
    }
    concurrency = cast("dict[str, str]", workflow["concurrency"])
    group = fill(concurrency["group"], context)
    assert group == ("megatron-pull_request-7-99" if is_ignored else "megatron-pull_request-7")
    jobs = cast("dict[str, dict[str, str]]", workflow["jobs"])
    assert bool(evaluate(jobs["plan"]["if"], context)) is not is_ignored
    is_required = fill(jobs["verdict"]["name"], context) == "megatron verdict"
    assert is_required is not is_ignored  # a skipped check would count as passed


def test_secrets_reach_the_tests_and_what_takes_them_out() -> None:
    project(FULL)
    ci("init")
    jobs = cast("dict[str, dict[str, list[dict[str, dict[str, str]]]]]", github()["jobs"])
    for job in ("unit", "integration"):
        steps = {str(step.get("name")): step for step in jobs[job]["steps"]}
        for name in ("Test", "Take secrets out"):
            assert steps[name]["env"]["HF_TOKEN"].removeprefix("${{ secrets.") == "HF_TOKEN }}"
        words = "--megatron-executor slurm --megatron-executor-config ci/slurm.yaml"
        assert (words in str(steps["Test"]["run"])) is (job == "integration")
        assert "--rank-timeout 600 " in str(steps["Test"]["run"])
    container = cast("dict[str, dict[str, dict[str, str]]]", jobs["integration"])["container"]
    assert list(container["credentials"].values()) == [
        "${{ secrets.NGC_USER }}",
        "${{ secrets.NGC_PASSWORD }}",
    ]


@pytest.mark.parametrize(
    ("branch", "is_tested"),
    [("main", True), ("release/1.2", True), ("release/1.2/fix", False), ("feature", False)],
)
def test_gitlab_tests_pushes_to_the_named_branches_only(branch: str, *, is_tested: bool) -> None:
    project(TABLE)
    ci("init", "--gitlab")
    jobs = yaml.safe_load(GITLAB_FILE.read_text())
    rules = [rule["if"] for rule in jobs["megatron:plan"]["rules"]]
    assert jobs["megatron:jobs"]["rules"] == jobs["megatron:plan"]["rules"]
    (pattern,) = re.findall(r'"push" && \$CI_COMMIT_BRANCH =~ /(.*)/$', rules[0])
    assert (re.search(pattern, branch) is not None) is is_tested
    assert "merge_request_event" in rules[1]


def test_a_gitlab_job_whose_secrets_cannot_be_taken_out_uploads_nothing() -> None:
    project(TABLE)
    Path("plan.json").write_text(json.dumps({"image": "dev", "event": "push", "jobs": JOBS}))
    job = yaml.safe_load(ci("child", "plan.json").output)["test tiny-line-dev-cpu"]
    redact, move = job["after_script"]
    assert "ci redact" in redact
    assert move.endswith(f'"{job["artifacts"]["paths"][0]}"')
    assert not any(job["artifacts"]["paths"][0] in line for line in job["script"])
    assert job["retry"]["when"] == ["runner_system_failure", "scheduler_failure"]
    assert job["interruptible"] is False


def test_only_the_verdict_may_comment_and_only_where_the_project_wants_it() -> None:
    project(PLAIN + "comments = true\n")
    Path("plan.json").write_text(json.dumps({"image": "dev", "jobs": JOBS}))
    ci("init")
    jobs = cast("dict[str, dict[str, JsonValue]]", github()["jobs"])
    may_write = {"contents": "read", "pull-requests": "write"}
    assert [name for name, job in jobs.items() if job["permissions"] == may_write] == ["verdict"]
    assert 'gh pr comment "$NUMBER"' in str(jobs["verdict"]["steps"])
    project(PLAIN)
    ci("init", "--force")
    assert "gh pr comment" not in GITHUB_FILE.read_text()


@pytest.mark.parametrize(
    ("number_of_comments", "expected"),
    [(1, ["pr comment 7 --edit-last --body-file summary/comment.md"]),
     (0, ["pr comment 7 --edit-last --body-file summary/comment.md",
          "pr comment 7 --body-file summary/comment.md"])],
)  # fmt: skip
def test_a_comment_is_written_once_and_then_edited(
    number_of_comments: int, expected: list[str]
) -> None:
    project(PLAIN + "comments = true\n")
    ci("init")
    jobs = cast("dict[str, dict[str, list[dict[str, str]]]]", github()["jobs"])
    steps = {step.get("name", ""): step for step in jobs["verdict"]["steps"]}
    script = steps["Comment on the pull request"]["run"]
    played = f'gh() {{ echo "$*"; [ {number_of_comments} = 1 ] || [ $4 != --edit-last ]; }}\n'
    done = subprocess.run(
        ["/bin/bash", "-eo", "pipefail", "-c", played + script],
        env={"NUMBER": "7"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == expected


def test_what_tests_print_is_no_command_of_the_workflow() -> None:
    ci("init")
    jobs = cast("dict[str, dict[str, list[dict[str, str]]]]", github()["jobs"])
    (script,) = [step["run"] for step in jobs["unit"]["steps"] if step.get("name") == "Test"]
    Path("megatron-job").mkdir()
    done = subprocess.run(
        ["/bin/bash", "-eo", "pipefail", "-c", script],
        env={"PATH": os.environ["PATH"], "COMMAND": "printf '::add-mask::x\\n'; exit 3;"},
        check=False,
        capture_output=True,
        text=True,
    )
    stop, printed, end = done.stdout.splitlines()
    token = stop.removeprefix("::stop-commands::")
    assert (done.returncode, printed, end) == (3, "::add-mask::x", f"::{token}::")
    assert len(token) == 36
    assert Path("megatron-job/pytest.log").read_text() == "::add-mask::x\n"
