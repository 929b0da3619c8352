"""The file of `--executor-config`: what it gives, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.engines.config import (
    ContainerConfig,
    DockerConfig,
    LaunchMode,
    SlurmConfig,
    read_docker_config,
    read_executor_config,
    read_slurm_config,
)
from pytest_megatron.errors import ConfigError

CLUSTER = """\
format_version: 1
slurm:
  account: 0123
  partition: batch
  exclude: ["node[3-4]", node9]
  mode: srun-native
  container: {image: /images/dev.sqsh, mounts: ["/data:/data:ro"]}
  env: {OMP_NUM_THREADS: 1, LR: 1.0e-5, TEXT: "a b $HOME 'c' \\"d\\"\\ne"}
  platforms:
    dgx_h100:
      partition: h100
      gres: "gpu:h100:{gpus}"
      env: {LR: 2.0e-5}
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return file


def test_numbers_that_stand_for_texts_arrive_as_they_are_written(tmp_path: Path) -> None:
    assert read_executor_config(written(tmp_path, CLUSTER)).slurm == SlurmConfig(
        account="0123",
        partition="batch",
        exclude=("node[3-4]", "node9"),
        mode=LaunchMode.SRUN_NATIVE,
        container=ContainerConfig(image="/images/dev.sqsh", mounts=("/data:/data:ro",)),
        env={"OMP_NUM_THREADS": "1", "LR": "1.0e-5", "TEXT": "a b $HOME 'c' \"d\"\ne"},
        platforms=read_slurm_config(tmp_path / "cluster.yaml").platforms,
    )


def test_a_platform_changes_its_keys_and_keeps_the_others(tmp_path: Path) -> None:
    config = read_slurm_config(written(tmp_path, CLUSTER), {"cpu", "dgx_h100"})
    here, there = config.at("dgx_h100"), config.at("cpu")
    assert (here.partition, here.gres) == ("h100", "gpu:h100:{gpus}")
    assert (here.account, here.mode) == ("0123", LaunchMode.SRUN_NATIVE)
    assert here.env == {**there.env, "LR": "2.0e-5"}
    assert (there.partition, there.gres) == ("batch", None)


def test_without_a_file_slurm_has_defaults_and_docker_no_image() -> None:
    assert read_slurm_config(None) == SlurmConfig()
    with pytest.raises(ConfigError, match="docker needs to know which image"):
        read_docker_config(None)


def test_docker_settings(tmp_path: Path) -> None:
    file = written(tmp_path, "format_version: 1\ndocker: {image: dev, ulimits: {nofile: 99}}\n")
    assert read_docker_config(file) == DockerConfig(image="dev", ulimits={"nofile": 99})
    with pytest.raises(ConfigError, match="has no section docker"):
        read_docker_config(written(tmp_path, "format_version: 1\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("slurm: {partitoin: x}", "slurm.partitoin: unknown key, .* did you mean 'partition'"),
        ("slurm: {container: {imag: x}}", "slurm.container.imag: unknown key, expected one of"),
        ("slurm: {uv_sync: {venv: /v/x, arg: []}}", "uv_sync.arg: unknown key, .* mean 'args'"),
        ("slurm: {platforms: {a: {mode: torchrun}}}", r"slurm.platforms.a.mode: unknown key"),
        ("slurm: {time: 30}", "slurm.time: is no key any more; write --time=VALUE in sbatch_flags"),
        ("slurm: {mpi: pmix}", "slurm.mpi: is no key any more; write --mpi=VALUE in srun_flags"),
        ("slurm: {ports: 9-5}", "slurm.ports: found '9-5', expected FIRST-LAST within 1-65535"),
        ("slurm: {ports: 9-70000}", "slurm.ports: found '9-70000'"),
        (
            "slurm: {mode: mpirun}",
            "slurm.mode: found 'mpirun', expected one of srun-native",
        ),
        ("slurm: {interval: 0}", "slurm.interval: found 0, expected a number > 0"),
        ("slurm: {max_array: 9}", "slurm.max_array: was removed, .*; drop it"),
        ("slurm: {remember_nodes: 1}", "slurm.remember_nodes: was removed; drop it, exclude has"),
        ("slurm: {shared_paths: [/]}", "slurm.shared_paths: was removed, .*; drop it"),
        ("slurm: {max_jobs: 0}", "slurm.max_jobs: found 0, expected an integer >= 1"),
        ("slurm: {exclude: node1}", "slurm.exclude: found 'node1', expected a list"),
        ("slurm: {env: {A B: x}}", "expected the name of a variable"),
        ("slurm: {env: {A: }}", "slurm.env.A: found None, expected a string"),
        ("slurm: {srun_flags: [-n 3]}", r"srun_flags\[0\]: found '-n 3', expected a long flag"),
        ("slurm: {sbatch_flags: [--array=3]}", "'--array=3' is what the engine, or"),
        ("slurm: {sbatch_flags: [--exclude=x]}", "or another key, sets; remove it"),
        (
            "slurm: {platforms: {a: {sbatch_flags: [--wrap=x]}}}",
            r"slurm.platforms.a.sbatch_flags\[0\]: '--wrap=x'",
        ),
        ("slurm: {container: {image: a, mounts: ['/a,b:/c']}}", "without commas"),
        ("slrum: {}", "slrum: unknown key, .*; did you mean 'slurm'"),
        ("slurm: 3", "slurm: found 3, expected a mapping"),
        ("docker: {image: a, pull: never}", "docker.pull: was removed, .*; drop it"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    file = written(tmp_path, f"format_version: 1\n{line}\n")
    with pytest.raises(ConfigError, match=rf"cluster.yaml:2: .*{message}"):
        read_executor_config(file)


def test_an_unknown_platform_and_a_file_of_another_version(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'dgx_h100', expected one of cpu, dgx_h10"):
        read_slurm_config(written(tmp_path, CLUSTER), {"cpu", "dgx_h10"})
    with pytest.raises(ConfigError, match=r"cluster.yaml:1: format_version: is missing"):
        read_executor_config(written(tmp_path, "slurm: {}\n"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_executor_config(tmp_path / "none.yaml")
