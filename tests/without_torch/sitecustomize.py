"""Makes a host without torch of this one, for interpreters that have this folder on PYTHONPATH."""

from __future__ import annotations

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
