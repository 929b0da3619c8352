from __future__ import annotations

import pytest

from pytest_megatron.gpu.host import Gpu, Host


def host(*names: str) -> Host:
    gpus = tuple(
        Gpu(index=i, name=name, uuid=f"GPU-{i}", memory_bytes=1) for i, name in enumerate(names)
    )
    return Host(gpus=gpus, driver="1", cpu="CPU")


@pytest.mark.parametrize(
    ("machine", "platform", "gpus", "expected"),
    [
        pytest.param(host(), "cpu", 8, None, id="the CPU is everywhere"),
        pytest.param(host(*["NVIDIA H100 80GB HBM3"] * 8), "dgx_h100", 8, None, id="enough"),
        pytest.param(
            host("NVIDIA H100 80GB HBM3"),
            "dgx_h100",
            2,
            "dgx_h100 needs 2 x H100, this host has 1 x NVIDIA H100 80GB HBM3",
            id="too few",
        ),
        pytest.param(
            host("NVIDIA H200"),
            "dgx_h100",
            1,
            "dgx_h100 needs 1 x H100, this host has 1 x NVIDIA H200",
            id="another model",
        ),
        pytest.param(
            host(), "dgx_a100", 1, "dgx_a100 needs 1 x A100, this host has no GPU", id="none"
        ),
        pytest.param(host("NVIDIA B200"), "our_own", 1, None, id="a platform of the project"),
        pytest.param(host(), "our_own", 1, "our_own needs 1 x GPU, this host has no GPU", id="own"),
    ],
)
def test_a_host_says_what_it_lacks(
    machine: Host, platform: str, gpus: int, expected: str | None
) -> None:
    assert machine.lacks(platform, gpus) == expected


def test_times_are_compared_on_hosts_of_one_class() -> None:
    machine = host("NVIDIA H100 80GB HBM3")
    assert machine.platform_class("dgx_h100") == "NVIDIA H100 80GB HBM3"
    assert machine.platform_class("cpu").startswith("CPU x")
