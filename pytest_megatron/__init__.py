"""A pytest plugin and GPU test harness for distributed tests and training workloads.

Importing this package imports nothing else: pytest loads it at every start.
"""

from __future__ import annotations
