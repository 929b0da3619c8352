"""What a session has to say to further attempts of its workloads."""

from __future__ import annotations

from pytest_megatron.hooks.session import RunSession
from pytest_megatron.launch.local import AttemptListener
from pytest_megatron.verdict.attempt import Attempt
from pytest_megatron.verdict.decide import Verdict
from pytest_megatron.verdict.job import Training


class ItemRetries:
    """What a run says to further attempts of one item, and tells the user of them."""

    def __init__(self, session: RunSession, node_id: str, live: AttemptListener) -> None:
        self._session = session
        self._node_id = node_id
        self._live = live

    def claim(self, attempt: Attempt) -> str | None:
        """Take a further attempt from what the run may have."""
        signature = _signature_of(attempt) or ""
        return self._session.retry_budget.claim(self._node_id, signature, attempt.suspects)

    def on_retry(self, attempt: Attempt, pause_s: float) -> None:
        """Print why, and when."""
        assert attempt.cause is not None
        when = f"in {pause_s:g} s" if pause_s else "at once"
        text = f"attempt {attempt.number}: {attempt.cause.text}; again {when}"
        self._live.on_lines([self._session.shorten(text)])

    def note_end(self, training: Training) -> None:
        """Count the item, and say so if the machine or the network is the matter of the run."""
        is_broken = training.verdict is Verdict.BROKEN
        broken_by = _signature_of(training.attempts[-1]) if is_broken else None
        if text := self._session.retry_budget.note_end(self._node_id, broken_by):
            self._live.on_lines([f"megatron: {text}"])


def _signature_of(attempt: Attempt) -> str | None:
    """Return the id of what an attempt failed of."""
    signature = None if attempt.cause is None else attempt.cause.signature
    return None if signature is None else signature.id
