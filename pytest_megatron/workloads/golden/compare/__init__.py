"""Comparison of observed series with golden ones."""
