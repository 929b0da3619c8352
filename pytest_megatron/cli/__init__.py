"""The `pytest-megatron` command: one module a subcommand, each thin."""

from __future__ import annotations
