"""Slurm engine: submissions, journal, job states, scripts."""
