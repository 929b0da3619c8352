"""Differences between this machine and that of a run (effects: looks for files and at git)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pytest_megatron.base.project import SHORT_COMMIT, ask_git
from pytest_megatron.repro.choose import Chosen
from pytest_megatron.runs.environment import NAME, Patch, SessionFacts, make_patch
from pytest_megatron.runs.record import RecordedPlan, RecordedTest


def differences(
    chosen: Chosen, plan: RecordedPlan | None, here: SessionFacts, root: Path, *, num_ranks: int
) -> list[str]:
    """Return a line for each thing that may make the outcome another one.

    Args:
        chosen: The item and its run.
        plan: Plan of a workload.
        here: This host and this checkout.
        root: The project here.
        num_ranks: That it will run on.
    """
    run = chosen.run
    lines = list(_commit_lines(chosen, here, root))
    lines += _version_lines(
        {"python": run.python, **run.versions}, {"python": here.python, **here.versions}
    )
    lines += _gpu_lines(chosen, here, num_ranks)
    if run.driver != here.host.driver:
        lines.append(f"driver: {run.driver or 'none'} there, {here.host.driver or 'none'} here")
    if run.image != here.image:
        lines.append(f"image: {run.image or 'none'} there, {here.image or 'none'} here")
    if run.cpu is not None and run.cpu != here.host.cpu:
        lines.append(f"processor: {run.cpu} there, {here.host.cpu} here")
    if plan is not None:
        lines += [f"missing here: {path}" for path in missing_paths(plan, root)]
    if run.ended is None:
        lines.append("the run did not come to its end: it may hold less than happened")
    return lines


def _commit_lines(chosen: Chosen, here: SessionFacts, root: Path) -> Iterator[str]:
    """Yield how the commit differs, and what to check out."""
    run = chosen.run
    if run.commit is not None and run.commit != here.commit:
        short, own = run.commit[:SHORT_COMMIT], (here.commit or "no commit")[:SHORT_COMMIT]
        has_it = ask_git(root, "cat-file", "-e", f"{run.commit}^{{commit}}") is not None
        way = f"git checkout {short}" if has_it else "git fetch it first"
        yield f"commit: {short} there, {own} here; {way}"
    ours = make_patch(root, here.new) if here.is_dirty else Patch()
    problem = None if run.patch is None else run.patch.problem
    theirs = Patch(text=_patch_of(chosen) or "", problem=problem)
    if run.is_dirty and here.is_dirty and ours == theirs != Patch():
        return  # the same changes
    if run.is_dirty:
        patch = f"read it, then: git apply {chosen.run_dir / NAME}" if theirs.text else None
        way = "; ".join(filter(None, [patch, problem])) or "what they were is not kept"
        yield f"tree: had uncommitted changes there; {way}"
    if here.is_dirty:
        yield "tree: has uncommitted changes here"


def _patch_of(chosen: Chosen) -> str | None:
    """Return the uncommitted changes of the run, None without any."""
    patch = chosen.run.patch
    path = chosen.run_dir / NAME
    if patch is None or patch.file is None or path.is_symlink() or not path.is_file():
        return None
    return path.read_text(encoding="utf-8", errors="replace")


def _version_lines(there: Mapping[str, str | None], here: Mapping[str, str]) -> Iterator[str]:
    """Yield the versions that differ."""
    for name, version in there.items():
        if version is not None and version != here.get(name):
            yield f"{name}: {version} there, {here.get(name, 'not installed')} here"


def _gpu_lines(chosen: Chosen, here: SessionFacts, num_ranks: int) -> Iterator[str]:
    """Yield how the GPUs differ."""
    there, own = list(chosen.run.gpus), [gpu.name for gpu in here.host.gpus]
    if there != own:
        yield f"GPUs: {_count(there)} there, {_count(own)} here"
    if chosen.item.is_on_gpus and len(own) < num_ranks:
        way = "give --ranks"
        if isinstance(chosen.item, RecordedTest):
            way += ", or run it on the CPU: --pytest-args '--device cpu'"
        yield f"GPUs: {num_ranks} are needed, {len(own)} are here; {way}"


def _count(names: list[str]) -> str:
    """Describe GPUs by kind and number."""
    if not names:
        return "none"
    kinds = dict.fromkeys(names)
    return ", ".join(f"{names.count(kind)} x {kind}" for kind in kinds)


def missing_paths(plan: RecordedPlan, root: Path) -> list[str]:
    """Return what a training was given by path and is not here: data, tokenizers, checkpoints.

    Paths below the project are looked for below the project here; directories of the run itself do
    not count.
    """
    own = [str(Path(plan.cwd) / ".pytest_megatron")]
    found: dict[str, None] = {}
    for phase in plan.phases:
        words = [word.partition("=")[2] or word for word in _after_program(phase.argv)]
        words += [
            phase.env[name] for name in ("DATA_PATH", "CHECKPOINT_LOAD_PATH") if name in phase.env
        ]
        own += [
            phase.env[name] for name in ("OUTPUT_PATH", "CHECKPOINT_SAVE_PATH") if name in phase.env
        ]
        own += [phase.env[name] for name in ("LOG_DIR", "TENSORBOARD_PATH") if name in phase.env]
        found |= dict.fromkeys(word for word in words if word.startswith("/"))
    attempts = [str(Path(path).parent) for path in own[1:]]
    return [path for path in found if not _is_here(path, plan, root, (*own, *attempts))]


def _after_program(argv: Sequence[str]) -> Sequence[str]:
    start = next((i for i, word in enumerate(argv) if word.endswith(".py")), 0)
    return argv[start + 1 :]


def _is_here(text: str, plan: RecordedPlan, root: Path, own: tuple[str, ...]) -> bool:
    """Return whether a path that the run names is there here."""
    path = Path(text)
    if any(text == place or text.startswith(f"{place}/") for place in own):
        return True
    try:
        is_inside = bool(plan.cwd) and path.is_relative_to(plan.cwd)
        return (root / path.relative_to(plan.cwd) if is_inside else path).exists()
    except OSError:
        return False
