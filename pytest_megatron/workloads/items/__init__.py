"""Workloads as pytest items."""
