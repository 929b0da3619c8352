"""Runs the commands of pages as they are typed: `python tests/docs/run_docs.py [PAGE]...`.

Without a page: README, the tutorials and every how-to, as far as their blocks can run here. Exit
code 1 if a command ended otherwise or printed something else than its page says.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from literate import Pages, pages


def main() -> int:
    """Run the pages that are named; print what differs."""
    num_wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        runner = Pages(Path(directory))
        for page in [Path(word).absolute() for word in sys.argv[1:]] or pages():
            wrong = runner.problems(page)
            print(f"{page.name}: {len(wrong)} wrong", *wrong, sep="\n", flush=True)
            num_wrong += len(wrong)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
