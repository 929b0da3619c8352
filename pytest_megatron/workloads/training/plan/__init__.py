"""The plan of an attempt: argv, environment, phases, checkpoints."""
