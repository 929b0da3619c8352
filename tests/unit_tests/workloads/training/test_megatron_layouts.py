"""The rules of the layout against the installed megatron-core, on layouts drawn at random."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from check_rows import case, row

from pytest_megatron.workloads.training.checks.check import findings_of
from pytest_megatron.workloads.training.checks.layout import hits_of

_GUEST = Path(__file__).with_name("megatron_layouts.py")
_OPTIONS = {
    "layers": "--num-layers",
    "hidden": "--hidden-size",
    "heads": "--num-attention-heads",
    "groups": "--num-query-groups",
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "micro": "--micro-batch-size",
    "batch": "--global-batch-size",
    "first": "--decoder-first-pipeline-num-layers",
    "last": "--decoder-last-pipeline-num-layers",
    "virtual": "--num-virtual-stages-per-pipeline-rank",
}


def draw(chance: random.Random) -> dict[str, int]:
    heads = chance.choice([4, 6, 8, 12])
    layout = {
        "layers": chance.choice([4, 6, 8, 9, 12]),
        "heads": heads,
        "hidden": heads * 8 if chance.random() < 0.9 else 100,
        "groups": chance.choice([1, 2, 4]) if chance.random() < 0.9 else 3,
        "tp": chance.choice([1, 2, 4]) if chance.random() < 0.9 else 3,
        "pp": chance.choice([1, 2, 3, 4]),
        "dp": chance.choice([1, 2]),
        "micro": chance.choice([1, 2]),
        "batch": chance.choice([8, 16, 24]) if chance.random() < 0.9 else 9,
    }
    for name, values in (("first", [1, 2, 3]), ("last", [1, 2, 3]), ("virtual", [2, 3])):
        if chance.random() < 0.25:
            layout[name] = chance.choice(values)
    return layout


def is_sound(layout: dict[str, int]) -> bool:
    given = {option: str(layout[name]) for name, option in _OPTIONS.items() if name in layout}
    ranks = layout["tp"] * layout["pp"] * layout["dp"]
    some = case({**given, "--group-query-attention": "true"}, sound={})
    return not findings_of(hits_of(row(gpus=ranks, nodes=1, platforms="dgx_gb200"), some, {}))


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_what_the_rules_refuse_is_what_megatron_does_not_build() -> None:
    chance = random.Random(7)
    layouts = [draw(chance) for _ in range(500)]
    command = [sys.executable, "-W", "ignore", str(_GUEST)]
    done = subprocess.run(
        command, input=json.dumps(layouts), capture_output=True, text=True, check=True
    )
    built = json.loads(done.stdout)
    ours = [is_sound(layout) for layout in layouts]
    assert 50 < sum(built) < 450
    assert not all(ours)
    assert [one for one, a, b in zip(layouts, ours, built, strict=True) if b and not a] == []
