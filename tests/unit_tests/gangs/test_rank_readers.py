"""Code that reads the rank while it is collected, found by its source."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pytest_megatron.gangs.start.rank_readers import find_reader

INI = {
    "python_files": ["test_*.py"],
    "norecursedirs": ["build", ".*", "venv"],
    "testpaths": [],
}


def find(root: Path, files: dict[str, str], *words: str) -> str:
    """Return what reads the rank in a project, with the place below its root."""
    for name, text in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def getini(name: str) -> list[str]:
        if name not in INI:
            raise ValueError(name)
        return INI[name]

    config = SimpleNamespace(
        rootpath=root,
        invocation_params=SimpleNamespace(dir=root),
        known_args_namespace=SimpleNamespace(file_or_dir=list(words)),
        getini=getini,
    )
    return find_reader(cast("pytest.Config", config)).replace(f"{root}/", "")


READING = {
    "of a class": """
        import os

        class Utils:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            rank = int(os.environ["RANK"])  # here
        """,
    "by another name": """
        from os import environ as variables

        if "SLURM_PROCID" in variables:  # here
            ...
        """,
    "getenv": "from os import getenv\nRANK = getenv('LOCAL_RANK')  # here",
    "of a condition of a method": """
        import os, pytest

        class TestIt:
            @pytest.mark.skipif(os.environ.setdefault("RANK", "0") != "0", reason="")  # here
            def test_it(self): ...
        """,
    "of a default": """
        import os

        def build(rank=os.getenv("RANK")): ...  # here
        """,
}
NOT_READING = {
    "in functions": """
        import os
        import pytest

        @pytest.fixture
        def rank(monkeypatch):
            monkeypatch.setenv("RANK", "3")
            os.environ["RANK"] = "3"
            return _rank()

        def _rank(name="RANK"): return os.environ["RANK"]

        class TestRank:
            def test_it(self):
                assert os.environ["RANK"] == _rank()

        def test_it(
            rank,
        ):
            assert os.environ["RANK"]
        """,
    "what only scripts run": """
        import os

        if __name__ == "__main__":
            print(os.environ["RANK"])
        """,
    "what is set": """
        import os

        os.environ["RANK"] = "0"
        LATER = lambda: os.environ["RANK"]
        """,
    "of a hook": """
        import os

        def pytest_runtest_setup(item):
            print(os.environ["RANK"])
        """,
    "a size": "import os\nSIZE = os.environ['WORLD_SIZE']",
    "no Python": "RANK = 'RANK' is",
    "of many terms": "LAST = ''\nNAMES = " + " + ".join(900 * ["(LAST or 'RANK')"]),
}


@pytest.mark.parametrize("text", READING.values(), ids=READING)
def test_code_that_runs_while_it_is_imported_reads(tmp_path: Path, text: str) -> None:
    lines = textwrap.dedent(text).splitlines()
    number = next(n for n, line in enumerate(lines, start=1) if line.endswith("# here"))
    assert find(tmp_path, {"test_it": text}).endswith(f" in test_it.py:{number}")


@pytest.mark.parametrize("text", NOT_READING.values(), ids=NOT_READING)
def test_code_that_runs_later_does_not_count(tmp_path: Path, text: str) -> None:
    assert find(tmp_path, {"test_it": text}) == ""


READER = "import os\nRANK = os.environ['RANK']"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"conftest": "from lib.sub import reader", "lib/sub/reader": READER}, "lib/sub/reader"),
        ({"conftest": "import lib.sub", "lib/__init__": READER, "lib/sub": ""}, "lib/__init__"),
        ({"tests/conftest": "from .near import x", "tests/near": READER}, "tests/near"),
        ({"tests/test_it": "from near import (\n  x,\n)", "tests/near": READER}, "tests/near"),
        ({"conftest": "import a", "a": "import b", "b": READER}, "b"),
        ({"conftest": "pytest_plugins = ['lib.plugin']", "lib/plugin": READER}, "lib/plugin"),
        ({"tests/test_it": "def load():\n    import a", "a": READER}, ""),
        ({"test_it": "import a", "a": READER}, ""),  # is not asked for
        ({"tests/build/test_it": READER, "tests/helpers": READER}, ""),
        ({"tests/test_it": "import a", "site-packages/a": READER}, ""),
    ],
)
def test_files_are_those_that_the_session_imports(
    tmp_path: Path, files: dict[str, str], found: str
) -> None:
    place = find(
        tmp_path, {**files, "tests/test_other": "import os, not_there"}, "tests", 300 * "x"
    )
    # The last word is the value of an option of a conftest file.
    assert place.partition(":")[0] == (f"RANK in {found}.py" if found else "")
