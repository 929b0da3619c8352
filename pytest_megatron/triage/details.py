"""What a failure's own words tell beside its kind: sizes, phase, iteration. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pytest_megatron.triage.lines import parse_iteration
from pytest_megatron.triage.root import Root
from pytest_megatron.triage.story import RankLog

# Where in a training a frame is; the first that some frame matches, innermost frame first.
_PHASES = (
    (
        re.compile(r" in (?:save_checkpoint|save_\w*checkpoint\w*|async_save|_save)\b"),
        "saving a checkpoint",
    ),
    (
        re.compile(r" in (?:load_checkpoint|load_\w*checkpoint\w*|load_state_dict|_load_\w*)\b"),
        "loading a checkpoint",
    ),
    (re.compile(r" in (?:evaluate\w*|eval_step|validate\w*)\b"), "evaluation"),
    (re.compile(r" in (?:backward\w*|_backward\w*|backward_step)\b"), "the backward pass"),
    (
        re.compile(r"(?:optim\w*\.py:\d+| in (?:optimizer_step|step_optimizer|clip_grad\w*))"),
        "the optimizer's step",
    ),
    (re.compile(r" in (?:forward\w*|_forward\w*|loss_func|_call_impl)\b"), "the forward pass"),
    (
        re.compile(
            r" in (?:\w*next_batch|get_batch\w*|__next__|_next_data|\w*data_?loader\w*|"
            r"\w*dataset\w*)\b"
        ),
        "loading data",
    ),
    (
        re.compile(
            r" in (?:init_process_group|initialize_\w+|\w*rendezvous\w*|_create_c10d_store)\b"
        ),
        "setting up ranks",
    ),
    (
        re.compile(r" in (?:get_model|model_provider|setup_model\w*|__init__)\b"),
        "building the model",
    ),
    (re.compile(r" in <module>$"), "start-up"),
)
_TRIED = re.compile(r"Tried to allocate (\S+ \w+)|you tried to allocate (\d+ bytes)")
_FREE = re.compile(r"of which (\S+ \w+) is free|; (\S+ \w+) free")
_TOTAL = re.compile(r"total capacity of (\S+ \w+)|([\d.]+ \w+) total capacity")
_GPU = re.compile(r"\bGPU (\d+)\b")
_IN_USE = re.compile(r"this process has (\S+ \w+) memory in use")
_OTHER = re.compile(r"Process (\d+) has (\S+ \w+) memory in use")
_PORT = re.compile(r"\bport: ?(\d+)|:(\d{4,5})\b")
_PATH = re.compile(r"'(/[^']+)'|\"(/[^\"]+)\"")


def phase_of(frames: Sequence[str]) -> str | None:
    """Return the phase of the training that a traceback is in, None if it does not say.

    Args:
        frames: `file:line in name`, outermost first.
    """
    for frame in reversed(frames):
        for pattern, phase in _PHASES:
            if pattern.search(frame) and not (phase == "start-up" and len(frames) > 1):
                return phase
    return None


def iteration_of(story: RankLog, root: Root) -> tuple[int, int] | None:
    """Return the iteration that a failure was in or after, `(N, M)`."""
    for place in root.places:
        found = parse_iteration(place.text)
        if found is not None:
            return found
    return story.iteration


def facts_of(root: Root) -> Mapping[str, str]:
    """Return what a failure's message tells: sizes of memory, a port, a path."""
    text = root.message or "\n".join(place.text for place in root.places)
    facts: dict[str, str] = {}
    match root.signature.family:
        case "cuda_oom" | "host_oom":
            patterns = {
                "tried_to_allocate": _TRIED,
                "free": _FREE,
                "total": _TOTAL,
                "gpu": _GPU,
                "in_use": _IN_USE,
            }
            for name, pattern in patterns.items():
                _note(facts, name, pattern, text)
            others = [f"{pid} ({size})" for pid, size in _OTHER.findall(text)]
            if others:
                facts["other_processes"] = ", ".join(others)
        case "port_in_use":
            _note(facts, "port", _PORT, text)
        case _:
            _note(facts, "path", _PATH, text)
    return facts


def _note(facts: dict[str, str], name: str, pattern: re.Pattern[str], text: str) -> None:
    match = pattern.search(text)
    if match is not None:
        facts[name] = next(group for group in match.groups() if group is not None)
