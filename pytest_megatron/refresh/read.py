"""Reader of finished runs: the candidates for goldens (effects: reads files).

Everything comes from the run's own files, whose paths are of the machine that it ran on: only
their last parts count. Nothing in them is trusted to lead out of the project or the run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from pytest_megatron.base.files import JsonValue, read_json
from pytest_megatron.errors import GoldenError, MegatronError
from pytest_megatron.golden.build import combine, series_in, series_of_generation
from pytest_megatron.golden.compare.environment import NOWHERE
from pytest_megatron.golden.compare.limits import NORMS
from pytest_megatron.golden.compare.result import render
from pytest_megatron.golden.model import Generation, MetricMap
from pytest_megatron.golden.policy import ComparedWorkload, ComparisonPolicy
from pytest_megatron.golden.provenance import Golden, Provenance
from pytest_megatron.golden.store import read_golden, read_metrics
from pytest_megatron.recipe.case import CaseMode, TestType, WorkloadCase, read_case
from pytest_megatron.recipe.paths import CASES, GOLDENS
from pytest_megatron.refresh.candidate import Candidate, Ran
from pytest_megatron.runs.fields import Fields
from pytest_megatron.runs.layout import RUN_FILE, ItemDirs
from pytest_megatron.verdict.compare import compare_in_mode
from pytest_megatron.verdict.job import metric_names_of

CANDIDATE = "golden_candidate.json"
REJECTED = "golden_rejected.json"
_TARGET = re.compile(r"[\w.+=-]+/[\w.+=-]+/golden_values_[\w.+-]+\.json").fullmatch
_ROUNDING = 1e-6  # of a median of values that were written with their fewest digits


def read_run(run_dir: Path, root: Path, policy: ComparisonPolicy) -> tuple[Candidate, ...]:
    """Return the workloads of a run that disagree with their goldens, in the order of the run.

    Those that agree offer nothing, and what a review rejected is not offered again.

    Args:
        run_dir: A run directory, or what was unpacked of one.
        root: The project, which has the cases.
        policy: Under which repeats must agree.

    Raises:
        GoldenError: It is no run directory.
    """
    items = _read(run_dir / RUN_FILE).values.get("items")
    if not isinstance(items, dict):
        raise GoldenError(str(run_dir / RUN_FILE), "has no 'items', so it is not of a run")
    found = []
    for node_id, item in items.items():
        if not isinstance(item, dict) or "golden" not in item:
            continue
        record = Fields(item)
        directory = run_dir / _name_of(record.text("directory"))
        if not (directory / REJECTED).is_file():
            found.append(read_candidate(node_id, record, directory, root, policy))
    return tuple(found)


def read_candidate(
    node_id: str, record: Fields, directory: Path, root: Path, policy: ComparisonPolicy
) -> Candidate:
    """Return one workload of a run; what is wrong with its files goes into `damage`.

    Args:
        node_id: Of the workload.
        record: Its part of `run.json`.
        directory: Of the workload.
        root: The project.
        policy: Under which repeats must agree.

    Raises:
        GoldenError: The record names a golden that is none of a project.
    """
    verdict, golden = record.text("verdict"), record.inner("golden")
    found = Candidate(
        node_id=node_id,
        target=_target_of(golden.values.get("target"), node_id),
        directory=directory,
        verdict=verdict,
        problem=record.text("problem") or None,
        attempts=tuple(_ran(attempt, directory) for attempt in record.rows("attempts")),
        platform=record.text("platform") or None,
        is_expected_to_fail=record.flag("is_expected"),
        is_quarantined=record.inner("quarantine").flag("holds") and verdict != "passed",
    )
    try:
        return _with_values(found, root, policy, golden.inner("digests"))
    except MegatronError as error:
        return replace(found, damage=(str(error),))
    except OSError as error:
        return replace(found, damage=(f"{error.filename or directory}: {error}",))


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, as `run.json` keeps it of what a candidate was made from.

    Raises:
        OSError: It cannot be read.
    """
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _edited(directory: Path, files: Sequence[Path], digests: Fields) -> Iterator[str]:
    """Yield the files that are not as the run left them; a run of an old version noted none."""
    for file in files if digests.values else ():
        if digests.text(file.relative_to(directory).as_posix()) != digest_of(file):
            yield f"{file}: is not what the run measured; accept the run as it was"


def _with_values(
    found: Candidate, root: Path, policy: ComparisonPolicy, digests: Fields
) -> Candidate:
    """Add the measured values."""
    clean = [attempt for attempt in found.attempts if attempt.cause is None]
    path = found.directory / CANDIDATE
    if not clean or not path.is_file():
        return found
    problem = _wrong_attempts(found)
    if problem is not None:
        return replace(found, damage=(problem,))
    golden = read_golden(path)
    files = [_measured(_attempt_dir(found.directory, attempt)) for attempt in clean]
    measured = [read_metrics(file) for file in files]
    repeats: list[MetricMap] = [
        m.metrics if m.generation is None else series_of_generation(m.generation) for m in measured
    ]
    plan = _read(_attempt_dir(found.directory, clean[0]) / "plan.json")
    case = read_case(root / CASES / Path(*found.target.parts[-3:-1]) / "model_config.yaml")
    found = replace(
        found,
        golden=golden,
        repeats=tuple(repeats),
        first_step=_first_step(plan, case),
        last_step=_last_step(plan),
        has_cross_entropy=case.mode is CaseMode.PRETRAINING,
        num_ranks=plan.whole("world_size"),
        is_lightweight=plan.flag("is_lightweight"),
        disagreements=tuple(_disagreements(found.directory)),
        damage=(
            *_falsified(found, golden, repeats, plan),
            *_edited(found.directory, [path, *files], digests),
        ),
    )
    sides = [m.generation or m.metrics for m in measured]
    place = ComparedWorkload(case="/".join(found.target.parts[-3:-1]), platform=found.platform)
    return replace(found, spread=tuple(_spread(case, sides, files, policy.at(place))))


def _spread(
    case: WorkloadCase,
    sides: Sequence[MetricMap | Generation],
    files: Sequence[Path],
    policy: ComparisonPolicy,
) -> Iterator[str]:
    """Compare every repeat but the first with the first, as if that were the golden."""
    first = sides[0]
    stand_in = Golden(
        path=str(files[0]),
        metrics={} if isinstance(first, Generation) else first,
        generation=first if isinstance(first, Generation) else None,
        provenance=Provenance(deterministic=not case.is_nondeterministic),
    )
    for number, side in enumerate(sides[1:], start=2):
        for comparison in compare_in_mode(
            case, stand_in, side, metrics=metric_names_of(case), policy=policy, surroundings=NOWHERE
        ):
            if not comparison.passed:
                yield f"repeat {number}: {render(comparison)}"


def _falsified(
    found: Candidate, golden: Golden, repeats: Sequence[MetricMap], plan: Fields
) -> Iterator[str]:
    """Look for a candidate that is not what the run measured."""
    path = found.directory / CANDIDATE
    if plan.text("node_id") != found.node_id:
        yield f"{found.directory}: plan.json is of {plan.text('node_id')!r}"
    if golden.generation is not None:
        expected: MetricMap = repeats[0]
    else:
        expected = combine(repeats, tuple(golden.metrics))
        for norm in NORMS:  # versions before this one did not keep them
            if norm not in golden.metrics:
                expected.pop(norm, None)
    given = series_in(golden)
    if expected.keys() != given.keys():
        both = sorted(expected.keys() ^ given.keys())
        yield f"{path}: is not what the run measured: {both[0]!r} is only on one side"
        return
    for name, series in given.items():
        other = expected[name]
        if series.steps != other.steps or not all(
            _is_near(a, b) for a, b in zip(series.values, other.values, strict=True)
        ):
            yield f"{path}: {name!r} is not what the run measured; accept the run as it was"
            return


def _is_near(a: float | str, b: float | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return a == b or abs(a - b) <= _ROUNDING * max(abs(a), abs(b))


def _wrong_attempts(found: Candidate) -> str | None:
    """Return why the record is not of what lies in the directory."""
    listed = {_attempt_dir(found.directory, attempt) for attempt in found.attempts}
    there = {path for path in found.directory.glob("repeat_*/attempt_*") if path.is_dir()}
    if listed != there:
        return (
            f"{found.directory}: run.json lists {len(listed)} attempts, the directory holds "
            f"{len(there)}; accept the run as it was"
        )
    return None


def _disagreements(directory: Path) -> Iterator[str]:
    """Yield what disagrees in `comparison.json` that is not the golden."""
    for repeat in _read(directory / "comparison.json").rows("repeats"):
        against = repeat.text("against")
        for one in repeat.rows("comparisons") if against != "golden" else ():
            if not one.flag("passed"):
                text = one.text("text") or one.text("metric")
                yield f"repeat {repeat.whole('repeat')} against the {against}: {text}"


def _ran(attempt: Fields, directory: Path) -> Ran:
    codes = attempt.values.get("exit_codes")
    ran = Ran(
        repeat=attempt.whole("repeat") or 0,
        number=attempt.whole("attempt") or 0,
        exit_codes=tuple(c for c in codes if isinstance(c, int)) if isinstance(codes, list) else (),
        cause=attempt.text("cause") or None,
        signature=attempt.text("signature") or None,
        faults=attempt.inner("health").texts("faults"),
    )
    if ran.cause is not None:
        return ran
    repeated = tuple(_repeated_steps(_attempt_dir(directory, ran)))
    return replace(ran, repeated_steps=repeated)


def _repeated_steps(directory: Path) -> Iterator[str]:
    """Yield which steps the raw files of an attempt hold twice; they need not be there."""
    for phase in sorted(directory.glob("phase_*")):
        lines = phase / "metrics.jsonl"
        if lines.is_file():
            yield from _repeated_lines(lines)
        elif (phase / "tensorboard").is_dir():
            try:
                notes = read_metrics(phase / "tensorboard").notes
            except MegatronError:
                continue  # what could be read is in metrics.json
            yield from (note for note in notes if "are in several files" in note)


def _repeated_lines(path: Path) -> Iterator[str]:
    seen: set[tuple[str, int]] = set()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue  # the reader of metrics has its own word on it
        step = value.get("step") if isinstance(value, dict) else None
        if not isinstance(step, int):
            continue
        for name in value.keys() - {"step"}:
            if (name, step) in seen:
                yield f"{name} has step {step} more than once in {path.name}"
                return
            seen.add((name, step))


def _attempt_dir(directory: Path, attempt: Ran) -> Path:
    return ItemDirs(root=directory).attempt(repeat=attempt.repeat, attempt=attempt.number).root


def _measured(attempt: Path) -> Path:
    """Return the file with what an attempt measured: windows in one, requests, or phase 1."""
    places = (attempt / "metrics.json", attempt / "phase_1" / "generated.json")
    return next((p for p in places if p.is_file()), attempt / "phase_1" / "metrics.json")


def _last_step(plan: Fields) -> int | None:
    until, phases = plan.whole("until_iteration"), plan.rows("phases")
    return until if until is not None or not phases else phases[0].whole("last_iteration")


def _first_step(plan: Fields, case: WorkloadCase) -> int | None:
    """Return where the training begins; None after a checkpoint of unknown length."""
    phases = plan.rows("phases")
    back_to = phases[0].whole("rewind_to") if phases else None
    if back_to is None:
        return None if case.test_type is TestType.FROZEN_START else 1
    return back_to + 1


def _target_of(text: JsonValue, node_id: str) -> PurePosixPath:
    """Return where a golden belongs.

    Raises:
        GoldenError: It is none of the places that goldens of a project have.
    """
    for place in (GOLDENS, CASES):
        prefix = f"{place.as_posix()}/"
        if (
            isinstance(text, str)
            and text.startswith(prefix)
            and ".." not in text
            and _TARGET(text.removeprefix(prefix))
        ):
            return PurePosixPath(text)
    raise GoldenError(
        node_id,
        f"its golden is {text!r}, expected {GOLDENS}/MODEL/CASE/golden_values_ENVIRONMENT_PLATFORM"
        ".json; nothing was written",
    )


def _read(path: Path) -> Fields:
    """Return the JSON object in a file of a run.

    Raises:
        GoldenError: It is not there, or holds something else.
    """
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise GoldenError(
            str(path), "is not there, expected it in the directory of a run"
        ) from None
    except OSError as error:
        raise GoldenError(str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise GoldenError(str(path), f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise GoldenError(str(path), f"holds a {type(value).__name__}, expected an object")
    return Fields(value)


def _name_of(directory: str) -> str:
    """Return the name of a workload's directory, which lies in the run's."""
    name = PurePosixPath(directory).name
    return "none" if name in ("", "..") else name
