"""Draws the pictures of pages from runs that it makes: `python docs/images/draw_pictures.py`.

A gang that hangs (`hang.svg`) and a curve that differs (`curve.svg`) are those of the tutorials,
whose commands it runs; the summary of a pull request (`summary.svg`) is that of the simulated CI.
Takes a minute and no GPU. Needs the environment of `dev.py` and the program `script`.
"""

# ruff: noqa: INP001 - a script, no package

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests/docs")]

from literate import Pages  # noqa: E402 - of tests/docs
from terminal_svg import draw, read_lines  # noqa: E402 - beside this file

HERE = Path(__file__).parent
HANG = "pytest -p megatron --ranks 4 --rank-timeout 5 test_gather.py test_sums.py"
SUMMARY = "pytest-megatron ci summary artifacts --expect plan.json"
LOCAL = ("platform ", "rootdir: ", "plugins: ")  # of the machine that draws
_ENV = os.environ | {
    "COLUMNS": "96",
    "TERM": "xterm",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


def main() -> None:
    """Draw all of them."""
    with tempfile.TemporaryDirectory() as directory:
        pages = Pages(Path(directory))
        draw_terminal(HANG, tutorial(pages, "first-distributed-test"), HERE / "hang.svg")
        project = tutorial(pages, "first-workload")
        (page,) = (project / ".pytest_megatron/runs/latest").glob("*/curves.html")
        charts = re.findall(r"<svg .*?</svg>\n?", page.read_text(encoding="utf-8"), re.DOTALL)
        loss = next(chart for chart in charts if ">lm loss<" in chart)
        (HERE / "curve.svg").write_text(loss, encoding="utf-8")
        simulated = Path(directory) / "simulated"
        simulated.mkdir()
        sample = [sys.executable, ROOT / "tests/docs/sample_artifacts.py"]
        subprocess.run(sample, cwd=simulated, env=_ENV, check=True)
        draw_terminal(SUMMARY, simulated, HERE / "summary.svg")


def tutorial(pages: Pages, name: str) -> Path:
    """Run a tutorial; return the project that it keeps."""
    page = ROOT / f"docs/tutorials/{name}.md"
    if problems := pages.problems(page):
        raise SystemExit("\n".join(problems))
    return pages.kept(page)


def draw_terminal(command: str, project: Path, picture: Path) -> None:
    """Run a command at a terminal and draw what it shows; an exit code of 1 is expected."""
    record = project / "typescript"
    typed = f"stty cols 96 && {command}"
    words = ["script", "--quiet", "--return", "--command", typed, str(record)]
    subprocess.run(words, cwd=project, env=_ENV, check=False, stdout=subprocess.DEVNULL)
    lines = [line.replace(sys.prefix, "/path/to/venv") for line in read_lines(record)]
    lines = [line for line in lines if not line.startswith(LOCAL)]
    text = draw([f"$ {command}", *lines], title=command)
    picture.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
