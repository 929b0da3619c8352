"""Checks of a row and its case before a start."""
