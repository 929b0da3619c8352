"""Stand-ins for commands that recipe scripts expect."""
