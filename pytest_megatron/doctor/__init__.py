"""Diagnosis of an environment."""
