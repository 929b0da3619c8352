"""Traces of a training's tensors, and their comparison."""
