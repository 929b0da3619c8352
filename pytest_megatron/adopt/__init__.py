"""Launched tests of a project: found, replaced, compared."""
