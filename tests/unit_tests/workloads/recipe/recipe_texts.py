"""Small recipes for the tests of this directory, read from text."""

from __future__ import annotations

from pathlib import Path

from pytest_megatron.base.yaml import parse_document
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.load import Loaded, load_document

HEAD = """\
type: basic
format_version: 1
spec:
  model: gpt
  gpus: 8
  platforms: dgx_a100
  training_script_path: train.py
"""


def read(text: str, profile: str = "strict") -> Loaded:
    """Read a recipe; one that starts with `products:` gets a usual head of seven lines."""
    whole = HEAD + text if text.startswith("products:") else text
    return load_document(parse_document(whole, Path("r.yaml")), Profile(profile))
