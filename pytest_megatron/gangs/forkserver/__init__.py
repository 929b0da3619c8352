"""Agent, the process that starts ranks, and its stores."""
