"""The headline of a failure, which every place shows, and the command that reproduces it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from pytest_megatron.base.text import counted, grouped, listed, name_ranks

_MOST_LISTED = 3
_MOST = 500  # characters of what somebody did, which may quote a log


def make_headline(who: str, what: str, *, where: str = "", when: str = "") -> str:
    """Return who did what, where and when, in one line.

    Args:
        who: `rank 1 of 2`, `the script`, `lm loss`; empty where `what` is a sentence.
        what: What it did, to go on after that: `raised ValueError: x`.
        where: `train.py:90 in step`, if it is known.
        when: `after iteration 3 of 10`, likewise.
    """
    line = what.strip().partition("\n")[0].rstrip()
    line = line if len(line) <= _MOST else f"{line[:_MOST]}..."
    place = f"{line.rstrip('.')} at {where}" if where else line
    return ", ".join(filter(None, (f"{who} {place}".strip(), when)))


def make_advice(advice: str, *, known_as: str | None = None, again: str = "") -> str:
    """Return what to do about a failure, in one line.

    Args:
        advice: What to do, from the signature.
        known_as: Id of the signature, where it names a cause.
        again: Whether it is run again, and why not.
    """
    if known_as is None:
        return f"what to do: {advice}"
    return f"known as {known_as}{f' ({again})' if again else ''}: {advice}"


def where_ranks_were(frames: Mapping[int, str | None]) -> str:
    """Return `a.py:3 in f`, or `a.py:3 in f (rank 1), b.py:4 in g (ranks 0, 2)`, the fewest first.

    Args:
        frames: Rank -> where it was, None where that is not known.
    """
    found = grouped((frame, rank) for rank, frame in frames.items())
    if len(found) <= 1:
        return next(iter(found), None) or ""
    ordered = sorted(found.items(), key=lambda one: (len(one[1]), one[1]))
    return ", ".join(f"{frame} ({name_ranks(ranks)})" for frame, ranks in ordered if frame)


def one_process_problem(node_ids: Sequence[str]) -> str:
    """Return what is wrong with tests of several ranks that passed on one, and what to do."""
    return (
        f"{counted(len(node_ids), 'test')} with process_group or world_size ran on one process, so "
        f"that nothing between ranks was tested: {listed(node_ids, _MOST_LISTED)}; give --ranks N "
        f"or --gpus N; where one rank is meant, the mark world_size(1) or controller, or "
        f"megatron_ranks = 1 in the ini file"
    )


# Variables that ask for a part of a workload, or for another number of ranks.
REPEAT = "PYTEST_MEGATRON_REPEAT"
PHASE = "PYTEST_MEGATRON_PHASE"
RANKS = "PYTEST_MEGATRON_RANKS"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_PATH = re.compile(r"(?<![\w:/])/[^\s;,:']+")
_NUMBER = re.compile(r"\d+")
_RANK = re.compile(r"^\[rank \d+\] ")
_RANKS = re.compile(r"\branks? #(?:-#)?(?:, #(?:-#)?)*")  # who was late differs from run to run
_ROW = re.compile(r"#(?:, #)+")  # and so does how much a list holds
_HELD = re.compile(r"\{.*")  # or a mapping, such as an environment, which is never the same
_MOST_OF_FINGERPRINT = 160  # characters


def reproduce_line(where: str, node_id: str) -> str:
    """Return the last line of a failure's report: the command that reproduces it.

    Args:
        where: The run directory, as the user would type it.
        node_id: Node id of the item.
    """
    return f"reproduce: pytest-megatron repro {shlex.quote(where)} {shlex.quote(node_id)}"


def headline_fingerprint(headline: str, end: str = "") -> str:
    """Return the text that two failures of a test share if they have the same cause.

    Args:
        headline: The printed failure; its first line counts.
        end: How the execution ended: `died`, `hung`, ...
    """
    first = _RANK.sub("", headline.strip().partition("\n")[0])
    plain = _HELD.sub("{", _NUMBER.sub("#", _PATH.sub("PATH", _ADDRESS.sub("#", first))))
    plain = _ROW.sub("#", _RANKS.sub("ranks", plain))
    return "|".join((end, plain[:_MOST_OF_FINGERPRINT]))
