"""Messages between processes, as frozen dataclasses, and their frames.

A frame is a JSON array: the name of the type, then its fields by name. Nothing is executed or
unpickled: a peer that knows the key can forge outcomes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar, cast

from pytest_megatron.base.text import cut_middle
from pytest_megatron.process.originals import json

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)


class _Make(Protocol[M_co]):
    """Constructor of a dataclass."""

    def __call__(self, **fields: object) -> M_co: ...


class Codec(Generic[M]):
    """Frames of one set of messages."""

    def __init__(self, kinds: Iterable[type[M]], nested: Mapping[str, type] | None = None) -> None:
        """Record the messages.

        Args:
            kinds: Their types.
            nested: Name of a field that has several dataclasses -> their type.
        """
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._nested = nested or {}
        self._fields: dict[type, tuple[str, ...]] = {
            kind: tuple(field.name for field in fields(kind))
            for kind in (*self._kinds.values(), *self._nested.values())
            if is_dataclass(kind)
        }

    def encode(self, message: M) -> bytes:
        """Return a message as one frame."""
        content = [type(message).__name__, self._plain(message)]
        return json.dumps(content, separators=(",", ":"), default=self._plain).encode()

    def encode_within(self, message: M, most_bytes: int) -> bytes:
        """Return a message as one frame, with texts and lists cut if it is too long."""
        frame, most = self.encode(message), most_bytes // 16
        while len(frame) > most_bytes and most:
            frame, most = json.dumps(_cut(json.loads(frame), most)).encode(), most // 4
        return frame

    def decode(self, frame: bytes) -> M:
        """Return the message of a frame.

        Raises:
            ValueError: It is not a known message.
        """
        try:
            name, values = json.loads(frame)
            make = cast("_Make[M]", self._kinds[name])
            return make(**{k: self._value(k, v) for k, v in values.items()})
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"not a message: {frame[:200]!r}") from error

    def _value(self, name: str, value: object) -> object:
        if not isinstance(value, list):
            return value
        make = cast("_Make[object] | None", self._nested.get(name))
        return tuple(value) if make is None else tuple(make(**entry) for entry in value)

    def _plain(self, value: object) -> dict[str, object]:
        names = self._fields.get(type(value))
        if names is None:
            raise TypeError(f"cannot be sent: {value!r}")
        return {name: getattr(value, name) for name in names}


def _cut(value: object, most: int) -> object:
    if isinstance(value, dict):
        return {cut_middle(k, most): _cut(v, most) for k, v in islice(value.items(), most)}
    if isinstance(value, list):
        return [_cut(v, most) for v in islice(value, most)]
    return cut_middle(value, most) if isinstance(value, str) else value
