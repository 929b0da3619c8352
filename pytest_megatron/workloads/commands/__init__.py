"""Commands about recipes and goldens."""
