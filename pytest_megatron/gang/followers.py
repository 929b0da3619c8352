"""Sessions of other nodes, as the controller on node 0 knows them: who came, who is told what."""

from __future__ import annotations

from pytest_megatron.gang.channel import Channel
from pytest_megatron.gang.messages import Message, encode
from pytest_megatron.gang.messages_of_nodes import Joined, SessionEnded, Welcome

_USAGE_ERROR = 4  # pytest's


class Followers:
    """The connections to sessions of other nodes.

    Attributes:
        joined: What each session that can take part said, by node.
        refused: Why a session cannot take part, one line for each.
        num_strangers: Callers that did not know the key.
    """

    def __init__(self, welcome: Welcome) -> None:
        """Begin without any.

        Args:
            welcome: What each is told first.
        """
        self.joined: dict[int, Joined] = {}
        self.refused: list[str] = []
        self.num_strangers = 0
        self._welcome = welcome
        self._channels: dict[int, Channel] = {}

    def greet(self, node_rank: int, channel: Channel) -> None:
        """Take a session in that called."""
        known = self._channels.get(node_rank)
        is_taken = node_rank == 0 or (known is not None and not known.is_closed)
        if is_taken or node_rank >= self._welcome.num_nodes:
            text = f"--node-rank: {node_rank} is taken or too large; give each node one of its own"
            channel.send(SessionEnded(exit_code=_USAGE_ERROR, kind="exit", text=text))
            channel.close()
            return
        self._channels[node_rank] = channel
        channel.send(self._welcome)

    def read(self, channel: Channel) -> None:
        """Take in what a session said."""
        for node_rank in [n for n, c in self._channels.items() if c is channel]:
            for message in channel.drain():
                if isinstance(message, Joined) and not message.problem:
                    self.joined[node_rank] = message
                elif isinstance(message, Joined):
                    self.refused.append(f"node {node_rank}: {message.problem}")
            if channel.is_closed:
                del self._channels[node_rank]
                self.joined.pop(node_rank, None)

    def tell(self, message: Message) -> None:
        """Tell every session; one that is gone hears nothing."""
        frame = encode(message)
        for channel in self._channels.values():
            channel.send_frame(frame)

    def dismiss(self, ended: SessionEnded) -> None:
        """Tell every session that it is over; they wait for the end of this process."""
        self.tell(ended)
        for channel in self._channels.values():
            channel.leave()
        self._channels.clear()
