"""Layouts tried without GPUs: single ranks on fake process groups, compared with one another."""
