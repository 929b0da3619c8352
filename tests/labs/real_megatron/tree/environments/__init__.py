"""Environments of reinforcement learning."""
