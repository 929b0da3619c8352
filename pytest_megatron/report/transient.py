"""Whether the failure of a distributed test was the machine's or the network's: pure.

The headline decides what failed; a text of the table that stands somewhere else does not make an
assertion transient.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pytest_megatron.report.merge import Merged
from pytest_megatron.report.phase import longrepr_text
from pytest_megatron.triage.signature import Table
from pytest_megatron.verdict.signature import Signature, is_exception, is_raised, match_signature

_RANK = re.compile(r"^\[rank \d+\] ")
_NEVER = re.compile(r"(?:AssertionError\b|assert\b|Failed\b|XPASS\b)")
_RAISED = re.compile(r"(?m)^E\s+(.*)$")


def transient_cause(
    merged: Sequence[Merged],
    log_lines: Iterable[str],
    last_words: Iterable[str] = (),
    table: Table | None = None,
) -> Signature | None:
    """Return the signature for which a test is worth running again, or None.

    Args:
        merged: The reports of one execution.
        log_lines: What its ranks wrote to stderr meanwhile. A line there is not why a test failed;
            of these only a genuine cause counts, which forbids a rerun.
        last_words: The end of stderr of ranks that died. Of them an exception counts, and what
            nobody but a failing machine writes.
        table: The signatures; None takes those of the package.
    """
    failed = [m for m in merged if m.outcome == "failed"]
    if not failed or any(_NEVER.match(_RANK.sub("", m.message)) for m in failed):
        return None
    own, others = list(_own_texts(failed)), list(_texts_of_others(failed))
    if is_exception(_RANK.sub("", failed[0].message)) and match_signature(own, table) is None:
        return None  # what other ranks raised is what came of it
    signature = match_signature([*own, *others, *_raised(last_words, table)], table)
    if signature is None or not signature.is_transient:
        return None
    beside = match_signature(_raised(log_lines, table), table)
    return signature if beside is None or beside.is_transient else None


def _raised(lines: Iterable[str], table: Table | None) -> list[str]:
    return [line for line in lines if is_raised(line, table)]


def _own_texts(failed: Iterable[Merged]) -> Iterable[str]:
    """Yield what was raised, without the source lines of a traceback, which only quote."""
    for merged in failed:
        yield from _RANK.sub("", merged.message).splitlines()
        longrepr = None if merged.base is None else merged.base.get("longrepr")
        yield from _RAISED.findall(longrepr_text(longrepr))


def _texts_of_others(failed: Iterable[Merged]) -> Iterable[str]:
    """Yield what the ranks raised that the headline does not name."""
    for merged in failed:
        for _, text in merged.blocks:
            yield from _RAISED.findall(text)
