"""The command that does an item again, and the environment that it gets.

Nothing that an artifact holds is run, and no text of it passes through a shell: it only chooses a
test of the checkout, options, and variables that change how a training computes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest

from pytest_megatron.repro.choose import Chosen
from pytest_megatron.runs.headline import RANKS, REPEAT
from pytest_megatron.runs.record import OptionValue, RecordedAttempt, RecordedTest, RecordedWorkload
from pytest_megatron.runs.redact import REDACTED
from pytest_megatron.session.options import OF_ITEMS, OPTION_ROWS

# Of the machine that it was: set again by us, or of no meaning here.
_OF_MACHINE = frozenset(
    {"CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "PATH", "VIRTUAL_ENV"}
    | {"VIRTUAL_ENV_PROMPT", "VIRTUAL_ENV_DISABLE_PROMPT"}  # of a shell, and of Python's own
    | {"PYTHON_BASIC_REPL", "PYTHON_COLORS", "PYTHON_HISTORY"}
    | {"PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH"}
)
# Numbers and switches that change how a training computes or communicates. Any other variable of an
# artifact could make a program load a library, or write to a file, that it names.
_HARMLESS_NAMES = """
CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
GLOO_SOCKET_IFNAME HF_DATASETS_OFFLINE HF_HUB_OFFLINE TRANSFORMERS_OFFLINE MKL_NUM_THREADS
NVIDIA_TF32_OVERRIDE OMP_NUM_THREADS OMP_SCHEDULE PYTHONHASHSEED PYTORCH_ALLOC_CONF
PYTORCH_CUDA_ALLOC_CONF TOKENIZERS_PARALLELISM TORCH_ALLOW_TF32_CUBLAS_OVERRIDE NCCL_ALGO
NCCL_BUFFSIZE NCCL_CUMEM_ENABLE NCCL_DEBUG NCCL_IB_DISABLE NCCL_IB_HCA NCCL_MAX_CTAS
NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL
NCCL_P2P_NET_CHUNKSIZE NCCL_PROTO NCCL_SHM_DISABLE NCCL_SOCKET_IFNAME
NVTE_ALLOW_NONDETERMINISTIC_ALGO NVTE_APPLY_QK_LAYER_SCALING NVTE_BWD_LAYERNORM_SM_MARGIN
NVTE_FLASH_ATTN NVTE_FUSED_ATTN NVTE_FWD_LAYERNORM_SM_MARGIN NVTE_TORCH_COMPILE NVTE_UNFUSED_ATTN
TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT
TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
_SEEDED = ("pytest_randomly", "hypothesis")
_OF_PYTEST = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER")
PYTEST_EXITS = {
    2: "pytest was interrupted, or could not import a test module",
    3: "pytest itself failed",
    4: "pytest has no such test here, could not import its module, or refused an option",
    5: "there is no such test here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user says beside the item.

    Attributes:
        num_ranks: None leaves the number that it ran on.
        is_trusted: Whether every variable and option of the run may be used.
        words: Arguments for pytest of the user's own.
    """

    num_ranks: int | None = None
    is_trusted: bool = False
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """What is started.

    Attributes:
        argv: Program and arguments; no shell comes between.
        env: Variables beside those of the user.
        left_out: Variables and options of the run that are not given here, with the reason.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    left_out: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The command, to be pasted into a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        return " ".join([*words, shlex.join(self.argv)])


def command_for(
    chosen: Chosen,
    wishes: Wishes,
    before: Sequence[str],
    *,
    run_dir: str,
    python: str = sys.executable,
    seeded: Collection[str] | None = None,
) -> Again:
    """Return the command that does an item again.

    Args:
        chosen: The item.
        wishes: The user's.
        before: Node ids to run before it on the same gang.
        run_dir: Where results go.
        python: Interpreter.
        seeded: Modules whose plugins take a seed; by default those that are installed here.
    """
    env, left_out = _environment(chosen, wishes)
    if isinstance(chosen.item, RecordedTest):
        words = _test_words(chosen, chosen.item, wishes)
    else:
        words = _workload_words(chosen.item)
        env |= _replay_env(chosen, wishes)
    given, not_given = _option_words(chosen, wishes)
    words += [*given, *_seed_words(chosen.run.seeds, _seeded_here() if seeded is None else seeded)]
    words += [*wishes.words, *before, chosen.node_id]
    own = ("--rootdir", ".", "--megatron-run-dir", run_dir, "-o", "megatron_history=off")
    argv = (python, "-m", "pytest", "-p", "megatron", *own, "--maxfail", "0", *words)
    return Again(argv=argv, env=env, left_out=(*left_out, *not_given))


def environment_with(added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a pytest that is started, without what this one has of pytest."""
    return {k: v for k, v in os.environ.items() if k not in _OF_PYTEST} | dict(added)


def _workload_words(item: RecordedWorkload) -> list[str]:
    words = ["--megatron-n-repeat", "1", "--megatron-max-attempts", "1"]
    return words + ([f"--megatron-platform={item.platform}"] if item.platform else [])


def _options(chosen: Chosen) -> dict[str, OptionValue]:
    """Return the options that an item had."""
    recorded = chosen.run.options.items()
    options: dict[str, OptionValue] = {name: v for name, v in recorded if v is not None}
    if options.get("golden") != "off":
        options.pop("golden", None)  # nothing is written
    return options


def _option_words(chosen: Chosen, wishes: Wishes) -> tuple[list[str], list[str]]:
    """Return the words that give options back, and those that are not given, with the reason."""
    options = _options(chosen)
    words: list[str] = []
    left_out: list[str] = []
    for row in OPTION_ROWS.values():
        key = row.name.replace("-", "_")
        if not row.is_there or row.name not in OF_ITEMS or key not in options:
            continue
        value = options.pop(key)
        texts = value if isinstance(value, tuple) else (str(value),)
        where = f"{row.typed_name} was given there"
        if any(REDACTED in text for text in texts):
            left_out.append(f"{where}, with a secret that is not kept; give it yourself")
            continue
        known = [text for text in texts if _may_name(text, wishes)]
        left_out += [
            f"{where}, and {text!r} is not taken over; --trust takes it over"
            for text in texts
            if text not in known
        ]
        try:
            words += row.words(tuple(known) if isinstance(value, tuple) else value) if known else []
        except pytest.UsageError as error:
            left_out.append(f"{where} with a value that it does not take: {error}")
    left_out += [f"{name!r} is no option that is given back" for name in options]
    return words, left_out


def _may_name(text: str, wishes: Wishes) -> bool:
    """Whether a file that a run names may be used: one of the checkout."""
    path = PurePosixPath(text)
    is_inside = not (path.is_absolute() or ".." in path.parts) and text.isprintable()
    return wishes.is_trusted or is_inside


def _replay_env(chosen: Chosen, wishes: Wishes) -> dict[str, str]:
    """Return the variables that choose the repeat and the number of ranks."""
    env = {}
    if isinstance(chosen.attempt, RecordedAttempt) and (chosen.attempt.repeat or 1) > 1:
        env[REPEAT] = str(chosen.attempt.repeat)
    if wishes.num_ranks is not None:
        env[RANKS] = str(wishes.num_ranks)
    return env


def _test_words(chosen: Chosen, item: RecordedTest, wishes: Wishes) -> list[str]:
    """Return the options of pytest that run a test as it ran."""
    words = ["--megatron-ranks", str(wishes.num_ranks or item.world_size)]
    words += ["--megatron-device", item.device] if item.device else []
    if chosen.attempt is not None and "ranks-" in chosen.attempt.directory:
        words.append("-n0")  # it ran in a worker of pytest-xdist, which `addopts` may ask for
    return words


def _seeded_here() -> list[str]:
    """Return the modules that are installed here and whose plugins take a seed."""
    return [name for name in _SEEDED if importlib.util.find_spec(name) is not None]


def _seed_words(seeds: Mapping[str, str | None], seeded: Collection[str]) -> list[str]:
    """Return the seeds that plugins had, and keep them from shuffling what is given here."""
    known = {name: seed for name, seed in seeds.items() if re.fullmatch(r"\d{1,20}", seed or "")}
    words = []
    if "pytest_randomly" in seeded and "randomly_seed" in known:
        words += [f"--randomly-seed={known['randomly_seed']}", "--randomly-dont-reorganize"]
    elif "pytest_randomly" in seeded:
        words += ["-p", "no:randomly"]
    if "hypothesis" in seeded and "hypothesis_seed" in known:
        words.append(f"--hypothesis-seed={known['hypothesis_seed']}")
    return words


def _environment(chosen: Chosen, wishes: Wishes) -> tuple[dict[str, str], list[str]]:
    """Return the variables that are set again, and those that are not, with the reason."""
    recorded = dict(chosen.run.env)
    if (seed := chosen.run.seeds.get("PYTHONHASHSEED")) is not None:
        recorded["PYTHONHASHSEED"] = seed
    env: dict[str, str] = {}
    left_out: list[str] = []
    for name, value in sorted(recorded.items()):
        if name in _OF_MACHINE:
            continue
        if REDACTED in value:
            left_out.append(f"{name} was set there, to a secret that is not kept; set it yourself")
        elif wishes.is_trusted or _is_harmless(name, value):
            env[name] = value
        else:
            shown = f"{name}={shlex.quote(value)}"
            left_out.append(f"{shown} was set there and is not taken over; --trust takes it over")
    return env, left_out


def _is_harmless(name: str, value: str) -> bool:
    return name in _HARMLESS and "/" not in value and value.isprintable()
