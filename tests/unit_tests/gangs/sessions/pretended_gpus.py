"""A host whose GPUs are pretended: what NVML is asked, and that there is a driver to be asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tiny_project import GUEST


def gpu(index: int) -> dict[str, object]:
    """Return what NVML has of one."""
    return {
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H100 80GB HBM3",
        "bus_id": f"00000000:1{index}:00.0",
        "ecc": [[0, 0], [0, 0]],
        "used": 500_000_000,
        "total": 80_000_000_000,
        "processes": [],
    }


def pretend_gpus(root: Path, num_gpus: int, **state: object) -> dict[str, str]:
    """Write a `conftest.py`, and what NVML has; return the variables of a session that sees it.

    Args:
        root: Of the project.
        num_gpus: How many there are, each as `gpu` has it.
        state: What NVML has besides, or instead.
    """
    pretended = root / "pretended"
    pretended.mkdir()
    shutil.copy(GUEST.with_name("pretend_nvml.py"), pretended / "pynvml.py")
    nvml = pretended / "state.json"
    nvml.write_text(json.dumps({"gpus": [gpu(i) for i in range(num_gpus)], **state}))
    has_driver = "from pytest_megatron.gpu import host\nhost.has_driver = lambda: True\n"
    (root / "conftest.py").write_text(has_driver)
    return {
        "PYTHONPATH": str(pretended),
        "PRETEND_NVML": str(nvml),
        "PYTEST_MEGATRON_LEASES": str(root / "leases"),
    }
