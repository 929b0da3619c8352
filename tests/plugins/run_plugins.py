"""Runs tests on gangs beside other plugins of pytest, each installed alone, and prints a table.

    python tests/plugins/run_plugins.py [--sample] [--only NAME,...] [--jobs 2]

For each plugin of `plugin_cases.py`, pinned there, the same six distributed and four plain tests
run with it merely installed, then tests of what it is for. Sessions run in up to two ways: with
ranks that are forked off the collected session, and with ranks that collect for themselves. Exits
with 1 if anything was not as expected. Plugins come from the package index, each with what it
needs into a directory of its own that only its sessions see, so that they cannot conflict.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from plugin_cases import (
    CASES,
    SAMPLE,
    STANDARD,
    STANDARD_OUTCOMES,
    TABLE_HEAD,
    Case,
    Session,
    row_of,
)

WAYS = ("forked", "collecting")
_LIMIT_S = 240
# What the tests need anyway: every plugin has to do with what is here.
_HERE = ("pytest", "pluggy", "torch", "numpy", "packaging", "iniconfig", "typing-extensions")
_READS_RANK = 'import os\n\nRANK = int(os.environ["RANK"])\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of a plugin in one way.

    Attributes:
        problems: What was not as expected.
    """

    case: Case
    way: str
    problems: tuple[str, ...]
    duration_s: float

    @property
    def line(self) -> str:
        """One line of the report."""
        said = "; ".join(self.problems) or "as expected"
        return f"{self.case.requirement:<45} {self.way:<11} {self.duration_s:5.1f} s  {said}"


def main() -> int:
    """Install, run, print."""
    asked = _parse()
    cases = [c for c in CASES if not asked.sample or c.requirement in SAMPLE]
    if asked.only:
        cases = [case for case in CASES if case.name in asked.only]
    root = (asked.keep or Path(tempfile.mkdtemp(prefix="plugins-"))).resolve()
    started = time.monotonic()

    def run(case: Case) -> list[Tried]:
        home = root / re.sub(r"\W", "_", case.requirement)
        problem = _install(case, home / "site")
        ways = (SAMPLE[case.requirement],) if asked.sample else asked.ways
        is_short = asked.sample and ways[0] != "collecting"
        return [_try(case, way, home, problem, is_short=is_short) for way in ways]

    tried: list[Tried] = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for found in pool.map(run, cases):
            print("\n".join(t.line for t in found), flush=True)
            tried += found
    if not asked.sample:
        bad = {t.case for t in tried if t.problems}
        print("\n".join(["", *TABLE_HEAD, *(row_of(c) for c in cases if c not in bad)]))
    num_bad = sum(bool(t.problems) for t in tried)
    took_s = time.monotonic() - started
    print(f"{len(cases)} plugins, {len(tried)} ways, {num_bad} not as expected; {took_s:.0f} s")
    if not num_bad and asked.keep is None:
        shutil.rmtree(root)
    elif num_bad:
        print(f"see {root}")
    return 1 if num_bad else 0


def _install(case: Case, site: Path) -> str:
    """Install a plugin and what it needs; return why that failed, or ""."""
    if site.exists() or not case.is_installed_apart:
        return ""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        return "cannot be installed: there is no uv; `python3 dev.py setup` brings it"
    site.mkdir(parents=True)
    without = site.with_suffix(".txt")
    without.write_text("".join(f"{name} ; python_version < '0'\n" for name in _HERE))
    command = [uv, "pip", "install", "--no-config", "--quiet", "--python", sys.executable]
    command += ["--overrides", str(without), "--target", str(site), case.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"cannot be installed: {done.stderr.strip()[-500:]}" if done.returncode else ""


def _try(case: Case, way: str, home: Path, problem: str, *, is_short: bool) -> Tried:
    """Run what a case asks for.

    Args:
        case: The plugin.
        way: Where ranks come from.
        home: Where it is installed, and its projects go.
        problem: Why it is not there, or "".
        is_short: Whether to leave out that it is merely installed.
    """
    started = time.monotonic()
    problems = [problem] if problem else []
    if not (problem or is_short):
        merely = Session(args=(), outcomes=STANDARD_OUTCOMES, exit_code=1)
        project = _make(way, home / way / "standard", STANDARD)
        problems += [f"merely installed: {p}" for p in _run(merely, project, home / "site")]
    if not problem:
        project = _make(way, home / way / "purpose", case.files)
        for number, session in enumerate(case.sessions, 1):
            found = _run(session, project, home / "site", number)
            problems += [f"session {number}: {p}" for p in found]
    return Tried(
        case=case, way=way, problems=tuple(problems), duration_s=time.monotonic() - started
    )


def _make(way: str, project: Path, files: Mapping[str, str]) -> Path:
    shutil.rmtree(project, ignore_errors=True)
    project.mkdir(parents=True)
    texts = {"pytest.ini": "[pytest]\n", "conftest.py": "", **files}
    texts["conftest.py"] += _READS_RANK if way == "collecting" else ""
    for name, text in texts.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(textwrap.dedent(text))
    return project


def _run(session: Session, project: Path, site: Path, number: int = 0) -> list[str]:
    """Run a session; return what is not as expected."""
    junit = project / f"junit-{number}.xml"
    options = [
        *("--ranks", "2"),
        "-ra",
        "-o",
        "megatron_rank_grace=1",
        f"--junitxml={junit}",
        *session.args,
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_", "CI"))}
    paths = [str(site), *env.get("PYTHONPATH", "").split(os.pathsep)]
    env |= {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "COLUMNS": "200", **session.env}
    command = [sys.executable, "-m", "pytest", "-p", "megatron", *options]
    try:
        done = subprocess.run(
            command,
            cwd=project,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return [f"did not end in {_LIMIT_S} s"]
    (project / f"output-{number}.txt").write_text(done.stdout)
    problems = []
    if done.returncode != session.exit_code:
        problems.append(f"exit code {done.returncode}, not {session.exit_code}")
    found = _outcomes(junit)
    for name in sorted({**found, **session.outcomes}):
        if found.get(name) != session.outcomes.get(name):
            wanted = session.outcomes.get(name, "not there")
            problems.append(f"{name} {found.get(name, 'not there')}, not {wanted}")
    problems += [f"does not print {t!r}" for t in session.prints if t not in done.stdout]
    problems += ["INTERNALERROR"] * ("INTERNALERROR" in done.stdout)
    if session.check is not None and not problems:
        problem = session.check(project, done.stdout)
        problems += [problem] if problem else []
    return problems


def _outcomes(junit: Path) -> dict[str, str]:
    """Return name of each test -> its outcome, as JUnit has it."""
    if not junit.exists():
        return {}
    found: dict[str, str] = {}
    for case in ET.parse(junit).iter("testcase"):  # noqa: S314 - pytest's own
        kinds = [child for child in case if child.tag in ("failure", "error", "skipped")]
        is_xfail = any(kind.get("type") == "pytest.xfail" for kind in kinds)
        word = "xfailed" if is_xfail else kinds[-1].tag if kinds else "passed"
        name = str(case.get("name"))
        found[name] = {"failure": "failed"}.get(word, word)
    return found


def _parse() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    option = parser.add_argument
    option("--sample", action="store_true", help="the most dangerous few, one way each: for CI")
    option("--only", type=words, default=[], help="names of plugins")
    option("--ways", type=words, default=list(WAYS), help=", ".join(WAYS))
    option("--jobs", type=int, default=2, help="plugins at one time")
    option("--keep", type=Path, help="where plugins and projects stay")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
