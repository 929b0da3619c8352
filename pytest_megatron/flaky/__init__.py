"""Items that fail by chance: their history, and quarantine."""
