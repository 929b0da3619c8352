"""The site is built from the pages as they are; what it must not contain fails the build."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

CONF = Path(__file__).parents[2] / "docs/conf.py"
PAGE = """\
# A page

<!-- needs: Slurm -->
```console
$ pytest --executor slurm
```
"""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("sphinx") is None, reason="needs Sphinx: python3 dev.py site"
    ),
]


def build(root: Path, index: str) -> subprocess.CompletedProcess[str]:
    """Build a site of two pages with the configuration of this project."""
    (root / "docs").mkdir(exist_ok=True)
    for name in ("conf.py", "search_scorer.js", "site.css"):
        (root / "docs" / name).write_text(CONF.with_name(name).read_text())
    (root / "docs/index.md").write_text(index)
    (root / "docs/page.md").write_text(PAGE)
    options = ("-c", "docs", "-b", "html", "-W", "--keep-going", "-q")
    command = [sys.executable, "-m", "sphinx", *options, ".", "build/site"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_the_index_is_the_side_bar_and_comments_are_not_shown(tmp_path: Path) -> None:
    ended = build(tmp_path, "# Index\n\n## Learn\n\n- [A page](page.md#a-page)\n")
    shown = (tmp_path / "build/site/docs/page.html").read_text()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert '<span class="caption-text">Learn</span>' in shown
    assert "executor" in shown
    assert "needs: Slurm" not in shown
    assert 'url=docs/index.html"' in (tmp_path / "build/site/index.html").read_text()


def test_a_mark_is_replaced_by_the_table_of_its_script(tmp_path: Path) -> None:
    (tmp_path / "docs/reference").mkdir(parents=True)
    script = 'def rows():\n    yield from ("| a |", "|---|", "| b |")\n'
    (tmp_path / "docs/reference/my_tables.py").write_text(script)
    index = "# Index\n\n## Learn\n\n[A page](page.md)\n\n<!-- table: my_tables.py rows -->\n"
    ended = build(tmp_path, index)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "<td><p>b</p></td>" in (tmp_path / "build/site/docs/index.html").read_text()
