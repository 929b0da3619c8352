"""Ways to break an environment, each with the rule that finds it and words of what it says."""

from __future__ import annotations

from collections.abc import Callable

from staged_environment import Staged

Break = Callable[[Staged], None]
STAGES: dict[str, tuple[Break, str, str]] = {}


def stage(rule: str, words: str) -> Callable[[Break], Break]:
    """Register a way to break an environment, the rule that finds it and words of what it says."""

    def register(break_it: Break) -> Break:
        STAGES[break_it.__name__] = (break_it, rule, words)
        return break_it

    return register


@stage(
    "driver-too-old",
    "driver 470.57.02; torch 2.8.0.cu128 .* CUDA 12.8, which needs 525.60.13 or newer",
)
def old_driver(staged: Staged) -> None:
    staged.driver("470.57.02")
    staged.torch()


@stage("torch-for-cpu", "2.8.0\\+cpu has no CUDA, .* for CUDA 12.4 or older")
def cpu_torch_on_a_gpu_machine(staged: Staged) -> None:
    staged.driver("550.54.14")
    staged.torch("2.8.0+cpu", cuda=None)


@stage("cuda-does-not-start", "Error 802.*nvidia-fabricmanager")
def no_fabric_manager(staged: Staged) -> None:
    staged.driver("570.26")
    staged.torch(cuda_problem="Error 802: system not yet initialized", count=0)


@stage("cuda-does-not-start", "No CUDA GPUs are .*unset CUDA_VISIBLE_DEVICES, which is '7'")
def no_gpu_of_that_number(staged: Staged) -> None:
    staged.driver("570.26", num_gpus=4)
    staged.torch(cuda_problem="RuntimeError: No CUDA GPUs are available", count=0)
    staged.env["CUDA_VISIBLE_DEVICES"] = "7"


@stage("gpus-not-seen", "has 8 GPUs, torch sees 2; CUDA_VISIBLE_DEVICES is '0,1,9'")
def gpus_that_are_not_there(staged: Staged) -> None:
    staged.driver("570.26", num_gpus=8)
    staged.torch()
    staged.env["CUDA_VISIBLE_DEVICES"] = "0,1,9"


@stage("gpu-too-new", "capability 10.3; .* code for sm_80, sm_90")
def new_gpu(staged: Staged) -> None:
    staged.driver("570.26")
    staged.torch(capability=(10, 3))


@stage("torch-missing", "has no torch")
def no_torch(staged: Staged) -> None:
    staged.package("numpy", "2.0.0")


@stage("torch-does-not-import", "ImportError: libcudnn.so.9: cannot open shared object file")
def torch_without_cudnn(staged: Staged) -> None:
    staged.torch(code="raise ImportError('libcudnn.so.9: cannot open shared object file')")


@stage("torch-does-not-import", "was killed by SIGABRT")
def torch_that_crashes(staged: Staged) -> None:
    staged.torch(code="import os; os.abort()")


@stage("torch-does-not-import", "no answer within 0.5 s")
def torch_that_hangs(staged: Staged) -> None:
    staged.torch(code="import signal; signal.pause()")
    staged.import_limit_s = 0.5


@stage(
    "torch-does-not-import", "module 'torch' has no attribute '__version__'.*named torch in front"
)
def directory_of_that_name_where_python_starts(staged: Staged) -> None:
    staged.torch()
    (staged.project / "torch").mkdir()
    (staged.project / "torch/__init__.py").write_text("")


@stage("torch-replaced", "brought torch 2.9.0a0\\+50eac811a6.nv25.09, and .* has 2.8.0\\+cu128")
def torch_replaced_in_a_container(staged: Staged) -> None:
    staged.torch()
    staged.env |= {
        "NVIDIA_PYTORCH_VERSION": "25.09",
        "PYTORCH_VERSION": "2.9.0a0+50eac811a6.nv25.09",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility,video",
    }


@stage("nvidia-wheels-mixed", "nvidia-nccl-cu12 2.27.3 and nvidia-nccl-cu13 2.28.9")
def nccl_for_two_cudas(staged: Staged) -> None:
    staged.torch()
    staged.package("nvidia-nccl-cu12", "2.27.3")
    staged.package("nvidia-nccl-cu13", "2.28.9")


@stage(
    "does-not-import", "flash_attn of .*flash_attn-2.8.3\\+cu12torch2.8cxx11abiTRUE-cp3.*-linux_"
)
def flash_attn_without_its_library(staged: Staged) -> None:
    staged.torch()
    staged.package("flash-attn", "2.8.3+cu12torch2.5cxx11abiTRUE")
    text = "raise ImportError('libcudart.so.11.0: cannot open shared object file')"
    (staged.site / "flash_attn.py").write_text(text)


@stage("does-not-import", "flash_attn .* cannot be imported: no end within 1 s")
def flash_attn_that_hangs(staged: Staged) -> None:
    staged.torch()
    staged.package("flash-attn", "2.8.3")
    (staged.site / "flash_attn.py").write_text("import signal; signal.pause()")
    staged.import_limit_s = 5.0


@stage("does-not-import", "transformer_engine.pytorch of transformer-engine 2.20.2 cannot be imp")
def transformer_engine_without_its_part_for_torch(staged: Staged) -> None:
    staged.torch()
    for name in ("transformer-engine", "transformer-engine-cu13"):
        staged.package(name, "2.20.2")


@stage("does-not-import", "amp_C of apex 0.9.10 .*no wheels are published; build it: APEX_CPP_EXT")
def apex_of_the_registry(staged: Staged) -> None:
    staged.torch()
    staged.package("apex", "0.9.10")


@stage("megatron-twice", "site-packages, and also in .*checkout")
def megatron_twice(staged: Staged) -> None:
    staged.torch()
    staged.megatron(staged.site)
    staged.megatron(staged.root / "checkout")
    (staged.site / "checkout.pth").write_text(f"{staged.root / 'checkout'}\n")


@stage("ranks-preset", "preset .*: RANK=3, WORLD_SIZE=16, MASTER_ADDR=node7 .*srun")
def shell_of_another_job(staged: Staged) -> None:
    staged.torch()
    staged.env |= {"MASTER_ADDR": "node7", "RANK": "3", "WORLD_SIZE": "16", "MASTER_PORT": "29501"}


@stage("shm-small", "/dev/shm has 64.0 MiB.*--ipc=host or --shm-size")
def small_shared_memory(staged: Staged) -> None:
    staged.torch()
    staged.file("/proc/mounts", "shm /dev/shm tmpfs rw,nosuid,nodev,size=65536k 0 0\n")


@stage("limit-nofile", "1024 open files")
def few_open_files(staged: Staged) -> None:
    staged.torch()
    staged.limits(nofile="1024")


@stage("limit-nproc", "512 processes")
def few_processes(staged: Staged) -> None:
    staged.torch()
    staged.limits(nproc="512")


@stage("limit-memlock", "64.0 KiB may be locked")
def little_locked_memory(staged: Staged) -> None:
    staged.torch()
    staged.limits(memlock="65536")
    staged.file("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")


@stage("not-writable", "/sys/cache for uv's cache: .*set UV_CACHE_DIR")
def read_only_cache(staged: Staged) -> None:
    staged.torch()
    staged.env["UV_CACHE_DIR"] = "/sys/cache"  # not even root can write there


@stage("slurm-silent", "sinfo exited with code 1: slurm_load_partitions: Unable to contact")
def slurm_without_controller(staged: Staged) -> None:
    staged.torch()
    problem = "slurm_load_partitions: Unable to contact slurm controller"
    staged.program("sinfo", f'echo "{problem}" >&2; exit 1')


@stage("another-environment", "VIRTUAL_ENV is /elsewhere")
def another_environment_is_active(staged: Staged) -> None:
    staged.torch()
    staged.env["VIRTUAL_ENV"] = "/elsewhere"


@stage(
    "git-owner", "git refuses .*/project: .*git config --global --add safe.directory /.*/project$"
)
def checkout_of_another_user(staged: Staged) -> None:
    staged.torch()
    staged.git()
    staged.env["GIT_TEST_ASSUME_DIFFERENT_OWNER"] = "1"  # git's own way to test this
