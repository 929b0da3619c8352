"""Examines the comparison of layouts: finds planted bugs, leaves clean pairs of layouts alone.

    python tests/traces/run_exam.py [--sample] [--only NAME,...]

Each question is recorded and compared as `trace compare` does it, in ranks that are forked off this
process, which takes 2 s of CPU time; then what was found is marked. Exits with 1 if a bug was
missed or a clean pair was found to differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: threads of many ranks would spin
sys.path[:0] = [str(HERE), str(HERE.parent / "functional_tests"), str(HERE.parent / "labs")]
gc.disable()  # no search of all that is imported for garbage

from bugs import BUGS  # noqa: E402 # they are found from any directory
from exam_cases import BF16, Bug, Layout, Value  # noqa: E402
from exam_forks import run_ranks, words_of  # noqa: E402
from layouts import LAYOUTS  # noqa: E402

from pytest_megatron.trace import compare, run  # noqa: E402
from pytest_megatron.trace.equivalence import comparison_to_json  # noqa: E402
from pytest_megatron.trace.settings import VARIABLE  # noqa: E402

gc.enable()
# Of CI: quick ones, with something to find in each phase.
SAMPLE = (
    "row-parallel-unreduced-fp32",
    "gated-halves-swapped-fp32",
    "wrong-expert-offset-fp32",
    "column-dgrad-unreduced-fp32",
    "sequence-dgrad-unsummed-fp32",
    "dp-sum-for-mean-fp32",
    "dp-grads-unreduced-fp32",
    "main-params-stale-one-rank-bf16",
    "gpt-dp2-sharded",
    "llama-pp2",
    "gpt-tp2",
    "bf16-gpt-tp2-sp",
)
STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question of the exam.

    Attributes:
        name: Of the test case of the candidate.
        bug: Planted in the candidate; None in a clean pair.
    """

    name: str
    pair: Layout
    dtype: str
    bug: Bug | None

    @property
    def extra(self) -> dict[str, Value]:
        """What MODEL_ARGS of both sides have beyond the pair's."""
        return dict(BF16) if self.bug is not None and self.dtype == "bf16" else {}

    @property
    def candidate(self) -> dict[str, Value]:
        """MODEL_ARGS of the candidate, with the bug."""
        planted = "none" if self.bug is None else self.bug.name
        return {**self.pair.candidate_arguments, **self.extra, "--exam-bug": planted}

    @property
    def reference(self) -> dict[str, Value]:
        """MODEL_ARGS of the reference."""
        return {**self.pair.reference_arguments, **self.extra, "--exam-bug": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What the product made of a row.

    Attributes:
        verdict: Of the comparison; `missing` where there is none.
        first: The first divergence in words.
        is_right: It names the bug rightly.
        step: Of the first divergence.
    """

    name: str
    dtype: str
    is_bug: bool
    verdict: str
    first: str
    is_right: bool
    step: int | None

    @property
    def is_passed(self) -> bool:
        """Whether a bug was found, or a clean pair was found to be equal."""
        return self.verdict == ("different" if self.is_bug else "equal")


def main() -> int:
    """Ask the questions that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", action="store_true", help="the few that CI asks")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--keep", type=Path, help="directory for the traces")
    asked = parser.parse_args()
    names = set(SAMPLE if asked.sample else filter(None, asked.only.split(",")))
    questions = [one for one in all_questions() if (not names or names & {one.name, one.pair.name})]
    with tempfile.TemporaryDirectory() as scratch:
        root = asked.keep or Path(scratch)
        start = time.monotonic()
        marks = ask(questions, root)
        print("\n".join(table(marks)))
        print(f"{len(marks)} rows in {time.monotonic() - start:.0f} s")
    return 0 if all(mark.is_passed for mark in marks) else 1


def all_questions() -> list[Question]:
    """Make the rows: each bug in each of its dtypes, and each clean pair."""
    planted = [
        Question(name=f"{bug.name}-{dtype}", pair=bug.pair, dtype=dtype, bug=bug)
        for bug in BUGS
        for dtype in bug.dtypes
    ]
    clean = [
        Question(name=pair.name, pair=pair, dtype="bf16" if pair.is_bf16 else "fp32", bug=None)
        for pair in LAYOUTS
    ]
    return planted + clean


def ask(questions: Sequence[Question], root: Path) -> list[Mark]:
    """Record and compare each row in ranks that are forked off this process."""
    references: dict[tuple[str, ...], Path] = {}
    return [_ask_one(question, root / question.name, references) for question in questions]


def _ask_one(question: Question, root: Path, references: dict[tuple[str, ...], Path]) -> Mark:
    """Record the three phases of a row as its session does, then compare them.

    Args:
        references: Where the reference of earlier rows is, by its arguments: it is not recorded
            again for one that is the same.
    """
    candidate, reference = question.candidate, question.reference
    alone = question.pair.reference_ranks
    key = (str(alone), *words_of(dict(sorted(reference.items()))))
    shared = references.setdefault(key, root)
    weights = shared / "weights"
    loads: dict[str, object] = {"weights_from": weights}
    phases: list[tuple[Path, dict[str, Value], int, dict[str, object]]] = [
        (root / "reference", reference, alone, {"weights_to": weights}),
        (root / "noise", reference, alone, {**loads, "noise_seed": 1}),
        (root / "candidate", candidate, question.pair.ranks, loads),
    ]
    output = root / "equivalence.json"
    for directory, arguments, ranks, given in phases if shared == root else phases[2:]:
        directory.mkdir(parents=True)
        trace = {"directory": directory, "steps": STEPS, "values": "full", **given}

        def train(_: int, arguments: dict[str, Value] = arguments, trace: object = trace) -> None:
            os.environ[VARIABLE] = json.dumps(trace, default=str)
            words = [*words_of(arguments), "--exit-interval", str(STEPS)]
            sys.argv = ["run.py", str(HERE / "buggy_train.py"), *words]
            run.main()

        problem = run_ranks(ranks, train, directory)
        if problem:
            problem = f"{directory.name}: {problem}"
            output.write_text(json.dumps({"verdict": "missing", "problem": problem}))
            return mark(question, output)

    def judge(_: int) -> None:
        found = compare.compare(shared / "reference", root / "candidate", shared / "noise")
        output.write_text(json.dumps(comparison_to_json(found)))

    run_ranks(1, judge, root)
    return mark(question, output)


def mark(question: Question, file: Path) -> Mark:
    """Read what was made of a row."""
    found = json.loads(file.read_text()) if file.exists() else {"verdict": "missing"}
    first = next(iter(found.get("divergences", [])), None)
    bug = question.bug
    return Mark(
        name=question.name,
        dtype=question.dtype,
        is_bug=bug is not None,
        verdict=found["verdict"],
        first=str(found.get("problem") or "") if first is None else in_words(first),
        is_right=bug is not None
        and first is not None
        and any(
            one.is_right(first["phase"], first["module"], first["tensor"]) for one in bug.answers
        ),
        step=None if first is None else first["step"],
    )


def in_words(first: dict[str, Value]) -> str:
    """Name a first divergence on one line."""
    keys = ("step", "microbatch", "phase", "module", "tensor", "ranks", "kind")
    sizes = {name: first[name] for name in ("error", "limit")}
    words = [f"{name} {size:.1e}" for name, size in sizes.items() if isinstance(size, float)]
    return " ".join(str(first[key]) for key in keys) + f" ({', '.join(words)})"


def table(marks: Sequence[Mark]) -> Iterable[str]:
    """Word the marks: the sums, by dtype, then what went wrong."""
    yield "| dtype | found / bugs | right module | in step 1 | false alarms / clean |"
    yield "|---|---|---|---|---|"
    for dtype in ("fp32", "bf16"):
        of = [one for one in marks if one.dtype == dtype]
        bugs = [one for one in of if one.is_bug]
        found = [one for one in bugs if one.is_passed]
        clean = [one for one in of if not one.is_bug]
        alarms = [one for one in clean if not one.is_passed]
        right = sum(one.is_right for one in found)
        early = sum(one.step == 1 for one in found)
        if of:
            yield (
                f"| {dtype} | {len(found)} / {len(bugs)} | {right} | {early}"
                f" | {len(alarms)} / {len(clean)} |"
            )
    for one in marks:
        word = "ok" if one.is_passed else "MISSED" if one.is_bug else "FALSE ALARM"
        if one.is_bug and one.is_passed and not one.is_right:
            word = "wrong module"
        yield f"{word}: {one.name}: {one.verdict} {one.first}"


if __name__ == "__main__":
    sys.exit(main())
