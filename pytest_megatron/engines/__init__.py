"""Engines that run workloads elsewhere: Docker, Slurm."""
