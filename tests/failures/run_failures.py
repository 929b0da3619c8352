"""Stages real failures at four ranks and asks `pytest-megatron triage` what they were.

    python tests/failures/run_failures.py [--device cuda] [--only ID,...] [--jobs 2] [--keep DIR]

Every case runs real processes; its expectation (family, root rank, genuine or transient) stands
beside it in `failure_cases.py`. Prints a line for each case and a table of the scores. Exits with 1
where a score is below the aim: family and root rank 95 %, no genuine failure called transient, no
sound run called a failure. With `--keep` all logs stay there with `results.json`, and
`--judge-only` judges them once more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from failure_cases import CASES, Case
from failure_score import Judged, judge, table
from failure_stages import Stage, Staged, full_disk, run_stage


def main() -> int:
    """Stage, judge, print."""
    asked = _parse()
    cases = _choose(asked)
    root = asked.keep or Path(tempfile.mkdtemp(prefix="failures-"))
    root.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with full_disk() as disk, ThreadPoolExecutor(asked.jobs) as pool:
        stage = Stage(
            root=root.resolve(), device=asked.device, num_ranks=asked.ranks, full_disk=disk
        )
        if disk is None and any(case.needs_full_disk for case in cases):
            print("left out: cases that need a full disk, as this user may not mount one")
            cases = [case for case in cases if not case.needs_full_disk]

        def run(case: Case) -> Judged:
            staged = _kept(case, root) if asked.judge_only else run_stage(case, stage)
            judged = (
                judge(case, staged) if not asked.stage_only else Judged(case=case, staged=staged)
            )
            print(judged.line, flush=True)
            return judged

        results = list(pool.map(run, cases))
    is_good = True
    if not asked.stage_only:
        text, is_good = table(results)
        print(text)
    print(f"{len(results)} cases in {time.monotonic() - started:.0f} s; logs: {root}")
    results_file = root / "results.json"
    results_file.write_text(json.dumps([result.as_json() for result in results], indent=1))
    if is_good and asked.keep is None:
        shutil.rmtree(root)
    return 0 if is_good else 1


def _kept(case: Case, root: Path) -> Staged:
    """Return what an earlier run left."""
    home = (root / case.id).resolve()
    packed = home / "logs.zip"
    evidence = packed if packed.exists() else home / "logs"
    return Staged(evidence=evidence, returncode=None, num_left=0, duration_s=0.0)


def _choose(asked: argparse.Namespace) -> list[Case]:
    names: Sequence[str] = asked.only
    unknown = set(names) - {case.id for case in CASES}
    if unknown:
        known = ", ".join(sorted(case.id for case in CASES))
        raise SystemExit(f"--only: unknown {', '.join(sorted(unknown))}, expected of {known}")
    return [c for c in CASES if asked.device in c.devices and (not names or c.id in names)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    option = parser.add_argument
    option("--only", type=lambda text: text.split(","), default=[], help="ids, with commas")
    option("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: NCCL")
    option("--ranks", type=int, default=4, help="at least 4: guilty ranks are 0 to 3")
    option("--jobs", type=int, default=2, help="cases at one time")
    option("--keep", type=Path, help="where logs and results.json stay")
    option("--stage-only", action="store_true", help="judge nothing")
    option("--judge-only", action="store_true", help="judge what an earlier run left in --keep")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
