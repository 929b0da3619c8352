"""Search for the commit that made an item fail."""
