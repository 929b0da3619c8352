"""Checks of committed golden files."""
