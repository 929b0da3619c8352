"""Modules of kernels."""
