"""Parts of a file that change one by one: functions, code of a module, and the whole. Pure."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator

MODULE = ""  # what runs when the file is imported: all but the bodies of functions
WHOLE = "*"
LISTING = "/"  # names in a directory


def digest(content: bytes) -> str:
    """Return the digest of a content, short."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def blocks_of(source: bytes) -> dict[str, str]:
    """Return name -> digest of the blocks of a Python file; one block where it is none.

    Comments and places of lines do not count. Functions of one name count together; a function
    within a function is part of it. A docstring belongs to the module, as anybody can read it.
    """
    blocks = {WHOLE: digest(source)}
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return blocks
    parts: dict[str, list[str]] = {}
    for name, function in _functions(tree, ""):
        parts.setdefault(name, []).append(ast.dump(function))
        function.body = function.body[:1] if ast.get_docstring(function) is not None else []
    blocks |= {name: digest("".join(texts).encode()) for name, texts in parts.items()}
    blocks[MODULE] = digest(ast.dump(tree).encode())
    return blocks


def _functions(
    node: ast.AST, within: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield within + child.name, child
            case ast.ClassDef():
                yield from _functions(child, f"{within}{child.name}.")
            case _:
                yield from _functions(child, within)


def block_of_code(qualname: str) -> str:
    """Return the name of the block that code of this qualified name belongs to, if it has one.

    A lambda outside of functions and the body of a class belong to the module.
    """
    return qualname.partition(".<locals>")[0]


def imports_of(source: bytes) -> frozenset[str]:
    """Return the dotted names that a Python file may import, relative ones with their dots.

    Those of texts count, as `import_module` takes them.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset(_imports(tree))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                start = "." * node.level + (node.module or "")
                yield start
                dot = "" if start.endswith(".") else "."
                yield from (f"{start}{dot}{alias.name}" for alias in node.names)
            case ast.Constant(value=str(text)):
                name = text.partition(":")[0]
                if "." in name and all(part.isidentifier() for part in name.split(".")):
                    yield name
            case _:
                pass
