"""The project's own commands: makes `.venv` when it is missing or stale, then runs in it.

Needs Python 3.11 to 3.13 with pip, and nothing else:

    python3 dev.py recipes                 train and judge two workloads, the smoke tier
    python3 dev.py recipes --all           ... all that this machine can run
    python3 dev.py recipes PYTEST ARGS     ... those that the arguments select
    python3 dev.py test                    the everyday tier of the tests, in parallel
    python3 dev.py test --all              ... all of them
    python3 dev.py test PYTEST ARGS        ... those that the arguments select, of either
    python3 dev.py check                   format, lint, types, import layers, lock file
    python3 dev.py generate                write what is generated: schemas, the page of options
    python3 dev.py package [--keep DIR]    build wheel and sdist, and try them
    python3 dev.py setup                   the environment alone
    python3 dev.py site                    the documentation as a site, in build/site
    python3 dev.py links                   try its links to other sites (needs the network)

With an NVIDIA driver the environment gets torch's CUDA build as `uv.lock` has it; without one it
gets the CPU build of the same release and none of the CUDA packages (`--torch cpu|cuda` decides
by hand). Everything else comes from `uv.lock`, with hashes. Must not import anything but the
standard library: it runs before anything is installed. Python 3.7 to 3.10 must be able to read it,
for there it prints which Python it needs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# An environment that somebody else made, as the CI image has it, stays as it is.
MADE_VARIABLE = "PYTEST_MEGATRON_VENV"
VENV = Path(os.environ.get(MADE_VARIABLE, ROOT / ".venv"))
PYTHON = VENV / "bin" / "python"
UV_VERSION = "0.13.8"
STARTED = time.monotonic()
EXTRAS = ("megatron", "cluster")
NEXT = """\
Next, open .pytest_megatron/runs/latest/index.html: the curves and logs of this run
see a failure: change --lr in {case}, run python3 dev.py recipes -k tp1_pp1
python3 dev.py recipes --all trains all; docs/tutorials/first-workload.md makes one of your own\
""".format(case="tests/functional_tests/test_cases/gpt/tp1_pp1/model_config.yaml")
GENERATED = ("option_tables", "schema_files")
LOWEST, ABOVE = (3, 11), (3, 14)


def main() -> int:
    """Parse the command, make the environment, run the command in it."""
    parser = argparse.ArgumentParser(
        prog="dev.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = ("recipes", "test", "check", "generate", "package", "setup", "site", "links")
    parser.add_argument("command", choices=choices)
    parser.add_argument("--torch", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--all", action="store_true", help="recipes, test: more than the first tier"
    )
    arguments, rest = parser.parse_known_args()
    if not LOWEST <= sys.version_info[:2] < ABOVE:
        found = f"{sys.version_info[0]}.{sys.version_info[1]}"
        print(f"dev.py: runs on Python 3.11 to 3.13, this is {found}; start it with one of those")
        return 2
    os.chdir(ROOT)
    variant = (
        ("cuda" if has_nvidia_driver() else "cpu") if arguments.torch == "auto" else arguments.torch
    )
    try:
        set_up(variant)
        if arguments.command in ("site", "links"):
            install_docs()
    except subprocess.CalledProcessError as error:
        print(f"dev.py: setting up .venv failed at: {' '.join(map(str, error.cmd))}")
        return 2
    tier = "all" if arguments.all else "everyday"
    commands: dict[str, Callable[[], int | None]] = {
        "recipes": lambda: train(rest, is_smoke=not (rest or arguments.all)),
        "test": lambda: run_pytest("--tier", tier, *rest),
        "check": check,
        "generate": generate,
        "package": lambda: try_package(*rest),
        "setup": lambda: print(f"dev.py: {VENV.name} is ready"),
        "site": lambda: run_sphinx("site", *rest),
        "links": lambda: run_sphinx("links", *rest),
    }
    return commands[arguments.command]() or 0


def train(rest: list[str], *, is_smoke: bool) -> int:
    """Train workloads; after the smoke tier, print what to try next."""
    is_named = any(Path(word.partition("::")[0]).exists() for word in rest)
    words = [*([] if is_named else ["recipes"]), *rest, *(["--tag", "smoke"] if is_smoke else [])]
    code = run_pytest("-p", "megatron", *words)
    if is_smoke:
        print(NEXT)
    return code


def has_nvidia_driver() -> bool:
    """Whether this machine has an NVIDIA driver, loaded or in a container."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def set_up(variant: str) -> None:
    """Make `.venv` what `uv.lock` says, unless its stamp says that it is."""
    if MADE_VARIABLE in os.environ:
        return
    stamp = VENV / ".pytest-megatron-stamp"
    recipe = [
        variant,
        sys.version,
        UV_VERSION,
        *EXTRAS,
        *(p.read_text() for p in (ROOT / "uv.lock", ROOT / "pyproject.toml")),
    ]
    wanted = hashlib.sha256("\0".join(recipe).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    report(f"setting up {VENV.name} ({variant} build of torch); half a minute with a warm cache")
    run(sys.executable, "-m", "venv", "--clear", VENV)
    run(PYTHON, "-m", "pip", "install", "--quiet", f"uv=={UV_VERSION}")
    report("installing the packages of uv.lock")
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    if variant == "cuda":
        run(VENV / "bin" / "uv", "sync", "--frozen", "--inexact", "--python", PYTHON, *extras)
    else:
        install_for_cpu(extras)
    stamp.write_text(wanted)


def install_for_cpu(extras: list[str]) -> None:
    """Install what `uv.lock` says without the CUDA packages, and torch's CPU build."""
    import tomllib  # noqa: PLC0415 - from Python 3.11 on

    uv = VENV / "bin" / "uv"
    pip = (uv, "pip", "install", "--no-config", "--quiet")  # pyproject.toml speaks of locking only
    with (ROOT / "uv.lock").open("rb") as file:
        locked = {
            package["name"]: package.get("version", "") for package in tomllib.load(file)["package"]
        }
    is_cuda = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton$).*").fullmatch
    prunes = [word for name in sorted(locked) if is_cuda(name) for word in ("--prune", name)]
    with tempfile.NamedTemporaryFile(suffix=".txt") as requirements:
        run(
            *(
                uv,
                "export",
                "--frozen",
                "--quiet",
                "--no-emit-project",
                "--no-emit-package",
                "torch",
            ),
            *(*prunes, *extras, "--output-file", requirements.name),
        )
        run(*pip, "--no-deps", "--require-hashes", "-r", requirements.name)
    torch = f"torch=={locked['torch']}"
    report(f"installing {torch}")
    choices = (
        # A CPU wheel that pip is told of (find-links), then PyTorch's own index.
        (PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", torch),
        (*pip, "--no-deps", "--torch-backend", "cpu", torch),
    )
    if not any(
        subprocess.run(c, check=False, capture_output=True).returncode == 0 for c in choices
    ):
        report("no CPU build of torch is to be had here; installing the CUDA build (gigabytes)")
        run(*pip, torch)
    run(*pip, "--no-deps", "--editable", ".")


def check() -> int:
    """Run every check and print which failed."""
    bin_dir = VENV / "bin"
    checks: dict[str, list[str | Path]] = {
        "ruff format": [bin_dir / "ruff", "format", "--check", "--quiet"],
        "ruff check": [bin_dir / "ruff", "check", "--quiet"],
        "mypy": [bin_dir / "mypy", "--no-error-summary"],
        "import layers": [bin_dir / "lint-imports", "--no-logo"],
    }
    failed = [
        name for name, command in checks.items() if subprocess.run(command, check=False).returncode
    ]
    if re.search(r'registry = "(/|\.\.)|file://', (ROOT / "uv.lock").read_text()):
        print("uv.lock: holds a machine's path; lock again without UV_FIND_LINKS")
        failed.append("lock file")
    print(
        f"checks: {', '.join(failed)} failed" if failed else f"checks: all {len(checks) + 1} passed"
    )
    return 1 if failed else 0


def generate() -> int:
    """Write the files that are made from the code, where they stand."""
    scripts = [ROOT / "docs" / "reference" / f"{name}.py" for name in GENERATED]
    return max(subprocess.run([PYTHON, script], check=False).returncode for script in scripts)


def try_package(*arguments: str) -> int:
    """Build the wheel and the sdist, and try them."""
    program = str(ROOT / "tests" / "packaging" / "try_package.py")
    return subprocess.run([PYTHON, program, *arguments], check=False).returncode


def run_pytest(*arguments: str) -> int:
    """Run pytest of `.venv` with its console scripts on the PATH, as in an activated shell."""
    env = os.environ | {"PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    # Some images set it, and then each process compiles all modules anew: seconds for each rank.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run([VENV / "bin" / "pytest", *arguments], env=env, check=False).returncode


def report(text: str) -> None:
    """Print what is being done, with the seconds since the start."""
    print(f"dev.py: {time.monotonic() - STARTED:3.0f} s: {text}", flush=True)


def install_docs() -> None:
    """Add the group docs of `uv.lock` to `.venv`.

    Raises:
        SystemExit: Somebody else made the environment, without it.
        subprocess.CalledProcessError: A step failed.
    """
    if (VENV / "bin" / "sphinx-build").exists():
        return
    if MADE_VARIABLE in os.environ:
        raise SystemExit(f"dev.py: {VENV} has no Sphinx; install the group docs of uv.lock there")
    uv = VENV / "bin" / "uv"
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        export = ("export", "--frozen", "--quiet", "--only-group", "docs", "--output-file")
        run(uv, *export, file.name)
        install = ("pip", "install", "--no-config", "--quiet", "--no-deps", "--require-hashes")
        run(uv, *install, "-r", file.name)


def run_sphinx(target: str, *arguments: str) -> int:
    """Build the documentation; a warning, such as a link to nowhere, is an error."""
    sphinx = VENV / "bin" / "sphinx-build"
    builder = "html" if target == "site" else "linkcheck"
    options = ("-c", "docs", "-d", "build/doctrees", "-b", builder, "-W", "--keep-going", "-q")
    directories = (".", f"build/{target}")
    code = subprocess.run([sphinx, *options, *arguments, *directories], check=False).returncode
    if code == 0:
        print(f"dev.py: build/{target} is ready")
    return code


def run(*command: str | Path) -> None:
    """Run one step of the set-up.

    Raises:
        subprocess.CalledProcessError: It did not end with 0.
    """
    env = os.environ | {"VIRTUAL_ENV": str(VENV), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(command, check=True, env=env)


if __name__ == "__main__":
    sys.exit(main())
