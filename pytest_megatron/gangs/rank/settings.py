"""Settings of Python, numpy and torch that tests may leave changed; runs in ranks only (effects).

A look takes some ten microseconds where nothing changed; modules that are not loaded have none.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import locale
import logging
import multiprocessing
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import TypeAlias, cast

from pytest_megatron.process.originals import os, socket

# Kind and name of something that the process holds, or of a setting.
Key: TypeAlias = tuple[str, object]
Held: TypeAlias = dict[Key, object]

_HOOKS = {
    "torch.nn.modules.module": (
        *("_global_buffer_registration_hooks", "_global_module_registration_hooks"),
        *("_global_parameter_registration_hooks", "_global_backward_pre_hooks"),
        *("_global_backward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks"),
    ),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}
_GETTERS = {  # of torch._C
    "default dtype": "get_default_dtype",
    "deterministic algorithms": "_get_deterministic_algorithms",
    "warnings in place of deterministic algorithms": "_get_deterministic_algorithms_warn_only",
    "filling of uninitialized memory": "_get_deterministic_fill_uninitialized_memory",
    "checks of sparse tensors": "_check_sparse_tensor_invariants",
    "every warning of torch": "_get_warnAlways",
    "oneDNN": "_get_mkldnn_enabled",
    "NNPACK": "_get_nnpack_enabled",
    "threads of backward passes": "_is_multithreading_enabled",
    "cudnn.deterministic": "_get_cudnn_deterministic",
    "cudnn.benchmark": "_get_cudnn_benchmark",
    "cudnn.enabled": "_get_cudnn_enabled",
    "TF32 of cudnn": "_get_cudnn_allow_tf32",
    "TF32 of cublas": "_get_cublas_allow_tf32",
    "float32 matmul precision": "_get_float32_matmul_precision",
    "reduced precision of fp16": "_get_cublas_allow_fp16_reduced_precision_reduction",
    "reduced precision of bf16": "_get_cublas_allow_bf16_reduced_precision_reduction",
    "flash attention": "_get_flash_sdp_enabled",
    "attention by math": "_get_math_sdp_enabled",
    "memory-efficient attention": "_get_mem_efficient_sdp_enabled",
    "gradient mode": "is_grad_enabled",
    "inference mode": "is_inference_mode_enabled",
    "anomaly detection": "is_anomaly_enabled",
    "dispatch modes": "_len_torch_dispatch_stack",
    "threads of torch": "get_num_threads",
}
_CONFIGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
_OTHER_DEFAULTS = ("env_value_force", "env_value_default", "alias")
_RAISED = {2000: 1000}  # Inductor's recursion limit -> Python's
_PACKAGES = re.compile(r"/(site|dist)-packages/").search
_LEAST_FLOAT = 5e-324
_UNSET = (object, type(None))  # of a mark of torch's
_OF_LIBRARIES = ("_pytest.", "absl.", "pytest_megatron.", "torch.", "sys", "_thread", "threading")
_WITHOUT_VERSIONS = (3, 14)
_VERSION_AT = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)  # in a dict
_START_METHOD = multiprocessing.get_all_start_methods()[0]  # where none was chosen
_get_blocked = cast("Callable[[int, tuple[()]], object]", vars(signal)["_signal"].pthread_sigmask)


def version_of(attributes: Mapping[str, object]) -> ctypes.c_uint64:
    """Return the version of a dict of attributes, which every change of it changes (PEP 509).

    To read it touches none of the attributes: thousands of them are in no cache after a test.
    """
    if not isinstance(attributes, dict):  # of a class
        (attributes,) = gc.get_referents(attributes)
    return ctypes.c_uint64.from_address(id(attributes) + _VERSION_AT)


def do_versions_work() -> bool:
    """Return whether each kind of change shows in the version of a dict of this interpreter."""
    if sys.version_info >= _WITHOUT_VERSIONS:
        return False

    class Scratch:
        attribute = 1

    for owner in (Scratch, ModuleType("scratch")):
        version, seen = version_of(vars(owner)), list[int]()
        for name in ("attribute", "other"):
            for value in (2, 3):
                setattr(owner, name, value)
                seen.append(version.value)
            delattr(owner, name)
            seen.append(version.value)
        if len({*seen}) < len(seen) or version.value != seen[-1]:
            return False
    return True


class PythonSettings:
    """Settings of Python and numpy, as they are now."""

    def __init__(self) -> None:
        self._modules = dict(sys.modules)
        self._version = version_of(sys.modules) if do_versions_work() else None
        self._last: dict[str, object] = {}
        self._found: Held = {}

    def look(self) -> Held:
        """Return the settings of Python; the same object if none has changed."""
        now = _read_python()
        # A list of them counts a reference to each, in thousands of lines of the cache.
        now["sys.modules"] = self._version.value if self._version else [*sys.modules.values()]
        if now != self._last:
            self._last = now
            handlers = cast("list[object]", now["handlers of the root logger"])
            found = {
                **{name: _shown(value) for name, value in now.items()},
                "sys.modules": tuple(sorted(self._find_replaced())),
                "handlers of the root logger": tuple(filter(None, map(_shown, handlers))),
            }
            self._found = {("python", name): value for name, value in found.items()}
        return self._found

    def _find_replaced(self) -> Iterator[str]:
        """Yield modules that were replaced or removed since they were noted, or are stand-ins.

        A stand-in is in `sys.modules` without having been imported. Modules that were imported are
        noted: they are no change.
        """
        now = dict(sys.modules)
        for name, module in self._modules.items():
            if now.get(name) is not module:
                yield name
        for name in now.keys() - self._modules.keys():
            if "." not in name and not _is_genuine(now[name]):
                yield name
            else:
                self._modules[name] = now[name]


class _Config:
    """A module of torch that holds settings.

    Those are left out that the environment has set, or that stand for another one.
    """

    def __init__(self, entries: Mapping[str, object]) -> None:
        own = {str(name): vars(entry) for name, entry in entries.items()}
        self._own = {
            name: entry
            for name, entry in own.items()
            if all(type(entry.get(other)) in _UNSET for other in _OTHER_DEFAULTS)
        }
        overrides = [entry.get("user_override") for entry in self._own.values()]
        self._getters = [
            value.get if isinstance(value, ContextVar) else partial(entry.get, "user_override")
            for value, entry in zip(overrides, self._own.values(), strict=True)
        ]  # a variable of the context since torch 2.13
        self._last: list[object] = []
        self._changed: dict[str, object] = {}

    def changed(self) -> dict[str, object]:
        """Return settings that have not their default."""
        now = [get() for get in self._getters]
        if now != self._last:
            self._last = now
            self._changed = {
                name: value
                for (name, entry), value in zip(self._own.items(), now, strict=True)
                if type(value) is not object and value != entry.get("default")
            }
        return self._changed


class TorchSettings:
    """Settings of torch, as they are now."""

    def __init__(self) -> None:
        self._configs: dict[str, _Config] = {}
        self._num_modules = 0
        self._keys: list[Key] = []
        self._getters: list[Callable[[], object]] = []
        self._last: list[object] = []
        self._found: Held = {}

    def look(self) -> Held:
        """Return the settings of torch; the same object if none has changed."""
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            getters = dict(self._find_getters())
            self._keys, self._last = [("torch", name) for name in getters], []
            self._getters = [*getters.values()]
        now = [get() for get in self._getters]
        if now != self._last:
            self._last, self._found = now, dict(zip(self._keys, now, strict=True))
        return self._found

    def _find_getters(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield what reads each setting of the modules that are loaded."""
        for module, names in _HOOKS.items():
            what = "modules" if "nn" in module else "optimizers"
            get = partial(_count, _variables(module), names)
            yield f"number of global hooks of {what}", get
        for name in _CONFIGS:
            entries = _variables(name).get("_config")
            if name not in self._configs and isinstance(entries, dict):
                self._configs[name] = _Config(entries)
            yield name, self._configs[name].changed if name in self._configs else dict
        options = _variables("torch._tensor_str")
        yield "print options of torch", lambda: dict(vars(options.get("PRINT_OPTS", partial)))
        bindings = _variables("torch._C")
        for name, getter in _GETTERS.items():
            if getter in bindings:
                yield name, cast("Callable[[], object]", bindings[getter])
        for what, getter in (("", "is_autocast_enabled"), ("dtype of ", "get_autocast_dtype")):
            if getter in bindings:
                get_of = cast("Callable[[str], object]", bindings[getter])
                for device in ("cpu", "cuda"):
                    yield f"{what}autocast on {device}", partial(get_of, device)
        if bindings:
            yield "default device", partial(_default_device, _variables("torch"))
            yield "modes of torch functions", partial(_num_modes, _variables("torch"), bindings)
            yield "denormal numbers as zero", partial(_LEAST_FLOAT.__eq__, 0.0)


def _count(variables: Mapping[str, object], names: Iterable[str]) -> int:
    return sum(len(cast("Mapping[int, object]", variables.get(name) or ())) for name in names)


def _default_mode(variables: Mapping[str, object]) -> object:
    return getattr(variables.get("_GLOBAL_DEVICE_CONTEXT"), "device_context", None)


def _default_device(variables: Mapping[str, object]) -> str:
    mode = _default_mode(variables)
    return "cpu" if mode is None else str(getattr(mode, "device", None))


def _num_modes(variables: Mapping[str, object], bindings: Mapping[str, object]) -> int:
    """Return the number of modes that were entered, without that of the default device."""
    get_number = cast("Callable[[], int]", bindings["_len_torch_function_stack"])
    return get_number() - (_default_mode(variables) is not None)


def _read_python() -> dict[str, object]:
    """Return settings of Python, logging and numpy."""
    root = logging.root
    umask = os.umask(0o077)
    os.umask(umask)
    numpy = _variables("numpy")
    get_errors, get_options = numpy.get("geterr"), numpy.get("get_printoptions")
    return {
        "sys.argv": tuple(sys.argv),
        "sys.path": tuple(path for path in sys.path if not _PACKAGES(path)),
        "sys.meta_path": tuple(finder for finder in sys.meta_path if not _is_packaged(finder)),
        "sys.excepthook": sys.excepthook,
        "sys.displayhook": sys.displayhook,
        "sys.unraisablehook": sys.unraisablehook,
        "threading.excepthook": _variables("threading").get("excepthook"),
        "builtins.__import__": builtins.__import__,
        "handlers of the root logger": list(root.handlers),
        "level of the root logger": root.level,
        "logging.disable": root.manager.disable,
        "recursion limit": _RAISED.get(sys.getrecursionlimit(), sys.getrecursionlimit()),
        "sys.getprofile": sys.getprofile(),
        "sys.gettrace": sys.gettrace(),
        "garbage collection": gc.isenabled(),
        "start method": multiprocessing.get_start_method(allow_none=True) or _START_METHOD,
        "default timeout of sockets": socket.getdefaulttimeout(),
        "locale": locale.setlocale(locale.LC_ALL),
        "limit of open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "umask": f"{umask:03o}",
        "CPUs": os.sched_getaffinity(0),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "blocked signals": _get_blocked(signal.SIG_BLOCK, ()),
        "errors of numpy": get_errors() if callable(get_errors) else None,
        "print options of numpy": get_options() if callable(get_options) else None,
    }


def _variables(module: str) -> Mapping[str, object]:
    found: Mapping[str, object] = getattr(sys.modules.get(module), "__dict__", {})
    return found


def _shown(value: object) -> object:
    """Return a plain value, or the number of an object; None for hooks of pytest's own."""
    if value is None or isinstance(value, int | float | str | tuple | set | dict):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    is_known = str(getattr(named, "__module__", "")).startswith(_OF_LIBRARIES)
    return None if is_known else (id(value),)


def _is_packaged(finder: object) -> bool:
    """Return whether an installed package, which adds it when it is imported, has a finder."""
    kind = finder if isinstance(finder, type) else type(finder)
    return _PACKAGES(str(_variables(kind.__module__).get("__file__"))) is not None


def _is_genuine(module: object) -> bool:
    is_made = isinstance(module, ModuleType) and module.__spec__ is not None
    return is_made or "cython" in getattr(module, "__name__", "")
