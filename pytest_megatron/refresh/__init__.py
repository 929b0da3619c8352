"""From what a run measured to committed goldens: gate, difference, review, and a safe write."""
