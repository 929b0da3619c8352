"""Training workloads: recipes, cases, goldens, trainings and their verdicts."""
