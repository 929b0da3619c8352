"""Process groups that reach nobody: they record each call and answer as if others were alike.

A rank gets what it would have got if each other rank had sent what this one sends; where it sends
nothing itself, a recorded message of a rank that ran before, or a small constant. So a program goes
on as in a sound training, and nothing that it computes means anything.

Source of the names of the methods: torch/distributed/distributed_c10d.py, v2.6 to v2.13; older
releases call some of them by their second name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from typing_extensions import override

from pytest_megatron.layouts.model import EAGER

if TYPE_CHECKING:
    from pytest_megatron.layouts.recorder import RankRecorder

BACKEND = "layout"
_EXTREMES = {"max": torch.maximum, "min": torch.minimum}
_FILLINGS = (0.01, 1.7)  # of what nobody has sent, in the first and in the second run of a rank


class FakeWork(dist.Work):
    """A call that has ended; notes when the program waits for it."""

    def __init__(self, waited: Callable[[], None], results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._waited = waited
        self._results = list(results)

    @override
    def wait(self, timeout: object = None) -> bool:
        """Note that the program goes on only when the call has ended."""
        self._waited()
        return True

    @override
    def is_completed(self) -> bool:
        """Return true."""
        return True

    @override
    def is_success(self) -> bool:
        """Return true."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return the results as a future that is done."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def result(self) -> list[torch.Tensor]:
        """Return the results."""
        return self._results


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Do without gradients and without modes of the program."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        yield


def _flat(tensors: object) -> list[torch.Tensor]:
    """Return the tensors of nested lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [t for part in cast("Sequence[object]", tensors) for t in _flat(part)]


class FakeGroup(dist.ProcessGroup):
    """A process group of one rank.

    Attributes:
        ranks: Global ranks of the members, in the group's order.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, recorder: RankRecorder) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg] # without a store
        self.name_of_group, self.ranks, self._own = name, list(ranks), rank
        self._recorder = recorder

    @property
    def group_name(self) -> str:
        """The name by which ranks meet."""
        return self.name_of_group

    @override
    def getBackendName(self) -> str:
        return BACKEND

    def _call(
        self,
        kind: str,
        given: object,
        results: object,
        fill: Callable[[], object] = lambda: None,
        **more: Any,
    ) -> FakeWork:
        """Record a call, and give its results values of the right shape."""
        waited = self._recorder.call(self.name_of_group, kind, _flat(given), **more)
        with plain():
            is_known = bool(fill())  # it is what the other rank has sent
            is_plain = self._recorder.noise is None or self._recorder.is_internal
            if not is_known and not is_plain:
                self._disturb(kind, _flat(results), more)
        return FakeWork(waited, _flat(results))

    def _disturb(self, kind: str, results: list[torch.Tensor], options: dict[str, Any]) -> None:
        """Change what others have sent, so that what hangs on it shows.

        What the whole world has reduced is alike in all ranks, and so is what they do about it.
        """
        own = self.ranks[self._own]
        is_own = kind == "send" or options.get("root") == own
        is_common = kind == "all_reduce" and self.size() == self._recorder.world_size
        is_extreme = options.get("reduction") in _EXTREMES
        for tensor in results:
            if not tensor.is_floating_point() and not (is_own or is_common):
                tensor.logical_not_() if tensor.dtype == torch.bool else tensor.copy_(
                    tensor.roll(1, 0) if _has_many(tensor) else tensor + 1
                )
            elif tensor.is_floating_point() and not (is_own or is_extreme) and tensor.numel():
                shape, noise = tensor.shape, self._recorder.noise
                factors = 0.5 + torch.rand(shape, generator=noise)
                tensor.mul_(factors.to(device=tensor.device, dtype=tensor.dtype))

    # Collectives. Where others would have sent something, it is what this rank sends.

    @override
    def allreduce(self, tensors: Any, opts: Any = None) -> FakeWork:
        """Record an all-reduce; of its tensors only flags are combined."""
        kind = _reduction(opts)
        mail, keys = self._recorder.mail, (f"all_reduce {self.name_of_group}",)

        def fill() -> None:
            """Join a flag with the one that rank 0 set; other sums stay as they are."""
            for tensor in _flat(tensors):
                theirs = tensor.clone()
                if kind in _EXTREMES and mail.fetch(keys, theirs):  # a flag that rank 0 has set
                    tensor.copy_(_EXTREMES[kind](tensor, theirs))
                elif kind in _EXTREMES:
                    mail.post(keys, tensor)

        return self._call("all_reduce", tensors, tensors, fill, reduction=kind)

    @override
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> FakeWork:
        return self.allreduce(tensors, opts)

    @override
    def reduce(self, tensors: Any, opts: Any = None) -> FakeWork:
        """Record a reduce; tensors stay as they are."""
        return self._call(
            "reduce", tensors, tensors, root=self.ranks[opts.rootRank], reduction=_reduction(opts)
        )

    @override
    def broadcast(self, tensors: Any, opts: Any = None) -> FakeWork:
        """Record a broadcast, and fill the tensors."""
        root = self.ranks[opts.rootRank]
        mail, where = self._recorder.mail, self._recorder.place()
        keys = (f"broadcast {self.name_of_group}", f"broadcast {where}")

        def fill() -> bool:
            """Copy what the sender sent if it ran here, else fill with values."""
            is_known = True
            for tensor in _flat(tensors):
                if opts.rootRank == self._own:
                    mail.post(keys, tensor)
                elif not mail.fetch(keys, tensor):
                    is_known = False
                    self._fill(tensor)
            return is_known

        return self._call("broadcast", tensors, tensors, fill, root=root)

    @override
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> FakeWork:
        """Record an all-gather, and fill the parts of all ranks."""

        def fill() -> None:
            """Copy this rank's tensor into the part of each rank."""
            for parts, tensor in zip(outputs, inputs, strict=True):
                for part in parts:
                    self._copy(part, tensor)

        return self._call("all_gather", inputs, outputs, fill)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> FakeWork:
        """Gather each tensor into the list of each rank."""

        def fill() -> None:
            """Copy this rank's tensors into the parts of each rank."""
            for parts in outputs:
                for part, tensor in zip(parts, inputs, strict=False):
                    self._copy(part, tensor)

        return self._call("all_gather", inputs, outputs, fill)

    def all_gather_single(self, output: Any, tensor: Any, _: Any = None) -> FakeWork:
        """Gather into one tensor."""
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> FakeWork:
        """Gather each tensor into one."""

        def fill() -> None:
            """Copy this rank's tensors into the chunks of each rank."""
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = output.view(-1)
                for part in flat.chunk(self.size()) if flat.numel() else ():
                    self._copy(part, tensor)

        return self._call("all_gather", inputs, outputs, fill)

    @override
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> FakeWork:
        """Record a reduce-scatter, and fill this rank's part."""

        def fill() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                self._copy(output, parts[self._own])

        return self._call("reduce_scatter", inputs, outputs, fill, reduction=_reduction(opts))

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> FakeWork:
        """Reduce, and keep one part."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> FakeWork:
        """Reduce each tensor, and keep one part of each."""

        def fill() -> None:
            """Copy this rank's chunk of each tensor."""
            for output, tensor in zip(outputs, inputs, strict=True):
                if output.numel():
                    self._copy(output, tensor.reshape(-1).chunk(self.size())[self._own])

        return self._call("reduce_scatter", inputs, outputs, fill, reduction=_reduction(opts))

    def all_to_all_single(
        self, output: Any, tensor: Any, received: Any = None, sent: Any = None, opts: Any = None
    ) -> FakeWork:
        """Exchange parts of one tensor; without sizes they are equal."""
        row = math.prod(tensor.shape[1:])
        parts = {"sent": sent, "received": received}
        has_parts = all(part is not None and len(part) for part in parts.values())
        splits = {k: [int(n) * row for n in part] for k, part in parts.items() if has_parts}

        def fill() -> None:
            """Copy this rank's chunk into the part of each rank."""
            self._fill(output)
            if not splits and tensor.numel() == output.numel():
                own = tensor.reshape(-1).chunk(self.size())[self._own] if tensor.numel() else tensor
                for part in output.view(-1).chunk(self.size()) if output.numel() else ():
                    self._copy(part, own)

        return self._call("all_to_all", tensor, output, fill, **splits)

    @override
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> FakeWork:
        """Record an all-to-all, and fill what this rank receives."""

        def fill() -> None:
            for output in outputs:
                self._copy(output, inputs[self._own])

        sizes = {
            "sent": [t.numel() for t in inputs],
            "received": [t.numel() for t in outputs],
        }
        return self._call("all_to_all", inputs, outputs, fill, **sizes)

    @override
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> FakeWork:
        """Record a gather, and fill the parts of all ranks."""

        def fill() -> None:
            for part in _flat(outputs):
                self._copy(part, _flat(inputs)[0])

        return self._call("gather", inputs, outputs, fill, root=self.ranks[opts.rootRank])

    @override
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> FakeWork:
        """Record a scatter, and fill this rank's part."""
        mail, where = self._recorder.mail, self._recorder.place()

        def keys(index: int) -> tuple[str, str]:
            """Return the keys of the part of a member."""
            return (f"scatter {self.name_of_group} {index}", f"scatter {where} {index}")

        def fill() -> bool:
            """Copy this rank's part, or fetch it; return whether it is what the root has sent."""
            (output,) = _flat(outputs)
            if not inputs:
                is_known = mail.fetch(keys(self._own), output)
                if not is_known:
                    self._fill(output)
                return is_known
            for index, part in enumerate(inputs[0]):
                mail.post(keys(index), part)
            self._copy(output, inputs[0][self._own])
            return True

        return self._call("scatter", outputs, outputs, fill, root=self.ranks[opts.rootRank])

    @override
    def barrier(self, opts: Any = None) -> FakeWork:
        return self._call("barrier", [], [])

    # Point to point.

    @override
    def send(self, tensors: Any, rank: int, tag: int = 0) -> FakeWork:
        """Record a send, and keep its tensors for a receiver that runs here."""
        own, peer = self.ranks[self._own], self.ranks[rank]
        for tensor in tensors:
            self._recorder.mail.post(self._message(own, peer, tag), tensor, side="send ")
        return self._call("send", tensors, tensors, peer=peer, tag=tag)

    @override
    def recv(self, tensors: Any, rank: int, tag: int = 0) -> FakeWork:
        """Record a receive, and fill its tensors."""
        own, peer = self.ranks[self._own], self.ranks[rank]
        keys = self._message(peer, own, tag)

        def fill() -> bool:
            """Copy what the sender sent if it ran here, else fill with values."""
            is_known = self._recorder.mail.fetch(keys, tensors[0])
            if not is_known:
                self._fill(tensors[0])
            return is_known

        return self._call("recv", tensors, tensors, fill, peer=peer, tag=tag)

    def _message(self, source: int, target: int, tag: int) -> tuple[str, str]:
        """Return the key of a message, and that of one between two others at equal distance."""
        exact = f"send {self.name_of_group} {source} {target} {tag}"
        return exact, f"send {target - source} {tag}"

    def recv_anysource(self, tensors: Any, tag: int = 0) -> FakeWork:
        """Receive from whoever sends."""
        return self._call("recv", tensors, tensors, lambda: self._fill(tensors[0]), tag=tag)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Fill a tensor with another, as far as that goes."""
        if target.data_ptr() == source.data_ptr() and target.numel() == source.numel():
            return
        if target.numel() == source.numel():
            target.copy_(source.reshape(target.shape))
        else:
            self._fill(target)

    def _fill(self, tensor: torch.Tensor) -> None:
        """Fill a tensor that nobody has sent; 0 and 1 are special to many programs."""
        filling = _FILLINGS[self._recorder.noise is not None]
        tensor.fill_(filling) if tensor.is_floating_point() else tensor.zero_()

    # What torch asks of a backend.

    def _get_backend(self, _: object) -> FakeGroup:
        return self

    supports_coalescing = supports_splitting = supports_time_estimate = False
    bound_device_id = None

    def _start_coalescing(self, _: object) -> None: ...

    def _end_coalescing(self, _: object) -> FakeWork:
        return FakeWork(lambda: None, ())

    def _set_group_name(self, _: str) -> None: ...
    def _set_group_desc(self, _: str) -> None: ...
    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None: ...

    @override
    def getGroupName(self) -> str:
        return self.name_of_group

    @override
    def getGroupDesc(self) -> str:
        return self.name_of_group

    @override
    def setGroupName(self, _: str) -> None: ...
    @override
    def setGroupDesc(self, _: str) -> None: ...
    @override
    def shutdown(self) -> None: ...
    @override
    def abort(self) -> None: ...

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _has_many(tensor: torch.Tensor) -> bool:
    """Return true if a tensor has different values, which may change their places."""
    return tensor.dim() > 0 and bool((tensor != tensor.flatten()[0]).any())


def _reduction(opts: Any) -> str:
    """Return the name of a reduction."""
    operation = getattr(opts, "reduceOp", None)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        if operation == getattr(dist.ReduceOp, name):
            return name.lower()
    return str(operation)


def install(recorder: RankRecorder, rank: int, world_size: int) -> None:
    """Replace process groups in this process, before the program is imported.

    Args:
        recorder: Gets each call and each group.
        rank: Number of this process.
        world_size: Ranks of the whole training.
    """
    asked: dict[str, str] = {}  # group -> backend as the program named it
    make = c10d._new_process_group_helper
    start = c10d.init_process_group

    def create(options: Any, _: object) -> FakeGroup:
        ranks = list(options.global_ranks_in_group) or list(range(world_size))
        return FakeGroup(options.group_id, ranks, options.group_rank, recorder)

    def named(backend: Any) -> str:
        """Return a backend as the program means it."""
        text = str(backend or "undefined").lower()
        if text == BACKEND:  # that of the default group
            return recorder.asked_backend
        return {"undefined": "nccl" if torch.cuda.is_available() else "gloo"}.get(text, text)

    @functools.wraps(make)
    def make_group(
        size: int, own: int, ranks: Any, backend: Any, store: Any, name: Any, **_: Any
    ) -> Any:
        """Make a fake process group, and record it."""
        members = list(ranks) or list(range(world_size))
        asked[str(name)] = named(backend)
        is_eager = recorder.is_eager or _.get("device_id") is not None
        recorder.group(str(name), members, asked[str(name)] + f", {EAGER}" * is_eager)
        options = {k: v for k, v in _.items() if k in ("timeout", "pg_tag", "group_desc")}
        return make(size, own, ranks, dist.Backend(BACKEND), store, name, **options)

    @functools.wraps(start)
    def init_process_group(backend: Any = None, *args: Any, **more: Any) -> None:
        """Set the fake default group up."""
        recorder.asked_backend = named(backend)
        recorder.is_eager = more.get("device_id") is not None
        timeout = more.get("timeout") or (args[1] if len(args) > 1 else None)
        start(
            BACKEND,
            store=dist.HashStore(),  # type: ignore[attr-defined] # torch's stub lacks it
            rank=rank,
            world_size=world_size,
            **({} if timeout is None else {"timeout": timeout}),
        )

    def get_backend(group: Any = None) -> str:
        found = group if group is not None else c10d._get_default_group()
        return asked.get(getattr(found, "name_of_group", ""), recorder.asked_backend)

    batch = c10d.batch_isend_irecv
    numbers = itertools.count()

    def batch_isend_irecv(operations: Any) -> Any:
        """Run sends and receives as one batch."""
        recorder.batch = next(numbers)
        try:
            return batch(operations)
        finally:
            recorder.batch = None

    def monitored_barrier(group: Any = None, *_: object, **__: object) -> None:
        c10d.barrier(group)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    c10d._new_process_group_helper = make_group
    for name, function in (
        ("init_process_group", init_process_group),
        ("batch_isend_irecv", batch_isend_irecv),
        ("monitored_barrier", monitored_barrier),
    ):
        _replace(name, function)
    dist.get_backend = get_backend  # torch's own modules need the one that is there


def _replace(name: str, new: object) -> None:
    """Replace a function in all modules of torch that have it."""
    olds = [vars(module)[name] for module in (c10d, dist)]
    for module_name, module in sys.modules.copy().items():
        if module_name.startswith("torch.") and vars(module).get(name) in olds:
            setattr(module, name, new)
