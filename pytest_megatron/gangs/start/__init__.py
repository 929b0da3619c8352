"""Start of rank processes: environment, mode, preload, fork server."""
