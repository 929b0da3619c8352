"""Leases one of four pretend GPUs, says which, and never lets go."""

from __future__ import annotations

import signal

from pytest_megatron.gpu.host import Gpu, lease_gpus

gpus = [Gpu(index=i, name="GPU", uuid=f"GPU-{i}", memory_bytes=1) for i in range(4)]
lease = lease_gpus(gpus, 1, print)
print("held", lease.gpus[0].uuid, flush=True)
while True:
    signal.pause()
