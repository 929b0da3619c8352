"""Candidates for goldens, and their writing at the end of a session: all of them, or none.

A workload only hands in a candidate, which stays in the run directory; what it measured becomes a
golden when every item of the session passed and the gate lets all of them through. A workload that
disagrees with its golden leaves one too, for `pytest-megatron golden review` and `golden accept`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from pytest_megatron.base.git import ask_git_for_owner
from pytest_megatron.errors import GoldenError, MegatronError
from pytest_megatron.golden.policy import ComparisonPolicy
from pytest_megatron.hooks.options import Options
from pytest_megatron.refresh.accept import (
    AcceptOutcome,
    Terms,
    accept,
    consider,
    consider_early,
    write_pages,
)
from pytest_megatron.refresh.build import make_candidate, make_prospect
from pytest_megatron.refresh.candidate import Candidate, hard
from pytest_megatron.refresh.pull_request import commit_message, counted, markdown
from pytest_megatron.refresh.read import digest_of, read_candidate
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.runs.record import RecordedGolden, RecordedWorkload
from pytest_megatron.verdict.job import CheckedJob, Training

_MOST_LINES = 60  # of the page in the terminal


class GoldenWriter:
    """Collects candidates and writes them.

    Attributes:
        lines: For the terminal at the end.
    """

    def __init__(self, root: Path, options: Options, arguments: Sequence[str]) -> None:
        self._root = root
        self._options = options
        self._arguments = arguments
        self._terms = Terms(reason=options.golden_reason, is_dirty_allowed=options.is_dirty_allowed)
        self.lines: list[str] = []

    def wants(self, *, has_golden: bool) -> bool:
        """Return true if the golden of a workload is to be written."""
        mode = self._options.golden
        return mode == "refresh" or (mode == "record" and not has_golden)

    def refuse_early(
        self, checked: CheckedJob, target: Path, facts: SessionFacts, *, is_here: bool
    ) -> None:
        """Refuse what could never be written, before the training costs anything.

        Args:
            checked: What is to be trained.
            target: The golden that it would become.
            facts: Of this machine.
            is_here: Whether it will be trained on this machine.

        Raises:
            GoldenError: The tree is not committed, or the gate refuses whatever is measured.
        """
        self._refuse_uncommitted(facts)
        job = checked.job
        if not job.is_compared or not self.wants(has_golden=target.is_file()):
            return
        name = PurePosixPath(target.relative_to(self._root))
        prospect = make_prospect(checked, name, facts, is_here=is_here)
        refusals = consider_early(prospect, self._root, self._terms)
        if refusals:
            lines = [*(refusal.line for refusal in refusals), "nothing was run"]
            if not hard(refusals):
                lines.append(
                    "give the reason with --golden-reason TEXT, which the golden then says"
                )
            raise GoldenError(job.node_id, "; ".join(lines))

    def _refuse_uncommitted(self, facts: SessionFacts) -> None:
        is_committed = facts.commit is not None and not facts.is_dirty
        if not self._options.is_writing_goldens or is_committed or self._options.is_dirty_allowed:
            return
        state = "has no git commit" if facts.commit is None else "has uncommitted changes"
        if facts.commit is None and (mend := ask_git_for_owner(self._root)) is not None:
            raise GoldenError(
                str(self._root),
                f"--golden {self._options.golden}: git refuses the tree, which another user owns, "
                f"expected a commit that the golden can name; {mend}",
            )
        raise GoldenError(
            str(self._root),
            f"--golden {self._options.golden}: the tree {state}, expected a commit that the golden "
            f"can name; commit first, or give --allow-dirty, which the golden then says",
        )

    def keep(self, training: Training, target: Path, facts: SessionFacts) -> RecordedGolden:
        """Leave a candidate in the run directory; return its part of the record."""
        record = RecordedGolden(target=str(target.relative_to(self._root)))
        if not training.clean:
            return record
        try:
            policy = self._options.golden_policy
            path = make_candidate(training, facts, arguments=self._arguments, policy=policy)
        except GoldenError as error:
            return replace(record, problem=error.problem)
        directory = training.job.dirs.root
        files = [path, *(attempt.whole_path for attempt in training.clean)]
        digests = {
            file.relative_to(directory).as_posix(): digest_of(file)
            for file in files
            if file.is_file()
        }
        return replace(record, candidate=str(path), digests=digests)

    def refusal(
        self,
        node_id: str,
        record: RecordedWorkload,
        directory: Path,
        policy: ComparisonPolicy,
    ) -> str | None:
        """Return why the gate keeps a workload's candidate from becoming a golden, or None."""
        candidate = read_candidate(node_id, record, directory, self._root, policy)
        refusals = consider(candidate, self._root, self._terms).refusals
        if not refusals:
            return None
        lines = [f"{node_id}: {refusals[0].line}", *(r.line for r in refusals[1:])]
        if all(refusal.rule.is_soft for refusal in refusals):
            run = directory.parent
            lines.append(
                "give the reason, which the golden then says: with --golden-reason TEXT, or "
                f"without another training: pytest-megatron golden accept {run} --reason TEXT"
            )
        return "\n".join(lines)

    def finish(
        self, records: Mapping[str, RecordedWorkload], policy: ComparisonPolicy, exit_status: int
    ) -> bool:
        """Write every candidate, if the session was clean; return False if that went wrong."""
        offered = {n: r for n, r in records.items() if r.golden and r.golden.is_offered}
        num_left = sum(bool(r.golden and r.golden.candidate) for r in records.values())
        if num_left and (exit_status != pytest.ExitCode.OK or not offered):
            self.lines.append(
                f"goldens: {counted(num_left, 'candidate')} in the run directory; to look at what "
                "would change: pytest-megatron golden review"
            )
        if not self._options.is_writing_goldens or not records:
            return True
        if exit_status != pytest.ExitCode.OK:
            self.lines.append("goldens: none written, since not all of this run was clean")
        elif not offered:
            self.lines.append("goldens: none written, none was missing")
        else:
            try:
                return self._write([self._read(n, r, policy) for n, r in offered.items()])
            except (OSError, MegatronError) as error:
                self.lines.append(f"goldens: none written: {error}")
                return False
        return True

    def _read(self, node_id: str, record: RecordedWorkload, policy: ComparisonPolicy) -> Candidate:
        return read_candidate(node_id, record, Path(str(record.directory)), self._root, policy)

    def _write(self, candidates: Sequence[Candidate]) -> bool:
        outcome = accept(candidates, self._root, self._terms)
        if outcome.refused:
            self.lines += [
                f"goldens: none written: {name}: {refusal.line}"
                for name, refusal in outcome.refused
            ]
            return False
        self.lines += self._pages(outcome, candidates[0].directory.parent)
        return True

    def _pages(self, outcome: AcceptOutcome, run_dir: Path) -> list[str]:
        """Write what goes with the goldens, and return what to print."""
        reason = self._terms.reason
        lines = [f"goldens: {len(outcome.differences)} written"]
        try:
            page, message = write_pages(run_dir, outcome, reason)
        except OSError as error:
            lines.append(f"goldens: {error.filename or run_dir}: {error.strerror}; no page")
        else:
            lines.append(f"for the pull request: {page}")
            lines.append(f"for the commit: git add golden_values && git commit -F {message}")
        shown = markdown(outcome.differences, reason=reason).splitlines()
        lines += shown[:_MOST_LINES]
        if len(shown) > _MOST_LINES:
            lines.append(f"... {len(shown) - _MOST_LINES} more lines in the page")
        return [*lines, "", *commit_message(outcome.differences, reason=reason).splitlines()]
