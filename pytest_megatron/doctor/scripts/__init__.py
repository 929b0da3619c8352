"""Programs that run under the Python of the environment; standard library and torch only."""
