"""Training workloads: plan, checks, execution."""
