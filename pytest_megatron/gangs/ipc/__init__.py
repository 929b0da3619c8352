"""Channel and messages between controller, agents and ranks."""
