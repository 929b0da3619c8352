"""Rows of recipes as an earlier session expanded them, in pytest's cache directory.

To expand 10,000 rows takes a second, to load them a tenth of that. A file of this cache runs code
when it is loaded, as a compiled Python file does, and is trusted as those are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import pickle
from pathlib import Path
from typing import cast

from pytest_megatron.base.files import write_bytes_atomically
from pytest_megatron.workloads.recipe.model import Vocabulary, Workload

_log = logging.getLogger(__name__)
_PACKAGE = Path(__file__).parents[2]


def rows_of(path: Path, words: Vocabulary, directory: Path | None) -> tuple[Workload, ...]:
    """Return the workloads of a recipe file without errors.

    Those of the same text, words and code are taken from `directory`, and kept there otherwise.

    Raises:
        RecipeError: The file cannot be read, or has an error.
    """
    kept = key = None
    if directory is not None:
        kept = directory / hashlib.sha256(os.fsencode(path.absolute())).hexdigest()
        with contextlib.suppress(OSError):  # `load_recipe` says why a recipe cannot be read
            key = _key(path, words)
            digest, content = (found := kept.read_bytes())[:32], found[32:]
            if hashlib.sha256(key + content).digest() == digest:
                return cast("tuple[Workload, ...]", pickle.loads(content))  # noqa: S301 - trusted as compiled Python
    from pytest_megatron.workloads.recipe.load import load_recipe  # noqa: PLC0415 - pydantic

    rows = load_recipe(path, vocabulary=words)
    # A row in the short form holds its document, whose lines hang on the identity of its parts.
    if kept is not None and key is not None and all(row.own_case is None for row in rows):
        content = pickle.dumps(rows, pickle.HIGHEST_PROTOCOL)
        try:
            if key == _key(path, words):  # the text that was read
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_bytes_atomically(kept, hashlib.sha256(key + content).digest() + content)
        except OSError as error:
            _log.debug("rows of %s are not kept: %s", path, error)
    return rows


def _key(path: Path, words: Vocabulary) -> bytes:
    """Return the digest of everything that rows are made of, the code that reads them included."""
    known = [sorted(getattr(words, name)) for name in Vocabulary.__slots__]
    facts = repr((str(path), known, _code())).encode()
    return hashlib.sha256(facts + path.read_bytes()).digest()


@functools.cache
def _code() -> tuple[tuple[str, int, int], ...]:
    """Return path, time and size of the files that this process reads recipes with."""
    files = [f for name in ("base", "workloads/recipe") for f in (_PACKAGE / name).glob("*.py")]
    specs = map(importlib.util.find_spec, ("yaml", "pydantic"))
    files += [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    return tuple((str(f), (at := f.stat()).st_mtime_ns, at.st_size) for f in sorted(files))
