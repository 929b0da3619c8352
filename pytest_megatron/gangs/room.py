"""The room `gangs` in the table."""

from __future__ import annotations

from pytest_megatron.rooms import Room

ROOM = Room()
