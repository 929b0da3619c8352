"""Process that starts ranks, and its stores."""
