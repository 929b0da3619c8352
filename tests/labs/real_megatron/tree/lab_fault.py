"""Fail in step 5 as LAB_FAULT says: Megatron-LM's train_step calls `step` in a lab's tree."""

import os
import threading

_steps = 0


def step() -> None:
    """Count a step; fail in the fifth."""
    global _steps
    _steps += 1
    if _steps == 5:
        if os.environ.get("LAB_FAULT") == "crash":
            raise RuntimeError("the lab crashes this rank in step 5")
        if os.environ.get("LAB_FAULT") == "hang":
            threading.Event().wait()
        if os.environ.get("LAB_FAULT") == "stay":  # until the end, which this thread holds up
            threading.Thread(target=threading.Event().wait).start()
