"""Ranks that the code of a program names: `rank == 5`, `rank % 16 == 5`.

Only conditions count that follow from a rank's number and from sizes of the world alone. A word
means such a number if it sounds so. Must not run the program.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import cast

_OPERATORS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
}


def named_ranks(
    sources: Iterable[str], world_size: int, ranks_per_node: int
) -> list[frozenset[int]]:
    """Return the ranks in which each condition of a program differs from most; fewest first.

    Args:
        sources: Files of the program.
        world_size: All ranks.
        ranks_per_node: Of each node.
    """
    worlds = [_numbers(rank, world_size, ranks_per_node) for rank in range(world_size)]
    found: dict[frozenset[int], None] = {}
    for node in (node for source in sources for node in _conditions(Path(source))):
        try:
            values = [bool(_value(node, numbers)) for numbers in worlds]
        except (LookupError, TypeError, ArithmeticError):  # it hangs on something else
            continue
        is_rare = sum(values) * 2 <= world_size
        ranks = frozenset(rank for rank, value in enumerate(values) if value == is_rare)
        if ranks:
            found[ranks] = None
    return sorted(found, key=len)


def _numbers(rank: int, world_size: int, ranks_per_node: int) -> dict[str, int]:
    """Return what words mean in a rank."""
    node, local_rank = divmod(rank, ranks_per_node)
    return {
        **dict.fromkeys(("rank", "global_rank", "world_rank"), rank),
        **dict.fromkeys(("node_rank", "group_rank"), node),
        "local_rank": local_rank,
        "world_size": world_size,
    }


def _conditions(source: Path) -> Iterator[ast.expr]:
    """Yield what may be a condition in a file."""
    try:
        code = source.read_bytes()
        nodes = list(ast.walk(ast.parse(code))) if b"rank" in code.lower() else []
    except (OSError, ValueError, SyntaxError):
        return
    for node in nodes:
        match node:
            case ast.Compare() | ast.BinOp(op=ast.Mod() | ast.BitAnd()):
                yield node
            case _:
                continue


def _value(node: ast.AST, numbers: Mapping[str, int]) -> object:
    """Return what an expression is in a rank.

    Raises:
        LookupError: It hangs on something else.
    """
    word = _word(node).lower().removeprefix("get_")
    if word in numbers:
        return numbers[word]

    def value(part: ast.AST) -> object:
        return _value(part, numbers)

    match node:
        case ast.Constant(constant) if str(constant).isdecimal():  # a string is of the environment
            return int(str(constant))
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return tuple(map(value, parts))
        case ast.BinOp(left, kind, right):
            return _apply(kind, value(left), value(right))
        case ast.Compare(left, kinds, parts):
            sides = pairwise(map(value, (left, *parts)))
            return all(_apply(k, *two) for k, two in zip(kinds, sides, strict=True))
        case _:
            raise LookupError


def _apply(kind: ast.AST, left: object, right: object) -> object:
    """Return what an operator makes of two values."""
    return cast("Callable[[object, object], object]", _OPERATORS[type(kind)])(left, right)


def _word(node: ast.AST) -> str:
    """Return the word by which an expression may name a number; "" if it has none.

    That is a name, an attribute, a call without arguments, or a key of the environment.
    """
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return word
        case ast.Subscript(slice=ast.Constant(str(word))):
            return word
        case ast.Call(func=function, args=[], keywords=[]):
            return _word(function)
        case ast.Call(func=ast.Name("int"), args=[part]):
            return _word(part)
        case ast.Call(func=ast.Attribute(attr="get" | "getenv"), args=[ast.Constant(word), *_]):
            return str(word)
        case _:
            return ""
