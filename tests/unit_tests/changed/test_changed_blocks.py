from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.changed.sources import (
    MODULE,
    WHOLE,
    Sources,
    block_of_code,
    blocks_of,
    imports_of,
)

SOURCE = '''
LIMIT = 3
class A:
    """A."""
    size = 4
    def f(self, x=1):
        """Do."""
        def g():
            return 1
        return g() + x
def h():
    return 2
'''


def changed(old: str, new: str) -> set[str]:
    before = blocks_of(SOURCE.encode())
    assert old in SOURCE
    after = blocks_of(SOURCE.replace(old, new).encode())
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        pytest.param("return 2", "return 3", {"h"}, id="body"),
        pytest.param("return 1", "return 3", {"A.f"}, id="nested-function"),
        pytest.param("LIMIT = 3", "LIMIT = 4", {MODULE}, id="constant"),
        pytest.param("size = 4", "size = 5", {MODULE}, id="class-attribute"),
        pytest.param("x=1", "x=2", {"A.f", MODULE}, id="default"),
        pytest.param("Do.", "Done.", {"A.f", MODULE}, id="docstring"),
        pytest.param("def h():", "@staticmethod\ndef h():", {"h", MODULE}, id="decorator"),
        pytest.param("def h()", "def i()", {"h", "i", MODULE}, id="name"),
        pytest.param("    return 2", "    # why\n    return 2", set(), id="comment"),
    ],
)
def test_a_change_is_found_in_the_block_that_it_is_in(
    old: str, new: str, expected: set[str]
) -> None:
    assert changed(old, new) - {WHOLE} == expected


def test_functions_of_one_name_count_together() -> None:
    source = "if X:\n    def f(): return 1\nelse:\n    def f(): return {}\n"
    first, second = (blocks_of(source.format(number).encode()) for number in (2, 3))
    assert first["f"] != second["f"]


def test_a_file_that_is_no_python_is_one_block() -> None:
    assert blocks_of(b"def (:\n").keys() == {WHOLE}


@pytest.mark.parametrize(
    ("qualname", "block"),
    [("A.f.<locals>.g", "A.f"), ("h.<locals>.<lambda>", "h"), ("h", "h")],
)
def test_code_within_a_function_belongs_to_it(qualname: str, block: str) -> None:
    assert block_of_code(qualname) == block


def test_imports_are_those_of_statements_and_of_texts() -> None:
    source = b"import a.b\nfrom . import c\nfrom ..d import e\nload('f.g:h')\nprint('no name.')\n"
    assert imports_of(source) == {"a.b", ".", ".c", "..d", "..d.e", "f.g"}


def test_a_closure_has_packages_and_what_their_modules_import(tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": "",
        "pkg/a.py": "from pkg.sub import b",
        "pkg/sub/__init__.py": "from . import c",
        "pkg/sub/b.py": "import os",
        "pkg/sub/c.py": "from ..a import x",
        "pkg/alone.py": "",
        "tests/helper.py": "",
        "tests/test_a.py": "import pkg.a, helper",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert Sources(tmp_path).closure("tests/test_a.py") == files.keys() - {"pkg/alone.py"}
