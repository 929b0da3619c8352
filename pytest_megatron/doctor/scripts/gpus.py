"""Prints the GPUs of this machine as a line of JSON, by way of NVML, which can hang or crash."""

from __future__ import annotations

import dataclasses
import json

from pytest_megatron.gpu.host import this_host

if __name__ == "__main__":
    found = dataclasses.asdict(this_host())
    print(json.dumps(found), flush=True)  # noqa: T201 - our parent reads it
