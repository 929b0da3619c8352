"""What exactly would be started for a workload: every word, variable and directory. Pure.

A plan is data that `--plan` prints, `plan.json` keeps and a launcher carries out; planning the same
attempt twice gives the same plan.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_megatron.errors import CaseError, RecipeError
from pytest_megatron.host import CPU_PLATFORM
from pytest_megatron.launch.arguments import Argument, command_words, with_argument
from pytest_megatron.launch.case import (
    LIGHTWEIGHT_ITERS,
    LIGHTWEIGHT_NEMO_STEPS,
    LIGHTWEIGHT_SAVE_INTERVAL,
    Case,
    Evaluation,
    Mode,
    Starter,
    TestType,
)
from pytest_megatron.launch.layout import FLIGHT_PREFIX, AttemptDirs, PhaseDirs
from pytest_megatron.recipe.model import Workload

DEFAULT_TIME_LIMIT_S = 1800
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
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
}
# What a launcher around the controller may have left, and would lead the ranks astray.
_FOREIGN_PREFIXES = ("PYTEST_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_FOREIGN_NAMES = frozenset(
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """Makes a finished run look as if it had stopped half way: what a resume phase starts from.

    Attributes:
        checkpoints: Where the first phase saved.
        last: Iteration of its last checkpoint, which is removed.
        back_to: Iteration that the next phase resumes from.
    """

    checkpoints: Path
    last: int
    back_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """One start of a training program.

    Attributes:
        number: Counted from 1.
        argv: Program and arguments; no shell comes between.
        env: The whole environment.
        own_env: The part of it that comes from us or from the case, for people to read.
        dirs: Where it writes.
        rewind: What to do to the checkpoints before the start, or None.
        last_iteration: Where the training stops by itself; None where we do not know.
        is_script: Whether a recipe's script runs instead of a launcher.
    """

    number: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    own_env: Mapping[str, str]
    dirs: PhaseDirs
    rewind: Rewind | None = None
    last_iteration: int | None
    is_script: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """Everything of one attempt.

    Attributes:
        cwd: Working directory of every phase: the project's root.
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
    """What the user and the machine decide about every plan of a run.

    Attributes:
        root: The project: cases, programs and goldens are found from here.
        env: The controller's environment.
        tee_ranks: Ranks whose output is copied live; None is all of them.
        is_lightweight: Only `LIGHTWEIGHT_ITERS` iterations and no comparison.
        num_repeats: What a script is told about it.
        devices: GPUs by UUID that a training may see; None leaves what the controller sees.
    """

    root: Path
    env: Mapping[str, str]
    tee_ranks: tuple[int, ...] | None
    is_lightweight: bool
    num_repeats: int
    devices: tuple[str, ...] | None = None
    python: str = sys.executable


def plan_attempt(
    workload: Workload, case: Case | None, dirs: AttemptDirs, setting: Setting, *, repeat: int
) -> AttemptPlan:
    """Plan one attempt of a workload.

    Args:
        workload: The row.
        case: Its test case; may be None only where the row has a script.
        dirs: The attempt's own directories.
        setting: The run's.
        repeat: Counted from 1; the case may use it as a seed, `${REPEAT}`.

    Raises:
        CaseError: The case asks for what is not there yet, or refers to something unset.
        RecipeError: The row names no program, or asks for several nodes.
    """
    if workload.script is not None:
        return _plan_script(workload, dirs, setting)
    assert case is not None
    _refuse_what_is_to_come(workload, case)
    is_lightweight = setting.is_lightweight or case.is_always_lightweight
    train_iters = LIGHTWEIGHT_ITERS if is_lightweight else case.train_iters
    phases = [_plan_phase(workload, case, dirs, setting, repeat=repeat, number=1)]
    if case.test_type is TestType.CKPT_RESUME:
        second = _plan_phase(workload, case, dirs, setting, repeat=repeat, number=2)
        back = Rewind(checkpoints=dirs.checkpoints, last=train_iters, back_to=train_iters // 2)
        phases.append(replace(second, rewind=back))
    return AttemptPlan(
        phases=tuple(phases),
        dirs=dirs,
        cwd=setting.root,
        world_size=workload.nodes * workload.gpus,
        time_limit_s=_time_limit_s(workload),
    )


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """Return what a training inherits from the controller's environment."""
    return {
        name: value
        for name, value in env.items()
        if name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN_PREFIXES)
    }


def _refuse_what_is_to_come(workload: Workload, case: Case) -> None:
    """Say clearly that something is not there yet, instead of running something else."""
    wanted: list[tuple[str, bool]] = [
        (
            f"TEST_TYPE {case.test_type.value!r}",
            case.test_type not in (TestType.REGULAR, TestType.CKPT_RESUME),
        ),
        (f"MODE {case.mode.value!r}", case.mode is not Mode.PRETRAINING),
        ("TEST_EVALUATION 'xpass'", case.evaluation is not Evaluation.PASS),
        ("LAUNCHER 'ft_launcher'", case.starter is not Starter.TORCHRUN),
        ("BEFORE_SCRIPT", case.before_script is not None),
        ("AFTER_SCRIPT", case.after_script is not None),
    ]
    for what, is_asked in wanted:
        if is_asked:
            raise CaseError(str(case.path), f"{what} is not supported yet; nothing was run")
    if workload.nodes > 1:
        raise RecipeError(
            workload.where,
            f"nodes is {workload.nodes}, more than one is not supported yet; nothing was run",
        )


def _plan_phase(
    workload: Workload,
    case: Case,
    dirs: AttemptDirs,
    setting: Setting,
    *,
    repeat: int,
    number: int,
) -> PhasePlan:
    """Plan one start of the training program under `torch.distributed.run`."""
    program = workload.training_script_path
    if program is None:
        raise RecipeError(
            workload.where,
            "has neither `script` nor `training_script_path`, expected one of them; "
            "name the training program in the recipe's spec",
        )
    if workload.gpus < 1:
        raise RecipeError(
            workload.where,
            f"gpus is {workload.gpus}, expected at least 1: it is the number of ranks on a node, "
            f"on the platform cpu too",
        )
    phase = dirs.phase(number)
    own = {
        **{k: v for k, v in NCCL_DEFAULTS.items() if k not in setting.env},
        **_flight_recorder(workload, phase, setting),
        **case.env,
        **_variables(workload, dirs, phase, setting, repeat=repeat, is_resume=number > 1),
    }
    own |= _devices(workload, setting)
    env = {**inherited(setting.env), **own}
    arguments, last = _arguments(case, is_lightweight=setting.is_lightweight)
    argv = (
        *(setting.python, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"),
        *("--nproc-per-node", str(workload.gpus), "--log-dir", str(phase.logs), "--redirects", "3"),
        *_tee_words(setting.tee_ranks, workload.gpus),
        program,
        *command_words(arguments, env, file=str(case.path)),
    )
    return PhasePlan(
        number=number, argv=argv, env=env, own_env=own, dirs=phase, last_iteration=last
    )


def _arguments(case: Case, *, is_lightweight: bool) -> tuple[tuple[Argument, ...], int | None]:
    """Return the case's arguments with the iteration to stop at, and that iteration.

    Megatron-LM's driver writes both changes into the file; here the file stays as it is. A program
    that takes `key=value` only is told of no iteration unless it shall run a short time.
    """
    is_lightweight = is_lightweight or case.is_always_lightweight
    if case.arguments and not any(a.name.startswith("-") for a in case.arguments):
        steps = str(LIGHTWEIGHT_NEMO_STEPS)
        return (
            with_argument(case.arguments, "trainer.max_steps", steps)
            if is_lightweight
            else case.arguments
        ), None
    if not is_lightweight:
        last = case.train_iters
        return with_argument(case.arguments, "--exit-interval", str(last)), last
    arguments = with_argument(case.arguments, "--exit-interval", str(LIGHTWEIGHT_ITERS))
    if case.test_type is TestType.CKPT_RESUME:
        arguments = with_argument(arguments, "--save-interval", str(LIGHTWEIGHT_SAVE_INTERVAL))
    return arguments, LIGHTWEIGHT_ITERS


def _variables(
    workload: Workload,
    dirs: AttemptDirs,
    phase: PhaseDirs,
    setting: Setting,
    *,
    repeat: int,
    is_resume: bool,
) -> dict[str, str]:
    """Return the variables that a `model_config.yaml` may refer to, and our own."""
    load = workload.checkpoint_load_path or str(dirs.no_checkpoint)
    found = {
        "CHECKPOINT_LOAD_PATH": str(dirs.checkpoints) if is_resume else load,
        "CHECKPOINT_SAVE_PATH": str(dirs.checkpoints),
        "DATA_CACHE_PATH": workload.data_cache_path or str(dirs.data_cache),
        "LOG_DIR": str(phase.logs),
        "OUTPUT_PATH": str(phase.root),
        "REPEAT": str(repeat),
        "TENSORBOARD_PATH": str(phase.tensorboard),
        "PYTEST_MEGATRON_METRICS": str(phase.metrics_lines),
        "PYTHONFAULTHANDLER": "1",  # a crash or a hang leaves Python stacks in stderr.log
        "PYTHONUNBUFFERED": "1",
    }
    data_path = workload.data_path or setting.env.get("DATA_PATH")
    return found if data_path is None else {**found, "DATA_PATH": data_path}


def _flight_recorder(workload: Workload, phase: PhaseDirs, setting: Setting) -> dict[str, str]:
    """Return the variables that have a hang of NCCL leave dumps in the phase's own directory."""
    if workload.platform == CPU_PLATFORM:
        return {}
    wanted = {**_FLIGHT_DEFAULTS, FLIGHT_VARIABLE: str(phase.flight / FLIGHT_PREFIX)}
    return {k: v for k, v in wanted.items() if k not in setting.env}


def _devices(workload: Workload, setting: Setting) -> dict[str, str]:
    """Return the variable that says which GPUs a training sees."""
    if workload.platform == CPU_PLATFORM:
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {} if setting.devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(setting.devices)}


def _tee_words(ranks: tuple[int, ...] | None, world_size: int) -> list[str]:
    chosen = range(world_size) if ranks is None else [r for r in ranks if r < world_size]
    words = ",".join(f"{rank}:3" for rank in chosen)
    return ["--tee", words] if words else []


def _plan_script(workload: Workload, dirs: AttemptDirs, setting: Setting) -> AttemptPlan:
    """Plan a row that brings its own shell script."""
    phase = dirs.phase(1)
    own = _devices(workload, setting)
    if setting.is_lightweight:
        own["ENABLE_LIGHTWEIGHT_MODE"] = "true"
    assert workload.script is not None
    script = workload.render(
        workload.script,
        assets_dir=str(dirs.assets),
        artifacts_dir=str(dirs.artifacts),
        n_repeat=setting.num_repeats,
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
        script=script,
    )


def _time_limit_s(workload: Workload) -> float:
    return workload.time_limit_s or DEFAULT_TIME_LIMIT_S
