"""Files that tests use by other means than to open them, or while something is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_changed_session import Project

from pytest_megatron.changed.record import ProjectState
from pytest_megatron.changed.select import Changes
from pytest_megatron.changed.sources import Sources, files_of

FILES = {
    ".gitignore": ".pytest_*\n__pycache__\n*.sqlite\n",
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    "pkg/__init__.py": "",
    "pkg/front.py": """
import importlib

def __getattr__(name):
    if name != "LAZY":
        raise AttributeError(name)
    return importlib.import_module("pkg." + "lazy").VALUE
""",
    "pkg/lazy.py": "from pathlib import Path\n\nVALUE = Path('data/lazy.txt').read_text()\n",
    "pkg/chosen.py": "from pathlib import Path\n\nVALUE = Path('data/chosen.txt').exists()\n",
    "pkg/registry.py": """
import importlib
import pkgutil

import pkg.plugins

FOUND = {}

def load():
    for module in pkgutil.iter_modules(pkg.plugins.__path__):
        FOUND[module.name] = importlib.import_module("pkg.plugins." + module.name).VALUE
""",
    "pkg/plugins/__init__.py": "import os\n\nNAMES = os.listdir('data/listed')\n",
    "pkg/plugins/one.py": "VALUE = 1\n",
    "data/lazy.txt": "lazy",
    "data/chosen.txt": "chosen",
    "data/listed/a.txt": "a",
    "data/hooked/a.txt": "a",
    "data/asked.txt": "asked",
    "data/size.txt": "size",
    "data/rewritten.txt": "before",
    "data/cat.txt": "cat",
    "data/in_folder.txt": "folder",
    "data/run.sh": "#!/bin/sh\n",
    "data/twice.py": "def fails():\n    raise ValueError\n",
    "pkg/keeping.py": """
from pathlib import Path

class Patterns:
    def __init__(self):
        self._found = {}

    def _make(self, key):
        return self._part() + key

    def _part(self):
        return "part "

    def __call__(self, key):
        if key not in self._found:
            self._found[key] = self._make(key)
        return self._found[key]

PATTERNS = Patterns()
_TEXT = None

def text():
    global _TEXT
    if _TEXT is None:
        _TEXT = Path("data/kept.txt").read_text() + decorated()
    return _TEXT

def decorated():
    return "!"

def other():
    return 3

class Lexer:
    one = None

    @classmethod
    def get(cls):
        if cls.one is None:
            cls.one = cls()
            cls.one.fill()
        return cls.one

    def fill(self):
        self.words = ["word"]

    def count(self):
        if not hasattr(self, "_number"):
            self._number = numbered()
        return self._number

def numbered():
    return 5

_IS_READY = False
READY = []

def be_ready():
    global _IS_READY
    if _IS_READY:
        return
    make_ready()
    _IS_READY = True

def make_ready():
    READY.append("ready")
""",
    "data/kept.txt": "kept",
    "tests/test_keeping.py": """
from pkg import keeping

def test_pattern_first():
    assert keeping.PATTERNS("a") == "part a"
    assert keeping.other() == 3

def test_pattern_second():
    assert keeping.PATTERNS("a") == "part a"

def test_filled_first():
    assert keeping.Lexer.get().words == ["word"]

def test_filled_second():
    assert keeping.Lexer.get().words == ["word"]

def test_number_first():
    assert keeping.Lexer.get().count() == 5

def test_number_second():
    assert keeping.Lexer.get().count() == 5

def test_ready_first():
    keeping.be_ready()
    assert keeping.READY == ["ready"]

def test_ready_second():
    keeping.be_ready()
    assert keeping.READY == ["ready"]

def test_text_first():
    assert keeping.text() == "kept!"

def test_text_second():
    assert keeping.text() == "kept!"
""",
    "tests/conftest.py": """
import os

def pytest_sessionstart(session):
    session.names = os.listdir("data/hooked")
""",
    "tests/test_lazy.py": """
def test_lazy_first():
    from pkg import front
    assert front.LAZY == "lazy"

def test_lazy_second():
    from pkg import front
    assert front.LAZY == "lazy"
""",
    "tests/test_chosen.py": """
import importlib

def test_chosen_first():
    assert importlib.import_module("pkg." + "chosen").VALUE

def test_chosen_second():
    assert importlib.import_module("pkg." + "chosen").VALUE
""",
    "tests/test_chosen_later.py": """
import importlib

def test_chosen_elsewhere():
    assert importlib.import_module(".chosen", "pkg").VALUE
""",
    "tests/test_registry.py": """
import pkg.registry

def test_registry_first():
    pkg.registry.load()
    assert pkg.registry.FOUND == {"one": 1}

def test_registry_second():
    assert pkg.registry.FOUND == {"one": 1}
""",
    "tests/test_used.py": """
import os
import shutil
import sqlite3
import subprocess
import sys
import traceback
from pathlib import Path

def test_exists():
    assert Path("data/asked.txt").exists()

def test_absent():
    assert not os.path.exists("data/absent.txt")

def test_absent_opened():
    try:
        open("data/absent.txt")
    except FileNotFoundError:
        pass

def test_hooked():
    assert Path("data/hooked/a.txt").read_text() == "a"

def test_size():
    assert os.stat("data/size.txt").st_size == 4

def test_executable():
    assert os.access("data/run.sh", os.X_OK)

def test_folder():
    folder = os.open("data", os.O_RDONLY)
    file = os.open("in_folder.txt", os.O_RDONLY, dir_fd=folder)
    assert os.read(file, 9) == b"folder"
    os.close(file)
    os.close(folder)

def test_listed_by_number():
    folder = os.open("data/listed", os.O_RDONLY)
    assert os.listdir(folder) == ["a.txt"]
    os.close(folder)

def test_database():
    with sqlite3.connect("file:data/rows.sqlite?mode=ro", uri=True) as connection:
        assert connection.execute("select * from numbers").fetchall() == [(1,)]

def test_archive_first():
    sys.path.insert(0, "data/modules.zip")
    import zipped
    assert zipped.VALUE == 1

def test_archive_second():
    assert sys.modules["zipped"].VALUE == 1

def test_cat():
    assert subprocess.check_output(["cat", "data/cat.txt"]) == b"cat"

def test_cat_elsewhere(tmp_path):
    path = os.path.abspath("data/cat.txt")
    assert subprocess.check_output(["cat", path], cwd=tmp_path) == b"cat"

def test_program_elsewhere(tmp_path):
    assert subprocess.check_output(["pwd"], cwd=tmp_path)

def test_program_that_reads_nothing():
    assert subprocess.check_output(["uname"])
    assert subprocess.check_output(["uname"], env={"LC_ALL": "C", "PATH": os.environ["PATH"]})

def test_rewritten():
    file = Path("data/rewritten.txt")
    assert file.read_text() == "before"
    file.write_text("after")

def test_touched():
    os.utime("data/size.txt")

def test_shell():
    assert os.system("cat data/cat.txt > /dev/null") == 0

def test_copied(tmp_path):
    shutil.copystat("data/asked.txt", shutil.copyfile("data/asked.txt", tmp_path / "x"))

def test_written():
    path = Path("data/out.sqlite")
    assert not path.exists()
    path.write_text("out")
    assert path.stat().st_size == 3

def test_resolved():
    assert Path(__file__).resolve().name == "test_used.py"
""",
}
# Which run whatever changed.
UNKNOWN = {"test_cat", "test_cat_elsewhere", "test_shell", "test_rewritten"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    import sqlite3
    import zipfile

    root = tmp_path_factory.mktemp("used")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "data/run.sh").chmod(0o755)
    with sqlite3.connect(root / "data/rows.sqlite") as connection:
        connection.execute("create table numbers (number int)")
        connection.execute("insert into numbers values (1)")
    with zipfile.ZipFile(root / "data/modules.zip", "w") as archive:
        archive.writestr("zipped.py", "VALUE = 1\n")
    return Project.recorded(root)


def selected(project: Project) -> set[str]:
    record = project.record
    now = ProjectState(environment=record.states[0].environment, files=files_of(project.root))
    changes = Changes(record, Sources(project.root), now)
    return {n.split("::")[1] for n in record.tests if changes.reason(n, None) is not None}


LAZY = {"test_lazy_first", "test_lazy_second"}
CHOSEN = {"test_chosen_first", "test_chosen_second", "test_chosen_elsewhere"}
REGISTRY = {"test_registry_first", "test_registry_second"}
ASKED = {"test_exists", "test_copied"}


def test_only_tests_with_unknown_files_run_without_a_change(project: Project) -> None:
    assert selected(project) == UNKNOWN


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        pytest.param("data/lazy.txt", "other", LAZY, id="opened-by-a-lazy-import"),
        pytest.param("pkg/lazy.py", "VALUE = 'lazy'\n", LAZY, id="lazy-import"),
        pytest.param("data/chosen.txt", None, CHOSEN, id="asked-by-an-import"),
        pytest.param("pkg/chosen.py", "VALUE = 1\n", CHOSEN, id="imported-by-name"),
        pytest.param("pkg/plugins/one.py", "VALUE = 2\n", REGISTRY, id="plug-in"),
        pytest.param("pkg/plugins/two.py", "VALUE = 2\n", REGISTRY, id="new-plug-in"),
        pytest.param("data/listed/b.txt", "b", {*REGISTRY, "test_listed_by_number"}, id="listed"),
        pytest.param("data/asked.txt", None, ASKED, id="gone"),
        pytest.param("data/absent.txt", "", {"test_absent", "test_absent_opened"}, id="new"),
        pytest.param("data/listed/.b", "b", None, id="hidden-in-a-listed-folder"),
        pytest.param("data/hooked/a.txt", None, None, id="listed-by-a-hook"),
        pytest.param("data/size.txt", "longer", {"test_size"}, id="size"),
        pytest.param("data/in_folder.txt", "x", {"test_folder"}, id="in-an-open-folder"),
        pytest.param("data/rows.sqlite", "x", {"test_database"}, id="database"),
        pytest.param("data/modules.zip", "x", None, id="archive"),
        pytest.param("data/cat.txt", "x", set(), id="of-a-process"),
    ],
)
def test_files_count_however_they_are_used(
    project: Project, path: str, text: str | None, expected: set[str] | None
) -> None:
    file = project.root / path
    before = file.read_bytes() if file.exists() else None
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    found = selected(project)
    if before is None:
        file.unlink()
    else:
        file.write_bytes(before)
    if expected is None:  # loaded into a process that goes on
        expected = {name.split("::")[1] for name in project.record.tests}
    assert found == expected | UNKNOWN


PATTERN = {"test_pattern_first", "test_pattern_second"}
TEXT = {"test_text_first", "test_text_second"}
NUMBER = {"test_number_first", "test_number_second"}
FILLED = {"test_filled_first", "test_filled_second", *NUMBER}
READY = {"test_ready_first", "test_ready_second"}


@pytest.mark.parametrize(
    ("path", "old", "new", "expected"),
    [
        pytest.param("pkg/keeping.py", '"part "', '"other "', PATTERN, id="of-an-object"),
        pytest.param("pkg/keeping.py", '"!"', '"?"', TEXT, id="of-a-module"),
        pytest.param("data/kept.txt", "kept", "other", TEXT, id="file"),
        pytest.param("pkg/keeping.py", '["word"]', '["other"]', FILLED, id="filled-later"),
        pytest.param("pkg/keeping.py", "return 5", "return 6", NUMBER, id="asked-by-hasattr"),
        pytest.param("pkg/keeping.py", '("ready")', '("other")', READY, id="behind-a-flag"),
        pytest.param("pkg/keeping.py", "return 3", "return 4", {"test_pattern_first"}, id="beside"),
    ],
)
def test_what_computed_a_kept_value_counts_for_all_who_ask_for_it(
    project: Project, path: str, old: str, new: str, expected: set[str]
) -> None:
    file = project.root / path
    before = file.read_text()
    file.write_text(before.replace(old, new, 1))
    found = selected(project)
    file.write_text(before)
    assert found == expected | UNKNOWN


def test_a_program_that_is_none_any_more_counts(project: Project) -> None:
    path = project.root / "data/run.sh"
    path.chmod(0o644)
    found = selected(project)
    path.chmod(0o755)
    assert found == {"test_executable"} | UNKNOWN


def test_a_problem_names_the_program(project: Project) -> None:
    problem = project.record.tests["tests/test_used.py::test_cat"].problem
    assert problem == "it starts cat, and nobody knows which files that reads"


def test_functions_of_os_can_what_they_could() -> None:
    code = (
        "import os\nable = [os.stat in s for s in (os.supports_fd, os.supports_follow_symlinks)]\n"
        "import pickle, sys\nfrom pytest_megatron.changed.watch import Watch\n"
        "Watch('.', sys.argv[1], has_windows=True)\n"
        "import shutil\n"
        "now = [os.stat in s for s in (os.supports_fd, os.supports_follow_symlinks)]\n"
        "assert now == able and pickle.loads(pickle.dumps(os.stat)) is os.stat\n"
    )
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([sys.executable, "-c", code, directory], check=True, cwd=Path(directory))
