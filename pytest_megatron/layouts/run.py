"""Run ranks of a program one after the other on fake process groups; a program.

    python -m pytest_megatron.layouts.run SETTINGS PROGRAM [ARGUMENT ...]
    python -m pytest_megatron.layouts.run SETTINGS -m MODULE [ARGUMENT ...]

SETTINGS is JSON, see `Settings`. torch is imported once; each rank is a fork of this process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

from pytest_megatron.base.schema import parse
from pytest_megatron.layouts.model import Settings, choose, kinds_of, read_record
from pytest_megatron.layouts.named import named_ranks
from pytest_megatron.process.tree import large_imports

_MODULES = "modules.json"
_UNPICKLES = "_tensor_to_object"  # of torch.distributed: an object that a rank has received


def main() -> None:
    """Run one rank, choose the others by its groups, and run those."""
    settings, argv = parse(Settings, sys.argv[1]), sys.argv[2:]
    (settings.directory / "mail").mkdir(parents=True, exist_ok=True)
    with large_imports():
        import torch  # noqa: F401 - each rank has it without importing it again

    first, *others = settings.ranks or (0,)
    _run_all(settings, [first], argv)
    _import_what_it_did(settings.directory)
    if settings.ranks is None:
        path = settings.directory / "rank_0.json"
        record = read_record(path) if path.exists() else None
        sources = [*argv[:1], *(record.sources if record is not None else ())]
        named = named_ranks(sources, settings.world_size, settings.ranks_per_node)
        others = choose(settings.world_size, settings.count, record, named)[1:]
    _run_all(settings, others, argv)
    _run_unknown(settings, argv)
    _run_others(settings, argv)


def _run_unknown(settings: Settings, argv: list[str]) -> None:
    """Run ranks that got no object again, the last first: others have sent theirs meanwhile.

    That goes on as long as fewer ranks lack one.
    """
    num_before = settings.world_size + 1
    while True:
        records = [read_record(path) for path in settings.directory.glob("rank_*.json")]
        num_unknown = sum(record.end == "unknown" for record in records)
        if not 0 < num_unknown < num_before:
            return
        num_before = num_unknown
        ranks = sorted(r.rank for r in records if r.end in ("unknown", "failed"))
        _run_all(replace(settings, jobs=1), ranks[::-1], argv)


def _run_others(settings: Settings, argv: list[str]) -> None:
    """Run a rank of each kind once more, with other data from all others."""
    records = [read_record(path) for path in settings.directory.glob("rank_*.json")]
    firsts = [kind[0].rank for kind in kinds_of(records) if kind[0].calls]
    _run_all(settings, firsts, argv, is_other=True)


def _import_what_it_did(directory: Path) -> None:
    """Import the installed modules that the first rank needed, so that no other has to.

    Those that use CUDA while they are imported are left out: no fork of this process could use it.
    """
    import torch

    path = directory / _MODULES
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # `is_available` would begin to use it
    of_cuda = vars(torch.cuda)
    begin, of_cuda["_lazy_init"] = of_cuda["_lazy_init"], _refuse_cuda
    with large_imports():
        for name in json.loads(path.read_text()) if path.exists() else ():
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
    of_cuda["_lazy_init"] = begin


def _refuse_cuda() -> None:
    raise RuntimeError("CUDA is used by ranks alone")


def _run_all(
    settings: Settings, ranks: list[int], argv: list[str], *, is_other: bool = False
) -> None:
    """Run ranks, a few side by side."""
    running: dict[int, tuple[int, float]] = {}
    waiting = list(ranks)
    while waiting or running:
        while waiting and len(running) < settings.jobs:
            rank = waiting.pop(0)
            running[_fork(settings, rank, argv, is_other=is_other)] = (rank, time.monotonic())
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.pop(pid, None)
            continue
        for pid, (_, begin) in running.items():
            if time.monotonic() - begin > settings.time_limit_s:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _fork(settings: Settings, rank: int, argv: list[str], *, is_other: bool) -> int:
    """Fork a rank of the program; return its process id in the parent."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        name = f"rank_{rank}{'.other' if is_other else ''}.log"
        log = os.open(settings.directory / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = _run_rank(settings, rank, argv, is_other=is_other)
    except BaseException:  # noqa: BLE001 - the fork must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_rank(settings: Settings, rank: int, argv: list[str], *, is_other: bool) -> int:
    """Run the program as one rank."""
    import torch

    from pytest_megatron.layouts.fake import install
    from pytest_megatron.layouts.recorder import RankRecorder

    torch.set_num_threads(1)
    has_cuda = torch.cuda.is_available()
    local = rank % settings.ranks_per_node
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(settings.world_size),
        LOCAL_RANK="0" if has_cuda else str(local),
        LOCAL_WORLD_SIZE=str(settings.ranks_per_node),
        GROUP_RANK=str(rank // settings.ranks_per_node),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    recorder = RankRecorder(settings, rank, is_other=is_other)
    install(recorder, rank, settings.world_size)
    recorder.start()
    try:
        with recorder.memory:
            _run_program(argv)
    except SystemExit as end:
        if end.code not in (None, 0):
            recorder.finish("failed", f"SystemExit: {end.code}", _where(end))
            return 1
    except BaseException as error:  # noqa: BLE001 - whatever ends the program ends the rank
        traceback.print_exc()
        names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        text = "".join(traceback.format_exception_only(error)).strip()
        recorder.finish("unknown" if _UNPICKLES in names else "failed", text, _where(error))
        return 1
    recorder.finish("whole")
    return 0


def _where(error: BaseException) -> str:
    """Return the innermost line of the program."""
    from pytest_megatron.layouts.recorder import line_of

    return line_of(traceback.extract_tb(error.__traceback__))


def _run_program(argv: list[str]) -> None:
    """Run a program or a module as `__main__`."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
