"""Golden files and the metrics files of runs: where they lie, reading, writing (effects: files).

The formats are in `formats/`; nothing is compared here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import (
    read_bytes,
    write_json_atomically,
    write_text_atomically,
)
from pytest_megatron.base.project import load_config
from pytest_megatron.errors import GoldenError, MetricsError
from pytest_megatron.golden.formats.jsonlines import read_json_lines
from pytest_megatron.golden.formats.layout import PROVENANCE_KEY, Form, lay_out
from pytest_megatron.golden.formats.metric_map import metrics_to_json, parse_document
from pytest_megatron.golden.formats.tensorboard import read_tensorboard
from pytest_megatron.golden.model import (
    AS_BLOCK,
    Golden,
    MetricMap,
    MetricsFile,
    Observed,
    Provenance,
    find_not_finite,
    generation_to_json,
    is_finite,
    parse_provenance,
    provenance_to_json,
)
from pytest_megatron.recipe.case import CASES, GOLDEN_PREFIX, GOLDENS, golden_name, golden_paths
from pytest_megatron.recipe.model import Workload


def golden_path(root: Path, workload: Workload) -> Path:
    """Return the golden of a workload under the repository `root`; it need not exist.

    Of the places and names that it may have (`golden_paths`) the first that exists, else the
    first of all.

    Raises:
        ConfigError: The project's settings are wrong.
    """
    places = golden_paths(root, workload, load_config(root).golden_platforms)
    return next((place for place in places if place.is_file()), places[0])


def new_golden_path(root: Path, workload: Workload) -> Path:
    """Return where a golden of the workload is written: always our place, under its own name.

    A golden elsewhere may be read by others, so it stays; the new one comes before it.
    """
    return golden_paths(root, workload)[0]


def project_form(root: Path) -> Form:
    """Return how the project wants its goldens laid out.

    Raises:
        ConfigError: The project's settings are wrong.
    """
    return Form(load_config(root).golden_form)


def read_golden(path: Path) -> Golden:
    """Read a golden file in any of the forms that Megatron-LM's repository holds.

    Raises:
        GoldenError: There is no such file, or it is not a golden; the text names what it is
            instead, with line and column where the JSON is broken.
    """
    return parse_golden(read_text(path), str(path))


def parse_golden(text: str, where: str) -> Golden:
    """Return the golden in a text, wherever that is from: a file, a commit.

    Raises:
        GoldenError: As from `read_golden`; `where` names the place.
    """
    document = parse_document(text, where)
    provenance = document.provenance
    return Golden(
        path=where,
        metrics=document.metrics,
        provenance=None if provenance is None else parse_provenance(provenance, where),
        notes=document.notes,
        generation=document.generation,
    )


def golden_text(golden: Golden, form: Form = Form.COMPACT) -> str:
    """Return the text of a golden's file, whichever kind it is; it must have a provenance.

    Of a training: metrics sorted, steps ascending, full precision, `_provenance` last. Of an
    inference program: the keys that such a program writes, and `_provenance`.

    Raises:
        GoldenError: There is no metric, a metric has no value, or a value is not a finite number;
            `golden.path` names the place.
    """
    assert golden.provenance is not None
    provenance = provenance_to_json(golden.provenance)
    if golden.generation is not None:
        if problem := find_not_finite(golden.generation):
            raise GoldenError(golden.path, f"{problem}; not written")
        document = generation_to_json(golden.generation)
        document[PROVENANCE_KEY] = provenance
        return lay_out(document, form)
    if not golden.metrics:
        raise GoldenError(golden.path, "no metric to write")
    for name, series in sorted(golden.metrics.items()):
        if not len(series):
            raise GoldenError(golden.path, f"{name} has no value; not written")
        for step, value in series.items():
            if not is_finite(value):
                raise GoldenError(
                    golden.path, f"{name}, step {step}: {value!r} is not finite; not written"
                )
    document = metrics_to_json(golden.metrics)
    document[PROVENANCE_KEY] = dict(AS_BLOCK) | provenance
    return lay_out(document, form)


def write_golden(
    path: Path, metrics: MetricMap, provenance: Provenance, form: Form = Form.COMPACT
) -> None:
    """Write a golden of a training, see `golden_text`.

    The directory must exist. A reader sees the old file or the new one, whole.

    Raises:
        GoldenError: There is no metric, a metric has no value, or a value is not a finite number.
        OSError: As from `write_text_atomically`; the old file is as it was.
    """
    golden = Golden(path=str(path), metrics=metrics, provenance=provenance)
    write_text_atomically(path, golden_text(golden, form))


def write_metrics(path: Path, metrics: MetricMap) -> None:
    """Write the metrics of a run (`metrics.json`); nan, inf, text and missing stay apart."""
    write_json_atomically(path, metrics_to_json(metrics))


def read_metrics(path: Path) -> Observed:
    """Read the metrics of a run: TensorBoard files, a `.jsonl` file or a metric map.

    A directory is read as TensorBoard's; it must belong to one attempt.

    Raises:
        MetricsError: There is nothing of the kind, nothing in it, or it is damaged.
    """
    if path.is_dir() or "tfevents" in path.name:
        return read_tensorboard(path)
    if path.suffix == ".jsonl":
        return read_json_lines(path)
    try:
        document = parse_document(read_text(path), str(path))
    except GoldenError as error:
        raise MetricsError(error.where, error.problem) from error
    return Observed(
        metrics=document.metrics,
        files=(MetricsFile(path=str(path), num_records=len(document.metrics)),),
        notes=document.notes,
        generation=document.generation,
    )


def read_text(path: Path) -> str:
    """Return the text of a golden or metrics file.

    Raises:
        GoldenError: There is no such file, or it is no text.
    """
    try:
        return read_bytes(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise GoldenError(str(path), "no such file") from None
    except OSError as error:
        raise GoldenError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GoldenError(str(path), f"not UTF-8 text, at byte {error.start}") from error


PATTERN = f"{GOLDEN_PREFIX}*.json"
_SECOND_RUN = "_2nd"
_TREES = (GOLDENS, CASES)
_DEPTH = 3  # model, test case, file


@dataclass(frozen=True, slots=True)
class GoldenOwner:
    """The workload of a golden file, by its place and name.

    Attributes:
        tree: `golden_values`, or the directory of the test cases.
        platform: As the file calls it; empty in a file that names none.
        is_second_run: True if the name ends in `_2nd`.
    """

    tree: Path
    model: str
    test_case: str
    environment: str
    platform: str
    is_second_run: bool

    def moved(self, tree: Path, other_names: Mapping[str, str]) -> Path:
        """Return the path, below the project, in another tree and with the platform's own name."""
        platform = other_names.get(self.platform, self.platform)
        return tree / self.model / self.test_case / golden_name(self.environment, platform)


def parse_name(name: str, environments: Collection[str]) -> tuple[str, str, bool] | None:
    """Return environment, platform and whether it is of a second run; None for another name."""
    stem = name.removesuffix(".json")
    if stem == name or not stem.startswith(f"{GOLDEN_PREFIX}_"):
        return None
    is_second_run = stem.endswith(_SECOND_RUN)
    words = stem.removeprefix(f"{GOLDEN_PREFIX}_").removesuffix(_SECOND_RUN)
    for environment in sorted(environments, key=len, reverse=True):
        if words == environment:
            return environment, "", is_second_run
        if words.startswith(f"{environment}_"):
            return environment, words.removeprefix(f"{environment}_"), is_second_run
    return None


def place_of(path: Path, root: Path, environments: Collection[str]) -> GoldenOwner | None:
    """Return the owner of the golden file `path`; None for another place or name."""
    owner = owner_of(path, root)
    found = parse_name(path.name, environments)
    if owner is None or found is None:
        return None
    return GoldenOwner(*owner, *found)


def owner_of(path: Path, root: Path) -> tuple[Path, str, str] | None:
    """Return tree, model and test case of a file in its right place, whatever its name."""
    tree = tree_of(path, root)
    if tree is None:
        return None
    parts = path.absolute().relative_to(root.absolute() / tree).parts
    return (tree, parts[0], parts[1]) if len(parts) == _DEPTH else None


def tree_of(path: Path, root: Path) -> Path | None:
    """Return the tree, relative to the project's `root`, that a path is below; None elsewhere."""
    absolute = path.absolute()
    return next((tree for tree in _TREES if absolute.is_relative_to(root.absolute() / tree)), None)
