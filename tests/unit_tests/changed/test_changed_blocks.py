from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.changed.sources import (
    MODULE,
    WHOLE,
    ParsedFiles,
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


def test_an_expression_of_any_depth_and_an_integer_of_any_length_count() -> None:
    deep = "+".join(["1"] * 900)
    for old, new in ((deep, f"{deep[:-1]}2"), (f"0x{'f' * 9000}", f"0x{'f' * 8999}e")):
        before, after = (
            blocks_of(f"def f():\n    return {text}\n".encode()) for text in (old, new)
        )
        assert before["f"] != after["f"]


@pytest.mark.parametrize(
    ("one", "other"), [("1", "True"), ("1", "'1'"), ("()", "[]"), ("1", "1.0")]
)
def test_values_that_look_alike_differ(one: str, other: str) -> None:
    first, second = (blocks_of(f"X = {text}\n".encode()) for text in (one, other))
    assert first[MODULE] != second[MODULE]


def test_parsed_files_are_kept_and_a_damaged_file_of_them_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "parsed.z"
    expected = blocks_of(SOURCE.encode()), imports_of(SOURCE.encode()), dict[str, frozenset[str]]()
    for content in (None, b"", b"no file of ours"):
        if content is not None:
            path.write_bytes(content)
        new = ParsedFiles(path)
        assert new.parse(SOURCE.encode()) == expected
        new.write()
        kept = path.read_bytes()
        path.chmod(0o444)
        again = ParsedFiles(path)
        assert again.parse(SOURCE.encode()) == expected
        again.write()
        assert path.read_bytes() == kept
        path.chmod(0o644)
        more = ParsedFiles(path)
        more.parse(b"import other")
        more.write()
        assert path.read_bytes() != kept


def test_packages_that_are_installed_in_the_project_are_none_of_its_files(tmp_path: Path) -> None:
    installed = tmp_path / ".venv/lib/python3.12/site-packages"
    installed.mkdir(parents=True)
    (installed / "package.py").write_text("")
    (tmp_path / "own.py").write_text("import package\n")
    assert Sources(tmp_path, [installed]).closure("own.py") == {"own.py"}


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


def test_a_name_with_dots_is_that_of_its_file(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    assert sources.shorten(f"{tmp_path}/tests/../pkg/a.py") == "pkg/a.py"
    assert sources.shorten(f"{tmp_path}/tests/../../a.py") is None
