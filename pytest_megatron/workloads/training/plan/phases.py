"""Phases of each test type: starts of the training program with arguments and checkpoints.

Checkpoints have Megatron-LM's layout, `iter_0000050/` beside `latest_checkpointed_iteration.txt`.

Megatron-LM builds a string of MODEL_ARGS and lets a shell evaluate it; here the same values become
the same words (`command_words`), but nothing is expanded, split or run on the way.

Source: Megatron-LM tests/functional_tests/shell_test_utils/, run_ci_test.sh and _run_training.sh,
d98e8a64dd.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

from pytest_megatron.base.files import write_text_atomically
from pytest_megatron.errors import CaseError, LaunchError, RecipeError
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.workloads.recipe.case import (
    CP,
    EP,
    ETP,
    LIGHTWEIGHT_ITERS,
    LIGHTWEIGHT_NEMO_STEPS,
    LIGHTWEIGHT_SAVE_INTERVAL,
    PP,
    TP,
    Argument,
    CaseMode,
    Resume,
    TestType,
    Variant,
    WorkloadCase,
    is_missing_program,
)
from pytest_megatron.workloads.recipe.model import Workload

_SIZES = (TP, PP, CP, EP, ETP)
TRACKER = "latest_checkpointed_iteration.txt"
DEFAULT_TIME_LIMIT_S = 1800
_NEMO_STEPS, _BRIDGE_ITERS = "trainer.max_steps", "train.train_iters"

_REFERENCE = re.compile(
    r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?::-(?P<default>[^{}]*))?\}|(?P<bare>[A-Za-z_]\w*))"
)
_COMMAND_SUBSTITUTION = "$("


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Checkpoint that a phase goes on from.

    Attributes:
        checkpoints: Where an earlier phase saved it, or the directory that the recipe names.
        back_to: Its iteration, after which the phase goes on.
        drop: Pattern of what is removed beside it, so that a finished run looks as if it had
            stopped half way; None removes nothing.
        view: A directory of the attempt that shows nothing of `checkpoints` but that iteration; the
            phase loads from it, as a frozen checkpoint is read and never written. None loads from
            `checkpoints`.
        is_own: Whether the program has a layout of its own, whose names only the case knows.
    """

    checkpoints: Path
    back_to: int
    drop: str | None = None
    view: Path | None = None
    is_own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStart:
    """One start of the training program.

    Attributes:
        number: Counted from 1.
        name: Name in messages: `phase 2`, `MODEL_ARGS_4`.
        variant: Whose environment it has.
        arguments: Arguments to pass, before variables are filled in.
        load: What `${CHECKPOINT_LOAD_PATH}` stands for.
        save: What `${CHECKPOINT_SAVE_PATH}` stands for.
        origin: What to lay out for it to start from, or None.
        last_iteration: The one after which it exits; None where that is unknown.
        saves: A directory in which it must leave a checkpoint of its last iteration, or None.
        words: Words of the command line in place of those of the same name, or behind all others.
    """

    number: int
    name: str
    variant: Variant
    arguments: tuple[Argument, ...]
    words: tuple[str, ...] = ()
    load: str
    save: Path
    origin: Origin | None = None
    last_iteration: int | None
    saves: Path | None = None


def starts_of(
    workload: Workload, case: WorkloadCase, dirs: AttemptDirs, root: Path, *, is_lightweight: bool
) -> tuple[PhaseStart, ...]:
    """Return every start of the program that one attempt of a case has, in order.

    Args:
        workload: Says where a frozen checkpoint is.
        case: Says which test type it is.
        dirs: Directories of the attempt.
        root: The project's; a frozen checkpoint's path is relative to it.
        is_lightweight: Whether only `LIGHTWEIGHT_ITERS` iterations are trained.

    Raises:
        CaseError: `--train-iters` is no number.
        RecipeError: The row names no checkpoint, and the test type starts from one.
    """
    maker = _Maker(workload, case, dirs, is_lightweight=is_lightweight)
    match case.test_type:
        case TestType.REGULAR | TestType.FROZEN_START:
            if case.test_type is TestType.FROZEN_START:
                maker.frozen_path()  # that it is named is all that can be said here
            return (maker.plain(),)
        case TestType.CKPT_RESUME:
            is_short = is_lightweight and case.resume is not None and case.resume.is_fixed
            return (maker.plain(),) if is_short else (maker.plain(), maker.resumed())
        case TestType.FROZEN_RESUME:
            return (maker.plain(load=str(dirs.no_checkpoint)), maker.frozen_resumed(root))
        case TestType.CHECKPOINT_CONSISTENCY:
            return tuple(
                maker.consistent(number, variant) for number, variant in enumerate(case.variants, 1)
            )
        case TestType.RELEASE:
            return (maker.released(),)
    assert_never(case.test_type)


def find_untraceable(workload: Workload, case: WorkloadCase | None) -> str | None:
    """Return why no trace of a workload is recorded, None if one can be."""
    if workload.script is not None or case is None:
        return "a script of the recipe starts its ranks"
    if case.mode is not CaseMode.PRETRAINING:
        return f"MODE is {case.mode.value}"
    return find_command(workload)


def find_command(workload: Workload) -> str | None:
    """Return why a row has no Python program, None if it has one."""
    program = shlex.split(workload.training_script_path or "")
    if program and not program[0].endswith(".py"):
        kind = "command" if program[0] != "-m" else "module"
        what = f"{program[kind == 'module']!r} is a {kind}"
        return f"{what}, expected a Python program in training_script_path"
    return None


# Megatron-LM's programs, with whatever arguments. Source: its recipes, d98e8a64dd.
_OF_MEGATRON = ("--exit-interval", "--train-iters", "--train-samples", *_SIZES)
_MEGATRON_PROGRAM = re.compile(r"(?:.*/)?(?:pretrain_\w+|train_rl)\.py").fullmatch


def takes_exit_interval(workload: Workload, arguments: Sequence[Argument]) -> bool:
    """Return whether a program takes `--exit-interval`, as Megatron-LM's do and others may not.

    Such a program is told by its name, or by an argument that the row or the case gives it.
    """
    program = (shlex.split(workload.training_script_path or "") or [""])[0]
    is_named = any(a.name in _OF_MEGATRON for a in arguments)
    return is_named or _MEGATRON_PROGRAM(program) is not None


def _short_key(workload: Workload, arguments: Sequence[Argument]) -> tuple[str, int] | None:
    """Return the `key=value` argument by which NeMo or Megatron Bridge trains few steps."""
    names = {argument.name for argument in arguments}
    if names & {_BRIDGE_ITERS, "--recipe"}:
        return _BRIDGE_ITERS, LIGHTWEIGHT_ITERS
    is_nemo = _NEMO_STEPS in names or (workload.training_script_path or "").startswith("nemo ")
    return (_NEMO_STEPS, LIGHTWEIGHT_NEMO_STEPS) if is_nemo else None


def require_stop(workload: Workload, case: WorkloadCase, option: str) -> None:
    """Refuse a program that cannot be given fewer steps.

    Raises:
        CaseError: Neither the row nor the case says how, and the program is none that is known.
    """
    is_short, arguments = workload.own_case is not None, case.arguments
    is_known = takes_exit_interval(workload, arguments) or _short_key(workload, arguments)
    if case.stop is None and not is_known:
        raise CaseError(
            workload.where if is_short else str(case.path),
            f"{option} gives a program fewer steps, and {workload.test_case!r} has no stop, "
            f"nothing was run; add "
            f"{'stop' if is_short else 'STOP'}: '--max_steps={{steps}}', as the program takes it, "
            f"or run it without {option}",
        )


def _stop_words(stop: str, num_steps: int) -> tuple[str, ...]:
    return tuple(word.replace("{steps}", str(num_steps)) for word in shlex.split(stop))


def with_words(words: Sequence[str], further: Sequence[str]) -> tuple[str, ...]:
    """Return words of a command line with others in place of those of the same name.

    `--steps 4` and `--steps=4` replace `--steps 100` and `--steps=100`, and `steps=4` replaces
    `steps=100`, where that stands last; what is not there is added at the end.
    """
    found, options = list(words), list[list[str]]()
    for word in further:
        last = options[-1][0] if options else ""
        if last.startswith("-") and "=" not in last and not word.startswith("-"):
            options[-1].append(word)
        else:
            options.append([word])
    for option in options:
        name, is_joined, _ = option[0].partition("=")
        places = [i for i, word in enumerate(found) if word == name or word.startswith(f"{name}=")]
        at = places[-1] if places else len(found)
        is_split = found[at : at + 1] == [name]
        found[at : at + (len(option) + bool(is_joined) if is_split else 1)] = option
    return tuple(found)


_LOADS_NOTHING = (TestType.REGULAR, TestType.CKPT_RESUME)


class _Maker:
    """Makes the starts of one attempt."""

    def __init__(
        self, workload: Workload, case: WorkloadCase, dirs: AttemptDirs, *, is_lightweight: bool
    ) -> None:
        self._workload = workload
        self._case = case
        self._dirs = dirs
        self._is_lightweight = is_lightweight
        # Megatron-LM's driver is always given a path, and hands on that of these alone.
        is_unread = workload.of_driver is not None and case.test_type in _LOADS_NOTHING
        path = None if is_unread else workload.checkpoint_load_path
        self._load = None if path is None else workload.render(path)

    def plain(self, *, load: str | None = None) -> PhaseStart:
        """Return the start of a first, or only, phase."""
        saved, resume = self._dirs.checkpoints, self._resume()
        words = () if resume is None else resume.words(resume.save, saved)
        start = self._start(1, self._case.variant(1), load=load, save=saved)
        return replace(start, words=(*self._stop(), *words))

    def resumed(self) -> PhaseStart:
        """Return the start that goes on from half way of the first one, or as its case says."""
        saved = self._dirs.checkpoints
        if (resume := self._resume()) is None:
            iters = LIGHTWEIGHT_ITERS if self._is_lightweight else self._case.train_iters
            origin = Origin(checkpoints=saved, back_to=iters // 2, drop=iteration_name(iters))
            return self._second(load=saved, save=saved, origin=origin)
        drop = None if resume.drop is None else resume.drop.replace("{at}", str(resume.at))
        origin = Origin(checkpoints=saved, back_to=resume.at, drop=drop, is_own=True)
        second = self._second(load=saved, save=saved, origin=origin)
        words = (*resume.words(resume.save, saved), *resume.words(resume.load, saved))
        return replace(second, words=(*self._stop(), *words))

    def _resume(self) -> Resume | None:
        """Return how the program saves and resumes; in lightweight mode earlier."""
        resume = self._case.resume
        if resume is None or not self._is_lightweight:
            return resume
        return replace(resume, at=LIGHTWEIGHT_SAVE_INTERVAL)

    def _stop(self) -> tuple[str, ...]:
        stop = self._case.stop
        return _stop_words(stop, LIGHTWEIGHT_ITERS) if self._is_lightweight and stop else ()

    def frozen_resumed(self, root: Path) -> PhaseStart:
        """Return the start that goes on from half way of a training that was long ago."""
        view = self._dirs.frozen_checkpoint
        origin = Origin(
            checkpoints=root / self.frozen_path(), back_to=self._case.train_iters // 2, view=view
        )
        return self._second(load=view, save=self._dirs.phase(2).root / "checkpoints", origin=origin)

    def consistent(self, number: int, variant: Variant) -> PhaseStart:
        """Return the start of one `MODEL_ARGS*` key, with checkpoints of its own."""
        save = self._dirs.phase(number).root / "checkpoints"
        start = self._start(number, variant, load=None, save=save)
        return replace(start, name=variant.key, saves=save)

    def released(self) -> PhaseStart:
        """Return the start of a release: no argument of it is changed."""
        start, case = self.plain(), self._case
        if self._is_lightweight:
            return start
        last = case.exit_interval or case.train_iters
        return replace(start, arguments=case.variant(1).arguments, last_iteration=last)

    def frozen_path(self) -> str:
        """Return the directory of the frozen checkpoint.

        Raises:
            RecipeError: The row names none.
        """
        if self._load is None:
            raise RecipeError(
                self._workload.where,
                f"{self._workload.test_case!r} is {self._case.test_type.value} and the row has no "
                f"checkpoint_load_path, expected the directory of the checkpoint to start from; "
                f"add it to the product or to spec",
            )
        return self._load

    def _second(self, *, load: Path, save: Path, origin: Origin) -> PhaseStart:
        """Return the start of a phase that resumes."""
        start = self._start(2, self._case.variant(2), load=str(load), save=save)
        last = start.last_iteration
        if self._is_lightweight and last is not None and origin.view is not None:
            last = (origin.back_to // LIGHTWEIGHT_ITERS + 1) * LIGHTWEIGHT_ITERS
        return replace(start, origin=origin, last_iteration=last)

    def _start(self, number: int, variant: Variant, *, load: str | None, save: Path) -> PhaseStart:
        """Return a start; one that is to load nothing loads what the row names, if it does."""
        arguments, last = self._arguments(variant)
        return PhaseStart(
            number=number,
            name=f"phase {number}",
            variant=variant,
            arguments=arguments,
            load=load or self._load or str(self._dirs.no_checkpoint),
            save=save,
            last_iteration=last,
        )

    def _arguments(self, variant: Variant) -> tuple[tuple[Argument, ...], int | None]:
        """Return the arguments with the iteration to stop at, and that iteration.

        Megatron-LM's driver writes both changes into the file; here the file stays as it is.
        """
        arguments, last = variant.arguments, self._case.last_step
        if self._case.mode is CaseMode.INFERENCE:  # it has no iterations
            return arguments, None
        if self._is_lightweight:
            require_stop(self._workload, self._case, "--lightweight")
        if self._case.stop is not None:
            return arguments, None if self._is_lightweight else last
        if not takes_exit_interval(self._workload, arguments):
            return self._key_value_arguments(arguments)
        last = self._case.train_iters_of(variant)
        if self._case.mode is CaseMode.RL:  # it counts samples, and says when to end
            last = self._case.exit_interval or last
        if not self._is_lightweight:
            return with_argument(arguments, "--exit-interval", str(last)), last
        arguments = with_argument(arguments, "--exit-interval", str(LIGHTWEIGHT_ITERS))
        if self._case.test_type in (TestType.CKPT_RESUME, TestType.FROZEN_RESUME):
            arguments = with_argument(arguments, "--save-interval", str(LIGHTWEIGHT_SAVE_INTERVAL))
        return arguments, min(last, LIGHTWEIGHT_ITERS)

    def _key_value_arguments(
        self, arguments: tuple[Argument, ...]
    ) -> tuple[tuple[Argument, ...], int | None]:
        """Return the arguments of a program that is not Megatron-LM's, and its last iteration.

        Megatron Bridge's `train.train_iters` counts as Megatron-LM does; NeMo's `trainer.max_steps`
        logs its steps from another number on, so that its last one is left open.
        """
        short = _short_key(self._workload, arguments) if self._is_lightweight else None
        if short is not None:
            key, steps = short
            return with_argument(
                arguments, key, str(steps)
            ), steps if key == _BRIDGE_ITERS else None
        text = {a.name: a.text for a in arguments}.get(_BRIDGE_ITERS) or ""
        return arguments, int(text) if text.isdecimal() else self._case.last_step


def find_no_checkpoint(origin: Origin) -> str | None:
    """Return what is wrong if the checkpoint to resume from is not there, None if it is."""
    if origin.is_own:
        is_empty = not any(origin.checkpoints.iterdir())
        what = f"{origin.checkpoints} is empty, expected what `save` of resume has it save there"
        return f"{what}; change those words" if is_empty else None
    kept = origin.checkpoints / iteration_name(origin.back_to)
    if kept.is_dir():
        return None
    found = _iterations(origin.checkpoints)
    return (
        f"{origin.checkpoints} has no {kept.name} to resume from, found "
        f"{', '.join(found) or 'no checkpoint'}; set --save-interval to half of --train-iters"
    )


def find_not_saved(directory: Path, iteration: int) -> str | None:
    """Return what is wrong if a phase did not save an iteration, None if it did."""
    if saved_iteration(directory) == iteration:
        return None
    found = _iterations(directory)
    return (
        f"{directory} has no {iteration_name(iteration)} to compare, found "
        f"{', '.join(found) or 'no checkpoint'}; set --save to ${{CHECKPOINT_SAVE_PATH}} and "
        f"--save-interval so that the last iteration is saved"
    )


def saved_iteration(directory: Path) -> int | None:
    """Return the iteration that a directory's tracker names, None where there is none."""
    try:
        text = (directory / TRACKER).read_text().strip()
    except OSError:
        return None
    is_there = text.isdecimal() and (directory / iteration_name(int(text))).is_dir()
    return int(text) if is_there else None


def lay_out(origin: Origin) -> None:
    """Make the directory that a phase loads from show the iteration that it resumes.

    Raises:
        OSError: The directory cannot be written.
    """
    for path in () if origin.drop is None else origin.checkpoints.glob(origin.drop):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if origin.is_own:
        return
    if origin.view is not None:
        name = iteration_name(origin.back_to)
        origin.view.mkdir()
        (origin.view / name).symlink_to((origin.checkpoints / name).resolve())
    write_text_atomically((origin.view or origin.checkpoints) / TRACKER, str(origin.back_to))


def iteration_name(iteration: int) -> str:
    """Return the directory of an iteration's checkpoint."""
    return f"iter_{iteration:07d}"


def require_program(cwd: Path, program: str) -> None:
    """Check a Python program of the project; commands and absolute paths may be elsewhere."""
    if is_missing_program(cwd, program):
        raise LaunchError(
            str(cwd / program),
            "there is no such program, nothing was run; write it, or change the recipe's "
            "training_script_path, which counts from the project's root",
        )


def require_iteration(frozen: Origin) -> None:
    """Check the checkpoint that a frozen start resumes."""
    name = iteration_name(frozen.back_to)
    if (frozen.checkpoints / name).is_dir():
        return
    found = ", ".join(_iterations(frozen.checkpoints)) or "no checkpoint"
    raise LaunchError(
        str(frozen.checkpoints),
        f"there is no frozen checkpoint {name}, found {found}; nothing was run; to make one, train "
        f"the case once as ckpt-resume and copy {name} from the attempt's checkpoints directory",
    )


def require_path(path: Path, *, is_only_one: bool) -> None:
    """Check one path that a frozen-start reads.

    A directory without a tracker may hold anything (a tokenizer, weights of another format); only
    where nothing else is read it must be a checkpoint, since a program that finds none there
    starts from scratch with no more than a warning.
    """
    what = None
    if not path.exists():
        what = "there is no frozen checkpoint"
    elif path.is_dir():
        has_tracker = (path / TRACKER).exists()
        names = _iterations(path)
        if not any(path.iterdir()):
            what = "the directory of the frozen checkpoint is empty"
        elif not has_tracker and (names or is_only_one):
            what = f"the directory of the frozen checkpoint has no {TRACKER}, so nothing is loaded"
    if what is not None:
        raise LaunchError(
            str(path),
            f"{what}; nothing was run; copy the checkpoint there, or let the recipe's "
            f"checkpoint_load_path name the directory that has it",
        )


def _iterations(directory: Path) -> Iterable[str]:
    return sorted(path.name for path in directory.glob("iter_*"))


def command_words(arguments: Iterable[Argument], env: Mapping[str, str], *, file: str) -> list[str]:
    """Return the words that a training program gets for `arguments`.

    A name with a leading dash makes `--flag value`; any other makes `key=value`, as NeMo and
    Megatron Bridge take them.

    Args:
        arguments: In the order of the file.
        env: Values for `${NAME}`.
        file: Named in errors, with the line of the argument.

    Raises:
        CaseError: A value refers to a name that is not set, or has an unmatched quote.
    """
    return [word for a in arguments for word in _words(a, _values(a, env, f"{file}:{a.line}"))]


def with_argument(arguments: Iterable[Argument], name: str, text: str) -> tuple[Argument, ...]:
    """Return `arguments` with `name` set to `text`, in its old place or at the end."""
    kept = list(arguments)
    for index, argument in enumerate(kept):
        if argument.name == name:
            kept[index] = replace(argument, text=text, words=None)
            return tuple(kept)
    return (*kept, Argument(name=name, text=text, line=0))


def substitute(text: str, env: Mapping[str, str], *, where: str) -> str:
    """Replace `${NAME}`, `$NAME` and `${NAME:-default}` in `text`; nothing else of a shell.

    Raises:
        CaseError: A name is not set and has no default, or `text` asks for a command to be run.
    """

    def value_of(match: re.Match[str]) -> str:
        """Return the value of a variable in a text."""
        name = match["braced"] or match["bare"]
        value = env.get(name)
        if match["default"] is not None:
            return value or match["default"]
        if value is None:
            raise CaseError(
                where,
                f"{match[0]} is not set, expected it in ENV_VARS, in the recipe (data_path, "
                f"checkpoint_load_path, data_cache_path) or in the environment; "
                f"export {name}=... or write ${{{name}:-default}}",
            )
        return value

    if _COMMAND_SUBSTITUTION in text:
        raise CaseError(where, f"{text!r} asks a shell to run a command; write its result instead")
    return _REFERENCE.sub(value_of, text)


def references(text: str) -> set[str]:
    """Return the variables that `text` refers to."""
    return {match["braced"] or match["bare"] for match in _REFERENCE.finditer(text)}


def unquote(text: str, *, where: str) -> str:
    """Trim `text` and take one level of quotes and backslashes off, as `xargs` does.

    Words are joined by one blank; inside quotes blanks stay as they are.

    Raises:
        CaseError: A quote has no partner.
    """
    words: list[str] = []
    word: list[str] | None = None
    position = 0
    while position < len(text):
        char = text[position]
        position += 1
        if char.isspace():
            if word is not None:
                words.append("".join(word))
            word = None
            continue
        word = [] if word is None else word
        if char in "\"'":
            end = text.find(char, position)
            if end < 0:
                raise CaseError(where, f"{text!r} has an unmatched {char}; close or escape it")
            word.append(text[position:end])
            position = end + 1
        elif char == "\\" and position < len(text):
            word.append(text[position])
            position += 1
        else:
            word.append(char)
    return " ".join(words if word is None else [*words, "".join(word)])


def _values(argument: Argument, env: Mapping[str, str], where: str) -> list[str] | None:
    """Return the words of an argument's value; None for null."""
    if argument.words is not None:
        joined = " ".join(argument.words)
        return unquote(substitute(joined, env, where=where), where=where).split()
    if argument.text is None:
        return None
    text = unquote(substitute(argument.text, env, where=where), where=where)
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1].split()
    return [text]


def _words(argument: Argument, values: list[str] | None) -> list[str]:
    """Return the words of an argument on the command line."""
    if values == [""]:
        return []  # the harness that we stay compatible with drops such an entry
    if values == ["true"] and not argument.is_text:
        return [argument.name]
    if argument.name.startswith("-"):
        return [argument.name, *(["null"] if values is None else values)]
    return [f"{argument.name}={'null' if values is None else ' '.join(values)}"]
