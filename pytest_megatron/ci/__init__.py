"""What CI runs: labels and events to a scope, rows and test files to jobs."""
