"""A summary's Markdown: nothing in names and logs is markup, and it fits where it has to."""

from __future__ import annotations

import re

import pytest

from pytest_megatron.base.text import code, escaped, fenced, plain
from pytest_megatron.ci.summary.merge import merge
from pytest_megatron.ci.summary.model import ItemCause, JobItem, JobRun
from pytest_megatron.ci.summary.render import (
    COMMENT_BYTES,
    STEP_SUMMARY_BYTES,
    as_markdown,
    as_text,
)

EVIL = "x`</code>|<script>alert(1)</script> @everyone \x1b[31mred\x1b[0m ![a](http://e)\u202e"


def job(items: int, *, text: str = "assert 1 == 2", name: str = "unit") -> JobRun:
    """Return a job in which every item failed for a reason of its own."""
    letters = (
        f"{number:x}".translate(str.maketrans("0123456789", "ghijklmnop"))
        for number in range(items)
    )
    found = tuple(
        JobItem(
            node_id=f"tests/test_{n}.py::test[{EVIL}]",
            job=name,
            verdict="failed",
            cause=ItemCause(text=f"{n}: {text}", rank=1, place="run/1.log:7", line=EVIL),
            reproduce=f"pytest-megatron repro logs.zip {n}",
        )
        for n in letters
    )
    return JobRun(name=name, artifact="logs.zip", items=found)


def test_names_and_logs_are_inert() -> None:
    """Text of shells and logs stays text and is never taken for code."""
    page = as_markdown(merge([job(1, text=f"```\n# heading\n{EVIL}", name=EVIL)]))
    outside = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", page)
    outside = re.sub(r"(?s)(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)
    assert not re.search(r"[<>]|\x1b|\u202e|!\[|@\w", outside)
    assert not re.search(r"\x1b|\u202e", page)
    assert "\n````text\n" in page


def test_a_large_summary_fits_a_step_and_a_comment() -> None:
    found = merge([job(8000, text="x" * 200)])
    step, comment = as_markdown(found), as_markdown(found, COMMENT_BYTES)
    sizes = len(step.encode()), len(comment.encode())
    assert STEP_SUMMARY_BYTES / 2 < sizes[0] <= STEP_SUMMARY_BYTES
    assert COMMENT_BYTES / 2 < sizes[1] <= COMMENT_BYTES
    assert re.search(r"\.\.\. and \d+ more; `summary\.json` has all\.", comment)
    assert comment.startswith("## :x: failed: 8000 of 8000 items")


def test_failures_of_the_code_come_first_and_one_cause_is_told_once() -> None:
    def item(name: str, verdict: str, text: str, *, transient: bool = False) -> JobItem:
        cause = ItemCause(text=text, is_transient=transient)
        return JobItem(node_id=name, job="j", verdict=verdict, cause=cause)

    found = JobRun(
        name="j",
        artifact="a",
        items=(
            item("lost", "broken", "no route", transient=True),
            item("one", "failed", "assert 1 == 2"),
            item("two", "failed", "step 7: off"),
            item("three", "failed", "step 8: off"),
        ),
    )
    summary = merge([found])
    assert [[i.node_id for i in group] for group in summary.groups] == [
        ["two", "three"],
        ["one"],
        ["lost"],
    ]
    assert "the same in three (j)" in as_text(summary)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        pytest.param(code("a`b``c"), "``` a`b``c ```", id="backticks"),
        pytest.param(code("a\nb\x00"), "`a b`", id="one-line"),
        pytest.param(code(""), "` `", id="empty"),
        pytest.param(code("abcdef", 5), "`ab...`", id="cut"),
        pytest.param(escaped("<b>|*"), "\\<b\\>\\|\\*", id="prose"),
        pytest.param(fenced("```\nx"), "````text\n```\nx\n````", id="fence"),
        pytest.param(plain("\x1b]8;;http://e\x07x\x1b[1m"), "x", id="links-of-terminals"),
    ],
)
def test_texts_in_markdown(shown: str, expected: str) -> None:
    assert shown == expected
