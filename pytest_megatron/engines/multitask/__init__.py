"""Jobs of several Slurm tasks that run one training."""
