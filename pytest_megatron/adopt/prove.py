"""Runs tests under their launcher and under pytest-megatron, and compares the outcomes (effects).

Both run in a copy of the project, on the CPU, one test file after another, so that a launcher that
hangs or dies costs one file.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.adopt.find import Inventory
from pytest_megatron.adopt.launch import LaunchedTests
from pytest_megatron.adopt.shell import unquote
from pytest_megatron.base.text import columns, counted, shorten
from pytest_megatron.ci.summary.junit import JUnitCase, read_junit
from pytest_megatron.ci.test_files import find_test_files
from pytest_megatron.errors import AdoptError, CiError
from pytest_megatron.process.guarded import GuardedProcess
from pytest_megatron.workload.plan.script import ScriptFiles, lay_out_script

FILE_LIMIT_S = 300.0
_GRACE_S = 5.0
_LAUNCHERS = ("torchrun", "accelerate")
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MOST_CHARS = 160
_MOST_LISTED = 20
_REPORTS = ("junit", "cov", "html")  # options whose files would be written by each rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofPlan:
    """Test files, and how they are run.

    Attributes:
        where: The command that was found, `file:line`, or the option that named the files.
        files: From the project's root.
        arguments: Those of pytest beside the files.
        num_ranks: On this machine.
        asked_ranks: As the command has it.
    """

    where: str
    files: tuple[str, ...]
    arguments: tuple[str, ...]
    num_ranks: int
    asked_ranks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTest:
    """A test under both.

    Attributes:
        verdict: `equal`, `different`, or `not here` where nothing can be compared.
        launched, adopted: Outcome under the launcher and under pytest-megatron.
        reason: Of a difference, or why it could not run here.
    """

    name: str
    verdict: str
    launched: str
    adopted: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFile:
    """The tests of a file, and what each side took."""

    file: str
    tests: tuple[ComparedTest, ...]
    launched_s: float
    adopted_s: float

    def count(self, verdict: str) -> int:
        """Return the number of tests with a verdict."""
        return sum(test.verdict == verdict for test in self.tests)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRun:
    """One side of a file: the outcomes that it reported, and why others may be missing."""

    outcomes: Mapping[str, tuple[str, str]]
    reason: str
    duration_s: float


def plan_proofs(
    root: Path, inventory: Inventory, tests: Sequence[str], num_ranks: int | None
) -> tuple[list[ProofPlan], list[str]]:
    """Return what can be run here, and a line for each command that cannot.

    Args:
        root: The project.
        inventory: What was found in it.
        tests: Files and folders to run instead of those that commands name.
        num_ranks: Of the user; None is that of each command, as far as it fits.
    """
    if tests:
        files = tuple(_test_files(root, tests))
        missing = [one for one in tests if not (root / one).exists()]
        if missing:
            raise AdoptError(f"--tests {missing[0]}", f"is not in {root}, expected test files")
        number = num_ranks or 2
        plan = ProofPlan(
            where="--tests", files=files, arguments=(), num_ranks=number, asked_ranks=str(number)
        )
        return [plan], []
    plans: dict[tuple[tuple[str, ...], tuple[str, ...], int], ProofPlan] = {}
    problems: list[str] = []
    for found in inventory.findings:
        if not isinstance(found.what, LaunchedTests) or found.kind != "pytest":
            continue
        made = _plan(root, found.where, found.what, num_ranks)
        if isinstance(made, str):
            problems.append(f"{found.where}: not run, {made}")
        else:
            plans.setdefault((made.files, made.arguments, made.num_ranks), made)
    return list(plans.values()), problems


def _plan(root: Path, where: str, launched: LaunchedTests, asked: int | None) -> ProofPlan | str:
    """Return how a command is run here, or why it is not."""
    if launched.launcher not in _LAUNCHERS:
        return f"{launched.launcher} starts other processes than ranks of torch"
    if launched.num_nodes:
        return f"it spans {launched.num_nodes} nodes"
    unknown = next((word for word in launched.arguments if re.search(r"[$`]", word)), None)
    if unknown is not None:
        return f"only its script knows {shorten(unknown, 40)}; name files with --tests"
    words = [unquote(word) for word in launched.arguments]
    gone = next((w for w in words if re.search(r"\.py(::|$)", w) and not _exists(root, w)), None)
    if gone is not None:
        return f"{gone} is not here"
    paths = [word for word in words if word[:1] != "-" and _exists(root, word)]
    files = tuple(_test_files(root, paths or ["."]))
    if not files:
        return "it names no test file that is here"
    number = launched.num_ranks
    fitting = max(2, os.cpu_count() or 2)
    return ProofPlan(
        where=where,
        files=files,
        arguments=tuple(word for word in words if word not in paths and not _writes_report(word)),
        num_ranks=asked or min(int(number) if number.isdecimal() else 2, fitting),
        asked_ranks=number,
    )


def _exists(root: Path, word: str) -> bool:
    return (root / word.partition("::")[0]).exists()


def _writes_report(word: str) -> bool:
    return word.startswith("--") and word.lstrip("-").startswith(_REPORTS) and "=" in word


def _test_files(root: Path, paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        if (root / path).is_dir():
            yield from find_test_files(root, [path])
        else:
            yield path


def prove(
    root: Path,
    plans: Sequence[ProofPlan],
    *,
    limit_s: float,
    report: Callable[[ComparedFile], object],
) -> tuple[list[ComparedFile], list[str]]:
    """Run the files of each plan under both, and compare; return also the files without time.

    Args:
        root: The project, of which a copy is used.
        plans: What to run.
        limit_s: No further file is begun after so long.
        report: Is given each file as it is done.

    Raises:
        AdoptError: The copy cannot be made.
    """
    deadline = time.monotonic() + limit_s
    compared: list[ComparedFile] = []
    untried: list[str] = []
    with tempfile.TemporaryDirectory(prefix="pytest-megatron-adopt-") as scratch:
        place = Path(scratch)
        copy = place / "project"
        home = place / "home"
        files = ScriptFiles(project=root.resolve(), copy=copy, results=place, home=home, texts={})
        try:
            lay_out_script(files)
        except OSError as error:
            raise AdoptError(str(root), f"cannot be copied to {copy}: {error}") from error
        for plan in plans:
            for file in plan.files:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    untried.append(file)
                    continue
                where = place / f"file-{len(compared)}"
                done = _compare_file(copy, where, plan, file, min(FILE_LIMIT_S, left_s))
                compared.append(done)
                report(done)
    return compared, untried


def _compare_file(
    copy: Path, place: Path, plan: ProofPlan, file: str, limit_s: float
) -> ComparedFile:
    place.mkdir()
    whole = ("--maxfail=0", "-p", "no:cacheprovider", "-o", "junit_family=xunit2")
    common = (*plan.arguments, *whole, file)
    number = str(plan.num_ranks)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number]
    launched = _run_side(
        [*torchrun, "-m", "pytest", *common, f"--junit-xml={place}/launched-$RANK.xml"],
        copy,
        [place / f"launched-{rank}.xml" for rank in range(plan.num_ranks)],
        limit_s,
    )
    gang = ["-m", "pytest", "-p", "megatron", "--ranks", number, "--device", "cpu"]
    own = ["--run-dir", f"{place}/run", "--history", "off", f"--junit-xml={place}/adopted.xml"]
    adopted = _run_side([*gang, *own, *common], copy, [place / "adopted.xml"], limit_s)
    return ComparedFile(
        file=file,
        tests=tuple(compare_sides(launched, adopted)),
        launched_s=launched.duration_s,
        adopted_s=adopted.duration_s,
    )


def _run_side(
    arguments: Sequence[str], cwd: Path, reports: Sequence[Path], limit_s: float
) -> SideRun:
    """Run Python to its end or its limit, and read what its ranks reported."""
    output = reports[0].with_suffix(".log")
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    command = (sys.executable, *arguments)
    with GuardedProcess(command, env=env, cwd=cwd, output=output, grace_s=_GRACE_S) as process:
        begun = time.monotonic()
        end = process.poll(limit_s)
        while end is None and (left_s := limit_s - (time.monotonic() - begun)) > 0:
            end = process.poll(left_s)
        if end is None:
            process.stop()
        ended = process.wait()
    state = f"not ended after {limit_s:.0f} s" if end is None else f"exit {ended.returncode}"
    read = [cases for cases in map(_read, reports) if cases is not None]
    reason = f"{state}, without the report of {counted(len(reports) - len(read), 'rank')}"
    is_whole = len(read) == len(reports)
    return SideRun(
        outcomes=merge_ranks(read, is_whole=is_whole),
        reason="" if is_whole else f"{reason}: {_last_line(output)}",
        duration_s=ended.duration_s,
    )


def _read(report: Path) -> tuple[JUnitCase, ...] | None:
    try:
        return read_junit(report).cases
    except CiError:
        return None


def _last_line(output: Path) -> str:
    """Return the last line that names an error, else the last one."""
    lines = [line for line in output.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"^\S*(?:Error|Exception)\b", line.strip())]
    return shorten((errors or lines or ["no output"])[-1], _MOST_CHARS)


def merge_ranks(
    ranks: Sequence[Sequence[JUnitCase]], *, is_whole: bool = True
) -> dict[str, tuple[str, str]]:
    """Return one outcome and its message for each test that ranks reported.

    A test that some ranks skip or lack is `mixed`. Where ranks left no report, only a failure is
    known.

    Args:
        ranks: The cases that each rank reported; an error in teardown is a further case.
        is_whole: Whether every rank left a report.
    """
    outcomes: dict[str, dict[int, str]] = {}
    messages: dict[str, str] = {}
    for rank, cases in enumerate(ranks):
        for case in cases:
            own = outcomes.setdefault(case.node_id, {})
            outcome = "failed" if case.outcome == "broken" else case.outcome
            own[rank] = "failed" if own.get(rank) == "failed" else outcome
            if outcome != "passed":
                messages[case.node_id] = case.message or case.text
    merged: dict[str, tuple[str, str]] = {}
    for name, by_rank in outcomes.items():
        kinds = set(by_rank.values()) | ({"absent"} if len(by_rank) < len(ranks) else set())
        outcome = "failed" if "failed" in kinds else "mixed" if len(kinds) > 1 else min(kinds)
        if is_whole or outcome == "failed":
            merged[name] = outcome, messages.get(name, "")
    return merged


def compare_sides(launched: SideRun, adopted: SideRun) -> Iterator[ComparedTest]:
    """Yield a verdict for each test of a file; a file without any is one that could not run."""
    names = dict.fromkeys((*launched.outcomes, *adopted.outcomes))
    if not names:
        reason = launched.reason or adopted.reason or "no tests were collected"
        yield _not_here("the file", "none", "none", reason)
    for name in names:
        before, message = launched.outcomes.get(name, ("", ""))
        after, problem = adopted.outcomes.get(name, ("", ""))
        why = shorten(problem or message, _MOST_CHARS)
        is_uncollected = name.endswith(".py") or "::" not in name
        if not before:
            reason = launched.reason or "the launcher did not report it"
            yield _not_here(name, "none", after, reason)
        elif before == after and (before == "skipped" or (before == "failed" and is_uncollected)):
            yield _not_here(name, before, after, why)
        elif before == after:
            yield ComparedTest(
                name=name, verdict="equal", launched=before, adopted=after, reason=why
            )
        else:
            yield ComparedTest(
                name=name,
                verdict="different",
                launched=before,
                adopted=after or "none",
                reason=why if after else adopted.reason or "pytest-megatron did not report it",
            )


def _not_here(name: str, launched: str, adopted: str, reason: str) -> ComparedTest:
    return ComparedTest(
        name=name, verdict="not here", launched=launched, adopted=adopted, reason=reason
    )


def heading(plan: ProofPlan) -> str:
    """Return a line that names both commands of a plan."""
    words = shlex.join(plan.arguments)
    tail = f" {words}" if words else ""
    cut = f", cut from {plan.asked_ranks}" if plan.asked_ranks != str(plan.num_ranks) else ""
    return (
        f"{plan.where}: {counted(len(plan.files), 'file')} on {plan.num_ranks} ranks{cut}, CPU: "
        f"torchrun --nproc-per-node {plan.num_ranks} -m pytest{tail} FILE | "
        f"pytest -p megatron --ranks {plan.num_ranks} --device cpu{tail} FILE"
    )


def file_line(done: ComparedFile) -> str:
    """Return what is printed as soon as a file is done."""
    return (
        f"  {done.file}: {done.count('equal')} equal, {done.count('different')} different, "
        f"{done.count('not here')} could not run here "
        f"({done.launched_s:.1f} s and {done.adopted_s:.1f} s)"
    )


def proof_lines(compared: Sequence[ComparedFile], untried: Sequence[str]) -> Iterator[str]:
    """Yield the differences, the reasons of what could not run here, and the sums."""
    tests = [(done.file, test) for done in compared for test in done.tests]
    for _, test in tests:
        if test.verdict == "different":
            both = f"{test.launched} under the launcher, {test.adopted} under pytest-megatron"
            yield f"different: {test.name}: {both}:"
            yield f"  {test.reason}"
    reasons = Counter(test.reason for _, test in tests if test.verdict == "not here")
    if reasons:
        yield "could not run here:"
        rows = [(f"  {number}", reason) for reason, number in reasons.most_common(_MOST_LISTED)]
        yield from columns(rows)
    if untried:
        yield f"not tried, as the time was over: {counted(len(untried), 'file')}"
    equal = Counter(test.launched for _, test in tests if test.verdict == "equal")
    kinds = ", ".join(f"{number} {outcome}" for outcome, number in sorted(equal.items()))
    num_different = sum(test.verdict == "different" for _, test in tests)
    yield (
        f"{counted(len(tests), 'test')}: {sum(equal.values())} equal ({kinds or 'none'}), "
        f"{num_different} different, {sum(reasons.values())} could not run here"
    )


def is_proved(compared: Sequence[ComparedFile]) -> bool:
    """Return whether tests ran under both, and none of them differed."""
    return any(done.count("equal") for done in compared) and not any(
        done.count("different") for done in compared
    )
