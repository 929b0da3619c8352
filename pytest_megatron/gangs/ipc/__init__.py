"""Channel and messages between controller, fork servers and ranks."""
