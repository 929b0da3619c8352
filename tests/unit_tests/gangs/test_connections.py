"""Connections of a controller."""

from __future__ import annotations

import hmac
import signal
import threading

import pytest

from pytest_megatron.gangs.ipc.channel import connect, listen_on
from pytest_megatron.gangs.ipc.messages import Register
from pytest_megatron.gangs.supervisor.connections import Calls


def test_ctrl_c_while_a_caller_proves_itself_leaves_nothing_half_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = listen_on("127.0.0.1", 0, b"k" * 32)
    calls = Calls()
    calls.listen(listener, lambda *_: None, lambda: None)
    failed: list[BaseException] = []

    def call() -> None:
        try:
            connect(listener.address, listener.key, Register(role="node", node_rank=1))
        except OSError as error:
            failed.append(error)

    def interrupt(*_: object) -> bool:
        signal.raise_signal(signal.SIGINT)
        return True

    caller = threading.Thread(target=call)
    caller.start()
    with monkeypatch.context() as patch:
        patch.setattr(hmac, "compare_digest", interrupt)
        calls.take(10)  # it knocks
        with pytest.raises(KeyboardInterrupt):
            calls.take(10)
    caller.join(10)
    assert len(failed) == 1  # it was hung up on
    assert not calls.take(0)
    calls.stop()
