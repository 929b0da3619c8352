"""Finds how a project starts distributed tests today, and changes it to pytest-megatron."""
