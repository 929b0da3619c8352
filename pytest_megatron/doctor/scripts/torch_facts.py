"""Imports torch, then the modules of `SECONDS MODULE...`, and prints what happened as JSON.

A module is imported in a fork of its own: it may crash. Runs under the Python of the environment
that is looked at; standard library and torch only.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable

Found = dict[str, object]


def ask_torch() -> Found:
    """Return torch's own facts, and its number of GPUs."""
    torch = importlib.import_module("torch")  # a broken one must be an answer

    found: Found = {
        "version": str(torch.__version__),
        "cuda": getattr(torch.version, "cuda", None),
        "driver_cuda": driver_cuda(),
        "count": 0,
    }
    checks: dict[str, Callable[[], object]] = {
        "abi": lambda: bool(torch.compiled_with_cxx11_abi()),
        "cudnn": lambda: str(torch.backends.cudnn.version() or "") or None,
        "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version())),
        "architectures": lambda: list(torch.cuda.get_arch_list()),
    }
    for name, check in checks.items():
        try:
            found[name] = check()
        except Exception:  # noqa: BLE001, S112 - a build without it, or an older torch
            continue
    return found


def ask_gpus() -> Found:
    """Return the capabilities of the GPUs, or why CUDA does not start."""
    torch = importlib.import_module("torch")

    if not getattr(torch.version, "cuda", None):
        return {}
    try:
        found: Found = {"count": torch.cuda.device_count()}
    except Exception as error:  # noqa: BLE001 - its text is the finding
        return {"cuda_problem": one_line(error)}
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
        found["capabilities"] = [list(torch.cuda.get_device_capability(i)) for i in range(count)]
    except Exception as error:  # noqa: BLE001 - its text is the finding
        found["cuda_problem"] = one_line(error)
    return found


def driver_cuda() -> str | None:
    """Return the CUDA version that libcuda offers, which a compatibility package can raise."""
    import ctypes  # noqa: PLC0415

    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def imported(name: str, limit_s: int) -> str | None:
    """Return why a module cannot be imported within a time limit, None where it can."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(limit_s)
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - whatever it is
            os.write(write_end, one_line(error).encode(errors="replace")[:2000])
            os._exit(1)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return None
    if code == -signal.SIGALRM:
        return f"no end within {limit_s} s"
    return said or f"the import ended its process with {code}"


def one_line(error: BaseException) -> str:
    """Return an exception as `ImportError: ...`."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:600]


def main() -> None:
    """Print what torch says of itself and the GPUs, as one line of JSON."""
    limit_s, names = int(sys.argv[1]), sys.argv[2:]
    gc.disable()  # searches for garbage, also at the end, took a third of the time and found none
    try:
        importlib.import_module("torch")
        # In forks, so before CUDA starts; and before torch loads cuDNN to ask for its version:
        # Transformer Engine may load another one, and the two do not mix in this order.
        imports = {name: imported(name, limit_s) for name in names}
        found = ask_torch()
    except BaseException as error:  # noqa: BLE001 - also SystemExit
        found = {"problem": one_line(error)}
    else:
        found |= {"imports": imports, **ask_gpus()}
    print("\n" + json.dumps(found), flush=True)  # noqa: T201 - our parent reads it
    gc.freeze()


main()
