"""Candidates for goldens, and their writing at the end of a session: all of them, or none.

A workload only hands in a candidate, which stays in the run directory; its values become a golden
when every item of the session passed and the gate lets all of them through. A workload that
disagrees with its golden leaves one too, for `pytest-megatron golden accept`.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from pytest_megatron.base.files import digest_of, try_to_write
from pytest_megatron.base.project import ask_git_for_owner
from pytest_megatron.base.text import counted, listed
from pytest_megatron.errors import GoldenError, LaunchError, MegatronError
from pytest_megatron.runs.environment import SessionFacts, tree_at_start
from pytest_megatron.runs.layout import BY_HAND
from pytest_megatron.runs.record import RecordedGolden, RecordedWorkload
from pytest_megatron.runs.tree import read_tree
from pytest_megatron.session.state import RunSession
from pytest_megatron.workloads.golden.model import Golden
from pytest_megatron.workloads.golden.policy import ComparedWorkload, ComparisonPolicy
from pytest_megatron.workloads.golden.store import golden_path, new_golden_path, read_golden
from pytest_megatron.workloads.recipe.case import Evaluation, case_path
from pytest_megatron.workloads.refresh.gate import (
    LEAVE_ALONE,
    MOST_CHANGED,
    MOST_NAMED,
    Candidate,
    hard,
)
from pytest_megatron.workloads.refresh.read import make_candidate, make_prospect, read_candidate
from pytest_megatron.workloads.refresh.report import differences_text
from pytest_megatron.workloads.refresh.write import (
    AcceptOutcome,
    Terms,
    accept,
    consider,
    consider_early,
)
from pytest_megatron.workloads.verdict.compare import check_golden_kind
from pytest_megatron.workloads.verdict.job import (
    CheckedJob,
    Training,
    WorkloadJob,
    config_hash,
)

_LOG = logging.getLogger("pytest_megatron.workloads")

_MOST_LINES = 60  # of the table in the terminal


class GoldenWriter:
    """The goldens of one session: copies to compare with, and candidates for new ones.

    Attributes:
        policy: Rules of the comparison.
        lines: For the terminal at the end.
    """

    def __init__(self, session: RunSession, policy: ComparisonPolicy) -> None:
        self._session = session
        self._root = session.root
        self._options = options = session.options
        self.policy = policy
        self._digests: dict[str, str] = {}  # of copies, by node id
        self._terms = Terms(reason=options.golden_reason, is_dirty_allowed=options.is_dirty_allowed)
        self.lines: list[str] = []

    def require(self, job: WorkloadJob) -> None:
        """Make sure, before a training costs anything, that there is something to compare it with.

        Raises:
            GoldenError: The golden should be there and is not, cannot be read, or the policy judges
                no metric of the workload.
        """
        mode = self._options.golden
        if not job.is_compared or mode in ("off", "refresh"):
            return
        path = golden_path(self._root, job.workload)
        if not path.exists():
            is_to_fail = job.case is not None and job.case.evaluation is Evaluation.XPASS
            if mode == "record" or is_to_fail:
                return
            raise GoldenError(
                job.node_id,
                f"no golden, nothing was run; expected {self._session.shorten(str(path))}; write "
                f"one with `--golden record`, or run without comparing with `--golden off`",
            )
        try:
            golden = read_golden(path)
        except GoldenError as error:
            raise GoldenError(
                self._session.shorten(error.where),
                f"the golden is broken, nothing was run: {error.problem}; fix it, or write it "
                "anew with `--golden refresh`",
            ) from error
        if job.case is not None:
            check_golden_kind(job.case, golden)
        self.policy.at(ComparedWorkload.of(job.workload)).require_judged(job.metric_names or ())

    def copy(self, job: WorkloadJob) -> None:
        """Copy the golden, and what a run by hand measured, into the workload's directory.

        The run is compared with the copy and its page shows the copy, whatever becomes of the
        golden while the training runs.

        Raises:
            LaunchError: It cannot be copied.
        """
        path = golden_path(self._root, job.workload)
        _LOG.info("%s: golden %s (--golden %s)", job.node_id, path, self._options.golden)
        if not job.is_compared or self._options.golden == "off":
            return
        try:
            if by_hand := os.environ.get(BY_HAND):
                shutil.copyfile(by_hand, job.dirs.by_hand)
            if path.is_file():
                shutil.copyfile(path, job.dirs.golden)
            if job.dirs.golden.is_file():
                self._digests[job.node_id] = digest_of(job.dirs.golden)
        except OSError as error:
            raise LaunchError(
                str(job.dirs.golden),
                f"{error.strerror}; give another --run-dir, or make room; nothing was run",
            ) from error

    def read_copy(self, job: WorkloadJob) -> Golden | None:
        """Return the golden as it was before the training; None where nothing is to be compared.

        Raises:
            GoldenError: The copy was changed, or cannot be read.
        """
        digest = self._digests.get(job.node_id)
        if digest is None or self._options.golden == "refresh":
            return None
        copy = job.dirs.golden
        if not copy.is_file() or digest_of(copy) != digest:
            raise GoldenError(
                str(copy),
                "changed while the training ran, so what was measured is not judged; leave the run "
                "directory alone, and run it again",
            )
        return replace(read_golden(copy), path=str(golden_path(self._root, job.workload)))

    def wants(self, *, has_golden: bool) -> bool:
        """Return true if the golden of a workload is to be written."""
        mode = self._options.golden
        return mode == "refresh" or (mode == "record" and not has_golden)

    def refuse_early(self, checked: CheckedJob, *, is_here: bool) -> None:
        """Refuse a golden that could never be written, before the training costs anything.

        Args:
            checked: The training.
            is_here: Whether this machine trains.

        Raises:
            GoldenError: The tree is not committed, or the gate refuses whatever is measured.
        """
        facts, job = self._session.facts, checked.job
        self._refuse_uncommitted(facts)
        target = new_golden_path(self._root, job.workload)
        if not job.is_compared or not self.wants(has_golden=target.is_file()):
            return
        try:
            try_to_write(target.parent)
        except OSError as error:
            problem = f"{error.filename}: cannot be written to: {error.strerror}"
            raise GoldenError(job.node_id, f"{problem}; nothing was run") from error
        self._refuse_changed()
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
        is_writing = self._options.is_writing_goldens
        is_committed = facts.commit is not None and not facts.uncommitted
        if not is_writing or is_committed or self._options.is_dirty_allowed:
            return
        state = f"has uncommitted changes ({listed(facts.uncommitted, MOST_NAMED)})"
        state = "has no git commit" if facts.commit is None else state
        if facts.commit is None and (fix := ask_git_for_owner(self._root)) is not None:
            raise GoldenError(
                str(self._root),
                f"--golden {self._options.golden}: git refuses the tree, which another user owns, "
                f"expected a commit that the golden can name; {fix}",
            )
        raise GoldenError(
            str(self._root),
            f"--golden {self._options.golden}: the tree {state}, expected a commit that the golden "
            "can name; commit it, have git ignore what no training reads, or give --allow-dirty, "
            "which the golden then says",
        )

    def _refuse_changed(self) -> None:
        """Refuse to measure a tree that is no more the one which the golden would name."""
        if self._options.is_dirty_allowed:
            return
        if changed := self._changed_files():
            raise GoldenError(
                str(self._root),
                f"--golden {self._options.golden}: the tree changed after the run had begun: "
                f"{listed(changed, MOST_CHANGED)}; nothing was run; {LEAVE_ALONE}",
            )

    def _changed_files(self) -> tuple[str, ...]:
        """Return what of the checkout is not as it was when the run began."""
        return read_tree(self._root).since(tree_at_start(self._root))

    def _changes(self, training: Training) -> tuple[str, ...]:
        """Return what was not, when a workload had trained, as it was when the run began.

        The case counts where git does not see it, too.
        """
        job = training.job
        changed = [
            *self._changed_files(),
            *training.other_code(self._session.facts),
        ]
        try:
            is_same_case = config_hash(self._root, job.workload) == job.config_hash
        except MegatronError:
            is_same_case = False
        if not is_same_case:
            changed.append(str(case_path(self._root, job.workload).relative_to(self._root)))
        return tuple(dict.fromkeys(changed))

    def record_of(self, job: WorkloadJob) -> RecordedGolden:
        """Return the record of a golden that has no candidate."""
        target = new_golden_path(self._root, job.workload)
        return RecordedGolden(target=str(target.relative_to(self._root)))

    def keep(self, training: Training) -> RecordedGolden:
        """Leave a candidate in the run directory; return its part of the record."""
        record = self.record_of(training.job)
        if not training.clean:
            return record
        facts, changed = training.facts(self._session.facts), self._changes(training)
        record = replace(record, uncommitted=facts.uncommitted, changed=changed)
        try:
            path = make_candidate(
                training,
                facts,
                is_dirty=bool(facts.uncommitted or changed),
                arguments=self._session.arguments,
            )
        except GoldenError as error:
            return replace(record, problem=error.problem)
        directory = training.job.dirs.root
        files = [path, *(a.whole_path for a in training.clean), training.job.dirs.by_hand]
        digests = {
            file.relative_to(directory).as_posix(): digest_of(file)
            for file in files
            if file.is_file()
        }
        return replace(record, candidate=str(path), digests=digests)

    def refusal(self, node_id: str, record: RecordedWorkload, directory: Path) -> str | None:
        """Return why the gate keeps a workload's candidate from becoming a golden, or None."""
        candidate = read_candidate(node_id, record, directory, self._root, self.policy)
        _, refusals = consider(candidate, self._root, self._terms)
        if not refusals:
            return None
        lines = [refusal.line for refusal in refusals]
        if all(refusal.rule.is_soft for refusal in refusals):
            command = f"pytest-megatron golden accept {directory.parent} --reason TEXT"
            command += " --allow-dirty" if self._terms.is_dirty_allowed else ""
            lines.append(
                "give the reason, which the golden then says: with --golden-reason TEXT, or "
                f"without another training: {command}"
            )
        return "\n".join(lines)

    def finish(self, records: Mapping[str, RecordedWorkload], exit_status: int) -> bool:
        """Write every candidate, if the session was clean; return False if that went wrong."""
        offered = {n: r for n, r in records.items() if r.golden and r.golden.is_offered}
        num_left = sum(bool(r.golden and r.golden.candidate) for r in records.values())
        if num_left and (exit_status != pytest.ExitCode.OK or not offered):
            run_dir = shlex.quote(self._session.shorten(str(self._session.run_dir)))
            self.lines.append(
                f"goldens: {counted(num_left, 'candidate')} in the run directory; to look at what "
                f"would change: pytest-megatron golden accept {run_dir} --dry-run"
            )
        if not self._options.is_writing_goldens or self._options.is_plan:
            return True
        if not records:
            self.lines.append("goldens: none written, no workload ran; -rs says why")
        elif exit_status != pytest.ExitCode.OK:
            self.lines.append("goldens: none written, since not all of this run was clean")
        elif not offered:
            self.lines.append("goldens: none written, none was missing")
        else:
            try:
                candidates = [
                    read_candidate(name, r, Path(str(r.directory)), self._root, self.policy)
                    for name, r in offered.items()
                ]
                return self._write(candidates)
            except (OSError, MegatronError) as error:
                self.lines.append(f"goldens: none written: {error}")
                return False
        return True

    def _write(self, candidates: Sequence[Candidate]) -> bool:
        """Write goldens that pass the gate; return whether all were written."""
        outcome = accept(candidates, self._root, self._terms)
        if outcome.refused:
            self.lines += [
                f"goldens: none written: {name}: {refusal.line}"
                for name, refusal in outcome.refused
            ]
            return False
        self.lines += _written(outcome)
        self.lines += self._left_in_tree(candidates[0].directory.parent)
        return True

    def _left_in_tree(self, run_dir: Path) -> Iterator[str]:
        """Name files that came to the tree meanwhile: trainings may read what no commit has."""
        own = {os.path.relpath(path, self._root) + "/" for path in (run_dir, *run_dir.parents)}
        new = sorted(read_tree(self._root).new - tree_at_start(self._root).new - own)
        if new:
            yield (
                f"new in the tree, and in no commit: {listed(new, MOST_NAMED)}; have git ignore "
                "what trainings write; commit what they read, and measure again"
            )


def _written(outcome: AcceptOutcome) -> list[str]:
    """Return the lines to print of goldens that were written."""
    lines = [f"goldens: {len(outcome.differences)} written"]
    shown = differences_text(outcome.differences).splitlines()
    lines += shown[:_MOST_LINES]
    if len(shown) > _MOST_LINES:
        more = len(shown) - _MOST_LINES
        lines.append(f"... {more} more lines; pytest-megatron golden diff prints all")
    return lines
