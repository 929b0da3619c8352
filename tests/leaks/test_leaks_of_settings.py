"""Tests that leave a setting of Python, numpy or torch, and others that put it back."""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import logging
import multiprocessing
import os
import resource
import signal
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

LEAKS = {
    "test_changes_the_arguments": "sys.argv changed (--train-iters)",
    "test_adds_a_path": "sys.path changed (/left/by/a/test)",
    "test_puts_a_stub_in_the_place_of_a_library": "sys.modules changed (flash_attn_of_a_test)",
    "test_puts_in_more_stubs": "sys.modules changed (stub_0_of_a_test, stub_1_of_a_test",
    "test_replaces_a_module": "sys.modules changed (wave)",
    "test_adds_a_handler": "handlers of the root logger changed",
    "test_disables_logging": "logging.disable 50, was 0",
    "test_disables_the_search_for_garbage": "garbage collection False, was True",
    "test_sets_dynamo": "torch._dynamo.config changed (recompile_limit)",
    "test_enters_autocast": "autocast on cpu True, was False",
    "test_sets_the_umask": "umask 077, was ",
    "test_replaces_the_excepthook": "sys.excepthook changed",
    "test_sets_the_start_method": "start method spawn, was ",
    "test_sets_print_options": "print options of torch changed",
    "test_sets_print_options_of_numpy": "print options of numpy changed",
    "test_raises_on_errors_of_numpy": "errors of numpy changed",
    "test_binds_to_a_cpu": "CPUs {",
    "test_replaces_a_method_of_a_layer": "patched torch.nn.Linear.forward",
    "test_replaces_a_method_of_an_optimizer": "patched torch.optim.SGD.zero_grad",
    "test_adds_a_global_hook": "number of global hooks of modules 1, was 0",
    "test_sets_the_recursion_limit": "recursion limit 5000, was ",
    "test_blocks_a_signal": "blocked signals {",
    "test_limits_files": "limit of open files ",
    "test_adds_a_finder": "sys.meta_path changed (<class ",
    "test_enters_a_device": "modes of torch functions 1, was 0",
    "test_flushes_denormal_numbers": "denormal numbers as zero True, was False",
    "test_turns_onednn_off": "oneDNN False, was True",
    "test_checks_sparse_tensors": "checks of sparse tensors True, was False",
    "test_profiles": "sys.getprofile changed",
}
FORWARD, ZERO = "forward", "zero_grad"
LIMIT = "recompile_limit"
KEPT: dict[str, Any] = {}  # type: ignore[explicit-any]  # of many kinds


def stub(*_: object, **__: object) -> None: ...


def test_is_clean_before() -> None:
    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())


def test_changes_the_arguments() -> None:
    KEPT["argv"] = list(sys.argv)
    sys.argv += ["--train-iters", "10"]


def test_is_clean_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.argv[:] = KEPT["argv"]
    monkeypatch.setattr(sys, "argv", ["train.py"])


def test_adds_a_path() -> None:
    sys.path.append("/left/by/a/test")


def test_is_clean_with_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.remove("/left/by/a/test")
    monkeypatch.syspath_prepend("/put/back")


def test_puts_a_stub_in_the_place_of_a_library() -> None:
    sys.modules["flash_attn_of_a_test"] = types.ModuleType("flash_attn_of_a_test")


def test_is_clean_with_a_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    del sys.modules["flash_attn_of_a_test"]
    monkeypatch.setitem(sys.modules, "flash_attn_of_a_test", stub)


def test_puts_in_more_stubs() -> None:
    for number in range(9):
        name = f"stub_{number}_of_a_test"
        sys.modules[name] = types.ModuleType(name)


def test_is_clean_while_stubs_are_there() -> None:
    for number in range(99):
        name = f"new_{number}_of_a_test"
        spec = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = importlib.util.module_from_spec(spec)


def test_is_clean_with_a_new_module() -> None:
    importlib.import_module("wave")


def test_replaces_a_module() -> None:
    KEPT["colorsys"] = importlib.import_module("colorsys")
    sys.modules["wave"] = types.ModuleType("wave")


def test_is_clean_with_a_module_put_back() -> None:
    del sys.modules["wave"]
    importlib.import_module("wave")


def test_adds_a_handler() -> None:
    KEPT["handler"] = handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)


def test_is_clean_with_a_handler(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger().removeHandler(KEPT["handler"])
    caplog.set_level(logging.DEBUG)
    logging.getLogger("of a test").debug("told")


def test_disables_logging() -> None:
    logging.disable(logging.CRITICAL)


def test_is_clean_with_logging() -> None:
    logging.disable(logging.NOTSET)


def test_disables_the_search_for_garbage() -> None:
    gc.disable()


def test_is_clean_with_garbage() -> None:
    gc.enable()


def test_sets_dynamo() -> None:
    config = importlib.import_module("torch._dynamo.config")
    setattr(config, LIMIT, 3)


def test_is_clean_with_dynamo() -> None:
    config = importlib.import_module("torch._dynamo.config")
    setattr(config, LIMIT, 8)
    with config.patch(recompile_limit=4):
        pass


def test_enters_autocast() -> None:
    KEPT["autocast"] = context = torch.autocast("cpu", dtype=torch.bfloat16)
    context.__enter__()  # type: ignore[no-untyped-call]


def test_is_clean_with_autocast() -> None:
    KEPT["autocast"].__exit__(None, None, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pass


def test_sets_the_umask() -> None:
    KEPT["umask"] = os.umask(0o077)


def test_is_clean_with_a_umask() -> None:
    os.umask(KEPT["umask"])


def test_replaces_the_excepthook() -> None:
    sys.excepthook = stub


def test_is_clean_with_an_excepthook() -> None:
    sys.excepthook = sys.__excepthook__


def test_sets_the_start_method() -> None:
    multiprocessing.set_start_method("spawn", force=True)


def test_is_clean_with_a_start_method() -> None:
    multiprocessing.set_start_method("fork", force=True)


def test_sets_print_options() -> None:
    torch.set_printoptions(precision=2)  # type: ignore[no-untyped-call]


def test_is_clean_with_print_options() -> None:
    torch.set_printoptions(precision=4)  # type: ignore[no-untyped-call]


def test_sets_print_options_of_numpy() -> None:
    np.set_printoptions(precision=3)


def test_is_clean_with_print_options_of_numpy() -> None:
    np.set_printoptions(precision=8)
    with np.printoptions(precision=2):
        pass


def test_raises_on_errors_of_numpy() -> None:
    KEPT["errors"] = np.seterr(all="raise")


def test_is_clean_with_errors_of_numpy() -> None:
    np.seterr(**KEPT["errors"])
    with np.errstate(all="raise"):
        pass


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one CPU")
def test_binds_to_a_cpu() -> None:
    KEPT["cpus"] = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_is_clean_with_cpus() -> None:
    os.sched_setaffinity(0, KEPT.get("cpus", os.sched_getaffinity(0)))


def test_replaces_a_method_of_a_layer() -> None:
    KEPT["forward"] = torch.nn.Linear.forward
    setattr(torch.nn.Linear, FORWARD, stub)


def test_is_clean_with_a_layer() -> None:
    setattr(torch.nn.Linear, FORWARD, KEPT["forward"])


def test_replaces_a_method_of_an_optimizer() -> None:
    setattr(torch.optim.SGD, ZERO, stub)


def test_is_clean_with_an_optimizer() -> None:
    del torch.optim.SGD.zero_grad
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()


def test_adds_a_global_hook() -> None:
    module = torch.nn.modules.module
    KEPT["hook"] = module.register_module_forward_hook(stub)


def test_is_clean_with_a_hook() -> None:
    KEPT["hook"].remove()


def test_sets_the_recursion_limit() -> None:
    KEPT["depth"] = sys.getrecursionlimit()
    sys.setrecursionlimit(5000)


def test_is_clean_with_a_recursion_limit() -> None:
    sys.setrecursionlimit(KEPT["depth"])


def test_blocks_a_signal() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def test_is_clean_with_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def test_limits_files() -> None:
    KEPT["files"] = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def test_is_clean_with_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, KEPT["files"])


class Finder:
    """Finds nothing."""

    @staticmethod
    def find_spec(*_: object) -> None: ...


def test_adds_a_finder() -> None:
    sys.meta_path.append(Finder)


def test_is_clean_with_a_finder() -> None:
    sys.meta_path.remove(Finder)
    pytest.importorskip("absl.flags")  # adds one of its own


def test_is_clean_with_what_packages_and_inductor_set_at_their_first_use() -> None:
    sys.path.append(f"{np.__path__[0]}/_vendor")
    sys.setrecursionlimit(2000)


def test_enters_a_device() -> None:
    KEPT["device"] = device = torch.device("meta")
    device.__enter__()


def test_is_clean_with_devices() -> None:
    KEPT["device"].__exit__(None, None, None)
    torch.set_default_device("meta")
    torch.set_default_device(None)


def test_flushes_denormal_numbers() -> None:
    torch.set_flush_denormal(True)


def test_is_clean_with_denormal_numbers() -> None:
    torch.set_flush_denormal(False)


def test_turns_onednn_off() -> None:
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]


def test_is_clean_with_onednn() -> None:
    torch.backends.mkldnn.set_flags(True)  # type: ignore[no-untyped-call]


def test_checks_sparse_tensors() -> None:
    torch.sparse.check_sparse_tensor_invariants.enable()  # type: ignore[no-untyped-call]


def test_is_clean_with_sparse_tensors() -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]


def test_profiles() -> None:
    sys.setprofile(stub)


def test_is_clean_with_a_profile() -> None:
    sys.setprofile(None)
