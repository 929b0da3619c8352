"""From measured metrics to committed goldens."""
