"""Plans of attempts: commands, environment and directories of each phase. Pure.

A plan is data: `--plan` prints it, `plan.json` keeps it, an engine runs it. Planning the same
attempt twice gives the same plan. In order: the rule for CUDA_DEVICE_MAX_CONNECTIONS, the command
that starts ranks, the plan, what bash runs a script in, and what `pytest-megatron repro` changes.

Source: Megatron-LM megatron/training/arguments.py, validate_args(), and
tests/functional_tests/shell_test_utils/_run_training.sh, d98e8a64dd; torch.distributed.run;
nvidia_resiliency_ext.fault_tolerance.launcher, a fork of it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal, TypeAlias

from pytest_megatron.base.text import counted, one_of
from pytest_megatron.errors import CaseError, LaunchError, RecipeError, TraceError
from pytest_megatron.features import ExtensionPoint
from pytest_megatron.gpu.host import CPU_PLATFORM, gpu_model_of
from pytest_megatron.process.host_name import LOOPBACK
from pytest_megatron.runs.headline import PHASE, RANKS, REPEAT
from pytest_megatron.runs.layout import FLIGHT_PREFIX, AttemptDirs, PhaseDirs
from pytest_megatron.workloads.recipe.case import (
    CP,
    TP,
    CaseMode,
    ExitPolicy,
    Launcher,
    ModelArgs,
    TestType,
    WorkloadCase,
)
from pytest_megatron.workloads.recipe.driver_script import CODE
from pytest_megatron.workloads.recipe.megatron_row import container_paths, with_paths
from pytest_megatron.workloads.recipe.metrics import MetricSource
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.phases import (
    DEFAULT_TIME_LIMIT_S,
    Origin,
    PhaseStart,
    command_words,
    find_untraceable,
    references,
    require_iteration,
    require_path,
    require_program,
    starts_of,
    substitute,
    with_words,
)

TraceValues: TypeAlias = Literal["hash", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTools:
    """What records traces of tensors.

    Attributes:
        record: Arguments of Python that run the program behind them with a trace.
        variables: Returns the variables of ranks for a directory, steps, values, and the
            environment of the session.
    """

    record: tuple[str, ...]
    variables: Callable[[Path, int, TraceValues, Mapping[str, str]], dict[str, str]]


_TRACE_TOOLS: ExtensionPoint[TraceTools] = ExtensionPoint("trace_tools")


def trace_tools() -> TraceTools:
    """Return what records traces.

    Raises:
        TraceError: Nothing does.
    """
    found = _TRACE_TOOLS.first()
    if found is None:
        raise TraceError(
            "tensor traces",
            "cannot be recorded, since pytest_megatron.trace is not there; install it, or run "
            "without --tensor-trace",
        )
    return found


CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_CONNECTIONS = 32
FIRST_WITHOUT_RULE = 10  # Blackwell
FSDP = ("--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2")
EXPERT_OVERLAP = "--overlap-moe-expert-parallel-comm"


class Connections(Enum):
    """Value of CUDA_DEVICE_MAX_CONNECTIONS that a training needs.

    With one connection kernels start in the order in which they were launched, so that a
    collective of tensor or context parallelism starts before the kernel that it overlaps with.
    Blackwell keeps this order anyway; FSDP needs several streams side by side instead, and so does
    the overlap of expert parallelism, for which Megatron leaves the value open.
    """

    ANY = "any"  # Megatron does not ask for it
    ONE = "one"  # Megatron refuses to start with anything else
    NOT_ONE = "not-one"  # Megatron refuses to start with 1


def connections_of(model_args: ModelArgs, platform: str) -> Connections:
    """Return what a training on a platform needs; ANY where the GPUs are not known."""
    if model_args.is_on(*FSDP):
        return Connections.NOT_ONE
    model = gpu_model_of(platform)
    if model is None or model.architecture >= FIRST_WITHOUT_RULE:
        return Connections.ANY
    if model_args.is_on(EXPERT_OVERLAP):
        return Connections.ANY
    is_split = any((model_args.size(name) or 1) > 1 for name in (TP, CP))
    return Connections.ONE if is_split else Connections.ANY


def planned_connections(
    model_args: ModelArgs, platform: str, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the variable as a plan sets it where neither the user nor the case has.

    Args:
        model_args: Arguments of the start.
        platform: Platform of the row.
        env: What the user has set.
    """
    is_one = connections_of(model_args, platform) is Connections.ONE
    return {CONNECTIONS_VARIABLE: "1"} if is_one and CONNECTIONS_VARIABLE not in env else {}


FT_PACKAGE = "nvidia_resiliency_ext"
# For a machine without nvidia-resiliency-ext: nearly all of Megatron-LM's cases ask for it.
LAUNCHER_VARIABLE = "PYTEST_MEGATRON_LAUNCHER"
NODE_AGENTS = Path(__file__).parents[1] / "run" / "node_agents.py"
ALONE = "pytest_megatron.workloads.training.run.alone"  # also where the package lies elsewhere
_NO_PYTHON, _MODULE = "--no-python", "-m"

_MODULES = {
    Launcher.TORCHRUN: "torch.distributed.run",
    Launcher.FT_LAUNCHER: f"{FT_PACKAGE}.fault_tolerance.launcher",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Command that starts ranks.

    Attributes:
        starter: What starts the ranks of a node.
        num_nodes: On this machine, unless an engine has several: each with an agent of its own.
        per_node: Ranks of a node.
        tee_ranks: Ranks over all nodes whose output is copied live; None is all of them.
        logs: Directory of their logs.
    """

    starter: Launcher
    num_nodes: int
    per_node: int
    tee_ranks: tuple[int, ...] | None
    logs: Path

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.num_nodes * self.per_node

    @property
    def is_alone(self) -> bool:
        """True if the job has one node, so that a launcher needs no other to meet."""
        return self.num_nodes == 1

    @property
    def copied(self) -> str:
        """The ranks whose output is copied live, as `node_agents.py` takes them."""
        return "all" if self.tee_ranks is None else ",".join(map(str, self.tee_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A program and its ranks, for engines that start them in another way than `start_words`.

    Attributes:
        python: Interpreter of launcher and program.
        program: The program and its arguments, as torch.distributed.run takes them.
        tracer: Arguments before them that record a trace.
    """

    python: str
    ranks: Ranks
    program: tuple[str, ...]
    tracer: tuple[str, ...] = ()

    @property
    def script(self) -> str | None:
        """The Python script that the ranks run; None of a command and of a module."""
        return None if self.program[0] in (_NO_PYTHON, _MODULE) else self.program[0]

    @property
    def rank_words(self) -> tuple[str, ...]:
        """Command of one rank, as torch.distributed.run would start it."""
        if self.program[0] == _NO_PYTHON:
            return self.program[1:]
        return (self.python, "-u", *self.tracer, *self.program)

    @property
    def launcher_words(self) -> tuple[str, ...]:
        """Command that starts the ranks of a node; `node_agents.node_command` completes it."""
        ranks = self.ranks
        if ranks.starter is Launcher.NONE:
            is_copied = ranks.tee_ranks is None or 0 in ranks.tee_ranks
            head = (self.python, "-P", "-m", ALONE, str(ranks.logs), str(int(is_copied)))
            return (*head, *self.rank_words)
        own = (
            *("--max-restarts", "0", "--nproc-per-node", str(ranks.per_node)),
            *("--log-dir", str(_log_dir(ranks)), "--redirects", "3"),
        )
        launcher = (self.python, "-m", _MODULES[ranks.starter])
        program = (*self.tracer, *self.program)
        if ranks.is_alone:
            alone = ("--standalone", "--local-addr", LOOPBACK)
            return (*launcher, *alone, *own, *_tee_words(ranks), *program)
        return (*launcher, "--nnodes", str(ranks.num_nodes), *own, *program)


def starter_of(case: WorkloadCase, asked: str | None, *, has_ft_launcher: bool) -> Launcher:
    """Return what starts the ranks of a case.

    Args:
        case: The test case, whose LAUNCHER decides.
        asked: The value of `PYTEST_MEGATRON_LAUNCHER`, which wins; None without it.
        has_ft_launcher: Whether nvidia-resiliency-ext is installed.

    Raises:
        CaseError: `ft_launcher` is asked for and not installed, or the variable has another word.
    """
    if case.starter is Launcher.NONE:
        return case.starter
    words = [starter.value for starter in Launcher if starter is not Launcher.NONE]
    if asked and asked not in words:
        raise CaseError(LAUNCHER_VARIABLE, f"is {asked!r}, expected {one_of(asked, words)}")
    starter = Launcher(asked) if asked else case.starter
    if starter is Launcher.FT_LAUNCHER and not has_ft_launcher:
        raise CaseError(
            str(case.path),
            f"LAUNCHER is 'ft_launcher' and {FT_PACKAGE} is not installed, nothing was run; "
            f"`pip install nvidia-resiliency-ext`, or set {LAUNCHER_VARIABLE}=torchrun to start "
            f"the same ranks with torch.distributed.run",
        )
    return starter


def started(
    python: str, ranks: Ranks, program: str, words: Sequence[str], tracer: tuple[str, ...] = ()
) -> Started:
    """Return what is started.

    Args:
        python: Interpreter of launcher and program.
        ranks: How many, and where they log.
        program: `train.py`, or `-m` and a module; or, where it does not end in `.py`, a command
            such as `nemo llm pretrain`, which is started as it is.
        words: The program's arguments.
        tracer: See `Started`.
    """
    command = shlex.split(program)
    is_python = command[0].endswith(".py") or command[0] == _MODULE
    whole = (*(() if is_python else (_NO_PYTHON,)), *command, *words)
    return Started(python=python, ranks=ranks, program=whole, tracer=tracer)


def start_words(started: Started) -> tuple[str, ...]:
    """Return the command that starts all ranks here; none of them is ever started again.

    A rank that dies ends the run at once, whichever the launcher: a restart would hide it. Several
    nodes are as many launchers on this machine, under `node_agents.py`.
    """
    ranks = started.ranks
    if ranks.is_alone:
        return started.launcher_words
    sizes = (str(ranks.num_nodes), str(ranks.per_node), ranks.copied)
    return (started.python, "-I", str(NODE_AGENTS), *sizes, *started.launcher_words)


def _log_dir(ranks: Ranks) -> Path:
    """Return the directory for the launcher's logs; of several nodes, `node_agents.py` fills in."""
    return ranks.logs if ranks.is_alone else ranks.logs / "node{node}"


def _tee_words(ranks: Ranks) -> list[str]:
    """Return the launcher's words for ranks that are copied to the terminal."""
    size = ranks.per_node
    chosen = range(size) if ranks.tee_ranks is None else [r for r in ranks.tee_ranks if r < size]
    words = ",".join(f"{rank}:3" for rank in chosen)
    return ["--tee", words] if words else []


# What Megatron-LM's driver exports where the user has not.
# Source: Megatron-LM tests/functional_tests/shell_test_utils/_run_training.sh, d98e8a64dd.
NCCL_DEFAULTS: Mapping[str, str] = {
    "NCCL_ALGO": "Ring",
    "NCCL_BUFFSIZE": "4194304",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_PROTO": "simple",
    "NCCL_TUNER_PLUGIN": "",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
}
# Where torch's flight recorder dumps to. Releases from 2.10 on have new names beside these.
# Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp and FlightRecorder.hpp, v2.6 and v2.13.
FLIGHT_VARIABLE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_FLIGHT_DEFAULTS: Mapping[str, str] = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    # Megatron-LM sets it to 1 where it finds FLIGHT_VARIABLE. A rank that ends without
    # `destroy_process_group` is then taken for one that failed: at exit its default group joins the
    # monitor's thread, which dumps, sleeps TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (8 minutes), aborts.
    # Source: ProcessGroupNCCL.cpp, dumpExtraDebuggingInfo(); seen with torch 2.11 on an H200.
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
}
# What a launcher around the controller may have left, and would lead the ranks astray.
_FOREIGN_PREFIXES = ("PYTEST_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_FOREIGN_NAMES = frozenset(
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
)


_LOSS = "lm loss"  # what a case without METRICS compares first
ONLY_PHASE = "phase 1"  # maybe the first of several


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """One start of a training program.

    Attributes:
        number: Counted from 1.
        name: Name in messages: `phase 2`, `MODEL_ARGS_4`.
        argv: Program and arguments; no shell comes between.
        env: The whole environment.
        own_env: The part of it that comes from us or from the case, for people to read.
        dirs: Where it writes.
        origin: What to lay out before the start for it to resume from, or None.
        last_iteration: The one after which it exits; None where that is unknown.
        world_size: Ranks over all nodes.
        num_nodes: Number of nodes; each has as many ranks.
        saves: Directory in which it must leave a checkpoint of its last iteration, or None.
        frozen_paths: What it reads below the recipe's `checkpoint_load_path`, and so must exist.
        before_script: Shell text to run before the training, or None; likewise `after_script`.
        is_script: Whether a recipe's script runs instead of a launcher.
        start: What `argv` starts, for an engine that starts ranks in another way; None of a script.
        role: Why it is started.
        exit_policy: The outcome if it has done its work and does not exit.
        source: Where what it measures is; None of a program that measures nothing by steps.
    """

    number: int
    name: str = ONLY_PHASE
    argv: tuple[str, ...]
    env: Mapping[str, str]
    own_env: Mapping[str, str]
    dirs: PhaseDirs
    origin: Origin | None = None
    last_iteration: int | None
    world_size: int = 1
    num_nodes: int = 1
    saves: Path | None = None
    frozen_paths: tuple[Path, ...] = ()
    before_script: str | None = None
    after_script: str | None = None
    is_script: bool = False
    start: Started | None = None
    exit_policy: ExitPolicy = ExitPolicy.FAIL
    source: MetricSource | None = None

    @property
    def resumes_after(self) -> int | None:
        """The iteration of the checkpoint that it must go on from; None where we do not know."""
        return None if self.origin is None else self.origin.back_to


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """Everything of one attempt.

    Attributes:
        phases: In order.
        cwd: Working directory of every phase: the project's root.
        world_size: The most ranks that a phase has.
        time_limit_s: For all phases together.
        script: Text to be put into the file that the only phase runs, or None.
    """

    phases: tuple[PhasePlan, ...]
    dirs: AttemptDirs
    cwd: Path
    world_size: int
    time_limit_s: float
    script: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of the user and the machine for all plans of a run.

    Attributes:
        root: The project: cases, programs and goldens are found from here.
        env: The controller's environment.
        tee_ranks: Ranks whose output is copied live; None is all of them.
        is_lightweight: Only `LIGHTWEIGHT_ITERS` iterations and no comparison.
        devices: UUIDs of the leased GPUs; None leaves those that the controller sees.
        has_ft_launcher: Whether nvidia-resiliency-ext is installed.
        secret_names: Patterns of names that hold secrets, beside the usual ones.
        kept_variables: Patterns of names of variables that `plan.json` keeps, likewise.
        trace: What to record of each training's tensors, where that is possible; None is nothing.
    """

    root: Path
    env: Mapping[str, str]
    tee_ranks: tuple[int, ...] | None = (0, 3)
    is_lightweight: bool
    devices: tuple[str, ...] | None = None
    python: str = sys.executable
    has_ft_launcher: bool = False
    secret_names: tuple[str, ...] = ()
    kept_variables: tuple[str, ...] = ()
    trace: TraceValues | None = None


def plan_attempt(
    workload: Workload,
    case: WorkloadCase | None,
    dirs: AttemptDirs,
    setting: Setting,
    *,
    repeat: int,
) -> AttemptPlan:
    """Plan one attempt of a workload.

    Args:
        workload: The row.
        case: The test case; may be None only where the row has a script.
        dirs: The attempt's own directories.
        setting: The run's.
        repeat: Counted from 1; the case may use it as a seed, `${REPEAT}`.

    Raises:
        CaseError: The case asks for a launcher that is not installed, or refers to something unset.
        RecipeError: The row names no program, or asks for nodes that are not to be had here.
    """
    if workload.script is not None:
        return _plan_script(workload, dirs, setting)
    assert case is not None
    setting = _with_script(workload, setting)
    is_light = setting.is_lightweight or case.is_always_lightweight
    starts = starts_of(workload, case, dirs, setting.root, is_lightweight=is_light)
    phases = tuple(_plan_phase(workload, case, dirs, setting, start, repeat) for start in starts)
    return AttemptPlan(
        phases=phases,
        dirs=dirs,
        cwd=_directory(workload, setting),
        world_size=max(phase.world_size for phase in phases),
        time_limit_s=_time_limit_s(workload),
    )


def _with_script(workload: Workload, setting: Setting) -> Setting:
    """Return a setting with the environment that a row's script makes for the driver."""
    if (found := workload.of_driver) is None:
        return setting
    env = {name: value for name, value in setting.env.items() if name not in found.unset}
    return replace(setting, env={**env, **found.env})


def _directory(workload: Workload, setting: Setting) -> Path:
    """Return where the program of a row starts."""
    found = workload.of_driver
    return setting.root if found is None else setting.root / found.directory


def require_inputs(plan: AttemptPlan) -> None:
    """Check that the program and every frozen checkpoint of a plan are there, before anything runs.

    Raises:
        LaunchError: One is missing, or would not be loaded.
    """
    if not plan.cwd.is_dir():
        raise LaunchError(
            str(plan.cwd), "there is no such directory, nothing was run; the row starts there"
        )
    for phase in plan.phases:
        script = None if phase.start is None else phase.start.script
        if script is not None and phase.before_script is None:
            require_program(plan.cwd, script)
        if phase.origin is not None and phase.origin.view is not None:
            require_iteration(phase.origin)
        for path in phase.frozen_paths:
            require_path(path, is_only_one=len(phase.frozen_paths) == 1)


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """Return what a training inherits from the controller's environment."""
    return {
        name: value
        for name, value in env.items()
        if name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN_PREFIXES)
    }


def _plan_phase(
    workload: Workload,
    case: WorkloadCase,
    dirs: AttemptDirs,
    setting: Setting,
    start: PhaseStart,
    repeat: int,
) -> PhasePlan:
    """Plan one start of the training program under its launcher."""
    program = workload.training_script_path
    if program is None:
        raise RecipeError(
            workload.where,
            "has neither `script` nor `training_script_path`, expected one of them; "
            "name the training program in the recipe's spec",
        )
    num_nodes, num_ranks = _shape_of(workload, case, start)
    phase = dirs.phase(start.number)
    variables = _variables(workload, dirs, phase, setting, start, repeat)
    own = {
        **({} if workload.of_driver is None else workload.of_driver.env),
        **{k: v for k, v in NCCL_DEFAULTS.items() if k not in setting.env},
        **_flight_recorder(workload, phase, setting, ModelArgs(start.arguments)),
        **planned_connections(ModelArgs(start.arguments), workload.platform, setting.env),
    }
    known = {**inherited(setting.env), **own, **variables}
    own |= {**_filled_in(case, start, known), **variables}
    own |= _devices(workload, setting)
    cwd = _directory(workload, setting)
    own["PYTHONPATH"] = _python_path(setting, own, cwd)
    tracer: tuple[str, ...] = ()
    if setting.trace is not None and find_untraceable(workload, case) is None:
        tools, steps = trace_tools(), workload.trace_steps
        own |= tools.variables(phase.trace, steps, setting.trace, setting.env)
        tracer = tools.record
    env = {**inherited(setting.env), **own}
    asked = setting.env.get(LAUNCHER_VARIABLE)
    ranks = Ranks(
        starter=starter_of(case, asked, has_ft_launcher=setting.has_ft_launcher),
        num_nodes=num_nodes,
        per_node=num_ranks,
        tee_ranks=setting.tee_ranks,
        logs=phase.logs,
    )
    command = shlex.split(program)
    if workload.own_case is not None:
        command = [substitute(word, env, where=workload.where) for word in command]
    words = command_words(start.arguments, env, file=str(case.path))
    whole = with_words([*command[1:], *words], start.words)
    launch = started(setting.python, ranks, shlex.quote(command[0]), whole, tracer)
    is_series = case.mode is not CaseMode.INFERENCE
    return PhasePlan(
        number=start.number,
        name=start.name,
        argv=start_words(launch),
        start=launch,
        env=env,
        own_env=own,
        dirs=phase,
        origin=start.origin,
        last_iteration=start.last_iteration,
        world_size=ranks.world_size,
        num_nodes=num_nodes,
        saves=start.saves,
        frozen_paths=_frozen_paths(case, start, env, cwd),
        before_script=case.before_script,
        after_script=case.after_script,
        exit_policy=case.exit_policy,
        source=_source_of(case, known) if is_series else None,
    )


def _shape_of(workload: Workload, case: WorkloadCase, start: PhaseStart) -> tuple[int, int]:
    """Return the nodes and the ranks on each: those of the start, of the case or of the row.

    Raises:
        RecipeError: There would be none.
        CaseError: It is more than the row has.
    """
    if workload.gpus < 1:
        raise RecipeError(
            workload.where,
            f"gpus is {workload.gpus}, expected at least 1: it is the number of ranks on a node, "
            f"on the platform cpu too",
        )
    own = start.variant.num_ranks
    if own is not None and own > workload.gpus:
        raise CaseError(
            str(case.path),
            f"MODEL_ENV_VARS.{start.variant.key}.GPUS_PER_NODE is {own}, and the row has gpus "
            f"{workload.gpus} ({workload.where}), expected no more than that; raise gpus",
        )
    return workload.nodes, workload.gpus if own is None else own


def _source_of(case: WorkloadCase, known: Mapping[str, str]) -> MetricSource:
    """Return where the metrics of a phase are, with its variables filled in.

    Raises:
        CaseError: The path refers to something unset.
    """
    source = case.source or MetricSource(names=case.metrics or (_LOSS,))
    if source.path is None:
        return source
    where = f"{case.path}: METRICS_FROM.path"
    return replace(source, path=substitute(source.path, known, where=where))


def _frozen_paths(
    case: WorkloadCase, start: PhaseStart, env: Mapping[str, str], root: Path
) -> tuple[Path, ...]:
    """Return what a frozen-start reads: the values that refer to CHECKPOINT_LOAD_PATH."""
    if case.test_type is not TestType.FROZEN_START:
        return ()
    name = "CHECKPOINT_LOAD_PATH"
    base = env[name]
    named = [a for a in start.arguments if name in " ".join(a.words or (a.text or "",))]
    words = command_words(named, env, file=str(case.path))
    values = [word if word.startswith(base) else word.partition("=")[2] for word in words]
    found = dict.fromkeys(value for value in values if value.startswith(base))
    return tuple(root / value for value in found or [base])


def _variables(
    workload: Workload,
    dirs: AttemptDirs,
    phase: PhaseDirs,
    setting: Setting,
    start: PhaseStart,
    repeat: int,
) -> dict[str, str]:
    """Return the variables that a `model_config.yaml` may refer to, and our own."""
    found = {
        "CHECKPOINT_LOAD_PATH": start.load,
        "CHECKPOINT_SAVE_PATH": str(start.save),
        "DATA_CACHE_PATH": workload.data_cache_path or str(dirs.data_cache),
        "INFERENCE_OUTPUT_PATH": str(phase.generated),
        "LOG_DIR": str(phase.logs),
        "OUTPUT_PATH": str(phase.root),
        "REPEAT": str(repeat),
        "RUN_NUMBER": str(start.number if start.saves is None else start.variant.number),
        "TENSORBOARD_PATH": str(phase.tensorboard),
        "PYTEST_MEGATRON_METRICS": str(phase.metrics_lines),
        "PYTHONFAULTHANDLER": "1",  # a crash or a hang leaves Python stacks in stderr.log
        "PYTHONUNBUFFERED": "1",
    }
    data_path = workload.data_path or setting.env.get("DATA_PATH")
    return found if data_path is None else {**found, "DATA_PATH": data_path}


def _filled_in(case: WorkloadCase, start: PhaseStart, known: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a case; they may refer to one another and to what is known.

    A variable that refers to its own name means the value that it has outside of the case.

    Raises:
        CaseError: One refers to something unset, or to itself by way of others.
    """
    own = {**case.env, **start.variant.env}
    needed = {
        name: (references(text) & own.keys()) - known.keys() - {name} for name, text in own.items()
    }
    filled: dict[str, str] = {}
    try:
        for name in TopologicalSorter(needed).static_order():
            line = case.env_lines.get(name)
            where = f"{case.path}{'' if line is None else f':{line}'}: ENV_VARS.{name}"
            filled[name] = substitute(own[name], {**filled, **known}, where=where)
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise CaseError(
            str(case.path), f"ENV_VARS: {circle} refer to one another, expected an end; change one"
        ) from None
    return {name: filled[name] for name in own}


def _python_path(setting: Setting, own: Mapping[str, str], cwd: Path) -> str:
    """Return where ranks look for modules: first where they start, as under the driver."""
    others = own.get("PYTHONPATH", setting.env.get("PYTHONPATH"))
    return os.pathsep.join((str(cwd), *([others] if others else [])))


def _flight_recorder(
    workload: Workload, phase: PhaseDirs, setting: Setting, model_args: ModelArgs
) -> dict[str, str]:
    """Return the variables that have a hang of NCCL leave dumps in the phase's own directory.

    They would win over the arguments of a case that names a directory itself.
    """
    if workload.platform == CPU_PLATFORM or "--flight-recorder-dump-path" in model_args:
        return {}
    wanted = {**_FLIGHT_DEFAULTS, FLIGHT_VARIABLE: str(phase.flight / FLIGHT_PREFIX)}
    return {k: v for k, v in wanted.items() if k not in setting.env}


def _devices(workload: Workload, setting: Setting) -> dict[str, str]:
    """Return the variable that limits the GPUs which a training sees; none of them on the CPU."""
    devices = () if workload.platform == CPU_PLATFORM else setting.devices
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


# A script of Megatron-LM is written for its container, and most delete the user's `.netrc`.
PRELUDE = Path(__file__).parents[1] / "run" / "prelude.sh"
# Where Megatron-LM's driver saves and loads, whatever the recipe says.
SHARED_CHECKPOINTS = Path("/tmp/checkpoints")  # noqa: S108 - of a script; in its text it is replaced


def redirected(script: str, root: Path, dirs: AttemptDirs, env: Mapping[str, str]) -> str:
    """Return a rendered script with the container's directories replaced by ours."""
    own = {CODE: str(root), str(SHARED_CHECKPOINTS): str(dirs.checkpoints)}
    return with_paths(script, {**container_paths(env), **own})


def script_env(
    env: Mapping[str, str], dirs: AttemptDirs, python: str, num_gpus: int
) -> dict[str, str]:
    """Return the variables that a script gets from us.

    Args:
        env: The controller's; what a cache is found by stays with it.
        dirs: The attempt's.
        python: The interpreter, whose environment `python` and `uv run` mean.
        num_gpus: Ranks on a node.
    """
    real, tools = Path(env.get("HOME", "/")), Path(python).parent
    return {
        "BASH_ENV": str(PRELUDE),
        "GPUS_PER_NODE": str(num_gpus),
        "HF_HOME": env.get("HF_HOME", str(real / ".cache" / "huggingface")),
        "HOME": str(dirs.home),
        "PATH": os.pathsep.join((str(tools), env.get("PATH", ""))),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "UV_PROJECT_ENVIRONMENT": env.get("UV_PROJECT_ENVIRONMENT", str(tools.parent)),
        "XDG_CACHE_HOME": env.get("XDG_CACHE_HOME", str(real / ".cache")),
    }


def _plan_script(workload: Workload, dirs: AttemptDirs, setting: Setting) -> AttemptPlan:
    """Plan a row that brings its own shell script."""
    phase = dirs.phase(1)
    own = script_env(setting.env, dirs, setting.python, workload.gpus)
    own |= _devices(workload, setting)
    if setting.is_lightweight:
        own["ENABLE_LIGHTWEIGHT_MODE"] = "true"
    assert workload.script is not None
    script = workload.render(
        workload.script,
        assets_dir=str(dirs.assets),
        artifacts_dir=str(dirs.artifacts),
        n_repeat=1,  # we repeat it ourselves, each time in directories of its own
        name=workload.name,
    )
    return AttemptPlan(
        phases=(
            PhasePlan(
                number=1,
                argv=("bash", str(phase.root / "script.sh")),
                env={**inherited(setting.env), **own},
                own_env=own,
                dirs=phase,
                last_iteration=None,
                is_script=True,
            ),
        ),
        dirs=dirs,
        cwd=setting.root,
        world_size=workload.nodes * workload.gpus,
        time_limit_s=_time_limit_s(workload),
        script=redirected(script, setting.root, dirs, setting.env),
    )


def _time_limit_s(workload: Workload) -> float:
    return workload.time_limit_s or DEFAULT_TIME_LIMIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Part of a workload that is run again.

    Attributes:
        repeat: The first repeat to run, counted from 1; the case may use it as a seed.
        phase: The only phase to run, counted from 1; None runs all.
        num_ranks: Ranks on one node, in place of the row's nodes and GPUs; None leaves those.
    """

    repeat: int = 1
    phase: int | None = None
    num_ranks: int | None = None

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Replay:
        """Read what is to be replayed from variables.

        Raises:
            LaunchError: A value is no number from 1 on.
        """
        return cls(
            repeat=_number(env, REPEAT) or 1,
            phase=_number(env, PHASE),
            num_ranks=_number(env, RANKS),
        )

    def resized(self, workload: Workload) -> Workload:
        """Return a row with the ranks that were asked for."""
        if self.num_ranks is None:
            return workload
        return replace(workload, nodes=1, gpus=self.num_ranks)

    def cut(self, plan: AttemptPlan, node_id: str) -> AttemptPlan:
        """Return a plan of the one phase that was asked for.

        Raises:
            LaunchError: The workload has no such phase.
        """
        if self.phase is None:
            return plan
        chosen = tuple(phase for phase in plan.phases if phase.number == self.phase)
        if not chosen:
            raise LaunchError(
                PHASE,
                f"is {self.phase}, and {node_id} has {counted(len(plan.phases), 'phase')}; "
                f"expected 1 to {len(plan.phases)}",
            )
        return replace(plan, phases=chosen)


def _number(env: Mapping[str, str], name: str) -> int | None:
    """Return a number that a variable gives, None if it is not set."""
    text = env.get(name)
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(name, f"is {text!r}, expected a number from 1 on; unset it")
    return int(text)
