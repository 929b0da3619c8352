"""The commands of the documentation exist, and run as they are typed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import click
import pytest
from labs import DockerLab, SlurmLab
from literate import ROOT, Block, Pages, missing, pages, steps_of

from pytest_megatron.cli import group

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"^ *(?:\w*\$ |(?:pytest|pytest-megatron|python|git|srun|docker) [-\w]).*", re.MULTILINE
)
FOREIGN = {"--timeout", "--reruns", "--randomly-seed", "--cov", "--forked"}  # of other plugins


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    steps = steps_of(page.read_text(encoding="utf-8"))
    return [step for step in steps if isinstance(step, Block)]


def pages_that_need(what: str) -> list[Path]:
    return [page for page in pages() if any(block.needs == what for block in blocks(page))]


@cache
def options_of_pytest() -> set[str]:
    argv = [sys.executable, "-m", "pytest", "-p", "megatron", "--help"]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"--[a-z][\w-]*", shown)) | FOREIGN


def programs(line: str) -> Iterator[list[str]]:
    """Yield the words of each program that a line starts."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            if words:
                yield words
            words = []
        elif words or not re.match(r"\w+=", word):
            words.append(word)


def unknown(words: list[str]) -> Iterator[str]:
    """Yield what a program of ours does not have: a command, or an option."""
    program = Path(words[0]).name
    own = words[: words.index("--")] if program == "pytest-megatron" and "--" in words else words
    given = [word.partition("=")[0] for word in own if word.startswith("--") and word != "--"]
    if program in ("pytest", "py.test") or words[:2] == ["pytest-megatron", "watch"]:
        yield from (option for option in given if option not in options_of_pytest())
    elif program == "pytest-megatron":
        command: click.Command = group
        context = click.Context(group)
        rest = words[1:]
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            found = command.get_command(context, rest[0])
            if found is None:
                yield f"{rest[0]} of {command.name}"
                return
            command, rest = found, rest[1:]
        known = {
            option for param in command.params for option in (*param.opts, *param.secondary_opts)
        }
        yield from (option for option in given if option not in {*known, "--help", "--version"})


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_command_and_option_of_a_page_exists(page: Path) -> None:
    found = [
        f"{name_of(page)}:{block.line}: {what}"
        for block in blocks(page)
        for command in block.commands
        for words in programs(command.text)
        for what in unknown(words)
    ]
    assert found == []


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=name_of)
def test_every_command_and_option_in_a_line_of_text_exists(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    spans = re.findall(r"`((?:pytest|pytest-megatron) [^`]+)`", prose)
    found = [what for span in spans for words in programs(span) for what in unknown(words)]
    assert found == []


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_no_command_is_in_a_block_of_another_kind(page: Path) -> None:
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    others = [body for kind, body in fences if kind != "console"]
    assert [line for body in others for line in COMMAND.findall(body)] == []


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_a_block_that_is_run_elsewhere_is_there(page: Path) -> None:
    for block in blocks(page):
        if block.page.endswith(".py"):
            assert f'"{name_of(page)}"' in (ROOT / block.page).read_text(encoding="utf-8")
        elif block.page:
            assert ROOT / block.page in pages()
            there = [c for other in blocks(ROOT / block.page) for c in other.commands]
            for command in block.commands:
                typed = command.text.partition("  #")[0].strip()
                (same,) = [c for c in there if c.text.strip() == typed][:1]
                assert missing(command.output, "\n".join(same.output)) is None


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(tmp_path_factory.mktemp("pages"))


@pytest.mark.everyday(
    "README.md",
    "docs/start.md",
    "docs/tutorials/any-program.md",
    "docs/tutorials/first-distributed-test.md",
    "docs/tutorials/first-workload.md",
)
@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_a_page_runs_as_it_is_typed(page: Path, runner: Pages) -> None:
    if problems := runner.problems(page):
        pytest.fail("\n\n".join(problems), pytrace=False)


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return what a lab adds to the environment."""
    return {key: value for key, value in env.items() if os.environ.get(key) != value}


@pytest.mark.nightly
@pytest.mark.parametrize("page", pages_that_need("Slurm"), ids=name_of)
def test_a_page_runs_on_slurm(page: Path, runner: Pages, slurm_lab: SlurmLab) -> None:
    assert "\n\n".join(runner.run(page, "Slurm", variables(slurm_lab.env))) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("page", pages_that_need("Docker"), ids=name_of)
def test_a_page_runs_with_docker(page: Path, runner: Pages, docker_lab: DockerLab) -> None:
    assert "\n\n".join(runner.run(page, "Docker", variables(docker_lab.env))) == ""


PAGE = """\
`hello.py` prints a word:

```python
print("hello")
```

<!-- run: mkdir below -->
<!-- exits: 0, 3 -->
```console
$ cd below && {python} ../hello.py
hello
$ WORD=hallo; exit 3
```

<!-- insert into ../hello.py after: print("hello") -->
```python
print("in 5.1 s at {path}")
```

```console
$ {python} ../hello.py; echo $WORD
hello
in 17.25 s at /tmp/a
hallo
$ printf 'one\\ntwo\\nthree of 3, loss 1.2345, %s\\nend\\n' $RANDOM
two
three of 3, loss 1.2346, ...
...
```

<!-- answers: yes -->
```console
$ read -p "(Pdb) " word; echo "typed $word"
(Pdb) yes
typed yes
```

<!-- needs: 16 GPUs -->
```console
$ no-such-program
```
"""


def written(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text.replace("{python}", sys.executable).replace("{path}", str(tmp_path)))
    return page


def test_a_sound_page_is_found_sound(tmp_path: Path) -> None:
    assert Pages(tmp_path / "runs").problems(written(tmp_path, PAGE)) == []


@pytest.mark.parametrize(
    ("was", "is_now", "problem"),
    [
        ("exits: 0, 3", "exits: 0", "exit 3: ended with 3, expected 0"),
        ("hello\nin", "hullo\nin", "did not print 'hullo' in its place"),
        ("two\nthree", "one\nthree", "did not print 'three of 3, loss 1.2346, ...' in its place"),
        ("three of 3, loss 1.2346", "three of 4, loss 1.2346", "did not print 'three of 4"),
        ("loss 1.2346", "loss 1.4", "did not print 'three of 3, loss 1.4"),
        ("loss 1.2346, ...\n...", "loss 1.2346, ...", "did not print \"... after 'three of 3"),
        ("run: mkdir below", "run: mkdir below; false", "false: ended with 1"),
        ("needs: 16 GPUs", "exits: 0", "$ no-such-program: ended with 127, expected 0"),
    ],
)
def test_a_page_that_is_wrong_is_found_wrong(
    tmp_path: Path, was: str, is_now: str, problem: str
) -> None:
    page = written(tmp_path, PAGE.replace(was, is_now))
    assert problem in "\n".join(Pages(tmp_path / "runs").problems(page))


def test_commands_and_options_that_do_not_exist_are_found() -> None:
    lines = [
        "pytest --rank 4",
        "pytest-megatron golden chek",
        "A=1 pytest-megatron lint --fast | cat",
    ]
    found = [what for line in lines for words in programs(line) for what in unknown(words)]
    assert found == ["--rank", "chek of golden", "--fast"]
