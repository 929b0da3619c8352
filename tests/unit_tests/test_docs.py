"""The documentation says what is there: links resolve, and reference pages list everything."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from plugin_cases import CASES, SAMPLE

from pytest_megatron.cli import group

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
REFERENCE = ROOT / "docs/reference"
# A message of faq.md that is torch's.
OF_TORCH = "RuntimeError: Process 0 terminated or timed out after 300.07 seconds"
_CODE_BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def prose(page: Path) -> str:
    return _CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the fragments that GitHub makes of a page's headings."""
    titles = _HEADING.findall(prose(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> Iterator[str]:
    for link in _LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            yield link


def commands(parent: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield every command that does something, with its full name."""
    context = click.Context(parent)
    for name in parent.list_commands(context):
        command = parent.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_resolves(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_the_index_links_every_page() -> None:
    index = ROOT / "docs/index.md"
    linked = {(index.parent / link).resolve() for link in _LINK.findall(prose(index))}
    assert set(ROOT.glob("docs/**/*.md")) - linked == {index}


def test_options_are_documented_with_their_ini_names(pytester: pytest.Pytester) -> None:
    lines = pytester.runpytest_inprocess("-p", "megatron", "--help").outlines
    start = next(i for i, line in enumerate(lines) if line.startswith("training workloads"))
    end = next(i for i, line in enumerate(lines) if i > start and line and line[0] != " ")
    options = {m[1] for line in lines[start:end] if (m := re.match(r"  --([\w-]+)", line))}
    ini_names = {m[1] for line in lines if (m := re.match(r"  (megatron_\w+)", line))}
    text = (REFERENCE / "options.md").read_text(encoding="utf-8")
    tables = runpy.run_path(str(REFERENCE / "option_tables.py"))["tables"]()
    assert all(table in text for table in tables)
    rows = re.findall(r"^\| `--([\w-]+)[^`]*` \|", text, re.MULTILINE)
    settings = re.findall(r"^\| `(megatron_\w+)=[^`]+` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(options)
    assert {f"megatron_{name.replace('-', '_')}" for name in rows} | set(settings) == ini_names


def test_every_command_is_documented_with_its_options() -> None:
    _, *sections = (REFERENCE / "commands.md").read_text(encoding="utf-8").split("\n## ")
    texts = dict(section.split("\n", 1) for section in sections)
    found = dict(commands(group))
    assert list(texts) == sorted(found)
    words = [(n, word) for n, c in found.items() for p in c.params for word in p.opts]
    assert [(n, w) for n, w in words if w.startswith("--") and w not in texts[n]] == []


def marked_tables() -> Iterator[tuple[str, str]]:
    """Yield script and function of each table that the site puts into a page."""
    for page in sorted(REFERENCE.glob("*.md")):
        yield from re.findall(r"<!-- table: (\w+\.py) (\w+) -->", page.read_text("utf-8"))


@pytest.mark.parametrize(("script", "function"), list(marked_tables()))
def test_a_table_of_the_site_is_made_from_its_data(script: str, function: str) -> None:
    rows = [row for row in runpy.run_path(str(REFERENCE / script))[function]() if row[:1] == "|"]
    assert len(rows) > len(("head", "line"))


def test_messages_that_a_question_begins_with_are_printed() -> None:
    rows = re.findall(r"^\| (.+?) \| ", prose(ROOT / "docs/faq.md"), re.MULTILINE)
    shown = {text for row in rows for text in re.findall("`([^`]+)`", row)}
    sources = sorted((ROOT / "pytest_megatron").rglob("*"))
    printed = "".join(p.read_text() for p in sources if p.suffix in (".py", ".toml", ".md"))
    printed = re.sub(r'"\s+f?"', "", printed)  # texts that go on in another line
    assert {text for text in shown if _fixed_part(text) not in printed} == {OF_TORCH}


def _fixed_part(message: str) -> str:
    """Return the longest part of a message without numbers, names, paths and punctuation."""
    parts = re.split(r"\.\.\.|'[^']*'|\b(?:N\b|(?=\w*\d)[\w.-]+)|\S*/\S*|[;:,()]", message)
    return max((part.strip() for part in parts), key=len)


def test_every_fragment_of_the_changelog_has_a_name_that_towncrier_tells_apart() -> None:
    kinds = "breaking|deprecation|feature|bugfix|golden|doc|contrib"
    named = re.compile(rf"\d+\.({kinds})\.\d+\.md").fullmatch
    names = [path.name for path in (ROOT / "changelog").iterdir() if path.name[0] != "."]
    assert [name for name in names if not named(name)] == []


def test_what_ci_runs_of_plugins_is_pinned_there() -> None:
    assert set(SAMPLE) <= {case.requirement for case in CASES}
