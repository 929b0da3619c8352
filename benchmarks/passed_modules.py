"""Count the modules whose functions one workload passes: `python benchmarks/passed_modules.py`.

Runs one row of a recipe on the local engine, in this process, and counts modules of the package of
which a function is executed, from the collection of the recipe to the verdict. Importing a module
does not count; processes that the run starts do not count. `-v` lists the modules.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import pytest

PACKAGE = Path(__file__).parents[1] / "pytest_megatron"
ITEM = "recipes/gpt.yaml::tp1_pp1[dev-cpu]"


class PassedModules:
    """Plugin that notes the modules passed in each part of a run.

    Attributes:
        found: Files by part.
    """

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {"collect": set(), "train": set(), "judge": set()}

    def _watch(self, part: str) -> Generator[None, object, object]:
        files = self.found[part]

        def profile(frame: FrameType, event: str, _argument: object) -> None:
            is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # no module, no class body
            if event == "call" and is_function:
                files.add(frame.f_code.co_filename)

        sys.setprofile(profile)
        threading.setprofile(profile)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # as its documentation says

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Watch the collection."""
        return (yield from self._watch("collect"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        """Watch the training."""
        return (yield from self._watch("train"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Watch the judgement."""
        return (yield from self._watch("judge"))

    def modules(self, *parts: str) -> list[str]:
        """Return the names of the package's modules that were passed in some parts."""
        files = {Path(name) for part in parts for name in self.found[part]}
        own = (file for file in files if file.is_relative_to(PACKAGE))
        return sorted(str(file.relative_to(PACKAGE).with_suffix("")) for file in own)


def main() -> int:
    """Run one workload and print the number of modules; return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("item", nargs="?", default=ITEM)
    parser.add_argument("-v", "--verbose", action="store_true")
    arguments = parser.parse_args()
    passed = PassedModules()
    with tempfile.TemporaryDirectory() as directory:
        run_dir = f"{directory}/run"
        words = [*("-p", "megatron", "-q", "--tb", "short", "--run-dir", run_dir), arguments.item]
        code = pytest.main(words, [passed])
    workload = passed.modules("train", "judge")
    print(f"{len(passed.modules(*passed.found))} modules from the recipe to the verdict:", end=" ")
    print(", ".join(f"{part} {len(passed.modules(part))}" for part in passed.found), end="; ")
    print(f"train and judge {len(workload)}")
    if arguments.verbose:
        for name in passed.modules(*passed.found):
            parts = (part for part in passed.found if name in passed.modules(part))
            print(f"  {name}: {', '.join(parts)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
