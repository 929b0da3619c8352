"""The process that forks ranks, and its stores."""
