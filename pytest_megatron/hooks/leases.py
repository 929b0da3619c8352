"""Devices that the gangs of one session hold."""

from __future__ import annotations

from collections.abc import Callable

from pytest_megatron.gang.spec import GangSpec
from pytest_megatron.host import this_host
from pytest_megatron.lease import Lease, LeaseWaiter, try_lease, waiting_text


class Leases:
    """Leases of gangs, and of those whose ranks still collect."""

    def __init__(self, tell_user: Callable[[str], None]) -> None:
        """Hold nothing yet.

        Args:
            tell_user: Told once whenever there is something to wait for.
        """
        self._tell_user = tell_user
        self._prepared: dict[GangSpec, Lease] = {}
        self._of_gangs: dict[int, Lease] = {}
        self._waiting: LeaseWaiter | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether devices are wanted that others hold; those others know of it."""
        return self._waiting is not None

    @property
    def is_empty(self) -> bool:
        """Whether no gang holds devices."""
        return not self._of_gangs

    def take(self, spec: GangSpec, num_gpus: int) -> Lease | None:
        """Lease devices for a gang, without waiting for them.

        Args:
            spec: What was put aside for such a gang is taken first.
            num_gpus: Devices of this host that it needs.
        """
        lease = self._prepared.pop(spec, None)
        if lease is not None:
            return lease
        gpus = this_host().gpus
        lease = try_lease(gpus, num_gpus)
        if lease is None and self._waiting is None:
            self._tell_user(waiting_text(gpus, num_gpus))
            self._waiting = LeaseWaiter()
        if lease is not None and self._waiting is not None:
            self._waiting.close()
            self._waiting = None
        return lease

    def put_aside(self, spec: GangSpec, lease: Lease) -> None:
        """Keep a lease for a gang whose ranks still collect."""
        self._prepared[spec] = lease

    def keep(self, gang: int, lease: Lease) -> None:
        """Keep a lease as long as a gang lives."""
        self._of_gangs[gang] = lease

    def is_held_by(self, gang: int) -> bool:
        """Whether a gang holds devices."""
        return gang in self._of_gangs

    def release(self, gang: int) -> None:
        """Let go of what a gang held, if anything."""
        lease = self._of_gangs.pop(gang, None)
        if lease is not None:
            lease.close()

    def close(self) -> None:
        """Let go of everything."""
        for lease in (*self._of_gangs.values(), *self._prepared.values()):
            lease.close()
        self._of_gangs.clear()
        self._prepared.clear()
