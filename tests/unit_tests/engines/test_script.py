"""Scripts for Slurm: their exact text, and what is said when nemo-run cannot make them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_megatron.engines.config import (
    ContainerConfig,
    LaunchMode,
    SlurmConfig,
    UvSyncConfig,
)
from pytest_megatron.engines.slurm.script import make_scripts, place_of
from pytest_megatron.engines.slurm.shape import Shape, ShapePaths, shape_of
from pytest_megatron.errors import LaunchError
from pytest_megatron.workloads.engine.api import Resources

SCRIPTS = Path(__file__).parent / "scripts"
RUN = Path("/shared/nemo_run tests/run 1")  # a blank, and the name of nemo-run's own directory
PATHS = ShapePaths(root=Path("/shared/project"), run_dir=RUN, logs=RUN / "engine/logs")
PLAIN_PATHS = ShapePaths(
    root=Path("/shared/project"), run_dir=Path("/shared/run"), logs=Path("/shared/run/logs")
)
ON_GPUS = Resources(
    platform="dgx_h100",
    num_nodes=2,
    gpus_per_node=8,
    ranks_per_node=8,
    time_limit_s=1790,
    segment=2,
)
ON_CPU = Resources(platform="cpu", num_nodes=1, gpus_per_node=0, ranks_per_node=2, time_limit_s=600)
CONTAINER = SlurmConfig(
    account="team",
    partition="batch",
    exclude=("node[3-4]", "node9"),
    cpus_per_task=32,
    sbatch_flags=("--switches=1", "--contiguous", "--constraint=h100&ib", "--mem=0", "--exclusive"),
    srun_flags=("--cpu-bind=none", "--mpi=pmix"),
    container=ContainerConfig(image="/images/dev image.sqsh", mounts=("/data:/data:ro",)),
    setup=("module load cuda",),
    job_env={"ENROOT_CACHE": "a b $HOME 'c' \"d\"\ne", "NCCL_DEBUG": "INFO"},
    uv_sync=UvSyncConfig(venv="/scratch/venv", args=("--extra", "dev"), cache="/uv/cache"),
    python="/scratch/venv/bin/python",
)


def shapes() -> dict[str, Shape]:
    """One shape for each file of expected text."""
    native = SlurmConfig(
        mode=LaunchMode.SRUN_NATIVE, gres="gpu:h100:{gpus}", python="/opt/py/bin/python"
    )
    spec = RUN / "engine/specs/1.json"
    with_spec = ShapePaths(root=PATHS.root, run_dir=RUN, logs=PATHS.logs, spec=spec)
    container = SlurmConfig.at(CONTAINER, "dgx_h100")
    return {
        "plain": shape_of(ON_CPU, SlurmConfig(python="/opt/my py/bin/python"), with_spec),
        "native": shape_of(ON_GPUS, native, PATHS),
        "container": shape_of(ON_GPUS, container, PLAIN_PATHS),
    }


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What nemo-run makes of every shape: one child process for all."""
    wanted = shapes()
    return dict(zip(wanted, make_scripts(list(wanted.values())), strict=True))


@pytest.mark.parametrize("name", ["plain", "native", "container"])
def test_the_text_of_a_script(texts: dict[str, str], name: str) -> None:
    assert texts[name] == (SCRIPTS / f"{name}.sh").read_text()


def _break_nemo(monkeypatch: pytest.MonkeyPatch, directory: Path, code: str) -> None:
    """Have the child process find another nemo-run first."""
    broken = directory / "broken"
    broken.mkdir()
    (broken / "nemo_run.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(broken))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        pytest.param(
            "raise ModuleNotFoundError('no')",
            r"^nemo-run: made no script: ModuleNotFoundError: no; pip install .*\[cluster\]'",
            id="missing",
        ),
        pytest.param(
            "import os; os.write(2, b'so it goes'); os._exit(9)",
            "made no script: so it goes",
            id="dies",
        ),
    ],
)
def test_what_is_wrong_with_nemo_run_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    _break_nemo(monkeypatch, tmp_path, code)
    with pytest.raises(LaunchError, match=message):
        make_scripts([shapes()["plain"]])


def test_the_interpreter_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "uv.lock").write_text("version = 1\n")
    sync = UvSyncConfig(venv="/scratch/{user}/{digest}")
    image = ContainerConfig(image="dev")

    def python(config: SlurmConfig) -> str | None:
        return place_of(config, "cpu", tmp_path).python

    assert python(SlurmConfig(container=image)) == "python3"
    assert python(SlurmConfig(container=image, python="/opt/venv/bin/python")) == (
        "/opt/venv/bin/python"
    )
    first = python(SlurmConfig(uv_sync=sync, container=image))
    assert first is not None
    assert re.fullmatch(r"/scratch/\w+/[0-9a-f]{12}/bin/python", first)
    (tmp_path / "uv.lock").write_text("version = 2\n")
    assert python(SlurmConfig(uv_sync=sync, container=image)) != first
    (tmp_path / "uv.lock").unlink()
    with pytest.raises(LaunchError, match=r"uv.lock: No such file .* run `uv lock`"):
        python(SlurmConfig(uv_sync=sync))
