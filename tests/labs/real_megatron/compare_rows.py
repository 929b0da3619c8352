"""Compare plans with what Megatron-LM's driver starts: `python compare_rows.py CHECKOUT OUT`.

Each row of Megatron-LM's recipes that calls its functional driver is run by that driver, in a
scratch copy, with programs in place of the launchers that write down their words and environment.
The same row is planned as a native one. Neither GPU nor network is needed. Rows whose scripts
differ in nothing but the name of the golden are run once. The driver's yq is the package yaqpy, in
one process: to start a program for each of its calls takes longer than everything else.
"""

from __future__ import annotations

import argparse
import collections
import io
import os
import re
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override
from yaqpy.cli.main import main as yq

from pytest_megatron.errors import MegatronError, RecipeError
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.workloads.recipe.case import WorkloadCase, case_path, read_case
from pytest_megatron.workloads.recipe.load import load_recipe
from pytest_megatron.workloads.recipe.megatron_row import native_rows
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import Setting, plan_attempt

UTILS = "tests/functional_tests/shell_test_utils"
TAKEN = (UTILS, "tests/functional_tests/test_cases", "tests/test_utils/recipes")
RECIPES = "tests/test_utils/recipes"
DRIVER = f"{UTILS}/run_ci_test.sh"
TYPO = "dg  x_h100"  # the platform of one row
# Words of the driver's launchers before the program: eight options and their values.
NUM_LAUNCHER_WORDS = 16
FT_RESTARTS = "--max-restarts=3"
# In the order in which values stand for names where two are the same.
PLACES = (
    "TENSORBOARD_PATH", "INFERENCE_OUTPUT_PATH", "CHECKPOINT_SAVE_PATH", "CHECKPOINT_LOAD_PATH",
    "DATA_CACHE_PATH", "LOG_DIR", "OUTPUT_PATH", "DATA_PATH",
)  # fmt: skip
LIMIT_S = 120
RECORDER = """\
#!/bin/bash
{skip}
at=$LAB_RECORDS/$(ls "$LAB_RECORDS" | wc -l); mkdir "$at"
printf '%s\\0' "$@" >"$at/words"; env -0 >"$at/env"
"""
UV = """\
#!/bin/bash
shift; while [[ $1 == --* ]]; do shift; done
[[ "$1 $2 $3" == "python -m torch.distributed.run" ]] || exit 0
shift 3
"""
PRELUDE = """\
function /usr/local/bin/yq {{
  local body= status
  if [[ ! -f ${{@: -1}} ]]; then body=$(cat); fi
  exec {{lab}}<>/dev/tcp/127.0.0.1/{port}
  printf '%s\\0' $# "$PWD" "${{KEY:-}}" "$@" "$body" >&$lab
  IFS= read -r status <&$lab; cat <&$lab; exec {{lab}}>&-
  return "$status"
}}
export -f /usr/local/bin/yq
"""


# --- what the driver starts -------------------------------------------------------------------


class YqHandler(socketserver.StreamRequestHandler):
    """Answers one call of yq."""

    _lock = threading.Lock()

    def _field(self) -> str:
        found = bytearray()
        while (byte := self.rfile.read(1)) not in (b"\0", b""):
            found += byte
        return found.decode()

    @override
    def handle(self) -> None:
        """Run yq."""
        count, cwd, key = int(self._field()), Path(self._field()), self._field()
        words = [self._field() for _ in range(count)]
        body = self._field()
        words[1:] = [str(cwd / w) if (cwd / w).is_file() else w for w in words[1:]]
        out = io.StringIO()
        with self._lock:
            os.environ["KEY"] = key  # the one variable that the driver's expressions read
            stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(body.encode()))
            try:
                status = yq(words, stdout=out, stderr=io.StringIO())
            finally:
                sys.stdin = stdin
        self.wfile.write(f"{status}\n{out.getvalue()}".encode())


@dataclass(frozen=True)
class Start:
    """A start of the program: ranks, words and environment."""

    num_ranks: int
    num_nodes: int
    words: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class Copy:
    """The scratch copy of the checkout, and what the driver finds."""

    tree: Path
    out: Path
    port: int

    @property
    def bin(self) -> Path:
        """The recorders."""
        return self.out / "bin"

    @property
    def artifacts(self) -> str:
        """Stands in for `/mnt/artifacts`."""
        return str(self.out / "artifacts")

    def env(self, records: Path) -> dict[str, str]:
        """Return the environment of the driver."""
        return {
            "PATH": f"{self.bin}:{os.defpath}",
            "HOME": str(self.out / "home"),
            "BASH_ENV": str(self.out / "prelude.sh"),
            "LAB_RECORDS": str(records),
            "LC_ALL": "C.UTF-8",
        }


def make_copy(checkout: Path, out: Path, port: int) -> Copy:
    """Copy what is needed of a checkout, with recorders in place of launchers."""
    tree = out / "tree"
    tree.mkdir(parents=True)
    archive = subprocess.run(
        ("git", "-C", checkout, "archive", "HEAD", *TAKEN, ":!*golden_values*"),
        capture_output=True,
        check=True,
    )
    subprocess.run(("tar", "x", "-C", tree), input=archive.stdout, check=True)
    copy = Copy(tree, out, port)
    driver = tree / DRIVER
    driver.write_text(driver.read_text().replace("/tmp/checkpoints", f"{out}/tmp_checkpoints"))
    for path in (tree / "tests/functional_tests/test_cases").rglob("model_config.yaml"):
        path.write_text(path.read_text().replace("/opt/megatron-lm", str(tree)))
    for name in ("home", "artifacts", "bin", "records", "tmp_checkpoints"):
        (out / name).mkdir()
    (out / "artifacts" / "a_file").touch()
    (out / "prelude.sh").write_text(PRELUDE.format(port=port))
    programs = {
        "ft_launcher": RECORDER.format(skip=""),
        "yq": '#!/bin/bash\n/usr/local/bin/yq "$@"\n',
        "uv": UV + RECORDER.format(skip="").partition("\n")[2],
    }
    programs |= dict.fromkeys(
        ("pip", "python", "python3", "torchrun", "nemo", "sleep"), "#!/bin/sh\nexit 0\n"
    )
    for name, text in programs.items():
        path = copy.bin / name
        path.write_text(text)
        path.chmod(0o755)
    return copy


def script_of(row: Workload, copy: Copy) -> str:
    """Return the row's script as the driver's users run it, with directories of ours."""
    assert row.script is not None
    assets, artifacts = (str(copy.out / "assets"), str(copy.out / "saved"))
    text = row.render(
        row.script, assets_dir=assets, artifacts_dir=artifacts, n_repeat=1, name=row.name
    )
    places = {
        "/opt/megatron-lm": str(copy.tree),
        "/mnt/artifacts": copy.artifacts,
        "/lustre": f"{copy.out}/lustre",
        "/workspace": f"{copy.out}/workspace",
        "/opt/NeMo": str(copy.tree),
        "/tmp/checkpoints": f"{copy.out}/tmp_checkpoints",
    }
    for there, here in places.items():
        text = re.sub(rf"{there}(?![\w-])", here, text)
    return text


def driven(script: str, copy: Copy, number: int) -> tuple[list[Start], str]:
    """Run a script; return what it started and the end of what it printed."""
    records = copy.out / "records" / str(number)
    records.mkdir()
    try:
        done = subprocess.run(
            ("bash", "-c", script),
            cwd=copy.tree,
            env=copy.env(records),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
        said = done.stdout[-600:] + done.stderr[-600:]
    except subprocess.TimeoutExpired:
        said = f"not within {LIMIT_S} s"
    found = []
    for at in sorted(records.iterdir(), key=lambda p: int(p.name)):
        words = (at / "words").read_text().split("\0")[:-1]
        if words[0] != "--nproc_per_node":
            continue  # of a BEFORE_SCRIPT
        env = dict(
            e.partition("=")[::2] for e in (at / "env").read_text(errors="replace").split("\0") if e
        )
        own = words[NUM_LAUNCHER_WORDS:]
        own = own[1:] if own[:1] == [FT_RESTARTS] else own
        found.append(Start(int(words[1]), int(words[3]), tuple(own), env))
    return found, said


# --- what the plan starts ---------------------------------------------------------------------


def planned(row: Workload, case: WorkloadCase, script: str, copy: Copy) -> list[Start]:
    """Return what the row starts natively.

    Raises:
        MegatronError: It cannot be planned, or only bash can run it.
    """
    doubled = script.replace("{", "{{").replace("}", "}}")  # it is filled in
    env = {"PYTEST_MEGATRON_LAUNCHER": "torchrun", "HOME": str(copy.out / "home")}
    (native,) = native_rows([replace(row, script=doubled)], env, copy.tree)
    if native.by_bash is not None:
        raise RecipeError(row.where, f"run by bash: {native.by_bash}")
    setting = Setting(
        root=copy.tree, env=env, tee_ranks=None, is_lightweight=False, python="python"
    )
    plan = plan_attempt(native, case, AttemptDirs(root=copy.out / "attempt"), setting, repeat=1)
    return [
        Start(
            phase.world_size // phase.num_nodes, phase.num_nodes, phase.start.program, phase.own_env
        )
        for phase in plan.phases
        if phase.start is not None
    ]


# --- comparison -------------------------------------------------------------------------------


def general(start: Start) -> list[str]:
    """Return the words with the names of directories in place of these."""
    found = []
    for word in start.words:
        text = word
        for name in PLACES:
            value = start.env.get(name, "").rstrip("/")
            if value.startswith("/"):
                text = re.sub(rf"{re.escape(value)}(?=/|$)", f"${name}", text)
        found.append(re.sub("/+", "/", text).rstrip("/"))
    return found


def settings(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return words as flags, each with its values, in their order."""
    found: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return [tuple(f) for f in found if f]


def last_of_each(words: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return flags with the last values of each, which count, in its first place."""
    return list({setting[0]: setting for setting in words}.values())


def differences(theirs: Start, ours: Start) -> Iterator[str]:
    """Yield what differs, each as a line that says nothing of the row."""
    if theirs.num_nodes != ours.num_nodes:
        yield "nodes"
    if theirs.num_ranks != ours.num_ranks:
        yield f"ranks: the driver {theirs.num_ranks}, the plan {ours.num_ranks}"
    one, two = settings(general(theirs)), settings(general(ours))
    once = last_of_each(one)
    if once != one and last_of_each(two) == two:
        yield "a case has an argument twice: both times there, the last here"
        one = once
    if one != two:
        left, right = [s for s in one if s not in two], [s for s in two if s not in one]
        yield from (f"argv: only the driver: {' '.join(s)[:100]}" for s in left)
        yield from (f"argv: only the plan: {' '.join(s)[:100]}" for s in right)
        if not left and not right:
            yield (
                "argv: the order"
                if sorted(one) == sorted(two)
                else "argv: how often a flag is there"
            )
    ignored = {
        "BASH_ENV",
        "LAB_RECORDS",
        "LC_ALL",
        "HOME",
        "PATH",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "YQ",
    }
    for name in sorted((theirs.env.keys() | ours.env.keys()) - ignored - set(PLACES)):
        if name.startswith("BASH_FUNC"):
            continue
        x, y = theirs.env.get(name), ours.env.get(name)
        x = x.rstrip(":") if x and name == "PYTHONPATH" else x  # the working directory, twice
        if x != y:
            what = (
                "only the driver"
                if y is None
                else "only the plan"
                if x is None
                else f"{x!r} there, {y!r} here"
            )
            yield f"environment: {name}: {what}"


def rows_of(copy: Copy) -> list[Workload]:
    """Return all rows of the recipes."""
    found: list[Workload] = []
    for path in sorted((copy.tree / RECIPES).rglob("*.yaml")):
        path.write_text(path.read_text().replace(TYPO, "dgx_h100"))
        found += load_recipe(path)
    return found


def report(title: str, rows: Mapping[str, Iterable[str]]) -> None:
    """Print how many rows have what, the most frequent first."""
    print(f"\n{title}")
    for what, names in sorted(rows.items(), key=lambda item: -len(set(item[1]))):
        print(f"{len(set(names)):5}  {what}  e.g. {next(iter(names))}")


def main() -> int:
    """Compare all rows; the exit code says nothing of differences, which are printed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("out", type=Path, help="made here; must not be there yet")
    parser.add_argument("--rows", default="", help="regular expression for names of rows")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), YqHandler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        compare(
            make_copy(args.checkout, args.out.resolve(), server.server_address[1]),
            args.rows,
            args.jobs,
        )
        server.shutdown()
    return 0


def compare(copy: Copy, pattern: str, jobs: int) -> None:
    """Run and plan every row, and print the figures."""
    rows = [r for r in rows_of(copy) if re.search(pattern, f"{r.file.stem}::{r.item_name}")]
    of_driver = [r for r in rows if r.script is not None and DRIVER in r.script]
    scripts = {id(r): script_of(r, copy) for r in of_driver}
    keys = {id(r): re.sub(r"golden_values_[\w]*|NAME=.*", "", scripts[id(r)]) for r in of_driver}
    by_case: dict[str, list[tuple[int, str]]] = collections.defaultdict(list)
    for number, (key, script) in enumerate(
        {keys[id(r)]: scripts[id(r)] for r in of_driver}.items()
    ):
        by_case[re.search(r"test_cases/\S+", script)[0]].append((number, key))  # type: ignore[index]
    text_of = {keys[id(r)]: scripts[id(r)] for r in of_driver}
    results: dict[str, tuple[list[Start], str]] = {}

    def run_case(
        some: list[tuple[int, str]],
    ) -> None:  # one after the other: the driver writes to the case
        for number, key in some:
            results[key] = driven(text_of[key], copy, number)
            print(
                f"\r{len(results)} of {len(text_of)} scripts", end="", file=sys.stderr, flush=True
            )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_case, by_case.values()))
    found: dict[str, list[str]] = collections.defaultdict(list)
    refused: dict[str, list[str]] = collections.defaultdict(list)
    num_same = num_argv = num_compared = 0
    for row in of_driver:
        name = f"{row.file.stem}::{row.item_name}"
        theirs, said = results[keys[id(row)]]
        case = read_case(case_path(copy.tree, row))
        try:
            ours = planned(row, case, scripts[id(row)], copy)
        except MegatronError as error:
            refused[re.sub(r"\S*/|:\d+", "", str(error))[:150]].append(name)
            continue
        if case.test_type.value == "release":
            ours = ours[:1]
        if not theirs:
            refused[f"the driver started nothing: {said[-150:]!r}"].append(name)
            continue
        num_compared += 1
        lines = {line for x, y in zip(theirs, ours, strict=False) for line in differences(x, y)}
        if len(theirs) != len(ours):
            lines.add(f"starts: the driver {len(theirs)}, the plan {len(ours)}")
        num_argv += not any(line.startswith(("argv", "starts")) for line in lines)
        num_same += not lines
        for line in lines:
            found[line].append(name)
    driven_rows = f"{len(of_driver)} of them call the functional driver"
    print(f"\n{len(rows)} rows, {driven_rows}, by {len(text_of)} scripts that differ")
    print(f"{num_compared} compared: {num_argv} start the program with the same words,")
    print(f"{num_same} also with the same ranks and environment")
    report("Not compared:", refused)
    report("What differs:", found)


if __name__ == "__main__":
    sys.exit(main())
