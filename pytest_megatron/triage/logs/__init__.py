"""Readers of log lines, tracebacks, exits and flight records."""
