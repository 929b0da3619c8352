"""Pages whose commands are run as they are typed: console blocks, files beside them, output.

A page is run from top to bottom in an empty git project. A block of Python, YAML or TOML whose
paragraph before it names a file is written to that file. Comments of HTML before a console block:

    <!-- needs: slurm -->                 not run here; programs, commands and options must exist
    <!-- exits: 0, 1 -->                  the exit code of each command; 0 is the default
    <!-- as in: docs/tutorials/x.md -->   that page has the same commands, and is run
    <!-- run: sed -i s/a/b/ file -->      what the text describes and nobody types; anywhere
    <!-- insert into train.py after: for step in ... -->   before a block that is part of a file
    <!-- only shown -->                   before a block that is no file

Lines of output that the page shows must come in that order; numbers, ids and paths may differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<body>.*?)^(?P=indent)```$|<!-- (?P<note>.*?) -->",
    re.MULTILINE | re.DOTALL,
)
_NAMED = re.compile(r"`([\w./-]+\.(?:py|yaml|toml|ini))`")
_SHELL = "/bin/bash"
_WRITTEN = ("python", "yaml", "toml", "ini")
_STATE_VARIABLES = ("CI", "GITHUB_", "PYTEST_", "MEGATRON_", "SLURM_", "COLUMNS")
# Lines that say where a page was written: versions, directories, plugins; and what ranks say whose
# peer is gone, which depends on how far each of them was.
_LOCAL = re.compile(
    r"platform |rootdir: |plugins: |configfile: |\.\.\.$| *File \"/|.*\(a consequence\)$"
)
_NOISE = (
    (re.compile(r"/[\w./+-]+"), "/PATH"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{4,}\b|0x[0-9a-f]+"), "#"),
    (re.compile(r"[-+]?\d[\d.,]*(?:e[-+]\d+)?"), "#"),
    (re.compile(r"#(?:[-:]#)+"), "#"),
    (re.compile(r"([=_-])\1{2,}"), r"\1\1\1"),
    (re.compile(r"\s+"), " "),
    (re.compile(r"\[ "), "["),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One line that is typed, and what the page shows below it."""

    text: str
    output: tuple[str, ...]
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A console block.

    Attributes:
        line: Of the page, from 1.
        needs: What it cannot be run without, or "".
        page: Another one that has the same commands, or "".
    """

    line: int
    commands: tuple[Command, ...]
    needs: str = ""
    page: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file that the page shows, or lines that belong into one behind a line."""

    name: str
    text: str
    after: str = ""


Step = Block | File | str  # a text is a command that nobody types


def steps_of(text: str) -> Iterator[Step]:
    """Yield what a page has to be run, in its order.

    Raises:
        ValueError: A comment is none of those above.
    """
    notes: dict[str, str] = {}
    end = 0
    for found in _FENCE.finditer(text):
        if found["note"] is not None:
            key, _, value = found["note"].partition(":")
            if key == "run":
                yield value.strip()
            else:
                notes[_known(key)] = value.removeprefix(" ")
            end = found.end()
            continue
        indent = len(found["indent"])
        body = "".join(line[indent:] or "\n" for line in found["body"].splitlines(keepends=True))
        if found["kind"] == "console":
            yield _block(body, text.count("\n", 0, found.start()) + 1, notes)
        elif found["kind"] in _WRITTEN and "only shown" not in notes:
            into = next((note for note in notes if note.startswith("insert into ")), None)
            names = _NAMED.findall(text[end : found.start()].strip().rpartition("\n\n")[2])
            if into is not None:
                name = into.removeprefix("insert into ").removesuffix(" after")
                yield File(name=name, text=body, after=notes[into])
            elif names:
                yield File(name=names[-1], text=body)
        notes = {}
        end = found.end()


def _known(key: str) -> str:
    if key in ("needs", "exits", "as in", "only shown") or key.startswith("insert into "):
        return key
    raise ValueError(f"<!-- {key} -->: is not known, expected needs, exits, as in, run, ...")


def _block(body: str, line: int, notes: Mapping[str, str]) -> Block:
    codes = [int(code) for code in notes.get("exits", "").split(",") if code.strip()]
    commands: list[Command] = []
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        typed = [lines.pop(0)]
        while typed[-1].endswith("\\"):
            typed.append(lines.pop(0))
        code = codes[len(commands)] if len(commands) < len(codes) else 0
        commands.append(Command(text="\n".join(typed), output=tuple(lines), exit_code=code))
    return Block(
        line=line,
        commands=tuple(commands),
        needs=notes.get("needs", "").strip(),
        page=notes.get("as in", "").strip(),
    )


def shape(line: str) -> str:
    """Return a line of output without what differs between machines and runs."""
    for pattern, by in _NOISE:
        line = pattern.sub(by, line)
    return line.strip()


def missing(expected: Sequence[str], output: str) -> str | None:
    """Return the first line of a page that the output lacks behind those before it, or None."""
    found = iter([shape(line) for line in output.splitlines()])
    for line in expected:
        if line.strip() and not _LOCAL.match(line.strip()) and not _LOCAL.search(line):
            wanted = shape(line)
            if not any(seen == wanted for seen in found):
                return line
    return None


class Scratch:
    """An empty git project in which the commands of one page are typed, one after the other."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._cwd = directory
        self._env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(_STATE_VARIABLES)},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "80",
            "GIT_CONFIG_GLOBAL": os.devnull,
            **{f"GIT_{who}_{what}": "a@example.org" for who in _WHO for what in _WHAT},
        }

    def run(self, command: str) -> tuple[int, str]:
        """Type one command; return its exit code and what it printed."""
        script = f"trap 'code=$?; echo; echo \"@$PWD\"; exit $code' EXIT\n{command}"
        ended = subprocess.run(
            [_SHELL, "-c", script],
            cwd=self._cwd,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        output, _, directory = ended.stdout.rstrip("\n").rpartition("\n@")
        self._cwd = Path(directory)
        return ended.returncode, output

    def write(self, file: File) -> None:
        """Write a file, or put lines into one."""
        path = self._cwd / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.after:
            text = path.read_text()
            assert text.count(f"{file.after}\n") == 1, f"{file.name}: has no one {file.after!r}"
            path.write_text(text.replace(f"{file.after}\n", f"{file.after}\n{file.text}"))
        else:
            path.write_text(file.text)


_WHO = ("AUTHOR", "COMMITTER")
_WHAT = ("NAME", "EMAIL")


def run_page(page: Path, directory: Path) -> Iterator[str]:
    """Run a page; yield what did not come as it is written there."""
    text = page.read_text(encoding="utf-8")
    scratch = Scratch(directory)
    scratch.run("git init -q")
    for step in steps_of(text):
        match step:
            case str():
                code, output = scratch.run(step)
                if code:
                    yield f"{page.name}: {step}: ended with {code}\n{output}"
            case File():
                scratch.write(step)
            case Block(needs="", page=""):
                yield from _run_block(step, scratch, page.name)
            case Block():
                pass


def _run_block(block: Block, scratch: Scratch, name: str) -> Iterator[str]:
    for command in block.commands:
        code, output = scratch.run(command.text)
        where = f"{name}:{block.line}: $ {command.text}"
        if code != command.exit_code:
            yield f"{where}: ended with {code}, expected {command.exit_code}\n{output}"
        elif (line := missing(command.output, output)) is not None:
            yield f"{where}: did not print {line!r} in its place\n{output}"


def pages() -> list[Path]:
    """Return the pages for users that have commands."""
    found = [ROOT / "README.md", *sorted(ROOT.glob("docs/tutorials/*.md"))]
    return found + sorted(ROOT.glob("docs/how-to/*.md"))
