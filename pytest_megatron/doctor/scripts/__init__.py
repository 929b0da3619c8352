"""Programs that probes run in processes of their own."""
