"""Execution of a plan on this host, and its log watch."""
