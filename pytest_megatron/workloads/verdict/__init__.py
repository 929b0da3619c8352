"""Attempts, retries and the verdict of a workload."""
