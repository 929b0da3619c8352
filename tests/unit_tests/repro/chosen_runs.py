"""Items of runs that are to run again."""

from __future__ import annotations

from pathlib import Path

from recorded_runs import ROW, TEST, write_run

from pytest_megatron.base.files import JsonValue
from pytest_megatron.repro.choose import Chosen, choose, read_own_run


def chosen_of(directory: Path, item: dict[str, JsonValue], **more: JsonValue) -> Chosen:
    node_id = TEST if "world_size" in item else ROW
    run_dir = write_run(directory, {node_id: item}, **more)
    return choose({run_dir: read_own_run(run_dir)}, None)
