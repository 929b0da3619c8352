"""Shows a user what an attempt writes that another process carries out."""

from __future__ import annotations

from pytest_megatron.launch.follow import LogWatch, Progress
from pytest_megatron.launch.local import AttemptListener
from pytest_megatron.launch.plan import AttemptPlan, PhasePlan


class LiveLog:
    """Follows the logs of an attempt phase by phase.

    Attributes:
        plan: Of the attempt.
    """

    def __init__(self, plan: AttemptPlan, listener: AttemptListener) -> None:
        self.plan = plan
        self._listener = listener
        self._left = list(plan.phases)
        self._told: Progress | None = None
        self._phase = self._left.pop(0)
        self._watch = self._follow(self._phase)

    def poll(self, *, is_ended: bool = False) -> None:
        """Tell the listener what is new.

        Args:
            is_ended: Whether nothing more is going to be written.
        """
        while self._left and self._left[0].dirs.root.is_dir():
            self._tell(self._watch.drain())
            self._phase = self._left.pop(0)
            self._watch = self._follow(self._phase)
        self._tell(self._watch.drain() if is_ended else self._watch.poll())

    def _tell(self, lines: list[str]) -> None:
        if lines:
            self._listener.on_lines(lines)
        if self._watch.progress is not None and self._watch.progress != self._told:
            self._told = self._watch.progress
            self._listener.on_progress(self._phase.number, self._told)

    def _follow(self, phase: PhasePlan) -> LogWatch:
        self._told = None
        scripts = self.plan.dirs.assets if phase.is_script else None
        return LogWatch(phase.dirs, phase.world_size // phase.num_nodes, scripts=scripts)


class OnlyProgress:
    """Passes on how far a training is, and no line of it."""

    def __init__(self, listener: AttemptListener) -> None:
        self._listener = listener

    def on_lines(self, lines: list[str]) -> None:
        """Drop the lines."""

    def on_progress(self, phase: int, progress: Progress) -> None:
        """Pass it on."""
        self._listener.on_progress(phase, progress)
