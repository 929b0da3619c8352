"""Every template with hostile values: they stay text, in HTML, in Markdown and in its tables."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import pytest_megatron
from pytest_megatron.base.templates import render, render_macro

PACKAGE = Path(pytest_megatron.__file__).parent
EVIL = (
    "x</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'|`</code>` [a](http://e)"
    "\n# head\n| a | b |\n@everyone \x1b[31mred\x1b]8;;http://e\x07 \x00\u202e\u2066\ud800"
)
CAUSE = {
    "text": EVIL,
    "rank": 1,
    "place": EVIL,
    "line": EVIL,
    "signature": EVIL,
    "advice": EVIL,
    "is_transient": True,
}
ITEM = {
    "node_id": EVIL,
    "job": EVIL,
    "verdict": "failed",
    "cause": CAUSE,
    "reproduce": EVIL,
    "how_flaky": EVIL,
    "duration_s": 1.0,
}
JOB = {"name": EVIL, "verdict": "failed", "counts": EVIL, "artifact": EVIL}
GROUP = [ITEM] * 9
SUMMARY = {"verdict": "failed", "headline": EVIL, "fetch": EVIL}
GOLDENS: Mapping[str, object] = {
    "headline": EVIL,
    "columns": tuple("tuvwxyz"),
    "rows": [(EVIL, {"metric": EVIL, "is_outside": True}, ["1 -> 2", *"bcde"])],
    "files": [("New", [EVIL])],
}
MACROS: dict[str, tuple[object, ...]] = {
    "title": (EVIL, SUMMARY),
    "planned": (SUMMARY,),
    "problems": ([(EVIL, ()), (EVIL, [EVIL]), (EVIL, [EVIL] * 30)],),
    "fetch": (SUMMARY,),
    "group": (GROUP,),
    "flaky": ([ITEM],),
    "jobs": ([JOB],),
}


def check_markdown(page: str) -> None:
    outside = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", page)
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    outside = re.sub(r"(?<![`\\])(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)
    assert not re.search(r"(?<!\\)[<>](?! 1e-6|=)(?<!-)(?<!->)", outside.replace("->", ""))
    assert not re.search(r"(?<!\\)\]\(|@\w|^# |^\| a \|", outside, re.MULTILINE)
    assert not re.search("[\x00\x1b\u202e\u2066]", page)
    for row in rows:
        cells = len(re.findall(r"(?<!\\)\|", row))
        rules = {r.count("|") for r in rows if re.fullmatch(r"[|:\- ]+", r)}
        assert cells in rules, row


def test_a_value_is_text_in_markdown() -> None:
    page = render("goldens.md", **GOLDENS)
    assert "alert(1)" in page
    check_markdown(page)


@pytest.mark.parametrize("macro", MACROS)
def test_a_value_is_text_in_a_part_of_a_summary(macro: str) -> None:
    check_markdown(render_macro("ci_summary.md", macro, *MACROS[macro]))


def test_a_name_that_a_template_is_not_given_is_an_error() -> None:
    with pytest.raises(Exception, match="'headline' is undefined"):
        render("goldens.md")


def test_a_start_of_pytest_does_not_load_jinja2() -> None:
    modules = "pytest_megatron.plugin", "pytest_megatron.gangs.controller.plugin"
    program = f"import sys, {', '.join(modules)}; sys.exit('jinja2' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
