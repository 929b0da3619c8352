"""Clusters of goldens that change in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from staged_run import curve, metric_map

from pytest_megatron.workloads.golden.model import Golden, Provenance
from pytest_megatron.workloads.refresh.difference import (
    FileDifference,
    GoldenCluster,
    cluster,
    differ,
)
from pytest_megatron.workloads.refresh.pull_request import markdown
from pytest_megatron.workloads.refresh.text import differences_text

OLD = Provenance(image="dev:1", versions={"torch": "2.9"}, config_hash="a")
NEW = replace(OLD, image="dev:2", versions={"torch": "2.11"})


def golden(factor: float = 1.0, provenance: Provenance = NEW, first: int = 6) -> Golden:
    values = {s: float(v) * (factor if s >= first else 1.0) for s, v in curve().items()}
    return Golden(path="g.json", metrics=metric_map(values), provenance=provenance)


def changed(name: str, factor: float, *, first: int = 6) -> FileDifference:
    return differ(name, golden(1.0, OLD), golden(factor, first=first))


def clusters(*differences: FileDifference) -> tuple[GoldenCluster[FileDifference], ...]:
    return cluster(differences, lambda difference: difference)


def test_one_cause_of_one_size_is_one_cluster_and_outliers_come_first() -> None:
    many = [changed(f"many{n}", 1.0004 + n / 1e5) for n in range(20)]
    found = clusters(*many, changed("outlier", 1.04), changed("both", 1.00005))
    assert [len(one.members) for one in found] == [1, 1, 20]
    assert found[0].text == (
        "1 golden: changed; loss worse, by < 1e-1 in the median; from one of the first 10 steps "
        "on; outside the band; image dev:1 -> dev:2, torch 2.9 -> 2.11"
    )
    assert found[1].kind.direction == "both ways"
    assert found[2].members[0].path == "many19"  # the largest change of them


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(changed("other", 0.9996), id="direction"),
        pytest.param(changed("other", 1.004), id="size"),
        pytest.param(changed("other", 1.0004, first=1), id="start"),
        pytest.param(
            differ("other", golden(1.0, OLD), golden(1.0004, replace(NEW, image="dev:3"))),
            id="cause",
        ),
        pytest.param(differ("other", None, golden()), id="new"),
    ],
)
def test_what_changes_in_another_way_is_another_cluster(other: FileDifference) -> None:
    assert len(clusters(changed("a", 1.0004), changed("b", 1.0004), other)) == 2


def test_a_changed_case_and_an_unchanged_golden_make_no_cluster_of_their_own() -> None:
    case = differ("b", golden(1.0, OLD), golden(1.0004, replace(NEW, config_hash="b")))
    same = differ("c", golden(), golden())
    (one,) = clusters(changed("a", 1.0004), case, same)
    assert [member.path for member in one.members] == ["a", "b"]


def test_what_the_gate_refuses_is_apart() -> None:
    refused: Mapping[str, list[str]] = {"a": [], "b": ["loss-worse"]}
    found = cluster(
        [changed("a", 1.0004), changed("b", 1.0004)], lambda d: d, lambda d: refused[d.path]
    )
    assert {one.kind.refused for one in found} == {(), ("loss-worse",)}


def test_only_many_goldens_are_listed_by_their_change() -> None:
    many = [changed(f"golden_values/m{n}/g.json", 1.0004) for n in range(8)]
    line = "8 goldens: changed; loss worse, by < 1e-3 in the median"
    assert line in differences_text(many)
    assert "8 goldens: changed; loss worse, by" in markdown(many)
    assert "and 5 more" in markdown(many)
    for text in (differences_text(many[1:]), markdown(many[1:])):
        assert "in the median; from" not in text
