"""Guarded processes and process trees."""
