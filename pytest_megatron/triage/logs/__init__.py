"""Readers of log lines, tracebacks and exits."""
