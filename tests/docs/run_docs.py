"""Runs the commands of pages as they are typed: `python tests/docs/run_docs.py [PAGE]...`.

Without a page: README, the tutorials and every how-to, as far as their blocks can run here. Exit
code 1 if a command ended otherwise or printed something else than its page says. At the end it
prints the CPU seconds of the commands, the most expensive ones first.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from literate import Pages, pages

NUM_SHOWN = 20


def main() -> int:
    """Run the pages that are named; print what differs."""
    num_wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        runner = Pages(Path(directory))
        for page in [Path(word).absolute() for word in sys.argv[1:]] or pages():
            wrong = runner.problems(page)
            print(f"{page.name}: {len(wrong)} wrong", *wrong, sep="\n", flush=True)
            num_wrong += len(wrong)
    print(f"{sum(seconds for seconds, _, _ in runner.spent):.1f} s of CPU")
    for seconds, name, command in sorted(runner.spent, reverse=True)[:NUM_SHOWN]:
        print(f"{seconds:6.1f}  {name}: {command}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
