"""Checks of facts that probes found."""
