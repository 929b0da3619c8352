from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.model import Golden, Provenance
from pytest_megatron.workloads.golden.store import golden_text, read_golden, read_metrics

STATIC: dict[str, JsonValue] = {
    "0": {"generated_tokens": [3, 1, 2], "logprobs": [-1.5, -2.0], "generated_text": "abc"}
}
DYNAMIC: dict[str, JsonValue] = {
    **STATIC,
    "throughput": [1.0, 12.0, 13.0],
    "mem-max-allocated-bytes": 1000,
    "lifetime_prefill_token_count": 4,
}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(json.dumps(STATIC), id="static"),
        pytest.param(json.dumps(json.dumps(STATIC)), id="encoded twice"),
        pytest.param(json.dumps(STATIC["0"]), id="one request without an id"),
    ],
)
def test_every_form_of_megatrons_inference_goldens_is_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "g.json").write_text(text)
    generation = read_golden(tmp_path / "g.json").generation
    assert generation is not None
    request = generation.requests["0"]
    assert (request.tokens, request.text) == ((3, 1, 2), "abc")
    assert request.logprobs == {"logprobs": (-1.5, -2.0)}


def test_what_stands_beside_the_requests_is_no_request(tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(json.dumps(DYNAMIC))
    generation = read_golden(tmp_path / "g.json").generation
    assert generation is not None
    assert list(generation.requests) == ["0"]
    assert (generation.throughput, generation.memory_bytes) == ((1.0, 12.0, 13.0), (1000.0,))
    assert generation.counts == {"lifetime_prefill_token_count": 4.0}


def test_a_written_golden_holds_all_of_the_output_and_its_provenance(tmp_path: Path) -> None:
    (tmp_path / "o.json").write_text(json.dumps(DYNAMIC))
    generation = read_metrics(tmp_path / "o.json").generation
    assert generation is not None
    golden = Golden(
        path="g.json", metrics={}, provenance=Provenance(commit="abc"), generation=generation
    )
    (tmp_path / "g.json").write_text(golden_text(golden))
    written = json.loads((tmp_path / "g.json").read_text())
    assert written == {**DYNAMIC, "_provenance": {"commit": "abc"}}
    golden = read_golden(tmp_path / "g.json")
    assert golden.generation == generation
    assert golden.provenance == Provenance(commit="abc")


def test_experts_are_read_by_position_in_any_order(tmp_path: Path) -> None:
    some = {"routing_indices": [[[2, 1]], [[3, 0]]], "routing_indices_token_indices": [4, 7]}
    whole = {"routing_indices": [[5, 4]]}
    (tmp_path / "g.json").write_text(
        json.dumps({"0": {**some, "latency": 1.0}, "1": {**whole, "latency": 1.0}})
    )
    generation = read_golden(tmp_path / "g.json").generation
    assert generation is not None
    assert [r.routing for r in generation.requests.values()] == [
        {4: ((1, 2),), 7: ((0, 3),)},
        {0: ((4, 5),)},
    ]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"throughput": [1.0]}, "holds no request, expected one object a request, by its id"),
        (
            {"0": {"generated_tokens": [1.5]}},
            "0.generated_tokens[0]: found 1.5, expected an integer > -9.0072e+15 and < 9.0072e+15",
        ),
        (
            {
                "0": {
                    "routing_indices": [[1], [2]],
                    "routing_indices_token_indices": [3],
                    "latency": 1,
                }
            },
            "0: 'routing_indices_token_indices' names row 3 of 2",
        ),
    ],
)
def test_what_no_program_writes_is_named(tmp_path: Path, value: JsonValue, problem: str) -> None:
    (tmp_path / "g.json").write_text(json.dumps(value))
    with pytest.raises(GoldenError) as caught:
        read_golden(tmp_path / "g.json")
    assert str(caught.value) == f"{tmp_path}/g.json: {problem}"


def test_a_logprob_that_is_not_finite_becomes_no_golden(tmp_path: Path) -> None:
    (tmp_path / "o.json").write_text('{"0": {"logprobs": [-1.0, NaN]}}')
    generation = read_metrics(tmp_path / "o.json").generation
    assert generation is not None
    golden = Golden(path="g", metrics={}, provenance=Provenance(), generation=generation)
    with pytest.raises(GoldenError, match="logprobs of request '0' is nan at position 1"):
        golden_text(golden)
