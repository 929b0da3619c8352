"""State of GPUs before and after an attempt, as NVML reports it.

A value that a GPU or a driver does not have is None; nothing here fails for lack of one. NVML is
asked in a process of its own, which never fails or holds up a run.

Sources: NVIDIA's Xid catalogue and its GPU debug guidelines (which Xids are the hardware's).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from pytest_megatron.base.schema import trusted
from pytest_megatron.gpu.host import Gpu

# Xid -> signature, meaning. These are the hardware's, whatever program ran.
# Left out on purpose: 13, 31 (the program's own accesses), 43, 45 (a program that was ended).
# 144 to 150: units of NVLink 5; the kernel's log has the severity, NVML has the number alone, and
# so they count in logs only.
HARDWARE_XIDS: Mapping[int, tuple[str, str]] = {
    48: ("ecc_dbe", "an ECC error that could not be corrected"),
    64: ("row_remap_failed", "a row that could not be remapped"),
    74: ("nvlink", "an NVLink error"),
    79: ("gpu_lost", "the GPU has fallen off the bus"),
    94: ("ecc_contained", "a contained ECC error"),
    95: ("ecc_dbe", "an uncontained ECC error"),
    119: ("gsp", "the GPU's system processor does not answer"),
    120: ("gsp", "an error of the GPU's system processor"),
    144: ("nvlink", "a fatal NVLink error (SAW)"),
    145: ("nvlink", "a fatal NVLink error (RLW)"),
    146: ("nvlink", "a fatal NVLink error (TLW)"),
    147: ("nvlink", "a fatal NVLink error (TREX)"),
    148: ("nvlink", "a fatal NVLink error (NVLPW_CTRL)"),
    149: ("nvlink", "a fatal NVLink error (NETIR)"),
    150: ("nvlink", "a fatal NVLink error (MSE)"),
}
_GRADED_XIDS = range(144, 151)
FOREIGN_SHARE = 0.05  # of a GPU's memory; less than that does not explain an OOM
# Bits of NVML's clocks event reasons that a person wants to know of.
THROTTLES: Mapping[int, str] = {
    0x0008: "hardware slowdown",
    0x0020: "software thermal slowdown",
    0x0040: "hardware thermal slowdown",
    0x0080: "power brake slowdown",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process on a GPU; its id is that of the host, also inside a container.

    Attributes:
        memory_bytes: None where NVML does not report it.
    """

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU at one moment.

    Attributes:
        uuid: NVML's name for exactly this device.
        ecc_volatile_corrected: Errors since the driver was loaded; `aggregate` is for life.
        is_remap_pending: Whether a reset is due.
        throttles: Why its clocks are low, for causes that are no idling.
    """

    uuid: str
    index: int | None = None
    throttles: tuple[str, ...] | None = None
    ecc_volatile_corrected: int | None = None
    ecc_volatile_uncorrected: int | None = None
    ecc_aggregate_uncorrected: int | None = None
    is_remap_pending: bool | None = None
    has_remap_failed: bool | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    processes: tuple[GpuProcess, ...] = ()

    @property
    def label(self) -> str:
        """Name for people: index and UUID."""
        return f"GPU {self.index} ({self.uuid})" if self.index is not None else self.uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """An error that the driver reported while an attempt ran.

    Attributes:
        gpu: UUID.
        xid: Number of the Xid.
    """

    gpu: str
    xid: int

    @property
    def is_hardware_fault(self) -> bool:
        """True if the hardware failed."""
        return self.xid in HARDWARE_XIDS and self.xid not in _GRADED_XIDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The hardware's failure during an attempt.

    Attributes:
        gpu: UUID of the one to keep away from, or None.
        signature: Id of the row of the table of signatures that it is.
    """

    gpu: str | None
    signature: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of the GPUs of one attempt.

    Attributes:
        before: In the order of the lease, as `after` is; a GPU that is lost is in neither.
        problem: Why something could not be read, or None.
    """

    before: tuple[GpuState, ...] = ()
    after: tuple[GpuState, ...] = ()
    xids: tuple[Xid, ...] = ()
    problem: str | None = None

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Failures of the hardware, new since `before`."""
        return (*_xid_faults(self.xids, self.before), *_ecc_faults(self._pairs()))

    @property
    def foreign(self) -> str | None:
        """Program that held enough memory of these GPUs to explain an OOM, else None."""
        found = map(_foreign, (*self.before, *self.after))
        return next((text for text in found if text is not None), None)

    @property
    def notes(self) -> tuple[str, ...]:
        """Observations that are no failures."""
        found: list[str] = []
        for before, after in self._pairs():
            if (new := _grown(before.ecc_volatile_corrected, after.ecc_volatile_corrected)) > 0:
                found.append(f"{after.label}: {new} new corrected ECC errors")
            if after.is_remap_pending and not before.is_remap_pending:
                found.append(f"{after.label}: a row remap is pending; reset the GPU")
        found += [f"{s.label}: {', '.join(s.throttles)}" for s in self.after if s.throttles]
        if self.foreign is not None:
            found.append(self.foreign)
        if self.problem is not None:
            found.append(f"not all could be read: {self.problem}")
        return tuple(found)

    def _pairs(self) -> Iterator[tuple[GpuState, GpuState]]:
        """Yield the state of each GPU before and after."""
        earlier = {state.uuid: state for state in self.before}
        for state in self.after:
            if state.uuid in earlier:
                yield earlier[state.uuid], state


def merge_health(found: Iterable[Health | None]) -> Health | None:
    """Return what is known of the GPUs of several machines; None without any."""
    known = [health for health in found if health is not None]
    if not known:
        return None
    problems = [health.problem for health in known if health.problem is not None]
    return Health(
        before=tuple(state for health in known for state in health.before),
        after=tuple(state for health in known for state in health.after),
        xids=tuple(xid for health in known for xid in health.xids),
        problem="; ".join(dict.fromkeys(problems)) or None,
    )


def _xid_faults(xids: Sequence[Xid], states: Sequence[GpuState]) -> Iterator[Fault]:
    """Yield faults that the driver reported."""
    labels = {state.uuid: state.label for state in states}
    for xid in dict.fromkeys(xids):
        if xid.is_hardware_fault:
            signature, meaning = HARDWARE_XIDS[xid.xid]
            text = f"{labels.get(xid.gpu, xid.gpu)} reported Xid {xid.xid}, {meaning}"
            yield Fault(gpu=xid.gpu, signature=signature, text=text)


def xid_pattern(signature: str) -> str:
    """Return the regular expression of the kernel's lines with the Xids of a signature."""
    numbers = (number for number, (name, _) in HARDWARE_XIDS.items() if name == signature)
    ends = (rf"{n}, \w+ Fatal\b" if n in _GRADED_XIDS else rf"{n}\b" for n in numbers)
    return rf"NVRM: Xid \([^)]*\): (?:{'|'.join(ends)})"


def _ecc_faults(pairs: Iterator[tuple[GpuState, GpuState]]) -> Iterator[Fault]:
    """Yield faults by new memory errors."""
    for before, after in pairs:
        new = max(
            _grown(before.ecc_volatile_uncorrected, after.ecc_volatile_uncorrected),
            _grown(before.ecc_aggregate_uncorrected, after.ecc_aggregate_uncorrected),
        )
        if new > 0:
            errors = "ECC error" if new == 1 else "ECC errors"
            text = f"{after.label} had {new} new uncorrected {errors}"
            yield Fault(gpu=after.uuid, signature="ecc_dbe", text=text)


def _grown(before: int | None, after: int | None) -> int:
    """Return by how much a counter grew; 0 where it is not known."""
    return 0 if before is None or after is None else after - before


def _foreign(state: GpuState) -> str | None:
    """Return which other program holds much of a GPU that this run has alone."""
    if not state.memory_total_bytes:
        return None
    least = FOREIGN_SHARE * state.memory_total_bytes
    for process in state.processes:
        if process.memory_bytes is not None and process.memory_bytes >= least:
            size = _gb(process.memory_bytes)
            return f"process {process.pid}, not of this run, held {size} of {state.label}"
    if state.memory_used_bytes is not None and state.memory_used_bytes >= least:
        return f"{_gb(state.memory_used_bytes)} of {state.label} were held, not by this run"
    return None


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


_LIMIT_S = 20.0  # a GPU that is lost can keep NVML from answering for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class _MonitorAnswer:
    """One line of the watching process."""

    gpus: tuple[GpuState, ...] = ()
    xids: tuple[Xid, ...] = ()
    problem: str | None = None


class HealthWatch:
    """Watches GPUs from `with` to `finish`; without GPUs it does nothing.

    Attributes:
        health: What is known so far.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.health: Health | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        if not gpus:
            return
        self.health = Health()
        command = [sys.executable, "-m", "pytest_megatron.gpu.nvml_probe", *(g.uuid for g in gpus)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the training; stdin tells this one
            )
        except OSError as error:
            self.health = Health(problem=f"{command[0]}: {error.strerror}")
            return
        answer = self._answer("before")
        self.health = Health(before=answer.gpus, problem=answer.problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def finish(self) -> Health | None:
        """Return what changed since the start; None without GPUs."""
        if self._process is None or self.health is None:
            return self.health
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its answer says why
            self._process.stdin.close()
        answer = self._answer("after")
        problem = self.health.problem or answer.problem
        self.health = replace(self.health, after=answer.gpus, xids=answer.xids, problem=problem)
        self._end()
        return self.health

    def _answer(self, when: str) -> _MonitorAnswer:
        """Return the content of the next line."""
        line = self._read_line()
        if line is None:
            return _MonitorAnswer(problem=f"no answer {when} the attempt within {_LIMIT_S:g} s")
        try:
            return trusted(_MonitorAnswer, json.loads(line))
        except (KeyError, TypeError, ValueError, AssertionError):
            return _MonitorAnswer(problem=f"no answer {when} the attempt, NVML may have crashed")

    def _read_line(self) -> bytes | None:
        """Return the next line, empty where the process ended; None where it takes too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        give_up_at = time.monotonic() + _LIMIT_S
        while b"\n" not in self._rest:
            left_s = give_up_at - time.monotonic()
            if not any(  # a wait that `fg` interrupts ends without a look
                select.select([descriptor], [], [], wait_s)[0] for wait_s in (max(0.0, left_s), 0.0)
            ):
                return None
            chunk = os.read(descriptor, 65536)
            if not chunk:
                return b""
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _end(self) -> None:
        """Leave no process behind, unless the driver itself holds on to it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        # Stuck in the driver, it cannot be killed, and must not hold up the session.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
