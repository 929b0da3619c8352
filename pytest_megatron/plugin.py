"""The `pytest11` entry point: registers the plugin's options and its role plugins.

Runs at every pytest start, also of people who never use us: must import nothing heavy (no torch,
no pydantic, no yaml) and change nothing while none of our options is given.
"""

from __future__ import annotations
