"""Start of rank processes: environment, mode, preload, template."""
