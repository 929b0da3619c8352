"""Examines the comparison of layouts: finds planted bugs, leaves clean pairs of layouts alone.

    python tests/traces/run_exam.py [--part tuned|held-out|all] [--sample] [--only NAME,...]
    python tests/traces/run_exam.py --forked [...]

Each question is two rows in the recipe of a scratch project, which `trace compare` trains and
compares as for a user; then what it found is marked. Exits with 1 if a bug was missed or a clean
pair was found to differ. `--forked` records and compares the same without a session, in ranks that
are forked off this process, which takes 2 s of CPU time a question.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: threads of many ranks would spin
sys.path[:0] = [str(HERE), str(HERE.parent / "functional_tests"), str(HERE.parent / "labs")]
gc.disable()  # no search of all that is imported for garbage

from bugs import BUGS  # noqa: E402 # they are found from any directory
from exam_cases import BF16, Bug, Layout, Value  # noqa: E402
from exam_forks import run_ranks, words_of  # noqa: E402
from held_out_bugs import BUGS as HELD_OUT_BUGS  # noqa: E402
from held_out_layouts import LAYOUTS as HELD_OUT_LAYOUTS  # noqa: E402
from layouts import LAYOUTS  # noqa: E402

from pytest_megatron.trace import compare, run  # noqa: E402
from pytest_megatron.trace.equivalence import comparison_to_json  # noqa: E402
from pytest_megatron.trace.settings import VARIABLE  # noqa: E402

gc.enable()
# Of CI: quick ones, with something to find in each phase, and none of those held out.
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
_REFERENCE = "-reference"  # behind the name of a question: the test case of the reference


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
    is_held_out: bool

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
    is_held_out: bool
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
    parser.add_argument("--part", choices=("tuned", "held-out", "all"), default="all")
    parser.add_argument("--sample", action="store_true", help="the few that CI asks")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--kind", choices=("bugs", "layouts", "all"), default="all")
    parser.add_argument("--jobs", default="2", help="comparisons at a time")
    parser.add_argument("--json", type=Path, help="file for the marks")
    parser.add_argument("--keep", type=Path, help="directory for the scratch project")
    parser.add_argument("--forked", action="store_true", help="without a session of pytest")
    asked = parser.parse_args()
    names = set(SAMPLE if asked.sample else filter(None, asked.only.split(",")))
    questions = [
        one
        for one in all_questions()
        if (not names or names & {one.name, one.pair.name})
        and asked.part in ("all", "held-out" if one.is_held_out else "tuned")
        and asked.kind in ("all", "layouts" if one.bug is None else "bugs")
    ]
    with tempfile.TemporaryDirectory() as scratch:
        root = asked.keep or Path(scratch)
        start = time.monotonic()
        way = ask_forked if asked.forked else ask
        marks = way(questions, root, asked.jobs)
        print("\n".join(table(marks)))
        print(f"{len(marks)} rows in {time.monotonic() - start:.0f} s")
        if asked.json is not None:
            asked.json.write_text(json.dumps([asdict(mark) for mark in marks], indent=1) + "\n")
    return 0 if all(mark.is_passed for mark in marks) else 1


def all_questions() -> list[Question]:
    """Make the rows: each bug in each of its dtypes, and each clean pair."""
    questions = []
    for is_held_out, bugs, pairs in (
        (False, BUGS, LAYOUTS),
        (True, HELD_OUT_BUGS, HELD_OUT_LAYOUTS),
    ):
        questions += [
            Question(
                name=f"{bug.name}-{dtype}",
                pair=bug.pair,
                dtype=dtype,
                bug=bug,
                is_held_out=is_held_out,
            )
            for bug in bugs
            for dtype in bug.dtypes
        ]
        questions += [
            Question(
                name=pair.name,
                pair=pair,
                dtype="bf16" if pair.is_bf16 else "fp32",
                bug=None,
                is_held_out=is_held_out,
            )
            for pair in pairs
        ]
    return questions


def ask(questions: Sequence[Question], root: Path, jobs: str) -> list[Mark]:
    """Compare the rows of a scratch project and mark what was found."""
    write_project(questions, root)
    with ThreadPoolExecutor(int(jobs)) as pool:
        return list(pool.map(lambda question: _ask_one_session(question, root), questions))


def _ask_one_session(question: Question, root: Path) -> Mark:
    """Compare two rows as a user does."""
    rows = [f"recipes/exam.yaml::{question.name}{end}[dev-cpu]" for end in (_REFERENCE, "")]
    words = [str(Path(sys.executable).with_name("pytest-megatron")), "trace", "compare", *rows]
    env = dict(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # some images set it; every process compiles anew
    file = root / f"{question.name}.json"
    with (root / f"{question.name}.txt").open("w") as said:
        done = subprocess.run(
            [*words, "--format", "json"],
            cwd=root,
            env=env,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            check=False,
        )
    if done.stdout:
        (found,) = json.loads(done.stdout)["traces"]
        file.write_text(json.dumps(found["comparison"]))
    return mark(question, file)


def ask_forked(questions: Sequence[Question], root: Path, _: str) -> list[Mark]:
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


def write_project(questions: Sequence[Question], root: Path) -> None:
    """Write the scratch project: its program, its cases and its recipe."""
    (root / "recipes").mkdir(parents=True, exist_ok=True)
    (root / "pytest.ini").write_text("[pytest]\n")
    program = root / "buggy_train.py"
    program.unlink(missing_ok=True)
    program.symlink_to(HERE / "buggy_train.py")
    rows = [
        row
        for question in questions
        for row in (
            (question.name, question.candidate, question.pair.ranks),
            (f"{question.name}{_REFERENCE}", question.reference, question.pair.reference_ranks),
        )
    ]
    for name, arguments, _ in rows:
        case = root / "tests/functional_tests/test_cases/exam" / name
        case.mkdir(parents=True, exist_ok=True)
        config = {"MODEL_ARGS": arguments, "TEST_TYPE": "regular"}
        (case / "model_config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    recipe = {
        "type": "basic",
        "format_version": 1,
        "maintainers": ["pytest-megatron"],
        "loggers": ["stdout"],
        "spec": {
            "name": "{test_case}_{environment}_{platforms}",
            "model": "exam",
            "nodes": 1,
            "gpus": 1,
            "n_repeat": 1,
            "time_limit": 600,
            "platforms": "cpu",
            "training_script_path": "buggy_train.py",
        },
        "products": [
            {
                "test_case": [name],
                "products": [
                    {
                        "environment": ["dev"],
                        "scope": ["nightly"],
                        "platforms": ["cpu"],
                        "gpus": [ranks],
                        "trace_steps": [STEPS],
                    }
                ],
            }
            for name, _, ranks in rows
        ],
    }
    (root / "recipes" / "exam.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


def mark(question: Question, file: Path) -> Mark:
    """Read what was made of a row."""
    found = json.loads(file.read_text()) if file.exists() else {"verdict": "missing"}
    first = next(iter(found.get("divergences", [])), None)
    bug = question.bug
    return Mark(
        name=question.name,
        dtype=question.dtype,
        is_bug=bug is not None,
        is_held_out=question.is_held_out,
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
    """Word the marks: the sums, by part and dtype, then what went wrong."""
    yield "| part | dtype | found / bugs | right module | in step 1 | false alarms / clean |"
    yield "|---|---|---|---|---|---|"
    for part, is_held_out in (("tuned", False), ("held out", True)):
        for dtype in ("fp32", "bf16"):
            of = [one for one in marks if (one.is_held_out, one.dtype) == (is_held_out, dtype)]
            bugs = [one for one in of if one.is_bug]
            found = [one for one in bugs if one.is_passed]
            clean = [one for one in of if not one.is_bug]
            alarms = [one for one in clean if not one.is_passed]
            right = sum(one.is_right for one in found)
            early = sum(one.step == 1 for one in found)
            if of:
                yield (
                    f"| {part} | {dtype} | {len(found)} / {len(bugs)} | {right} | {early}"
                    f" | {len(alarms)} / {len(clean)} |"
                )
    for one in marks:
        word = "ok" if one.is_passed else "MISSED" if one.is_bug else "FALSE ALARM"
        if one.is_bug and one.is_passed and not one.is_right:
            word = "wrong module"
        yield f"{word}: {one.name}: {one.verdict} {one.first}"


if __name__ == "__main__":
    sys.exit(main())
