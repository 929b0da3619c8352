"""Processes: how they start, are guarded and end, and the messages between them."""
