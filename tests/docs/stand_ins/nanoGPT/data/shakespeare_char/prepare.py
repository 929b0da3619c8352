"""Stands in for the download of a text, which becomes tokens."""

import pathlib

pathlib.Path(__file__).with_name("train.bin").write_bytes(b"First Citizen: before we proceed")
print("train has 32 tokens")
