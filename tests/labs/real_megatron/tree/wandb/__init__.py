"""Nothing: train_rl.py imports wandb and, without a project, does not use it."""
