"""Modules of the standard library as they were before any test could patch them.

A test may replace `time.monotonic`, `os.getpid` or `json.dumps`, with `monkeypatch`, with freezegun
or permanently. Code that runs in ranks beside tests must keep working, so it imports these modules
from here: copies of their names, made when pytest loads the plugin.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import sys
import threading
import time
import traceback
from types import SimpleNamespace
from typing import TYPE_CHECKING

__all__ = ["json", "mmap", "os", "select", "socket", "threading", "time", "traceback"]

if not TYPE_CHECKING:
    for _name in __all__:
        globals()[_name] = SimpleNamespace(**vars(sys.modules[_name]))
