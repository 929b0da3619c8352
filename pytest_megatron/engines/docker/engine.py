"""The engine that runs an attempt in a container on this machine, one at a time.

The container is made by a child process (`driver.py`), which ends it when this one is gone. What
runs in it is the worker that runs in a Slurm job as well; the container sees the project and the
run directory under the paths that they have here, and what it writes belongs to who runs pytest.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest_megatron.engines.config import read_docker_config
from pytest_megatron.engines.docker.messages import (
    ANSWER,
    JOB_DIR,
    REQUEST,
    Gone,
    Mount,
    RunContainer,
    StartRefused,
)
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.host import Lease
from pytest_megatron.workloads.engine.api import (
    EngineContext,
    EngineError,
    LeasingEngine,
    Planned,
    Resources,
    Submission,
    SubmissionOutcome,
    TroubleKind,
)
from pytest_megatron.workloads.engine.records import (
    JobSpec,
    outcome_of,
    read_record,
    write_spec,
)
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import AttemptPlan, Setting
from pytest_megatron.workloads.training.run.runner import LiveLog

_OUTCOME, _BEGAN = "outcome.json", "began"
_DRIVER = "pytest_megatron.engines.docker.driver"
_POLL_S = 0.1
_END_S = 60.0
_SLACK_S = 600.0  # for the container to end, beside what the training may take
_KILLED = 137  # 128 and SIGKILL, as Docker has it
_LONGEST_LINE = 500


class DriverGoneError(Exception):
    """The child process ended without an answer."""


class DockerEngine(LeasingEngine):
    """Runs submissions within `poll`, each in a container of its own."""

    name = "docker"

    def __init__(self, context: EngineContext) -> None:
        """Read the settings; nothing is started yet.

        Raises:
            ConfigError: There are none, or they are wrong.
        """
        super().__init__(context.facts.host, self._contain)
        self._context = context
        self._config = read_docker_config(context.config_file)
        self._directory = context.engine_dir / self.name
        self._token = secrets.token_hex(3)
        self._num_run = 0

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        """Return the setting for plans: a container has nothing of this process's environment."""
        env = self._config.env
        return replace(setting, python=self._config.python, env=env, has_ft_launcher=True)

    def close(self) -> None:
        """Remove the engine's directory, unless another session uses it."""
        with contextlib.suppress(OSError):
            self._directory.rmdir()
            self._context.engine_dir.rmdir()

    def describe(self, plan: AttemptPlan, _resources: Resources) -> Sequence[str]:
        """Return the image and the mounts of a container for `--plan`."""
        mounts = [
            f"mount: {mount.source}:{mount.target}{':ro' if mount.is_read_only else ''}"
            for mount in self._mounts(plan)
        ]
        return [f"image: {self._config.image}", *mounts]

    def _contain(self, submission: Submission, planned: Planned, lease: Lease) -> SubmissionOutcome:
        """Run a container for a plan, in a directory that is gone afterwards."""
        if importlib.util.find_spec("docker") is None:
            raise LaunchError(
                "--executor docker",
                "needs the package docker, which is not installed; "
                "pip install 'pytest-megatron[cluster]'",
            )
        self._directory.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="job-", dir=self._directory))
        job_dir = directory / "job"
        try:
            job_dir.mkdir()
            self._write_job(job_dir, submission, planned)
            request = self._request(planned.plan, job_dir, lease)
            live = LiveLog(planned.plan, submission.listener)
            try:
                gone = self._follow(request, lease, live, job_dir)
            except DriverGoneError as error:
                return SubmissionOutcome(trouble=self._lost(error))
            return self._outcome(gone, job_dir, planned)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _write_job(self, job_dir: Path, submission: Submission, planned: Planned) -> None:
        """Write the files for the container; no word of them goes through a shell unquoted."""
        spec = JobSpec(
            key=submission.key,
            plan=planned.plan,
            outcome=Path(JOB_DIR) / _OUTCOME,
            root=self._context.root,
            description=json.dumps(planned.description),
            env=self._config.env,
            watches_gpus=False,  # this process does, which sees who else uses them
            losses=() if submission.losses is None else submission.losses.names,
            options={},
        )
        try:
            write_spec(job_dir / "spec.json", spec)
        except OSError as error:
            raise LaunchError(
                str(error.filename or job_dir), f"{error.strerror}; nothing was run"
            ) from error

    def _request(self, plan: AttemptPlan, job_dir: Path, lease: Lease) -> RunContainer:
        """Return the request to run one attempt in a container."""
        config = self._config
        self._num_run += 1
        uid, gid = os.getuid(), os.getgid()
        return RunContainer(
            name=f"pytest-megatron-{self._token}-{self._num_run}",
            settings=config,
            command=(config.python, "-m", "pytest_megatron.engines.docker.inside", JOB_DIR),
            mounts=(*self._mounts(plan), Mount(source=str(job_dir), target=JOB_DIR)),
            user=config.user or f"{uid}:{gid}",
            groups=tuple(str(group) for group in os.getgroups() if uid),
            gpus=tuple(gpu.uuid for gpu in lease.gpus),
            env={"USER": _user_name(), "LOGNAME": _user_name()},
        )

    def _mounts(self, plan: AttemptPlan) -> tuple[Mount, ...]:
        """Return what the container sees: what the user names, and what the plan needs."""
        mounts: list[Mount] = []
        for text in self._config.mounts:
            source, target, *options = text.split(":")
            mounts.append(Mount(source=source, target=target, is_read_only="ro" in options))
        writable = (self._context.root, self._context.run_dir)
        read = (path for phase in plan.phases for path in phase.frozen_paths)
        for path in (*writable, *read):
            if not any(_shows(mount, path) for mount in mounts):
                is_own = path in writable
                mounts.append(Mount(source=str(path), target=str(path), is_read_only=not is_own))
        return tuple(mounts)

    def _follow(self, request: RunContainer, lease: Lease, live: LiveLog, job_dir: Path) -> Gone:
        """Run a container to its end; on any other way out it is gone as well.

        Raises:
            DriverGoneError: The child process was killed.
            LaunchError: The container cannot be started.
        """
        files = [job_dir.with_name(f"{name}.json") for name in ("request", "answer")]
        files[0].write_bytes(REQUEST.dump_json(request))
        log = job_dir.with_name("driver.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                # -P: the project may well have a directory `docker` of its own.
                [sys.executable, "-P", "-m", _DRIVER, *map(str, files)],
                env=dict(self._context.env),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=lease.descriptors,  # GPUs stay leased while the container lives
                start_new_session=True,  # Ctrl-C is for the controller, which decides
            )
        with process:
            try:
                self._until_ended(process, live, job_dir)
            except BaseException:  # Ctrl-C; the second one comes through the wait below
                _close_input(process)
                try:
                    _wait(process)
                except KeyboardInterrupt:
                    process.send_signal(signal.SIGTERM)
                    _wait(process)
                raise
        if not files[1].exists():
            code = process.returncode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            said = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise DriverGoneError(
                f"the process that runs containers ended by itself ({how})"
                + (f": {said}" if said else "")
            )
        answer = ANSWER.validate_json(files[1].read_bytes())
        if isinstance(answer, StartRefused):
            raise LaunchError(answer.where, answer.text)
        return answer

    def _until_ended(self, process: subprocess.Popen[bytes], live: LiveLog, job_dir: Path) -> None:
        """Follow the logs of a container until its process ends."""
        stop_at = float("inf")
        while process.poll() is None:
            live.poll()
            if stop_at == float("inf") and (job_dir / _BEGAN).exists():
                stop_at = time.monotonic() + _limit_s(live.plan)
            if time.monotonic() >= stop_at:
                _close_input(process)
                stop_at = float("inf")
            time.sleep(_POLL_S)
        live.poll(is_ended=True)

    def _lost(self, error: DriverGoneError) -> EngineError:
        """Return the outcome of an attempt whose child process was killed."""
        # GPUs are free from now on: the container must not go on with them.
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [sys.executable, "-P", "-m", _DRIVER],
                env=dict(self._context.env),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_END_S,
                check=False,
            )
        return EngineError(kind=TroubleKind.LOST, text=f"{error}; its container was removed")

    def _outcome(self, gone: Gone, job_dir: Path, planned: Planned) -> SubmissionOutcome:
        """Return the outcome of a container.

        Raises:
            LaunchError: The image is no good, so that nothing was run.
        """
        if not (job_dir / _BEGAN).exists():
            said = " / ".join(line.strip()[:_LONGEST_LINE] for line in gone.said if line)
            raise LaunchError(
                f"docker image {self._config.image!r}",
                f"pytest-megatron did not begin in it, exit code {gone.exit_code} (it printed: "
                f"{said or 'nothing'}); set `python` to the interpreter that has pytest-megatron "
                f"there, and let an ENTRYPOINT run the command after it",
            )
        record = read_record(job_dir / _OUTCOME)
        if record is None:
            text = "the container ended and left no record"
            lost = EngineError(kind=TroubleKind.LOST, text=text)
            return SubmissionOutcome(trouble=_trouble(gone) or lost)
        outcome = outcome_of(record, planned, self._context.facts)
        if gone.was_oom and not all(end.is_clean for end in outcome.ends):
            return replace(outcome, trouble=_trouble(gone))
        return outcome


def _shows(mount: Mount, path: Path) -> bool:
    """Return if a mount shows a path: a link in it may lead out of it."""
    is_inside = path.is_relative_to(mount.target)
    if not is_inside or mount.source != mount.target:  # the user's own view of what is where
        return is_inside
    return path.resolve().is_relative_to(Path(mount.source).resolve())


def _trouble(gone: Gone) -> EngineError | None:
    """Return what ended a container from outside of its programs; None where nothing did."""
    if gone.was_oom:
        kind, what = TroubleKind.OUT_OF_MEMORY, "the kernel killed a process for want of memory"
    elif gone.exit_code == _KILLED:
        kind, what = TroubleKind.LOST, "it was killed"
    else:
        return None
    return EngineError(kind=kind, text=f"Docker says of the container: {what}")


def _close_input(process: subprocess.Popen[bytes]) -> None:
    """Have a child process end its container politely."""
    assert process.stdin is not None
    process.stdin.close()


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child process, but not for ever."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _limit_s(plan: AttemptPlan) -> float:
    """Return how long a container may be there: longer than the worker in it lets things run."""
    return plan.time_limit_s + _SLACK_S


def _user_name() -> str:
    """Return a name for the user, whom the container knows by number only."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid{os.getuid()}"
