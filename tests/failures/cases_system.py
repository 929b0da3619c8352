"""What the machine and the cluster do."""

from __future__ import annotations

from failure_case import CONFIGURED, HUNG, PEER_GONE, RAISED, Case

_MEMORY = ("host_oom", "memory")
_SIGNALLED = ("segfault",)
SYSTEM = (
    Case(id="memory-python", fault="memory_python", families=_MEMORY, guilty=(1,)),
    Case(id="memory-numpy", fault="memory_numpy", families=_MEMORY, form="ours"),
    Case(id="memory-torch", fault="memory_torch", families=_MEMORY, guilty=(3,), devices=("cpu",)),
    Case(id="killed", fault="killed", families=("sigkill",), chance="either", guilty=(1,)),
    Case(
        id="killed-rank0",
        fault="killed",
        families=("sigkill",),
        chance="either",
        guilty=(0,),
        form="ours",
    ),
    Case(id="killed-labelled", fault="killed", families=("sigkill",), chance="either", form="srun"),
    Case(
        id="killed-agent",
        fault="killed_agent",
        families=("sigkill", "unknown", *PEER_GONE, "store_timeout"),
        may_be_silent=True,  # its ranks go on without it, and may come to their end
        chance="either",
        root="any",
    ),
    Case(
        id="terminated-agent",
        fault="terminated_agent",
        families=("terminated", "unknown", "preempt", "sigkill"),
        chance="either",
        root="any",
    ),
    Case(id="segfault", fault="segfault", families=_SIGNALLED, guilty=(1,)),
    Case(
        id="segfault-silent", fault="segfault_silent", families=_SIGNALLED, guilty=(3,), form="ours"
    ),
    Case(
        id="segfault-labelled",
        fault="segfault_silent",
        families=_SIGNALLED,
        guilty=(0,),
        form="srun",
    ),
    Case(id="abort", fault="abort", families=_SIGNALLED),
    Case(id="double-free", fault="double_free", families=_SIGNALLED, guilty=(1,)),
    Case(
        id="double-free-zipped", fault="double_free", families=_SIGNALLED, guilty=(3,), form="zip"
    ),
    Case(
        id="invalid-pointer",
        fault="invalid_pointer",
        families=_SIGNALLED,
        guilty=(0,),
        form="tasks",
    ),
    Case(id="bus-error", fault="bus_error", families=(*_SIGNALLED, "exit", "memory"), guilty=(1,)),
    Case(
        id="disk-full",
        fault="disk_full",
        families=("disk",),
        needs_full_disk=True,
    ),
    Case(
        id="disk-full-text", fault="disk_full_text", families=("disk",), guilty=(0,), form="mixed"
    ),
    Case(id="disk-full-thread", fault="disk_full_in_a_thread", families=("disk",), guilty=(1,)),
    Case(id="disk-file-size", fault="file_too_large", families=("disk", "exception"), guilty=(1,)),
    Case(id="descriptors", fault="descriptors", families=("limits", "exception", "config")),
    Case(
        id="permission",
        fault="permission",
        families=("permission", "disk", *CONFIGURED),
        guilty=(1,),
    ),
    Case(id="exit-3", fault="exit_code_3", families=("unknown", "exit"), guilty=(1,)),
    Case(id="exit-0", fault="exit_code_0", families=(*PEER_GONE, "unknown")),
    Case(
        id="loader-killed",
        fault="loader_worker_killed",
        families=("sigkill", "exception", "loader"),
        chance="either",
        guilty=(1,),
    ),
    Case(id="loader-raises", fault="loader_worker_raises", families=RAISED, guilty=(3,)),
    Case(id="hang-sleep", fault="hang_sleep", families=HUNG, chance="either"),
    Case(id="hang-stopped", fault="hang_stopped", families=HUNG, chance="either", guilty=(1,)),
    Case(id="hang-gil", fault="hang_gil", families=HUNG, chance="either", guilty=(3,), form="ours"),
    Case(
        id="rank-never-starts",
        fault="never_starts",
        families=("store_timeout", *HUNG),
        chance="either",
        guilty=(3,),
    ),
    Case(
        id="rank-never-starts-tasks",
        fault="never_starts",
        families=("store_timeout",),
        chance="either",
        root="any",  # srun stops rank 0 before it says who came: the logs fit ranks 0 and 1
        guilty=(1,),
        form="tasks",
    ),
    Case(
        id="node-never-comes",
        fault="nothing",
        families=("store_timeout",),
        chance="either",
        root="none",
        rendezvous=(
            *("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:{port}"),
            *("--rdzv-conf", "join_timeout=6,timeout=6", "--rdzv-id", "77"),
        ),
    ),
    Case(
        id="time-limit-slurm",
        fault="slow",
        families=("time_limit",),
        root="any",
        guilty=(),
        form="srun",
        limit_s=15.0,
        limit_reason="DUE TO TIME LIMIT",
        arguments=("--timeout", "600"),
    ),
    Case(
        id="time-limit-ours",
        fault="hang@5:2",
        families=("time_limit", *HUNG),
        chance="genuine",
        root="any",
        form="session",
        limit_s=12.0,
        devices=("cpu",),
    ),
    Case(
        id="golden-ours",
        fault="",
        families=("golden_mismatch",),
        root="none",
        form="session",
        is_golden_other=True,
        devices=("cpu",),
    ),
    Case(
        id="preempted",
        fault="slow",
        families=("preempt",),
        chance="transient",
        root="none",
        guilty=(),
        form="tasks",
        limit_s=15.0,
        limit_reason="DUE TO PREEMPTION",
        arguments=("--timeout", "600"),
    ),
)
