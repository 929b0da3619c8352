"""Run the rows of `make_tree.py` as their users do: `python run_rows.py TREE DATA OUT`.

One line a step: what ran, right or WRONG, exit code, seconds, and what pytest said about the row.
The logs are in OUT. A step's processes have its name in their environment: those that it leaves
are found by it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).parent
RECIPES = Path("tests/test_utils/recipes")
CASES = Path("tests/functional_tests/test_cases")
MARK = "LAB_STEP"
KEPT = ("PYTEST_MEGATRON_LAUNCHER",)
POLL_S = 0.25
OFF_BY = 1.0003
# Arguments of a policy's case that a plain training does not know or need.
OF_RL = re.compile(r"--(rl|grpo|langrl|perform-rl|inference|load|finetune|use-checkpoint-args)")
FIRST = ("record", "check")
WITHOUT_GOLDEN = ("consistency", "grpo")
WITH_ALL = ("dense", "resume", "moe")  # rows that the further steps are run for
HANG_LIMIT_S = 60
INTERRUPT_LIMIT_S = 60


@dataclass
class Lab:
    """Where everything is, and how long a step may take."""

    tree: Path
    data: Path
    out: Path
    limit_s: float
    no_gpu: bool
    printing: threading.Lock

    def env(self, step: str, **more: str) -> dict[str, str]:
        """Return the environment of a step."""
        env = {k: v for k, v in os.environ.items() if k in KEPT or not k.startswith("PYTEST_")}
        env |= {"DATA_PATH": str(self.data), MARK: f"{os.getpid()}-{step}", "PYTHONUNBUFFERED": "1"}
        env["GPUS_PER_NODE"] = "1"  # of rows whose script leaves it to the driver, which takes 8
        env |= {"PYTEST_MEGATRON_LEASES": str(self.out / "leases" / step), "NCCL_NVLS_ENABLE": "0"}
        if self.no_gpu:
            env["PYTHONPATH"] = os.pathsep.join((str(HERE / "no_gpu"), env.get("PYTHONPATH", "")))
            env |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        return env | more

    def case(self, name: str) -> Path:
        """Return the file of a row's case."""
        (found,) = self.tree.glob(f"{CASES}/*/{name}/model_config.yaml")
        return found

    def platform(self, name: str) -> str:
        """Return the platform that the recipe names."""
        text = (self.tree / RECIPES / f"{name}.yaml").read_text()
        return str(yaml.safe_load(text)["spec"]["platforms"])

    def say(self, text: str) -> None:
        """Print a line."""
        with self.printing:
            print(text, flush=True)


# --- what is left behind ----------------------------------------------------------------------


def marked(step: str) -> dict[int, str]:
    """Return the processes whose environment names the step."""
    mark = f"{MARK}={os.getpid()}-{step}".encode()
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                words = (
                    (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                found[int(path.name)] = words[:80]
    return found


def left(lab: Lab, step: str) -> list[str]:
    """Return the processes and held leases of a step, and end the processes."""
    found = [f"process {pid}: {words}" for pid, words in marked(step).items()]
    for pid in marked(step):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for path in (lab.out / "leases" / step).rglob("*"):
        if path.is_file():
            with path.open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(f"lease {path.name}")
    return found


# --- running a step ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int | str
    seconds: float
    output: str


def run(
    lab: Lab,
    step: str,
    words: list[str],
    env: dict[str, str],
    limit_s: float,
    meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> Done:
    """Run a command in the tree."""
    log = lab.out / f"{step}.txt"
    begun = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            words,
            cwd=lab.tree,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        if meanwhile is not None:
            meanwhile(process)
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            code = f"none in {limit_s:g} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
    return Done(code, time.monotonic() - begun, log.read_text(errors="replace"))


def headline(output: str) -> str:
    """Return what pytest says about the row, without colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    lines = re.findall(
        r"^(?:passed|failed|broken|flaky|skipped|interrupted|xfailed) .*", plain, flags=re.MULTILINE
    )
    rest = [line for line in plain.splitlines() if line.strip()]
    return (lines or rest or [""])[-1][:200]


def judge(lab: Lab, step: str, done: Done, wanted: int, text: str) -> bool:
    """Print the step's line; true if it is right."""
    said, wrong = headline(done.output), left(lab, step)
    if done.code != wanted:
        wrong.append(f"wanted exit {wanted}")
    if not re.search(text, said):
        wrong.append(f"wanted {text!r}")
    result = f"WRONG ({'; '.join(wrong)})" if wrong else "right"
    lab.say(f"{step}: {result}, exit {done.code}, {done.seconds:.0f} s: {said}")
    return not wrong


def pytest_words(lab: Lab, name: str, *more: str, recipe: str = "") -> list[str]:
    """Return the command that a user types."""
    return [
        sys.executable, "-m", "pytest", "-p", "megatron", "-q", "-p", "no:cacheprovider",
        "--color=no", "--platform", lab.platform(name), "--tee-ranks", "none", "--allow-dirty",
        "--run-dir", str(lab.out / "runs" / f"{name}-{time.monotonic_ns()}"),
        str(RECIPES / f"{recipe or name}.yaml"), *more,
    ]  # fmt: skip


@contextlib.contextmanager
def replaced(path: Path, text: str) -> Iterator[None]:
    """Give a file another text for a while."""
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def goldens(lab: Lab, name: str) -> list[Path]:
    """Return the goldens of a row."""
    found = lab.tree.glob(f"golden_values/*/{name}/**/*.json")
    return sorted({*found, *lab.tree.glob(f"{CASES}/*/{name}/golden*.json")})


def is_without_golden(name: str) -> bool:
    """Return if a row is judged without one: by checkpoints, or with SKIP_PYTEST."""
    return name.split("_")[1] in WITHOUT_GOLDEN


def off_by_a_little(text: str) -> str:
    """Change the loss of a step in the middle by 3e-4 of it."""
    golden = json.loads(text)
    values = golden["lm loss"]["values"]
    step = sorted(values, key=int)[len(values) // 2]
    values[step] = float(values[step]) * OFF_BY
    return json.dumps(golden)


def record(lab: Lab, name: str, step: str) -> bool:
    """Make the first golden."""
    for path in goldens(lab, name):
        path.unlink()
    words = pytest_words(lab, name, "--golden", "record", "--golden-reason", "the lab's first")
    done = run(lab, step, words, lab.env(step), lab.limit_s)
    is_right = judge(lab, step, done, 0, "^passed")
    if is_right and not is_without_golden(name) and not goldens(lab, name):
        lab.say(f"{step}: WRONG (passed, and no golden was written)")
        return False
    return is_right


def check(lab: Lab, name: str, step: str) -> bool:
    """Run once more."""
    text = "^passed" if is_without_golden(name) else "bitwise equal|within|logprobs equal"
    done = run(lab, step, pytest_words(lab, name), lab.env(step), lab.limit_s)
    return judge(lab, step, done, 0, text)


def changed(lab: Lab, name: str, step: str) -> bool:
    """Run with a golden that is off by a little."""
    paths = goldens(lab, name)
    if not paths:
        lab.say(f"{step}: WRONG (no golden to change)")
        return False
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(replaced(path, off_by_a_little(path.read_text())))
        done = run(lab, step, pytest_words(lab, name), lab.env(step), lab.limit_s)
    return judge(lab, step, done, 1, "is off at step")


def wrong_argument(lab: Lab, name: str, step: str) -> bool:
    """Run with a value that Megatron-LM refuses."""
    path = lab.case(name)
    text = re.sub(r"^  --attention-backend:.*\n", "", path.read_text(), flags=re.MULTILINE)
    text = text.replace("\nMODEL_ARGS:\n", "\nMODEL_ARGS:\n  --attention-backend: nosuch\n", 1)
    with replaced(path, text):
        words = pytest_words(lab, name, "--golden", "off")
        done = run(lab, step, words, lab.env(step), lab.limit_s)
    return judge(lab, step, done, 1, "(?i)error|argument")


def crash(lab: Lab, name: str, step: str) -> bool:
    """Have the rank raise an error."""
    words = pytest_words(lab, name, "--golden", "off")
    done = run(lab, step, words, lab.env(step, LAB_FAULT="crash"), lab.limit_s)
    return judge(lab, step, done, 1, "RuntimeError|crashes this rank")


def hang(lab: Lab, name: str, step: str) -> bool:
    """Have the rank wait for ever."""
    recipe = lab.tree / RECIPES / f"{name}.yaml"
    limit = f"time_limit: {HANG_LIMIT_S}"
    short = recipe.with_name(f"{name}_short.yaml")
    short.write_text(re.sub(r"time_limit: \d+", limit, recipe.read_text()))
    words = pytest_words(lab, name, "--golden", "off", recipe=short.stem)
    done = run(lab, step, words, lab.env(step, LAB_FAULT="hang"), lab.limit_s)
    short.unlink()
    return judge(lab, step, done, 1, "time limit|lab_fault|step|hang")


def interrupted(lab: Lab, name: str, step: str) -> bool:
    """Type Ctrl-C while it trains."""
    words = pytest_words(lab, name, "--golden", "off")

    def type_it(process: subprocess.Popen[bytes]) -> None:
        interrupt(lab, process, words)

    done = run(lab, step, words, lab.env(step), INTERRUPT_LIMIT_S, type_it)
    return judge(lab, step, done, 2, "")


def stays(lab: Lab, name: str, step: str) -> bool:
    """Have the rank do its work and not exit."""
    done = run(lab, step, pytest_words(lab, name), lab.env(step, LAB_FAULT="stay"), lab.limit_s)
    return judge(lab, step, done, 1, "trained to the end, and rank 0 did not exit")


def may_stay(lab: Lab, name: str, step: str) -> bool:
    """Do the same with a case that takes it for the end."""
    path = lab.case(name)
    with replaced(path, f"EXIT_POLICY: pass\n{path.read_text()}"):
        done = run(lab, step, pytest_words(lab, name), lab.env(step, LAB_FAULT="stay"), lab.limit_s)
    return judge(lab, step, done, 0, "^passed.*(bitwise equal|within)")


STEPS: dict[str, Callable[[Lab, str, str], bool]] = {
    "record": record,
    "check": check,
    "changed": changed,
    "wrong-argument": wrong_argument,
    "crash": crash,
    "hang": hang,
    "interrupt": interrupted,
    "stays": stays,
    "may-stay": may_stay,
}


def run_step(lab: Lab, name: str, kind: str) -> bool:
    """Run a step of a row and say whether it is right."""
    step = f"{name}-{kind}"
    shutil.rmtree(lab.out / "leases" / step, ignore_errors=True)
    return STEPS[kind](lab, name, step)


def interrupt(lab: Lab, process: subprocess.Popen[bytes], words: list[str]) -> None:
    """Type Ctrl-C once the training is at its third iteration."""
    run_dir = Path(words[words.index("--run-dir") + 1])
    deadline = time.monotonic() + lab.limit_s
    while time.monotonic() < deadline and process.poll() is None:
        logs = [*run_dir.rglob("*.log"), *run_dir.rglob("*.txt")]
        if any(re.search(rb"iteration +3/", p.read_bytes()) for p in logs if p.is_file()):
            break
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)


# --- without the plugin -----------------------------------------------------------------------


def plain_words(case: dict[str, object], variables: dict[str, str]) -> list[str]:
    """Return a case's arguments as words of a command."""
    words: list[str] = []
    for key, value in dict(case["MODEL_ARGS"]).items():  # type: ignore[call-overload]
        words.append(str(key))
        if value is not True:
            text = re.sub(r"\$\{?(\w+)\}?", lambda m: variables[m[1]], str(value))
            words += text.strip("[]").split() if text.startswith("[") else [text]
    return words


def plain(
    lab: Lab, name: str, step: str, *more: str, save: Path | None = None, program: str = ""
) -> Done:
    """Run a row's program with nothing of ours around it, or train its model with another."""
    case = yaml.safe_load(lab.case(name).read_text())
    spec = yaml.safe_load((lab.tree / RECIPES / f"{name}.yaml").read_text())["spec"]
    if program:
        case["MODEL_ARGS"] = {k: v for k, v in case["MODEL_ARGS"].items() if not OF_RL.match(k)}
    at = lab.out / "plain" / step
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir(parents=True)
    is_inference = case.get("MODE") == "inference"
    variables = {
        "DATA_PATH": str(lab.data),
        "DATA_CACHE_PATH": str(at / "cache"),
        "TENSORBOARD_PATH": str(at / "tensorboard"),
        "CHECKPOINT_SAVE_PATH": str(save or at / "save"),
        "CHECKPOINT_LOAD_PATH": str(lab.data if is_inference else at / "load"),
        "INFERENCE_OUTPUT_PATH": str(at / "requests.json"),
        "REPEAT": "1",
    }
    env = lab.env(step) | {k: str(v) for k, v in case["ENV_VARS"].items()}
    env["PYTHONPATH"] = os.pathsep.join((env.get("PYTHONPATH", ""), str(lab.tree)))
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "1",
        program or spec["training_script_path"],
    ]
    return run(lab, step, [*words, *plain_words(case, variables), *more], env, lab.limit_s)


def probe(lab: Lab, row: str) -> bool:
    """Print whether a row's program runs at all."""
    step = f"{row}-probe"
    run = plain(lab, f"lab_{row}_native", step)
    named = r"^(?:\[rank\d\]: *)?(\w*(?:Error|Exception|Interrupt)\b.*|.*error: .*)"
    errors = re.findall(named, run.output, flags=re.MULTILINE)
    errors = [e for e in errors if "ChildFailedError" not in e] or [""]
    steps = re.findall(r"iteration +\d+/ *\d+", run.output) or [""]
    said = steps[-1] if run.code == 0 else f"{steps[-1]} {errors[-1][:240]}"
    result = "runs" if run.code == 0 else "DOES NOT RUN"
    remains = "; ".join(left(lab, step))
    lab.say(f"{step}: {result}, exit {run.code}, {run.seconds:.0f} s: {said} {remains}")
    return run.code == 0


def prepare(lab: Lab) -> bool:
    """Train the checkpoints that frozen, inference and reinforcement learning rows load."""
    if (lab.data / "frozen" / "latest_checkpointed_iteration.txt").exists():
        return True
    shutil.rmtree(lab.data, ignore_errors=True)
    (lab.data / "model").mkdir(parents=True)
    case = yaml.safe_load(lab.case("lab_frozen_native").read_text())
    half = str(int(case["MODEL_ARGS"]["--train-iters"]) // 2)
    saved = lab.data / "frozen"
    policy = lab.data / "model" / "policy"
    words = ("--mock-data", "--eval-iters", "0", "--exit-interval", "1", "--save", str(policy))
    done = (
        plain(lab, "lab_frozen_native", "prepare", "--exit-interval", half, save=saved),
        plain(lab, "lab_grpo_native", "prepare-policy", *words, program="pretrain_gpt.py"),
    )
    (lab.data / "model" / "tiny").symlink_to(saved)
    for one, at in zip(done, (saved, policy), strict=True):
        names = ", ".join(path.name for path in at.glob("*"))
        lab.say(f"prepare {at.name}: exit {one.code}, {one.seconds:.0f} s: {names}")
        if one.code != 0:
            print(one.output[-3000:])
    return all(one.code == 0 for one in done)


def row_names(lab: Lab) -> list[str]:
    """Return the rows that the tree has."""
    return sorted(p.stem.split("_")[1] for p in (lab.tree / RECIPES).glob("lab_*_native.yaml"))


def main() -> int:
    """Run what was asked for; the exit code is 1 if a step was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path)
    parser.add_argument(
        "data", type=Path, help="the checkpoint is made here; as given to make_tree.py"
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="all", help="names with commas")
    parser.add_argument("--kinds", default="native,script")
    parser.add_argument(
        "--steps",
        default="default",
        help=f"{', '.join(STEPS)}; default: but the first two for {', '.join(WITH_ALL)} alone",
    )
    parser.add_argument("--limit-s", type=float, default=200, help="of a step")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time")
    parser.add_argument(
        "--probe", action="store_true", help="run each program plainly, without the plugin"
    )
    parser.add_argument(
        "--no-gpu",
        action="store_true",
        help="pretend that the CPU is a GPU; the tree is made with --platform cpu",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lab = Lab(
        args.tree.resolve(),
        args.data.resolve(),
        args.out.resolve(),
        args.limit_s,
        args.no_gpu,
        threading.Lock(),
    )
    rows = row_names(lab) if args.rows == "all" else args.rows.split(",")
    if not prepare(lab):
        return 1

    def steps_of(row: str) -> tuple[str, ...]:
        if args.steps != "default":
            return tuple(args.steps.split(","))
        return tuple(STEPS) if row in WITH_ALL else FIRST

    def one(row: str, kind: str) -> bool:
        results = [run_step(lab, f"lab_{row}_{kind}", step) for step in steps_of(row)]
        return all(results)

    begun = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        if args.probe:
            futures = [pool.submit(probe, lab, row) for row in rows]
        else:
            futures = [
                pool.submit(one, row, kind) for row in rows for kind in args.kinds.split(",")
            ]
        results = [f.result() for f in futures]
    lab.say(f"{sum(results)} of {len(results)} right in {time.monotonic() - begun:.0f} s")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
