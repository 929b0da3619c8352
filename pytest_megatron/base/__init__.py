"""Files, git, text, YAML and project settings: no knowledge of ranks or workloads."""
