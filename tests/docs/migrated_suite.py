"""Writes a suite like Megatron-LM's, here: its helper reads the rank as it is imported."""

from __future__ import annotations

import re
from pathlib import Path

page = Path(__file__).parents[2] / "docs/how-to/migrate-distributed-tests.md"
(helper,) = re.findall(r"```python\n(class Utils:.*?)```", page.read_text(), re.DOTALL)
Path("test_utilities.py").write_text(f"import os\n\nimport torch.distributed as dist\n\n\n{helper}")
Path("test_layers.py").write_text("""\
import torch
import torch.distributed as dist
from test_utilities import Utils


def test_sum():
    Utils.initialize_distributed()
    values = torch.ones(1)
    dist.all_reduce(values)
    assert values.item() == Utils.world_size


def test_still_there():
    assert dist.is_initialized()
""")
