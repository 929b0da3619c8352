"""Which orders go into one call of sbatch, and with which words. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pytest_megatron.engines.base import Resources, Submission
from pytest_megatron.engines.journal import Batch
from pytest_megatron.engines.slurm_states import label_of
from pytest_megatron.launch.plan import Setting

_MOST_TITLE = 40  # characters of an item's name in a job's
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.-]+")
_NAME = re.compile(r"\.([0-9a-f]{8})-(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScript:
    """What sbatch is given for one shape of job, and what the specs of such jobs say.

    Attributes:
        path: The script; its only argument is a spec, or the directory of an array's specs.
        exclude: Hosts that its own `--exclude` names; ours would take the place of that.
        env: Variables of the training, over those of the job.
        options: For the programs that run in the job.
    """

    path: Path
    exclude: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)


class Scripts(Protocol):
    """Who writes the scripts of jobs."""

    def settle(self, setting: Setting, platform: str) -> Setting:
        """Return the setting as plans for jobs on a platform need it."""

    def write(self, wanted: Sequence[Resources]) -> dict[Resources, JobScript]:
        """Return a script for each.

        Raises:
            LaunchError: None can be written.
        """


def cut(orders: Iterable[Submission], most: int) -> list[tuple[Submission, ...]]:
    """Return the orders in batches of equal jobs, of at most `most` each.

    The batches are in the order in which the first order of each came, and so is each batch: Slurm
    prefers the earlier of equal jobs.
    """
    kinds: dict[tuple[Resources, frozenset[str]], list[Submission]] = {}
    for order in orders:
        kinds.setdefault((order.resources, order.avoid_hosts), []).append(order)
    found: list[tuple[Submission, ...]] = []
    for same in kinds.values():
        found += (tuple(same[first : first + most]) for first in range(0, len(same), most))
    return found


def job_name(orders: Sequence[Submission], run_id: str, number: int) -> str:
    """Return a name that a person reads, and that says which batch of which run a job is."""
    items = {order.key.split("/")[0] for order in orders}
    title = items.pop() if len(items) == 1 else f"{len(items)}_workloads"
    plain = _NOT_PLAIN.sub("_", title)[:_MOST_TITLE]
    return f"{plain}.{run_id}-{number}"


def parse_name(name: str) -> tuple[str, int] | None:
    """Return run and batch of a job's name; None if it is none of ours."""
    found = _NAME.search(name)
    return None if found is None else (found[1], int(found[2]))


def scancel_labels(
    batches: Mapping[int, Batch],
    wanted: Iterable[tuple[int, int]],
    num_live: Mapping[int | None, int],
) -> list[str]:
    """Return what scancel takes: a whole array where all that is left of it is wanted.

    Args:
        batches: By number. One without an id has nothing to cancel yet.
        wanted: Batch and index of each job.
        num_live: Jobs of each batch that have not ended.
    """
    chosen: dict[int, list[int]] = {}
    for number, index in wanted:
        chosen.setdefault(number, []).append(index)
    found: list[str] = []
    for number, indices in chosen.items():
        batch = batches[number]
        if batch.job_id is not None and (not batch.is_array or len(indices) == num_live[number]):
            found.append(str(batch.job_id))
        elif batch.job_id is not None:
            found += [label_of(batch.job_id, index) for index in indices]
    return found


def sbatch_words(
    script: JobScript, *, name: str, num_elements: int | None, avoid: Iterable[str], log: Path
) -> list[str]:
    """Return the arguments of sbatch that are not in the script; the spec follows them.

    Args:
        script: For all of them.
        name: As from `job_name`.
        num_elements: Of the array; None for a job that is none.
        avoid: Hosts that failed.
        log: Where the job's output goes; `%a` in it is the array's index.
    """
    words = [f"--job-name={name}", "--no-requeue", f"--output={log}", f"--error={log}"]
    if num_elements is not None:
        words.append(f"--array=0-{num_elements - 1}")
    hosts = sorted({*avoid})
    if hosts:
        words.append(f"--exclude={','.join([*script.exclude, *hosts])}")
    return [*words, str(script.path)]
