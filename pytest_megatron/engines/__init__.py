"""Engines that run workloads: local, Docker, Slurm."""
