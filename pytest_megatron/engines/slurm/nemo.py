"""Has nemo-run write the scripts of jobs, in a process of its own.

Started as `python -m pytest_megatron.engines.slurm.nemo REQUEST ANSWER`, both JSON files. Nothing
is submitted. nemo-run takes seconds to import, replaces the handlers of the root logger, writes to
stdout and dies of warnings that are errors: none of that may happen to a controller.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pydantic import TypeAdapter

from pytest_megatron.base.files import JsonValue, write_json_atomically
from pytest_megatron.engines.slurm.shape import STEP_FLAGS, Shape

if TYPE_CHECKING:
    from nemo_run.core.execution.slurm import SlurmExecutor

MISSING, BROKEN = "missing", "broken"
NEMO = "nemo-run"
# nemo-run puts a directory of its own in place of this in scripts without a container.
_NEMO_DIR, _KEPT = "/nemo_run", "/pytest_megatron_kept_nemo_dir"
# Where nemo-run believes that it packs the code; nothing of it is in the finished script.
_EXPERIMENT, _JOB = "/pytest_megatron_nowhere", "job"
# A step of its own for an address that nobody asks for; the tasks would wait until it is over.
_HEAD_NODE_IP = """\
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
"""
_NEMO_STEP_FLAGS = "--wait=60 --kill-on-bad-exit=1"
_SHAPES = TypeAdapter(list[Shape])
_Answer: TypeAlias = "dict[str, JsonValue]"
# Arguments of SlurmExecutor; every other flag goes into `additional_parameters`.
_ARGUMENTS = (
    *("account", "constraint", "exclude", "gres", "mem", "partition", "qos", "time"),
    *("cpus_per_task", "gpus_per_node", "nodes", "ntasks_per_node", "segment"),
)
_NUMBERS = _ARGUMENTS[-5:]


def main(arguments: list[str]) -> int:
    """Answer a request; the exit code is 0 whenever there is an answer."""
    request, answer = map(Path, arguments)
    shapes = _SHAPES.validate_json(request.read_bytes())
    os.environ["NEMORUN_HOME"] = str(request.parent)  # read at import
    write_json_atomically(answer, _answer(shapes))
    return 0


def _answer(shapes: list[Shape]) -> _Answer:
    try:
        import nemo_run  # noqa: F401, PLC0415 - after NEMORUN_HOME
    except ModuleNotFoundError as error:
        return {"trouble": MISSING, "module": error.name, "text": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever its dependencies raise
        return {"trouble": BROKEN, "text": f"import nemo_run: {type(error).__name__}: {error}"}
    try:
        return {"scripts": [materialize(shape) for shape in shapes]}
    except Exception as error:  # noqa: BLE001 - another release may lack what is used here
        return {"trouble": BROKEN, "text": f"{type(error).__name__}: {error}"}


def materialize(shape: Shape) -> str:
    """Return the script of a shape.

    Raises:
        ValueError: nemo-run's text lacks what is known of it.
    """
    from nemo_run.core.execution.slurm import SlurmBatchRequest  # noqa: PLC0415 - see above

    executor = _executor(shape)
    executor.tunnel.job_dir, executor.job_dir = _EXPERIMENT, _JOB
    request = SlurmBatchRequest(
        launch_cmd=["sbatch", "--parsable"],
        jobs=[shape.name],
        command_groups=[[_kept(shape.command)]],
        executor=executor,
        max_retries=0,
        extra_env={},
    )
    text: str = request.materialize()
    for old, new in _mended(shape).items():
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is {text.count(old)} times in its script, expected once")
        text = text.replace(old, new)
    text = text.replace(_HEAD_NODE_IP, "").replace(_KEPT, _NEMO_DIR)
    for part in (*shape.setup, shape.command):
        if part not in text:
            raise ValueError(f"its script lacks the line {part!r}")
    return text if text.endswith("\n") else f"{text}\n"


def _mended(shape: Shape) -> dict[str, str]:
    """Return what nemo-run writes and what belongs there.

    pyxis refuses a second `--container-workdir`, so that flags after nemo-run's cannot do it.
    Source: NVIDIA/pyxis args.c, spank_option_workdir().
    """
    steps = {_NEMO_STEP_FLAGS: shlex.join(STEP_FLAGS)}
    job_dir, workdir = f"{_EXPERIMENT}/{_JOB}", _kept(shape.workdir)
    if shape.container is None:
        return {f"--chdir {job_dir}/code": shlex.join(["--chdir", workdir]), **steps}
    return {
        f",{job_dir}:{_NEMO_DIR} ": " ",
        f"--container-workdir {_NEMO_DIR}/code": shlex.join(["--container-workdir", workdir]),
        **steps,
    }


def _executor(shape: Shape) -> SlurmExecutor:
    """Return what nemo-run knows of a job."""
    import nemo_run as run  # noqa: PLC0415 - see above
    from nemo_run.core.execution.slurm import SlurmJobDetails  # noqa: PLC0415

    class JobDetails(SlurmJobDetails):  # type: ignore[misc] # nemo-run has no types
        """The output of the tasks goes where the job's goes."""

        srun_stdout = property(lambda _self: Path("all"))

    flags = {name.replace("-", "_"): _kept(value) for name, value in shape.flags.items()}
    known = {name: flags.pop(name) for name in _ARGUMENTS if name in flags}
    return run.SlurmExecutor(
        **_typed(known),
        account=known.get("account"),
        job_name_prefix="megatron-",
        packager=run.Packager(),
        tunnel=run.LocalTunnel(job_dir=""),
        launcher=None,
        retries=0,
        poll_estimated_start_time=False,
        job_details=JobDetails(job_name=shape.name),
        additional_parameters={name: value or True for name, value in flags.items()},
        # nemo-run means to quote what follows, and does not.
        container_image=None if shape.container is None else _quoted(shape.container),
        container_mounts=[_quoted(mount) for mount in shape.mounts],
        container_env=list(shape.container_env) or None,
        srun_args=[_quoted(word) for word in shape.step_flags],
        setup_lines=_kept("\n".join(shape.setup)),
    )


def _typed(known: Mapping[str, str]) -> dict[str, str | int]:
    """Return the arguments of SlurmExecutor; `account` is passed in any case."""
    return {
        name: int(value) if name in _NUMBERS else value
        for name, value in known.items()
        if name != "account"
    }


def _quoted(word: str) -> str:
    return shlex.quote(_kept(word))


def _kept(text: str) -> str:
    """Return a text that nemo-run leaves as it is."""
    return text.replace(_NEMO_DIR, _KEPT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
