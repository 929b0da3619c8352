"""Texts that hold shell commands: scripts, Makefiles, and the steps in a YAML file. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace

import yaml

from pytest_megatron.adopt.launch import LaunchedTests, launched_in
from pytest_megatron.adopt.shell import read_shell

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BLOCKS = ("|", ">")
_MAY_LAUNCH = re.compile(
    r"torchrun|torch\.distributed|mpirun|mpiexec|orterun|accelerate|deepspeed|horovodrun|srun"
    r"|ft_launcher|composer|popen",
    re.IGNORECASE,
)


def may_launch(text: str) -> bool:
    """Return whether a text names a launcher at all, and tests."""
    return _MAY_LAUNCH.search(text) is not None and re.search(r"pytest|\.py\b", text) is not None


def launched_in_script(text: str, *, is_makefile: bool) -> list[LaunchedTests]:
    """Return the launched commands of a shell script or a Makefile, lines counted from 0."""
    return launched_in(read_shell(text, is_makefile=is_makefile))


def launched_in_yaml(text: str) -> list[LaunchedTests]:
    """Return the launched commands of every step in a YAML file, of whatever CI system.

    A file that is no YAML, such as a template of one, is read as a script.
    """
    try:
        documents = list(yaml.compose_all(text, Loader=_Loader))
    except (yaml.YAMLError, RecursionError, ValueError):
        return launched_in_script(text, is_makefile=False)
    lines = text.splitlines()
    found: dict[LaunchedTests, None] = {}
    for document in documents:
        for value, line in _texts(document, lines, set()):
            for one in launched_in(read_shell(value)):
                found[replace(one, line=one.line + line)] = None
    return list(found)


def _texts(node: yaml.Node | None, lines: list[str], seen: set[int]) -> Iterator[tuple[str, int]]:
    """Yield each scalar that may hold commands with the line of its first one."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    match node:
        case yaml.ScalarNode():
            is_block = node.style in _BLOCKS
            first = node.start_mark.line + is_block
            while is_block and first < len(lines) and not lines[first].strip():
                first += 1
            value = str(node.value)
            num_empty = len(value) - len(value.lstrip("\n")) if is_block else 0
            if may_launch(value):
                yield value[num_empty:], first
        case yaml.SequenceNode():
            words = [str(item.value) for item in node.value if isinstance(item, yaml.ScalarNode)]
            is_argv = len(words) == len(node.value) > 1 and not any(" " in w for w in words[:2])
            if is_argv and may_launch(joined := shlex.join(words)):
                yield joined, node.start_mark.line
            for item in node.value:
                yield from _texts(item, lines, seen)
        case yaml.MappingNode():
            for key, item in node.value:
                yield from _texts(key, lines, seen)
                yield from _texts(item, lines, seen)
        case _:
            pass
