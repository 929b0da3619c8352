from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.errors import CaseError
from pytest_megatron.launch.case import read_case
from pytest_megatron.verdict.modes import metric_names_of


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        pytest.param("", "METRICS is missing, expected some of", id="none"),
        pytest.param("METRICS:\n", "METRICS is empty, so nothing would be", id="null"),
        pytest.param("METRICS: []\n", "METRICS is empty, so nothing would be compared", id="empty"),
        pytest.param("METRICS: [lm loss]\n", "'lm loss' is not compared in MODE", id="unknown"),
    ],
)
def test_an_inference_case_must_name_what_is_compared(
    tmp_path: Path, metrics: str, message: str
) -> None:
    """FORMATS 9.23: METRICS that are null pass there, and nothing is compared."""
    file = tmp_path / "model_config.yaml"
    file.write_text(f"MODE: inference\nTEST_TYPE: frozen-start\n{metrics}")
    with pytest.raises(CaseError, match=message):
        metric_names_of(read_case(file))
