"""Every template with hostile values: they stay text, in HTML, in Markdown and in its tables."""

from __future__ import annotations

import html.parser
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typing_extensions import override

import pytest_megatron
from pytest_megatron.base.templates import render, render_macro

PACKAGE = Path(pytest_megatron.__file__).parent
EVIL = (
    "x</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'|`</code>` [a](http://e)"
    "\n# head\n| a | b |\n@everyone \x1b[31mred\x1b]8;;http://e\x07 \x00\u202e\u2066\ud800"
)
LINK = {"text": EVIL, "path": f"../{EVIL}"}
FACTS = {"name": EVIL, "started": EVIL}
ATTEMPT = {
    "name": EVIL,
    "record": {"cause": EVIL, "signature": EVIL, "duration_s": 1.0},
    "is_run_again": True,
    "links": [LINK],
}
DIVERGENCE = {
    "order": 1,
    "phase": EVIL,
    "tensor": EVIL,
    "step": 1,
    "microbatch": 0,
    "ranks": [EVIL, EVIL],
    "kind": EVIL,
    "error": 1.0,
    "limit": None,
    "norm_ratio": None,
}
FINDING = {
    "record": {"passed": False, "metric": EVIL},
    "repeat": 1,
    "against": EVIL,
    "short_text": EVIL,
    "largest": None,
}
FRAME = {"title": EVIL, "policy": "", "style": "", "script": ""}
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
PAGES: Mapping[str, Mapping[str, object]] = {
    "page.html": FRAME,
    "item_page.html": {
        **FRAME,
        "item": {
            "node_id": EVIL,
            "record": {"verdict": EVIL, "problem": EVIL},
            "links": [LINK],
            "attempts": [ATTEMPT],
            "triage": [EVIL, EVIL],
            "notes": [EVIL],
            "others": [FINDING, *[{**FINDING, "record": {"passed": True, "metric": EVIL}}] * 9],
            "trace": {
                "verdict": EVIL,
                "num_divergences": 60,
                "num_compared": 70,
                "steps": 2,
                "not_compared": [EVIL],
                "divergences": [DIVERGENCE],
                "hint": EVIL,
            },
            "is_audit": False,
        },
        "tree": [{"name": EVIL, "depth": 1, "divergences": [DIVERGENCE]}],
        "run": FACTS,
        "files": f"../{EVIL}",
        "index": EVIL,
        "facts": [(EVIL, EVIL)],
        "again": EVIL,
        "sections": [],
        "charts": [
            {
                "chart": {"metric": EVIL, "passed": False},
                "svg": "<svg></svg>",
                "rule": EVIL,
                "texts": [EVIL],
                "layers": [(True, EVIL), (False, EVIL)],
            }
        ],
    },
    "index_page.html": {
        **FRAME,
        "heading": EVIL,
        "runs": [
            {
                "facts": FACTS,
                "counts": EVIL,
                "pairs": [(EVIL, EVIL)],
                "num_tests": {EVIL: 1},
                "tests": [1, 2],
                "test_counts": EVIL,
                "files": f"../{EVIL}",
                "shown_tests": [
                    {
                        "node_id": EVIL,
                        "record": {
                            "verdict": EVIL,
                            "duration_s": 1.0,
                            "report": [(EVIL, EVIL)],
                            "world_size": 2,
                        },
                        "problem": EVIL,
                        "ranks": EVIL,
                        "rank_lines": [EVIL, EVIL],
                        "links": [LINK],
                        "is_good": is_good,
                    }
                    for is_good in (True, False)
                ],
            }
        ]
        * 2,
        "rows": [
            {
                "node_id": EVIL,
                "verdict": EVIL,
                "order": 0,
                "page": EVIL,
                "run": EVIL,
                "headline": EVIL,
                "largest": 1.0,
                "amount": EVIL,
                "duration_s": 1.0,
                "num_attempts": 1,
            }
        ],
        "verdicts": [EVIL],
    },
    "goldens.md": {
        "headline": EVIL,
        "columns": tuple("tuvwxyz"),
        "rows": [(EVIL, {"metric": EVIL, "is_outside": True}, ["1 -> 2", *"bcde"])],
        "files": [("New", [EVIL])],
    },
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
USED_BY_OTHERS = {"macros.html", "ci_summary.md"}
BOX = dict.fromkeys(["width", "height", "left", "right", "top", "bottom", "strip_top", "foot"], 100)
PAGES = {
    **PAGES,
    "chart.svg": {
        "chart": {"metric": EVIL, "passed": True, "golden": None, "first_step": 3},
        "box": BOX,
        "curves": [
            {
                **dict.fromkeys(("name", "role", "path", "strip"), EVIL),
                "paint": "#0063b2",
                "legend_x": 1.0,
                "gaps": [(EVIL, 1.0, 2.0)],
            }
        ],
        "more": {"x": 1.0, "number": 2},
        "up_ticks": [(1.0, EVIL)],
        "across_ticks": [(1.0, EVIL)],
        "limit": 1.0,
        "areas": [EVIL],
        "first": 1.0,
    },
}


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_every_template_is_tried() -> None:
    found = PACKAGE.glob("*/templates/*")  # CI's YAML has tests of its own
    names = {path.name for path in found if path.suffix in {".html", ".md", ".svg"}}
    assert names == {*PAGES, *USED_BY_OTHERS}


@pytest.mark.parametrize("name", [name for name in PAGES if not name.endswith(".md")])
def test_a_value_is_text_in_html(name: str) -> None:
    page = render(name, **PAGES[name])
    tags = Tags()
    tags.feed(page)
    assert "alert(1)" in page
    assert not {"img", "iframe"} & {tag for tag, _ in tags.found}
    assert not [attrs for _, attrs in tags.found if "onerror" in attrs]
    assert page.count("<script") == page.count("</script>") <= 2
    assert not [a["href"] for _, a in tags.found if ":" in (a.get("href") or "")]
    assert not re.search("[\x00\x1b\u202e\u2066]", page)


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


@pytest.mark.parametrize("name", [name for name in PAGES if name.endswith(".md")])
def test_a_value_is_text_in_markdown(name: str) -> None:
    page = render(name, **PAGES[name])
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
