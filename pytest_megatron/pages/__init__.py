"""Pages of runs for a browser: curves of each workload, an index of each run, pictures."""
