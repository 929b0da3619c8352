"""A rank that waits for all others, then does what its arguments say.

`task_rank.py DIRECTORY DEED@RANK...`: ranks meet by files in DIRECTORY. Deeds: `raise`, `kill`,
`exit0`, `pause` (for ever), `hang` (likewise, once a watchdog said so) and `leave` (exit 7 once a
rank is gone, as with a lost connection).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 60.0
SHOWN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_PROCID", "OWN", "EXPORTED"),
)


def main() -> None:
    meeting, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    meeting.mkdir(exist_ok=True)
    shown = {name: os.environ.get(name) for name in SHOWN} | {"pid": os.getpid()}
    own = meeting / f"{rank}.json"
    own.with_suffix(".new").write_text(json.dumps(shown))
    own.with_suffix(".new").rename(own)
    others = [meeting / f"{r}.json" for r in range(int(os.environ["WORLD_SIZE"]))]
    wait_for(lambda: all(path.exists() for path in others))
    print(f"rank {rank} has met {len(others)}", flush=True)
    for word in sys.argv[2:]:
        deed, _, who = word.partition("@")
        if int(who) == rank:
            do(deed, others)


def do(deed: str, others: list[Path]) -> None:
    match deed:
        case "raise":
            raise ValueError("as it was told")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit0":
            sys.exit(0)
        case "pause":
            pause()
        case "hang":
            print("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)", flush=True)
            pause()
        case "leave":
            pids = [json.loads(path.read_text())["pid"] for path in others]
            wait_for(lambda: not all(is_alive(pid) for pid in pids))
            sys.exit(7)
        case _:
            raise AssertionError(deed)


def pause() -> None:
    while True:
        signal.pause()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > give_up_at:
            raise TimeoutError
        time.sleep(0.01)


main()
