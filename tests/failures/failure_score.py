"""Asks triage about what a case left, and scores the answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from failure_cases import Case
from failure_stages import Staged

AIM = 0.95
_COMMAND = "import sys; from pytest_megatron.cli import main; sys.exit(main())"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What triage said of one case.

    Attributes:
        family: None where nothing failed.
        error: What it printed instead of an answer, or "".
    """

    family: str | None = None
    root_rank: int | None = None
    transient: bool = False
    signature: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One case, what was expected and what was said of it.

    Attributes:
        answer: None where nobody was asked.
        problems: Which of `family`, `root`, `transient` are wrong.
    """

    case: Case
    staged: Staged
    answer: Answer | None = None
    problems: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """What is printed of it."""
        ran = f"{self.case.id:30} {self.staged.duration_s:5.1f} s"
        if self.answer is None:
            left = f", {self.staged.num_left} processes left" if self.staged.num_left else ""
            return f"{ran}  exit code {self.staged.returncode}{left}"
        found = self.answer
        chance = "transient" if found.transient else "genuine"
        said = f"{found.family}, rank {found.root_rank}, {chance}, {found.signature}"
        if found.family is None:
            said = "nothing failed"
        if not self.problems:
            return f"{ran}  right  {said}"
        wanted = f"{'|'.join(self.case.families) or 'nothing'}, {self.case.root}"
        guilty = f" {self.case.guilty_text}" if self.case.root == "guilty" else ""
        wrong = f"{ran}  WRONG {'+'.join(self.problems)}: {found.error or said}"
        return f"{wrong}; expected {wanted}{guilty}, {self.case.chance}"

    def as_json(self) -> dict[str, object]:
        """What `results.json` has of it."""
        found = self.answer or Answer()
        return {
            "id": self.case.id,
            "expected": {
                "families": list(self.case.families),
                "root": self.case.root,
                "guilty": list(self.case.guilty),
                "chance": self.case.chance,
            },
            "family": found.family,
            "root_rank": found.root_rank,
            "transient": found.transient,
            "signature": found.signature,
            "error": found.error,
            "problems": list(self.problems),
            "returncode": self.staged.returncode,
            "num_left": self.staged.num_left,
            "duration_s": round(self.staged.duration_s, 1),
        }


def judge(case: Case, staged: Staged) -> Judged:
    """Ask triage about a case, and compare."""
    answer = ask(staged.evidence)
    problems = [
        name
        for name, is_right in (("family", is_family), ("root", is_root))
        if not is_right(case, answer)
    ]
    if case.chance in ("genuine", "innocent") and answer.transient:
        problems.append("transient")
    return Judged(case=case, staged=staged, answer=answer, problems=tuple(problems))


def ask(evidence: Path) -> Answer:
    """Run `pytest-megatron triage` as a person does."""
    project = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([project, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, "triage", str(evidence), "--format", "json"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        said = json.loads(done.stdout)
        return Answer(
            family=said["family"],
            root_rank=said["root_rank"],
            transient=bool(said["transient"]),
            signature=said["signature"],
        )
    except (ValueError, KeyError, TypeError):
        text = (done.stderr or done.stdout).strip()
        return Answer(error=f"exit code {done.returncode}: {text[-300:]}")


def is_family(case: Case, answer: Answer) -> bool:
    """Whether the family is one that the logs allow; for a sound run, whether there is none."""
    if answer.error:
        return False
    if answer.family is None:
        return not case.families or case.may_be_silent
    return answer.family in case.families


def is_root(case: Case, answer: Answer) -> bool:
    """Whether the rank is the guilty one."""
    match case.root:
        case "guilty":
            return answer.root_rank in case.guilty
        case "none":
            return answer.root_rank is None and not answer.error
        case "any":
            return not answer.error


def table(results: Sequence[Judged]) -> tuple[str, bool]:
    """Return the scores as a table, and whether all of them reach the aim."""
    rows: list[tuple[str, Callable[[Judged], bool], str]] = [
        ("family", lambda r: bool(r.case.families), "family"),
        ("root rank", lambda r: bool(r.case.families) and r.case.root != "any", "root"),
        ("genuine, not called transient", lambda r: r.case.chance == "genuine", "transient"),
        ("sound, not called a failure", lambda r: r.case.chance == "innocent", "family"),
    ]
    lines, is_good = [], True
    for name, counts, problem in rows:
        counted = [result for result in results if counts(result)]
        num_right = sum(problem not in result.problems for result in counted)
        aim = AIM if name in ("family", "root rank") else 1.0
        is_good &= num_right >= aim * len(counted)
        lines.append(f"{name:32}{_share(num_right, len(counted)):>16}")
    called = [r for r in results if r.case.chance == "transient"]
    num = sum(r.answer is not None and r.answer.transient for r in called)
    lines.append(f"{'transient, called transient':32}{_share(num, len(called)):>16}")
    return "\n".join(lines), is_good


def _share(num: int, whole: int) -> str:
    return f"{num}/{whole} {100 * num / whole:5.1f} %" if whole else "-"
