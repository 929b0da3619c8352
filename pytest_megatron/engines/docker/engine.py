"""The engine that runs an attempt in a container on this machine, one at a time.

The container is made by a child process (`driver.py`), since nemo-run turns logging inside
out where it is imported. What runs in it is the worker that runs in a Slurm job as well; the
container sees the project and the run directory under the paths that they have here, and what it
writes belongs to who runs pytest.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import os
import secrets
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from pytest_megatron.engines.docker.messages import (
    ANSWER,
    JOB_DIR,
    REQUEST,
    Answer,
    ContainerStarted,
    ContainerWaiting,
    DriverReady,
    Gone,
    Mount,
    Request,
    RunContainer,
    StartRefused,
    StopContainer,
)
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.host import Lease
from pytest_megatron.runs.record import read_if_whole
from pytest_megatron.workloads.engine.api import (
    EngineContext,
    EngineError,
    Planned,
    Submission,
    SubmissionOutcome,
    TroubleKind,
)
from pytest_megatron.workloads.engine.config_file import read_docker_config
from pytest_megatron.workloads.engine.local import LeasingEngine
from pytest_megatron.workloads.engine.records import (
    JobSpec,
    outcome_of,
    read_record,
    write_spec,
)
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import AttemptPlan, Setting
from pytest_megatron.workloads.training.run.runner import LiveLog

_START_S = 60.0
_END_S = 60.0
_PACKET_BYTES = 1 << 20


class DriverGoneError(Exception):
    """The child process ended without being asked."""


class DriverLink:
    """The child process that talks to Docker.

    It ends, and takes its container with it, when our end of the socket closes, for whatever
    reason.

    Attributes:
        ready: First answer of the process, once it had reached the daemon.
    """

    ready: DriverReady

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        """Start the process that runs containers.

        Args:
            directory: For its log, and for what nemo-run keeps.
            env: The controller's; may name the daemon.

        Raises:
            LaunchError: nemo-run is not installed, or the daemon cannot be reached.
        """
        for package in ("docker", "nemo_run"):
            if importlib.util.find_spec(package) is None:
                raise LaunchError(
                    "--executor docker",
                    f"needs the package {package}, which is not installed; "
                    f"pip install 'pytest-megatron[cluster]'",
                )
        directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / f"driver-{os.getpid()}.log"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        module = "pytest_megatron.engines.docker.driver"
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                # -P: the project may well have a directory `docker` of its own.
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                env={**env, "NEMORUN_HOME": str(directory / "nemo")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the controller, which decides
            )
        try:
            answer = self.receive(_START_S)
        except DriverGoneError as error:
            raise LaunchError(str(self._log), f"{error}; see there") from error
        if not isinstance(answer, DriverReady):
            self.close()
            if isinstance(answer, StartRefused):
                raise LaunchError(answer.where, answer.text)
            raise LaunchError("--executor docker", f"the daemon says nothing for {_START_S:g} s")
        self.ready = answer

    def send(self, request: Request, descriptors: Sequence[int] = ()) -> None:
        """Send a request, with descriptors that are to stay open while its container lives.

        Raises:
            DriverGoneError: The child process ended.
        """
        try:
            socket.send_fds(self._socket, [REQUEST.dump_json(request)], list(descriptors))
        except OSError as error:
            raise self._gone() from error

    def receive(self, timeout_s: float) -> Answer | None:
        """Return the next answer, or None where none comes in time.

        Raises:
            DriverGoneError: The child process ended.
        """
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        try:
            packet = self._socket.recv(_PACKET_BYTES)
        except ConnectionResetError:
            packet = b""
        if not packet:
            raise self._gone()
        return ANSWER.validate_json(packet)

    def close(self) -> None:
        """End the child process, and with it the container that it has."""
        self._socket.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            if not self._log.stat().st_size:
                self._log.unlink()

    def _gone(self) -> DriverGoneError:
        """Return how the child process ended."""
        self._socket.close()
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return DriverGoneError(f"the process that runs containers ended by itself ({how})")


_OUTCOME = "outcome.json"
_POLL_S = 0.1
_SLACK_S = 600.0  # for the container to start and end, beside what the training may take
_NUM_LOG_LINES = 5
_KILLED = 137  # 128 and SIGKILL, as Docker has it
_LONGEST_LINE = 500


@dataclass(frozen=True, kw_only=True)
class _Began:
    """The file with which a worker says that it began, as far as it is read here."""

    version: str | None = None


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
        self._link: DriverLink | None = None

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        """Return the setting for plans: a container has nothing of this process's environment."""
        env = self._config.env
        return replace(setting, python=self._config.python, env=env, has_ft_launcher=True)

    @override
    def submit(self, submissions: Sequence[Submission]) -> None:
        """Keep submissions until `poll`; see that there is a daemon.

        Raises:
            LaunchError: nemo-run is not installed, or the daemon cannot be reached.
        """
        self._driver()
        super().submit(submissions)

    def close(self) -> None:
        """End the child process, and every container that it may have."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        shutil.rmtree(self._directory / "nemo", ignore_errors=True)
        with contextlib.suppress(OSError):  # a log that is worth reading, or another session's
            self._directory.rmdir()
            self._context.engine_dir.rmdir()

    def _driver(self) -> DriverLink:
        """Return the process that starts containers, which is started once."""
        if self._link is None:
            self._link = DriverLink(self._directory, self._context.env)
        return self._link

    def _contain(self, submission: Submission, planned: Planned, lease: Lease) -> SubmissionOutcome:
        """Run a container for a plan, in a directory that is gone afterwards."""
        self._directory.mkdir(parents=True, exist_ok=True)
        job_dir = Path(tempfile.mkdtemp(prefix="job-", dir=self._directory))
        try:
            self._write_job(job_dir, submission, planned)
            request = self._request(submission, planned.plan, job_dir, lease)
            live = LiveLog(planned.plan, submission.listener)
            try:
                gone = self._follow(request, lease, submission, live)
            except DriverGoneError as error:
                return SubmissionOutcome(trouble=self._lost(error))
            return self._outcome(gone, job_dir, planned)
        finally:
            shutil.rmtree(job_dir, ignore_errors=True)

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
        module = "pytest_megatron.engines.docker.inside"
        start = f"exec {shlex.quote(self._config.python)} -m {module} {JOB_DIR}\n"
        try:
            write_spec(job_dir / "spec.json", spec)
            (job_dir / "start").write_text(start, encoding="utf-8")
            (job_dir / "code").mkdir()  # nemo-run's working directory; Docker would make it as root
            self._give_to_user(job_dir, submission)
        except OSError as error:
            raise LaunchError(
                str(error.filename or job_dir), f"{error.strerror}; nothing was run"
            ) from error

    def _give_to_user(self, job_dir: Path, submission: Submission) -> None:
        """Let a user of the container who is not this one read the job and write the attempt.

        Only root can, and need not take it back afterwards: it may read everything.

        Raises:
            OSError: It cannot be given.
        """
        uid, _, gid = (self._config.user or "").partition(":")
        if os.getuid() != 0 or not uid.isdecimal() or uid == "0":
            return
        item = submission.dirs.root.parents[1]
        item.mkdir(parents=True, exist_ok=True)
        for path in (item, *item.rglob("*"), job_dir, *job_dir.rglob("*")):
            os.chown(path, int(uid), int(gid) if gid.isdecimal() else -1, follow_symlinks=False)

    def _request(
        self, submission: Submission, plan: AttemptPlan, job_dir: Path, lease: Lease
    ) -> RunContainer:
        """Return the request to run one attempt in a container."""
        config = self._config
        self._num_run += 1
        uid, gid = os.getuid(), os.getgid()
        return RunContainer(
            key=submission.key,
            run_dir=str(self._context.run_dir),
            name=f"pytest-megatron-{self._token}-{self._num_run}",
            settings=config,
            job_dir=str(job_dir),
            mounts=self._mounts(plan),
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
        read = (*(path for phase in plan.phases for path in phase.frozen_paths), plan.start_from)
        for path in (*writable, *(path for path in read if path is not None)):
            if not any(_shows(mount, path) for mount in mounts):
                is_own = path in writable
                mounts.append(Mount(source=str(path), target=str(path), is_read_only=not is_own))
        return tuple(mounts)

    def _follow(
        self, request: RunContainer, lease: Lease, submission: Submission, live: LiveLog
    ) -> Gone:
        """Run a container to its end; on any other way out it is gone as well.

        Raises:
            DriverGoneError: The child process was killed.
            LaunchError: The container cannot be started.
        """
        link = self._driver()
        link.send(request, lease.descriptors)
        try:
            return self._until_gone(link, submission, live)
        except (DriverGoneError, LaunchError):
            raise
        except BaseException:  # Ctrl-C; the second one comes through the wait below
            link.send(StopContainer())
            try:
                _until(link, Gone, StartRefused)
            except KeyboardInterrupt:
                link.send(StopContainer(is_at_once=True))
                _until(link, Gone, StartRefused)
            raise

    def _until_gone(self, link: DriverLink, submission: Submission, live: LiveLog) -> Gone:
        """Follow a container's logs until it is gone."""
        limit_s = _limit_s(live.plan)
        stop_at = time.monotonic() + limit_s
        while True:
            match link.receive(_POLL_S):
                case Gone() as gone:
                    live.poll(is_ended=True)
                    return gone
                case StartRefused() as refused:
                    raise LaunchError(refused.where, refused.text)
                case ContainerWaiting() as waiting:
                    submission.listener.on_lines([waiting.text])
                    stop_at = time.monotonic() + limit_s
                case ContainerStarted():
                    stop_at = time.monotonic() + limit_s
                case _:
                    live.poll()
            if time.monotonic() >= stop_at:
                link.send(StopContainer())
                stop_at = float("inf")

    def _lost(self, error: DriverGoneError) -> EngineError:
        """Return the outcome of an attempt whose child process on the host was killed."""
        self._link = None
        # The container ends by itself. Another child process removes it, should it not.
        self._driver()
        text = f"{error}; its container was removed"
        return EngineError(kind=TroubleKind.LOST, text=text)

    def _outcome(self, gone: Gone, job_dir: Path, planned: Planned) -> SubmissionOutcome:
        """Return the outcome of a container.

        Raises:
            LaunchError: The image is no good, so that nothing was run.
        """
        began = job_dir / "began.json"
        if not began.exists():
            raise LaunchError(f"docker image {self._config.image!r}", self._no_start(gone, job_dir))
        record = read_record(job_dir / _OUTCOME)
        if record is None:
            trouble = _trouble(gone) or self._other_version(began)
            return SubmissionOutcome(trouble=trouble)
        outcome = outcome_of(record, planned, self._context.facts)
        if gone.was_oom and not all(end.is_clean for end in outcome.ends):
            return replace(outcome, trouble=_trouble(gone))
        return outcome

    def _no_start(self, gone: Gone, job_dir: Path) -> str:
        """Return why nothing of ours ever ran in a container."""
        logs = sorted(job_dir.glob("log_*.out"))
        lines = logs[0].read_text(errors="replace").splitlines() if logs else []
        said = " / ".join(line.strip()[:_LONGEST_LINE] for line in lines[-_NUM_LOG_LINES:] if line)
        python = self._config.python
        module = "pytest_megatron"
        if "No module named" in said and module in said:
            what = f"its {python} has no pytest-megatron; install it there, or set `python`"
        elif "No such file or directory" in said or "command not found" in said:
            what = f"has no {python}; set `python` to the interpreter that has pytest-megatron"
        elif not lines and gone.entrypoint:
            what = f"its ENTRYPOINT {' '.join(gone.entrypoint)} does not run the command after it"
        else:
            what = f"ended before pytest-megatron began, exit code {gone.exit_code}"
        return f"{what} (it printed: {said or 'nothing'})"

    def _other_version(self, began: Path) -> EngineError:
        """Return why a container that began left no record and was not killed."""
        there = (read_if_whole(began, _Began) or _Began()).version
        ours = self._context.facts.versions.get("pytest-megatron")
        text = "the container ended and left no record"
        if there not in (None, ours):
            text += f"; it has pytest-megatron {there}, this is {ours}"
        return EngineError(kind=TroubleKind.LOST, text=text)


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
    elif gone.signal is not None:
        kind, what = TroubleKind.CANCELLED, f"somebody sent it signal {gone.signal}"
    elif gone.exit_code == _KILLED:
        kind, what = TroubleKind.LOST, "it was killed"
    else:
        return None
    return EngineError(kind=kind, text=f"Docker says of the container: {what}")


def _until(link: DriverLink, *kinds: type[Gone | StartRefused]) -> None:
    """Wait for one of these answers, but not for ever."""
    give_up_at = time.monotonic() + _END_S
    with contextlib.suppress(DriverGoneError):
        while time.monotonic() < give_up_at:
            if isinstance(link.receive(1.0), kinds):
                return


def _limit_s(plan: AttemptPlan) -> float:
    """Return how long a container may be there: longer than the worker in it lets things run."""
    num_limits = 1 if plan.target is None else len(plan.phases)
    return plan.time_limit_s * num_limits + _SLACK_S


def _user_name() -> str:
    """Return a name for the user, whom the container knows by number only."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid{os.getuid()}"
