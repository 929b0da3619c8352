"""Pages whose commands are run as they are typed: console blocks, files beside them, output.

A page is run from top to bottom in an empty git project, or in one that a comment names. A block
of Python, YAML or TOML whose paragraph before it names a file is written to that file. Variables
and the working directory last from command to command. Comments of HTML, for the block after them:

    <!-- needs: Slurm -->                 runs only where this is: one of NEEDS, or `8 GPUs`
    <!-- exits: 0, 1 -->                  the exit code of each command; 0 is the default
    <!-- answers: p x, c -->              typed at a terminal, one at each of PROMPTS
    <!-- as in: docs/tutorials/x.md -->   that page has the same commands, and is run; or a test has
    <!-- insert into train.py after: for step in ... -->   before a block that is part of a file
    <!-- only shown -->                   before a block that is no file

and, anywhere:

    <!-- project: docs/tutorials/x.md -->   goes on from what that page kept
    <!-- project: this repository -->    a copy, whose training programs replay goldens
    <!-- run: sed -i s/a/b/ file -->      a command that the text describes and nobody types
    <!-- keep -->                         what later pages go on from
    <!-- agent: of tests -->              before trainings whose launcher is not the matter

Behind an `agent` or a `project` trainings are started by the agent of tests, which loads no torch.

The output that a page shows is all that was printed, from its first line on: `...` stands for lines
that are left out, and in a line for a part of it. Times, dates, ids, paths and versions may differ,
and fractions by a tenth; every other number is compared.
"""

from __future__ import annotations

import math
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HELPERS = ("unit_tests/workloads/items", "unit_tests/gangs/sessions", "labs")
sys.path += [str(ROOT / "tests" / name) for name in _HELPERS]
from tiny_project import stand_in  # noqa: E402 - of the folders above

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<body>.*?)^(?P=indent)```$|<!-- (?P<note>.*?) -->",
    re.MULTILINE | re.DOTALL,
)
_NAMED = re.compile(r"`([\w./-]+\.(?:py|yaml|toml|ini))`")
_SHELL = "/bin/bash"
_LFLAG = 3  # of what tcgetattr returns
_WRITTEN = ("python", "yaml", "toml", "ini")
_STATE_VARIABLES = (
    "CI",
    "GITHUB_",
    "GITLAB_",
    "PYTEST_",
    "MEGATRON_",
    "SLURM_",
    "COLUMNS",
    "PYTHONDONT",
    "TORCHINDUCTOR_",  # torch sets it where a test imports it
)
NEEDS = re.compile(r"Slurm|Docker|the network|\d+ GPUs?")
PROMPTS = {"(Pdb) ": "\n"}  # and the key that ends an answer
POLL_S = 0.05
REPOSITORY = "this repository"
REPLAY = ROOT / "tests/docs/replay.py"
PROGRAMS = ("train_gpt.py", "train_grpo.py", "generate_gpt.py")
LIMIT_S = 300
NOTHING: Mapping[str, str] = {}
_USE_AGENT = """
import pathlib, sys
if "torch.distributed.run" in sys.orig_argv:
    sys.path.insert(0, str(pathlib.Path(__file__).with_name("packages")))
"""
# Lines that say where a page was written: versions, directories, plugins; and what ranks say whose
# peer is gone, which depends on how far each of them was.
_LOCAL = re.compile(
    r"platform linux --|rootdir: |plugins: |configfile: |File \"/|.*\(a consequence\)$"
)
_NOISE = (
    (re.compile(r"\(\d+:\d\d:\d\d\)"), ""),  # pytest adds minutes from 60 s on
    (re.compile(r"\b\d{8}-\d{6}-[0-9a-f]{4}\b"), "RUN"),
    (re.compile(r"\b\d{4}-\d\d-\d\d\b"), "DATE"),
    (re.compile(r"/[\w./+-]*\w"), "/PATH"),
    (re.compile(r"\b\d+\.\d+(?: s\b|s\b)"), "TIME"),
    (re.compile(r"\b\d+\.\d+\.\d+[\w.+]*"), "VERSION"),
    # One in a thousand commits has an id without a digit.
    (re.compile(r"(?<![\w.])(?:(?=[0-9a-f]*\d)[0-9a-f]{4,}|[0-9a-f]{7,})\b|0x[0-9a-f]+"), "ID"),
    (re.compile(r"([=_-])\1{2,}"), r"\1\1\1"),
    (re.compile(r"\s+"), " "),
    (re.compile(r"\[ "), "["),
)
_FRACTION = re.compile(r"[-+]?\d+(?:\.\d+(?:e[-+]\d+)?|e[-+]\d+)")
_CLOSE = 0.1


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
        page: Another one, or a test, that has the same commands, or "".
        answers: Typed at the prompts of its commands.
    """

    line: int
    commands: tuple[Command, ...]
    needs: str = ""
    page: str = ""
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file that the page shows, or lines that belong into one behind a line."""

    name: str
    text: str
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """A comment that does something: `run`, `project`, `keep` or `agent`."""

    do: str
    value: str


Step = Block | File | Unseen


def steps_of(text: str) -> Iterator[Step]:
    """Yield what a page has to be run, in its order.

    Raises:
        ValueError: A comment is none of those above, or names a need that is not in the list.
    """
    notes: dict[str, str] = {}
    end = 0
    for found in _FENCE.finditer(text):
        if found["note"] is not None:
            key, _, value = found["note"].partition(":")
            if key in ("run", "project", "keep", "agent"):
                yield Unseen(do=key, value=value.strip())
            else:
                notes[_known(key, value.strip())] = value.removeprefix(" ")
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


def _known(key: str, value: str) -> str:
    if key == "needs" and not NEEDS.fullmatch(value):
        raise ValueError(f"<!-- needs: {value} -->: expected {NEEDS.pattern}")
    if key not in ("needs", "exits", "answers", "as in", "only shown") and not key.startswith(
        "insert into "
    ):
        raise ValueError(f"<!-- {key} -->: is not known, expected needs, exits, as in, run, ...")
    return key


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
        answers=tuple(word.strip() for word in notes.get("answers", "").split(",") if word),
    )


def shape(line: str) -> str:
    """Return a line of output without what differs between machines and runs."""
    for pattern, by in _NOISE:
        line = pattern.sub(by, line)
    return line.strip()


def is_as_shown(expected: str, line: str) -> bool:
    """Return whether a line of output is the one that a page shows."""
    wanted = shape(expected)
    texts = (re.escape(text).replace(r"\.\.\.", ".*") for text in _FRACTION.split(wanted))
    found = re.fullmatch(f"({_FRACTION.pattern})".join(texts), shape(line))
    return found is not None and all(
        math.isclose(float(one), float(other), rel_tol=_CLOSE)
        for one, other in zip(_FRACTION.findall(wanted), found.groups(), strict=True)
    )


def missing(expected: Sequence[str], output: str) -> str | None:
    """Return the first line that a page shows and the output lacks there, or the reverse, or None.

    A page may begin anywhere in the output.
    """
    lines = [line for line in output.splitlines() if line.strip() and not _is_local(line)]
    at, may_skip = 0, True
    for line in filter(str.strip, expected):
        if line.strip() == "...":
            may_skip = True
        elif not _is_local(line):
            ends = range(at, len(lines) if may_skip else min(at + 1, len(lines)))
            found = next((index for index in ends if is_as_shown(line, lines[index])), None)
            if found is None:
                return line
            at, may_skip = found + 1, False
    return None if may_skip or at == len(lines) else f"... after {lines[at - 1]!r}"


def _is_local(line: str) -> bool:
    return _LOCAL.match(line.strip()) is not None


class Scratch:
    """A directory in which the commands of one page are typed, one after the other.

    Attributes:
        cwd: Where the next command is typed.
    """

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.cwd = directory
        self._variables = directory.with_name(f"{directory.name}.variables")
        outer = {k: v for k, v in os.environ.items() if not k.startswith(_STATE_VARIABLES)}
        scripts = f"{Path(sys.executable).parent}{os.pathsep}"
        self._env = {
            **outer,
            "PATH": f"{scripts}{outer['PATH']}",
            **env,
            "COLUMNS": "80",
            "DOCS": str(ROOT / "tests/docs"),
            "PYTEST_MEGATRON_VENV": sys.prefix,  # of `dev.py`, which makes one without it
            "GIT_CONFIG_GLOBAL": os.devnull,
            **{f"GIT_{who}_{what}": "a@example.org" for who in _WHO for what in _WHAT},
        }

    def run(self, command: str, answers: Sequence[str] = ()) -> tuple[int, str]:
        """Type one command; return its exit code and what it printed."""
        kept = f"'{self._variables}'"
        script = (
            f"[ ! -e {kept} ] || source {kept} 2> /dev/null\n"
            f"trap 'code=$?; declare -p > {kept}; echo; echo \"@$PWD\"; exit $code' EXIT\n{command}"
        )
        start = _typed if answers else _piped
        code, printed = start([_SHELL, "-c", script], self.cwd, self._env, answers)
        output, _, directory = printed.rstrip("\n").rpartition("\n@")
        self.cwd = Path(directory)
        return code, output

    def write(self, file: File) -> None:
        """Write a file, or put lines into one."""
        path = self.cwd / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.after:
            text = path.read_text()
            assert text.count(f"{file.after}\n") == 1, f"{file.name}: has no one {file.after!r}"
            path.write_text(text.replace(f"{file.after}\n", f"{file.after}\n{file.text}"))
        else:
            path.write_text(file.text)


_WHO = ("AUTHOR", "COMMITTER")
_WHAT = ("NAME", "EMAIL")


def _piped(
    words: list[str], cwd: Path, env: Mapping[str, str], _: Sequence[str]
) -> tuple[int, str]:
    ended = subprocess.run(
        words,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    return ended.returncode, ended.stdout


def _typed(
    words: list[str], cwd: Path, env: Mapping[str, str], answers: Sequence[str]
) -> tuple[int, str]:
    """Run a program at a terminal, and type an answer at each prompt."""
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        words,
        cwd=cwd,
        env=dict(env),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    rest, printed, deadline = list(answers), "", time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for prompt, end in PROMPTS.items():
            # One that reads single keys drops what was typed before it has changed the mode.
            is_ready = bool(end) or not termios.tcgetattr(ours)[_LFLAG] & termios.ICANON
            if rest and printed.endswith(prompt) and is_ready:
                os.write(ours, f"{rest.pop(0)}{end}".encode())
                printed += "\0"  # answered
        if not select.select([ours], [], [], POLL_S)[0]:
            continue
        try:
            more = os.read(ours, 1 << 16)
        except OSError:  # Linux: nobody has the other end open
            break
        printed += more.decode(errors="replace").replace("\r", "")
    printed = printed.replace("\0", "")
    os.close(ours)
    return program.wait(LIMIT_S), printed


class Pages:
    """Runs pages; what one of them keeps for others is made once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._problems: dict[str, list[str]] = {}

    def problems(self, page: Path) -> list[str]:
        """Run a page unless it has been run; return what did not come as it is written there."""
        name = _name(page)
        if name not in self._problems:
            self._problems[name] = list(self.run(page))
        return self._problems[name]

    def run(self, page: Path, need: str = "", env: Mapping[str, str] = NOTHING) -> Iterator[str]:
        """Run a page; yield what did not come as it is written there.

        Args:
            need: Runs the blocks with this need, and no others.
            env: Variables of its commands, above this process's.
        """
        directory = self._directory / f"{_name(page)}{need}".replace("/", "-") / "project"
        scratch = Scratch(directory, env)
        scratch.run("git init -q -b main")
        for step in steps_of(page.read_text(encoding="utf-8")):
            match step:
                case Unseen(do="keep"):
                    shutil.copytree(scratch.cwd, self.kept(page), symlinks=True)
                case Unseen(do="agent"):
                    self._use_agent(scratch, need)
                case Unseen(do="project"):
                    self._start(step.value, scratch.cwd)
                    self._use_agent(scratch, need)
                case Unseen():
                    code, output = scratch.run(step.value)
                    if code:
                        yield f"{page.name}: {step.value}: ended with {code}\n{output}"
                case File():
                    scratch.write(step)
                case Block() if not step.page and step.needs == need:
                    yield from _run_block(step, scratch, page.name)
                case Block():
                    pass

    def _use_agent(self, scratch: Scratch, need: str) -> None:
        """Have torch's agent, alone, replaced by that of tests from here on."""
        if need:  # a real Slurm and a real Docker get a real agent
            return
        directory = self._directory / "agent"
        stand_in(directory / "packages")
        (directory / "sitecustomize.py").write_text(_USE_AGENT)
        scratch.run(f"export PYTHONPATH='{directory}'")

    def kept(self, page: Path) -> Path:
        """Return where the project of a page is that has `<!-- keep -->`."""
        return self._directory / "kept" / page.stem

    def _start(self, name: str, directory: Path) -> None:
        shutil.rmtree(directory)
        if name == REPOSITORY:
            copy_repository(directory)
        else:
            self.problems(ROOT / name)
            shutil.copytree(self.kept(ROOT / name), directory, symlinks=True)


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


def copy_repository(directory: Path) -> None:
    """Commit the files of this checkout, uncommitted ones too, to the main branch of a new one.

    Its training programs only replay goldens.
    """
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name, follow_symlinks=False)
    for program in PROGRAMS:
        shutil.copy(REPLAY, directory / "tests/functional_tests" / program)
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q", "-b", "main"), ("add", "-A"), (*who, "commit", "-qm", "All")):
        subprocess.run(("git", *words), cwd=directory, check=True)  # noqa: S607


def _run_block(block: Block, scratch: Scratch, name: str) -> Iterator[str]:
    for command in block.commands:
        code, output = scratch.run(command.text, block.answers)
        where = f"{name}:{block.line}: $ {command.text}"
        if code != command.exit_code:
            yield f"{where}: ended with {code}, expected {command.exit_code}\n{output}"
        elif (line := missing(command.output, output)) is not None:
            yield f"{where}: did not print {line!r} in its place\n{output}"


def pages() -> list[Path]:
    """Return the pages for users that have commands."""
    folders = ("tutorials", "how-to")
    found = [page for folder in folders for page in sorted(ROOT.glob(f"docs/{folder}/*.md"))]
    return [ROOT / "README.md", ROOT / "docs/start.md", *found]
