"""Gangs over several nodes."""
