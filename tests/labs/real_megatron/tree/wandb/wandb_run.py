"""The one name that a type hint of a program of reinforcement learning takes from here."""


class Run:
    """Nothing."""
