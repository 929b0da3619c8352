"""Let a program that demands CUDA run on the CPU: streams do nothing, nccl is gloo.

For trying the lab's rows where there is no GPU. Put this folder on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
import types
import typing


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


class _Anything:
    """Answer every call and attribute with itself; stands for a stream or an event."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def elapsed_time(self, *_):
        return 0.0

    def query(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def patch(torch):  # noqa: C901 - a list of names
    if torch.backends.cuda.is_built():
        return
    from torch.overrides import TorchFunctionMode

    Tensor = torch.Tensor  # noqa: N806

    def cpu(value):
        if isinstance(value, torch.device) and value.type != "cpu" and value.type != "meta":
            return torch.device("cpu")
        if isinstance(value, str) and value.startswith("cuda"):
            return "cpu"
        return value

    is_cuda = Tensor.is_cuda.__get__

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if func == is_cuda:
                return True
            if func is Tensor.cuda:
                return args[0]
            if func is Tensor.pin_memory:
                return args[0]
            if func is Tensor.record_stream:
                return None
            kwargs.pop("pin_memory", None)
            if "device" in kwargs:
                kwargs["device"] = (
                    "cpu"
                    if isinstance(kwargs["device"], int) and not isinstance(kwargs["device"], bool)
                    else cpu(kwargs["device"])
                )
            if (
                func is Tensor.to
                and len(args) > 1
                and isinstance(args[1], int)
                and not isinstance(args[1], bool)
            ):
                args = (args[0], "cpu", *args[2:])
            args = tuple(cpu(a) for a in args)
            out = func(*args, **kwargs)
            if func is Tensor.type and isinstance(out, str):
                return out.replace("torch.", "torch.cuda.")
            return out

    OnCpu().__enter__()
    cuda = torch.cuda

    def none():
        return lambda *_, **__: None

    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "ipc_collect",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "init",
        "_lazy_init",
        "set_stream",
        "set_per_process_memory_fraction",
        "_sleep",
    ):
        setattr(cuda, name, none())
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "current_device",
    ):
        setattr(cuda, name, lambda *_, **__: 0)
    import collections

    torch._C._cuda_getDevice = lambda *_: 0
    torch._C._cuda_setDevice = lambda *_: None
    cuda.memory_stats = lambda *_, **__: collections.defaultdict(int)
    cuda.mem_get_info = lambda *_, **__: (1 << 37, 1 << 37)
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 8
    cuda.is_initialized = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.get_device_capability = lambda *_, **__: (9, 0)
    cuda.get_device_name = lambda *_, **__: "no GPU"
    cuda.get_device_properties = lambda *_, **__: types.SimpleNamespace(
        total_memory=1 << 37, multi_processor_count=132, major=9, minor=0, name="no GPU"
    )
    cuda.Stream = cuda.Event = cuda.CUDAGraph = _Anything
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.device = lambda *_: contextlib.nullcontext()
    cuda.current_stream = lambda *_, **__: _Anything()
    cuda.default_stream = lambda *_, **__: _Anything()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed, cuda.manual_seed_all = none(), none()
    cuda.default_generators = (torch.default_generator,) * 8
    cuda._lazy_call = lambda callback, **_: callback()

    class Generator(torch.Generator):
        def __new__(cls, device=None):
            return super().__new__(cls)

    torch.Generator = Generator
    cuda.cudart = _Anything
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, none())
    for name in ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Byte", "Bool"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    import torch.distributed as dist

    def gloo(function):
        def call(*args, **kwargs):
            if str(kwargs.get("backend", "")).startswith("nccl"):
                kwargs["backend"] = "gloo"
            kwargs.pop("device_id", None)
            if "pg_options" in kwargs:
                kwargs["pg_options"] = None
            return function(*args, **kwargs)

        return call

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = gloo(dist.distributed_c10d.init_process_group)
        module.new_group = gloo(dist.distributed_c10d.new_group)


if not hasattr(typing, "override"):
    typing.override = lambda f: f
sys.meta_path.insert(0, _AfterTorch())
