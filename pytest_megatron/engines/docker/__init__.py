"""Docker engine: driver process, client, containers."""
