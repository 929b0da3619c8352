"""Command that reproduces a failure, its variables, and the fingerprint of equal failures. Pure."""

from __future__ import annotations

import re
import shlex

# Variables by which `repro` asks for a part of a workload, or for another number of ranks.
REPEAT = "PYTEST_MEGATRON_REPEAT"
PHASE = "PYTEST_MEGATRON_PHASE"
RANKS = "PYTEST_MEGATRON_RANKS"
CHECKPOINTS = "PYTEST_MEGATRON_CHECKPOINTS"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_PATH = re.compile(r"(?<![\w:/])/[^\s;,:']+")
_NUMBER = re.compile(r"\d+")
_RANK = re.compile(r"^\[rank \d+\] ")
_RANKS = re.compile(r"\branks? #(?:-#)?(?:, #(?:-#)?)*")  # who was late differs from run to run
_ROW = re.compile(r"#(?:, #)+")  # and so does how much a list holds
_HELD = re.compile(r"\{.*")  # or a mapping, such as an environment, which is never the same
_MOST = 160


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
    return "|".join((end, plain[:_MOST]))
