"""Counts what `pytest-megatron adopt` finds, misses and makes up in checkouts of real projects.

    python tests/adoption/run_adoption.py --checkouts DIR tuned.tsv held_out.tsv

DIR holds a checkout of each project in a folder `owner+name`. A list has a line for each place that
a person found by reading: the project, `file:line`, and the kind. Lines are those of the launcher's
word, of `class`, or of the call.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from pytest_megatron.adopt.find import search

HERE = Path(__file__).parent


def read_list(path: Path) -> dict[str, set[tuple[str, str]]]:
    """Return places and kinds by project; a line with nothing but a project has none."""
    places: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        project, *place = line.split("\t")
        places[project] |= {(place[0], place[1])} if place else set()
    return places


def main() -> int:
    """Print a line for each project and the sums of each list; 1 if a checkout is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--verbose", action="store_true", help="print each difference")
    parser.add_argument("lists", nargs="+", type=Path)
    given = parser.parse_args()
    is_complete = True
    for name in given.lists:
        path = name if name.exists() else HERE / name
        sums = [0, 0, 0]
        for project, expected in sorted(read_list(path).items()):
            checkout = given.checkouts / project.replace("/", "+")
            if not checkout.is_dir():
                print(f"{project}: no checkout in {checkout}")
                is_complete = False
                continue
            inventory = search(checkout)
            found = {(one.where, one.kind) for one in inventory.findings}
            missed, made_up = expected - found, found - expected
            counts = len(expected & found), len(missed), len(made_up)
            sums = [a + b for a, b in zip(sums, counts, strict=True)]
            print(f"{project:32} found {counts[0]:4}  missed {counts[1]:3}  wrong {counts[2]:3}")
            if given.verbose:
                for sign, places in (("-", missed), ("+", made_up)):
                    for where, kind in sorted(places):
                        print(f"  {sign} {where} {kind}")
        print(f"{path.name:32} found {sums[0]:4}  missed {sums[1]:3}  wrong {sums[2]:3}\n")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
