"""Client of Slurm's commands, which separates refusals from a cluster that is away (effects).

The engine needs no more of a cluster than `SlurmCommands`: a simulated one is as good.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pytest_megatron.engines.slurm.states import (
    SACCT_FIELDS,
    SQUEUE_FORMAT,
    Place,
    SlurmJob,
    parse_sacct,
    parse_squeue,
)
from pytest_megatron.errors import LaunchError

_TIMEOUT_S = 120.0  # sbatch itself tries again for about a minute where the queue is full
_MOST_IDS = 500  # in one command line
_MOST_TEXT = 400  # characters of what a command said
# What the commands say of a controller that is away, and of an identity service that is.
_AWAY = re.compile(
    r"(?i)Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted"
    r"|Connection (?:refused|timed out|reset)|standby mode|Transport endpoint is not connected"
    r"|Slurm backup controller|Insane message length|temporarily unable to accept job"
    r"|Resource temporarily unavailable|Unexpected message received|connect failure"
    r"|Munge encode failed|Protocol authentication error|Unable to resolve"
)
# What an account's or a partition's limit on the number of jobs says: there is room again later.
_FULL = re.compile(r"(?i)MaxSubmit|GrpSubmit|job submit limit")
# Variables that would change what our commands print, or how long they take.
_MISLEADING = re.compile(
    r"(?:SQUEUE|SACCT|SCANCEL|SINFO|SCONTROL)_|SBATCH_WAIT$|SLURM_(?!CONF$|CLUSTERS$)"
)
_BAD_NODE = re.compile(
    r"(?i)down|drain|fail|boot|unk|\*$|maint|inval|powered_down|powering_down|no_respond"
)


class SlurmAwayError(Exception):
    """Slurm's controller did not answer; whether it did what it was asked is not known."""


class SlurmRefusedError(Exception):
    """Slurm will not do it.

    Attributes:
        is_full: Whether that is for the number of jobs, and so may go by.
    """

    def __init__(self, text: str, *, is_full: bool = False) -> None:
        super().__init__(text)
        self.is_full = is_full


class SlurmCommands(Protocol):
    """Queries and orders of the engine to a cluster.

    All methods may raise `SlurmAwayError`, and `LaunchError` where there is no cluster at all.
    """

    def submit(self, words: Sequence[str]) -> int:
        """Submit a job with the arguments of sbatch; return its id.

        Raises:
            SlurmRefusedError: With Slurm's own words.
        """

    def jobs(self) -> tuple[SlurmJob, ...]:
        """Return the user's jobs that the controller remembers, ended ones too: one query."""

    def accounted(self, ids: Sequence[int]) -> tuple[SlurmJob, ...]:
        """Return what the accounting knows of jobs; nothing where there is none."""

    def cancel(self, labels: Sequence[str]) -> None:
        """End jobs, by id or `id_element`; those that have ended do not matter."""

    def max_array_size(self) -> int:
        """Return the first index that an element of an array cannot have."""

    def bad_nodes(self, hosts: Sequence[str]) -> frozenset[str]:
        """Return those hosts that are out of service now."""


class RealSlurm:
    """The commands of the Slurm client that is installed here."""

    def __init__(
        self, env: Mapping[str, str], cwd: Path, held_by_submissions: Sequence[int] = ()
    ) -> None:
        """Keep environment and directory of Slurm's commands.

        Args:
            env: The controller's environment.
            cwd: Where jobs start.
            held_by_submissions: Descriptors that each sbatch keeps open until it ends.
        """
        kept = {name: value for name, value in env.items() if not _MISLEADING.match(name)}
        self._env = {**kept, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C.UTF-8"}
        self._submit_env = kept
        self._cwd = cwd
        self._held = tuple(held_by_submissions)

    def submit(self, words: Sequence[str]) -> int:
        """Run sbatch; return the id of the job.

        Raises:
            SlurmRefusedError: It refuses.
            SlurmAwayError: The controller is away; the job may be there all the same.
        """
        done = self._run(["sbatch", "--parsable", *words], self._submit_env)
        said = done.stdout.strip().splitlines()
        first = said[-1].partition(";")[0] if said else ""  # `41;cluster` in a federation
        if done.returncode == 0 and first.isdigit():
            return int(first)
        text = _error_line(done)
        raise SlurmRefusedError(text, is_full=_FULL.search(text) is not None)

    def jobs(self) -> tuple[SlurmJob, ...]:
        """Return the user's jobs in the queue, by one squeue.

        Raises:
            SlurmAwayError: It got no answer, or could not ask.
        """
        done = self._run(["squeue", "--me", "--states=all", "--array", "-h", "-O", SQUEUE_FORMAT])
        if done.returncode != 0:
            raise SlurmAwayError(_error_line(done))
        return parse_squeue(done.stdout)

    def accounted(self, ids: Sequence[int]) -> tuple[SlurmJob, ...]:
        """Return what sacct knows of ended jobs."""
        fields = ",".join(SACCT_FIELDS)
        found: list[SlurmJob] = []
        for some in _chunks([str(number) for number in ids]):
            words = ["sacct", "-X", "-P", "-D", "-n", "-j", ",".join(some), "-o", fields]
            try:
                done = self._run(words)
            except (SlurmAwayError, LaunchError):
                return tuple(found)  # no accounting, or none that answers, is not trouble
            found += parse_sacct(done.stdout)
        return tuple(found)

    def cancel(self, labels: Sequence[str]) -> None:
        """Cancel jobs by scancel.

        Raises:
            SlurmAwayError: The controller is away.
        """
        for some in _chunks(labels):
            self._run(["scancel", "--quiet", *some])

    def max_array_size(self) -> int:
        """Return how many elements a job array may have, by scontrol."""
        said = self._run(["scontrol", "show", "config"]).stdout
        found = re.search(r"^MaxArraySize\s*=\s*(\d+)", said, re.MULTILINE)
        return 1 if found is None else max(1, int(found[1]))

    def bad_nodes(self, hosts: Sequence[str]) -> frozenset[str]:
        """Return nodes that are down, by sinfo."""
        words = ["sinfo", "-h", "-N", "-n", ",".join(hosts), "-o", "%N|%T"]
        lines = [line.partition("|") for line in self._run(words).stdout.splitlines()]
        return frozenset(name for name, _, state in lines if _BAD_NODE.search(state.strip()))

    def _run(
        self, words: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's.

        Raises:
            SlurmAwayError: Slurm's controller is away, or the command did not end.
            LaunchError: There is no such command.
        """
        try:
            done = subprocess.run(
                words,
                env=env or self._env,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
                pass_fds=self._held if env is not None else (),
                start_new_session=True,  # Ctrl-C at the terminal is the controller's
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmAwayError(f"{words[0]} did not end within {_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise LaunchError(
                "--executor slurm",
                f"{words[0]} cannot be run: {error.strerror}, expected Slurm's client on PATH; "
                f"start pytest on a login node",
            ) from error
        if done.returncode != 0 and _AWAY.search(done.stderr):
            raise SlurmAwayError(_error_line(done))
        return done


def who_cancelled(
    commands: SlurmCommands, seen: Mapping[Place, SlurmJob], ids: Iterable[int]
) -> dict[Place, SlurmJob]:
    """Return jobs of these that were cancelled by a user, as far as the accounting knows."""
    return {
        known.place: replace(seen[known.place], by_uid=known.by_uid)
        for known in commands.accounted(sorted(ids))
        if known.by_uid is not None and known.place in seen
    }


def _error_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error of a command in one line."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    text = "; ".join(lines) or f"exit code {done.returncode} without a word"
    return text[:_MOST_TEXT]


def _chunks(items: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut what is too long for one command line."""
    for first in range(0, len(items), _MOST_IDS):
        yield items[first : first + _MOST_IDS]
