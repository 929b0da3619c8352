"""Changes of a project's files, as a diff for review: pytest's configuration and a workflow.

A changed configuration is parsed again, and is left alone where it then differs by anything but
what was added.
"""

from __future__ import annotations

import configparser
import difflib
import itertools
import json
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import cast
from urllib.parse import urlsplit

from pytest_megatron.adopt.find import FoundClass, Inventory
from pytest_megatron.adopt.launch import LaunchedTests, is_test_path
from pytest_megatron.base.files import JsonValue, read_text, write_texts_together
from pytest_megatron.base.project import ProjectConfig, ask_git
from pytest_megatron.ci.table import load_table
from pytest_megatron.ci.workflow import GITHUB_FILE, github_workflow
from pytest_megatron.doctor.probes.packages import read_direct_url
from pytest_megatron.errors import AdoptError
from pytest_megatron.recipe.load import BUILT_IN_WORDS

PLUGIN = ("-p", "megatron")
PYPROJECT = "pyproject.toml"
_INI_FILES = (  # in the order in which pytest looks, with the section
    ("pytest.toml", "pytest"),
    (".pytest.toml", "pytest"),
    ("pytest.ini", "pytest"),
    (".pytest.ini", "pytest"),
    (PYPROJECT, "tool.pytest"),
    (PYPROJECT, "tool.pytest.ini_options"),
    ("tox.ini", "pytest"),
    ("setup.cfg", "tool:pytest"),
)
_ALWAYS = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini")  # chosen even if empty
_DEFAULT_RANKS = 2
_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # of git: a form feed does not end one


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """A file before and after; `old` is None where there is none."""

    path: str
    old: str | None
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectChanges:
    """What would be written, and what is left to a person."""

    files: tuple[ConfigChange, ...]
    notes: tuple[str, ...]


def plan_changes(root: Path, inventory: Inventory, source: str | None = None) -> ProjectChanges:
    """Return the changes of a project; a file that has them already is left out.

    Args:
        root: The project.
        inventory: The places that were found in it.
        source: Requirement that installs this package on a runner; None if there is none.

    Raises:
        AdoptError: A configuration file cannot be read, or is none.
    """
    texts = _read_all(root)
    files: dict[str, str] = {}
    notes: list[str] = []
    name, section = _configured_in(texts)
    new = with_plugin(texts.get(name, ""), name, section)
    if new is None:
        notes.append(f"{name}: put `-p megatron` into addopts yourself; its form is not known")
    else:
        files[name] = new
    _add_workflow(root, inventory, source, texts, files, notes)
    changes = tuple(
        ConfigChange(path=path, old=texts.get(path), new=text)
        for path, text in sorted(files.items())
        if texts.get(path) != text
    )
    return ProjectChanges(files=changes, notes=tuple(notes))


def _read_all(root: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name in dict.fromkeys(name for name, _ in _INI_FILES):
        try:
            texts[name] = read_text(root / name)
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise AdoptError(name, f"cannot be read: {error}; mend it") from error
    return texts


def _configured_in(texts: dict[str, str]) -> tuple[str, str]:
    """Return the file and the section that pytest reads, or that it would."""
    for name, section in _INI_FILES:
        if name in texts and (name in _ALWAYS or _values(texts[name], name, section) is not None):
            return name, section
    return (
        (PYPROJECT, "tool.pytest.ini_options") if PYPROJECT in texts else ("pytest.ini", "pytest")
    )


def _values(text: str, name: str, section: str) -> dict[str, JsonValue] | None:
    """Return the section of a file, None where it has none.

    Raises:
        AdoptError: The file is neither INI nor TOML.
    """
    try:
        if name.endswith(".toml"):
            table: JsonValue = cast("JsonValue", tomllib.loads(text))
            for key in section.split("."):
                table = table.get(key) if isinstance(table, dict) else None
            is_parent = section == "tool.pytest" and isinstance(table, dict)
            if is_parent and set(cast("dict[str, JsonValue]", table)) == {"ini_options"}:
                return None
            return table if isinstance(table, dict) else None
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
        parser.read_string(text)
        return dict(parser[section]) if parser.has_section(section) else None
    except (tomllib.TOMLDecodeError, configparser.Error) as error:
        raise AdoptError(
            name, f"cannot be read: {' '.join(str(error).split())}; mend it"
        ) from error


def with_plugin(text: str, name: str, section: str) -> str | None:
    """Return a configuration whose `addopts` load the plugin, with all else as it was.

    None where that cannot be made sure.
    """
    before = _values(text, name, section) or {}
    had = _words(before.get("addopts"))
    if PLUGIN in itertools.pairwise(had) or "-pmegatron" in had:
        return text
    newline = "\r\n" if "\r\n" in text else "\n"
    is_toml = name.endswith(".toml")
    native = section in ("tool.pytest", "pytest") and is_toml
    new = _inserted(text, section, newline, is_toml=is_toml, is_native=native)
    try:
        after = _values(new, name, section) or {}
    except AdoptError:
        return None
    rest = {key: value for key, value in after.items() if key != "addopts"}
    is_same = rest == {key: value for key, value in before.items() if key != "addopts"}
    return new if is_same and _words(after.get("addopts")) == (*PLUGIN, *had) else None


def _words(value: JsonValue) -> tuple[str, ...]:
    """Return the words of `addopts`, a string or a list."""
    if isinstance(value, list):
        return tuple(map(str, value))
    try:
        return tuple(shlex.split(str(value or "")))
    except ValueError:
        return (str(value),)


def _inserted(text: str, section: str, newline: str, *, is_toml: bool, is_native: bool) -> str:
    """Return a text with the plugin at the front of `addopts`, which is added where missing."""
    header = re.compile(
        rf"^[ \t]*\[[ \t]*{re.escape(section)}[ \t]*\][^\r\n]*(?:\r?\n|\Z)", re.MULTILINE
    )
    start = header.search(text)
    joined = " ".join(PLUGIN)
    if is_native:
        line = f"addopts = {json.dumps(list(PLUGIN))}{newline}"
    else:
        line = f'addopts = "{joined}"{newline}' if is_toml else f"addopts = {joined}{newline}"
    if start is None:
        gap = "" if not text else newline if text.endswith("\n") else newline * 2
        return f"{text}{gap}[{section}]{newline}{line}"
    following = re.compile(r"^[ \t]*\[[^\[\]\r\n]+\]", re.MULTILINE).search(text, start.end())
    end = len(text) if following is None else following.start()
    body = text[start.end() : end]
    if is_toml:
        found = re.search(r"^[ \t]*addopts[ \t]*=[ \t]*(\"\"\"|'''|\"|'|\[)", body, re.MULTILINE)
        words = (
            ", ".join(map(json.dumps, PLUGIN)) + ", " if found and found[1] == "[" else f"{joined} "
        )
    else:
        found = re.search(r"^addopts[ \t]*[=:][ \t]*", body, re.MULTILINE)
        words = joined if found and body[found.end() :][:1] in ("", "\r", "\n") else f"{joined} "
    if found is None:
        gap = "" if text[: start.end()].endswith("\n") else newline
        return f"{text[: start.end()]}{gap}{line}{text[start.end() :]}"
    place = start.end() + found.end()
    words = words if is_toml or found[0].endswith((" ", "\t")) else f" {words}"
    return f"{text[:place]}{words}{text[place:]}"


def _add_workflow(
    root: Path,
    inventory: Inventory,
    source: str | None,
    texts: dict[str, str],
    files: dict[str, str],
    notes: list[str],
) -> None:
    """Add the settings of CI and the workflow that they give, or the reason why there is none."""
    pyproject = files.get(PYPROJECT, texts.get(PYPROJECT))
    if (root / GITHUB_FILE).exists():
        return
    if (root / ".gitlab-ci.yml").exists() and not (root / ".github").exists():
        notes.append("GitLab: fill in [tool.pytest-megatron.ci.workflow], see `ci init --gitlab`")
        return
    if pyproject is None:
        notes.append(
            f"no workflow: its settings are in pyproject.toml, which this project has not; "
            f"make one, then `pytest-megatron ci init` writes {GITHUB_FILE.as_posix()}"
        )
        return
    own = tomllib.loads(pyproject).get("tool", {}).get("pytest-megatron", {}).get("ci")
    if own is None:
        newline = "\r\n" if "\r\n" in pyproject else "\n"
        settings = newline.join(_ci_settings(root, inventory, source))
        pyproject = f"{pyproject.rstrip()}{newline * 2}{settings}{newline}"
        own = tomllib.loads(pyproject)["tool"]["pytest-megatron"]["ci"]
        files[PYPROJECT] = pyproject
        notes.append(
            f"{PYPROJECT}: `setup` of [tool.pytest-megatron.ci.workflow] does not install all: add "
            f"lines for {_not_installed(source)}; then run `pytest-megatron ci init`"
        )
    table = load_table(ProjectConfig(file=Path(PYPROJECT), tables={"ci": own}), BUILT_IN_WORDS)
    if table.workflow.setup:
        files[GITHUB_FILE.as_posix()] = github_workflow(table.workflow, table.known_labels)


def installed_source() -> str | None:
    """Return the requirement by which a runner can install this package as it is installed here."""
    try:
        direct_url = distribution("pytest-megatron").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    return source_of(direct_url)


def source_of(direct_url: str | None) -> str | None:
    """Return the requirement of a `direct_url.json`; None for what a runner may not reach."""
    found = read_direct_url(direct_url)
    url, vcs = found.get("url"), found.get("vcs_info")
    if not isinstance(url, str) or not url.startswith("https://") or "@" in urlsplit(url).netloc:
        return None
    if isinstance(vcs, dict):
        url = f"{vcs.get('vcs')}+{url}@{vcs.get('commit_id')}"
    return f"pytest-megatron @ {url}"


def _not_installed(source: str | None) -> str:
    own = "pytest-megatron (on no package index yet) and " if source is None else ""
    return f"{own}torch, where the line of the project does not"


def _ci_settings(root: Path, inventory: Inventory, source: str | None) -> Iterator[str]:
    """Yield the lines of the tables that `ci init` needs, as well as they can be known."""
    folders = _test_folders(root, inventory)
    install = "-e ." if (root / "setup.py").exists() or _is_package(root) else "pytest"
    recipes = {
        str(PurePosixPath(found.path).parent)
        for found in inventory.findings
        if found.kind == "recipe"
    }
    yield "[tool.pytest-megatron.ci]"
    yield f"unit_tests = {json.dumps(folders)}"
    if recipes:
        yield f"recipes = {json.dumps(sorted(recipes))}"
        yield 'recipe_profile = "compat"'
    yield ""
    yield "[tool.pytest-megatron.ci.workflow]"
    yield f"# Add lines for {_not_installed(source)}."
    lines = [f"python -m pip install {install}"]
    lines += [] if source is None else [f"python -m pip install {shlex.quote(source)}"]
    yield f"setup = {json.dumps(lines)}"
    words = ["--shards", "1", "--ranks", str(_common_ranks(inventory))]
    yield f"plan = {json.dumps(words)}"


def _is_package(root: Path) -> bool:
    data = tomllib.loads(read_text(root / PYPROJECT))
    return "project" in data or "build-system" in data


def _test_folders(root: Path, inventory: Inventory) -> list[str]:
    """Return the folders that launched commands name, else those that hold the found tests."""
    named: dict[str, None] = {}
    for found in inventory.findings:
        if isinstance(found.what, LaunchedTests) and found.kind == "pytest":
            for word in found.what.arguments:
                path = PurePosixPath(word.strip("\"'").partition("::")[0])
                if path.parts and ".." not in path.parts and (root / path).exists():
                    folder = path if (root / path).is_dir() else path.parent
                    named[folder.as_posix()] = None
    if not named:
        held = (
            PurePosixPath(found.path) for found in inventory.findings if found.path.endswith(".py")
        )
        named = dict.fromkeys(path.parts[0] for path in held if is_test_path(f"{path.parts[0]}/x"))
    folders = sorted(named) or ["tests"]
    return [one for one in folders if not any(_is_below(one, other) for other in folders)]


def _is_below(folder: str, other: str) -> bool:
    return folder != other and (other == "." or folder.startswith(f"{other}/"))


def _common_ranks(inventory: Inventory) -> int:
    """Return the number of ranks that most places have."""
    numbers: Counter[int] = Counter()
    for found in inventory.findings:
        match found.what:
            case LaunchedTests(num_ranks=number) if number.isdecimal() and found.kind == "pytest":
                numbers[int(number)] += 1
            case FoundClass(definition=definition) if definition.world_size.isdecimal():
                numbers[int(definition.world_size)] += 1
            case _:
                pass
    return max(numbers, key=lambda n: (numbers[n], -n)) if numbers else _DEFAULT_RANKS


def diff_of(changes: Sequence[ConfigChange]) -> str:
    """Return a diff that `git apply` and `patch` take."""
    lines: list[str] = []
    for change in changes:
        old = "/dev/null" if change.old is None else f"a/{change.path}"
        before, after = (_LINE.findall(text) for text in (change.old or "", change.new))
        lines += difflib.unified_diff(before, after, old, f"b/{change.path}")
    no_end = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + no_end for line in lines)


def apply_changes(root: Path, changes: Sequence[ConfigChange]) -> list[str]:
    """Write the files that git can give back; return those that were not written, with the reason.

    Raises:
        AdoptError: A file cannot be written; none was.
    """
    refused = {}
    for change in changes:
        if change.old is not None and not _is_clean(root, change.path):
            reason = "has changes that are not committed, or is not in git"
            refused[change.path] = f"{change.path} {reason}; commit it, or apply the diff yourself"
    chosen = {root / one.path: one.new for one in changes if one.path not in refused}
    try:
        write_texts_together(chosen)
    except OSError as error:
        raise AdoptError(str(error.filename), f"cannot be written: {error.strerror}") from error
    return list(refused.values())


def _is_clean(root: Path, path: str) -> bool:
    is_tracked = bool(ask_git(root, "ls-files", "--", path))
    return is_tracked and ask_git(root, "status", "--porcelain", "--", path) == ""
