"""Ways to break an environment, each with the rule that finds it and words of what it says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from staged_environment import NEW_ERROR, OLD_ERROR, TAG, Staged

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


@stage("cuda-does-not-start", "Error 803.*restart the machine")
def driver_updated_under_a_running_container(staged: Staged) -> None:
    staged.driver("570.26")
    staged.torch(cuda_problem="Error 803: system has unsupported display driver / cuda driver")


@stage("gpus-not-seen", "has 8 GPUs, torch sees 2; CUDA_VISIBLE_DEVICES is '0,1,9'")
def gpus_that_are_not_there(staged: Staged) -> None:
    staged.driver("570.26", num_gpus=8)
    staged.torch()
    staged.env["CUDA_VISIBLE_DEVICES"] = "0,1,9"


@stage("gpu-too-new", "capability 10.3; .* code for sm_80, sm_90")
def new_gpu(staged: Staged) -> None:
    staged.driver("570.26")
    staged.torch(capability=(10, 3))


@stage("library-shadow", "libcudnn.so.8 come before")
def cudnn_of_the_system(staged: Staged) -> None:
    staged.torch()
    (staged.root / "cudnn").mkdir()
    (staged.root / "cudnn/libcudnn.so.8").write_text("")
    staged.env["LD_LIBRARY_PATH"] = str(staged.root / "cudnn")


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


@stage("torch-replaced", "brought torch 2.9.0a0\\+50eac811a6.nv25.09, and .* has 2.8.0\\+cu128")
def torch_replaced_in_a_container(staged: Staged) -> None:
    staged.torch()
    staged.env |= {
        "NVIDIA_PYTORCH_VERSION": "25.09",
        "PYTORCH_VERSION": "2.9.0a0+50eac811a6.nv25.09",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility,video",
    }


@stage("installed-twice", "numpy is installed as ")
def numpy_twice(staged: Staged) -> None:
    staged.torch()
    staged.package("numpy", "1.26.4")
    staged.package("numpy", "2.0.0")


@stage("in-front", "torch 2.8.0.cu128 in .* is in front of 2.9.0 in .*/below")
def torch_in_front_of_another(staged: Staged) -> None:
    staged.torch()
    below = staged.root / "below/torch-2.9.0.dist-info"
    below.mkdir(parents=True)
    (below / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    (staged.site / "below.pth").write_text(f"{below.parent}\n")


@stage(
    "in-front", "torch 2.9.0 in .*/other is in front of 2.8.0.cu128 .*take .*/other out of PYTHON"
)
def torch_on_the_python_path(staged: Staged) -> None:
    staged.torch(version="2.9.0", directory=staged.root / "other")
    staged.torch()
    staged.env["PYTHONPATH"] = str(staged.root / "other")


@stage("in-front", "numpy 1.26.4 in .*/old is in front of 2.0.0 .*take .*/old out of PYTHONPATH")
def numpy_1_in_front_of_numpy_2(staged: Staged) -> None:
    staged.torch()
    staged.package("numpy", "2.0.0")
    staged.package("numpy", "1.26.4", directory=staged.root / "old")
    staged.env["PYTHONPATH"] = f"{staged.root / 'old'}:"


@stage(
    "module-shadowed",
    "import numpy takes .*/old/numpy, not numpy 2.0.0 in .*site-packages.*/old out",
)
def numpy_1_without_metadata_in_front(staged: Staged) -> None:
    staged.torch()
    staged.package("numpy", "2.0.0", modules=["numpy"])
    (staged.root / "old/numpy").mkdir(parents=True)
    (staged.root / "old/numpy/__init__.py").write_text("__version__ = '1.26.4'\n")
    staged.env["PYTHONPATH"] = str(staged.root / "old")


@stage(
    "version-differs", "numpy says that it is 1.26.4, and is installed as 2.0.0 in .*site-packages"
)
def numpy_1_copied_over_numpy_2(staged: Staged) -> None:
    staged.torch()
    staged.package("numpy", "2.0.0")
    (staged.site / "numpy.py").write_text("__version__ = '1.26.4'\n")


@stage(
    "module-shadowed", "import torch takes .*/project/torch, not torch 2.8.0.*start in another dir"
)
def directory_of_that_name_where_python_starts(staged: Staged) -> None:
    staged.torch()
    (staged.project / "torch").mkdir()
    (staged.project / "torch/__init__.py").write_text("")


@stage(
    "module-shadowed", "takes .*/project/torch.py, not torch 2.8.0.*or rename .*/project/torch.py"
)
def script_of_that_name_where_python_starts(staged: Staged) -> None:
    staged.torch()
    (staged.project / "torch.py").write_text("print('a first try')\n")


@stage(
    "module-shadowed", "takes .*/pytorch/torch, not torch 2.8.0.*take .*/pytorch out of PYTHONPATH"
)
def sources_of_torch_on_the_python_path(staged: Staged) -> None:
    staged.torch()
    (staged.root / "pytorch/torch").mkdir(parents=True)
    (staged.root / "pytorch/torch/__init__.py").write_text("from torch._C import *\n")
    staged.env["PYTHONPATH"] = str(staged.root / "pytorch")


@stage("module-shadowed", "takes .*/project/torch, and torch is not installed.*; then install it")
def data_of_that_name_and_no_torch(staged: Staged) -> None:
    (staged.project / "torch").mkdir()


@stage("module-shadowed", "import flash_attn takes .*/project/flash_attn, not flash-attn 2.8.3 in")
def checkout_of_flash_attn_beside_its_wheel(staged: Staged) -> None:
    staged.torch()
    staged.package("flash-attn", "2.8.3", modules=["flash_attn"])
    (staged.project / "flash_attn").mkdir()
    (staged.project / "flash_attn/__init__.py").write_text("")


@stage("python-tag", "megatron-core 0.19.2 was built for cp39-cp39-manylinux")
def megatron_for_another_python(staged: Staged) -> None:
    staged.torch()
    staged.package("megatron-core", "0.19.2", tag="cp39-cp39-manylinux_2_28_x86_64")


@stage("nvidia-wheels-mixed", "nvidia-nccl-cu12 2.27.3 and nvidia-nccl-cu13 2.28.9")
def nccl_for_two_cudas(staged: Staged) -> None:
    staged.torch()
    staged.package("nvidia-nccl-cu12", "2.27.3")
    staged.package("nvidia-nccl-cu13", "2.28.9")


@stage("nccl-differs", "loads NCCL 2.27.3; nvidia-nccl-cu12 2.26.2 is installed")
def nccl_of_the_system(staged: Staged) -> None:
    staged.torch()
    staged.package("nvidia-nccl-cu12", "2.26.2")


@stage("requirement", "megatron-core 0.16.1 requires torch>=2.6.0, and torch 2.4.0\\+cu121")
def torch_too_old_for_megatron(staged: Staged) -> None:
    staged.torch("2.4.0+cu121", cuda="12.1")
    staged.package("megatron-core", "0.16.1", requires=["torch>=2.6.0"])


@stage("python-version", "megatron-core 0.19.2 requires Python >=3.99")
def python_too_old_for_megatron(staged: Staged) -> None:
    staged.torch()
    staged.package("megatron-core", "0.19.2", python=">=3.99")


@stage(
    "abi-torch",
    f"built for torch 2.5, .* flash_attn-2.8.3\\+cu12torch2.8cxx11abiTRUE-{TAG}-{TAG}-linux_",
)
def flash_attn_for_another_torch(staged: Staged) -> None:
    staged.torch()
    staged.package("flash-attn", "2.8.3+cu12torch2.5cxx11abiTRUE", modules=["flash_attn"])


@stage("abi-cuda", "asks for CUDA 11, .* mamba_ssm-2.2.5\\+cu12torch2.8cxx11abiTRUE")
def mamba_for_another_cuda(staged: Staged) -> None:
    staged.torch()
    staged.package("mamba-ssm", "2.2.5+cu11torch2.8cxx11abiTRUE", modules=["mamba_ssm"])


@stage("abi-cuda", "grouped-gemm 1.1.4 asks for CUDA 11, .*no wheels are published; build it")
def grouped_gemm_linked_against_another_cuda(staged: Staged) -> None:
    staged.torch()
    staged.package("grouped-gemm", "1.1.4", modules=["grouped_gemm"])
    staged.shared_object("grouped_gemm_backend.so", needed=["libcudart.so.11.0", "libc10.so"])


@stage("abi-cxx11", "_GLIBCXX_USE_CXX11_ABI=0, torch 2.8.0\\+cu128 with 1")
def causal_conv_with_old_strings(staged: Staged) -> None:
    staged.torch()
    staged.package("causal-conv1d", "1.5.2+cu12torch2.8cxx11abiFALSE", modules=["causal_conv1d"])


@stage("abi-cxx11", "transformer-engine-torch 2.9.0 was built with _GLIBCXX_USE_CXX11_ABI=0")
def transformer_engine_with_old_strings_in_its_symbols(staged: Staged) -> None:
    staged.torch()
    staged.package("transformer-engine-torch", "2.9.0")
    staged.shared_object("transformer_engine_torch.so", missing=[OLD_ERROR])


@stage("abi-symbol", "flash_attn_2_cuda.so asks for _ZN3c104cuda9SetDeviceEi, which torch")
def flash_attn_that_asks_for_an_old_symbol(staged: Staged) -> None:
    staged.torch()
    staged.shared_object("torch/lib/libc10.so", defined=[NEW_ERROR])
    staged.package("flash-attn", "2.8.3", modules=["flash_attn"])
    staged.shared_object("flash_attn_2_cuda.so", missing=[NEW_ERROR, "_ZN3c104cuda9SetDeviceEi"])


@stage("python-tag", "flash-attn 2.8.3 was built for cp39-cp39-linux_x86_64")
def flash_attn_for_another_python(staged: Staged) -> None:
    staged.torch()
    staged.package("flash-attn", "2.8.3", tag="cp39-cp39-linux_x86_64", modules=["flash_attn"])


@stage(
    "does-not-import", "mamba_ssm .* ImportError: undefined symbol: _ZNK5torch8autograd4Node4nameEv"
)
def mamba_with_an_undefined_symbol(staged: Staged) -> None:
    staged.torch()
    staged.package("mamba-ssm", "2.2.5")
    text = "raise ImportError('undefined symbol: _ZNK5torch8autograd4Node4nameEv')"
    (staged.site / "mamba_ssm.py").write_text(text)


@stage("does-not-import", "the import ended its process with -11")
def causal_conv_that_crashes(staged: Staged) -> None:
    staged.torch()
    staged.package("causal-conv1d", "1.5.2")
    text = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    (staged.site / "causal_conv1d.py").write_text(text)


@stage("does-not-import", "flash_attn .* cannot be imported: no end within 1 s")
def flash_attn_that_hangs(staged: Staged) -> None:
    staged.torch()
    staged.package("flash-attn", "2.8.3")
    (staged.site / "flash_attn.py").write_text("import signal; signal.pause()")
    staged.import_limit_s = 5.0


@stage("te-parts", "transformer-engine-cu13 2.20.2.*none is for CUDA 12")
def transformer_engine_for_another_cuda(staged: Staged) -> None:
    staged.torch()
    for name in ("transformer-engine", "transformer-engine-cu13"):
        staged.package(name, "2.20.2")


@stage("not-apex", "apex 0.9.10 is installed, and has no amp_C")
def apex_of_the_registry(staged: Staged) -> None:
    staged.torch()
    staged.package("apex", "0.9.10")


@stage("nvcc-differs", "is CUDA 12.4, torch 2.8.0\\+cu128 was built with CUDA 12.8.*apex refuses")
def nvcc_of_another_cuda(staged: Staged) -> None:
    staged.torch()
    staged.program("nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")


@stage("megatron-twice", "site-packages, and also in .*checkout")
def megatron_twice(staged: Staged) -> None:
    staged.torch()
    staged.megatron(staged.site)
    staged.megatron(staged.root / "checkout")
    (staged.site / "checkout.pth").write_text(f"{staged.root / 'checkout'}\n")


@stage("nemo-run-leptonai", "nemo-run 0.11.1 with leptonai 0.47.1")
def nemo_run_with_a_new_leptonai(staged: Staged) -> None:
    staged.torch()
    staged.package("nemo-run", "0.11.1")
    staged.package("leptonai", "0.47.1")


@stage("interface-unknown", "NCCL_SOCKET_IFNAME is ib0, .* up are eth0")
def interface_of_another_machine(staged: Staged) -> None:
    staged.torch()
    staged.env["NCCL_SOCKET_IFNAME"] = "ib0"


@stage("interface-unknown", "GLOO_SOCKET_IFNAME is \\^lo,docker.*for: \\^lo.*no \\^ and no =")
def list_of_nccl_for_gloo(staged: Staged) -> None:
    staged.torch()
    staged.env["GLOO_SOCKET_IFNAME"] = "^lo,docker"


@stage("interface-unknown", "NCCL_SOCKET_IFNAME is eth0, and the interfaces that are up are lo")
def interface_in_a_container_without_network(staged: Staged) -> None:
    staged.torch()
    (staged.root / "sys/class/net/eth0/operstate").unlink()
    (staged.root / "sys/class/net/eth0").rmdir()
    staged.env["NCCL_SOCKET_IFNAME"] = "eth0"


@stage("adapter-unknown", "NCCL_IB_HCA is =mlx5_7:1, and the adapters are mlx5_0")
def adapter_of_another_machine(staged: Staged) -> None:
    staged.torch()
    staged.file("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    staged.env["NCCL_IB_HCA"] = "=mlx5_7:1"


@stage("nccl-choice", "NCCL_ALGO is 'Rings': 'Rings' is none of its names.*Tree, Ring, CollNet")
def unknown_algorithm(staged: Staged) -> None:
    staged.torch()
    staged.env["NCCL_ALGO"] = "Rings"


@stage("slow-variable", "NCCL_P2P_DISABLE is 1 .*NVLink")
def peers_that_do_not_copy(staged: Staged) -> None:
    staged.torch()
    staged.env["NCCL_P2P_DISABLE"] = "1"


@stage("slow-variable", "NCCL_SHM_DISABLE is 1 .*over the network")
def no_shared_memory_for_nccl(staged: Staged) -> None:
    staged.torch()
    staged.env["NCCL_SHM_DISABLE"] = "1"


@stage("slow-variable", "CUDA_LAUNCH_BLOCKING is 1")
def kernels_that_are_waited_for(staged: Staged) -> None:
    staged.torch()
    staged.env["CUDA_LAUNCH_BLOCKING"] = "1"


@stage("ranks-preset", "preset .*: RANK=3, WORLD_SIZE=16, MASTER_ADDR=node7 .*srun")
def shell_of_another_job(staged: Staged) -> None:
    staged.torch()
    staged.env |= {"MASTER_ADDR": "node7", "RANK": "3", "WORLD_SIZE": "16", "MASTER_PORT": "29501"}


@stage("port-not-a-number", "MASTER_PORT is '127.0.0.1'")
def address_for_a_port(staged: Staged) -> None:
    staged.torch()
    staged.env["MASTER_PORT"] = "127.0.0.1"


@stage("omp-threads", "OMP_NUM_THREADS is '0'.*libgomp")
def no_threads(staged: Staged) -> None:
    staged.torch()
    staged.env["OMP_NUM_THREADS"] = "0"


@stage("preload-ignored", "libjemalloc.so.2, which .*: cannot open shared object file")
def preloaded_library_that_is_gone(staged: Staged) -> None:
    staged.torch()
    staged.env["LD_PRELOAD"] = "/nowhere/libjemalloc.so.2"


@stage("preload-ignored", "libnccl.so.2, which cannot be loaded: file too short")
def preloaded_nccl_that_is_empty(staged: Staged) -> None:
    staged.torch()
    (staged.root / "libnccl.so.2").write_text("")
    staged.env["LD_PRELOAD"] = str(staged.root / "libnccl.so.2")


@stage("assertions-off", "optimization level 1")
def python_without_assertions(staged: Staged) -> None:
    staged.torch()
    staged.env["PYTHONOPTIMIZE"] = "1"


@stage("cuda-home", "CUDA_HOME is /usr/local/cuda-11.2, and there is no such directory")
def toolkit_that_was_removed(staged: Staged) -> None:
    staged.torch()
    staged.env["CUDA_HOME"] = "/usr/local/cuda-11.2"


@stage("infiniband-down", "mlx5_0/1 \\(down\\) is not ACTIVE")
def infiniband_port_down(staged: Staged) -> None:
    staged.torch()
    staged.file("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")


@stage("infiniband-off", "NCCL_IB_DISABLE is 1, and mlx5_0/1 is ACTIVE")
def infiniband_off(staged: Staged) -> None:
    staged.torch()
    staged.file("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    staged.env["NCCL_IB_DISABLE"] = "1"


@stage("few-ports", "is 60000 to 60999: 1000 ports")
def few_ports(staged: Staged) -> None:
    staged.torch()
    staged.file("/proc/sys/net/ipv4/ip_local_port_range", "60000 60999\n")


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


@stage("temporary-lost", "TMPDIR is /scratch/job_4711, and there is no such directory")
def temporary_directory_of_another_job(staged: Staged) -> None:
    staged.torch()
    staged.env["TMPDIR"] = "/scratch/job_4711"


@stage("clock-off", "on this host: .*/project/.git/index was last changed 180 min ahead of it")
def clock_that_is_hours_behind(staged: Staged) -> None:
    staged.torch()
    index = staged.project / ".git/index"
    index.parent.mkdir()
    index.write_bytes(b"DIRC")
    later = time.time() + 3 * 3600 + 5
    os.utime(index, (later, later))


@stage("clock-off", "on this host: the hardware's clock is 83 min behind it")
def clock_that_is_ahead(staged: Staged) -> None:
    staged.torch()
    staged.file("/sys/class/rtc/rtc0/since_epoch", f"{time.time() - 5000:.0f}\n")


@stage("locale", "Python prints iso8859-1")
def latin_locale(staged: Staged) -> None:
    staged.torch()
    staged.env["PYTHONIOENCODING"] = "iso8859-1"


@stage("driver-capabilities", "is 'graphics' in this container \\(docker\\)")
def container_without_compute(staged: Staged) -> None:
    staged.torch()
    staged.file("/.dockerenv", "")
    staged.env["NVIDIA_DRIVER_CAPABILITIES"] = "graphics"


@stage("slurm-partial", "srun on PATH, sbatch, scancel, scontrol, sinfo, squeue not")
def half_of_slurm(staged: Staged) -> None:
    staged.torch()
    staged.program("srun", "echo slurm 22.05.8")


@stage("slurm-silent", "sinfo exited with code 1: slurm_load_partitions: Unable to contact")
def slurm_without_controller(staged: Staged) -> None:
    staged.torch()
    for name in ("sbatch", "scancel", "scontrol", "squeue", "srun"):
        staged.program(name, "echo slurm-wlm 22.05.8")
    problem = "slurm_load_partitions: Unable to contact slurm controller"
    staged.program(
        "sinfo", f'[ "$1" = --version ] && echo slurm 22.05.8 && exit\necho "{problem}" >&2; exit 1'
    )


@stage(
    "lock-differs", "1 package is installed otherwise than locked: numpy 1.26.4 \\(locked 2.0.0\\)"
)
def environment_beside_its_lock(staged: Staged) -> None:
    staged.torch()
    staged.package("numpy", "1.26.4")
    staged.locked(locked="", others='[[package]]\nname = "numpy"\nversion = "2.0.0"\n')


@stage("lock-stale", "numpy>=2 is new, numpy>=1 is gone")
def lock_of_other_requirements(staged: Staged) -> None:
    staged.torch()
    staged.package("numpy", "2.0.0")
    row = '[package.metadata]\nrequires-dist = [{ name = "numpy", specifier = ">=1" }]'
    staged.locked("numpy>=2", locked=row)


@stage("lock-missing", "not installed: numpy")
def half_an_environment(staged: Staged) -> None:
    staged.torch()
    staged.locked(locked='dependencies = [{ name = "numpy" }]')


@stage("lock-unreadable", "uv.lock: cannot be read: ")
def lock_with_a_conflict(staged: Staged) -> None:
    staged.torch()
    staged.locked(locked="<<<<<<< HEAD")


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
