"""Sound trainings that say alarming things: nothing is wrong with them."""

from __future__ import annotations

import faulthandler
import logging
import warnings
from typing import TYPE_CHECKING

import ways_network
from ways import way

if TYPE_CHECKING:
    from training import Training


@way("never")
def nothing(training: Training) -> None:
    pass


@way("setup", is_everywhere=True)
def innocent_memory(training: Training) -> None:
    print("activation recomputation is on: CUDA out of memory was avoided, saved 3.2 GiB")


@way("setup", is_everywhere=True)
def innocent_health(training: Training) -> None:
    print("GPU health: 0 uncorrectable ECC errors, 0 row remap failures, Xid: none")
    print("NVLink: 0 fatal errors; no GPU has fallen off the bus")


@way("setup")
def innocent_retry(training: Training) -> None:
    ways_network.recover(training)
    print("retrying after Connection reset by peer (1/3)... ok")


@way("step")
def innocent_traceback(training: Training) -> None:
    try:
        raise TimeoutError("metrics server did not answer: Read timed out")
    except TimeoutError:
        logging.exception("could not push metrics, going on without them")


@way("step", is_everywhere=True)
def innocent_warnings(training: Training) -> None:
    warnings.warn(
        "NCCL_ASYNC_ERROR_HANDLING is deprecated; watchdog timeout unchanged", stacklevel=1
    )
    warnings.warn("found NaN in 0 of 24 gradients; NaN check passed", stacklevel=1)
    logging.warning("Disk quota exceeded is checked every 100 iterations; 71%% of quota used")


@way("step", is_everywhere=True)
def innocent_numbers(training: Training) -> None:
    print(f"NaN check passed at iteration {training.iteration}: no NaN or Inf in 12 gradients")
    print("Number of nan iterations: 0, overflow: False, illegal memory access: none")


@way("setup", is_everywhere=True)
def innocent_handlers(training: Training) -> None:
    faulthandler.enable()
    print("Segmentation fault handler installed; SIGTERM saves a checkpoint")
    print("double free or corruption checks: MALLOC_CHECK_ unset")


@way("setup", is_everywhere=True)
def innocent_configuration(training: Training) -> None:
    print("nccl_timeout_minutes ............................ 10")
    print("exit_on_missing_checkpoint ...................... True")
    print("check_for_nan_in_loss_and_grad .................. True")
    print("rerun_mode: validate_results; error_injection_type: transient_error")
    print("inprocess_restart: None; ft_timeouts: [600.0, 180.0]; restart on RuntimeError: False")


@way("setup")
def innocent_probe(training: Training) -> None:
    """Looks for a free port: the first is taken, as is usual."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        try:
            socket.create_server(("127.0.0.1", port))
        except OSError as error:
            print(f"port {port}: {error}; trying the next one")
    print("metrics server listens")


@way("end")
def innocent_child(training: Training) -> None:
    """Asks a subprocess about an optional package, which says no with a traceback."""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", "import apex_not_here"], check=False, stdin=subprocess.DEVNULL
    )
    print(f"optional package apex_not_here: {'yes' if done.returncode == 0 else 'no'}")
