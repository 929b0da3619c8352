"""What the health of the GPUs says about the cause of an attempt's failure. Pure."""

from __future__ import annotations

from dataclasses import replace

from pytest_megatron.health import Health
from pytest_megatron.verdict.attempt import FailureCause
from pytest_megatron.verdict.signature import SIGNATURES, Signature

_OOM = "cuda_oom"


def with_health(cause: FailureCause | None, health: Health | None) -> FailureCause | None:
    """Return a cause with what NVML and the kernel saw on the attempt's own GPUs.

    A failure of the hardware during the attempt is its cause, whatever the program says of it. An
    OOM on a GPU that another program held memory of is that program's, once.

    Args:
        cause: From the attempt's files; None for one that trained as it should.
        health: Of the attempt's GPUs; None where it had none.
    """
    if cause is None or health is None:
        return cause
    if health.faults:
        first = health.faults[0]
        return replace(
            cause,
            text=f"{first.text}; {cause.text}",
            evidence=(*(fault.text for fault in health.faults), *cause.evidence),
            signature=_signature(first.signature),
        )
    signature = cause.signature
    if signature is not None and signature.id == _OOM and health.foreign is not None:
        return replace(
            cause,
            text=f"{cause.text}; {health.foreign}",
            signature=replace(signature, is_transient=True, advice="end that process"),
        )
    return cause


def _signature(name: str) -> Signature:
    (found,) = (signature for signature in SIGNATURES if signature.id == name)
    return found
