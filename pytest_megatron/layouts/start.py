"""Start of the process that runs ranks, and what is read of its files."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.host import gpu_model_of
from pytest_megatron.layouts.judge import judge
from pytest_megatron.layouts.model import RankRecord, Settings, read_record
from pytest_megatron.process.guarded import GuardedProcess
from pytest_megatron.runs.record import RecordedLayout

_RUN = ("-u", "-m", "pytest_megatron.layouts.run")
_GRACE_S = 5.0
_POLL_S = 3600.0
_TAIL = 3  # lines of the log of a rank that left nothing else


def run_layout(
    settings: Settings,
    program: Sequence[str],
    *,
    python: str = sys.executable,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    memory_bytes: int | None = None,
) -> RecordedLayout:
    """Run ranks of a program and compare them.

    Args:
        settings: Which ranks, and where they write.
        program: A Python program and its arguments, or `-m` and a module.
        python: Interpreter of the program.
        env: Environment of the rank, but for rank and world size.
        cwd: Working directory of the rank.
        memory_bytes: Memory of the GPU of a rank; None compares none.

    Raises:
        LaunchError: Nothing could be run.
    """
    settings.directory.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(settings.directory / "mail", ignore_errors=True)
    for earlier in (*settings.directory.glob("rank_*"), settings.directory / "modules.json"):
        earlier.unlink(missing_ok=True)
    log = settings.directory / "ranks.log"
    command = [python, *_RUN, settings.to_json(), *program]
    with GuardedProcess(
        command, env=env, cwd=cwd or Path.cwd(), output=log, grace_s=_GRACE_S
    ) as process:
        ended = None
        while ended is None:
            ended = process.poll(_POLL_S)
    records = _read(settings.directory)
    others = [read_record(path) for path in settings.directory.glob("rank_*.other.json")]
    if not records:
        raise LaunchError(str(log), f"no rank could be run: {_tail(log)}")
    return judge(records, others=others, memory_bytes=memory_bytes)


def memory_of(platform: str) -> int | None:
    """Return the bytes that a GPU of a platform has; None for cpu and unknown ones."""
    model = gpu_model_of(platform)
    return None if model is None else model.memory_bytes


def _read(directory: Path) -> dict[int, RankRecord]:
    """Return the record of each rank; of one that left none, the end of its log."""
    found: dict[int, RankRecord] = {}
    for path in directory.glob("rank_*[0-9].log"):
        rank = int(path.stem.removeprefix("rank_"))
        file = path.with_suffix(".json")
        if file.exists():
            found[rank] = read_record(file)
            if found[rank].problem.startswith("SystemExit"):  # what it says was printed
                found[rank].problem += f": {_tail(path)}"
        else:
            text = _tail(path) or "it was killed"
            found[rank] = RankRecord(rank=rank, world_size=0, end="lost", problem=text)
    return found


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return " | ".join([line.strip() for line in lines if line.strip()][-_TAIL:])
