"""Stands in for yq where it is not installed: `yq [-i] [-r] [eval] EXPRESSION [FILE]`, `yq -P`.

Started as a file, on the PATH of a recipe's script only. Reads and writes YAML with PyYAML, so a
file that it changes in place loses its comments; that file is in a copy of the project.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from pytest_megatron.workloads.training.tools.yq_language import (
    Assignable,
    Spelt,
    YqError,
    compile_expression,
    spell,
)

_TAG = "tag:yaml.org,2002:"
_OLD = tuple(_TAG + name for name in ("bool", "float", "int", "timestamp"))


class _Loader(yaml.SafeLoader):
    """Reads as YAML 1.2 does: `yes` and `on` are words, and numbers keep their spelling."""


class _Dumper(yaml.SafeDumper):
    """Writes numbers as they were."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if tag not in _OLD]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    f"{_TAG}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"^[-+]?(?:\.\d+|\d+(?:\.\d*)?)(?:[eE][-+]?\d+)?$"),
    list("-+.0123456789"),
)


def _spelt(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Spelt:
    return Spelt(loader.construct_scalar(node))


_Loader.add_constructor(f"{_TAG}float", _spelt)
_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _written(dumper: yaml.SafeDumper, number: float) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{_TAG}float", str(number))


for _kind in (Spelt, int, float):
    _Dumper.add_representer(_kind, _written)


def main(arguments: Sequence[str]) -> int:
    """Run one call of yq."""
    flags = [word for word in arguments if word.startswith("-") and word != "-"]
    words = [word for word in arguments if word not in flags and word not in ("eval", "e")]
    if not words and set(flags) & {"-P", "--prettyPrint"}:
        words = ["."]
    unknown = set(flags) - {"-i", "-r", "--inplace", "--unwrapScalar", "-e", "-P", "--prettyPrint"}
    if unknown or not words or len(words) > 2:  # noqa: PLR2004 - expression and file
        return _complain(f"cannot do {' '.join(arguments)!r}; install yq 4")
    is_in_place = bool(set(flags) & {"-i", "--inplace"})
    path = Path(words[1]) if len(words) > 1 and words[1] != "-" else None
    try:
        text = sys.stdin.read() if path is None else path.read_text(encoding="utf-8")
        document = yaml.load(text, _Loader)  # noqa: S506 - a safe loader
        found = list(compile_expression(words[0])(Assignable(document)))
    except (OSError, yaml.YAMLError, YqError) as error:
        return _complain(str(error))
    printed = "".join(_printed(place) for place in found)
    if is_in_place and path is not None:
        path.write_text(printed, encoding="utf-8")
    else:
        sys.stdout.write(printed)
    return 0


def _complain(text: str) -> int:
    sys.stderr.write(f"yq (stand-in): {text}\n")
    return 1


def _printed(place: Assignable) -> str:
    """Return a value as yq prints it."""
    value = place.value
    if isinstance(value, dict | list):
        return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 16)
    return f"{spell(value)}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
