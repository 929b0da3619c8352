"""Networks, launchers, and ranks that do not do the same."""

from __future__ import annotations

from failure_case import CONFIGURED, DESYNCED, DETAIL, HTTP, HUNG, MISFIT, NETWORK, Case

_PORT = Case(
    id="port-in-use",
    fault="nothing",
    families=("port_in_use",),
    chance="transient",
    root="none",
    rendezvous=("--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", "{port}"),
    is_port_taken=True,
)
NETWORKS = (
    _PORT,
    Case(
        id="port-of-a-server",
        fault="port_of_a_server",
        families=("port_in_use",),
        chance="transient",
        guilty=(0,),
        form="mixed",
    ),
    Case(id="dns", fault="name_resolution", families=("dns",), chance="transient", guilty=(1,)),
    Case(
        id="dns-in-a-download",
        fault="name_resolution_in_a_download",
        families=("dns",),
        chance="transient",
        guilty=(0,),
        form="ours",
    ),
    Case(id="refused", fault="refused", families=NETWORK, chance="either", guilty=(3,)),
    Case(id="network-down", fault="network_down", families=NETWORK, chance="either", form="ours"),
    Case(id="http-429", fault="too_many_requests", families=HTTP, chance="transient", guilty=(1,)),
    Case(
        id="http-503",
        fault="service_unavailable",
        families=HTTP,
        chance="transient",
        guilty=(0,),
        form="tasks",
    ),
    Case(id="http-404", fault="not_found", families=(*HTTP, *CONFIGURED), guilty=(0,)),
    Case(id="http-read-timeout", fault="read_timeout", families=HTTP, chance="transient"),
    Case(
        id="http-incomplete",
        fault="incomplete_read",
        families=HTTP,
        chance="transient",
        guilty=(1,),
    ),
    Case(id="http-reset", fault="reset_by_peer", families=HTTP, chance="either", form="ours"),
)

DESYNC = (
    Case(id="desync-missed", fault="missed", families=DESYNCED),
    # Its traceback is in another collective than those of the others.
    Case(id="desync-missed-bare", fault="missed", families=DESYNCED, guilty=(1,), form="ours"),
    # gloo aborts whichever rank is the first to get more than it has asked for.
    Case(
        id="desync-extra",
        fault="extra",
        families=MISFIT,
        root="any",
        guilty=(3,),
        devices=("cpu",),
    ),
    Case(id="desync-size", fault="other_size", families=MISFIT, root="any", devices=("cpu",)),
    Case(id="desync-size-detail", fault="other_size", families=DESYNCED, env=DETAIL, guilty=(1,)),
    Case(id="desync-type-detail", fault="other_type", families=DESYNCED, env=DETAIL, form="ours"),
    Case(
        id="desync-operation-detail",
        fault="other_operation",
        families=DESYNCED,
        env=DETAIL,
        guilty=(3,),
    ),
    Case(id="barrier-late", fault="monitored_barrier", families=HUNG, chance="either"),
    Case(
        id="killed-in-collective",
        fault="killed_in_collective",
        families=("sigkill",),
        chance="either",
        guilty=(1,),
    ),
)

LAUNCHER = (
    Case(
        id="program-missing",
        fault="nothing",
        families=(*CONFIGURED, "import"),
        root="any",
        guilty=(),
        program="no_such_training.py",
    ),
    Case(
        id="launcher-option",
        fault="nothing",
        families=("config",),
        root="none",
        rendezvous=("--standalone", "--nproc-per-nodes", "4"),
    ),
)
