"""Engines of workloads: what an engine is, and the local one."""
