"""Writes goldens at the end of a session: all that were asked for, or none.

A workload only hands in a candidate; what it measured becomes a golden when every workload of the
session passed cleanly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import filelock
import pytest

from pytest_megatron.errors import GoldenError, MegatronError
from pytest_megatron.files import JsonValue, write_text_atomically, write_texts_together
from pytest_megatron.golden.model import MetricMap
from pytest_megatron.golden.policy import Policy
from pytest_megatron.golden.provenance import Provenance
from pytest_megatron.golden.refresh import (
    Change,
    changes,
    combine,
    markdown,
    series_in,
    spread_of,
)
from pytest_megatron.golden.store import (
    project_form,
    read_golden,
    write_generation_golden,
    write_golden,
)
from pytest_megatron.hooks.options import Options
from pytest_megatron.host import CPU_PLATFORM
from pytest_megatron.launch.facts import Facts, utc_now
from pytest_megatron.launch.own_dir import make_own_dir
from pytest_megatron.recipe.fingerprint import fingerprint
from pytest_megatron.recipe.places import case_path
from pytest_megatron.report.text import mismatch
from pytest_megatron.verdict.decide import Verdict
from pytest_megatron.verdict.judge import compare_repeats
from pytest_megatron.verdict.training import Job, Training
from pytest_megatron.yamllines import read_document

_OWN_DIR = Path(".pytest_megatron")
_LOCK = _OWN_DIR / "goldens.lock"
_CANDIDATE = "golden_candidate.json"


class GoldenWriter:
    """Collects candidates and writes them.

    Attributes:
        lines: What to tell the user at the end.
    """

    def __init__(self, root: Path, options: Options, arguments: Sequence[str]) -> None:
        self._root = root
        self._options = options
        self._arguments = arguments
        self.lines: list[str] = []

    def wants(self, golden: Path) -> bool:
        """Whether that golden is to be written."""
        mode = self._options.golden
        return mode == "refresh" or (mode == "record" and not golden.exists())

    def refuse_early(self, facts: Facts) -> None:
        """Refuse what could never be written, before the training costs anything.

        Raises:
            GoldenError: The tree is not committed.
        """
        is_committed = facts.commit is not None and not facts.is_dirty
        if not self._options.is_writing_goldens or is_committed or self._options.is_dirty_allowed:
            return
        state = "has no git commit" if facts.commit is None else "has uncommitted changes"
        raise GoldenError(
            str(self._root),
            f"--golden {self._options.golden}: the tree {state}, expected a commit that the golden "
            f"can name; commit first, or give --allow-dirty, which the golden then says",
        )

    def take(
        self, training: Training, target: Path, policy: Policy, facts: Facts
    ) -> tuple[dict[str, JsonValue], str | None]:
        """Make a candidate of a clean training; return it for the record, or why there is none."""
        if training.verdict is not Verdict.PASSED:
            return {}, f"{training.job.node_id}: needed another attempt, so it is no golden"
        faults = [f.text for a in training.attempts if a.health for f in a.health.faults]
        if faults:
            return {}, f"{training.job.node_id}: {faults[0]} meanwhile, so it is no golden"
        spread = compare_repeats(training, policy, facts)
        if spread.failed:
            text = mismatch(training, spread)
            return {}, f"{text}\nthe repeats differ from one another, so there is no new golden"
        generation = training.clean[0].generation
        repeats = [attempt.series for attempt in training.clean]
        names = training.job.metric_names
        metrics = repeats[0] if generation is not None else combine(repeats, names or ())
        candidate = training.job.dirs.root / _CANDIDATE
        provenance = self._provenance(training, metrics, repeats, facts)
        form = project_form(self._root)
        if generation is None:
            write_golden(candidate, metrics, provenance, form)
        else:
            write_generation_golden(candidate, generation, provenance, form)
        shown = target.relative_to(self._root)
        return {"candidate": str(candidate), "target": str(shown)}, None

    def finish(self, records: Sequence[JsonValue], exit_status: int) -> bool:
        """Write every candidate, if the session was clean; return False if that went wrong."""
        found = [
            c for r in records if isinstance(r, dict) if isinstance(c := r.get("golden"), dict)
        ]
        pairs = {
            self._root / str(c["target"]): Path(str(c["candidate"])) for c in found if "target" in c
        }
        if not self._options.is_writing_goldens or not records:
            return True
        if exit_status != pytest.ExitCode.OK:
            self.lines.append("goldens: none written, since not all of this run was clean")
        elif not pairs:
            self.lines.append("goldens: none written, none was missing")
        else:
            try:
                self._write(pairs)
            except (OSError, MegatronError) as error:
                self.lines.append(f"goldens: none written: {error}")
                return False
        return True

    def _write(self, pairs: Mapping[Path, Path]) -> None:
        """Put candidates in the place of their goldens, all or none."""
        lock = self._root / _LOCK
        make_own_dir(self._root)
        with filelock.FileLock(lock):
            difference = {str(t.relative_to(self._root)): _changes(t, c) for t, c in pairs.items()}
            table = markdown(difference)
            page = next(iter(pairs.values())).parent.parent / "goldens.md"
            write_text_atomically(page, table + "\n")
            write_texts_together({t: c.read_text(encoding="utf-8") for t, c in pairs.items()})
        self.lines += [f"goldens: {len(pairs)} written; for the pull request ({page}):", table]

    def _provenance(
        self,
        training: Training,
        metrics: MetricMap,
        repeats: Sequence[MetricMap],
        facts: Facts,
    ) -> Provenance:
        """Say where the values come from."""
        gpus = facts.host.gpus
        num_gpus = training.job.workload.gpus
        platform = training.job.workload.platform
        is_gpu = platform != CPU_PLATFORM and bool(gpus)
        is_generation = training.clean[0].generation is not None
        spread = {} if is_generation else spread_of(repeats, metrics)
        is_equal = all(
            spread[name] == 0.0 for name in training.job.metric_names or () if name in spread
        )
        if is_generation:
            is_equal = not any(changes(metrics, repeat) for repeat in repeats)
        return Provenance(
            command=("pytest", *self._arguments),
            commit=facts.commit,
            config_hash=_config_hash(training.job),
            is_dirty=facts.is_dirty,
            image=facts.image,
            gpu=f"{num_gpus}x {gpus[0].name}" if is_gpu else None,
            driver=facts.host.driver if is_gpu else None,
            host_class=facts.host.platform_class(platform),
            precision=None if training.job.case is None else training.job.case.precision,
            versions=facts.versions | {"python": facts.python},
            date=utc_now(),
            repeats=len(repeats),
            deterministic=is_equal,
            spread=spread,
        )


def _config_hash(job: Job) -> str:
    """Return what the golden says of the case and the row that it belongs to."""
    path = case_path(job.setting.root, job.workload)
    return fingerprint(job.workload, read_document(path).value if path.is_file() else None)


def _changes(target: Path, candidate: Path) -> tuple[Change, ...] | None:
    """Return how a golden changes; None where it is new."""
    if not target.exists():
        return None
    try:
        old = series_in(read_golden(target))
    except GoldenError:
        old = {}  # an unreadable golden is replaced whole
    return changes(old, series_in(read_golden(candidate)))
