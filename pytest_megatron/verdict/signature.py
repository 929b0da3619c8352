"""Known causes of failures: what they look like in a log, and whether running again can help.

Data; adding a cause is adding a row. Default is "do not run again": a row is transient only if the
machine or the network caused it, never the code under test. A golden mismatch has no row.

Sources: NVIDIA's Xid catalogue; PyTorch's NCCL documentation; torch.distributed.elastic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A log pattern with a cause and a consequence.

    Attributes:
        id: Stable name, used in files.
        pattern: Regular expression, searched in single lines.
        family: What kind of failure it is.
        is_transient: Whether an unchanged run is expected to pass.
        advice: What a person should do, lower case.
    """

    id: str
    pattern: str
    family: str
    is_transient: bool
    advice: str


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="nonfinite_loss",
        pattern=r"found (?:NaN|Inf) in|Unexpected result (?:nan|inf)",
        family="nonfinite",
        is_transient=False,
        advice="find the first step whose gradients are not finite",
    ),
    Signature(
        id="cuda_oom",
        pattern=r"CUDA out of memory|torch\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        family="out_of_memory",
        is_transient=False,
        advice="lower the micro batch or the model, or look for another process on the GPU",
    ),
    Signature(
        id="device_assert",
        pattern=r"device-side assert triggered",
        family="cuda_error",
        is_transient=False,
        advice="run with CUDA_LAUNCH_BLOCKING=1 and look at the indices of that kernel",
    ),
    Signature(
        id="illegal_access",
        pattern=r"illegal memory access|misaligned address|illegal instruction was encountered",
        family="cuda_error",
        is_transient=False,
        advice="run under compute-sanitizer",
    ),
    Signature(
        id="import_error",
        pattern=r"^(?:ModuleNotFoundError|ImportError):",
        family="environment",
        is_transient=False,
        advice="install the module where the training runs",
    ),
    Signature(
        id="disk_full",
        pattern=r"No space left on device|Disk quota exceeded",
        family="disk",
        is_transient=False,
        advice="make room, or give another --run-dir",
    ),
    Signature(
        id="ecc_dbe",
        pattern=r"uncorrectable ECC error|Xid.*\b(?:48|94|95)\b",
        family="hardware",
        is_transient=True,
        advice="take the GPU out of service",
    ),
    Signature(
        id="gpu_lost",
        pattern=r"GPU has fallen off the bus|Xid.*\b79\b",
        family="hardware",
        is_transient=True,
        advice="take the machine out of service",
    ),
    Signature(
        id="ib_link",
        pattern=r"Got completion .* error 12|vendor err (?:129|249)",
        family="network",
        is_transient=True,
        advice="look at the listed network card",
    ),
    Signature(
        id="port_in_use",
        pattern=r"EADDRINUSE|Address already in use|failed to listen on any local network address",
        family="port",
        is_transient=True,
        advice="another program took the port between our choice and the start",
    ),
    Signature(
        id="dns",
        pattern=r"Temporary failure in name resolution|Name or service not known",
        family="network",
        is_transient=True,
        advice="look at the name server",
    ),
    Signature(
        id="hf_hub",
        pattern=r"couldn't connect to 'https://huggingface\.co'|429 Client Err|50[234] Server Err",
        family="network",
        is_transient=True,
        advice="fill the cache beforehand and set HF_HUB_OFFLINE=1",
    ),
)
_COMPILED = tuple((signature, re.compile(signature.pattern)) for signature in SIGNATURES)


def match_signature(lines: Iterable[str]) -> Signature | None:
    """Return the first row of the table that some line matches; genuine causes come first."""
    texts = list(lines)
    for signature, pattern in _COMPILED:
        if any(pattern.search(text) for text in texts):
            return signature
    return None
