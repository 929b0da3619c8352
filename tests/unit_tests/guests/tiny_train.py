"""Behaves as Megatron-LM's training program does, and starts in milliseconds: no torch, no model.

Its loss is a function of seed and iteration. The ranks wait for one another at every iteration, as
collectives make them do; the last rank prints the iteration line and writes the metrics.
`--fault KIND@ITERATION[:RANK] ...` makes one rank (without RANK: every rank) misbehave at the
start of an iteration. The file that TINY_TRAIN_STATE names outlives an attempt: a transient fault
happens only while it is not there, `spawn` writes the id of a process into it once that is up.
`hang` makes a file of that name with `.up` behind it. `ecc` is a transient fault that a pretended
GPU of `pretend_nvml.py` has, and `flip` one that makes a loss NaN and raises nothing; `watchdog`
is a hang of NCCL; `stay` does not exit after the last iteration, and `late` raises there as well;
`caught` logs what it raised, and goes on a while later.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
IS_LAST = RANK == WORLD_SIZE - 1
STATE = Path(os.environ.get("TINY_TRAIN_STATE", "/nonexistent/state"))
OUTPUT = Path(os.environ.get("OUTPUT_PATH", "."))
STEP_MS = os.environ.get("TINY_TRAIN_STEP_MS", "1.0")
FLOOD_BYTES = 4 << 20
ERRORS = {
    "crash": ValueError(f"the crash of rank {RANK}"),
    "oom": RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "import": ModuleNotFoundError("No module named 'transformer_engine'"),
    "nccl": RuntimeError("NCCL error: remote process exited or there was a network error"),
}
NODE_FAILURE = (
    "slurmstepd: error: *** STEP 12.0 ON node12 CANCELLED AT 2026-01-31T12:00:00 "
    "DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
)


class Faults:
    """What is to go wrong, by kind."""

    def __init__(self, texts: list[str]) -> None:
        self.at: dict[str, int] = {}
        for text in texts:
            kind, _, rest = text.partition("@")
            iteration, _, rank = rest.partition(":")
            if not rank or int(rank) == RANK:
                self.at[kind] = int(iteration)
        # Faults that stand beside a transient one tell the first attempt from the second.
        has_transient = not self.at.keys().isdisjoint(("transient", "ecc", "flip"))
        self.is_first_attempt = has_transient and not STATE.exists()

    def is_due(self, kind: str, iteration: int) -> bool:
        return self.at.get(kind) == iteration

    def loss(self, iteration: int, seed: int, *, is_resumed: bool) -> float:
        loss = 5.0 - 0.1 * iteration + seed / 1000
        if "jitter" in self.at:
            loss += int.from_bytes(os.urandom(4), "little") / 2**32
        if "wrong" in self.at and self.is_first_attempt:
            loss += 1.0
        if "drift" in self.at and is_resumed:
            loss += 0.01
        is_flipped = self.is_first_attempt and self.is_due("flip", iteration + 2)
        return float("nan") if is_flipped or self.is_due("nan", iteration) else loss

    @property
    def is_silent(self) -> bool:
        return "silent" in self.at and not self.is_first_attempt

    def misbehave(self, iteration: int) -> None:
        for kind in [kind for kind in self.at if self.is_due(kind, iteration)]:
            self.do(kind)

    def misbehave_at_the_end(self) -> None:
        if "late" in self.at:
            threading.Thread(target=threading.Event().wait).start()  # the interpreter waits for it
            raise ERRORS["crash"]
        while "stay" in self.at:
            signal.pause()

    def do(self, kind: str) -> None:
        if kind in ERRORS:
            raise ERRORS[kind]
        match kind:
            case "kill" | "node":
                end_by_a_signal(kind)
            case "segfault":
                faulthandler._sigsegv()  # type: ignore[attr-defined]
            case "exit0":
                sys.exit(0)
            case "hang":
                hang_for_ever()
            case "spawn" | "caught":
                leave_a_grandchild() if kind == "spawn" else log_what_was_caught()
            case "transient" | "ecc" | "flip" if self.is_first_attempt:
                fail_this_time(kind)
            case "watchdog" | "leak":
                report_a_hang() if kind == "watchdog" else leak_secrets()
            case "flood":
                print(("x" * 1023 + "\n") * (FLOOD_BYTES // 1024), end="", flush=True)
            case _:
                pass  # it shows elsewhere, or it is not the first attempt


def log_what_was_caught() -> None:
    try:
        raise ERRORS["crash"]
    except ValueError:
        traceback.print_exc()
    time.sleep(0.5)  # so that what follows is seen to follow


def end_by_a_signal(kind: str) -> None:
    if kind == "node":  # as Slurm ends a step
        print(NODE_FAILURE, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM if kind == "node" else signal.SIGKILL)


def fail_this_time(kind: str) -> None:
    if STATE.parent.is_dir():
        STATE.touch()
    if kind == "transient":
        raise RuntimeError("The server socket has failed to listen: EADDRINUSE")
    count_uncorrected_error()
    if kind == "flip":
        hang_for_ever()
    raise RuntimeError("CUDA error: unspecified launch failure")


def leak_secrets() -> None:
    """Print all that this rank was given, to both streams and into TensorBoard's directory."""
    for stream in (sys.stdout, sys.stderr):
        print(*sys.argv, *os.environ.items(), sep="\n", file=stream, flush=True)
    if IS_LAST:
        (OUTPUT / "notes.json").write_text(json.dumps({"env": dict(os.environ), "n": 1234567}))
        payload = f"args: {sys.argv} {os.environ['CASE_TOKEN']}".encode() + b"\0"
        (OUTPUT / "events.out.tfevents.args").write_bytes(tf_record(payload) + tf_record(b"kept"))


def hang_for_ever() -> None:
    STATE.with_name(f"{STATE.name}.up").touch()
    while True:
        signal.pause()


def report_a_hang() -> None:
    """Behave as torch does when a collective does not finish; the dump comes after the line."""
    line = f"[rank{RANK}]:[E1121 12:00:00] [PG ID 0 PG GUID 0(default_pg) Rank {RANK}] Watchdog "
    work = "WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)"
    print(f"{line}caught collective operation timeout: {work}", file=sys.stderr, flush=True)
    if prefix := os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        Path(f"{prefix}{RANK}").write_text("a dump")
    hang_for_ever()


def count_uncorrected_error() -> None:
    """Have the first GPU that this rank sees report an error that ECC could not correct."""
    path = Path(os.environ["PRETEND_NVML"])
    state = json.loads(path.read_text())
    first = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0]
    (gpu,) = (gpu for gpu in state["gpus"] if gpu["uuid"] == first)
    gpu["ecc"][1][0] += 1
    new = path.with_suffix(".new")
    new.write_text(json.dumps(state))
    new.replace(path)  # the training may be ended meanwhile


def leave_a_grandchild() -> None:
    code = "import signal; print('up', flush=True); signal.pause()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    STATE.write_text(str(child.pid))


def wait_for_others(iteration: int) -> None:
    """Return once every rank came as far; wait in this function's own frame alone."""
    meeting = OUTPUT / "meeting"
    meeting.mkdir(exist_ok=True)
    (meeting / f"{iteration}-{RANK}").touch()
    for rank in range(WORLD_SIZE):
        while not (meeting / f"{iteration}-{rank}").exists():
            time.sleep(0.002)


def masked_crc32c(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def tf_record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + masked_crc32c(length) + payload + masked_crc32c(payload)


def field(key: int, payload: bytes) -> bytes:
    assert len(payload) < 128
    return bytes([key, len(payload)]) + payload


def scalar_event(iteration: int, name: str, value: float) -> bytes:
    summary = field(0x0A, field(0x0A, name.encode()) + b"\x15" + struct.pack("<f", value))
    wall_time = b"\x09" + struct.pack("<d", time.time())
    return wall_time + bytes([0x10, iteration]) + field(0x2A, summary)


def write_metrics(directory: Path | None, iteration: int, values: dict[str, float]) -> None:
    """Append one step, as TensorBoard event files or as JSON lines."""
    if directory is None:
        with Path(os.environ["PYTEST_MEGATRON_METRICS"]).open("a") as file:
            file.write(json.dumps({"step": iteration, **values}) + "\n")
        return
    path = directory / f"events.out.tfevents.1700000000.host.{os.getpid()}.0"
    is_new = not path.exists()
    with path.open("ab") as events:
        if is_new:
            events.write(
                tf_record(b"\x09" + struct.pack("<d", 1.0) + field(0x1A, b"brain.Event:2"))
            )
        for name, value in values.items():
            events.write(tf_record(scalar_event(iteration, name, value)))


def save(directory: Path, iteration: int, keep: int = 9) -> None:
    checkpoint = directory / f"iter_{iteration:07d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "model.pt").write_text(str(iteration))
    (directory / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    for old in sorted(directory.glob("iter_*"))[:-keep]:
        shutil.rmtree(old)


def load(directory: Path | None) -> int:
    """Return the iteration to go on after; 0 without a checkpoint."""
    if directory is None or not (directory / "latest_checkpointed_iteration.txt").exists():
        return 0
    iteration = int((directory / "latest_checkpointed_iteration.txt").read_text())
    return int((directory / f"iter_{iteration:07d}" / "model.pt").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--exit-interval", type=int)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save-interval", type=int)
    parser.add_argument("--tensorboard-dir", type=Path)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--wandb-key")
    parser.add_argument("--url")
    own = os.environ.get("TINY_TRAIN_FAULT", "").split()
    parser.add_argument("--fault", nargs="*", default=own)
    args = parser.parse_args()
    faults = Faults(args.fault)
    start = load(args.load)
    if IS_LAST and start:
        print(f"resumed after iteration {start}", flush=True)
    for iteration in range(start + 1, args.train_iters + 1):
        faults.misbehave(iteration)
        wait_for_others(iteration)
        loss = faults.loss(iteration, args.seed, is_resumed=start > 0)
        if IS_LAST:
            print(
                f" [2026-01-31 12:00:00] iteration {iteration:8d}/{args.train_iters:8d} | "
                f"elapsed time per iteration (ms): {STEP_MS} | lm loss: {loss:.6E} |",
                flush=True,
            )
            if not faults.is_silent:
                values = {"lm loss": loss, "num-zeros": float(100 + iteration)}
                write_metrics(args.tensorboard_dir, iteration, values)
            if args.save and args.save_interval and iteration % args.save_interval == 0:
                save(args.save, iteration)
        if args.exit_interval and iteration % args.exit_interval == 0:
            break
    faults.misbehave_at_the_end()


with contextlib.suppress(BrokenPipeError):
    main()
