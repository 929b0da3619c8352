"""Reproduction of an item of an earlier run."""
