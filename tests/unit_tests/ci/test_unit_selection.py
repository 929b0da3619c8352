"""Python tests chosen by bucket, environment, tag and platform, as a bucket's command does."""

from __future__ import annotations

import pytest

import pytest_megatron.ci.table  # noqa: F401 - pydantic's types do not outlive a re-import

CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--experimental", action="store_true")

def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
"""
MARKED = """
import pytest

def test_plain(): pass

@pytest.mark.internal
def test_internal(): pass

@pytest.mark.flaky
def test_flaky(): pass

@pytest.mark.flaky(reruns=2)
def test_to_be_rerun(): pass

@pytest.mark.flaky_in_dev
def test_flaky_in_dev(): pass

@pytest.mark.launch_on_gb200
def test_gb200(): pass

@pytest.mark.experimental
def test_experimental(request):
    assert request.config.getoption("--experimental")
"""
ALL = {"plain", "internal", "flaky", "to_be_rerun", "flaky_in_dev", "gb200", "experimental"}
BUCKET = ("--bucket", "tests/moe/**/*.py")


@pytest.fixture(autouse=True)
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """Make Megatron-LM's layout, small: a conftest that makes zero tests a success, and marks."""
    for name, text in {
        "tests/conftest.py": CONFTEST,
        "tests/moe/test_moe.py": MARKED,
        "tests/moe/deep/test_deep.py": "def test_deep(): pass",
        "tests/test_broken.py": "raise RuntimeError('not of this bucket')",
    }.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return pytester


def ran(result: pytest.RunResult) -> set[str]:
    words = (line.partition(" PASSED")[0] for line in result.outlines if " PASSED" in line)
    return {word.rpartition("::test_")[2] for word in words}


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    options = ("-p", "megatron", "-p", "no:cacheprovider", "-p", "no:rerunfailures", "-v")
    return pytester.runpytest_inprocess(*options, *arguments)


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        pytest.param(("--environment", "dev"), {"flaky_in_dev", "experimental"}, id="dev"),
        pytest.param(("--environment", "lts"), {"flaky", "experimental"}, id="lts"),
        pytest.param(
            ("--environment", "dev", "--tag", "legacy"),
            {"flaky_in_dev", "internal", "experimental"},
            id="legacy",
        ),
        pytest.param(("--tag", "latest", "--platform", "dgx_h100"), {"experimental"}, id="h100"),
        pytest.param(("--platform", "dgx_gb200"), ALL - {"gb200"}, id="gb200"),
        pytest.param(
            ("-o", "megatron_experimental_tests=only"), ALL - {"experimental"}, id="experimental"
        ),
        pytest.param(("--labels", "container::lts"), {"flaky", "experimental"}, id="lts label"),
    ],
)
def test_marks_mean_what_they_do_in_megatrons_driver(
    project: pytest.Pytester, options: tuple[str, ...], left_out: set[str]
) -> None:
    result = run(project, *BUCKET, *options, "--strict-markers")
    assert result.ret == pytest.ExitCode.OK
    assert ran(result) - {"deep"} == ALL - left_out
    result.assert_outcomes(passed=len(ran(result)), deselected=len(left_out) + _deep_is_out(result))


def _deep_is_out(result: pytest.RunResult) -> bool:
    """Whether the test without marks was deselected; on gb200 its file is not even imported."""
    return "deep" not in ran(result) and "file without" not in result.stdout.str()


def test_a_bucket_is_its_files_alone_and_the_summary_says_what_else_there_was(
    project: pytest.Pytester,
) -> None:
    result = run(
        project,
        "--environment",
        "dev",
        "--bucket",
        "tests/**/*.py,!tests/moe/deep/**/*.py,!tests/test_broken.py",
    )
    assert (result.ret, ran(result)) == (0, ALL - {"flaky_in_dev", "experimental"})
    result.stdout.fnmatch_lines(
        ["megatron: left out 1 experimental, 1 flaky_in_dev, 2 files of other buckets"]
    )


def test_files_may_be_a_bucket_and_a_typed_path_narrows_it(project: pytest.Pytester) -> None:
    files = "tests/moe/deep/test_deep.py,tests/moe/test_moe.py"
    one = run(project, "--bucket", files, "tests/moe/deep")
    two = run(project, "--bucket", files, "-k", "deep or plain")
    assert (ran(one), ran(two)) == ({"deep"}, {"deep", "plain"})


def test_zero_tests_are_no_success_even_where_a_conftest_says_so(
    project: pytest.Pytester,
) -> None:
    """In Megatron-LM a wrong mark or ignore list gives a green bucket."""
    nothing = ("--bucket", "tests/moe/deep/**/*.py", "-o", "megatron_experimental_tests=only")
    assert run(project, *nothing).ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run(project, *nothing, "--allow-empty").ret == pytest.ExitCode.OK


def test_a_bucket_is_a_success_whose_tests_pytest_testmon_leaves_out(
    project: pytest.Pytester,
) -> None:
    def select(bucket: str) -> pytest.RunResult:
        options = ("-p", "megatron", "-v", "--testmon", "--bucket", bucket)
        return project.runpytest_subprocess(*options)

    bucket = "tests/moe/deep/**/*.py"
    first, second, other = select(bucket), select(bucket), select("tests/moe/**/gone_*.py")
    assert [ran(one) for one in (first, second, other)] == [{"deep"}, set(), set()]
    assert [one.ret for one in (first, second, other)] == [0, 0, 5]


def test_without_any_of_the_options_no_mark_means_anything(project: pytest.Pytester) -> None:
    project.makeini("[pytest]\nmegatron_environment = dev\nmegatron_platform = dgx_gb200\n")
    result = run(project, "tests/moe", "--experimental", "-W", "ignore")
    assert (result.ret, ran(result)) == (0, ALL | {"deep"})
    assert "megatron:" not in result.stdout.str()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ("--environment", "de", *BUCKET),
            "--environment: unknown environment 'de', expected one of dev, lts; did you mean*",
        ),
        (
            ("--tag", "lastest", *BUCKET),
            "--tag: unknown tag 'lastest', expected one of latest, legacy; did you mean 'latest'?",
        ),
        (
            ("--platform", "dgx_gb2100", *BUCKET),
            "--platform: unknown platform 'dgx_gb2100', expected one of cpu, dgx_a100, dgx_gb200,*",
        ),
        (("--bucket", "tests/gone/**/*.py"), "file or directory not found: tests/gone"),
        (("--ci-event", "merge", *BUCKET), "--ci-event: unknown event 'merge', expected one of*"),
        (("--labels", "[1]", *BUCKET), "--labels: '?1?' is no list of labels, expected words*"),
    ],
)
def test_a_word_that_nothing_knows_is_a_usage_error(
    project: pytest.Pytester, options: tuple[str, ...], error: str
) -> None:
    result = run(project, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {error}"])


def test_a_project_may_have_marks_of_its_own(project: pytest.Pytester) -> None:
    project.makepyprojecttoml(
        "[tool.pytest.ini_options]\n"
        "[[tool.pytest-megatron.ci.marks]]\nmark = 'internal'\nplatform = ['cpu']\n"
    )
    result = run(project, *BUCKET, "--platform", "cpu", "--environment", "dev")
    assert ran(result) - {"deep"} == ALL - {"internal", "experimental"}
