"""Start of a Python program of a recorded test: records it, then loads what it hides."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load(name: str, path: str) -> None:
    """Import a module from a file, under a name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _load_hidden() -> None:
    """Load the environment's own `sitecustomize`, as Python would have."""
    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.origin is not None:
        _load("sitecustomize", spec.origin)


_load("_megatron_changed_watch", os.path.join(os.path.dirname(_HERE), "watch.py"))
sys.modules["_megatron_changed_watch"].start_from_environment()
_load_hidden()
