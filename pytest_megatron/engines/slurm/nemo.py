"""Has nemo-run write the scripts of jobs, in a process of its own.

Started as `python -m pytest_megatron.engines.slurm.nemo REQUEST ANSWER`, both JSON files. Nothing
is submitted. nemo-run takes seconds to import, replaces the handlers of the root logger, writes to
stdout and dies of warnings that are errors: none of that may happen to a controller.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_megatron.base.files import write_json_atomically
from pytest_megatron.base.schema import parse
from pytest_megatron.engines.slurm.shape import Shape
from pytest_megatron.process.tree import large_imports

if TYPE_CHECKING:
    from nemo_run.core.execution.slurm import SlurmExecutor

TEMPLATE = Path(__file__).with_name("job.sh.j2")
# Fields of SlurmExecutor; every other flag goes into `additional_parameters`.
_FIELDS = (
    *("account", "constraint", "exclude", "gres", "mem", "partition", "qos", "time"),
    *("cpus_per_task", "gpus_per_node", "nodes", "ntasks_per_node", "segment"),
)
_NUMBERS = _FIELDS[-5:]


def main(arguments: list[str]) -> int:
    """Write the scripts of a request; the exit code is 0 if there is an answer."""
    request, answer = map(Path, arguments)
    shapes = parse(list[Shape], request.read_bytes())
    os.environ["NEMORUN_HOME"] = str(request.parent)  # read at import
    with large_imports(without=["torch"]):  # half of it is torch, if that is there
        import nemo_run  # noqa: F401, PLC0415 - after NEMORUN_HOME
    write_json_atomically(answer, [materialize(shape) for shape in shapes])
    return 0


def materialize(shape: Shape) -> str:
    """Return the script of a shape: nemo-run's executor in our template.

    The flags of the step stand in the template's words: nemo-run's own template has a mount and a
    working directory of its own in each step, and pyxis refuses a second `--container-workdir`.
    Source: NVIDIA/pyxis args.c, spank_option_workdir().
    """
    from nemo_run.core.execution.utils import fill_template  # noqa: PLC0415 - see above

    executor = _executor(shape)
    values = {
        "job_name": shape.name,
        **{name: getattr(executor, name) for name in ("open_mode", *_FIELDS)},
        **executor.additional_parameters,
    }
    variables = {
        "flags": [
            _flag(name, value) for name, value in sorted(values.items()) if value is not None
        ],
        "setup": executor.setup_lines,
        "step": shlex.join(shape.step),
        "command": shape.command,
    }
    text: str = fill_template(TEMPLATE.name, variables, template_dir=str(TEMPLATE.parent))
    return f"{text}\n"


def _executor(shape: Shape) -> SlurmExecutor:
    """Return nemo-run's settings of a job."""
    from nemo_run import LocalTunnel, Packager, SlurmExecutor  # noqa: PLC0415 - see above

    flags = {name.replace("-", "_"): value for name, value in shape.flags.items()}
    known = {name: flags.pop(name) for name in _FIELDS if name in flags}
    typed = {name: int(value) if name in _NUMBERS else value for name, value in known.items()}
    return SlurmExecutor(
        **{"account": None, **typed},
        packager=Packager(),
        tunnel=LocalTunnel(job_dir=""),
        additional_parameters={name: value or True for name, value in flags.items()},
        setup_lines="\n".join(shape.setup),
    )


def _flag(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag}={shlex.quote(str(value))}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
