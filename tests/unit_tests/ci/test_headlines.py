"""Kinds of failure in two real sessions, and the headline of each in every place that shows it."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from ci_artifacts import commands
from click.testing import CliRunner
from gang_suite import RecordedSuite
from tiny_project import Project

from pytest_megatron.ci.command import command

LIMIT_S = 15  # must cover the start of the ranks on a busy machine
GITHUB = {"CI": "true", "GITHUB_ACTIONS": "true"}
LAUNCH = (
    "python -m torch.distributed.run --standalone --max-restarts 0 --nproc-per-node 1 "
    "--log-dir {assets_dir}/logs --redirects 3 train.py --train-iters 10 --fault"
)
SCRIPTS = {
    "script": "set -x\necho 'no such data: /data/x' >&2\nexit 3\n",
    "script_argument": "set -x\npython train.py --no-such\n",
    "script_training": f"set -x\n{LAUNCH} crash@1\nfor i in 1 2; do [[ $i ]]; done\nfalse\n",
}
# Case -> who did what, where and when.
HEADLINES = {
    "crash": (
        r"rank 0 of 2 raised ValueError: the crash of rank 0 at train.py:\d+ in do, "
        r"after iteration 3 of 10"
    ),
    "import": (
        r"every one of 2 ranks raised ModuleNotFoundError: No module named 'transformer_engine' "
        r"at train.py:\d+ in do, before the first iteration that was logged"
    ),
    "hang": (
        r"rank 0 of 2 did not come to a collective that the others waited in at train.py:\d+ in "
        r"wait_for_others, after iteration 4 of 10"
    ),
    "time_limit": (
        rf"time limit of {LIMIT_S} s reached at train.py:\d+ in wait_for_others \(rank 0\), "
        r"train.py:\d+ in hang_for_ever \(rank 1\), after iteration 4 of 10"
        r"(, nothing logged for \d+ s)?"
    ),
    "mismatch": (r"lm loss is off at step 7: trained to the end, but its metrics disagree"),
    "broken_golden": (
        r"golden_values/gpt/broken_golden/golden_values_dev_cpu.json:1:14: the golden is broken, "
        r"nothing was run: not JSON: .*; fix it, or write it anew with `--golden refresh`"
    ),
    "nccl": (
        r"ranks 0-1 of 2 lost another rank: RuntimeError: NCCL error: remote process exited or "
        r"there was a network error, after iteration 3 of 10"
    ),
    "script": (
        r"the script ended with exit code 3; its last words: 'no such data: /data/x', before the "
        r"first iteration that was logged"
    ),
    "script_argument": (
        r"the script wrote 'train.py: error: the following arguments are required: "
        r"--train-iters', before the first iteration that was logged"
    ),
    "script_training": (
        r"rank 0 raised ValueError: the crash of rank 0 at train.py:\d+ in do, before the first "
        r"iteration that was logged"
    ),
}
# Case -> what to do, where that is known beside the headline.
ADVICE = {
    "crash": ("read the traceback"),
    "import": ("install the module"),
    "hang": ("look what the missing rank does there"),
    "time_limit": ("give the job more time"),
    "mismatch": ("compare the curves"),
    "nccl": (
        "transient as a rule; not run again: it failed as attempt 1 did, at the same place: not "
        "by chance): NCCL lost a peer"
    ),
    "script": ("read the end of each rank's log"),
    "script_argument": ("the program does not take these arguments"),
    "script_training": ("read the traceback"),
}
TESTS = {
    "test_fails": r"\[rank 1\] AssertionError: only rank 0 at test_it.py:7",
    "test_hangs": r"rank 0 did not end in 5 s at test_it.py:11 in test_hangs",
    "test_crashes": r"rank 1 of 2 was killed by SIGSEGV at test_it.py:15 in test_crashes",
}
SUITE = """\
import faulthandler
import time

import pytest

def test_fails(rank):
    assert rank == 0, "only rank 0"

def test_hangs(rank):
    if rank == 0:
        time.sleep(1000)

def test_crashes(rank):
    if rank == 1:
        faulthandler._sigsegv()
"""


@dataclass(frozen=True, kw_only=True)
class Places:
    """A session as every place shows it.

    Attributes:
        of_ci: Text of each place of `ci summary`, by the name of the place.
    """

    root: Path
    stdout: str
    of_ci: Mapping[str, str]

    def item(self, name: str) -> tuple[str, dict[str, object]]:
        """Return node id and record of an item."""
        items = json.loads((self.root / "run" / "run.json").read_text())["items"]
        (node_id,) = [node_id for node_id in items if re.search(rf"::{name}(?:\[|$)", node_id)]
        return node_id, items[node_id]

    def texts(self, name: str) -> dict[str, str]:
        """Return what each place says of an item."""
        node_id, record = self.item(name)
        short = self.stdout.partition("short test summary info")[2]
        junit = self._junit(name)
        pages = [self.root / "run" / "index.html"]
        directory = record.get("directory")
        pages += [] if directory is None else [Path(str(directory)) / "curves.html"]
        told = commands(self.of_ci["ci summary"])
        (note,) = [one for one in told if one.properties.get("title") == node_id]
        return {
            "terminal": self._block(name),
            "short summary": re.findall(rf"^\w+ {re.escape(node_id)} - (.*)", short, re.MULTILINE)[
                0
            ],
            "junit": str(junit.get("message")),
            "run.json": str(record["problem"]),
            "annotation": note.message,
            **{page.name: html.unescape(page.read_text()) for page in pages},
            **self.of_ci,
        }

    def _block(self, name: str) -> str:
        """Return what is printed below the title of a failure."""
        title = rf"^_+ (?:ERROR at setup of )?{name}(?:\[dev-cpu\])? _+\n"
        return re.split(r"(?m)^[_=]+ .*", re.split(title, self.stdout, flags=re.MULTILINE)[1])[0]

    def _junit(self, name: str) -> ET.Element:
        suite = ET.parse(self.root / "junit.xml").getroot()  # noqa: S314 - pytest wrote it
        (case,) = [c for c in suite.iter("testcase") if c.attrib["name"].split("[")[0] == name]
        return next(child for child in case if child.tag in ("failure", "error"))


def places_of(root: Path, stdout: str) -> Places:
    """Run `ci summary` and read what it leaves."""
    output = root / "summary"
    runner = CliRunner()
    words = ["summary", str(root / "run"), "--output", str(output)]
    told = runner.invoke(command, words, env=GITHUB)
    assert told.exit_code == 1, told.output
    texts = {"ci summary": told.output}
    for name in ("comment.md", "summary.md"):
        texts[f"ci summary: {name}"] = html.unescape((output / name).read_text())
    shown = json.loads((output / "summary.json").read_text())
    texts["ci summary: summary.json"] = "\n".join(f["cause"]["text"] for f in shown["failures"])
    return Places(root=root, stdout=stdout, of_ci=texts)


FAULTS = {
    "crash": "crash@4:0",
    "import": "import@1",
    "hang": "watchdog@5:1",
    "nccl": "nccl@4",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Return a session of ten workloads that fail: GitHub shows as many annotations of one."""
    project = Project(root=tmp_path_factory.mktemp("trained"))
    for name, fault in FAULTS.items():
        project.add(name, fault)
    project.row(project.case("time_limit", fault=["hang@5:1"]), time_limit=[LIMIT_S])
    project.add("mismatch")
    project.golden("mismatch", changes={7: 5.5e-3})
    project.add("broken_golden")
    project.golden_path("broken_golden").write_text('{"lm loss": {')
    for name, script in SCRIPTS.items():
        project.row(name, script=[script], write_golden=False)
    given = ("-o", "megatron_retry_backoff=0", "--junitxml", "junit.xml")
    return places_of(project.root, project.run("recipes", *given, **GITHUB).stdout)


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Places:
    suite = RecordedSuite(root=tmp_path_factory.mktemp("tested")).write(test_it=SUITE)
    run = suite.run("--ranks", "2", "--rank-timeout", "5", "--junitxml", "junit.xml", env=GITHUB)
    return places_of(suite.root, run.stdout)


def check_headline(places: Places, name: str, expected: str) -> None:
    """Make sure that the same line is in all places."""
    texts = places.texts(name)
    headline = texts["run.json"].partition("\n")[0]
    assert re.fullmatch(expected, headline)
    firsts = ("short summary", "annotation")
    assert [texts[place].partition("\n")[0] for place in firsts] == [headline, headline]
    if "Traceback" not in texts["terminal"] and ">  " in texts["terminal"]:
        del texts["terminal"]  # it is pytest's traceback of a test, whose end is the headline
    assert [place for place, text in texts.items() if headline not in text] == []


@pytest.mark.parametrize("name", HEADLINES)
def test_a_failed_workload_has_one_headline_and_one_advice_everywhere(
    trained: Places, name: str
) -> None:
    check_headline(trained, name, HEADLINES[name])
    told = str(trained.item(name)[1].get("advice", ""))
    assert (ADVICE[name] in told) if name in ADVICE else not told
    shown = ("terminal", "annotation", "ci summary", "curves.html")
    texts = {place: " ".join(text.split()) for place, text in trained.texts(name).items()}
    assert [place for place in shown if place in texts and told not in texts[place]] == []


@pytest.mark.parametrize("name", TESTS)
def test_a_failed_distributed_test_has_one_headline_everywhere(tested: Places, name: str) -> None:
    check_headline(tested, name, TESTS[name])


@pytest.mark.parametrize("name", ["script", "script_argument", "script_training"])
def test_the_trace_of_a_shell_does_not_hide_a_cause(trained: Places, name: str) -> None:
    lines = trained.texts(name)["terminal"].splitlines()
    has_trace = any(line.startswith("    + ") for line in lines)
    assert has_trace == (name == "script")
